// Task 7.1: whole rounds of the grid, whatever n is
#include "cuda_on_cpu.h"

__global__ void vector_add_kernel(const float* a, const float* b, float* out, int n) {
  for (int first = 0; first < n; first += gridDim.x * blockDim.x) {
    int i = first + blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = a[i] + b[i];
  }
}

// a, b, out [n]
extern "C" void vector_add(const float* a, const float* b, float* out, int n) {
  launch(vector_add_kernel, 3, 64, 0, nullptr, a, b, out, n);
}
