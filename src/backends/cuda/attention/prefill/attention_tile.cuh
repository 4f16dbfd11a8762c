// Tiles of query rows of a step's sequences.
#pragma once

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/attention/visible_keys.cuh"

namespace marlin::cuda {

/// A tile of query rows, and its sequence.
struct Tile {
  int sequence = -1;  ///< -1: no such tile.
  int first_row = 0;  ///< The sequence's first row of the call.
  int first = 0;      ///< The tile's first query row of the sequence.
  int rows = 0;
  int begin = 0;  ///< Position of the sequence's first token.
  int kv_head = 0;

  MARLIN_DEVICE int TokenOf(const AttentionArguments& args, int row) const {
    return (first + row) / args.group;
  }
  MARLIN_DEVICE int PositionOf(const AttentionArguments& args, int row) const {
    return begin + TokenOf(args, row);
  }
  MARLIN_DEVICE int HeadOf(const AttentionArguments& args, int row) const {
    return kv_head * args.group + (first + row) % args.group;
  }
  /// The first element of a row of queries or out.
  MARLIN_DEVICE int64_t ElementOf(const AttentionArguments& args, const RowsView& view,
                                  int row) const {
    return view.At(first_row + TokenOf(args, row), HeadOf(args, row));
  }
};

/// The tokens of a sequence, and its first row.
struct SequenceExtent {
  int row = 0;
  int tokens = 0;

  MARLIN_DEVICE SequenceExtent(const AttentionArguments& args, int sequence) {
    if (sequence >= args.sequences.count) return;
    const bool paged = args.sequences.block_tables != nullptr;
    row = paged ? FirstRow(args.sequences, sequence) : 0;
    tokens = paged ? max(FirstRow(args.sequences, sequence + 1) - row, 0) : args.sequences.rows;
  }
};

/// Finds tile `index` of a KV head; a lane looks at a sequence. Called by all threads of a CTA.
MARLIN_DEVICE Tile FindTile(const AttentionArguments& args, int tile_rows, int index, int kv_head) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  Tile tile;
  tile.kv_head = kv_head;
  int before = 0;
  for (int first = 0; first < args.sequences.count; first += 32) {
    const SequenceExtent extent(args, first + lane);
    const int rows = extent.tokens * args.group;
    const int tiles = (rows + tile_rows - 1) / tile_rows;
    int through = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    const int at = index - before - (through - tiles);
    const unsigned found = __ballot_sync(~0u, at >= 0 && at < tiles);
    before += __shfl_sync(~0u, through, 31);
    if (found == 0) continue;
    const int owner = __ffs(static_cast<int>(found)) - 1;
    tile.sequence = first + owner;
    tile.first_row = __shfl_sync(~0u, extent.row, owner);
    tile.first = __shfl_sync(~0u, at, owner) * tile_rows;
    tile.rows = min(__shfl_sync(~0u, rows, owner) - tile.first, tile_rows);
    const int tokens = __shfl_sync(~0u, extent.tokens, owner);
    tile.begin = args.sequences.block_tables != nullptr
                     ? max(args.sequences.positions[tile.first_row], 0)
                     : args.length - tokens;
    return tile;
  }
  return tile;
}

/// Finds tile blockIdx.x of KV head blockIdx.y.
MARLIN_DEVICE Tile FindTile(const AttentionArguments& args, int tile_rows) {
  return FindTile(args, tile_rows, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
}

/// Records a first position that is negative, and positions that are not consecutive.
MARLIN_DEVICE void CheckPositions(const AttentionArguments& args, const Tile& tile) {
  const int32_t* const positions = args.sequences.positions + tile.first_row;
  if (positions[0] < 0) {
    RecordError(args.errors, ValueError::kPosition, positions[0], tile.first_row);
  }
  const int end = tile.TokenOf(args, tile.rows - 1) + 1;
  for (int token = tile.TokenOf(args, 0) + static_cast<int>(threadIdx.x); token < end;
       token += static_cast<int>(blockDim.x)) {
    if (positions[token] == positions[0] + token) continue;
    RecordError(args.errors, ValueError::kNextPosition, positions[token], tile.first_row + token,
                positions[0] + token);
  }
}

/// The keys that some row of a tile sees.
struct KeyRange {
  int first;
  int end;

  MARLIN_DEVICE KeyRange(const AttentionArguments& args, const Tile& tile)
      : first(FirstKey(args, tile.PositionOf(args, 0))),
        end(tile.PositionOf(args, tile.rows - 1) + 1) {}

  static MARLIN_DEVICE int FirstKey(const AttentionArguments& args, int position) {
    return FirstVisibleKey(args, position);
  }
};

/// The keys that a row of a tile sees; rows that do not exist see the keys of the last one.
MARLIN_DEVICE KeySpan VisibleTo(const AttentionArguments& args, const Tile& tile, int row) {
  const int position = tile.PositionOf(args, min(row, tile.rows - 1));
  return {KeyRange::FirstKey(args, position), position + 1};
}

}  // namespace marlin::cuda
