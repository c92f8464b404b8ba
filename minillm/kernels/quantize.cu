// Quantise per token (step 8): each row to int8 codes and one scale, what W8A8 does to the activations of every layer.
// Paper: Dettmers et al. 2022 (LLM.int8(), absmax); Yao et al. 2022 (ZeroQuant, per token and dynamic).
//
// What it costs: bytes. A row is read twice (its largest magnitude must be known before its first code), the second time
// from the cache; 1 byte an element is written. 8192 x 4096 bfloat16: 101 MB, at best 30 us on an H100, 21 us on an H200.
//
// A block per row; 16 bytes a load. Each warp finds its largest by shuffles, and the warps exchange theirs.
#include "int8.h"

template <typename T, int N>  // N: elements a load, 1 where 16 bytes are not possible
__global__ void __launch_bounds__(256) quantize_kernel(const T* x, int64_t stride, int8_t* codes, float* scales, int64_t D) {
  __shared__ float warps[8];
  const T* in = x + blockIdx.x * stride;
  float largest = 0;
  for (int64_t i = threadIdx.x * N; i < D; i += blockDim.x * N) {
    Vec<T, N> piece = load<N>(in + i);
    for (int j = 0; j < N; j++) largest = absmax(largest, float(piece.at[j]));
  }
  largest = warp_absmax(largest);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int w = 0; w < 8; w++) largest = absmax(largest, warps[w]);
  const float scale = scale_for(largest);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;

  for (int64_t i = threadIdx.x * N; i < D; i += blockDim.x * N) {
    Vec<T, N> piece = load<N>(in + i);
    Vec<int8_t, N> out;
    for (int j = 0; j < N; j++) out.at[j] = code_of(float(piece.at[j]), scale);
    store(codes + blockIdx.x * D + i, out);
  }
}

// x [N, D] -> codes [N, D] int8, scale [N] float32; x is about codes * scale
std::tuple<Tensor, Tensor> quantize(Tensor x) {
  require(x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1), "x", x, "[N, D] with elements side by side");
  const int64_t rows = x.size(0), D = x.size(1);
  Tensor codes = torch::stable::new_empty(x, {rows, D}, ScalarType::Char);
  Tensor scale = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  dispatch_dtype("x", x, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = PER_16_BYTES<T>;
    auto run = [&](auto kernel) {
      launch(kernel, rows, 256, 0, stream_of(x), data<T>(x), x.stride(0), mutable_data<int8_t>(codes),
             mutable_data<float>(scale), D);
    };
    if (D % N == 0 && aligned_16<T>(x, x.stride(0))) run(quantize_kernel<T, N>);
    else run(quantize_kernel<T, 1>);
  });
  return {codes, scale};
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("quantize", TORCH_BOX(&quantize)); }
