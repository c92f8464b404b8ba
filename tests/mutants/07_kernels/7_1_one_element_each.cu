// Task 7.1: no loop: only the first 192 elements
#include "cuda_on_cpu.h"

__global__ void vector_add_kernel(const float* a, const float* b, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a[i] + b[i];
}

// a, b, out [n]
extern "C" void vector_add(const float* a, const float* b, float* out, int n) {
  launch(vector_add_kernel, 3, 64, 0, nullptr, a, b, out, n);
}
