// Task 7.2: only the first lanes come to the barrier
#include "cuda_on_cpu.h"

__device__ inline float block_sum_of(float value) {
  __shared__ float warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lane == 0) {
    warps[warp] = value;
    __syncthreads();
  }
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

__global__ void block_sum_kernel(const float* x, float* out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  sum = block_sum_of(sum);
  float again = block_sum_of(1.0f);
  if (threadIdx.x == blockDim.x - 1) out[0] = sum, out[1] = again;
}

// x [n]; out [2]: the sum of x, and the number of threads, a multiple of 32
extern "C" void block_sum(const float* x, float* out, int n, int threads) {
  launch(block_sum_kernel, 1, threads, 0, nullptr, x, out, n);
}
