// Faulty kernels that the simulator itself must catch. `expect`: what it must say (a regular expression).
#include "cuda_on_cpu.h"

constexpr uint32_t FULL = 0xffffffffu;

// expect: divergent, block \(0,0,0\), thread \(0,0,0\), simulator.cu:\d+: divergent barrier: thread \(16,0,0\) waits at another one, simulator.cu:\d+
__global__ void divergent() {
  if (threadIdx.x < 16) __syncthreads();
  else
    __syncthreads();
}
extern "C" void divergent_barrier(float* out) { launch(divergent, 1, 32, 0, nullptr); }

// expect: thread \(0,0,0\), simulator.cu:\d+: waits at a barrier, but thread \(5,0,0\) has returned without it
__global__ void leaves() {
  if (threadIdx.x == 5) return;
  __syncthreads();
}
extern "C" void exit_before_a_barrier(float* out) { launch(leaves, 1, 64, 0, nullptr); }

// expect: waits at a barrier, but thread \(1,2,0\) has returned without it
__global__ void leaves_late() {
  if (threadIdx.x == 1 && threadIdx.y == 2) return;
  for (int i = 0; i < 3; i++) __syncthreads();
}
extern "C" void exit_in_two_dimensions(float* out) { launch(leaves_late, dim3(2, 2), dim3(8, 8), 0, nullptr); }

// expect: deadlock: waits for lane 16, which waits at simulator.cu:\d+
__global__ void in_a_branch(float* out) {
  if (threadIdx.x < 16) out[0] = __shfl_sync(FULL, 1.0f, 3);
  __syncthreads();
}
extern "C" void shuffle_in_a_branch(float* out) { launch(in_a_branch, 1, 32, 0, nullptr, out); }

// expect: block \(1,0,0\), thread \(0,0,0\), simulator.cu:\d+: takes a value from lane 20, which does not take part
__global__ void inactive(float* out) {
  if (blockIdx.x == 1 && threadIdx.x < 16) out[0] = __shfl_sync(0xffffu, 1.0f, 20);
}
extern "C" void shuffle_from_an_inactive_lane(float* out) { launch(inactive, 2, 32, 0, nullptr, out); }

// expect: thread \(32,0,0\), simulator.cu:\d+: takes a value from lane 16, which does not take part
__global__ void reduces(float* out) {
  float sum = 1;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(FULL, sum, offset);
  out[0] = sum;
}
extern "C" void block_of_no_whole_warps(float* out) { launch(reduces, 1, 48, 0, nullptr, out); }

// expect: takes a value from lane 31, which does not take part
__global__ void after_exit(float* out) {
  if (threadIdx.x == 31) return;
  out[0] = __shfl_sync(FULL, 1.0f, 31);
}
extern "C" void shuffle_from_a_lane_that_has_returned(float* out) { launch(after_exit, 1, 32, 0, nullptr, out); }

// expect: is lane 8, which its own mask leaves out
__global__ void outside(float* out) { out[0] = __shfl_sync(0xffu, 1.0f, 0); }
extern "C" void lane_outside_its_own_mask(float* out) { launch(outside, 1, 32, 0, nullptr, out); }

// expect: meets another collective in lane \d+, simulator.cu:\d+
__global__ void mixed(float* out) {
  if (threadIdx.x % 2) out[0] = __shfl_sync(FULL, 1.0f, 0);
  else out[1] = __ballot_sync(FULL, 1);
}
extern "C" void different_collectives_meet(float* out) { launch(mixed, 1, 32, 0, nullptr, out); }

// expect: deadlock: waits for lane \d+, which waits at simulator.cu:\d+
__global__ void other_masks(float* out) {
  out[threadIdx.x % 2] = __shfl_sync(threadIdx.x < 4 ? 0xffu : 0xf0u, 1.0f, threadIdx.x < 4 ? 0 : 4);
  if (threadIdx.x >= 4) __syncthreads();
}
extern "C" void lanes_of_other_masks(float* out) { launch(other_masks, 1, 8, 0, nullptr, out); }

// expect: mma_alone: mma: lane 7 does not take part
__global__ void mma_alone(float* out) {
  float d[4] = {};
  uint32_t a[4] = {}, b[2] = {};
  if (threadIdx.x == 7) return;
  mma_m16n8k16(d, a, b);
  out[0] = d[0];
}
extern "C" void mma_without_a_lane(float* out) { launch(mma_alone, 1, 32, 0, nullptr, out); }

__global__ void nothing() {}

// expect: nothing: a block of \(32,33,1\) threads: must be 1 to 1024 in all
extern "C" void too_many_threads(float* out) { launch(nothing, 1, dim3(32, 33), 0, nullptr); }

// expect: nothing: a block of \(1,1,65\) threads: must be 1 to 1024 in all, at most 64 in z
extern "C" void too_deep_a_block(float* out) { launch(nothing, 1, dim3(1, 1, 65), 0, nullptr); }

// expect: nothing: a block of \(0,1,1\) threads
extern "C" void no_threads(float* out) { launch(nothing, 1, 0, 0, nullptr); }

// expect: nothing: a grid of \(1,65536,1\) blocks: must be at most \(2147483647,65535,65535\)
extern "C" void too_high_a_grid(float* out) { launch(nothing, dim3(1, 65536), 32, 0, nullptr); }

// expect: nothing: 49153 bytes of dynamic shared memory: must be at most 49152 without cudaFuncAttributeMaxDynamicSharedMemorySize
extern "C" void shared_memory_without_opting_in(float* out) { launch(nothing, 1, 32, 49153, nullptr); }

// expect: CUDA: invalid argument
extern "C" void more_shared_memory_than_there_is(float* out) {
  check_cuda(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1));
}

// expect: nothing: 232449 bytes of dynamic shared memory: must be at most 232448
extern "C" void more_shared_memory_than_was_asked_for(float* out) {
  check_cuda(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
  launch(nothing, 1, 32, 227 * 1024 + 1, nullptr);
}

// expect: throws: thread \(2,0,0\) has had enough
__global__ void throws() {
  __syncthreads();
  if (threadIdx.x == 2) throw std::runtime_error("throws: thread (2,0,0) has had enough");
}
extern "C" void an_exception_in_a_kernel(float* out) { launch(throws, 4, 32, 0, nullptr); }

// expect: uninitialised shared memory: nan nan nan
__global__ void uninitialised(float* out) {
  __shared__ float written_by_some[32];
  float* dynamic = dynamic_shared<float>();
  if (threadIdx.x == 0 && blockIdx.x == 0) written_by_some[0] = dynamic[0] = 1;  // the next block must not find them
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x == 1) out[0] = written_by_some[0], out[1] = dynamic[0], out[2] = written_by_some[5];
}
extern "C" void uninitialised_shared_memory(float* out) {
  launch(uninitialised, 2, 32, 128, nullptr, out);
  char text[99];
  snprintf(text, 99, "uninitialised shared memory: %g %g %g", fabs(out[0]), fabs(out[1]), fabs(out[2]));
  throw std::runtime_error(text);
}

// expect: errors: 3, then 528
__global__ void works(float* out) {
  __shared__ float part[32];
  part[threadIdx.x] = threadIdx.x + 1;
  __syncthreads();
  float sum = part[31 - threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL, sum, offset);
  out[0] = sum;
}
extern "C" void after_errors_the_next_launch_works(float* out) {
  int errors = 0;
  auto attempt = [&](auto kernel, auto... args) {
    try {
      launch(kernel, 3, 32, 0, nullptr, args...);
    } catch (const std::exception&) {
      errors++;
    }
  };
  attempt(divergent), attempt(leaves), attempt(in_a_branch, out);
  launch(works, 3, 32, 0, nullptr, out);
  throw std::runtime_error("errors: " + std::to_string(errors) + ", then " + std::to_string(int(out[0])));
}
