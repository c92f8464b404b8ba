// Residual add and RMSNorm: out = h / sqrt(mean(h^2) + eps) * weight with h = x, or h = x + residual, which is kept too.
// Paper: Zhang & Sennrich 2019. Sums are taken in float32 whatever the dtype.
//
// What it costs: bytes. A row is read once and written once, 2 D bytes each way in bfloat16 (with the residual add: two
// rows in, two rows out), and a few operations an element. 8192 x 4096 bfloat16 without the add are 134 MB: at best 45 us
// on an H100 (3.35 TB/s by its datasheet), 31 us on an H200 (4.8 TB/s).
//
// version 1: a thread per row. Neighbouring threads read addresses a whole row apart, so each load of a warp touches 32
//            lines of 128 bytes and uses 2 bytes of each. And 8192 rows are 8192 threads where the GPU could hold 270,000.
// version 2: a block per row. Neighbouring threads read neighbouring elements (coalesced), and the block adds up through
//            shared memory, a tree with a barrier per level. The row is read a second time to be scaled.
// version 3: the same, but 16 bytes per load, the row kept in registers between its two uses, and the sum by warp shuffles:
//            two barriers instead of nine.
#include "tensors.h"

template <typename T, bool ADD>
__global__ void rms_norm_row_per_thread(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                                        const T* weight, T* out, T* sum, int64_t rows, int D, float eps) {
  int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float squares = 0;
  for (int i = 0; i < D; i++) {
    T h = x[row * x_stride + i];
    if (ADD) h = sum[row * D + i] = T(float(h) + float(residual[row * residual_stride + i]));
    squares += float(h) * float(h);
  }
  float scale = rsqrtf(squares / D + eps);
  for (int i = 0; i < D; i++) {
    T h = ADD ? sum[row * D + i] : x[row * x_stride + i];
    out[row * D + i] = T(float(h) * scale * float(weight[i]));
  }
}

template <typename T, bool ADD>
__global__ void rms_norm_block_per_row(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                                       const T* weight, T* out, T* sum, int D, float eps) {
  __shared__ float partial[256];  // blockDim.x = 256
  int64_t row = blockIdx.x;
  float squares = 0;
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    T h = x[row * x_stride + i];
    if (ADD) h = sum[row * D + i] = T(float(h) + float(residual[row * residual_stride + i]));
    squares += float(h) * float(h);
  }
  partial[threadIdx.x] = squares;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  float scale = rsqrtf(partial[0] / D + eps);
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    T h = ADD ? sum[row * D + i] : x[row * x_stride + i];
    out[row * D + i] = T(float(h) * scale * float(weight[i]));
  }
}

template <typename T, bool ADD, int VECTORS>  // vectors of 16 bytes that a thread holds
__global__ void rms_norm_in_registers(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                                      const T* weight, T* out, T* sum, int D, float eps) {
  constexpr int N = PER_16_BYTES<T>;
  int64_t row = blockIdx.x;
  Vec<T, N> h[VECTORS];
  float squares = 0;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    int i = (v * blockDim.x + threadIdx.x) * N;
    if (i >= D) break;
    h[v] = load<N>(x + row * x_stride + i);
    if (ADD) {
      Vec<T, N> r = load<N>(residual + row * residual_stride + i);
      for (int j = 0; j < N; j++) h[v].at[j] = T(float(h[v].at[j]) + float(r.at[j]));
      store(sum + row * D + i, h[v]);
    }
    for (int j = 0; j < N; j++) squares += float(h[v].at[j]) * float(h[v].at[j]);
  }
  float scale = rsqrtf(block_sum(squares) / D + eps);
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    int i = (v * blockDim.x + threadIdx.x) * N;
    if (i >= D) break;
    Vec<T, N> w = load<N>(weight + i);
    for (int j = 0; j < N; j++) h[v].at[j] = T(float(h[v].at[j]) * scale * float(w.at[j]));
    store(out + row * D + i, h[v]);
  }
}

template <typename T, bool ADD>
void launch_rms_norm(const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor& out, const Tensor* sum,
                     float eps, int64_t version) {
  const int64_t rows = x.size(0), D = x.size(1), stride = x.stride(0);
  const T* added = ADD ? data<T>(*residual) : nullptr;
  const int64_t added_stride = ADD ? residual->stride(0) : 0;
  T* kept = ADD ? mutable_data<T>(*sum) : nullptr;
  auto run = [&](auto kernel, int64_t blocks, int64_t threads, auto... sizes) {
    launch(kernel, blocks, threads, 0, stream_of(x), data<T>(x), stride, added, added_stride, data<T>(weight),
           mutable_data<T>(out), kept, sizes..., D, eps);
  };
  if (version == 1) return run(rms_norm_row_per_thread<T, ADD>, ceil_div(rows, 256), 256, rows);

  const int64_t vectors = D / PER_16_BYTES<T>;
  const bool aligned = D % PER_16_BYTES<T> == 0 && aligned_16<T>(x, stride) && aligned_16<T>(weight, 0) &&
                       (!ADD || aligned_16<T>(*residual, added_stride));
  if (version == 2 || !aligned || vectors > 8 * 1024) return run(rms_norm_block_per_row<T, ADD>, rows, 256);

  auto threads = [&](int64_t per_thread) { return ceil_div(ceil_div(vectors, per_thread), 32) * 32; };
  if (threads(1) <= 256) return run(rms_norm_in_registers<T, ADD, 1>, rows, threads(1));
  if (threads(2) <= 256) return run(rms_norm_in_registers<T, ADD, 2>, rows, threads(2));
  if (threads(4) <= 256) return run(rms_norm_in_registers<T, ADD, 4>, rows, threads(4));
  return run(rms_norm_in_registers<T, ADD, 8>, rows, threads(8));
}

void check_rms_norm(const Tensor& x, const Tensor& weight, int64_t version) {
  require(x.dim() == 2 && x.stride(1) == 1, "x", x, "[N, D] with elements side by side");
  require(weight.dim() == 1 && weight.size(0) == x.size(1) && weight.stride(0) == 1, "weight", weight, "[D], contiguous");
  require_like(x, "weight", weight);
  require(version >= 1 && version <= 3, "version", version, "1, 2 or 3");
}

// x [N, D], weight [D] -> [N, D]
Tensor rms_norm(Tensor x, Tensor weight, double eps, int64_t version) {
  check_rms_norm(x, weight, version);
  Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  dispatch_dtype("x", x, [&](auto zero) {
    launch_rms_norm<decltype(zero), false>(x, nullptr, weight, out, nullptr, eps, version);
  });
  return out;
}

// x, residual [N, D], weight [D] -> (rms_norm(x + residual), x + residual)
std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps, int64_t version) {
  check_rms_norm(x, weight, version);
  require(residual.dim() == 2 && residual.size(0) == x.size(0) && residual.size(1) == x.size(1) &&
          residual.stride(1) == 1, "residual", residual, "like x");
  require_like(x, "residual", residual);
  Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  Tensor sum = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  dispatch_dtype("x", x, [&](auto zero) {
    launch_rms_norm<decltype(zero), true>(x, &residual, weight, out, &sum, eps, version);
  });
  return {out, sum};
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
}
