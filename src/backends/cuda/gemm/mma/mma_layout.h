// Parameters of the MMA kernel, and the layout of its shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// The values of tile_m.
inline constexpr int kMmaWidths[] = {16, 32, 64, 128};

/// Warps of a CTA, each with an n-tile of its own: 4 or 8.
inline constexpr int kMostMmaWarps = 8;

/// Pipeline stages, at least two.
inline constexpr int kMostMmaStages = 5;

/// Bytes of a token's 128 k in a pipeline stage.
inline constexpr int kTokenBytes = kTileK * 2;

/// The pipeline in shared memory: `stages` of activations, then `stages` of weights.
struct MmaStages {
  int stages = 2;
  int warps = 4;
  int tile_bytes = 0;

  MARLIN_HOST_DEVICE int ActivationBytes(int tokens) const { return tokens * kTokenBytes; }
  MARLIN_HOST_DEVICE int WeightBytes() const { return warps * tile_bytes; }
  MARLIN_HOST_DEVICE int WeightsOffset(int tokens) const {
    return stages * ActivationBytes(tokens);
  }
  MARLIN_HOST_DEVICE int Bytes(int tokens) const {
    return stages * (ActivationBytes(tokens) + WeightBytes());
  }
};

/// Tokens whose sums are in shared memory at a time, in the pipeline's place when it has ended:
/// [tokens][outputs of the CTA and padding against bank conflicts] floats.
inline constexpr int kMmaExchangeTokens = 16;
MARLIN_HOST_DEVICE constexpr int MmaExchangeStride(int warps) { return warps * kStripOutputs + 4; }
MARLIN_HOST_DEVICE constexpr int MmaExchangeBytes(int warps) {
  return kMmaExchangeTokens * MmaExchangeStride(warps) * 4;
}

struct MmaArguments {
  int stages = 2;
  int tiles = 0;       ///< Weight tiles, or k-iterations, along k.
  int tiles_base = 0;  ///< Tiles per split, one more in the first tiles_rest.
  int tiles_rest = 0;
  int splits = 1;  ///< Split-K: CTAs of an output tile, blockIdx.y.
  int token_tiles = 0;
  int blocks = 0;      ///< Blocks of outputs, one n-tile for each warp of a CTA.
  int neighbours = 8;  ///< Rasterization group: token tiles that share weights in turn.
  /// GLU: n-tiles of the gates. The first half of a CTA's warps has gates, the second their ups.
  int half_strips = 0;
  int m = 0;
  int k = 0;
  TileView weights;
  const void* a = nullptr;  ///< The kernel's 16-bit type, rows at multiples of 16 bytes.
  int64_t a_stride = 0;
  float* partials = nullptr;  ///< [splits, m, n]; null: the kernel applies the epilogue.
  /// splits > 1 without partials: a counter for every output tile, all ones between launches, and
  /// the sums of its CTAs, PartFloats each.
  uint32_t* tile_counters = nullptr;
  float* parts = nullptr;
  EpilogueView epilogue;
};

/// Floats of one CTA's sums.
MARLIN_HOST_DEVICE constexpr int PartFloats(int tokens, int warps) {
  return tokens * warps * kStripOutputs;
}

/// An output tile, and the CTA's part of its k.
struct MmaItem {
  int token_tile;
  int block;
  int first_tile;
  int tiles;
};

MARLIN_HOST_DEVICE MmaItem MmaItemAt(const MmaArguments& args, int i, int split) {
  MmaItem item;
  const int64_t per_group = static_cast<int64_t>(args.neighbours) * args.blocks;
  const int group = static_cast<int>(i / per_group);
  const int inside = static_cast<int>(i - group * per_group);
  const int left = args.token_tiles - group * args.neighbours;
  const int size = left < args.neighbours ? left : args.neighbours;
  item.block = inside / size;
  item.token_tile = group * args.neighbours + inside - item.block * size;
  const bool longer = split < args.tiles_rest;
  item.first_tile = split * args.tiles_base + (longer ? split : args.tiles_rest);
  item.tiles = args.tiles_base + (longer ? 1 : 0);
  return item;
}

/// The n-tile of warp `warp` of a block of outputs, which may lie after the last one.
MARLIN_HOST_DEVICE int MmaStripOf(int half_strips, int warps, int block, int warp) {
  if (half_strips == 0) return block * warps + warp;
  const int gates = warps / 2;
  return warp < gates ? block * gates + warp : half_strips + block * gates + warp - gates;
}

/// The MMA kernels (plan/instances.def); their parameter is an MmaArguments.
struct MmaKernels {
  struct Variant {
    bool bf16;   ///< MMA operands are bf16, not fp16.
    int tokens;  ///< tile_m: one of kMmaWidths.
    ParameterUse use;
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

}  // namespace marlin::cuda
