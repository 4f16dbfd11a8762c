// Parameters of the WGMMA kernel, and the layout of its shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Fields read before the first async copy come first: kernel parameters are fetched one
/// constant-cache line at a time.
struct WgmmaArguments {
  int slots = 2;           ///< Pipeline stages of activations; a step has SlotsOfStep.
  int weight_slots = 2;    ///< Pipeline stages of weights; a step has one.
  int weights_offset = 0;  ///< In shared memory, after all activations.
  int exchange_offset = 0;
  int reduction_offset =
      0;  ///< in_cluster: ReductionBufferBytes for the DSMEM stores of the other CTAs.
  int barriers_offset = 0;
  bool in_cluster = false;     ///< Split-K is reduced in clusters, not by another kernel.
  bool vector_stores = false;  ///< Eight adjacent 16-bit outputs may be one vectorized store.
  int items = 0;               ///< Output tiles of this launch, out of token_tiles * blocks.
  int first_item = 0;
  /// Not 0: this launch is the tail of another. token_tiles, neighbours and first_item count that
  /// one's larger tiles; items are pieces of them, 2^pieces_log2 of each.
  int pieces_log2 = 0;
  int token_tiles = 0;
  int neighbours = 8;  ///< Rasterization group (group_m): token tiles that share weights in turn.
  int blocks = 0;      ///< Blocks of 128 MMA rows, along n.
  int tiles = 0;       ///< Weight tiles, or k-iterations, along k.
  int splits = 1;      ///< Split-K: CTAs of an output tile, blockIdx.x.
  int tiles_base = 0;  ///< Tiles per split, one more in the first tiles_rest.
  int tiles_rest = 0;
  int half_strips = 0;  ///< GLU: n-tiles of the gates; CTAs hold 64 gates and their 64 ups.
  /// Stream-K: output tiles after `items` whose k-iterations, concatenated, are divided into runs,
  /// one for every CTA until there are no more.
  int streamed = 0;
  TileView weights;
  int m = 0;
  float* partials = nullptr;  ///< [splits, m, n], in clusters [m, n]; null: not needed.
  int run = 1;                ///< k-iterations per run.
  uint32_t run_inverse = 0;   ///< InverseOf(run) and InverseOf(tiles), for DivideStep.
  uint32_t tiles_inverse = 0;
  /// kCountersPerTile for every stream-K tile, all ones between launches.
  uint32_t* tile_counters = nullptr;
  float* parts = nullptr;  ///< Partial sums of stream-K tiles.
  EpilogueView epilogue;
};

/// An output tile, and the CTA's part of its k.
struct WgmmaItem {
  int token_tile;
  int block;
  int first_tile;
  int tiles;
  int streamed = -1;  ///< Index among the stream-K tiles; -1: not one of them.
};

/// Does not divide where all tokens are in one tile, because the first copies wait for it.
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

/// step / count, where step x count < 2^32 and `inverse` is InverseOf(count), without a division,
/// for which the first copies would wait.
MARLIN_HOST_DEVICE int DivideStep(int step, uint32_t inverse) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(step)} * inverse >> 32);
}
/// 2^32 / count, rounded up. Precondition: count > 1.
constexpr uint32_t InverseOf(int count) {
  return static_cast<uint32_t>(((int64_t{1} << 32) + count - 1) / count);
}
/// The first k-iteration of a CTA's run, which ends where the next CTA's begins.
MARLIN_HOST_DEVICE int FirstStepOf(const WgmmaArguments& args, int block) {
  const int steps = args.streamed * args.tiles;
  return block * args.run < steps ? block * args.run : steps;
}
/// Restricts a stream-K tile to its k-iterations in [first, end) of the concatenated ones.
MARLIN_HOST_DEVICE void TakePart(const WgmmaArguments& args, int streamed, int first, int end,
                                 WgmmaItem* item) {
  const int begin = streamed * args.tiles;
  item->streamed = streamed;
  item->first_tile = first > begin ? first - begin : 0;
  const int end_tile = end - begin < args.tiles ? end - begin : args.tiles;
  item->tiles = end_tile - item->first_tile;
}

/// One for each consumer warpgroup.
inline constexpr int kCountersPerTile = 2;

/// The values of tile_m.
inline constexpr int kWgmmaWidths[] = {16, 32, 64, 96, 128, 192, 256};

/// Two consumer warpgroups and the producer's.
inline constexpr int kWgmmaThreads = 384;

/// Output tiles with a larger tile_m are not split among the CTAs of a cluster.
inline constexpr int kMaxClusterTokens = 128;

/// Bytes of the activations of a step of 128 k.
MARLIN_HOST_DEVICE constexpr int StepActivationBytes(int tokens) { return tokens * kTileK * 2; }

/// Pipeline stages that hold the activations of a step: two of 64 k where whole steps are so large
/// that two of them would fill shared memory, and copies would arrive too late.
MARLIN_HOST_DEVICE constexpr int SlotsOfStep(int code_bits, int tokens) {
  return code_bits >= 8 && tokens >= 192 ? 2 : 1;
}

/// The units in which the CTAs of a cluster divide the sums of an output tile: a unit is 16 tokens
/// of one of its two warpgroups, and every CTA finishes a run of units.
MARLIN_HOST_DEVICE constexpr int UnitsOfItem(int tokens) { return 2 * tokens / 16; }
/// Bytes of a unit's sums.
inline constexpr int kUnitBytes = 16 * 64 * 4;
/// The most bytes that one CTA stores to another.
MARLIN_HOST_DEVICE constexpr int SenderBytes(int tokens, int splits) {
  return (UnitsOfItem(tokens) + splits - 1) / splits * kUnitBytes;
}
MARLIN_HOST_DEVICE constexpr int ReductionBufferBytes(int tokens, int splits) {
  return (splits - 1) * SenderBytes(tokens, splits);
}

/// Tokens whose sums a warpgroup puts into shared memory at a time: [tokens][64 outputs and 4 of
/// padding against bank conflicts] floats.
inline constexpr int kExchangeTokens = 16;
inline constexpr int kExchangeStride = 68;
inline constexpr int kExchangeBytes = 2 * kExchangeTokens * kExchangeStride * 4;

/// The WGMMA kernels (plan/instances.def); their parameters are a CUtensorMap and a WgmmaArguments.
struct WgmmaKernels {
  struct Variant {
    bool bf16;   ///< MMA operands are bf16, not fp16.
    int tokens;  ///< tile_m: one of kWgmmaWidths.
    ParameterUse use;
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

}  // namespace marlin::cuda
