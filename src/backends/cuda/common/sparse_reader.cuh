// Single weights of sparse tiles (layout/sparse_layout.h) in fp32: for dequantizing and lookups.
#pragma once

#include "backends/cuda/common/weight_reader.cuh"
#include "backends/cuda/layout/sparse_layout.h"

namespace marlin::cuda {

struct SparseTileReader {
  TileView view;
  CodeKind kind;

  MARLIN_DEVICE float Weight(int k, int n) const {
    const uint8_t* const tile = view.tiles + TileOffset(view, n / kStripOutputs, k / kTileK);
    const int g = n % 8;
    const int mma = n % kStripOutputs / 16;
    const int lower = n % 16 / 8;  ///< Whether the output is one of the MMA's rows 8 to 15.
    const int step = k % kTileK / kSparseStepK;
    const int block = k % kSparseStepK / 4;
    const int group = k % kTileK / 16 * view.groups_per_tile / 8;
    const auto* const parameters = reinterpret_cast<const uint16_t*>(
        tile + kSparseTileBytes + group * kGroupBytes + g * 8 + n % kStripOutputs / 8 * 2);

    const auto* const metadata = reinterpret_cast<const uint32_t*>(tile + kMetadataOffset);
    const uint32_t word = metadata[(4 * g + 2 * mma + block / 4) * kStepsOfTile + step];
    const uint32_t nibble = word >> (16 * lower + 4 * (block % 4)) & 15u;
    const auto position = static_cast<uint32_t>(k % 4);
    float value = 0.0f;
    if (position == (nibble & 3u) || position == nibble >> 2) {
      const auto* const words =
          reinterpret_cast<const uint32_t*>(tile + mma * BlockBytes(kSparseBits));
      uint32_t of_lane[kSparseBits];
      for (int i = 0; i < kSparseBits; ++i) {
        of_lane[i] = words[WordOffset(kSparseBits, 4 * g + block % 4, i)];
      }
      const int pair = lower + 2 * (block / 4);
      const int which = position == nibble >> 2 ? 1 : 0;
      value = view.values[CodeOf(kind, of_lane, 8 * step + 2 * pair + which)];
    }
    return WeightOf(view, value, ParametersOf(view, parameters[0], 0));
  }
};

}  // namespace marlin::cuda
