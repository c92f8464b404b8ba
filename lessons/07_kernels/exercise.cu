// Lesson 07: your first kernels. Fill in the kernels, and delete the line `not_implemented(...)` of a task when you begin
// with it. `minillm grade 07` compiles this file with g++ and runs it in the simulator (minillm/kernels/cuda_on_cpu.h):
// values, three orders of threads and blocks, and each kernel once under AddressSanitizer and once under ThreadSanitizer,
// so that an access out of bounds and a missing barrier fail by name and line. With nvcc and a GPU the same file runs there.
//
// `launch(kernel, grid, block, bytes of dynamic shared memory, stream, arguments...)` is kernel<<<...>>>(arguments...).
#include "cuda_on_cpu.h"

static void not_implemented(const char* task) { throw std::runtime_error(std::string(task) + ": not implemented yet"); }

// ---- Task 7.1 (2 points): vector add, with a grid-stride loop ---------------------------------------------------------
// out[i] = a[i] + b[i]. The grid has 3 x 64 threads and n may be anything: each thread takes an element, then the one
// that lies a whole grid further, and so on. Neighbouring threads must take neighbouring elements.

__global__ void vector_add_kernel(const float* a, const float* b, float* out, int n) {}

// a, b, out [n]
extern "C" void vector_add(const float* a, const float* b, float* out, int n) {
  not_implemented("Task 7.1");
  launch(vector_add_kernel, 3, 64, 0, nullptr, a, b, out, n);
}

// ---- Task 7.2 (3 points): block reduction -----------------------------------------------------------------------------
// The sum over all threads of a block, returned to every one of them. The block is a multiple of 32 threads, 1,024 at most.
// Either a tree in shared memory (halve the distance, a barrier after each level; mind sizes that are no power of two), or
// __shfl_xor_sync within the warps and shared memory between them. It must be possible to call it twice in a row.

__device__ inline float block_sum_of(float value) { return value; }

__global__ void block_sum_kernel(const float* x, float* out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  sum = block_sum_of(sum);
  float again = block_sum_of(1.0f);  // a second call: the number of threads
  if (threadIdx.x == blockDim.x - 1) out[0] = sum, out[1] = again;  // any thread has them
}

// x [n]; out [2]: the sum of x, and the number of threads, a multiple of 32
extern "C" void block_sum(const float* x, float* out, int n, int threads) {
  not_implemented("Task 7.2");
  launch(block_sum_kernel, 1, threads, 0, nullptr, x, out, n);
}

// ---- Task 7.3 (3 points): RMSNorm, a block per row ----------------------------------------------------------------------
// out = x / sqrt(mean(x^2) + eps) * weight, for each row. Row blockIdx.x belongs to this block; your block_sum_of adds up.

__global__ void rms_norm_kernel(const float* x, const float* weight, float* out, int size, float eps) {}

// x, out [rows, size]; weight [size]
extern "C" void rms_norm(const float* x, const float* weight, float* out, int rows, int size, float eps) {
  not_implemented("Task 7.3");
  launch(rms_norm_kernel, rows, 128, 0, nullptr, x, weight, out, size, eps);
}

// ---- Task 7.4 (3 points): softmax, a block per row ------------------------------------------------------------------------
// out = exp(x - max) / sum(exp(x - max)), for each row. Values may be in the thousands, or -inf; each row has a finite one.

__global__ void softmax_kernel(const float* x, float* out, int size) {}

// x, out [rows, size]; each row has a finite value
extern "C" void softmax(const float* x, float* out, int rows, int size) {
  not_implemented("Task 7.4");
  launch(softmax_kernel, rows, 128, 0, nullptr, x, out, size);
}

// ---- Task 7.5 (5 points): paged decode attention, a block per query head and sequence -------------------------------------
// One query a sequence and head: softmax(q k^T / sqrt(head_dim)) v over the seq_lens[sequence] tokens of its pages. Token t
// lies in block block_tables[sequence][t / block_size], at place t % block_size. Query head h reads KV head
// h / (heads / kv_heads). A sequence of length 0 gives zeros. What no token has been written to may hold NaN.
// The launch gives you shared memory for a score of each token that a table can hold: dynamic_shared<float>().

__global__ void paged_attention_kernel(const float* q, const float* k_cache, const float* v_cache,
                                       const int* block_tables, const int* seq_lens, float* out, int kv_heads,
                                       int head_dim, int table_width, int block_size) {
  const int head = blockIdx.x, heads = gridDim.x, sequence = blockIdx.y, length = seq_lens[sequence];
}

// q, out [batch, heads, head_dim]; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim];
// block_tables [batch, table_width]; seq_lens [batch]
extern "C" void paged_attention(const float* q, const float* k_cache, const float* v_cache, const int* block_tables,
                                const int* seq_lens, float* out, int batch, int heads, int kv_heads, int head_dim,
                                int table_width, int block_size) {
  not_implemented("Task 7.5");
  launch(paged_attention_kernel, dim3(heads, batch), 64, table_width * block_size * sizeof(float), nullptr, q, k_cache,
         v_cache, block_tables, seq_lens, out, kv_heads, head_dim, table_width, block_size);
}
