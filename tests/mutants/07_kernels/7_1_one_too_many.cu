// Task 7.1: i <= n: the last thread reads and writes beyond the end
#include "cuda_on_cpu.h"

__global__ void vector_add_kernel(const float* a, const float* b, float* out, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i <= n; i += gridDim.x * blockDim.x) out[i] = a[i] + b[i];
}

// a, b, out [n]
extern "C" void vector_add(const float* a, const float* b, float* out, int n) {
  launch(vector_add_kernel, 3, 64, 0, nullptr, a, b, out, n);
}
