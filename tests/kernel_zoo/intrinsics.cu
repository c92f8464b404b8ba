// One call of each intrinsic, for tests/test_cuda_on_cpu.py, which computes what must come out.
#include "cuda_on_cpu.h"

constexpr uint32_t FULL = 0xffffffffu;

__global__ void shuffles(const int* x, int* out, int argument, int width) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_sync(FULL, x[lane], argument, width);
  out[32 + lane] = __shfl_up_sync(FULL, x[lane], argument, width);
  out[64 + lane] = __shfl_down_sync(FULL, x[lane], argument, width);
  out[96 + lane] = __shfl_xor_sync(FULL, x[lane], argument, width);
}
// x [32], out [4, 32]
extern "C" void shuffle(const int* x, int* out, int argument, int width) {
  launch(shuffles, 1, 32, 0, nullptr, x, out, argument, width);
}

__global__ void votes(const int* x, int* out) {
  const int lane = threadIdx.x, value = x[lane];
  out[lane] = int(__ballot_sync(FULL, value > 0));
  out[32 + lane] = __any_sync(FULL, value > 90) * 2 + __all_sync(FULL, value > -99);
  out[64 + lane] = __reduce_add_sync(FULL, value);
  out[96 + lane] = __reduce_min_sync(FULL, value);
  out[128 + lane] = __reduce_max_sync(FULL, value);
  out[160 + lane] = int(__reduce_and_sync(FULL, unsigned(value)));
  out[192 + lane] = int(__reduce_or_sync(FULL, unsigned(value)));
  out[224 + lane] = int(__reduce_xor_sync(FULL, unsigned(value)));
}
// x [32], out [8, 32]
extern "C" void vote(const int* x, int* out) { launch(votes, 1, 32, 0, nullptr, x, out); }

__global__ void types(double* out) {  // values of every size travel through a shuffle
  const int other = 31 - threadIdx.x;
  int64_t large = __shfl_sync(FULL, int64_t(threadIdx.x) << 40, other);
  double precise = __shfl_sync(FULL, threadIdx.x + 1e-12, other);
  unsigned char small = __shfl_sync(FULL, (unsigned char)(threadIdx.x), other);
  float4 four = __shfl_sync(FULL, make_float4(1, 2, 3, threadIdx.x), other);
  out[threadIdx.x] = double(large >> 40) + (precise - other > 5e-13) + small + four.w;
}
extern "C" void shuffled_types(double* out) { launch(types, 1, 32, 0, nullptr, out); }

__global__ void counts(int* i, unsigned* u, float* f) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&i[0], n), atomicSub(&i[1], n), atomicMin(&i[2], n - 50), atomicMax(&i[3], n);
  atomicAnd(&u[0], ~(1u << n % 32)), atomicOr(&u[1], 1u << n % 16), atomicXor(&u[2], 1u << n % 3);
  atomicAdd(f, 0.5f);
  atomicCAS(&i[4], 0, n + 1);  // the first one wins
  atomicExch(&i[5], 7);
}
// i [6], u [3], f [1]
extern "C" void atomics(int* i, int* u, float* f) { launch(counts, 5, 40, 0, nullptr, i, reinterpret_cast<unsigned*>(u), f); }

// a, b, c, out [n]
extern "C" void dp4a(const int* a, const int* b, const int* c, int* out, int n) {
  for (int i = 0; i < n; i++) out[i] = __dp4a(a[i], b[i], c[i]);
}

// Registers for the fragments as PTX ISA gives them: a [16, 16], b [16, 8] (bits of bfloat16 in ints), d [16, 8]
__global__ void multiply(const int* a, const int* b, float* d) {
  const int group = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;
  auto of = [](int low, int high) { return uint32_t(low) | uint32_t(high) << 16; };
  uint32_t ra[4], rb[2];
  for (int r = 0; r < 4; r++) {
    const int* from = a + (group + r % 2 * 8) * 16 + pair + r / 2 * 8;
    ra[r] = of(from[0], from[1]);
  }
  for (int r = 0; r < 2; r++) rb[r] = of(b[(pair + r * 8) * 8 + group], b[(pair + r * 8 + 1) * 8 + group]);
  float rd[4];
  for (int i = 0; i < 4; i++) rd[i] = d[(group + i / 2 * 8) * 8 + pair + i % 2];
  mma_m16n8k16(rd, ra, rb);
  for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + pair + i % 2] = rd[i];
}
extern "C" void mma(const int* a, const int* b, float* d) { launch(multiply, 1, 32, 0, nullptr, a, b, d); }

__global__ void load(const int* x, int* out) {  // x [32, 8], four 8 x 8 matrices one below the other; out [2, 32, 4]
  __shared__ __align__(16) uint16_t rows[32][8];
  for (int i = 0; i < 8; i++) rows[threadIdx.x][i] = x[threadIdx.x * 8 + i];
  __syncwarp();
  uint32_t r[4];
  load_matrix_x4<false>(r, rows[threadIdx.x]);
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
  load_matrix_x4<true>(r, rows[threadIdx.x]);
  for (int i = 0; i < 4; i++) out[128 + threadIdx.x * 4 + i] = r[i];
}
extern "C" void load_matrix(const int* x, int* out) { launch(load, 1, 32, 0, nullptr, x, out); }

// The order in which threads pass, before and after a barrier. out [2, threads], blocks of 8
__global__ void passes(int* count, int* out) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  out[n] = atomicAdd(count, 1);
  __syncthreads();
  out[threads + n] = atomicAdd(count, 1);
}
extern "C" void order(int* count, int* out) { launch(passes, 3, 8, 0, nullptr, count, out); }
