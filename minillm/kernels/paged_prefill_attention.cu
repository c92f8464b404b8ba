// Paged prefill attention: a chunk of new tokens of each sequence, over all its tokens so far, causal. The chunks of
// several sequences lie one after the other (query_starts). One query a sequence is decode; a few are what speculative
// decoding verifies.
// Papers: Dao et al. 2022, Dao 2023 (FlashAttention and FlashAttention-2).
//
// What it costs: FLOPs. A query and a key that it sees are 4 head_dim FLOPs: for a prompt of n tokens about
// 2 n^2 heads head_dim (half of the square is masked). 8,192 tokens, 32 heads of 128: 0.55 TFLOP, at best 0.56 ms on an
// H100 or H200 (989 TFLOP/s dense bfloat16 by datasheet). The scores are never in memory: a tile of queries stays, tiles
// of keys and values come by, and the softmax is rescaled as they come.
//
// version 1: float32 arithmetic on tiles in shared memory, any dtype: 16 queries, 32 keys at a time, 8 threads a query.
// version 2: bfloat16 on the tensor cores: 64 queries, 64 keys at a time, a warp for 16 queries. Scores stay in the
//            registers in which mma left them, which are just where the second product wants them.
//            Other dtypes take version 1.
//
// Keys and values may be int8 codes (step 8): they are widened, with their scales, on the way into shared memory.
#include "attention.h"

// ---- version 1: shared memory, float32 ------------------------------------------------------------------------------

constexpr int QUERIES = 16, KEYS = 32, PER_QUERY = 8;  // threads a query

template <typename T, typename E>
__global__ void __launch_bounds__(QUERIES* PER_QUERY)
paged_prefill_shared(const T* q, int64_t q_stride, Pool<E> keys, Pool<E> values, const int64_t* block_tables,
                     const int64_t* seq_lens, const int64_t* query_starts, T* out, int W, int block_size, int kv_heads,
                     int group, int head_dim) {
  const int head = blockIdx.y, heads = gridDim.y, kv_head = head / group;
  const int64_t b = blockIdx.z, begin = query_starts[b];
  const int num_queries = int(query_starts[b + 1] - begin), length = int(seq_lens[b]);
  const int first = blockIdx.x * QUERIES;  // the tile's first query
  if (first >= num_queries) return;        // the grid is as large as the longest chunk needs
  const int64_t* block_table = block_tables + b * W;
  const int row = threadIdx.x / PER_QUERY, part = threadIdx.x % PER_QUERY;
  const int position = length - num_queries + first + row;  // of this thread's query: it sees keys 0 to position
  const bool real = first + row < num_queries;

  const int pitch = head_dim + 1;  // rows of keys start in different banks
  float* queries = dynamic_shared<float>();   // [QUERIES][head_dim]
  float* tile = queries + QUERIES * head_dim;  // [KEYS][pitch], first keys, then values
  float* weights = tile + KEYS * pitch;        // [QUERIES][KEYS]
  for (int item = threadIdx.x; item < QUERIES * head_dim; item += blockDim.x) {
    int r = item / head_dim, i = item % head_dim;
    queries[item] = first + r < num_queries
                        ? float(q[(begin + first + r) * q_stride + head * head_dim + i]) * (LOG2_E * rsqrtf(head_dim))
                        : 0.0f;
  }
  auto load_tile = [&](const Pool<E>& pool, int start) {
    for (int item = threadIdx.x; item < KEYS * head_dim; item += blockDim.x) {
      int t = start + item / head_dim, i = item % head_dim;
      float element = 0;
      if (t < length) {
        int64_t row = row_of(slot_of(block_table, t, block_size), kv_head, kv_heads);
        element = float(pool.elements[row * head_dim + i]) * scale_of(pool, row);
      }
      tile[item / head_dim * pitch + i] = element;
    }
  };

  float acc[256 / PER_QUERY] = {}, largest = NO_SCORE, sum = 0;  // channels part, part + 8, ...
  const int seen = min(length, length - num_queries + first + QUERIES);  // keys that the tile's last query sees
  for (int start = 0; start < seen; start += KEYS) {
    __syncthreads();  // all are done with the tile before
    load_tile(keys, start);
    __syncthreads();
    float score[KEYS / PER_QUERY], now = largest;
#pragma unroll
    for (int n = 0; n < KEYS / PER_QUERY; n++) {
      int j = n * PER_QUERY + part;
      score[n] = 0;
      for (int i = 0; i < head_dim; i++) score[n] += queries[row * head_dim + i] * tile[j * pitch + i];
      if (start + j > position || !real) score[n] = -INFINITY;
      now = fmaxf(now, score[n]);
    }
    for (int other = PER_QUERY / 2; other > 0; other /= 2) now = fmaxf(now, __shfl_xor_sync(FULL_WARP, now, other));
    float rescale = exp2f(largest - now);
    largest = now;
    sum *= rescale;
#pragma unroll
    for (int n = 0; n < KEYS / PER_QUERY; n++) {
      float weight = exp2f(score[n] - now);
      weights[row * KEYS + n * PER_QUERY + part] = weight;
      sum += weight;
    }
    __syncthreads();  // all are done with the keys, and the weights are there
    load_tile(values, start);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 256 / PER_QUERY; c++) {
      int i = c * PER_QUERY + part;
      if (i >= head_dim) break;
      acc[c] *= rescale;
      for (int j = 0; j < KEYS; j++) acc[c] += weights[row * KEYS + j] * tile[j * pitch + i];
    }
  }
  for (int other = PER_QUERY / 2; other > 0; other /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, other);
  if (!real) return;
#pragma unroll
  for (int c = 0; c < 256 / PER_QUERY; c++) {
    int i = c * PER_QUERY + part;
    if (i >= head_dim) break;
    out[((begin + first + row) * heads + head) * head_dim + i] = T(sum > 0 ? acc[c] / sum : 0.0f);
  }
}

// ---- version 2: tensor cores, bfloat16 ------------------------------------------------------------------------------

using bf16 = c10::BFloat16;
constexpr int TILE = 64;  // queries of a block, and keys at a time

__device__ inline uint32_t pack(float low, float high) {
  return uint32_t(bf16(low).x) | uint32_t(bf16(high).x) << 16;
}

// One 64 x D tile: in its row r the pool's row row_at(r) (-1: zeros), by pieces of 8 elements. The pool's rows are `stride`
// apart. 8 elements of padding a row of the tile, so that the eight that load_matrix_x4 reads at once lie in different banks.
template <int D, typename E, typename RowAt>
__device__ inline void load_rows(bf16* tile, const Pool<E>& pool, int64_t stride, int head_dim, RowAt row_at) {
  for (int item = threadIdx.x; item < TILE * D / 8; item += blockDim.x) {
    int r = item / (D / 8), i = item % (D / 8) * 8;
    const int64_t row = row_at(r);
    Vec<bf16, 8> piece;
    if (row < 0 || i >= head_dim) {
      for (int j = 0; j < 8; j++) piece.at[j] = bf16(0.0f);
    } else if constexpr (std::is_same_v<E, bf16>) {
      piece = load<8>(pool.elements + row * stride + i);
    } else {
      Vec<E, 8> codes = load<8>(pool.elements + row * stride + i);
      for (int j = 0; j < 8; j++) piece.at[j] = bf16(float(codes.at[j]) * scale_of(pool, row));
    }
    store(tile + r * (D + 8) + i, piece);
  }
}

template <int D, typename E>  // head_dim, rounded up to 64, 128 or 256; channels beyond head_dim are zero
__global__ void __launch_bounds__(128)
paged_prefill_tensor_cores(const bf16* q, int64_t q_stride, Pool<E> key_pool, Pool<E> value_pool,
                           const int64_t* block_tables, const int64_t* seq_lens, const int64_t* query_starts, bf16* out,
                           int W, int block_size, int kv_heads, int group, int head_dim) {
  const int head = blockIdx.y, heads = gridDim.y, kv_head = head / group;
  const int64_t b = blockIdx.z, begin = query_starts[b];
  const int num_queries = int(query_starts[b + 1] - begin), length = int(seq_lens[b]);
  const int first = blockIdx.x * TILE;
  if (first >= num_queries) return;
  const int64_t* block_table = block_tables + b * W;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  constexpr int PITCH = D + 8;
  bf16* queries = dynamic_shared<bf16>();  // [TILE][PITCH] each
  bf16* keys = queries + TILE * PITCH;
  bf16* values = keys + TILE * PITCH;
  load_rows<D>(queries, Pool<bf16>{q + head * head_dim, nullptr}, q_stride, head_dim,
               [&](int r) { return first + r < num_queries ? begin + first + r : -1; });

  // A lane has two rows of its warp's 16: lane / 4, and eight below.
  const float scale = LOG2_E * rsqrtf(head_dim);
  const int row = warp * 16 + lane / 4, past = length - num_queries;
  const int last_key[2] = {past + first + row, past + first + row + 8};  // that the row sees
  float acc[D / 8][4] = {}, largest[2] = {NO_SCORE, NO_SCORE}, sum[2] = {};

  const int seen = min(length, past + first + TILE);
  for (int start = 0; start < seen; start += TILE) {
    __syncthreads();
    auto row_at = [&](int r) {
      return start + r < length ? row_of(slot_of(block_table, start + r, block_size), kv_head, kv_heads) : -1;
    };
    load_rows<D>(keys, key_pool, head_dim, head_dim, row_at);
    load_rows<D>(values, value_pool, head_dim, head_dim, row_at);
    __syncthreads();

    float score[TILE / 8][4] = {};  // 16 queries x 64 keys: eight tiles of 16 x 8
    for (int i = 0; i < D; i += 16) {
      uint32_t a[4];
      load_matrix_x4<false>(a, queries + (warp * 16 + lane % 16) * PITCH + i + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < TILE / 16; n++) {
        uint32_t k[4];  // 16 keys x 16 channels: {keys 0-7, channels 0-7}, {0-7, 8-15}, {8-15, 0-7}, {8-15, 8-15}
        load_matrix_x4<false>(k, keys + (n * 16 + lane / 16 * 8 + lane % 8) * PITCH + i + lane / 8 % 2 * 8);
        mma_m16n8k16(score[2 * n], a, {k[0], k[1]});
        mma_m16n8k16(score[2 * n + 1], a, {k[2], k[3]});
      }
    }

    // Softmax of the two rows; the other columns of a row are in the three lanes beside.
    float now[2] = {largest[0], largest[1]};
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
      for (int c = 0; c < 4; c++) {
        int key = start + n * 8 + lane % 4 * 2 + c % 2;
        score[n][c] = key <= last_key[c / 2] && key < length ? score[n][c] * scale : -INFINITY;
        now[c / 2] = fmaxf(now[c / 2], score[n][c]);
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(FULL_WARP, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(FULL_WARP, now[r], 2));
      float rescale = exp2f(largest[r] - now[r]);
      largest[r] = now[r];
      sum[r] *= rescale;
      for (int n = 0; n < D / 8; n++) acc[n][2 * r] *= rescale, acc[n][2 * r + 1] *= rescale;
    }
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
      for (int c = 0; c < 4; c++) sum[c / 2] += score[n][c] = exp2f(score[n][c] - largest[c / 2]);

    // Weights times values: 16 keys at a time.
#pragma unroll
    for (int n = 0; n < TILE / 16; n++) {
      const float(&left)[4] = score[2 * n], (&right)[4] = score[2 * n + 1];
      uint32_t a[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])};
#pragma unroll
      for (int i = 0; i < D; i += 16) {
        uint32_t v[4];  // {keys 0-7, channels 0-7}, {8-15, 0-7}, {0-7, 8-15}, {8-15, 8-15}, each transposed
        load_matrix_x4<true>(v, values + (n * 16 + lane % 16) * PITCH + i + lane / 16 * 8);
        mma_m16n8k16(acc[i / 8], a, {v[0], v[1]});
        mma_m16n8k16(acc[i / 8 + 1], a, {v[2], v[3]});
      }
    }
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(FULL_WARP, sum[r], 1);
    sum[r] += __shfl_xor_sync(FULL_WARP, sum[r], 2);
    if (first + row + 8 * r >= num_queries) continue;
    bf16* to = out + ((begin + first + row + 8 * r) * heads + head) * head_dim;
    for (int n = 0; n < D / 8; n++)
      for (int c = 0; c < 2; c++)
        if (int i = n * 8 + lane % 4 * 2 + c; i < head_dim)
          to[i] = bf16(sum[r] > 0 ? acc[n][2 * r + c] / sum[r] : 0.0f);
  }
}

// ---- Host -----------------------------------------------------------------------------------------------------------

// q [N, heads, head_dim]; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim]; block_tables [B, W]; seq_lens [B],
// the new tokens counted; query_starts [B + 1], sequence b has queries query_starts[b] to query_starts[b + 1] - 1, its
// last tokens; max_query_len: the most of one sequence; k_scale, v_scale [num_blocks, block_size, kv_heads] float32: of
// int8 caches -> [N, heads, head_dim]
Tensor paged_prefill_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens,
                               Tensor query_starts, int64_t max_query_len, int64_t version, std::optional<Tensor> k_scale,
                               std::optional<Tensor> v_scale) {
  require_paged(q, k_cache, v_cache, block_tables, seq_lens, k_scale, v_scale);
  require(query_starts.numel() == seq_lens.numel() + 1, "query_starts", query_starts, "[B + 1] with seq_lens [B]");
  require_int64(q, "query_starts", query_starts);
  require(version == 1 || version == 2, "version", version, "1 or 2");
  require(max_query_len >= 0 && max_query_len <= q.size(0), "max_query_len", max_query_len, "at most q's N");
  const int64_t heads = q.size(1), B = seq_lens.numel(), W = block_tables.size(1), block_size = k_cache.size(1);
  const int64_t kv_heads = k_cache.size(2), head_dim = k_cache.size(3), group = heads / kv_heads;
  Tensor out = torch::stable::new_empty(q, {q.size(0), heads, head_dim});

  auto run = [&](auto kernel, auto zero, auto element, int64_t queries, int64_t threads, size_t shared_bytes) {
    using T = decltype(zero);
    using E = decltype(element);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    launch(kernel, dim3(ceil_div(max_query_len, queries), heads, B), threads, shared_bytes, stream_of(q), data<T>(q),
           q.stride(0), pool_of<E>(k_cache, k_scale), pool_of<E>(v_cache, v_scale), data<int64_t>(block_tables),
           data<int64_t>(seq_lens), data<int64_t>(query_starts), mutable_data<T>(out), W, block_size, kv_heads, group,
           head_dim);
  };
  const bool aligned = aligned_16<bf16>(q, q.stride(0)) && aligned_16<bf16>(k_cache, 0) && aligned_16<bf16>(v_cache, 0);
  if (version == 2 && q.scalar_type() == ScalarType::BFloat16 && aligned) {
    dispatch_pool<bf16>(k_cache, [&](auto element) {
      using E = decltype(element);
      auto tiles = [](int D) { return 3 * TILE * (D + 8) * sizeof(bf16); };
      if (head_dim <= 64) run(paged_prefill_tensor_cores<64, E>, bf16(), element, TILE, 128, tiles(64));
      else if (head_dim <= 128) run(paged_prefill_tensor_cores<128, E>, bf16(), element, TILE, 128, tiles(128));
      else run(paged_prefill_tensor_cores<256, E>, bf16(), element, TILE, 128, tiles(256));
    });
    return out;
  }
  dispatch_dtype("q", q, [&](auto zero) {
    dispatch_pool<decltype(zero)>(k_cache, [&](auto element) {
      size_t floats = QUERIES * head_dim + KEYS * (head_dim + 1) + QUERIES * KEYS;
      run(paged_prefill_shared<decltype(zero), decltype(element)>, zero, element, QUERIES, QUERIES * PER_QUERY,
          floats * sizeof(float));
    });
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) {
  m.impl("paged_prefill_attention", TORCH_BOX(&paged_prefill_attention));
}
