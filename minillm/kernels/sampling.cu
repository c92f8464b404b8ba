// The next token from the logits: greedy, or drawn with temperature, min-p, top-k and top-p, and no sort.
//
// What it costs: one pass over the logits for greedy, 64 x 128k float32 are 33 MB: at best 11 us on an H100, 8 us on an
// H200. A sort would take ten and more passes, and most of what it finds out is not needed: where top-k and top-p cut.
// That is a selection. Floats become whole numbers of the same order, and the number at the cut is found from its highest
// digit to its lowest, 11 bits at a time: three passes, of which all but the first come out of the L2 cache. (Radix
// selection; FlashInfer searches for a pivot instead.)
// Probabilities are added up as whole numbers, too, in units of 2^-40 of the likeliest token's: then the order in which
// threads add does not matter, and the same request draws the same token in every run.
#include "tensors.h"

// A whole number of the same order as x; NaN above all.
__device__ inline uint32_t order_key(float x) {
  uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes +0
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// ---- Greedy ---------------------------------------------------------------------------------------------------------
// Batch 1 has one row and the GPU over a hundred multiprocessors, so several blocks share a row. Each hands in its best,
// (key, lowest id first) packed into 64 bits, by an atomic maximum.

template <typename T, int N>  // N: elements a load
__global__ void best_token(const T* logits, int64_t stride, unsigned long long* best, int V) {
  const int64_t row = blockIdx.y;
  unsigned long long mine = 0;
  for (int i = (blockIdx.x * blockDim.x + threadIdx.x) * N; i < V; i += gridDim.x * blockDim.x * N) {
    Vec<T, N> piece = load<N>(logits + row * stride + i);
    for (int j = 0; j < N; j++) {
      unsigned long long key = order_key(float(piece.at[j]));
      mine = max(mine, key << 32 | (0xffffffffu - unsigned(i + j)));
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) mine = max(mine, __shfl_xor_sync(FULL_WARP, mine, offset));
  if (threadIdx.x % 32 == 0) atomicMax(&best[row], mine);
}

__global__ void unpack_tokens(unsigned long long* best, int64_t rows) {
  int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) best[row] = 0xffffffffu - unsigned(best[row]);
}

// logits [B, V] -> [B] int64: the largest, of equals the lowest id; a row with a NaN gives the first NaN's, as in torch
Tensor argmax(Tensor logits) {
  require(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0, "logits", logits,
          "[B, V] with elements side by side, V at least 1");
  const int64_t rows = logits.size(0), V = logits.size(1);
  Tensor tokens = torch::stable::new_zeros(logits, {rows}, ScalarType::Long);
  auto* best = reinterpret_cast<unsigned long long*>(mutable_data<int64_t>(tokens));
  dispatch_dtype("logits", logits, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = PER_16_BYTES<T>;
    const bool wide = V % N == 0 && aligned_16<T>(logits, logits.stride(0));
    launch(wide ? best_token<T, N> : best_token<T, 1>, dim3(std::min<int64_t>(ceil_div(V, 256 * 16), 64), rows), 256, 0,
           stream_of(logits), data<T>(logits), logits.stride(0), best, V);
    launch(unpack_tokens, ceil_div(rows, 128), 128, 0, stream_of(logits), best, rows);
  });
  return tokens;
}

// ---- Sampling: one block a row --------------------------------------------------------------------------------------

constexpr int SAMPLE_THREADS = 512, SAMPLE_WARPS = SAMPLE_THREADS / 32, BINS = 2048;

struct Cut {  // the tokens kept: all above the key, and the first `ties` of those at it
  uint32_t key;
  unsigned long long above;        // mass of those above
  unsigned long long num_above;    // and their number
  unsigned long long each;         // mass of one at the key
  unsigned num_equal;              // how many are at the key
};

template <typename T>
struct Row {
  const T* logits;
  int V;
  float largest, temperature, min_p;
  __device__ uint32_t key(int i) const { return order_key(float(logits[i])); }
  __device__ unsigned long long mass(int i) const {  // of its probability, 2^40 for the likeliest
    float p = __expf((float(logits[i]) - largest) / temperature);
    return p >= min_p ? (unsigned long long)(p * float(1ull << 40)) : 0;
  }
};

// The key at which, from the top down, `by_mass` the mass or else the number of tokens reaches `target`; tokens below
// `lowest` do not count.
template <typename T>
__device__ Cut find_cut(const Row<T>& row, bool by_mass, unsigned long long target, uint32_t lowest,
                        unsigned* counts, unsigned long long* masses) {
  __shared__ Cut cut;
  __shared__ int chosen_bin;
  if (threadIdx.x == 0) cut = Cut{0, 0, 0, 0, 0};
  for (int digit = 0; digit < 3; digit++) {  // 11, 11 and 10 bits
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, width = digit == 2 ? 10 : 11;
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) counts[bin] = 0, masses[bin] = 0;
    __syncthreads();
    const uint32_t known = cut.key, above_digit = digit == 0 ? 0 : 0xffffffffu << (shift + width);
    for (int i = threadIdx.x; i < row.V; i += blockDim.x) {
      uint32_t key = row.key(i);
      if ((key & above_digit) != known || key < lowest) continue;
      unsigned bin = key >> shift & ((1u << width) - 1);
      atomicAdd(&counts[bin], 1u);
      atomicAdd(&masses[bin], row.mass(i));
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // one warp goes down the bins: first in 32 pieces, then within the piece that has the cut
      const int size = (1 << width) / 32, piece = 31 - threadIdx.x;  // lane 0 has the highest
      unsigned long long number = 0, mass = 0;
      for (int bin = piece * size; bin < (piece + 1) * size; bin++) number += counts[bin], mass += masses[bin];
      unsigned long long number_to = number, mass_to = mass;  // with all pieces above
      for (int offset = 1; offset < 32; offset *= 2) {
        unsigned long long n = __shfl_up_sync(FULL_WARP, number_to, offset), m = __shfl_up_sync(FULL_WARP, mass_to, offset);
        if (threadIdx.x >= offset) number_to += n, mass_to += m;
      }
      bool reached = (by_mass ? cut.above + mass_to : cut.num_above + number_to) >= target;
      unsigned lanes = __ballot_sync(FULL_WARP, reached);
      __syncwarp();  // all have read `cut`
      if (threadIdx.x == (lanes ? __ffs(lanes) - 1 : 31)) {
        unsigned long long num_above = cut.num_above + number_to - number, above = cut.above + mass_to - mass;
        int bin = (piece + 1) * size - 1;
        for (; bin > piece * size; bin--) {
          if ((by_mass ? above + masses[bin] : num_above + counts[bin]) >= target) break;
          num_above += counts[bin], above += masses[bin];
        }
        chosen_bin = bin;
        cut.num_above = num_above, cut.above = above;
      }
      __syncwarp();
      if (threadIdx.x == 0) {
        cut.key = known | uint32_t(chosen_bin) << shift;
        cut.num_equal = counts[chosen_bin];
        cut.each = counts[chosen_bin] ? masses[chosen_bin] / counts[chosen_bin] : 0;
      }
    }
    __syncthreads();
  }
  Cut result = cut;
  __syncthreads();
  return result;
}

template <typename T>
__global__ void __launch_bounds__(SAMPLE_THREADS)
sample_kernel(const T* logits, int64_t stride, const float* temperature, const int64_t* top_k, const float* top_p,
              const float* min_p, const double* uniform, int64_t* tokens, int V) {
  __shared__ unsigned counts[BINS];
  __shared__ unsigned long long masses[BINS];
  __shared__ float warps[SAMPLE_WARPS];
  const int64_t b = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Row<T> row{logits + b * stride, V, -INFINITY, temperature[b], min_p[b]};

  for (int i = threadIdx.x; i < V; i += blockDim.x) row.largest = fmaxf(row.largest, float(row.logits[i]));
  row.largest = warp_max(row.largest);
  if (lane == 0) warps[warp] = row.largest;
  __syncthreads();
  row.largest = warp_max(warps[lane % SAMPLE_WARPS]);

  // Top-k cuts by number, then top-p by mass, of what top-k has left.
  unsigned long long k = top_k[b] > 0 && top_k[b] < V ? top_k[b] : V;
  Cut cut = find_cut(row, false, k, 0, counts, masses);
  unsigned ties = unsigned(k - cut.num_above);
  if (top_p[b] < 1.0f) {
    unsigned long long total = cut.above + ties * cut.each;
    unsigned long long target = (unsigned long long)(double(top_p[b]) * double(total));
    if (target < 1) target = 1;  // the likeliest always stays
    uint32_t lowest = cut.key;
    unsigned ties_of_k = ties;
    cut = find_cut(row, true, target, lowest, counts, masses);
    // Of equals those that are needed to reach the target, and not more than top-k has left.
    ties = cut.each ? unsigned((target - cut.above + cut.each - 1) / cut.each) : 1;
    ties = min(ties, cut.key == lowest ? ties_of_k : cut.num_equal);
  }

  // The draw, in the order of ids. Each warp adds up a piece of the row; then one warp walks through the piece in which
  // the target falls.
  unsigned long long target = (unsigned long long)(uniform[b] * double(cut.above + ties * cut.each));
  const int piece = (V + SAMPLE_WARPS - 1) / SAMPLE_WARPS;
  __shared__ unsigned long long above_of[SAMPLE_WARPS];
  __shared__ unsigned equal_of[SAMPLE_WARPS];
  unsigned long long above = 0;
  unsigned equal = 0;
  for (int i = warp * piece + lane; i < min(V, (warp + 1) * piece); i += 32) {
    uint32_t key = row.key(i);
    if (key > cut.key) above += row.mass(i);
    equal += key == cut.key;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    above += __shfl_xor_sync(FULL_WARP, above, offset);
    equal += __shfl_xor_sync(FULL_WARP, equal, offset);
  }
  if (lane == 0) above_of[warp] = above, equal_of[warp] = equal;
  __syncthreads();
  if (warp != 0) return;

  int p = 0;
  for (; p < SAMPLE_WARPS - 1; p++) {
    unsigned kept = min(ties, equal_of[p]);
    unsigned long long mass = above_of[p] + kept * cut.each;
    if (target < mass) break;
    target -= mass, ties -= kept;
  }
  int last = 0;  // the last token that has any mass: rounding of u * total cannot lead beyond it
  for (int start = p * piece; start < min(V, (p + 1) * piece); start += 32) {
    int i = start + lane;
    uint32_t key = i < min(V, (p + 1) * piece) ? row.key(i) : 0;  // no float has key 0
    bool is_tie = key == cut.key;
    unsigned tied = __ballot_sync(FULL_WARP, is_tie);
    bool kept = key > cut.key || (is_tie && unsigned(__popc(tied & ((1u << lane) - 1))) < ties);
    unsigned long long mine = kept ? row.mass(i) : 0, to = mine;
    for (int offset = 1; offset < 32; offset *= 2) {
      unsigned long long other = __shfl_up_sync(FULL_WARP, to, offset);
      if (lane >= offset) to += other;
    }
    unsigned reached = __ballot_sync(FULL_WARP, mine > 0 && target < to);
    if (reached) {
      if (lane == 0) tokens[b] = start + __ffs(reached) - 1;
      return;
    }
    unsigned with_mass = __ballot_sync(FULL_WARP, mine > 0);
    if (with_mass) last = start + 31 - __clz(with_mass);
    target -= __shfl_sync(FULL_WARP, to, 31);
    ties -= min(ties, unsigned(__popc(tied)));
  }
  if (lane == 0) tokens[b] = last;
}

// logits [B, V]; temperature (above 0), top_p, min_p [B] float32, top_k [B] int64 (0 or less: off), uniform [B] float64 in
// [0, 1) -> [B] int64: the token at `uniform` of the cumulative distribution. The row must have a finite logit.
Tensor sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) {
  require(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0, "logits", logits,
          "[B, V] with elements side by side, V at least 1");
  const int64_t rows = logits.size(0), V = logits.size(1);
  auto check = [&](const char* name, const Tensor& t, ScalarType type, const char* must_be) {
    require(t.dim() == 1 && t.size(0) == rows && t.scalar_type() == type && t.is_contiguous() &&
            t.is_cuda() == logits.is_cuda(), name, t, must_be);
  };
  check("temperature", temperature, ScalarType::Float, "[B] float32");
  check("top_k", top_k, ScalarType::Long, "[B] int64");
  check("top_p", top_p, ScalarType::Float, "[B] float32");
  check("min_p", min_p, ScalarType::Float, "[B] float32");
  check("uniform", uniform, ScalarType::Double, "[B] float64");
  Tensor tokens = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  dispatch_dtype("logits", logits, [&](auto zero) {
    using T = decltype(zero);
    launch(sample_kernel<T>, rows, SAMPLE_THREADS, 0, stream_of(logits), data<T>(logits), logits.stride(0),
           data<float>(temperature), data<int64_t>(top_k), data<float>(top_p), data<float>(min_p),
           data<double>(uniform), mutable_data<int64_t>(tokens), V);
  });
  return tokens;
}

STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) {
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("sample", TORCH_BOX(&sample));
}
