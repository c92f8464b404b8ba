// Faulty kernels that ThreadSanitizer must catch: right in one order of threads, wrong in another. out has 64 floats.
#include "cuda_on_cpu.h"

// expect: thread.cu:\d+: data race: a (read|write) here and a (read|write) at thread.cu:\d+, with no barrier between them
__global__ void no_barrier(float* out) {
  __shared__ float part[64];
  part[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = part[63 - threadIdx.x];
}
extern "C" void missing_barrier(float* out) { launch(no_barrier, 1, 64, 0, nullptr, out); }

// expect: thread.cu:\d+: data race: a (read|write) here and a (read|write) at thread.cu:\d+
__global__ void reused(float* out) {
  __shared__ float part[64];
  for (int i = 0; i < 3; i++) {
    part[threadIdx.x] = i;
    __syncthreads();
    out[threadIdx.x] = part[63 - threadIdx.x];
  }
}
extern "C" void buffer_reused_too_early(float* out) { launch(reused, 1, 64, 0, nullptr, out); }

// expect: thread.cu:\d+: data race
__global__ void in_step(float* out) {  // since Volta the lanes of a warp need not run in step
  __shared__ float part[32];
  part[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 16) part[threadIdx.x] += part[threadIdx.x + 16];
  out[threadIdx.x] = part[0];
}
extern "C" void assumed_warp_synchrony(float* out) { launch(in_step, 1, 32, 0, nullptr, out); }

// expect: thread.cu:\d+: data race: a write here and a write at thread.cu:\d+
__global__ void all_write(float* out) { out[0] = threadIdx.x; }
extern "C" void many_write_one_place(float* out) { launch(all_write, 1, 64, 0, nullptr, out); }

// expect: thread.cu:\d+: data race
__global__ void counts(int* count, float* out) {
  *count += 1;
  out[threadIdx.x] = 0;
}
extern "C" void a_count_without_an_atomic(float* out) {
  int count = 0;
  launch(counts, 1, 64, 0, nullptr, &count, out);
}

// expect: thread.cu:\d+: data race
__global__ void other_half(float* out) {  // each warp waits for itself only
  __shared__ float part[64];
  part[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = part[63 - threadIdx.x];
}
extern "C" void syncwarp_is_no_syncthreads(float* out) { launch(other_half, 1, 64, 0, nullptr, out); }
