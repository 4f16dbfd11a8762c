// The GEMV of 2:4 weights on AVX-512 BF16.
#include "backends/cpu/gemm/bf16/bf16_kernel.h"
#include "backends/cpu/gemm/sparse/sparse_kernel.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::avx512bf16 {
using namespace avx512;  // NOLINT(google-build-using-namespace): its names are this file's words.
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/gemm/sparse/sparse_rows.inl.h"

namespace {

constexpr int64_t kLaneRow = kBlockRows * kLanes;  ///< Lane accumulators of a row.
constexpr int64_t kChunkBytes = 2 * kChunkK;       ///< Size of a chunk of activations.

/// A run of chunks of one block.
struct Pass {
  const GroupParameters& parameters;
  const ChunkGroups* groups;
  const uint8_t* codes;
  int64_t chunks;
  I values;  ///< bf16 values of the 16 codes, twice.
};

/// The kept weights of a column and chunk, and the places of their activations.
struct Kept {
  I weights[2];  ///< 32 bf16, of 64 k each.
  I places[2];   ///< 32 words: k below 64.
};

MARLIN_SIMD_INLINE Kept LoadKept(const uint8_t* chunk, int row, I values) {
  // Window of 8 bits at bit 2 w, for the low byte of word w.
  alignas(64) static constexpr uint8_t kWindows[64] = {
      0,  0, 2,  0, 4,  0, 6,  0, 8,  0, 10, 0, 12, 0, 14, 0, 16, 0, 18, 0, 20, 0,
      22, 0, 24, 0, 26, 0, 28, 0, 30, 0, 32, 0, 34, 0, 36, 0, 38, 0, 40, 0, 42, 0,
      44, 0, 46, 0, 48, 0, 50, 0, 52, 0, 54, 0, 56, 0, 58, 0, 60, 0, 62, 0};
  alignas(64) static constexpr uint16_t kBlocks[32] = {0,  0,  4,  4,  8,  8,  12, 12, 16, 16, 20,
                                                       20, 24, 24, 28, 28, 32, 32, 36, 36, 40, 40,
                                                       44, 44, 48, 48, 52, 52, 56, 56, 60, 60};
  constexpr int kAndOr = 0xea;  // (a & b) | c
  const I windows = _mm512_load_si512(kWindows);
  const I blocks = _mm512_load_si512(kBlocks);
  const uint8_t* metadata = chunk + kMetadataOffset + kMetadataBytes * row;
  Kept kept;
  Unroll<2>([&](auto half) __attribute__((always_inline)) {
    long long nibbles;
    __builtin_memcpy(&nibbles, metadata + 8 * half, sizeof(nibbles));
    const I shifted = _mm512_multishift_epi64_epi8(windows, _mm512_set1_epi64(nibbles));
    kept.places[half] = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(3), blocks, kAndOr);
  });
  const I codes = _mm512_cvtepu8_epi16(
      _mm256_load_si256(reinterpret_cast<const __m256i*>(chunk + kKeptBytes * row)));
  // Bits above 4 are ignored: the values are there twice.
  kept.weights[0] = _mm512_permutexvar_epi16(codes, values);
  kept.weights[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values);
  return kept;
}

/// Scales of the blocks of 64 k, from half slice `first` on, in groups of 16 or 32 k.
template <GroupMode kMode>
MARLIN_SIMD_INLINE F ScalesOf(const Pass& pass, const ChunkGroups& groups, int first, int row) {
  const auto scale = [&](int half_slice) __attribute__((always_inline)) {
    return pass.parameters.scale[groups.offset[first + half_slice] + row];
  };
  if constexpr (kMode == GroupMode::kSlice) {
    return SplitSet(scale(0), scale(2), 0);
  } else {
    F scales = Set(scale(0));
    scales = _mm512_mask_broadcastss_ps(scales, 0x00f0, _mm_set_ss(scale(1)));
    scales = _mm512_mask_broadcastss_ps(scales, 0x0f00, _mm_set_ss(scale(2)));
    return _mm512_mask_broadcastss_ps(scales, 0xf000, _mm_set_ss(scale(3)));
  }
}

MARLIN_SIMD_INLINE F AddDot(F sum, I weights, const uint8_t* x, I places) {
  const I activations = _mm512_permutex2var_epi16(LoadWords(x), places, LoadWords(x + 64));
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)activations);
}

/// totals[i] += a column of a chunk times row i of its activations.
template <GroupMode kMode, int kM>
MARLIN_SIMD_INLINE void AddChunk(const Pass& pass, int64_t c, int row, const uint8_t* x,
                                 int64_t x_stride, F (&totals)[kM]) {
  const Kept kept = LoadKept(pass.codes + c * ChunkBytes(kSparse4), row, pass.values);
  const ChunkGroups& groups = pass.groups[c];
  if constexpr (kMode == GroupMode::kChunk) {
    const F scale = Set(pass.parameters.scale[groups.offset[0] + row]);
    Unroll<kM>([&](auto i) __attribute__((always_inline)) {
      const uint8_t* const from = x + i * x_stride;
      const F first = AddDot(Zero(), kept.weights[0], from, kept.places[0]);
      const F sum = AddDot(first, kept.weights[1], from + kChunkBytes / 2, kept.places[1]);
      totals[i] = Fma(sum, scale, totals[i]);
    });
  } else {
    Unroll<2>([&](auto half) __attribute__((always_inline)) {
      const F scales = ScalesOf<kMode>(pass, groups, 4 * half, row);
      Unroll<kM>([&](auto i) __attribute__((always_inline)) {
        const uint8_t* const from = x + i * x_stride + half * (kChunkBytes / 2);
        const F sum = AddDot(Zero(), kept.weights[half], from, kept.places[half]);
        totals[i] = Fma(sum, scales, totals[i]);
      });
    });
  }
}

/// lanes[row of x][16 columns][16] += a pass.
template <GroupMode kMode, int kM>
void AddRows(const Pass& pass, const uint8_t* x, int64_t x_stride, float* lanes) {
  constexpr int64_t kBytes = ChunkBytes(kSparse4);
  constexpr int64_t kRowBytes = kBytes / kBlockRows;
  const uint8_t* ahead = pass.codes + pass.chunks * kBytes;
  for (int row = 0; row < kBlockRows; ++row) {
    F totals[kM];
    Unroll<kM>([&](auto i) { totals[i] = Load(lanes + i * kLaneRow + row * kLanes); });
    for (int64_t c = 0; c < pass.chunks; ++c, ahead += kRowBytes) {
      Prefetch(ahead);
      AddChunk<kMode, kM>(pass, c, row, x + c * kChunkBytes, x_stride, totals);
    }
    Unroll<kM>([&](auto i) { Store(lanes + i * kLaneRow + row * kLanes, totals[i]); });
  }
}

/// The AddRows of m rows, 1 to kSparseGemvRows.
template <GroupMode kMode, int kM = kSparseGemvRows>
void AddSomeRows(int64_t m, const Pass& pass, const uint8_t* x, int64_t x_stride, float* lanes) {
  if (m == kM) return AddRows<kMode, kM>(pass, x, x_stride, lanes);
  if constexpr (kM > 1) AddSomeRows<kMode, kM - 1>(m, pass, x, x_stride, lanes);
}

/// All passes of rows whose activations are finite.
template <GroupMode kMode>
void MultiplyFinite(const PanelView& w, int64_t block, const uint8_t* x, int64_t x_stride,
                    int64_t m, float* out, int64_t out_stride) {
  alignas(64) float lanes[kSparseGemvRows * kLaneRow];
  for (int64_t i = 0; i < m * kBlockRows; ++i) Store(lanes + i * kLanes, Zero());
  const F table = Load(w.table);
  const I values = (I)_mm512_cvtne2ps_pbh(table, table);
  GroupParameters parameters;
  ChunkGroups groups[kPassChunks];
  for (int64_t chunk = 0; chunk < w.chunks; chunk += kPassChunks) {
    const int64_t chunks = w.chunks - chunk < kPassChunks ? w.chunks - chunk : kPassChunks;
    parameters.Fill(w, block, chunk, chunks);
    LocateGroups<kMode>(w, parameters, chunk, chunks, groups);
    const uint8_t* const codes = w.codes + (block * w.chunks + chunk) * ChunkBytes(kSparse4);
    const Pass pass{parameters, groups, codes, chunks, values};
    AddSomeRows<kMode>(m, pass, x + chunk * kChunkBytes, x_stride, lanes);
  }
  for (int64_t i = 0; i < m; ++i) {
    F columns[kBlockRows];
    for (int n = 0; n < kBlockRows; ++n) columns[n] = Load(lanes + i * kLaneRow + n * kLanes);
    Store(out + i * out_stride, SumEach(columns));
  }
}

template <GroupMode kMode>
void MultiplyBlock(const PanelView& w, int64_t block, const void* x, int64_t x_stride, int64_t m,
                   float* out, int64_t out_stride, float* scratch) {
  const auto* const rows = static_cast<const uint8_t*>(x);
  ForFiniteRuns(
      x, x_stride, w.chunks * kChunkBytes, m,
      [&](int64_t first, int64_t count) {
        MultiplyFinite<kMode>(w, block, rows + first * x_stride, x_stride, count,
                              out + first * out_stride, out_stride);
      },
      [&](int64_t row) {
        SelectOneTerm(w)(w, block, rows + row * x_stride, x_stride, 1, out + row * out_stride,
                         out_stride, scratch);
      });
}

}  // namespace

void PackSparseRow(const void* a, DType type, int64_t k, void* row) {
  PackOneTerm(a, type, k, row);
  const int64_t padded = (k + kChunkK - 1) / kChunkK * kChunkK;
  const I exponent = _mm512_set1_epi16(0x7f80);
  auto* const words = static_cast<uint8_t*>(row);
  uint32_t flag = 0;
  for (int64_t i = 0; i < padded; i += kSliceK) {
    flag |= _mm512_cmpeq_epi16_mask(And(LoadWords(words + 2 * i), exponent), exponent);
  }
  __builtin_memcpy(words + 2 * padded, &flag, sizeof(flag));
}

ExactKernels::MultiplyBlock SelectSparse(const PanelView& w) {
  return WithSparseMode(w, [](auto mode) -> ExactKernels::MultiplyBlock {
    return &MultiplyBlock<static_cast<GroupMode>(decltype(mode)::value)>;
  });
}

}  // namespace marlin::cpu::avx512bf16
