// The mainloop of the MMA kernels: the sums of an output tile, from weight tiles and rows of
// activations in global memory. Kernels that gather rows pass another `Rows`.
//
//   C^T = W^T A^T with m16n8k16: weights are the 16-row operand, tokens the columns.
//
//                       kTokens tokens (shared memory, all warps read the same)
//                     +------------------------+
//     n-tile 0  warp 0|  32 outputs x kTokens  |   each thread: kTokens sums
//     n-tile 1  warp 1|                        |   every fragment of weights is decoded by one
//        ...          |                        |   warp, once for all tokens of the CTA
//                     +------------------------+
//
//   A k-iteration is a weight tile, 128 k. Copies are cp.async, `stages` deep; a stage has the
//   activations, [token][128 k] with the 16-byte chunks of a row swizzled, and a weight tile for
//   each warp, which no other warp reads. So a warp decodes the first quarter of the next tile
//   before it meets the others: only the activations have to be complete for all warps.
#pragma once

#include "backends/cuda/gemm/mma/mma_layout.h"
#include "backends/cuda/gemm/mma/mma_strip.cuh"

namespace marlin::cuda {

/// Rows of a matrix from `first` on; rows from `m` on are zeros.
struct PlainRows {
  const void* a;
  int64_t stride_bytes;
  int first;
  int m;

  /// The beginning of token `token` of the output tile, at a multiple of 16 bytes; null: zeros.
  MARLIN_DEVICE const uint8_t* operator()(int token) const {
    const int row = first + token;
    return row < m ? static_cast<const uint8_t*>(a) + row * stride_bytes : nullptr;
  }
};

/// The k-iterations of an output tile, as one warp sees them.
struct MmaRun {
  MmaStages shape;
  uint32_t pipeline;       ///< Shared memory of MmaStages, at a multiple of 256 bytes.
  const uint8_t* weights;  ///< The warp's n-tile, at the first of its weight tiles.
  int64_t to_next;         ///< Bytes from one weight tile to the next.
  int groups;              ///< TileView::groups_per_tile of the weights.
  int first_k;
  int k;      ///< Columns of the activations; beyond are zeros.
  int tiles;  ///< k-iterations.
};

/// The CTA's copies of k-iterations.
template <int kTokens, typename Rows>
struct StageCopies {
  static constexpr int kChunks = kTokenBytes / 16;  ///< Per row.

  const MmaRun& run;
  const Rows& rows;

  /// Copies k-iteration `i`, if there is one, into a stage: one group of copies.
  MARLIN_DEVICE void Copy(int i, int stage) const {
    if (i < run.tiles) {
      CopyActivations(run.first_k + i * kTileK,
                      run.pipeline + stage * run.shape.ActivationBytes(kTokens));
      const int warp = static_cast<int>(threadIdx.x) >> 5;
      CopyWeights(run.weights + i * run.to_next, run.pipeline + run.shape.WeightsOffset(kTokens) +
                                                     stage * run.shape.WeightBytes() +
                                                     warp * run.shape.tile_bytes);
    }
    CommitCopies();
  }

 private:
  MARLIN_DEVICE void CopyActivations(int k, uint32_t to) const {
    // Eight tokens share the banks of a chunk without the swizzle.
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int at_k = k + chunk * 8;
    const int inside = min(max(run.k - at_k, 0), 8) * 2;
    const int step = run.shape.warps * 32 / kChunks;
#pragma unroll 1
    for (int token = static_cast<int>(threadIdx.x) / kChunks; token < kTokens; token += step) {
      const uint8_t* const row = rows(token);
      const int bytes = row == nullptr ? 0 : inside;
      // Without bytes to read the address has to be valid all the same.
      const uint8_t* const from = bytes == 0 ? run.weights : row + at_k * int64_t{2};
      CopyAsync16(to + token * kTokenBytes + ((chunk ^ (token & 7)) << 4), from, bytes);
    }
  }

  MARLIN_DEVICE void CopyWeights(const uint8_t* weights, uint32_t to) const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32 * 16; i < run.shape.tile_bytes; i += 32 * 16) {
      CopyAsync16(to + i, weights + i, 16);
    }
  }
};

/// Waits for the copies of this thread that were committed `stages - 1` groups ago.
MARLIN_DEVICE void WaitForStage(int stages) {
  static_assert(kMostMmaStages == 5);
  if (stages == 2) {
    WaitForCopies<0>();
  } else if (stages == 3) {
    WaitForCopies<1>();
  } else if (stages == 4) {
    WaitForCopies<2>();
  } else {
    WaitForCopies<3>();
  }
}

/// Computes the sums of an output tile. `Strip`: how a warp reads, decodes and multiplies weight
/// tiles, as StripTile. All threads of the CTA take part; other shared memory than the pipeline is
/// not touched, and a __syncthreads() has to come before the pipeline is used for something else.
template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Strip = StripTile>
struct MmaMainloop {
  static constexpr int kOctets = kTokens / 8;
  using Weights = Strip<kKind, T, kUse>;
  using Table = typename Weights::Table;
  using Fragments = typename Weights::Fragments;
  /// [n8 tile of tokens][16 outputs][c0..c3]: output g + 8 (c >> 1) and token 2 t + (c & 1), for
  /// lane 4 g + t.
  using Sums = float[kOctets][2][4];
  /// Whether a quarter is decoded before the MMAs of the previous one, where registers suffice.
  static constexpr bool kAhead = kTokens < 128 || kUse == ParameterUse::kOneScale;

  const ParameterMode mode;
  const Table table;

  MARLIN_DEVICE explicit MmaMainloop(const TileView& view)
      : mode(ParameterModeOf<kKind, T>(view)), table(view) {}

  /// Multiplies a quarter by all tokens. `activations`: address of the first n8 tile, for ldmatrix.
  static MARLIN_DEVICE void Multiply(const Fragments& fragments, uint32_t activations, Sums& acc) {
    uint32_t tokens[2][2][4];
    LoadOctets(activations, tokens[0]);
#pragma unroll
    for (int o = 0; o < kOctets; o += 2) {
      // One pair of n8 tiles ahead of the MMAs.
      if (o + 2 < kOctets) {
        LoadOctets(activations + (o + 2) * 8 * kTokenBytes, tokens[(o / 2 + 1) % 2]);
      }
      Weights::Multiply(fragments, tokens[o / 2 % 2], acc[o], acc[o + 1]);
    }
  }

  /// Precondition: run.tiles > 0; acc is all zeros.
  template <typename Rows>
  MARLIN_DEVICE void Run(const MmaRun& run, const Rows& rows, Sums& acc) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int warp = static_cast<int>(threadIdx.x) >> 5;
    const int stages = run.shape.stages;
    const int activation_bytes = run.shape.ActivationBytes(kTokens);
    const uint32_t first_tile =
        run.pipeline + run.shape.WeightsOffset(kTokens) + warp * run.shape.tile_bytes;
    // Lane l passes ldmatrix the row of token l % 8 and chunk l / 8 of a quarter, at its swizzled
    // place; the chunks of quarter q are the same with q in the upper two bits.
    const uint32_t row = (lane & 7) * kTokenBytes + (((lane >> 3) ^ (lane & 7)) << 4);
    const StageCopies<kTokens, Rows> copies{run, rows};
#pragma unroll 1
    for (int s = 0; s + 1 < stages; ++s) copies.Copy(s, s);

    Weights weights;
    Fragments fragments[2];
    int stage = 0;
    WaitForStage(stages);
    __syncwarp();
    if constexpr (kAhead) {
      weights.Decode(first_tile, lane, 0, run.groups, mode, table, fragments[0]);
    }
#pragma unroll 1
    for (int i = 0; i < run.tiles; ++i) {
      // All threads' copies of this stage have arrived, and all warps are done with the previous
      // one, which the next copies fill.
      __syncthreads();
      const uint32_t activations = run.pipeline + stage * activation_bytes + row;
      const uint32_t tile = first_tile + stage * run.shape.WeightBytes();
      const int to_fill = (stage == 0 ? stages : stage) - 1;
      stage = stage + 1 == stages ? 0 : stage + 1;
      const uint32_t next_tile = first_tile + stage * run.shape.WeightBytes();
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        // After the last tile this waits for nothing, and decodes what no MMA uses.
        const bool last = quarter + 1 == kQuarters;
        if (last) {
          WaitForStage(stages);
          __syncwarp();
        }
        if constexpr (kAhead) {
          weights.Decode(last ? next_tile : tile, lane, (quarter + 1) % kQuarters, run.groups, mode,
                         table, fragments[(quarter + 1) % 2]);
        } else {
          weights.Decode(tile, lane, quarter, run.groups, mode, table, fragments[quarter % 2]);
        }
        Multiply(fragments[quarter % 2], activations ^ (quarter * 64), acc);
        // Not before the first MMAs, which hide it.
        if (quarter == 0) copies.Copy(i + stages - 1, to_fill);
      }
    }
    WaitForAllCopies();
  }

 private:
  static MARLIN_DEVICE void LoadOctets(uint32_t activations, uint32_t (&tokens)[2][4]) {
    LoadMatrices(tokens[0], activations);
    LoadMatrices(tokens[1], activations + 8 * kTokenBytes);
  }
};

}  // namespace marlin::cuda
