// What the kernels have in common: on the host, tensors that come in are checked and their dtype becomes a type; on the
// device, 16 bytes are loaded at once and the threads of a warp or a block add up.
//
// torch's stable ABI (torch/csrc/stable) is used: it compiles in two seconds where torch/extension.h takes half a minute.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <optional>
#include <sstream>

#include "cuda_on_cpu.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- Host -----------------------------------------------------------------------------------------------------------

inline std::string describe(const Tensor& t) {
  std::ostringstream text;
  text << "[";
  for (int64_t i = 0; i < t.dim(); i++) text << (i ? ", " : "") << t.size(i);
  text << "]";
  return text.str();
}

// Errors name the argument, what it is and what it must be.
inline void require(bool holds, const char* argument, const Tensor& t, const std::string& must_be) {
  if (!holds) throw std::runtime_error(std::string(argument) + " of shape " + describe(t) + ": must be " + must_be);
}
inline void require(bool holds, const char* argument, int64_t value, const std::string& must_be) {
  if (!holds) throw std::runtime_error(std::string(argument) + "=" + std::to_string(value) + ": must be " + must_be);
}
inline void require_like(const Tensor& like, const char* argument, const Tensor& t) {
  require(t.scalar_type() == like.scalar_type(), argument, t, "of the same dtype as the other tensors");
  require(t.is_cuda() == like.is_cuda() && t.get_device_index() == like.get_device_index(), argument, t,
          "on the same device as the other tensors");
}
inline void require_int64(const Tensor& like, const char* argument, const Tensor& t) {
  require(t.scalar_type() == ScalarType::Long && t.is_contiguous(), argument, t, "int64 and contiguous");
  require(t.is_cuda() == like.is_cuda(), argument, t, "on the same device as the other tensors");
}

template <typename T> const T* data(const Tensor& t) { return static_cast<const T*>(t.data_ptr()); }
template <typename T> T* mutable_data(const Tensor& t) { return static_cast<T*>(t.data_ptr()); }

inline cudaStream_t stream_of(const Tensor& t) { return current_stream(t.get_device_index()); }

// f(T()) with T the type of t's elements: float, c10::Half or c10::BFloat16.
template <typename F>
void dispatch_dtype(const char* argument, const Tensor& t, F f) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return f(float());
    case ScalarType::Half: return f(c10::Half());
    case ScalarType::BFloat16: return f(c10::BFloat16());
    default: require(false, argument, t, "float32, float16 or bfloat16");
  }
}

// Can rows of t, `stride` elements apart, be read 16 bytes at a time?
template <typename T>
bool aligned_16(const Tensor& t, int64_t stride) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 && stride * sizeof(T) % 16 == 0;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- Device ---------------------------------------------------------------------------------------------------------

constexpr uint32_t FULL_WARP = 0xffffffffu;

// N elements that lie side by side, aligned to their size: loaded and stored by one instruction if they are 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec { T at[N]; };
template <typename T>
constexpr int PER_16_BYTES = 16 / sizeof(T);

template <int N, typename T>
__device__ inline Vec<T, N> load(const T* address) { return *reinterpret_cast<const Vec<T, N>*>(address); }
template <int N, typename T>
__device__ inline void store(T* address, const Vec<T, N>& values) { *reinterpret_cast<Vec<T, N>*>(address) = values; }

// The sum over the warp, in every lane: five exchanges, in each of which a lane adds what its partner has.
__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}
__device__ inline float warp_max(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
  return value;
}

// The sum over the block, in every thread: each warp adds up, then each warp adds the warps' sums. The block's size is a
// multiple of 32.
__device__ inline float block_sum(float value) {
  __shared__ float warps[32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0.0f);
  __syncthreads();  // so that the next call does not write before all have read
  return value;
}
