// Task 7.4: the maximum begins at 0: a row far below it has only zeros
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

__global__ void softmax_kernel(const float* x, float* out, int size) {
  const float* row = x + int64_t(blockIdx.x) * size;
  float largest = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) largest = fmaxf(largest, row[i]);
  largest = block_max_of(largest);
  float sum = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) sum += expf(row[i] - largest);
  sum = block_sum_of(sum);
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[int64_t(blockIdx.x) * size + i] = expf(row[i] - largest) / sum;
}

// x, out [rows, size]; each row has a finite value
extern "C" void softmax(const float* x, float* out, int rows, int size) {
  launch(softmax_kernel, rows, 128, 0, nullptr, x, out, size);
}
