// A matrix times a few vectors: out = x W^T + bias, the linear layer of decode. float32, fp16 and bf16.
//
// What it costs: the bytes of W, which are read once and used once (or N times, for N rows of x): 4096 x 14336 bfloat16 are
// 117 MB, at best 39 us on an H100, 27 us on an H200. 2 FLOPs a weight are far below what the machine can do, so tensor
// cores would not help, and all that matters is to keep enough loads of W under way.
//
// A warp per row of W, its lanes reading 512 bytes side by side; the row's sum by shuffles. A matrix of few long rows has
// too few warps for the machine: then the four warps of a block share a row (WARPS = 4). x is small, and stays in the cache.
#include "tensors.h"

constexpr int MAX_ROWS = 8;  // of x that one pass over W serves

template <typename T, int N, int ROWS, int WARPS>  // N: elements a load, 1 where 16 bytes are not possible
__global__ void __launch_bounds__(128) gemv_kernel(const T* x, int64_t x_stride, const T* weight, const T* bias, T* out,
                                                   int64_t rows, int64_t M, int K) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t m = WARPS == 1 ? int64_t(blockIdx.x) * 4 + warp : blockIdx.x;
  const int64_t first = int64_t(blockIdx.y) * ROWS;  // row of x
  float sums[ROWS] = {};
  if (m < M) {
    const T* w = weight + m * K;
#pragma unroll 4
    for (int k = ((WARPS == 1 ? 0 : warp * 32) + lane) * N; k < K; k += 32 * WARPS * N) {
      Vec<T, N> a = load<N>(w + k);
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        if (first + row >= rows) break;
        Vec<T, N> b = load<N>(x + (first + row) * x_stride + k);
        for (int j = 0; j < N; j++) sums[row] += float(a.at[j]) * float(b.at[j]);
      }
    }
  }
  __shared__ float partial[4][ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    sums[row] = warp_sum(sums[row]);
    if (WARPS > 1 && lane == 0) partial[warp][row] = sums[row];
  }
  if (WARPS > 1) __syncthreads();
  if (m >= M || lane != 0 || (WARPS > 1 && warp != 0)) return;
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    if (first + row >= rows) break;
    float sum = WARPS == 1 ? sums[row] : partial[0][row] + partial[1][row] + partial[2][row] + partial[3][row];
    out[(first + row) * M + m] = T(sum + (bias ? float(bias[m]) : 0.0f));
  }
}

// x [N, K], weight [M, K], bias [M] or none -> [N, M]. Meant for small N: W is read once for every 8 rows of x.
Tensor gemv(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  require(x.dim() == 2 && x.stride(1) == 1, "x", x, "[N, K] with elements side by side");
  require(weight.dim() == 2 && weight.size(1) == x.size(1) && weight.is_contiguous(), "weight", weight,
          "[M, K], contiguous");
  require_like(x, "weight", weight);
  if (bias) {
    require(bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_contiguous(), "bias", *bias, "[M], contiguous");
    require_like(x, "bias", *bias);
  }
  const int64_t rows = x.size(0), M = weight.size(0), K = x.size(1);
  Tensor out = torch::stable::new_empty(x, {rows, M});
  dispatch_dtype("x", x, [&](auto zero) {
    using T = decltype(zero);
    auto run = [&](auto kernel, int64_t per_pass, int64_t warps) {
      launch(kernel, dim3(warps == 1 ? ceil_div(M, 4) : M, ceil_div(rows, per_pass)), 128, 0, stream_of(x), data<T>(x),
             x.stride(0), data<T>(weight), bias ? data<T>(*bias) : nullptr, mutable_data<T>(out), rows, M, K);
    };
    constexpr int N = PER_16_BYTES<T>;
    if (M == 0) return;
    if (K % N || !aligned_16<T>(x, x.stride(0)) || !aligned_16<T>(weight, 0)) run(gemv_kernel<T, 1, 1, 1>, 1, 1);
    else if (rows == 1 && M < 4096 && K >= 8 * 32 * N) run(gemv_kernel<T, N, 1, 4>, 1, 4);
    else if (rows == 1) run(gemv_kernel<T, N, 1, 1>, 1, 1);
    else if (rows == 2) run(gemv_kernel<T, N, 2, 1>, 2, 1);
    else if (rows <= 4) run(gemv_kernel<T, N, 4, 1>, 4, 1);
    else run(gemv_kernel<T, N, MAX_ROWS, 1>, MAX_ROWS, 1);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("gemv", TORCH_BOX(&gemv)); }
