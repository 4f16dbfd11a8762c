// The exact GEMM, in the vector operations of one simd_*.h. Included after decode.inl.h.
//
//   out[i, n] = Sum over lanes of (fma over k of w[n, k] * x[i, k], lane by lane)
//
//   small m (kLeastFused ..      otherwise
//   kMostFused): a row of        kPanelColumns rows of kPanelK k decoded to L1, then tiles of
//   weights decoded in           kPanelRows x kPanelM dot products over them
//   registers, m FMAs per vector
//
// Both accumulate over k in the same order in the same lanes, so they are bit-identical and
// batch-invariant: a row's result depends neither on m nor on the other rows. Chain of additions:
// k / kLanes, then log2(kLanes).
#pragma once
#include "backends/cpu/simd/activation.inl.h"
#include "backends/cpu/simd/conversions.inl.h"
#include "backends/cpu/simd/decode.inl.h"

/// A KC block of one column block: a run of chunks, with its group parameters.
struct Pass {
  const PanelView& w;
  const GroupParameters& parameters;
  const ChunkGroups* groups;
  int64_t block;
  int64_t first_chunk;
  int64_t chunk_count;
};

/// Activation rows of a KC block, and the lane accumulators [row][16 n][kLanes], which carry over
/// from one KC block to the next.
struct PassRows {
  const float* x;
  int64_t x_stride;
  float* lanes;

  PassRows From(int64_t row) const {
    return {x + row * x_stride, x_stride, lanes + row * kBlockRows * kLanes};
  }
};

/// sums[i] += weights * a vector of row i.
template <int kM>
MARLIN_SIMD_INLINE void AddProducts(F weights, const float* x, int64_t x_stride, F (&sums)[kM]) {
  Unroll<kM>([&](auto i) __attribute__((always_inline)) {
    sums[i] = Fma(weights, Load(x + i * x_stride), sums[i]);
  });
}

/// Fuses dequantization in registers with the FMAs: one load and one store of lane accumulators per
/// activation row and chunk, for 128 / kLanes FMAs.
template <int kBits, Kind kKind, GroupMode kMode, int kM>
static void MultiplyFused(const Pass& pass, const PassRows& rows) {
  constexpr int64_t kBytes = ChunkBytes(kBits);
  constexpr int64_t kPrefetchBytes = 8192;  // Consecutive chunks are consecutive in memory.
  const PanelView& w = pass.w;
  const uint8_t* chunk = w.codes + (pass.block * w.chunks + pass.first_chunk) * kBytes;
  const float* x = rows.x;
  for (int64_t c = 0; c < pass.chunk_count; ++c, chunk += kBytes, x += kChunkK) {
    for (int row = 0; row < kBlockRows; ++row) {
      for (int64_t i = 0; i < kBytes / kBlockRows; i += 64) {
        Prefetch(chunk + kBytes / kBlockRows * row + i + kPrefetchBytes);
      }
      float* row_lanes = rows.lanes + row * kLanes;
      F sums[kM];
      Unroll<kM>([&](auto i) { sums[i] = Load(row_lanes + i * kBlockRows * kLanes); });
      DecodeRow<kBits, kKind, kMode>(
          w, pass.parameters, pass.groups[c], chunk,
          row, [&](int64_t offset, F weights) __attribute__((always_inline)) {
            AddProducts(weights, x + offset, rows.x_stride, sums);
          });
      Unroll<kM>([&](auto i) { Store(row_lanes + i * kBlockRows * kLanes, sums[i]); });
    }
  }
}

/// Most rows of MultiplyFused: it pays off if decoding is cheaper than a round trip through L1.
template <Kind kKind>
inline constexpr int kMostFused = kKind == Kind::kTable ? kFusedRows : 1;

/// The MultiplyFused of m rows, kLeastFused to kMostFused.
template <int kBits, Kind kKind, GroupMode kMode, int kM = kMostFused<kKind>>
static void MultiplyFusedRows(int64_t m, const Pass& pass, const PassRows& rows) {
  if (m == kM) return MultiplyFused<kBits, kKind, kMode, kM>(pass, rows);
  if constexpr (kM > kLeastFused) MultiplyFusedRows<kBits, kKind, kMode, kM - 1>(m, pass, rows);
}

/// Dot products of kN columns of a panel with kM activation rows over `count` k. The first column
/// is first_n of the block.
template <int kN, int kM>
static void PanelTile(const float* panel, int64_t count, const PassRows& rows, int first_n) {
  float* lanes = rows.lanes + first_n * kLanes;
  F sums[kN][kM];
  Unroll<kN>([&](auto n) {
    Unroll<kM>([&](auto i) { sums[n][i] = Load(lanes + (i * kBlockRows + n) * kLanes); });
  });
  for (int64_t k = 0; k < count; k += kLanes) {
    F activations[kM];
    Unroll<kM>([&](auto i) { activations[i] = Load(rows.x + i * rows.x_stride + k); });
    Unroll<kN>([&](auto n) {
      const F weights = KeepInRegister(Load(panel + k * kPanelColumns + n * kLanes));
      Unroll<kM>([&](auto i) { sums[n][i] = Fma(weights, activations[i], sums[n][i]); });
    });
  }
  Unroll<kN>([&](auto n) {
    Unroll<kM>([&](auto i) { Store(lanes + (i * kBlockRows + n) * kLanes, sums[n][i]); });
  });
}

/// Decodes `count` rows of a KC block to a panel [k / kLanes][count][kLanes], in packed order. Rows
/// are interleaved, because rows 4 KiB apart would map to one L1 set.
template <int kBits, Kind kKind, GroupMode kMode>
static void DecodePanel(const Pass& pass, int first_row, int count, float* panel) {
  const PanelView& w = pass.w;
  const uint8_t* chunk = w.codes + (pass.block * w.chunks + pass.first_chunk) * ChunkBytes(kBits);
  for (int64_t c = 0; c < pass.chunk_count; ++c, chunk += ChunkBytes(kBits)) {
    for (int row = 0; row < count; ++row) {
      float* target = panel + c * kChunkK * count + row * kLanes;
      DecodeRow<kBits, kKind, kMode>(
          w, pass.parameters, pass.groups[c], chunk,
          first_row + row, [&](int64_t offset, F weights) __attribute__((always_inline)) {
            Store(target + offset * count, weights);
          });
    }
  }
}

/// All rows times a decoded panel of `count` k, whose first column is first_n of the block. The
/// rows of a tile stay in L1 for all columns.
static void MultiplyPanel(const float* panel, int64_t count, const PassRows& rows, int64_t m,
                          int first_n) {
  constexpr int kOneRowColumns = kPanelColumns < 8 ? kPanelColumns : 8;
  int64_t i = 0;
  for (; i + kPanelM <= m; i += kPanelM) {
    for (int n = 0; n < kPanelColumns; n += kPanelRows) {
      PanelTile<kPanelRows, kPanelM>(panel + n * kLanes, count, rows.From(i), first_n + n);
    }
  }
  for (; i < m; ++i) {
    for (int n = 0; n < kPanelColumns; n += kOneRowColumns) {
      PanelTile<kOneRowColumns, 1>(panel + n * kLanes, count, rows.From(i), first_n + n);
    }
  }
}

/// Large-M path. `decode` is the DecodePanel of the format.
template <class Decode>
static void MultiplyByPanel(const Pass& pass, Decode decode, const PassRows& rows, int64_t m,
                            float* panel) {
  constexpr int64_t kPanelChunks = kPanelK / kChunkK;
  for (int64_t c = 0; c < pass.chunk_count; c += kPanelChunks) {
    const int64_t left = pass.chunk_count - c;
    const int64_t chunks = left < kPanelChunks ? left : kPanelChunks;
    const Pass part{pass.w,     pass.parameters,      pass.groups + c,
                    pass.block, pass.first_chunk + c, chunks};
    const PassRows part_rows{rows.x + c * kChunkK, rows.x_stride, rows.lanes};
    for (int column = 0; column < kBlockRows; column += kPanelColumns) {
      decode(part, column, kPanelColumns, panel);
      MultiplyPanel(panel, chunks * kChunkK, part_rows, m, column);
    }
  }
}

template <int kBits, Kind kKind, GroupMode kMode>
static void MultiplyBlock(const PanelView& w, int64_t block, const void* x, int64_t x_stride,
                          int64_t m, float* out, int64_t out_stride, float* scratch) {
  const auto* activations = static_cast<const float*>(x);
  float* panel = scratch;
  float* lanes = scratch + 8 * kPassK;
  for (int64_t i = 0; i < m * kBlockRows; ++i) Store(lanes + i * kLanes, Zero());
  GroupParameters parameters;
  ChunkGroups groups[kPassChunks];
  for (int64_t chunk = 0; chunk < w.chunks; chunk += kPassChunks) {
    const int64_t chunks = w.chunks - chunk < kPassChunks ? w.chunks - chunk : kPassChunks;
    parameters.Fill(w, block, chunk, chunks);
    LocateGroups<kMode>(w, parameters, chunk, chunks, groups);
    const Pass pass{w, parameters, groups, block, chunk, chunks};
    const PassRows rows{activations + chunk * kChunkK,
                        x_stride / static_cast<int64_t>(sizeof(float)), lanes};
    if (m >= kLeastFused && m <= kMostFused<kKind>) {
      if constexpr (kMostFused<kKind> >= kLeastFused) {
        MultiplyFusedRows<kBits, kKind, kMode>(m, pass, rows);
      }
    } else {
      MultiplyByPanel(pass, &DecodePanel<kBits, kKind, kMode>, rows, m, panel);
    }
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int n = 0; n < kBlockRows; ++n) {
      out[i * out_stride + n] = Sum(Load(lanes + (i * kBlockRows + n) * kLanes));
    }
  }
}

/// Decodes a chunk in natural order of k, for dequantization.
template <int kBits, Kind kKind, GroupMode kMode>
static void DecodeChunk(const PanelView& w, int64_t block, int64_t chunk, float* out) {
  GroupParameters parameters;
  ChunkGroups groups;
  parameters.Fill(w, block, chunk, 1);
  LocateGroups<kMode>(w, parameters, chunk, 1, &groups);
  const Pass pass{w, parameters, &groups, block, chunk, 1};
  for (int row = 0; row < kBlockRows; ++row) {
    float packed[kChunkK];
    DecodePanel<kBits, kKind, kMode>(pass, row, 1, packed);
    for (int slice = 0; slice < kChunkK; slice += kSliceK) {
      for (int i = 0; i < 16; ++i) {
        out[row * kChunkK + slice + 2 * i] = packed[slice + i];
        out[row * kChunkK + slice + 2 * i + 1] = packed[slice + 16 + i];
      }
    }
  }
}

static ExactKernels::MultiplyBlock SelectMultiply(const PanelView& w) {
  return Dispatch(w, [](auto bits, auto kind, auto mode) -> ExactKernels::MultiplyBlock {
    return &MultiplyBlock<decltype(bits)::value, static_cast<Kind>(decltype(kind)::value),
                          static_cast<GroupMode>(decltype(mode)::value)>;
  });
}

static void DecodeBlock(const PanelView& w, int64_t block, int64_t chunk, float* out) {
  Dispatch(w, [&](auto bits, auto kind, auto mode) {
    DecodeChunk<decltype(bits)::value, static_cast<Kind>(decltype(kind)::value),
                static_cast<GroupMode>(decltype(mode)::value)>(w, block, chunk, out);
  });
}
