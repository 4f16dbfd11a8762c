// What the warpgroup kernel is given, and how it divides shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// What a block needs before its first copies comes first: parameters are fetched by lines, one
/// after the other.
struct WgmmaArguments {
  int slots = 2;           ///< Of activations; SlotsOfStep hold a step's.
  int weight_slots = 2;    ///< Each for a step.
  int weights_offset = 0;  ///< In shared memory, behind all activations.
  int exchange_offset = 0;
  int reduction_offset =
      0;  ///< in_cluster: ReductionBufferBytes for the sums that the other blocks send.
  int barriers_offset = 0;
  bool in_cluster = false;     ///< The splits exchange sums; else their partials are added.
  bool vector_stores = false;  ///< Eight neighbouring 16-bit outputs may be stored as one.
  int items = 0;               ///< Of this launch; of all there are token_tiles * blocks.
  int first_item = 0;
  /// Not 0: this launch finishes what another left. token_tiles, neighbours and first_item count
  /// that one's wider tiles; items are pieces of them, 2^pieces_log2 of each.
  int pieces_log2 = 0;
  int token_tiles = 0;
  int neighbours = 8;  ///< Token tiles that are multiplied with the same weights one after another.
  int blocks = 0;      ///< Of 128 rows of the matrix instruction.
  int tiles = 0;       ///< Of k.
  int splits = 1;      ///< Thread blocks that divide an item's k: blockIdx.x.
  int tiles_base = 0;  ///< Of every split, one more of the first tiles_rest.
  int tiles_rest = 0;
  int half_strips = 0;  ///< Gated: strips of the gates; blocks hold 64 gates and their 64 ups.
  /// Items behind `items` whose steps, one after the other, are cut into runs, one for every thread
  /// block until there are no more.
  int streamed = 0;
  TileView weights;
  int m = 0;
  float* partials = nullptr;  ///< [m, n], of every split if they are no cluster; null: no need.
  int run = 1;                ///< Steps of a run.
  uint32_t run_inverse = 0;   ///< Inverse of it and of `tiles`, for DivideStep.
  uint32_t tiles_inverse = 0;
  /// kCountersPerTile of every streamed item, all ones between launches.
  uint32_t* tile_counters = nullptr;
  float* parts = nullptr;  ///< Sums of parts of streamed items.
  EpilogueView epilogue;
};

/// Where an item is, and the block's part of its k.
struct WgmmaItem {
  int token_tile;
  int block;
  int first_tile;
  int tiles;
  int streamed = -1;  ///< Which of the streamed items.
};

/// Without divisions where all tokens are one tile: the first copies wait for it.
MARLIN_HOST_DEVICE WgmmaItem ItemAt(const WgmmaArguments& args, int i, int split) {
  WgmmaItem item;
  const int whole = args.first_item + (i >> args.pieces_log2);
  item.block = whole;
  item.token_tile = 0;
  if (args.token_tiles > 1) {
    const int per_group = args.neighbours * args.blocks;
    const int group = whole / per_group;
    const int inside = whole - group * per_group;
    const int left = args.token_tiles - group * args.neighbours;
    const int size = left < args.neighbours ? left : args.neighbours;
    item.block = inside / size;
    item.token_tile = group * args.neighbours + inside - item.block * size;
  }
  item.token_tile = (item.token_tile << args.pieces_log2) + (i & ((1 << args.pieces_log2) - 1));
  const bool longer = split < args.tiles_rest;
  item.first_tile = split * args.tiles_base + (longer ? split : args.tiles_rest);
  item.tiles = args.tiles_base + (longer ? 1 : 0);
  return item;
}

/// step / count, where step x count < 2^32 and `inverse` is InverseOf(count): the first copies
/// would wait for a division.
MARLIN_HOST_DEVICE int DivideStep(int step, uint32_t inverse) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(step)} * inverse >> 32);
}
/// 2^32 / count, rounded up. Precondition: count > 1.
constexpr uint32_t InverseOf(int count) {
  return static_cast<uint32_t>(((int64_t{1} << 32) + count - 1) / count);
}
/// The first step of a thread block's run, which ends where the next block's begins.
MARLIN_HOST_DEVICE int FirstStepOf(const WgmmaArguments& args, int block) {
  const int steps = args.streamed * args.tiles;
  return block * args.run < steps ? block * args.run : steps;
}
/// Cuts a streamed item to those of its steps that are between two of all items' steps.
MARLIN_HOST_DEVICE void TakePart(const WgmmaArguments& args, int streamed, int first, int end,
                                 WgmmaItem* item) {
  const int begin = streamed * args.tiles;
  item->streamed = streamed;
  item->first_tile = first > begin ? first - begin : 0;
  const int end_tile = end - begin < args.tiles ? end - begin : args.tiles;
  item->tiles = end_tile - item->first_tile;
}

/// One of every warpgroup.
inline constexpr int kCountersPerTile = 2;

/// Tokens that a tile may have.
inline constexpr int kWgmmaWidths[] = {16, 32, 64, 96, 128, 192, 256};

/// Two consumer warpgroups and the producer's.
inline constexpr int kWgmmaThreads = 384;

/// Items of more tokens are not divided among the blocks of a cluster.
inline constexpr int kMaxClusterTokens = 128;

/// Bytes of the activations of a step of 128 k.
MARLIN_HOST_DEVICE constexpr int StepActivationBytes(int tokens) { return tokens * kTileK * 2; }

/// Into how many slots the activations of a step go: into two of 64 k where whole steps are so
/// large that two of them would fill shared memory, and copies would come too late.
MARLIN_HOST_DEVICE constexpr int SlotsOfStep(int code_bits, int tokens) {
  return code_bits >= 8 && tokens >= 192 ? 2 : 1;
}

/// How the blocks of a cluster divide the sums of an item: the unit is 16 tokens of one of its two
/// warpgroups, every block finishes a run of units.
MARLIN_HOST_DEVICE constexpr int UnitsOfItem(int tokens) { return 2 * tokens / 16; }
/// Bytes of a unit's sums.
inline constexpr int kUnitBytes = 16 * 64 * 4;
/// What one block sends to another at most.
MARLIN_HOST_DEVICE constexpr int SenderBytes(int tokens, int splits) {
  return (UnitsOfItem(tokens) + splits - 1) / splits * kUnitBytes;
}
MARLIN_HOST_DEVICE constexpr int ReductionBufferBytes(int tokens, int splits) {
  return (splits - 1) * SenderBytes(tokens, splits);
}

/// Tokens whose sums a warpgroup puts into shared memory at a time: [tokens][64 outputs and 4 to
/// spread the banks] floats.
inline constexpr int kExchangeTokens = 16;
inline constexpr int kExchangeStride = 68;
inline constexpr int kExchangeBytes = 2 * kExchangeTokens * kExchangeStride * 4;

}  // namespace marlin::cuda
