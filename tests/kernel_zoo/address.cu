// Faulty kernels that AddressSanitizer or UndefinedBehaviorSanitizer must catch. out has 64 floats.
#include "cuda_on_cpu.h"

// expect: address.cu:\d+: index 64 out of bounds for type 'float \[64\]'
__global__ void beyond_static(float* out) {
  __shared__ float part[64];
  part[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = part[threadIdx.x];
}
extern "C" void static_shared_overrun(float* out) { launch(beyond_static, 1, 64, 0, nullptr, out); }

// expect: address.cu:\d+: (global-buffer-overflow, a write of 4 bytes|store to address \w+ with insufficient space)
__global__ void beyond_static_by_pointer(float* out) {
  __shared__ float part[64];
  float* next = part + threadIdx.x + 1;
  *next = 1;
  __syncthreads();
  out[threadIdx.x] = part[threadIdx.x];
}
extern "C" void static_shared_overrun_by_a_pointer(float* out) { launch(beyond_static_by_pointer, 1, 64, 0, nullptr, out); }

// expect: address.cu:\d+: heap-buffer-overflow, a write of 4 bytes, 0 bytes after a buffer of 256 bytes
__global__ void beyond_dynamic(float* out) {
  float* part = dynamic_shared<float>();
  part[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = part[threadIdx.x];
}
extern "C" void dynamic_shared_overrun(float* out) { launch(beyond_dynamic, 1, 64, 256, nullptr, out); }

// expect: address.cu:\d+: heap-buffer-overflow, a read of 4 bytes, 0 bytes after a buffer of 256 bytes
__global__ void reads_beyond(float* out) { out[threadIdx.x] = out[threadIdx.x + 1]; }
extern "C" void global_read_overrun(float* out) { launch(reads_beyond, 1, 64, 0, nullptr, out); }

// expect: address.cu:\d+: heap-buffer-overflow, a write of 4 bytes, 4 bytes before a buffer of 256 bytes
__global__ void writes_before(float* out) { out[int(threadIdx.x) - 1] = 1; }
extern "C" void global_write_underrun(float* out) { launch(writes_before, 1, 64, 0, nullptr, out); }

// expect: address.cu:\d+: (stack-buffer-overflow, a write of 4 bytes|store to address \w+ with insufficient space)
__global__ void local_array(float* out, int n) {
  float mine[8];
  float* to = mine;
  for (int i = 0; i <= n; i++) to[i] = i;
  __syncthreads();
  out[threadIdx.x] = to[3];
}
extern "C" void local_array_overrun(float* out) { launch(local_array, 1, 32, 0, nullptr, out, 8); }

// expect: address.cu:\d+: heap-buffer-overflow, a read of 4 bytes
__global__ void bad_block(float* out, const int* block_table) {
  float mine = out[block_table[threadIdx.x / 16] * 16 + threadIdx.x % 16];
  out[threadIdx.x] = mine;
}
extern "C" void block_table_entry_out_of_range(float* out) {
  int table[4] = {0, 1, 2, 4};
  launch(bad_block, 1, 64, 0, nullptr, out, table);
}

// expect: address.cu:\d+: store to misaligned address 0x\w+ for type 'struct float4', which requires 16 byte alignment
__global__ void misaligned(float* out) { *reinterpret_cast<float4*>(out + 1) = make_float4(1, 2, 3, 4); }
extern "C" void misaligned_vector(float* out) { launch(misaligned, 1, 1, 0, nullptr, out); }

// expect: address.cu:\d+: stack-overflow
__device__ int deep(int n) {
  volatile int room[1000];
  room[n % 1000] = n;
  return n > 0 ? deep(n - 1) + room[n % 1000] : 0;
}
__global__ void overflows(float* out) { out[threadIdx.x] = deep(100000); }
extern "C" void stack_overflow(float* out) { launch(overflows, 1, 2, 0, nullptr, out); }
