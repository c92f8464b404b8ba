// Task 7.3: threads without an element leave before the barrier
#include "cuda_on_cpu.h"

__device__ inline float block_sum_of(float value) {
  __shared__ float warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warps[lane] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();
  return value;
}

__device__ inline float block_max_of(float value) {
  __shared__ float warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warps[lane] : -INFINITY;
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  __syncthreads();
  return value;
}

__global__ void rms_norm_kernel(const float* x, const float* weight, float* out, int size, float eps) {
  const float* row = x + int64_t(blockIdx.x) * size;
  if (threadIdx.x >= size) return;
  float squares = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) squares += row[i] * row[i];
  const float scale = rsqrtf(block_sum_of(squares) / size + eps);
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[int64_t(blockIdx.x) * size + i] = row[i] * scale * weight[i];
}

// x, out [rows, size]; weight [size]
extern "C" void rms_norm(const float* x, const float* weight, float* out, int rows, int size, float eps) {
  launch(rms_norm_kernel, rows, 128, 0, nullptr, x, weight, out, size, eps);
}
