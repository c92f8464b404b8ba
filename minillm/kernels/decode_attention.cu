// Decode attention over a contiguous cache (step 2): one new token's queries over the M tokens kept.
// out = softmax(q k^T / sqrt(head_dim)) v, online: k and v are read once, no score is kept.
//
// What it costs: the bytes of k and v, 2 M kv_heads head_dim elements. 32k tokens of 8 heads of 128 in bfloat16 are 134 MB:
// at best 40 us on an H100, 28 us on an H200. This kernel is far from that: it is the simple one, from which
// paged_attention.cu starts. Its k and v are read once per query head, not once per KV head, and it is as many blocks as
// there are heads, where an H100 has 132 multiprocessors.
//
// A block per query head. Each of its four warps takes every fourth token: the lanes share the channels, the score is
// a sum over the warp. Each warp has a softmax of its own over its tokens; at the end the four are merged.
#include "attention.h"

template <typename T>
__global__ void __launch_bounds__(128)
decode_attention_kernel(const T* q, const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* out, int M, int group,
                        int head_dim) {
  constexpr int MAX_CHANNELS = 8;  // a lane's, of at most 256
  const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  k += head / group * head_dim, v += head / group * head_dim;  // the query heads of a group share a KV head

  float query[MAX_CHANNELS] = {}, acc[MAX_CHANNELS] = {};
  float largest = NO_SCORE, sum = 0;
  for (int c = 0; c < MAX_CHANNELS; c++)
    if (int i = c * 32 + lane; i < head_dim) query[c] = float(q[head * head_dim + i]) * (LOG2_E * rsqrtf(head_dim));

  for (int t = warp; t < M; t += 4) {
    float score = 0;
    for (int c = 0; c < MAX_CHANNELS; c++)
      if (int i = c * 32 + lane; i < head_dim) score += query[c] * float(k[t * k_stride + i]);
    score = warp_sum(score);
    float now = fmaxf(largest, score), rescale = exp2f(largest - now), weight = exp2f(score - now);
    largest = now;
    sum = sum * rescale + weight;
    for (int c = 0; c < MAX_CHANNELS; c++)
      if (int i = c * 32 + lane; i < head_dim) acc[c] = acc[c] * rescale + weight * float(v[t * v_stride + i]);
  }

  __shared__ float largest_of[4], sum_of[4], acc_of[4][256];
  if (lane == 0) largest_of[warp] = largest, sum_of[warp] = sum;
  for (int c = 0; c < MAX_CHANNELS; c++) acc_of[warp][c * 32 + lane] = acc[c];
  __syncthreads();
  float all = fmaxf(fmaxf(largest_of[0], largest_of[1]), fmaxf(largest_of[2], largest_of[3])), total = 0;
  for (int w = 0; w < 4; w++) total += sum_of[w] * exp2f(largest_of[w] - all);
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    float value = 0;
    for (int w = 0; w < 4; w++) value += acc_of[w][i] * exp2f(largest_of[w] - all);
    out[head * head_dim + i] = T(total > 0 ? value / total : 0.0f);
  }
}

// q [heads, head_dim]; k, v [M, kv_heads, head_dim], a token's in one piece -> [heads, head_dim], zero if M is 0
Tensor decode_attention(Tensor q, Tensor k, Tensor v) {
  require(q.dim() == 2 && q.is_contiguous(), "q", q, "[heads, head_dim], contiguous");
  const int64_t heads = q.size(0), head_dim = q.size(1);
  for (auto [name, t] : {std::pair{"k", k}, std::pair{"v", v}}) {
    require(t.dim() == 3 && t.size(0) == k.size(0) && t.size(1) == k.size(1) && t.size(2) == head_dim &&
            (t.numel() == 0 || (t.stride(2) == 1 && t.stride(1) == head_dim)), name, t,
            "[M, kv_heads, head_dim], a token's in one piece");
    require_like(q, name, t);
  }
  require(k.size(1) > 0 && heads % k.size(1) == 0, "heads", heads, "a multiple of kv_heads=" + std::to_string(k.size(1)));
  require(head_dim >= 1 && head_dim <= 256, "head_dim", head_dim, "at most 256");
  Tensor out = torch::stable::new_empty(q, {heads, head_dim});
  dispatch_dtype("q", q, [&](auto zero) {
    using T = decltype(zero);
    launch(decode_attention_kernel<T>, heads, 128, 0, stream_of(q), data<T>(q), data<T>(k), k.stride(0), data<T>(v),
           v.stride(0), mutable_data<T>(out), k.size(0), heads / k.size(1), head_dim);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention)); }
