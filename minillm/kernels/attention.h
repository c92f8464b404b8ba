// What the attention kernels share: the online softmax, and where the token of a sequence lies.
#pragma once
#include "int8.h"
#include "tensors.h"

// Softmax without knowing the maximum beforehand: what was added up so far is rescaled whenever a larger score comes.
// Powers of 2 instead of e (one instruction): scores are multiplied by log2(e) first.
// Papers: Milakov & Gimelshein 2018, Dao et al. 2022 (FlashAttention, section 3.1).
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NO_SCORE = -1e30f;  // the maximum of nothing; finite, since infinity minus infinity is NaN

// Where token t of a sequence lies in the pool. As int: a pool of 2^31 tokens would be petabytes. What is multiplied by
// the size of a token must be 64 bits.
__device__ inline int slot_of(const int64_t* block_table, int t, int block_size) {
  return int(block_table[t / block_size]) * block_size + t % block_size;
}
__device__ inline int64_t row_of(int slot, int kv_head, int kv_heads) { return int64_t(slot) * kv_heads + kv_head; }

// The keys, or the values, of a pool: rows of head_dim elements, one for each token and KV head. Elements are of the
// queries' type, or (step 8) int8 codes, with a float32 scale for each row.
template <typename E>
struct Pool {
  const E* elements;
  const float* scales;  // of int8 codes, else nullptr
};

template <typename E>
__device__ inline float scale_of(const Pool<E>& pool, int64_t row, bool there = true) {  // if not there, nothing is read
  if constexpr (std::is_same_v<E, int8_t>) return there ? pool.scales[row] : 0.0f;
  else return 1.0f;
}

inline void require_paged(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                          const Tensor& seq_lens, const std::optional<Tensor>& k_scale,
                          const std::optional<Tensor>& v_scale) {
  require(k_cache.dim() == 4 && k_cache.is_contiguous(), "k_cache", k_cache,
          "[num_blocks, block_size, kv_heads, head_dim], contiguous");
  require(v_cache.dim() == 4 && v_cache.is_contiguous() && v_cache.size(0) == k_cache.size(0) &&
          v_cache.size(1) == k_cache.size(1) && v_cache.size(2) == k_cache.size(2) &&
          v_cache.size(3) == k_cache.size(3), "v_cache", v_cache, "like k_cache");
  require(k_cache.size(0) * k_cache.size(1) < (int64_t(1) << 31), "k_cache", k_cache, "of less than 2^31 tokens");
  const int64_t head_dim = k_cache.size(3), kv_heads = k_cache.size(2);
  require(q.dim() == 3 && q.size(2) == head_dim && q.stride(2) == 1 && q.stride(1) == head_dim, "q", q,
          "[N, heads, head_dim], each token's in one piece");
  require(kv_heads > 0 && q.size(1) % kv_heads == 0, "heads", q.size(1),
          "a multiple of kv_heads=" + std::to_string(kv_heads));
  require(head_dim % 8 == 0 && head_dim >= 8 && head_dim <= 256, "head_dim", head_dim, "a multiple of 8, at most 256");
  require(block_tables.dim() == 2 && block_tables.size(0) == seq_lens.numel(), "block_tables", block_tables,
          "[B, W] with seq_lens [B]");
  require_pool(q, "k_cache", k_cache, "k_scale", k_scale);
  require_pool(q, "v_cache", v_cache, "v_scale", v_scale);
  require(k_scale.has_value() == v_scale.has_value(), "v_scale", v_scale.has_value(), "given if k_scale is");
  require_int64(q, "block_tables", block_tables);
  require_int64(q, "seq_lens", seq_lens);
}

// f(E()) with E the type of the pool's elements: int8_t, or T.
template <typename T, typename F>
void dispatch_pool(const Tensor& cache, F f) {
  if (cache.scalar_type() == ScalarType::Char) f(int8_t());
  else f(T());
}
template <typename E>
Pool<E> pool_of(const Tensor& cache, const std::optional<Tensor>& scale) {
  return {data<E>(cache), scale ? data<float>(*scale) : nullptr};
}
