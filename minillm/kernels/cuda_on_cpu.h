// How a GPU runs a block, in one header: with it g++ compiles a .cu file unchanged, and any CPU runs its kernels.
//
// Read it as a chapter on the programming model. A grid is a list of blocks that know nothing of each other. The threads
// of a block share memory and meet at barriers; 32 of them are a warp, whose lanes can hand each other values. Here each
// CUDA thread is a fiber (fibers.h). It runs until it has to wait for others, so between two barriers the threads run
// one after the other, in the order that the environment's CUDA_ON_CPU_SCHEDULE says: in_order (the default), reversed,
// or random. A correct kernel cannot tell.
//
// What CUDA leaves undefined is an error here, which names kernel, block, thread and line: a barrier that not all threads
// reach, a value taken from a lane that does not take part, more threads or shared memory than there are. Memory faults
// are for the sanitizers: compile with -fsanitize=address,undefined, or with -fsanitize=thread for races.
// What cannot be seen here: speed, coalescing, bank conflicts, a missing __threadfence, races between blocks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef __CUDACC__  // ================ nvcc: the real thing, and the few names that CUDA C++ has not =================
#include <cuda_runtime.h>
#define DISPATCH_KEY CUDA  // under which torch keeps these kernels
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);  // torch's

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(device, &stream);
  return static_cast<cudaStream_t>(stream);
}

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), checked. An empty grid is no launch.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
  check_cuda(cudaGetLastError());
}

// The shared memory whose size the launch gives: `extern __shared__`, of any type.
template <typename T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

// d += a b on the tensor cores, by the 32 lanes of a warp together. a is 16 x 16, b 16 x 8, both bfloat16; d is 16 x 8,
// float32. Which lane holds what: PTX ISA, "Matrix Fragments for mma.m16n8k16".
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with int8: a is 16 x 32, b 32 x 8, d 16 x 8 int32. A register holds four bytes of K, where it held two elements.
__device__ inline void mma_m16n8k32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 2-byte elements from shared memory, in the layout that mma wants. Lane i gives the address of
// row i % 8 of matrix i / 8 (16 bytes, aligned). Register j of lane i gets two elements of matrix j: those in row i / 4
// and columns 2 (i % 4), 2 (i % 4) + 1; with TRANSPOSE rows and columns are exchanged.
template <bool TRANSPOSE>
__device__ inline void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (TRANSPOSE)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

#else  // ============================ any other compiler: the simulator =============================================
#include <cxxabi.h>
#include <dlfcn.h>
#ifdef __linux__
#include <link.h>
#endif

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <tuple>
#include <type_traits>
#include <vector>

#include "fibers.h"

// ---- 1. The words of CUDA C++ ---------------------------------------------------------------------------------------

#define DISPATCH_KEY CPU
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block runs on one OS thread, and what is shared within it belongs to that OS thread. Sanitizers watch only what is
// plainly `static`: with them there is one OS thread.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline thread_local uint3 threadIdx{}, blockIdx{};
inline thread_local dim3 blockDim{}, gridDim{};
constexpr int warpSize = 32;

namespace cuda_on_cpu {

// ---- 2. A block: its threads, and whom they wait for ----------------------------------------------------------------

enum State { NEW, READY, AT_BARRIER, IN_COLLECTIVE, EXITED };
using Complete = void (*)(void** given);  // what a collective does once all lanes are there; given[lane], or null

struct Thread {
  State state;
  uint3 index;
  Fiber* fiber;
  const char* file;  // where it waits,
  int line;
  uint32_t mask;      // for which lanes,
  Complete complete;  // to do what together,
  void* given;        // with what of its own
};

struct Warp {
  uint32_t alive = 0;    // lanes that have not returned
  unsigned waiting = 0;  // lanes in a collective
};

// What runs blocks: a multiprocessor, if you like. One for each OS thread.
struct Machine {
  std::string kernel;                      // its name
  void (*call)(void* arguments);           // and how to call it
  void* arguments;
  std::vector<Thread> threads;             // of the block that runs
  std::vector<Warp> warps;
  Thread* thread;                          // the one that runs
  unsigned num_exited, num_at_barrier, num_barriers;
  std::vector<unsigned> order;             // in which threads are looked at
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  std::exception_ptr error;
  unsigned char* dynamic_shared;
  char began, ended, barriers[2];          // for TSan
};
inline thread_local Machine* machine = nullptr;

inline std::string place(const uint3& i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}
inline std::string line(const Thread& t) {
  std::string file = t.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(t.line);
}
[[noreturn]] inline void fail(const Thread& t, const std::string& what) {
  throw std::runtime_error(machine->kernel + ", block " + place(blockIdx) + ", thread " + place(t.index) + ", " +
                           line(t) + ": " + what);
}

inline void wait() {  // until somebody has set this thread's state to READY
  Thread* thread = machine->thread;
  happens_before(&machine->ended);
  thread->fiber->leave();
  threadIdx = thread->index;
}

// ---- 3. The barrier: all threads of the block -----------------------------------------------------------------------

inline void release_barrier_if_complete() {
  Machine& m = *machine;
  if (m.num_at_barrier == 0 || m.num_at_barrier + m.num_exited < m.threads.size()) return;
  Thread* first = nullptr;
  for (Thread& t : m.threads)
    if (t.state == AT_BARRIER && !first) first = &t;
  for (Thread& t : m.threads) {
    if (t.state == EXITED)
      fail(*first, "waits at a barrier, but thread " + place(t.index) + " has returned without it");
    if (t.line != first->line || t.file != first->file)
      fail(*first, "divergent barrier: thread " + place(t.index) + " waits at another one, " + line(t));
  }
  for (Thread& t : m.threads) t.state = READY;
  m.num_at_barrier = 0;
  m.num_barriers++;
}

inline void barrier(const char* file, int line) {
  watch(false);
  Machine& m = *machine;
  Thread& t = *m.thread;
  void* event = &m.barriers[m.num_barriers % 2];
  t.state = AT_BARRIER, t.file = file, t.line = line;
  m.num_at_barrier++;
  happens_before(event);
  release_barrier_if_complete();
  wait();
  happens_after(event);
  watch(true);
}

// ---- 4. Warp collectives: the lanes that a mask names ---------------------------------------------------------------
// Each lane leaves what it gives on its stack and waits; the last one to arrive does the work for all.

inline void complete_collective(unsigned first_lane, const Thread& by) {
  Machine& m = *machine;
  Warp& warp = m.warps[first_lane / 32];
  uint32_t lanes = by.mask & warp.alive;  // CUDA: all lanes of the mask that have not returned
  if (warp.waiting < unsigned(__builtin_popcount(lanes))) return;
  void* given[32] = {};
  for (unsigned i = 0; i < 32; i++) {
    if (!(lanes >> i & 1)) continue;
    Thread& t = m.threads[first_lane + i];
    if (t.state != IN_COLLECTIVE || t.mask != by.mask) return;
    if (t.complete != by.complete) fail(by, "meets another collective in lane " + std::to_string(i) + ", " + line(t));
    given[i] = t.given;
  }
  for (unsigned i = 0; i < 32; i++)
    if (given[i]) m.threads[first_lane + i].state = READY;
  warp.waiting -= __builtin_popcount(lanes);
  by.complete(given);
}

template <typename Given>
void collective(uint32_t mask, Complete complete, Given& given, const char* file, int line) {
  watch(false);
  Machine& m = *machine;
  Thread& t = *m.thread;
  unsigned number = &t - m.threads.data(), lane = number % 32;
  t.state = IN_COLLECTIVE, t.file = file, t.line = line;
  t.mask = mask, t.complete = complete, t.given = &given;
  m.warps[number / 32].waiting++;
  if (!(mask >> lane & 1)) fail(t, "is lane " + std::to_string(lane) + ", which its own mask leaves out");
  complete_collective(number - lane, t);
  wait();
  watch(true);
}

// ---- 5. A block runs ------------------------------------------------------------------------------------------------

inline void run_threads() {  // what a fiber does: a thread, and when that has returned, another one
  watch(false);
  Fiber* fiber = machine->thread->fiber;
  fiber->entered();
  for (;;) {
    Machine& m = *machine;
    Thread& t = *m.thread;
    happens_after(&m.began);
    watch(true);
    try {
      m.call(m.arguments);
    } catch (...) {
      m.error = std::current_exception();
    }
    watch(false);
    happens_before(&m.ended);
    t.state = EXITED;
    m.num_exited++;
    unsigned number = &t - m.threads.data(), first_lane = number - number % 32;
    m.warps[number / 32].alive &= ~(1u << number % 32);
    try {  // the others may have waited for this one
      release_barrier_if_complete();
      for (unsigned i = first_lane; i < first_lane + 32 && i < m.threads.size(); i++)
        if (m.threads[i].state == IN_COLLECTIVE) complete_collective(first_lane, m.threads[i]);
    } catch (...) {
      if (!m.error) m.error = std::current_exception();
    }
    m.idle.push_back(fiber);
    fiber->leave();
  }
}

inline Fiber* take_fiber(unsigned thread) {
  Machine& m = *machine;
#if defined(__SANITIZE_THREAD__)  // a fiber is what TSan takes for a thread
  for (unsigned i = m.fibers.size(); i <= thread; i++) m.fibers.emplace_back(new Fiber(i));
  return m.fibers[thread].get();
#else  // one that is through may take the next thread: without barriers all run on the same stack
  (void)thread;
  if (m.idle.empty()) {
    m.fibers.emplace_back(new Fiber(m.fibers.size()));
    m.idle.push_back(m.fibers.back().get());
  }
  Fiber* fiber = m.idle.back();
  m.idle.pop_back();
  return fiber;
#endif
}

[[noreturn]] inline void deadlock() {
  Machine& m = *machine;
  for (Thread& t : m.threads)
    for (unsigned lane = 0; t.state == IN_COLLECTIVE && lane < 32; lane++) {
      unsigned number = (&t - m.threads.data()) / 32 * 32 + lane;
      if (!(t.mask >> lane & 1) || number >= m.threads.size()) continue;
      Thread& other = m.threads[number];
      if (other.state == AT_BARRIER || (other.state == IN_COLLECTIVE && other.mask != t.mask))
        fail(t, "deadlock: waits for lane " + std::to_string(lane) + ", which waits at " + line(other));
    }
  throw std::runtime_error(m.kernel + ": deadlock");
}

// Shared memory holds whatever the last block left there. Here: NaN, as floats of any size.
inline void poison_shared_memory(size_t dynamic_bytes) {
  std::memset(machine->dynamic_shared, 0xFF, dynamic_bytes);
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // The static part is all of this library's thread-local storage, the simulator's own few variables excepted.
  static thread_local struct { void* start; size_t size; } storage{};
  Machine* keep = machine;
  if (!storage.size)
    dl_iterate_phdr([](dl_phdr_info* info, size_t, void*) {
      auto here = reinterpret_cast<uintptr_t>(&poison_shared_memory);
      bool ours = false;
      size_t size = 0;
      for (int i = 0; i < info->dlpi_phnum; i++) {
        auto& part = info->dlpi_phdr[i];
        ours |= part.p_type == PT_LOAD && here - info->dlpi_addr - part.p_vaddr < part.p_memsz;
        if (part.p_type == PT_TLS) size = part.p_memsz;
      }
      if (ours && info->dlpi_tls_data) storage = {info->dlpi_tls_data, size};
      return int(ours);
    }, nullptr);
  auto [start, size] = storage;
  if (size) std::memset(start, 0xFF, size);
  storage = {start, size};
  machine = keep;
#endif
}

inline void run_block(const uint3& index, const dim3& grid, const dim3& block, size_t dynamic_bytes, bool random) {
  poison_shared_memory(dynamic_bytes);
  Machine& m = *machine;
  blockIdx = index, gridDim = grid, blockDim = block;
  unsigned i = 0;
  for (unsigned z = 0; z < block.z; z++)
    for (unsigned y = 0; y < block.y; y++)
      for (unsigned x = 0; x < block.x; x++) m.threads[i++] = Thread{NEW, {x, y, z}, nullptr, "?", 0, 0, nullptr, nullptr};
  m.warps.assign((i + 31) / 32, Warp{});
  while (i--) m.warps[i / 32].alive |= 1u << i % 32;
  m.num_exited = m.num_at_barrier = 0;
  m.error = nullptr;
  happens_before(&m.began);
  watch(false);
  std::minstd_rand generator(index.x + 1);
  try {
    while (m.num_exited < m.threads.size()) {
      bool progress = false;
      if (random) std::shuffle(m.order.begin(), m.order.end(), generator);
      for (unsigned number : m.order) {
        Thread& t = m.threads[number];
        if (t.state != NEW && t.state != READY) continue;
        if (t.state == NEW) t.fiber = take_fiber(number);
        m.thread = &t;
        threadIdx = t.index;
        t.fiber->enter(run_threads);
        if (m.error) std::rethrow_exception(m.error);
        progress = true;
      }
      if (!progress) deadlock();
    }
  } catch (...) {  // the other threads will never go on
    happens_after(&m.ended);
    m.idle.clear();
    for (auto& fiber : m.fibers) fiber->abandon(), m.idle.push_back(fiber.get());
    watch(true);
    throw;
  }
  watch(true);
  happens_after(&m.ended);
}

// ---- 6. A launch ----------------------------------------------------------------------------------------------------

constexpr size_t DEFAULT_SHARED = 48 << 10, LARGEST_SHARED = 227 << 10;  // bytes a block, as on an H100
inline std::mutex shared_limits_mutex;
inline std::map<void*, size_t> shared_limits;  // of kernels that opted in to more than the default

inline std::string kernel_name(void* kernel) {
  Dl_info info;
  if (!dladdr(kernel, &info) || !info.dli_sname) return "kernel";
  int status;
  char* readable = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = readable ? readable : info.dli_sname;
  free(readable);
  name = name.substr(0, name.rfind('('));  // without parameters, and without "void "
  return name.rfind("void ", 0) == 0 ? name.substr(5) : name;
}

inline void run_grid(void* kernel, void (*call)(void*), void* arguments, dim3 grid, dim3 block, size_t shared_bytes) {
  std::string name = kernel_name(kernel);
  auto refuse = [&](const std::string& what) { throw std::runtime_error(name + ": " + what); };
  size_t block_size = size_t(block.x) * block.y * block.z, limit = DEFAULT_SHARED;
  {
    std::lock_guard lock(shared_limits_mutex);
    if (auto found = shared_limits.find(kernel); found != shared_limits.end()) limit = found->second;
  }
  if (block_size < 1 || block_size > 1024 || block.z > 64)
    refuse("a block of " + place({block.x, block.y, block.z}) + " threads: must be 1 to 1024 in all, at most 64 in z");
  if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
    refuse("a grid of " + place({grid.x, grid.y, grid.z}) + " blocks: must be at most (2147483647,65535,65535)");
  if (shared_bytes > limit)
    refuse(std::to_string(shared_bytes) + " bytes of dynamic shared memory: must be at most " + std::to_string(limit) +
           (limit > DEFAULT_SHARED ? "" : " without cudaFuncAttributeMaxDynamicSharedMemorySize"));
  const char* schedule = getenv("CUDA_ON_CPU_SCHEDULE");
  std::string order = schedule ? schedule : "in_order";
  if (order != "in_order" && order != "reversed" && order != "random")
    refuse("CUDA_ON_CPU_SCHEDULE=" + order + ": must be in_order, reversed or random");

  const long num_blocks = long(grid.x) * grid.y * grid.z;
  std::vector<long> blocks(order == "random" ? num_blocks : 0);
  for (size_t i = 0; i < blocks.size(); i++) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), std::minstd_rand(num_blocks));
  std::atomic<bool> failed = false;
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic) if (num_blocks > 1)
  for (long i = 0; i < num_blocks; i++) {
    if (failed) continue;
    long b = order == "random" ? blocks[i] : order == "reversed" ? num_blocks - 1 - i : i;
    if (!machine) machine = new Machine();
    Machine& m = *machine;
    m.kernel = name, m.call = call, m.arguments = arguments;
    m.threads.resize(block_size);
    m.order.resize(block_size);
    for (unsigned t = 0; t < block_size; t++) m.order[t] = order == "reversed" ? block_size - 1 - t : t;
    std::unique_ptr<unsigned char[]> shared(new unsigned char[shared_bytes]);  // so that ASan sees where it ends
    m.dynamic_shared = shared.get();
    try {
      run_block({unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)}, grid, block,
                shared_bytes, order == "random");
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace cuda_on_cpu

// ---- 7. What a kernel and its host function use ---------------------------------------------------------------------

using cudaStream_t = void*;
inline cudaStream_t current_stream(int32_t) { return nullptr; }

template <typename T>
T* dynamic_shared() { return reinterpret_cast<T*>(cuda_on_cpu::machine->dynamic_shared); }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error("CUDA: invalid argument");
}
template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, size_t bytes) {
  if (bytes > cuda_on_cpu::LARGEST_SHARED) return cudaErrorInvalidValue;
  std::lock_guard lock(cuda_on_cpu::shared_limits_mutex);
  cuda_on_cpu::shared_limits[reinterpret_cast<void*>(kernel)] = std::max(bytes, cuda_on_cpu::DEFAULT_SHARED);
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  struct Call { void (*kernel)(Parameters...); std::tuple<Parameters...> parameters; };
  Call call{kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)};
  auto run = [](void* p) { std::apply(static_cast<Call*>(p)->kernel, static_cast<Call*>(p)->parameters); };
  cuda_on_cpu::run_grid(reinterpret_cast<void*>(kernel), run, &call, grid, block, shared_bytes);
}
#include "intrinsics.h"
#endif  // __CUDACC__
