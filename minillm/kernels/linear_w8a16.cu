// A linear layer with an int8 weight (step 8, W8A16): out = (x codes^T) * scale + bias. Activations stay as they are, and
// half the bytes of the weight are read.
// Paper: Dettmers et al. 2022 (LLM.int8()); Frantar et al. 2024 (Marlin) for how far weight-only kernels go.
//
// What it costs: for a few rows of x, the bytes of the codes, 4096 x 14336: 59 MB, at best 20 us on an H100 and 14 us on an
// H200, half of what bfloat16 needs. For many rows the FLOPs, of which int8 weights save none: then they only save memory.
//
// GEMV, up to 8 rows: a warp per row of the weight; a lane takes 16 codes with one load of 16 bytes and widens them in its
//   registers. An output channel has one scale, so it is multiplied in once, at the end.
// GEMM, more rows, bfloat16: 64 x 64 of the output a block, on the tensor cores. The codes of a tile are widened on their
//   way into shared memory, exactly: bfloat16 holds whole numbers up to 256. Other dtypes take the GEMV, 8 rows at a time.
#include "int8.h"

constexpr int GEMV_ROWS = 8;  // of x that one pass over the weight serves

template <typename T, int N, int ROWS>  // N: codes a load, 16, or 1 where 16 bytes are not possible
__global__ void __launch_bounds__(128) linear_w8a16_gemv(const T* x, int64_t x_stride, const int8_t* codes,
                                                         const float* scale, const T* bias, T* out, int64_t rows, int64_t M,
                                                         int K) {
  constexpr int STEP = N == 1 ? 1 : PER_16_BYTES<T>;  // elements of x a load
  const int lane = threadIdx.x % 32;
  const int64_t m = int64_t(blockIdx.x) * 4 + threadIdx.x / 32, first = int64_t(blockIdx.y) * ROWS;
  if (m >= M) return;
  const int8_t* w = codes + m * K;
  float sums[ROWS] = {};
#pragma unroll 2
  for (int k = lane * N; k < K; k += 32 * N) {
    Vec<int8_t, N> a = load<N>(w + k);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      if (first + row >= rows) break;
#pragma unroll
      for (int i = 0; i < N; i += STEP) {
        Vec<T, STEP> b = load<STEP>(x + (first + row) * x_stride + k + i);
        for (int j = 0; j < STEP; j++) sums[row] += float(a.at[i + j]) * float(b.at[j]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    if (first + row >= rows) break;
    float sum = warp_sum(sums[row]);
    if (lane == 0) out[(first + row) * M + m] = T(sum * scale[m] + (bias ? float(bias[m]) : 0.0f));
  }
}

namespace w8a16 {  // the GEMM's tile
using bf16 = c10::BFloat16;
constexpr int TILE = 64, PITCH = TILE + 8;  // 8 elements of padding: load_matrix_x4's eight rows lie in different banks
struct Tiles { alignas(16) bf16 x[TILE][PITCH], w[TILE][PITCH]; };  // rows of x and of the weight, 64 of K each
}

__global__ void __launch_bounds__(128) linear_w8a16_gemm(const c10::BFloat16* x, int64_t x_stride, const int8_t* codes,
                                                         const float* scale, const c10::BFloat16* bias, c10::BFloat16* out,
                                                         int64_t rows, int64_t M, int K) {
  using namespace w8a16;
  __shared__ Tiles tiles;
  const int64_t first_row = int64_t(blockIdx.y) * TILE, first_m = int64_t(blockIdx.x) * TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float acc[TILE / 8][4] = {};  // a warp's 16 rows by 64 output channels
  for (int start = 0; start < K; start += TILE) {
    __syncthreads();  // all are done with the tile before
    for (int item = threadIdx.x; item < TILE * TILE / 16; item += blockDim.x) {  // pieces of 16: K is a multiple of it
      const int r = item / (TILE / 16), k = item % (TILE / 16) * 16;
      Vec<bf16, 8> left{}, right{};
      if (first_row + r < rows && start + k < K) {
        const bf16* from = x + (first_row + r) * x_stride + start + k;
        left = load<8>(from), right = load<8>(from + 8);
      }
      store(&tiles.x[r][k], left), store(&tiles.x[r][k + 8], right);
      Vec<int8_t, 16> piece{};
      if (first_m + r < M && start + k < K) piece = load<16>(codes + (first_m + r) * K + start + k);
      for (int j = 0; j < 8; j++) left.at[j] = bf16(float(piece.at[j])), right.at[j] = bf16(float(piece.at[j + 8]));
      store(&tiles.w[r][k], left), store(&tiles.w[r][k + 8], right);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
      uint32_t a[4];
      load_matrix_x4<false>(a, &tiles.x[warp * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int n = 0; n < TILE / 16; n++) {
        uint32_t b[4];  // {channels 0-7, k 0-7}, {0-7, 8-15}, {8-15, 0-7}, {8-15, 8-15}
        load_matrix_x4<false>(b, &tiles.w[n * 16 + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
        mma_m16n8k16(acc[2 * n], a, {b[0], b[1]});
        mma_m16n8k16(acc[2 * n + 1], a, {b[2], b[3]});
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
    for (int c = 0; c < 4; c++) {
      const int64_t row = first_row + warp * 16 + lane / 4 + c / 2 * 8, m = first_m + n * 8 + lane % 4 * 2 + c % 2;
      if (row < rows && m < M) out[row * M + m] = bf16(acc[n][c] * scale[m] + (bias ? float(bias[m]) : 0.0f));
    }
}

// x [N, K]; codes [M, K] int8, scale [M] float32; bias [M] or none -> [N, M]
Tensor linear_w8a16(Tensor x, Tensor codes, Tensor scale, std::optional<Tensor> bias) {
  require_int8_linear(x, codes, scale, bias);
  const int64_t rows = x.size(0), M = codes.size(0), K = codes.size(1);
  Tensor out = torch::stable::new_empty(x, {rows, M});
  if (M == 0) return out;
  dispatch_dtype("x", x, [&](auto zero) {
    using T = decltype(zero);
    auto run = [&](auto kernel, dim3 grid) {
      launch(kernel, grid, 128, 0, stream_of(x), data<T>(x), x.stride(0), data<int8_t>(codes), data<float>(scale),
             bias ? data<T>(*bias) : nullptr, mutable_data<T>(out), rows, M, K);
    };
    auto gemv = [&](auto kernel, int64_t per_pass) { run(kernel, dim3(ceil_div(M, 4), ceil_div(rows, per_pass))); };
    const bool wide = K % 16 == 0 && aligned_16<T>(x, x.stride(0)) && aligned_16<int8_t>(codes, K);
    if (!wide) return gemv(linear_w8a16_gemv<T, 1, 1>, 1);
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (rows > GEMV_ROWS) return run(linear_w8a16_gemm, dim3(ceil_div(M, w8a16::TILE), ceil_div(rows, w8a16::TILE)));
    if (rows == 1) gemv(linear_w8a16_gemv<T, 16, 1>, 1);
    else if (rows <= 4) gemv(linear_w8a16_gemv<T, 16, 4>, 4);
    else gemv(linear_w8a16_gemv<T, 16, GEMV_ROWS>, GEMV_ROWS);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("linear_w8a16", TORCH_BOX(&linear_w8a16)); }
