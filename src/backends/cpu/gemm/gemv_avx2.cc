// The GEMV of 4-, 3- and 2-bit weights on AVX2.
#include "backends/cpu/gemm/gemv_kernel.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/simd/byte_codes.inl.h"
#include "backends/cpu/simd/byte_planes_avx2.inl.h"

namespace {

/// Parameters of a weight other than its value and scale.
enum class Shift { kNone, kZeros, kBiases };

/// A KC block of one column block.
struct Pass {
  const PanelView& w;
  const GroupParameters& parameters;
  const ChunkGroups* groups;
  BytePlanes planes;
  const uint8_t* codes;
  int64_t chunks;
};

/// The GEMV of kM rows, of one kind of weights.
template <int kBits, GroupMode kMode, Shift kShift, int kM>
struct Gemv {
  /// Scales weights one by one instead of sums: biases require it, and it takes less time if a
  /// vector of weights meets more rows than a group has vectors.
  static constexpr bool kScalesWeights =
      kShift == Shift::kBiases || (kM >= 4 && kMode != GroupMode::kChunk);
  /// Columns at a time, and sums per column and row: independent chains of FMAs, which hide their
  /// latency.
  static constexpr int kColumns = kM == 1 ? 2 : 1;
  static constexpr int kSums = kM <= 4 ? 2 : 1;

  using Sums = F[kColumns][kM];

  /// The eight values of slice `high` of a pair in interleaved words.
  template <bool kHigh>
  MARLIN_SIMD_INLINE F ValueOf(I words) {
    if constexpr (kHigh) return AsFloat(And(words, SetWord(0xffff0000)));
    return AsFloat(ShiftLeft<16>(words));
  }

  /// A weight, or its part that the sum of a group is made of. `index` is the index into the
  /// parameters.
  MARLIN_SIMD_INLINE F Shifted(const GroupParameters& parameters, F value, int64_t index) {
    if constexpr (kShift == Shift::kZeros) value = Sub(value, Set(parameters.zero[index]));
    if constexpr (kShift == Shift::kBiases) {
      return Fma(value, Set(parameters.scale[index]), Set(parameters.bias[index]));
    }
    if constexpr (kScalesWeights) value = Mul(value, Set(parameters.scale[index]));
    return value;
  }

  /// totals += scale * sums, and clears the sums.
  MARLIN_SIMD_INLINE void AddGroup(const float* scale, Sums& sums, Sums& totals) {
    for (int c = 0; c < kColumns; ++c) {
      const F scales = Set(scale[c]);
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) {
        totals[c][i] = Fma(sums[c][i], scales, totals[c][i]);
        sums[c][i] = Zero();
      }
    }
  }

  /// kColumns columns of a chunk, from `row` of the block on.
  struct Columns {
    const Pass& pass;
    int64_t chunk;
    int row;

    /// The index of the group parameters of a slice, or of its part.
    int64_t IndexOf(int slice, int part) const {
      const int32_t* groups = pass.groups[chunk].offset;
      if constexpr (kMode == GroupMode::kChunk) return groups[0] + row;
      return groups[2 * slice + (kMode == GroupMode::kHalf ? part : 0)] + row;
    }
  };

  /// words[half][column] = interleaved values of 8 words of both slices of a pair.
  template <int kPair, int kPart>
  MARLIN_SIMD_INLINE void Decode(const Columns& columns, I (&words)[2][kColumns]) {
    const Pass& pass = columns.pass;
    const uint8_t* codes = pass.codes + columns.chunk * ChunkBytes(kBits);
    for (int c = 0; c < kColumns; ++c) {
      const I index =
          And(PairCodes<kBits, kPair>(codes, columns.row + c, kPart), SetWord(0x0f0f0f0f));
      const I high = _mm256_shuffle_epi8(pass.planes.high, index);
      const I low = _mm256_shuffle_epi8(pass.planes.low, index);
      words[0][c] = _mm256_unpacklo_epi8(low, high);
      words[1][c] = _mm256_unpackhi_epi8(low, high);
    }
  }

  /// Multiplies decoded words with all rows: sums[0] of slice kPair, sums[1] of slice kPair + 2,
  /// or sums[0] of both.
  template <int kPair, int kPart>
  MARLIN_SIMD_INLINE void AddProducts(const Columns& columns, const I (&words)[2][kColumns],
                                      const float* const (&x)[kM], Sums (&sums)[2]) {
    Unroll<4>([&](auto vector) __attribute__((always_inline)) {
      constexpr int kHalf = decltype(vector)::value / 2;
      constexpr int kUpper = decltype(vector)::value % 2;
      constexpr int kSlice = kPair + 2 * kUpper;
      const int64_t offset = columns.chunk * kChunkK + kSlice * kSliceK + 16 * kPart + 8 * kHalf;
      Sums& sum = sums[kSums == 2 ? kUpper : 0];
      F activations[kM];
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) activations[i] = Load(x[i] + offset);
      for (int c = 0; c < kColumns; ++c) {
        const F value = Shifted(columns.pass.parameters, ValueOf<kUpper == 1>(words[kHalf][c]),
                                columns.IndexOf(kSlice, kPart) + c);
#pragma GCC unroll 16
        for (int i = 0; i < kM; ++i) sum[c][i] = Fma(value, activations[i], sum[c][i]);
      }
    });
  }

  /// Adds a chunk.
  MARLIN_SIMD_INLINE void AddChunk(const Columns& columns, const float* const (&x)[kM],
                                   Sums& totals) {
    const float* scale = columns.pass.parameters.scale;
    Sums sums[2];
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) sums[0][c][i] = sums[1][c][i] = Zero();
    }
    Unroll<2>([&](auto pair) __attribute__((always_inline)) {
      constexpr int kPair = decltype(pair)::value;
      Unroll<2>([&](auto part) __attribute__((always_inline)) {
        constexpr int kPart = decltype(part)::value;
        I words[2][kColumns];
        Decode<kPair, kPart>(columns, words);
        AddProducts<kPair, kPart>(columns, words, x, sums);
        // A group is a part of a slice or, after the second part, a slice.
        constexpr bool kEndsGroup =
            kMode == GroupMode::kHalf || (kMode == GroupMode::kSlice && kPart == 1);
        if constexpr (!kScalesWeights && kEndsGroup) {
          AddGroup(scale + columns.IndexOf(kPair, kPart), sums[0], totals);
          AddGroup(scale + columns.IndexOf(kPair + 2, kPart), sums[1], totals);
        }
      });
    });
    if constexpr (!kScalesWeights && kMode != GroupMode::kChunk) return;
    for (int c = 0; c < kColumns; ++c) {
      const F scales = kScalesWeights ? Set(1.0f) : Set(scale[columns.IndexOf(0, 0) + c]);
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) {
        const F sum = kSums == 2 ? Add(sums[0][c][i], sums[1][c][i]) : sums[0][c][i];
        totals[c][i] = Fma(sum, scales, totals[c][i]);
      }
    }
  }

  /// lanes[row of x][16 columns][8] += a KC block.
  static void AddPass(const Pass& pass, const float* const (&x)[kM], float* lanes) {
    constexpr int64_t kPrefetchBytes = 4096;  // Consecutive chunks are consecutive in memory.
    constexpr int64_t kBytes = kColumns * ChunkBytes(kBits) / kBlockRows;
    const uint8_t* ahead = pass.codes + kPrefetchBytes;
    for (int64_t chunk = 0; chunk < pass.chunks; ++chunk) {
      for (int row = 0; row < kBlockRows; row += kColumns, ahead += kBytes) {
        for (int64_t i = 0; i < kBytes; i += 64) Prefetch(ahead + i);
        AddColumns({pass, chunk, row}, x, lanes + row * kLanes);
      }
    }
  }

 private:
  /// The lanes of kColumns columns in every row of x += a chunk.
  MARLIN_SIMD_INLINE void AddColumns(const Columns& columns, const float* const (&x)[kM],
                                     float* lanes) {
    Sums totals;
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) totals[c][i] = Load(lanes + (i * kBlockRows + c) * kLanes);
    }
    AddChunk(columns, x, totals);
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) Store(lanes + (i * kBlockRows + c) * kLanes, totals[c][i]);
    }
  }
};

int64_t RoundedRows(int64_t m) { return m == 1 ? 1 : m <= 4 ? 4 : 8; }

/// The last row is repeated up to kM.
template <int kBits, GroupMode kMode, Shift kShift, int kM>
[[gnu::noinline]] void AddRows(const Pass& pass, const float* x, int64_t x_stride, int64_t m,
                               float* lanes) {
  const float* rows[kM];
  for (int64_t i = 0; i < kM; ++i) rows[i] = x + (i < m ? i : m - 1) * x_stride;
  Gemv<kBits, kMode, kShift, kM>::AddPass(pass, rows, lanes);
}

template <int kBits, GroupMode kMode, Shift kShift>
void MultiplyBlock(const PanelView& w, int64_t block, const void* x, int64_t x_stride, int64_t m,
                   float* out, int64_t out_stride, float* /*scratch*/) {
  alignas(32) float lanes[kGemvRows * kBlockRows * kLanes];
  for (int64_t i = 0; i < RoundedRows(m) * kBlockRows; ++i) Store(lanes + i * kLanes, Zero());
  const int64_t stride = x_stride / static_cast<int64_t>(sizeof(float));
  const BytePlanes planes = PlanesOf(w.table);
  GroupParameters parameters;
  ChunkGroups groups[kPassChunks];
  for (int64_t chunk = 0; chunk < w.chunks; chunk += kPassChunks) {
    const int64_t chunks = w.chunks - chunk < kPassChunks ? w.chunks - chunk : kPassChunks;
    parameters.Fill(w, block, chunk, chunks);
    LocateGroups<kMode>(w, parameters, chunk, chunks, groups);
    const Pass pass{
        w,     parameters, groups, planes, w.codes + (block * w.chunks + chunk) * ChunkBytes(kBits),
        chunks};
    const float* const rows = static_cast<const float*>(x) + chunk * kChunkK;
    switch (RoundedRows(m)) {
      case 1:
        AddRows<kBits, kMode, kShift, 1>(pass, rows, stride, m, lanes);
        break;
      case 4:
        AddRows<kBits, kMode, kShift, 4>(pass, rows, stride, m, lanes);
        break;
      default:
        AddRows<kBits, kMode, kShift, 8>(pass, rows, stride, m, lanes);
    }
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int n = 0; n < kBlockRows; n += kLanes) {
      F columns[kLanes];
      for (int c = 0; c < kLanes; ++c) {
        columns[c] = Load(lanes + (i * kBlockRows + n + c) * kLanes);
      }
      Store(out + i * out_stride + n, SumEach(columns));
    }
  }
}

}  // namespace

void ReorderGemvRow(int64_t k, float* x) {
  for (int64_t i = 0; i < k; i += kSliceK) {
    // The packed row is deinterleaved: 16 even k, then 16 odd ones.
    F even[2];
    F odd[2];
    for (int half = 0; half < 2; ++half) {
      even[half] = Load(x + i + 8 * half);
      odd[half] = Load(x + i + 16 + 8 * half);
    }
    for (int half = 0; half < 2; ++half) {
      Store(x + i + 16 * half, _mm256_unpacklo_ps(even[half], odd[half]));
      Store(x + i + 16 * half + 8, _mm256_unpackhi_ps(even[half], odd[half]));
    }
  }
}

ExactKernels::MultiplyBlock SelectGemv(const PanelView& w) {
  return Dispatch(w, [&](auto bits, auto kind, auto mode) -> ExactKernels::MultiplyBlock {
    if constexpr (static_cast<Kind>(decltype(kind)::value) == Kind::kTable) {
      constexpr int kBits = decltype(bits)::value;
      constexpr auto kMode = static_cast<GroupMode>(decltype(mode)::value);
      if (w.zeros != nullptr) return &MultiplyBlock<kBits, kMode, Shift::kZeros>;
      if (w.biases != nullptr) return &MultiplyBlock<kBits, kMode, Shift::kBiases>;
      return &MultiplyBlock<kBits, kMode, Shift::kNone>;
    }
    return nullptr;
  });
}

}  // namespace marlin::cpu::avx2
