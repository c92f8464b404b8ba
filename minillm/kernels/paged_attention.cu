// Paged decode attention (step 6): one new token a sequence, over keys and values that lie in blocks of a pool.
// Papers: Kwon et al. 2023 (PagedAttention), Ainslie et al. 2023 (grouped queries), Dao et al. 2023 (Flash-Decoding).
//
// What it costs: the bytes of the sequences' keys and values. 64 sequences of 4,096 tokens, 8 KV heads of 128, bfloat16:
// 1.07 GB, at best 0.32 ms on an H100, 0.22 ms on an H200 (datasheet).
//
// version 1: a block per sequence and query head, as in decode_attention.cu, with a look into the block table for each
//            token. With 4 query heads to a KV head, all is read four times (the L2 cache catches some of it), 2 bytes a lane.
// version 2: a block per sequence and KV head. All query heads of the group are kept in registers, so a key is read once
//            for all of them. A lane holds 8 channels: one load of 16 bytes; LANES of them hold a head, and a warp takes
//            32 / LANES tokens at once. The slots of 32 tokens are looked up together, one by each lane.
// version 3: the same, with the sequence split over several blocks (split-K, Flash-Decoding): a single long sequence has
//            8 KV heads, and the GPU 132 multiprocessors. Each block leaves a maximum, a sum and a weighted mean; a second
//            kernel merges them. With as many sequences as fill the GPU it is version 2.
//
// Keys and values may be int8 codes (step 8): half the bytes, so half the time at best. A key's scale multiplies its score,
// and a value's scale its weight, once a token instead of once a channel. A lane's 8 channels are 8 bytes then, and a
// warp's load 256 bytes in one piece: wider loads would double the registers that hold queries and sums.
#include "attention.h"

// ---- version 1 ------------------------------------------------------------------------------------------------------

template <typename T, typename E>
__global__ void __launch_bounds__(128)
paged_attention_per_head(const T* q, int64_t q_stride, Pool<E> keys, Pool<E> values, const int64_t* block_tables,
                         const int64_t* seq_lens, T* out, int W, int block_size, int kv_heads, int group, int head_dim) {
  constexpr int MAX_CHANNELS = 8;
  const int head = blockIdx.x, heads = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t b = blockIdx.y;
  const int length = int(seq_lens[b]);

  float query[MAX_CHANNELS] = {}, acc[MAX_CHANNELS] = {};
  float largest = NO_SCORE, sum = 0;
  for (int c = 0; c < MAX_CHANNELS; c++)
    if (int i = c * 32 + lane; i < head_dim)
      query[c] = float(q[b * q_stride + head * head_dim + i]) * (LOG2_E * rsqrtf(head_dim));

  for (int t = warp; t < length; t += 4) {
    int64_t row = row_of(slot_of(block_tables + b * W, t, block_size), head / group, kv_heads);
    float score = 0;
    for (int c = 0; c < MAX_CHANNELS; c++)
      if (int i = c * 32 + lane; i < head_dim) score += query[c] * float(keys.elements[row * head_dim + i]);
    score = warp_sum(score) * scale_of(keys, row);
    float now = fmaxf(largest, score), rescale = exp2f(largest - now), weight = exp2f(score - now);
    largest = now;
    sum = sum * rescale + weight;
    weight *= scale_of(values, row);
    for (int c = 0; c < MAX_CHANNELS; c++)
      if (int i = c * 32 + lane; i < head_dim) acc[c] = acc[c] * rescale + weight * float(values.elements[row * head_dim + i]);
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
    out[(b * heads + head) * head_dim + i] = T(total > 0 ? value / total : 0.0f);
  }
}

// ---- versions 2 and 3 -----------------------------------------------------------------------------------------------

struct Partial {  // what split-K leaves, [B, heads, splits] each
  float* largest;
  float* sum;
  float* mean;  // [B, heads, splits, head_dim]
};

template <typename E>
__device__ inline void load_channels(const E* from, bool there, float (&to)[8]) {  // 8 channels, at most 16 bytes a load
  constexpr int N = sizeof(E) == 1 ? 8 : PER_16_BYTES<E>;
#pragma unroll
  for (int i = 0; i < 8; i += N) {
    Vec<E, N> part{};
    if (there) part = load<N>(from + i);
#pragma unroll
    for (int j = 0; j < N; j++) to[i + j] = there ? float(part.at[j]) : 0.0f;
  }
}

template <typename T, typename E, int LANES, int HEADS>  // lanes that hold a head; query heads that a block serves
__global__ void __launch_bounds__(128, HEADS == 1 ? 6 : 2)  // at least so many blocks on a multiprocessor
paged_attention_packed(const T* q, int64_t q_stride, Pool<E> keys, Pool<E> values, const int64_t* block_tables,
                       const int64_t* seq_lens, T* out, Partial partial, int W, int block_size, int kv_heads, int group,
                       int head_dim) {
  constexpr int TOKENS = 32 / LANES;  // that a warp takes at once
  constexpr int STEPS = HEADS > 4 ? 2 : 4;  // that many loads are under way, then the softmax is rescaled once
  const int chunks = (group + HEADS - 1) / HEADS;  // a group larger than HEADS is served by several blocks
  const int kv_head = blockIdx.x / chunks, first = blockIdx.x % chunks * HEADS, heads = kv_heads * group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = lane % LANES * 8;
  const int64_t b = blockIdx.y;
  const int split = blockIdx.z, splits = gridDim.z, length = int(seq_lens[b]);
  const int served = min(HEADS, group - first);
  const bool active = channel < head_dim;

  float query[HEADS][8], acc[HEADS][8] = {}, largest[HEADS], sum[HEADS] = {};
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    largest[h] = NO_SCORE;
    const T* from = q + b * q_stride + (kv_head * group + first + h) * head_dim + channel;
    for (int i = 0; i < 8; i++)
      query[h][i] = active && h < served ? float(from[i]) * (LOG2_E * rsqrtf(head_dim)) : 0.0f;
  }

  // A tile is 32 tokens; the splits share the tiles evenly, and the warps of a block take them in turn.
  const int tiles = (length + 31) / 32, per_split = (tiles + splits - 1) / splits;
  for (int tile = split * per_split + warp; tile < min(tiles, (split + 1) * per_split); tile += 4) {
    const int token = tile * 32 + lane;
    const int slot = token < length ? slot_of(block_tables + b * W, token, block_size) : -1;
#pragma unroll 1
    for (int step = 0; step < LANES; step += STEPS) {
      float key[STEPS][8], score[STEPS][HEADS];
      int from[STEPS];  // slots; -1: no token
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        from[s] = __shfl_sync(FULL_WARP, slot, (step + s) * TOKENS + lane / LANES);
        const bool there = from[s] >= 0 && active;
        const int64_t row = row_of(from[s], kv_head, kv_heads);
        load_channels(keys.elements + row * head_dim + channel, there, key[s]);
        const float scale = scale_of(keys, row, there);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
          score[s][h] = 0;
          for (int i = 0; i < 8; i++) score[s][h] += query[h][i] * key[s][i];
          for (int other = LANES / 2; other > 0; other /= 2)
            score[s][h] += __shfl_xor_sync(FULL_WARP, score[s][h], other);
          score[s][h] = from[s] < 0 ? -INFINITY : score[s][h] * scale;  // no token, no weight
        }
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float now = largest[h];
        for (int s = 0; s < STEPS; s++) now = fmaxf(now, score[s][h]);
        float rescale = exp2f(largest[h] - now);
        largest[h] = now;
        sum[h] *= rescale;
        for (int i = 0; i < 8; i++) acc[h][i] *= rescale;
        for (int s = 0; s < STEPS; s++) sum[h] += score[s][h] = exp2f(score[s][h] - now);
      }
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        float value[8];
        const bool there = from[s] >= 0 && active;
        const int64_t row = row_of(from[s], kv_head, kv_heads);
        load_channels(values.elements + row * head_dim + channel, there, value);
        const float scale = scale_of(values, row, there);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
          const float weight = score[s][h] * scale;
          for (int i = 0; i < 8; i++) acc[h][i] += weight * value[i];
        }
      }
    }
  }

  // Merge: first the token groups of a warp, by shuffles, then the warps, through shared memory.
  __shared__ float largest_of[4][HEADS], sum_of[4][HEADS], acc_of[4][HEADS][LANES * 8];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    for (int other = LANES; other < 32; other *= 2) {
      float their_largest = __shfl_xor_sync(FULL_WARP, largest[h], other), now = fmaxf(largest[h], their_largest);
      float mine = exp2f(largest[h] - now), theirs = exp2f(their_largest - now);
      largest[h] = now;
      sum[h] = sum[h] * mine + __shfl_xor_sync(FULL_WARP, sum[h], other) * theirs;
      for (int i = 0; i < 8; i++) acc[h][i] = acc[h][i] * mine + __shfl_xor_sync(FULL_WARP, acc[h][i], other) * theirs;
    }
    if (lane < LANES)
      for (int i = 0; i < 8; i++) acc_of[warp][h][channel + i] = acc[h][i];
    if (lane == 0) largest_of[warp][h] = largest[h], sum_of[warp][h] = sum[h];
  }
  __syncthreads();
  for (int item = threadIdx.x; item < served * head_dim; item += blockDim.x) {
    const int h = item / head_dim, i = item % head_dim;
    float all = NO_SCORE, total = 0, value = 0;
    for (int w = 0; w < 4; w++) all = fmaxf(all, largest_of[w][h]);
    for (int w = 0; w < 4; w++) {
      float scale = exp2f(largest_of[w][h] - all);
      total += sum_of[w][h] * scale, value += acc_of[w][h][i] * scale;
    }
    value = total > 0 ? value / total : 0.0f;
    const int64_t row = b * heads + kv_head * group + first + h;
    if (splits == 1) {
      out[row * head_dim + i] = T(value);
    } else {
      partial.mean[(row * splits + split) * head_dim + i] = value;
      if (i == 0) partial.largest[row * splits + split] = all, partial.sum[row * splits + split] = total;
    }
  }
}

template <typename T>
__global__ void merge_splits(Partial partial, T* out, int splits, int head_dim) {
  const int64_t row = blockIdx.x;
  float all = NO_SCORE, total = 0;
  for (int s = 0; s < splits; s++) all = fmaxf(all, partial.largest[row * splits + s]);
  for (int s = 0; s < splits; s++) total += partial.sum[row * splits + s] * exp2f(partial.largest[row * splits + s] - all);
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    float value = 0;
    for (int s = 0; s < splits; s++) {
      float weight = partial.sum[row * splits + s] * exp2f(partial.largest[row * splits + s] - all);
      value += weight * partial.mean[(row * splits + s) * head_dim + i];
    }
    out[row * head_dim + i] = T(total > 0 ? value / total : 0.0f);
  }
}

// ---- Host -----------------------------------------------------------------------------------------------------------

// f.template operator()<LANES, HEADS>(): as few lanes as hold a head, as few registers as the group needs.
template <typename F>
void choose_packing(int64_t head_dim, int64_t group, F f) {
  auto with_heads = [&](auto lanes) {
    if (group == 1) f(lanes, std::integral_constant<int, 1>());
    else if (group <= 4) f(lanes, std::integral_constant<int, 4>());
    else f(lanes, std::integral_constant<int, 8>());
  };
  if (head_dim <= 32) with_heads(std::integral_constant<int, 4>());
  else if (head_dim <= 64) with_heads(std::integral_constant<int, 8>());
  else if (head_dim <= 128) with_heads(std::integral_constant<int, 16>());
  else with_heads(std::integral_constant<int, 32>());
}

// Two blocks for each of 132 multiprocessors, and at least 256 tokens for each block.
inline int64_t choose_splits(int64_t blocks, int64_t tokens) {
  return std::max<int64_t>(std::min(ceil_div(264, std::max<int64_t>(blocks, 1)), ceil_div(tokens, 256)), 1);
}

// q [B, heads, head_dim]; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim]; block_tables [B, W], seq_lens [B]
// int64 -> [B, heads, head_dim], zero for a sequence of length 0. num_splits, of version 3: 0 lets it choose. k_scale,
// v_scale [num_blocks, block_size, kv_heads] float32: of int8 caches.
Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, int64_t version,
                       int64_t num_splits, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  require_paged(q, k_cache, v_cache, block_tables, seq_lens, k_scale, v_scale);
  require(q.size(0) == seq_lens.numel(), "q", q, "[B, heads, head_dim] with seq_lens [B]");
  require(version >= 1 && version <= 3, "version", version, "1, 2 or 3");
  require(num_splits >= 0 && num_splits <= 1024, "num_splits", num_splits, "0 (choose) to 1024");
  const int64_t B = q.size(0), heads = q.size(1), W = block_tables.size(1), block_size = k_cache.size(1);
  const int64_t kv_heads = k_cache.size(2), head_dim = k_cache.size(3), group = heads / kv_heads;
  Tensor out = torch::stable::new_empty(q, {B, heads, head_dim});

  dispatch_dtype("q", q, [&](auto zero) {
    using T = decltype(zero);
    dispatch_pool<T>(k_cache, [&](auto element) {
      using E = decltype(element);
      auto run = [&](auto kernel, dim3 grid, auto... more) {
        launch(kernel, grid, 128, 0, stream_of(q), data<T>(q), q.stride(0), pool_of<E>(k_cache, k_scale),
               pool_of<E>(v_cache, v_scale), data<int64_t>(block_tables), data<int64_t>(seq_lens), mutable_data<T>(out),
               more..., W, block_size, kv_heads, group, head_dim);
      };
      const bool aligned = aligned_16<E>(k_cache, 0) && aligned_16<E>(v_cache, 0);
      if (version == 1 || !aligned) return run(paged_attention_per_head<T, E>, dim3(heads, B));

      choose_packing(head_dim, group, [&](auto lanes, auto heads_at_once) {
        const int64_t blocks = kv_heads * ceil_div(group, heads_at_once);
        const int64_t splits = version == 2 ? 1 : num_splits ? num_splits : choose_splits(blocks * B, W * block_size);
        Partial partial{};
        Tensor scratch;
        if (splits > 1) {
          scratch = torch::stable::new_empty(q, {B * heads * splits * (head_dim + 2)}, ScalarType::Float);
          partial.largest = mutable_data<float>(scratch);
          partial.sum = partial.largest + B * heads * splits;
          partial.mean = partial.sum + B * heads * splits;
        }
        run(paged_attention_packed<T, E, lanes, heads_at_once>, dim3(blocks, B, splits), partial);
        if (splits > 1)
          launch(merge_splits<T>, B * heads, 128, 0, stream_of(q), partial, mutable_data<T>(out), splits, head_dim);
      });
    });
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }
