// The bf16 GEMM on AVX-512 BF16.
//
//   a block of 16 columns x 1024 k, decoded to bf16    tiles of 8 columns x 3 rows of dot products
//   in L1: [2 halves][k / 32][8 columns][32 k]         over it, 24 accumulators of 16 lanes
//
// Lanes are summed once, after all of k, in a fixed order.
#include "backends/cpu/gemm/bf16/bf16_kernel.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::avx512bf16 {
using namespace avx512;  // NOLINT(google-build-using-namespace): its names are this file's words.
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/gemm/bf16/bf16_operands.inl.h"

namespace {

constexpr int kHalfRows = kBlockRows / 2;
constexpr int kMostTileM = 3;
constexpr int kMostFew = 8;
constexpr int kSliceStride = kHalfRows * kSliceK;                 ///< Elements.
constexpr int64_t kHalfStride = kPassK / kSliceK * kSliceStride;  ///< Elements.
constexpr int64_t kLaneRow = kBlockRows * kLanes;                 ///< Lane accumulators of a row.

/// A decoded panel times some rows of activations.
struct PanelProduct {
  const uint16_t* panel;
  int64_t slices;
  const uint8_t* x;  ///< The panel's first k of the first row.
  int64_t x_stride;  ///< Bytes.
  float* lanes;      ///< [row][16 columns][16 lanes]
};

MARLIN_SIMD_INLINE F AddDot(F sum, I a, I b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/// Half a panel times kM rows.
template <int kM>
void MultiplyTile(const PanelProduct& p, int half) {
  const uint16_t* panel = p.panel + half * kHalfStride;
  float* lanes = p.lanes + half * kHalfRows * kLanes;
  F sums[kHalfRows][kM];
  Unroll<kHalfRows>([&](auto n) {
    Unroll<kM>([&](auto i) { sums[n][i] = Load(lanes + i * kLaneRow + n * kLanes); });
  });
  for (int64_t slice = 0; slice < p.slices; ++slice) {
    I activations[kM];
    Unroll<kM>([&](auto i) {
      activations[i] = LoadWords(p.x + i * p.x_stride + slice * kTermSliceBytes);
    });
    Unroll<kHalfRows>([&](auto n) {
      const I weights = LoadWords(panel + slice * kSliceStride + n * kSliceK);
      Unroll<kM>([&](auto i) { sums[n][i] = AddDot(sums[n][i], weights, activations[i]); });
    });
  }
  Unroll<kHalfRows>([&](auto n) {
    Unroll<kM>([&](auto i) { Store(lanes + i * kLaneRow + n * kLanes, sums[n][i]); });
  });
}

template <int kM>
void MultiplyRows(const PanelProduct& p, int64_t row) {
  const PanelProduct from{p.panel, p.slices, p.x + row * p.x_stride, p.x_stride,
                          p.lanes + row * kLaneRow};
  MultiplyTile<kM>(from, 0);
  MultiplyTile<kM>(from, 1);
}

/// Four rows are two tiles of two, because a tile of one row waits for its loads.
void MultiplyPanel(const PanelProduct& p, int64_t m) {
  int64_t i = 0;
  for (; m - i >= kMostTileM && m - i != 4; i += kMostTileM) MultiplyRows<kMostTileM>(p, i);
  for (; m - i >= 2; i += 2) MultiplyRows<2>(p, i);
  if (i < m) MultiplyRows<1>(p, i);
}

/// A run of chunks of one block.
struct Pass {
  const PanelView& w;
  const GroupParameters& parameters;
  const ChunkGroups* groups;
  const uint8_t* codes;
  int64_t chunks;
};

template <int kBits, Kind kKind, GroupMode kMode>
void DecodePanel(const Pass& pass, uint16_t* panel) {
  constexpr int64_t kRowBytes = ChunkBytes(kBits) / kBlockRows;
  constexpr int64_t kPrefetchBytes = 8192;  // Consecutive chunks are consecutive in memory.
  const uint8_t* codes = pass.codes;
  for (int64_t c = 0; c < pass.chunks; ++c, codes += ChunkBytes(kBits)) {
    for (int row = 0; row < kBlockRows; ++row) {
      for (int64_t i = 0; i < kRowBytes; i += 64) {
        Prefetch(codes + kRowBytes * row + i + kPrefetchBytes);
      }
      uint16_t* const out =
          panel + row / kHalfRows * kHalfStride + c * 4 * kSliceStride + row % kHalfRows * kSliceK;
      DecodeBf16Row<kBits, kKind, kMode>(
          pass.w, pass.parameters, pass.groups[c], codes,
          row, [&](auto j, I slice) __attribute__((always_inline)) {
            _mm512_store_si512(out + j * kSliceStride, slice);
          });
    }
  }
}

/// Decodes chunk c of a pass, of one column.
template <int kBits, Kind kKind, GroupMode kMode>
MARLIN_SIMD_INLINE void DecodeColumn(const Pass& pass, int64_t c, int row, I (&weights)[4]) {
  DecodeBf16Row<kBits, kKind, kMode>(
      pass.w, pass.parameters, pass.groups[c], pass.codes + c * ChunkBytes(kBits),
      row, [&](auto j, I slice) __attribute__((always_inline)) { weights[j] = slice; });
}

/// sums[n][i] += column n of a chunk times row i of its activations.
template <int kM>
MARLIN_SIMD_INLINE void AddChunk(const I (&weights)[2][4], const uint8_t* x, int64_t x_stride,
                                 F (&sums)[2][kM]) {
  Unroll<4>([&](auto j) __attribute__((always_inline)) {
    Unroll<kM>([&](auto i) __attribute__((always_inline)) {
      const I activations = LoadWords(x + i * x_stride + j * kTermSliceBytes);
      sums[0][i] = AddDot(sums[0][i], weights[0][j], activations);
      sums[1][i] = AddDot(sums[1][i], weights[1][j], activations);
    });
  });
}

/// Few rows: weights of two columns are decoded in registers and multiplied with all kM rows.
template <int kBits, Kind kKind, GroupMode kMode, int kM>
void MultiplyFew(const Pass& pass, const uint8_t* x, int64_t x_stride, float* lanes) {
  constexpr int64_t kBytes = ChunkBytes(kBits);
  constexpr int64_t kPairBytes = 2 * kBytes / kBlockRows;
  const uint8_t* ahead = pass.codes + pass.chunks * kBytes;
  for (int row = 0; row < kBlockRows; row += 2) {
    F sums[2][kM];
    Unroll<kM>([&](auto i) {
      sums[0][i] = Load(lanes + i * kLaneRow + row * kLanes);
      sums[1][i] = Load(lanes + i * kLaneRow + (row + 1) * kLanes);
    });
    for (int64_t c = 0; c < pass.chunks; ++c) {
      for (int64_t i = 0; i < kPairBytes; i += 64) Prefetch(ahead + i);
      ahead += kPairBytes;
      I weights[2][4];
      DecodeColumn<kBits, kKind, kMode>(pass, c, row, weights[0]);
      DecodeColumn<kBits, kKind, kMode>(pass, c, row + 1, weights[1]);
      AddChunk<kM>(weights, x + c * 4 * kTermSliceBytes, x_stride, sums);
    }
    Unroll<kM>([&](auto i) {
      Store(lanes + i * kLaneRow + row * kLanes, sums[0][i]);
      Store(lanes + i * kLaneRow + (row + 1) * kLanes, sums[1][i]);
    });
  }
}

/// The MultiplyFew of m rows, 1 to kMostFew.
template <int kBits, Kind kKind, GroupMode kMode, int kM = kMostFew>
void MultiplyFewRows(int64_t m, const Pass& pass, const uint8_t* x, int64_t x_stride,
                     float* lanes) {
  if (m == kM) return MultiplyFew<kBits, kKind, kMode, kM>(pass, x, x_stride, lanes);
  if constexpr (kM > 1) {
    MultiplyFewRows<kBits, kKind, kMode, kM - 1>(m, pass, x, x_stride, lanes);
  }
}

template <int kBits, Kind kKind, GroupMode kMode, int kTerms>
void MultiplyBlock(const PanelView& w, int64_t block, const void* x, int64_t x_stride, int64_t m,
                   float* out, int64_t out_stride, float* scratch) {
  auto* panel = reinterpret_cast<uint16_t*>(scratch);
  static_assert(2 * kHalfStride * 2 <= 8 * kPassK * 4);
  float* lanes = scratch + 8 * kPassK;
  for (int64_t i = 0; i < m * kBlockRows; ++i) Store(lanes + i * kLanes, Zero());
  GroupParameters parameters;
  ChunkGroups groups[kPassChunks];
  for (int64_t chunk = 0; chunk < w.chunks; chunk += kPassChunks) {
    const int64_t chunks = w.chunks - chunk < kPassChunks ? w.chunks - chunk : kPassChunks;
    parameters.Fill(w, block, chunk, chunks);
    LocateGroups<kMode>(w, parameters, chunk, chunks, groups);
    const Pass pass{w, parameters, groups, w.codes + (block * w.chunks + chunk) * ChunkBytes(kBits),
                    chunks};
    const auto term_at = [&](int64_t term) {
      return static_cast<const uint8_t*>(x) +
             (term * w.chunks + chunk) * (kChunkK / kSliceK) * kTermSliceBytes;
    };
    if (kTerms == 1 && m <= kMostFew) {
      MultiplyFewRows<kBits, kKind, kMode>(m, pass, term_at(0), x_stride, lanes);
      continue;
    }
    DecodePanel<kBits, kKind, kMode>(pass, panel);
    for (int term = 0; term < kTerms; ++term) {
      MultiplyPanel({panel, chunks * (kChunkK / kSliceK), term_at(term), x_stride, lanes}, m);
    }
  }
  for (int64_t i = 0; i < m; ++i) {
    F columns[kBlockRows];
    for (int n = 0; n < kBlockRows; ++n) columns[n] = Load(lanes + i * kLaneRow + n * kLanes);
    Store(out + i * out_stride, SumEach(columns));
  }
}

template <int kTerms>
ExactKernels::MultiplyBlock Select(const PanelView& weights) {
  return Dispatch(weights, [](auto bits, auto kind, auto mode) -> ExactKernels::MultiplyBlock {
    return &MultiplyBlock<decltype(bits)::value, static_cast<Kind>(decltype(kind)::value),
                          static_cast<GroupMode>(decltype(mode)::value), kTerms>;
  });
}

template <int kTerms>
void Pack(const void* a, DType type, int64_t k, void* row) {
  const int64_t size = type == DType::kF32 ? 4 : 2;
  const int64_t padded = (k + kChunkK - 1) / kChunkK * kChunkK;
  auto* const high_row = static_cast<uint16_t*>(row);
  for (int64_t first = 0; first < padded; first += kSliceK) {
    I high = _mm512_setzero_si512();
    I low = _mm512_setzero_si512();
    if (first < k) {
      SplitSlice(static_cast<const uint8_t*>(a) + first * size, type, k - first, high, low);
    }
    _mm512_store_si512(high_row + first, high);
    if constexpr (kTerms == 2) _mm512_store_si512(high_row + padded + first, low);
  }
}

}  // namespace

void PackOneTerm(const void* a, DType type, int64_t k, void* row) { Pack<1>(a, type, k, row); }
void PackTwoTerms(const void* a, DType type, int64_t k, void* row) { Pack<2>(a, type, k, row); }

ExactKernels::MultiplyBlock SelectOneTerm(const PanelView& weights) { return Select<1>(weights); }
ExactKernels::MultiplyBlock SelectTwoTerms(const PanelView& weights) { return Select<2>(weights); }

int64_t DotChains(int64_t iterations, float* sink) {
  constexpr int kChains = 12;
  F sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Set(static_cast<float>(i));
  const I a = SetWord(0x3f803f80);
  for (int64_t n = 0; n < iterations; ++n) {
    for (int i = 0; i < kChains; ++i) sums[i] = KeepInRegister(AddDot(sums[i], a, a));
  }
  F total = sums[0];
  for (int i = 1; i < kChains; ++i) total = Add(total, sums[i]);
  *sink = Sum(total);
  return iterations * kChains * kLanes * 4;
}

}  // namespace marlin::cpu::avx512bf16
