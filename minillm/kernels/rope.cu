// RoPE and KV store in one pass: turn q and k by their token's position, put k and v into the cache at the token's slot.
// Papers: Su et al. 2021 (RoPE), Kwon et al. 2023 (slots: slot = block * block_size + place in the block).
//
// What it costs: bytes. Each of q, k and v is read once and written once. Separate ops would write the turned k to memory
// and read it again to store it. 8192 tokens of 32 + 2 x 8 heads of 128 in bfloat16 are 201 MB: at best 60 us on an H100,
// 42 us on an H200.
//
// A block per token. A thread turns N pairs: channels i.. of the first half of a head, and their partners in the second.
// A token with slot -1 (it only fills up the batch) is turned, but stored nowhere.
//
// Into an int8 cache (step 8) k and v go as codes, with a scale for each head: its largest magnitude is at 127. So a warp
// takes a whole head, and finds that with five shuffles. Less is written, and what is read stays the same.
#include "int8.h"
#include "tensors.h"

template <typename T, int N>
__global__ void rope_and_store_kernel(const T* qkv, int64_t token_stride, const int64_t* positions, const float* cos_sin,
                                      const int64_t* slots, T* q_out, T* k_cache, T* v_cache, int heads, int kv_heads,
                                      int head_dim) {
  const int64_t token = blockIdx.x, slot = slots[token];
  const T* in = qkv + token * token_stride;
  const float* cosines = cos_sin + positions[token] * head_dim;
  const float* sines = cosines + head_dim / 2;
  const int per_head = head_dim / 2 / N;  // pieces of N pairs

  for (int piece = threadIdx.x; piece < (heads + kv_heads) * per_head; piece += blockDim.x) {
    int head = piece / per_head, i = piece % per_head * N;  // query heads first, then key heads
    if (head >= heads && slot < 0) break;
    T* out = head < heads ? q_out + (token * heads + head) * head_dim
                          : k_cache + (slot * kv_heads + head - heads) * head_dim;
    Vec<T, N> a = load<N>(in + head * head_dim + i), b = load<N>(in + head * head_dim + head_dim / 2 + i);
    for (int j = 0; j < N; j++) {
      float first = float(a.at[j]), second = float(b.at[j]);
      a.at[j] = T(first * cosines[i + j] - second * sines[i + j]);
      b.at[j] = T(second * cosines[i + j] + first * sines[i + j]);
    }
    store(out + i, a);
    store(out + head_dim / 2 + i, b);
  }
  if (slot < 0) return;
  const T* v = in + (heads + kv_heads) * head_dim;  // the value heads lie side by side, here and in the cache
  for (int i = threadIdx.x * N; i < kv_heads * head_dim; i += blockDim.x * N)
    store(v_cache + slot * kv_heads * head_dim + i, load<N>(v + i));
}

template <typename T>
__global__ void rope_and_quantize_kernel(const T* qkv, int64_t token_stride, const int64_t* positions, const float* cos_sin,
                                         const int64_t* slots, T* q_out, int8_t* k_cache, int8_t* v_cache, float* k_scale,
                                         float* v_scale, int heads, int kv_heads, int head_dim) {
  constexpr int MAX_PAIRS = 4;  // a lane's, of a head of 256
  const int64_t token = blockIdx.x, slot = slots[token];
  const float* cosines = cos_sin + positions[token] * head_dim;
  const float* sines = cosines + head_dim / 2;
  const int half = head_dim / 2, lane = threadIdx.x % 32;

  for (int head = threadIdx.x / 32; head < heads + 2 * kv_heads; head += blockDim.x / 32) {
    if (head >= heads && slot < 0) break;
    const T* in = qkv + token * token_stride + head * head_dim;
    T first[MAX_PAIRS], second[MAX_PAIRS];  // as the cache would hold them if it were no int8
    float largest = 0;
#pragma unroll
    for (int n = 0; n < MAX_PAIRS; n++) {
      int i = n * 32 + lane;
      if (i >= half) break;
      float a = float(in[i]), b = float(in[half + i]);
      const bool turned = head < heads + kv_heads;  // queries and keys, not values
      first[n] = T(turned ? a * cosines[i] - b * sines[i] : a);
      second[n] = T(turned ? b * cosines[i] + a * sines[i] : b);
      largest = absmax(absmax(largest, float(first[n])), float(second[n]));
    }
    const bool value = head >= heads + kv_heads;
    const int kv_head = value ? head - heads - kv_heads : head - heads;
    const int64_t row = slot * kv_heads + kv_head;  // of the pool
    const float scale = scale_for(warp_absmax(largest));
    if (head >= heads && lane == 0) (value ? v_scale : k_scale)[row] = scale;
#pragma unroll
    for (int n = 0; n < MAX_PAIRS; n++) {
      int i = n * 32 + lane;
      if (i >= half) break;
      if (head < heads) {
        T* out = q_out + (token * heads + head) * head_dim;
        out[i] = first[n], out[half + i] = second[n];
      } else {
        int8_t* out = (value ? v_cache : k_cache) + row * head_dim;
        out[i] = code_of(float(first[n]), scale), out[half + i] = code_of(float(second[n]), scale);
      }
    }
  }
}

// qkv [N, heads + 2 kv_heads, head_dim], positions [N], cos_sin [max_position, head_dim] float32 with the cosines first,
// k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim], slot_mapping [N]; k_scale, v_scale [num_blocks, block_size,
// kv_heads] float32: of int8 caches -> turned q [N, heads, head_dim]
Tensor rope_and_store(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
                      int64_t num_heads, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  require(k_cache.dim() == 4 && k_cache.is_contiguous(), "k_cache", k_cache,
          "[num_blocks, block_size, kv_heads, head_dim], contiguous");
  require(v_cache.dim() == 4 && v_cache.is_contiguous() && v_cache.numel() == k_cache.numel(), "v_cache", v_cache,
          "like k_cache");
  const int64_t tokens = qkv.size(0), kv_heads = k_cache.size(2), head_dim = k_cache.size(3);
  require(qkv.dim() == 3 && qkv.size(1) == num_heads + 2 * kv_heads && qkv.size(2) == head_dim && qkv.stride(2) == 1 &&
          qkv.stride(1) == head_dim, "qkv", qkv, "[N, heads + 2 kv_heads, head_dim], each token's in one piece");
  require(head_dim % 2 == 0, "head_dim", head_dim, "even");
  require(cos_sin.dim() == 2 && cos_sin.size(1) == head_dim && cos_sin.is_contiguous() &&
          cos_sin.scalar_type() == ScalarType::Float, "cos_sin", cos_sin, "[max_position, head_dim] float32");
  require(positions.numel() == tokens, "positions", positions, "[N]");
  require(slot_mapping.numel() == tokens, "slot_mapping", slot_mapping, "[N]");
  require_int64(qkv, "positions", positions);
  require_int64(qkv, "slot_mapping", slot_mapping);
  require_pool(qkv, "k_cache", k_cache, "k_scale", k_scale);
  require_pool(qkv, "v_cache", v_cache, "v_scale", v_scale);
  require(k_scale.has_value() == v_scale.has_value(), "v_scale", v_scale.has_value(), "given if k_scale is");
  require(!k_scale || head_dim <= 256, "head_dim", head_dim, "at most 256 in an int8 cache");

  Tensor q = torch::stable::new_empty(qkv, {tokens, num_heads, head_dim});
  dispatch_dtype("qkv", qkv, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = PER_16_BYTES<T>;
    auto run = [&](auto kernel, auto... pools) {
      launch(kernel, tokens, 128, 0, stream_of(qkv), data<T>(qkv), qkv.stride(0), data<int64_t>(positions),
             data<float>(cos_sin), data<int64_t>(slot_mapping), mutable_data<T>(q), pools..., num_heads, kv_heads, head_dim);
    };
    if (k_scale)
      return run(rope_and_quantize_kernel<T>, mutable_data<int8_t>(k_cache), mutable_data<int8_t>(v_cache),
                 mutable_data<float>(*k_scale), mutable_data<float>(*v_scale));
    T *k = mutable_data<T>(k_cache), *v = mutable_data<T>(v_cache);
    const bool aligned = aligned_16<T>(qkv, qkv.stride(0)) && aligned_16<T>(k_cache, 0) && aligned_16<T>(v_cache, 0);
    if (aligned && head_dim % (2 * N) == 0) run(rope_and_store_kernel<T, N>, k, v);
    else if (aligned && head_dim % 8 == 0) run(rope_and_store_kernel<T, 4>, k, v);  // half a head is no multiple of 16 bytes
    else run(rope_and_store_kernel<T, 1>, k, v);
  });
  return q;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("rope_and_store", TORCH_BOX(&rope_and_store)); }
