// What the warpgroup kernel is given, and how it divides shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/device_views.h"
#include "backends/cuda/tile_layout.h"

namespace marlin::cuda {

struct WgmmaArguments {
  TileView weights;
  EpilogueView epilogue;
  float* partials = nullptr;  ///< [m, n], of every split if they are no cluster; null: no need.
  int m = 0;
  int token_tiles = 0;
  int neighbours = 8;  ///< Token tiles that are multiplied with the same weights one after another.
  int blocks = 0;      ///< Of 128 rows of the matrix instruction.
  int tiles = 0;       ///< Of k.
  int splits = 1;      ///< Thread blocks that divide an item's k.
  int items = 0;       ///< token_tiles * blocks
  int stages = 2;
  bool in_cluster = false;  ///< They are a cluster and exchange sums; else they have partials.
  bool quads = false;       ///< Four neighbouring 16-bit outputs may be stored as one.
  int half_strips = 0;      ///< Gated: strips of the gates; blocks hold 64 gates and their 64 ups.
  int weights_offset = 0;   ///< In shared memory, behind the activations of all stages.
  int exchange_offset = 0;
  int barriers_offset = 0;
};

/// Two consumer warpgroups and the producer's.
inline constexpr int kWgmmaThreads = 384;

/// Items of more tokens are not divided among the blocks of a cluster.
inline constexpr int kMaxClusterTokens = 128;

/// Bytes of one stage's activations.
MARLIN_HOST_DEVICE constexpr int StageActivationBytes(int tokens) { return tokens * kTileK * 2; }

/// Tokens whose sums a warpgroup puts into shared memory at a time: [tokens][64 outputs and 4 to
/// spread the banks] floats.
inline constexpr int kExchangeTokens = 16;
inline constexpr int kExchangeStride = 68;
inline constexpr int kExchangeBytes = 2 * kExchangeTokens * kExchangeStride * 4;

}  // namespace marlin::cuda
