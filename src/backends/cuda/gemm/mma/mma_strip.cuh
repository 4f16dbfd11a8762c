// The work of one warp of the MMA kernels on a weight tile: the 32 outputs of an n-tile, read from
// shared memory, decoded in registers and multiplied by all tokens of the CTA, 32 k at a time.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/tile_loads.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/layout/sparse_layout.h"

namespace marlin::cuda {

/// A tile has four quarters of 32 k: one ldmatrix of eight tokens each.
inline constexpr int kQuarterK = 32;
inline constexpr int kQuarters = kTileK / kQuarterK;

/// One lane's words of a quarter of a fragment block; whole halves of 64 k where they are read at
/// once. `words` are indexed as by LoadWords.
template <int kBits>
MARLIN_DEVICE void LoadQuarter(uint32_t block, int lane, int quarter, uint32_t (&words)[kBits]) {
  const int pair = quarter % 2;
  if constexpr (kBits <= 4) {
    if (pair == 0) LoadWords<kBits>(block, lane, words);
  } else {
    constexpr int kVectors = kBits / 8;  ///< 16 bytes each.
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = pair * kVectors + i;
      const uint4 v = LoadShared16(block + static_cast<uint32_t>(at * 512 + lane * 16));
      words[4 * at] = v.x;
      words[4 * at + 1] = v.y;
      words[4 * at + 2] = v.z;
      words[4 * at + 3] = v.w;
    }
  }
}

/// A dense tile. Weights are scaled as they are decoded, at every width, so that all widths give
/// the same bits.
template <CodeKind kKind, typename T, ParameterUse kUse>
struct StripTile {
  static constexpr int kBits = CodeBits(kKind);
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;
  using Table = DecodeTable<kKind, T>;
  /// [16 outputs][k16 step]
  using Fragments = uint32_t[2][2][4];

  uint32_t words[2][kBits];
  GroupOperands operands[2];

  MARLIN_DEVICE void LoadOperands(uint32_t tile, int lane, int group, int groups,
                                  const ParameterMode& mode) {
    const uint32_t at = tile + TileCodeBytes(kBits) + (lane >> 2) * 8 + group * kGroupBytes;
    const uint2 scales = LoadShared8(at);
    uint2 zeros = {0, 0};
    if (mode.integer_zeros || (kUse == ParameterUse::kAll && mode.extra != ZeroKind::kNone)) {
      zeros = LoadShared8(at + groups * kGroupBytes);
    }
    MakeOperands<kKind, T, kUse>(scales.x, zeros.x, mode, operands[0]);
    MakeOperands<kKind, T, kUse>(scales.y, zeros.y, mode, operands[1]);
  }

  /// Reads and decodes a quarter; of one tile in ascending order.
  MARLIN_DEVICE void Decode(uint32_t tile, int lane, int quarter, int groups,
                            const ParameterMode& mode, const Table& table, Fragments& fragments) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      LoadQuarter<kBits>(tile + (quarter / 2 * 2 + r) * BlockBytes(kBits), lane, quarter, words[r]);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int of_tile = quarter * 2 + step;
      if constexpr (kKind != CodeKind::kDense16) {
        // A tile has eight k16 steps; a step begins a group where step x groups / 8 crosses an
        // integer.
        const int place = of_tile * groups;
        if (of_tile == 0 || (!kOneGroup && (place & 7) < groups)) {
          LoadOperands(tile, lane, place >> 3, groups, mode);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        DecodeScaled<kKind, T, kUse>(words[r], of_tile % 4, table, mode, operands[r],
                                     fragments[r][step]);
      }
    }
  }

  /// Adds the products of a quarter with two n8 tiles of tokens.
  static MARLIN_DEVICE void Multiply(const Fragments& fragments, const uint32_t (&tokens)[2][4],
                                     float (&first)[2][4], float (&second)[2][4]) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        MultiplyAdd<T>(first[r], fragments[r][step], tokens[0][2 * step], tokens[0][2 * step + 1]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        MultiplyAdd<T>(second[r], fragments[r][step], tokens[1][2 * step], tokens[1][2 * step + 1]);
      }
    }
  }
};

/// A sparse tile: m16n8k32 on the kept codes, half of the MMAs and of the decoding.
template <CodeKind kKind, typename T, ParameterUse kUse>
struct SparseStripTile {
  static_assert(CodeBits(kKind) == kSparseBits && kUse != ParameterUse::kAll);
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;
  static constexpr int kMostGroups = 8;  ///< Then a step has two: pairs 0 and 1, 2 and 3.
  using Table = DecodeTable<kKind, T>;
  struct Fragments {
    uint32_t pairs[2][4];
    uint32_t metadata;
  };

  uint32_t words[2][kSparseBits];
  uint32_t metadata[kStepsOfTile];
  GroupOperands lower[2];  ///< For the first 16 k of a step.
  GroupOperands upper[2];

  static MARLIN_DEVICE void LoadOperands(uint32_t tile, int lane, int group,
                                         const ParameterMode& mode, GroupOperands (&operands)[2]) {
    const uint2 scales =
        LoadShared8(tile + kSparseTileBytes + (lane >> 2) * 8 + group * kGroupBytes);
    MakeOperands<kKind, T, kUse>(scales.x, 0, mode, operands[0]);
    MakeOperands<kKind, T, kUse>(scales.y, 0, mode, operands[1]);
  }

  MARLIN_DEVICE void Decode(uint32_t tile, int lane, int quarter, int groups,
                            const ParameterMode& mode, const Table& table, Fragments& fragments) {
    if (quarter == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        LoadWords<kSparseBits>(tile + r * BlockBytes(kSparseBits), lane, words[r]);
      }
      LoadWords<kStepsOfTile>(tile + kMetadataOffset, lane, metadata);
    }
    // As in a dense tile: of a tile's eight k16, this step has the two from 2 x step.
    const int place = 2 * quarter * groups;
    if (quarter == 0 || (!kOneGroup && (place & 7) < groups)) {
      LoadOperands(tile, lane, place >> 3, mode, lower);
    }
    const bool two_groups = !kOneGroup && groups == kMostGroups;
    if (two_groups) LoadOperands(tile, lane, (place >> 3) + 1, mode, upper);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t(&pairs)[4] = fragments.pairs[r];
      FragmentDecoder<kKind, T>::Decode(words[r], quarter, table, lower[r].offset, pairs);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t first = lower[r].scale[p & 1];
        const uint32_t scale = p >= 2 && two_groups ? upper[r].scale[p & 1] : first;
        pairs[p] = T::Multiply(pairs[p], scale);
      }
    }
    fragments.metadata = metadata[quarter];
  }

  static MARLIN_DEVICE void Multiply(const Fragments& fragments, const uint32_t (&tokens)[2][4],
                                     float (&first)[2][4], float (&second)[2][4]) {
    SparseMultiplyAdd<T, 0>(first[0], fragments.pairs[0], tokens[0], fragments.metadata);
    SparseMultiplyAdd<T, 1>(first[1], fragments.pairs[1], tokens[0], fragments.metadata);
    SparseMultiplyAdd<T, 0>(second[0], fragments.pairs[0], tokens[1], fragments.metadata);
    SparseMultiplyAdd<T, 1>(second[1], fragments.pairs[1], tokens[1], fragments.metadata);
  }
};

}  // namespace marlin::cuda
