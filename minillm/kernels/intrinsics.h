// What a kernel calls besides plain C++: vector types, warp collectives, atomics, mathematics, tensor cores. The second
// part of cuda_on_cpu.h, which includes it.
#pragma once

// ---- Vector types: loaded and stored at once, and therefore aligned ---------------------------------------------------

#define VECTOR_TYPES(T, name)                                                      \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                               \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };                         \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                       \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR_TYPES(float, float)
VECTOR_TYPES(int, int)
VECTOR_TYPES(unsigned, uint)
VECTOR_TYPES(signed char, char)
VECTOR_TYPES(unsigned char, uchar)

// ---- Barriers and warp collectives ----------------------------------------------------------------------------------

namespace cuda_on_cpu {

template <typename T>
struct Shuffled { T value; unsigned source; Thread* thread; T result; };

template <typename T>
void complete_shuffle(void** given) {
  for (unsigned lane = 0; lane < 32; lane++)
    if (auto* mine = static_cast<Shuffled<T>*>(given[lane])) {
      if (!given[mine->source])
        fail(*mine->thread, "takes a value from lane " + std::to_string(mine->source) + ", which does not take part");
      mine->result = static_cast<Shuffled<T>*>(given[mine->source])->value;
    }
}

template <typename T>
T shuffle(uint32_t mask, T value, unsigned source, const char* file, int line) {
  Shuffled<T> given{value, source, machine->thread, T()};
  collective(mask, complete_shuffle<T>, given, file, line);
  return given.result;
}

template <typename T, T (*combine)(T, T)>
void complete_reduction(void** given) {
  T* result = nullptr;
  for (unsigned lane = 0; lane < 32; lane++)
    if (T* value = static_cast<T*>(given[lane])) result ? (void)(*result = combine(*result, *value)) : (void)(result = value);
  for (unsigned lane = 0; lane < 32; lane++)
    if (given[lane]) *static_cast<T*>(given[lane]) = *result;
}

template <typename T, T (*combine)(T, T)>
T reduce(uint32_t mask, T value, const char* file, int line) {
  collective(mask, complete_reduction<T, combine>, value, file, line);
  return value;
}

struct Meeting { char arrived, released; };  // for TSan: __syncwarp orders accesses to memory, the others need not

inline void complete_meeting(void** given) {
  for (unsigned lane = 0; lane < 32; lane++)
    if (given[lane]) happens_after(&static_cast<Meeting*>(given[lane])->arrived);
  for (unsigned lane = 0; lane < 32; lane++)
    if (given[lane]) happens_before(&static_cast<Meeting*>(given[lane])->released);
}

inline unsigned lane_id() { return (machine->thread - machine->threads.data()) % 32; }
template <typename T> T sum_of(T a, T b) { return a + b; }
template <typename T> T min_of(T a, T b) { return b < a ? b : a; }
template <typename T> T max_of(T a, T b) { return a < b ? b : a; }
template <typename T> T and_of(T a, T b) { return a & b; }
template <typename T> T or_of(T a, T b) { return a | b; }
template <typename T> T xor_of(T a, T b) { return a ^ b; }

}  // namespace cuda_on_cpu

#define HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()  // default arguments: the caller's place

inline void __syncthreads(HERE) { cuda_on_cpu::barrier(file, line); }
inline void __syncwarp(uint32_t mask = ~0u, HERE) {
  cuda_on_cpu::Meeting given;
  cuda_on_cpu::happens_before(&given.arrived);
  cuda_on_cpu::collective(mask, cuda_on_cpu::complete_meeting, given, file, line);
  cuda_on_cpu::happens_after(&given.released);
}

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, HERE) {
  unsigned lane = cuda_on_cpu::lane_id(), first = lane & ~(width - 1);
  return cuda_on_cpu::shuffle(mask, value, first | (source & (width - 1)), file, line);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, HERE) {
  unsigned lane = cuda_on_cpu::lane_id(), place = lane & (width - 1);
  return cuda_on_cpu::shuffle(mask, value, place >= delta ? lane - delta : lane, file, line);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, HERE) {
  unsigned lane = cuda_on_cpu::lane_id(), place = lane & (width - 1);
  return cuda_on_cpu::shuffle(mask, value, place + delta < unsigned(width) ? lane + delta : lane, file, line);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int other, int width = 32, HERE) {
  unsigned lane = cuda_on_cpu::lane_id(), last = lane | (width - 1);
  return cuda_on_cpu::shuffle(mask, value, (lane ^ other) <= last ? lane ^ other : lane, file, line);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate, HERE) {
  uint32_t bit = predicate ? 1u << cuda_on_cpu::lane_id() : 0;
  return cuda_on_cpu::reduce<uint32_t, cuda_on_cpu::or_of>(mask, bit, file, line);
}
inline int __any_sync(uint32_t mask, int predicate, HERE) {
  return cuda_on_cpu::reduce<int, cuda_on_cpu::max_of>(mask, predicate != 0, file, line);
}
inline int __all_sync(uint32_t mask, int predicate, HERE) {
  return cuda_on_cpu::reduce<int, cuda_on_cpu::min_of>(mask, predicate != 0, file, line);
}
#define REDUCE_SYNC(name, combine, T) \
  inline T __reduce_##name##_sync(uint32_t mask, T value, HERE) { \
    return cuda_on_cpu::reduce<T, cuda_on_cpu::combine>(mask, value, file, line); \
  }
REDUCE_SYNC(add, sum_of, unsigned)
REDUCE_SYNC(min, min_of, unsigned)
REDUCE_SYNC(max, max_of, unsigned)
REDUCE_SYNC(add, sum_of, int)
REDUCE_SYNC(min, min_of, int)
REDUCE_SYNC(max, max_of, int)
REDUCE_SYNC(and, and_of, unsigned)
REDUCE_SYNC(or, or_of, unsigned)
REDUCE_SYNC(xor, xor_of, unsigned)

// ---- Atomics --------------------------------------------------------------------------------------------------------

// Blocks run on several OS threads at a time, so atomics are atomic here, too. All return what was there before.
template <typename T, typename F>
T atomic_update(T* address, F next) {
  T old, wanted;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do wanted = next(old);
  while (!__atomic_compare_exchange(address, &old, &wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
template <typename T, typename V> T atomicAdd(T* a, V v) { return atomic_update(a, [=](T old) { return T(old + v); }); }
template <typename T, typename V> T atomicSub(T* a, V v) { return atomic_update(a, [=](T old) { return T(old - v); }); }
template <typename T, typename V> T atomicMin(T* a, V v) { return atomic_update(a, [=](T old) { return T(v) < old ? T(v) : old; }); }
template <typename T, typename V> T atomicMax(T* a, V v) { return atomic_update(a, [=](T old) { return old < T(v) ? T(v) : old; }); }
template <typename T, typename V> T atomicAnd(T* a, V v) { return atomic_update(a, [=](T old) { return T(old & v); }); }
template <typename T, typename V> T atomicOr(T* a, V v) { return atomic_update(a, [=](T old) { return T(old | v); }); }
template <typename T, typename V> T atomicXor(T* a, V v) { return atomic_update(a, [=](T old) { return T(old ^ v); }); }
template <typename T, typename V> T atomicExch(T* a, V v) { return atomic_update(a, [=](T) { return T(v); }); }
template <typename T, typename V> T atomicCAS(T* a, V expected, V v) {
  return atomic_update(a, [=](T old) { return old == T(expected) ? T(v) : old; });
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// ---- Mathematics ----------------------------------------------------------------------------------------------------

template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
template <typename T> T __ldg(const T* address) { return *address; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __dp4a(int a, int b, int c) {  // four products of signed bytes, added up
  for (int i = 0; i < 32; i += 8) c += int8_t(a >> i) * int8_t(b >> i);
  return c;
}

// ---- Tensor cores: what the lanes hold, put together, multiplied, and taken apart again ------------------------------

namespace cuda_on_cpu {

inline float from_bf16(uint32_t pair, unsigned which) {
  uint32_t bits = which ? pair & 0xFFFF0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline int from_int8(uint32_t four, unsigned which) { return int8_t(four >> (8 * which)); }

template <typename T>
struct Mma { T* d; const uint32_t *a, *b; };

// d += a b, of 16 x K by K x 8, K = 8 PER: a register holds PER elements of K, which `element` takes out.
template <typename T, unsigned PER, T (*element)(uint32_t, unsigned)>
void complete_mma(void** given) {
  constexpr unsigned K = 8 * PER;
  T a[16][K], b[K][8];
  for (unsigned lane = 0; lane < 32; lane++) {
    auto* mine = static_cast<Mma<T>*>(given[lane]);
    if (!mine) throw std::runtime_error(machine->kernel + ": mma: lane " + std::to_string(lane) + " does not take part");
    unsigned group = lane / 4, first = lane % 4 * PER;
    for (unsigned i = 0; i < PER; i++)
      for (unsigned half = 0; half < 2; half++) {
        a[group][half * K / 2 + first + i] = element(mine->a[2 * half], i);
        a[group + 8][half * K / 2 + first + i] = element(mine->a[2 * half + 1], i);
        b[half * K / 2 + first + i][group] = element(mine->b[half], i);
      }
  }
  for (unsigned lane = 0; lane < 32; lane++)
    for (unsigned i = 0; i < 4; i++) {
      unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      T& d = static_cast<Mma<T>*>(given[lane])->d[i];
      for (unsigned k = 0; k < K; k++) d += a[row][k] * b[k][column];
    }
}

struct LoadMatrix { const uint16_t* row; uint16_t* r; };

template <bool TRANSPOSE>
void complete_load_matrix(void** given) {
  for (unsigned lane = 0; lane < 32; lane++)
    for (unsigned i = 0; i < 8; i++) {  // register i / 2, its half i % 2
      unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
      auto* from = static_cast<LoadMatrix*>(given[i / 2 * 8 + (TRANSPOSE ? column : row)]);
      static_cast<LoadMatrix*>(given[lane])->r[i] = from->row[TRANSPOSE ? row : column];
    }
}

}  // namespace cuda_on_cpu

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], HERE) {
  cuda_on_cpu::Mma<float> given{d, a, b};
  cuda_on_cpu::collective(~0u, cuda_on_cpu::complete_mma<float, 2, cuda_on_cpu::from_bf16>, given, file, line);
}
inline void mma_m16n8k32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], HERE) {
  cuda_on_cpu::Mma<int> given{d, a, b};
  cuda_on_cpu::collective(~0u, cuda_on_cpu::complete_mma<int, 4, cuda_on_cpu::from_int8>, given, file, line);
}
template <bool TRANSPOSE>
void load_matrix_x4(uint32_t (&r)[4], const void* row, HERE) {
  cuda_on_cpu::LoadMatrix given{static_cast<const uint16_t*>(row), reinterpret_cast<uint16_t*>(r)};
  cuda_on_cpu::collective(~0u, cuda_on_cpu::complete_load_matrix<TRANSPOSE>, given, file, line);
}
#undef HERE
