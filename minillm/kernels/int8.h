// What the kernels of step 8 share: a row's scale and its codes, as in quantization.py.
#pragma once
#include "tensors.h"

constexpr float CODE_MAX = 127;
constexpr float SMALLEST_SCALE = 1.17549435e-38f;  // of a row of zeros: no division by zero, and codes of zero

// The larger magnitude. NaN wins, so that a row that holds one gets a scale that shows it (fmaxf would hide it).
__device__ inline float absmax(float largest, float x) {
  x = fabsf(x);
  return largest >= x || largest != largest ? largest : x;
}
__device__ inline float warp_absmax(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value = absmax(value, __shfl_xor_sync(FULL_WARP, value, offset));
  return value;
}

__device__ inline float scale_for(float largest) {
  const float scale = largest / CODE_MAX;
  return scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
}
__device__ inline int8_t code_of(float x, float scale) {
  const float code = rintf(x / scale);  // halves to the even one, as torch rounds
  return code != code ? int8_t(0) : int8_t(code > CODE_MAX ? CODE_MAX : code < -CODE_MAX ? -CODE_MAX : code);
}

// A pool is like the queries, or int8 with scales.
inline void require_pool(const Tensor& like, const char* name, const Tensor& cache, const char* scale_name,
                         const std::optional<Tensor>& scale) {
  if (!scale) return require_like(like, name, cache);
  require(cache.scalar_type() == ScalarType::Char, name, cache, "int8, since there are scales");
  require(cache.is_cuda() == like.is_cuda(), name, cache, "on the same device as the other tensors");
  require(scale->dim() == 3 && scale->numel() * cache.size(3) == cache.numel() && scale->is_contiguous() &&
          scale->scalar_type() == ScalarType::Float && scale->is_cuda() == like.is_cuda(), scale_name, *scale,
          "[num_blocks, block_size, kv_heads] float32, contiguous, on the same device");
}

inline void require_int8_linear(const Tensor& x, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& bias) {
  require(x.dim() == 2 && (x.stride(1) == 1 || x.size(1) <= 1), "x", x, "[N, K] with elements side by side");
  require(codes.dim() == 2 && codes.size(1) == x.size(1) && codes.is_contiguous() && codes.scalar_type() == ScalarType::Char,
          "codes", codes, "[M, K] int8, contiguous");
  require(scale.dim() == 1 && scale.size(0) == codes.size(0) && scale.is_contiguous() &&
          scale.scalar_type() == ScalarType::Float, "scale", scale, "[M] float32, contiguous");
  require(codes.is_cuda() == x.is_cuda() && scale.is_cuda() == x.is_cuda(), "codes", codes, "on x's device, as scale");
  if (!bias) return;
  require(bias->dim() == 1 && bias->size(0) == codes.size(0) && bias->is_contiguous(), "bias", *bias, "[M], contiguous");
  require_like(x, "bias", *bias);
}
