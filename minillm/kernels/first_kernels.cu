// First kernels: what lesson 07 asks for, as plainly as it can be written. float32, one idea each.
// The kernels that the engine runs are the other .cu files; each of them starts from something like these.
#include "cuda_on_cpu.h"

// ---- 7.1: vector add, with a grid-stride loop -------------------------------------------------------------------------
// out[i] = a[i] + b[i]. Neighbouring threads take neighbouring elements; the whole grid moves on by its own size.

__global__ void vector_add_kernel(const float* a, const float* b, float* out, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = a[i] + b[i];
}

// a, b, out [n]
extern "C" void vector_add(const float* a, const float* b, float* out, int n) {
  launch(vector_add_kernel, 3, 64, 0, nullptr, a, b, out, n);
}

// ---- 7.2: block reduction ---------------------------------------------------------------------------------------------
// The sum over all threads of a block, returned to every one of them. Each warp adds up by shuffles, then the first lane
// of each leaves its sum in shared memory, and every warp adds up the warps' sums.

__device__ inline float block_sum_of(float value) {
  __shared__ float warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warps[lane] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();  // the next call writes `warps` again
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

__global__ void block_sum_kernel(const float* x, float* out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  sum = block_sum_of(sum);
  float again = block_sum_of(1.0f);  // a second call: the number of threads
  if (threadIdx.x == blockDim.x - 1) out[0] = sum, out[1] = again;  // any thread has them
}

// x [n]; out [2]: the sum of x, and the number of threads, a multiple of 32
extern "C" void block_sum(const float* x, float* out, int n, int threads) {
  launch(block_sum_kernel, 1, threads, 0, nullptr, x, out, n);
}

// ---- 7.3: RMSNorm, a block per row --------------------------------------------------------------------------------------

__global__ void rms_norm_kernel(const float* x, const float* weight, float* out, int size, float eps) {
  const float* row = x + int64_t(blockIdx.x) * size;
  float squares = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) squares += row[i] * row[i];
  const float scale = rsqrtf(block_sum_of(squares) / size + eps);
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[int64_t(blockIdx.x) * size + i] = row[i] * scale * weight[i];
}

// x, out [rows, size]; weight [size]
extern "C" void rms_norm(const float* x, const float* weight, float* out, int rows, int size, float eps) {
  launch(rms_norm_kernel, rows, 128, 0, nullptr, x, weight, out, size, eps);
}

// ---- 7.4: softmax, a block per row ----------------------------------------------------------------------------------------

__global__ void softmax_kernel(const float* x, float* out, int size) {
  const float* row = x + int64_t(blockIdx.x) * size;
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < size; i += blockDim.x) largest = fmaxf(largest, row[i]);
  largest = block_max_of(largest);
  float sum = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) sum += expf(row[i] - largest);
  sum = block_sum_of(sum);
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[int64_t(blockIdx.x) * size + i] = expf(row[i] - largest) / sum;
}

// x, out [rows, size]; each row has a finite value
extern "C" void softmax(const float* x, float* out, int rows, int size) {
  launch(softmax_kernel, rows, 128, 0, nullptr, x, out, size);
}

// ---- 7.5: paged decode attention, a block per query head and sequence -----------------------------------------------------
// Scores of all tokens in shared memory, softmax over them, then a thread per channel adds up the values.

__global__ void paged_attention_kernel(const float* q, const float* k_cache, const float* v_cache,
                                       const int* block_tables, const int* seq_lens, float* out, int kv_heads,
                                       int head_dim, int table_width, int block_size) {
  const int head = blockIdx.x, heads = gridDim.x, sequence = blockIdx.y, length = seq_lens[sequence];
  const int kv_head = head / (heads / kv_heads);
  const int64_t row = (int64_t(sequence) * heads + head) * head_dim;  // of this query, and of its output
  auto place = [&](int token) {  // where the token's key and value lie
    int block = block_tables[sequence * table_width + token / block_size];
    return ((int64_t(block) * block_size + token % block_size) * kv_heads + kv_head) * head_dim;
  };

  float* scores = dynamic_shared<float>();  // [table_width * block_size]
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
  sum = block_sum_of(sum);  // its barriers also say that all scores are there
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
