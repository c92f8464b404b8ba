// Correct kernels, which nothing may complain about. Each leaves 1 in out[0] if its result is right. out has 64 floats.
#include "cuda_on_cpu.h"

constexpr uint32_t FULL = 0xffffffffu;

__global__ void loops(float* out) {
  __shared__ float part[64];
  float sum = 0;
  for (int i = 0; i < 5; i++) {
    part[threadIdx.x] = i;
    __syncthreads();
    sum += part[63 - threadIdx.x];
    __syncthreads();
  }
  out[threadIdx.x] = sum == 10;
}
extern "C" void barriers_in_a_loop(float* out) { launch(loops, 3, 64, 0, nullptr, out); }

__global__ void halves(float* out) {  // two halves of a warp, each with a mask of its own, one of them twice as often
  uint32_t mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
  int sum = threadIdx.x;
  for (int round = 0; round < (threadIdx.x < 16 ? 1 : 2); round++) {
    sum = threadIdx.x;
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(mask, sum, offset, 16);
  }
  out[threadIdx.x] = sum == (threadIdx.x < 16 ? 120 : 376);
}
extern "C" void masks_of_half_a_warp(float* out) { launch(halves, 1, 32, 0, nullptr, out); }

__global__ void exchange(float* out) {
  __shared__ float part[64];
  const int other = threadIdx.x ^ 31;
  for (int i = 0; i < 3; i++) {
    part[threadIdx.x] = threadIdx.x + i;
    __syncwarp();
    out[threadIdx.x] = part[other] == other + i;
    __syncwarp();
  }
}
extern "C" void exchange_within_a_warp(float* out) { launch(exchange, 2, 64, 0, nullptr, out); }

__global__ void add(int* count) { atomicAdd(count, 1); }
extern "C" void atomics(float* out) {
  int count = 0;
  launch(add, 50, 64, 0, nullptr, &count);
  out[0] = count == 3200;
}

__global__ void early(float* out, int n) {
  if (int(threadIdx.x) >= n) return;
  out[threadIdx.x] = 1;
}
extern "C" void return_without_later_barriers(float* out) { launch(early, 1, 96, 0, nullptr, out, 64); }

__global__ void early_lanes(float* out) {  // lanes that have returned are not waited for
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = __shfl_sync(FULL, float(threadIdx.x), 3) == 3;
}
extern "C" void shuffle_after_some_returned(float* out) { launch(early_lanes, 1, 32, 0, nullptr, out); }

__global__ void cube(float* out) {
  float* sum = dynamic_shared<float>();
  if (threadIdx.x + threadIdx.y + threadIdx.z == 0) sum[0] = 0;
  __syncthreads();
  atomicAdd(sum, 1.0f);
  __syncthreads();
  bool last = threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1 && threadIdx.z == blockDim.z - 1;
  if (last && blockIdx.x + blockIdx.y * 2 + blockIdx.z * 4 == 7) out[0] = sum[0] == 30 && gridDim.z == 2;
}
extern "C" void three_dimensions(float* out) { launch(cube, dim3(2, 2, 2), dim3(5, 3, 2), 4, nullptr, out); }

__global__ void none(float* out) { out[0] = 0; }
extern "C" void an_empty_grid(float* out) {
  out[0] = 1;
  launch(none, 0, 32, 0, nullptr, out);
  launch(none, dim3(4, 0), 32, 0, nullptr, out);
}

__global__ void plenty(float* out) {
  float* memory = dynamic_shared<float>();
  memory[threadIdx.x * 56] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) out[0] = memory[1023 * 56] == 1023;
}
extern "C" void all_threads_and_all_shared_memory(float* out) {
  check_cuda(cudaFuncSetAttribute(plenty, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
  launch(plenty, 1, 1024, 227 * 1024, nullptr, out);
}
