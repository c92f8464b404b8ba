// A linear layer of whole numbers (step 8, W8A8): weight and activations are int8, the sum is int32 and exact, and two
// scales turn it back: out = (x_codes codes^T) * x_scale * scale + bias. The activations are quantised by quantize.cu.
// Papers: Dettmers et al. 2022 (LLM.int8()), Xiao et al. 2023 (SmoothQuant).
//
// What it costs: for many rows the operations, which int8 tensor cores do twice as fast as bfloat16 ones: 1,979 against
// 989 TOP/s on an H100 or H200 (datasheet). 4096 rows by 4096 x 14336: 0.48 Top, at best 0.24 ms. For a few rows the bytes
// of the codes, as W8A16; then this kernel's tiles are mostly empty, and W8A16's GEMV serves better.
//
// version 1: __dp4a: a thread multiplies four pairs of bytes and adds them up with one instruction. 64 x 64 of the output
//            a block, a thread 4 x 4 of it, so that a word read from shared memory is used four times.
// version 2: mma m16n8k32: a warp multiplies 16 x 32 by 32 x 8 with one instruction. The same tile, a warp 16 rows of it.
//            The registers are laid out as bfloat16's are, two bytes of K in the place of one element.
#include "int8.h"

namespace w8a8 {
constexpr int TILE = 64;           // rows of x, output channels, and bytes of K at a time
constexpr int WORDS = TILE / 4 + 4;  // a row of a tile in words; the padding keeps rows 16-byte aligned and in other banks

// Two tiles of 64 rows by 64 bytes; what lies outside is zero, which adds nothing. whole: pieces of 16 bytes can be read.
struct Tiles { alignas(16) int x[TILE][WORDS], w[TILE][WORDS]; };

__device__ inline void load_tile(int (&tile)[TILE][WORDS], const int8_t* matrix, int64_t first, int64_t rows, int start,
                                 int K, bool whole) {
  for (int item = threadIdx.x; item < TILE * TILE / 16; item += blockDim.x) {
    const int r = item / (TILE / 16), k = start + item % (TILE / 16) * 16;
    Vec<int8_t, 16> piece{};
    if (first + r < rows) {
      const int8_t* from = matrix + (first + r) * K + k;
      if (whole && k < K) piece = load<16>(from);
      if (!whole)
#pragma unroll
        for (int j = 0; j < 16; j++)
          if (k + j < K) piece.at[j] = from[j];
    }
    *reinterpret_cast<Vec<int8_t, 16>*>(&tile[r][item % (TILE / 16) * 4]) = piece;
  }
}

struct Arguments {
  const int8_t *x, *w;              // [N, K], [M, K]
  const float *x_scale, *w_scale;   // [N], [M]
};

template <typename T>
__device__ inline void finish(T* out, int sum, int64_t row, int64_t m, int64_t rows, int64_t M, const Arguments& given,
                              const T* bias) {
  if (row < rows && m < M)
    out[row * M + m] = T(float(sum) * given.x_scale[row] * given.w_scale[m] + (bias ? float(bias[m]) : 0.0f));
}
}  // namespace w8a8

template <typename T>
__global__ void __launch_bounds__(256)
linear_w8a8_dp4a(w8a8::Arguments given, const T* bias, T* out, int64_t rows, int64_t M, int K, bool whole) {
  using namespace w8a8;
  __shared__ Tiles tiles;
  const int64_t first_row = int64_t(blockIdx.y) * TILE, first_m = int64_t(blockIdx.x) * TILE;
  const int i = threadIdx.x / 16, j = threadIdx.x % 16;  // this thread's rows are i, i + 16, ..., its channels j, j + 16, ...
  int sums[4][4] = {};
  for (int start = 0; start < K; start += TILE) {
    __syncthreads();  // all are done with the tiles before
    load_tile(tiles.x, given.x, first_row, rows, start, K, whole);
    load_tile(tiles.w, given.w, first_m, M, start, K, whole);
    __syncthreads();
#pragma unroll 4
    for (int word = 0; word < TILE / 4; word++)
#pragma unroll
      for (int a = 0; a < 4; a++)
#pragma unroll
        for (int b = 0; b < 4; b++)
          sums[a][b] = __dp4a(tiles.x[i + 16 * a][word], tiles.w[j + 16 * b][word], sums[a][b]);
  }
#pragma unroll
  for (int a = 0; a < 4; a++)
#pragma unroll
    for (int b = 0; b < 4; b++)
      finish(out, sums[a][b], first_row + i + 16 * a, first_m + j + 16 * b, rows, M, given, bias);
}

template <typename T>
__global__ void __launch_bounds__(128)
linear_w8a8_tensor_cores(w8a8::Arguments given, const T* bias, T* out, int64_t rows, int64_t M, int K, bool whole) {
  using namespace w8a8;
  __shared__ Tiles tiles;
  const int64_t first_row = int64_t(blockIdx.y) * TILE, first_m = int64_t(blockIdx.x) * TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sums[TILE / 8][4] = {};  // 16 rows by 64 channels: eight tiles of 16 x 8
  for (int start = 0; start < K; start += TILE) {
    __syncthreads();
    load_tile(tiles.x, given.x, first_row, rows, start, K, whole);
    load_tile(tiles.w, given.w, first_m, M, start, K, whole);
    __syncthreads();
#pragma unroll
    for (int word = 0; word < TILE / 4; word += 8) {  // 32 bytes of K
      uint32_t a[4];  // {rows 0-7, bytes 0-15}, {8-15, 0-15}, {0-7, 16-31}, {8-15, 16-31}
      load_matrix_x4<false>(a, &tiles.x[warp * 16 + lane % 16][word + lane / 16 * 4]);
#pragma unroll
      for (int n = 0; n < TILE / 16; n++) {
        uint32_t b[4];  // {channels 0-7, bytes 0-15}, {0-7, 16-31}, {8-15, 0-15}, {8-15, 16-31}
        load_matrix_x4<false>(b, &tiles.w[n * 16 + lane / 16 * 8 + lane % 8][word + lane / 8 % 2 * 4]);
        mma_m16n8k32(sums[2 * n], a, {b[0], b[1]});
        mma_m16n8k32(sums[2 * n + 1], a, {b[2], b[3]});
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TILE / 8; n++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      finish(out, sums[n][c], first_row + warp * 16 + lane / 4 + c / 2 * 8, first_m + n * 8 + lane % 4 * 2 + c % 2, rows, M,
             given, bias);
}

std::tuple<Tensor, Tensor> quantize(Tensor x);  // quantize.cu

// x [N, K] floats; codes [M, K] int8, scale [M] float32; bias [M] or none -> [N, M]
Tensor linear_w8a8(Tensor x, Tensor codes, Tensor scale, std::optional<Tensor> bias, int64_t version) {
  require_int8_linear(x, codes, scale, bias);
  require(version == 1 || version == 2, "version", version, "1 or 2");
  require(x.size(1) < 133000, "K", x.size(1), "less than 133000: sums are int32");
  const int64_t rows = x.size(0), M = codes.size(0), K = codes.size(1);
  auto [x_codes, x_scale] = quantize(x);
  const w8a8::Arguments given{data<int8_t>(x_codes), data<int8_t>(codes), data<float>(x_scale), data<float>(scale)};
  const bool whole = K % 16 == 0 && aligned_16<int8_t>(codes, K);
  Tensor out = torch::stable::new_empty(x, {rows, M});
  dispatch_dtype("x", x, [&](auto zero) {
    using T = decltype(zero);
    auto run = [&](auto kernel, int64_t threads) {
      launch(kernel, dim3(ceil_div(M, w8a8::TILE), ceil_div(rows, w8a8::TILE)), threads, 0, stream_of(x), given,
             bias ? data<T>(*bias) : nullptr, mutable_data<T>(out), rows, M, K, whole);
    };
    if (version == 1) run(linear_w8a8_dp4a<T>, 256);
    else run(linear_w8a8_tensor_cores<T>, 128);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("linear_w8a8", TORCH_BOX(&linear_w8a8)); }
