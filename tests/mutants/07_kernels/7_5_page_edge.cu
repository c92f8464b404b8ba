// Task 7.5: the token after a block's last one is looked up too early
#include "cuda_on_cpu.h"

__device__ inline float block_sum_of(float value) {
  __shared__ float warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warps[lane] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();
  return value;
}

__device__ inline float block_max_of(float value) {
  __shared__ float warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warps[lane] : -INFINITY;
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  __syncthreads();
  return value;
}

__global__ void paged_attention_kernel(const float* q, const float* k_cache, const float* v_cache,
                                       const int* block_tables, const int* seq_lens, float* out, int kv_heads,
                                       int head_dim, int table_width, int block_size) {
  const int head = blockIdx.x, heads = gridDim.x, sequence = blockIdx.y, length = seq_lens[sequence];
  const int kv_head = head / (heads / kv_heads);
  const int64_t row = (int64_t(sequence) * heads + head) * head_dim;
  auto place = [&](int token) {
    int block = block_tables[sequence * table_width + (token + 1) / block_size];
    return ((int64_t(block) * block_size + token % block_size) * kv_heads + kv_head) * head_dim;
  };

  float* scores = dynamic_shared<float>();
  float largest = -INFINITY;
  for (int token = threadIdx.x; token < length; token += blockDim.x) {
    float score = 0;
    for (int i = 0; i < head_dim; i++) score += q[row + i] * k_cache[place(token) + i];
    scores[token] = score * rsqrtf(head_dim);
    largest = fmaxf(largest, scores[token]);
  }
  largest = block_max_of(largest);
  float sum = 0;
  for (int token = threadIdx.x; token < length; token += blockDim.x)
    sum += scores[token] = expf(scores[token] - largest);
  sum = block_sum_of(sum);
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    float value = 0;
    for (int token = 0; token < length; token++) value += scores[token] * v_cache[place(token) + i];
    out[row + i] = length > 0 ? value / sum : 0.0f;
  }
}

// q, out [batch, heads, head_dim]; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim];
// block_tables [batch, table_width]; seq_lens [batch]
extern "C" void paged_attention(const float* q, const float* k_cache, const float* v_cache, const int* block_tables,
                                const int* seq_lens, float* out, int batch, int heads, int kv_heads, int head_dim,
                                int table_width, int block_size) {
  launch(paged_attention_kernel, dim3(heads, batch), 64, table_width * block_size * sizeof(float), nullptr, q, k_cache,
         v_cache, block_tables, seq_lens, out, kv_heads, head_dim, table_width, block_size);
}
