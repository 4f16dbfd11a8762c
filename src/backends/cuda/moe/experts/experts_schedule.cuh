// Counting the items of a launch of experts, on the device, from the sorted slots.
#pragma once

#include "backends/cuda/common/block_scan.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"

namespace marlin::cuda {

/// first[i] = the items of the entries before i, for i from 0 to `count`; entry i has
/// `items_of(i)`. A word for every warp follows `first`. Called by all `threads` of the CTA;
/// __syncthreads() has to follow.
template <typename ItemsOf>
MARLIN_DEVICE void CountItems(int threads, int count, const ItemsOf& items_of, int* first) {
  const int thread = static_cast<int>(threadIdx.x);
  const int per_thread = (count + threads - 1) / threads;
  const int begin = min(thread * per_thread, count);
  const int end = min(begin + per_thread, count);
  int mine = 0;
  for (int i = begin; i < end; ++i) mine += items_of(i);
  int item = SumBefore(mine, first + count + 1);
  for (int i = begin; i < end; ++i) {
    first[i] = item;
    item += items_of(i);
  }
  if (thread == threads - 1) first[count] = item;
}

/// An output tile of the large-M kernels: outputs of a matrix x rows of its expert.
struct ExpertTile {
  const TileExpert* matrix = nullptr;  ///< Gated: the gate, followed by the up.
  int block = 0;  ///< Block of outputs, or of half as many gates and their ups.
  int first_slot = 0;
  int rows = 0;
};

/// The persistent tile scheduler. Adjacent CTAs take the tiles of an expert that share weights.
/// `Arguments`: ExpertWgmmaArguments or ExpertMmaArguments.
template <typename Arguments>
class ExpertTiles {
 public:
  /// `schedule`: TileScheduleBytes of shared memory, counted.
  MARLIN_DEVICE ExpertTiles(const Arguments& args, const int* schedule)
      : args_(args), first_(schedule), item_(static_cast<int>(blockIdx.x)) {}

  /// Counts tiles. Called by all threads.
  static MARLIN_DEVICE void Count(const Arguments& args, int* schedule) {
    int* const begin = schedule + BeginAt(args);
    for (int i = static_cast<int>(threadIdx.x); i < args.slots.experts + 2; i += args.Threads()) {
      begin[i] = args.slots.begin[i];
    }
    __syncthreads();
    const auto tiles_of = [&](int entry) {
      const TileExpert& matrix = MatrixOf(args, entry);
      if (matrix.tiles == nullptr) return 0;
      const int expert = ExpertOf(args, entry);
      return RowTiles(args, begin[expert + 1] - begin[expert]) * Blocks(args, matrix.n);
    };
    CountItems(args.Threads(), Entries(args), tiles_of, schedule);
    __syncthreads();
  }

  MARLIN_DEVICE int total() const { return first_[Entries(args_)]; }
  MARLIN_DEVICE int item() const { return item_; }
  MARLIN_DEVICE void Next() { item_ += static_cast<int>(gridDim.x); }

  /// The tile of item(), which is less than total().
  MARLIN_DEVICE ExpertTile Get() {
    while (first_[entry_ + 1] <= item_) ++entry_;
    ExpertTile tile;
    tile.matrix = &MatrixOf(args_, entry_);
    const int expert = ExpertOf(args_, entry_);
    const int* const begin = first_ + BeginAt(args_) + expert;
    const int rows = begin[1] - begin[0];
    const int local = item_ - first_[entry_];
    const int row_tiles = RowTiles(args_, rows);
    tile.block = local / row_tiles;
    const int first_row = (local - tile.block * row_tiles) * args_.tile_rows;
    tile.first_slot = begin[0] + first_row;
    tile.rows = min(rows - first_row, args_.tile_rows);
    return tile;
  }

 private:
  /// An entry is a matrix, or a gate and its up.
  static MARLIN_DEVICE int Entries(const Arguments& args) {
    return (args.slots.experts + 1) * (args.gated ? 1 : args.sides);
  }
  /// Where the copy of SlotsView::begin is in the schedule.
  static MARLIN_DEVICE int BeginAt(const Arguments& args) {
    return Entries(args) + 1 + kExpertWarps;
  }
  static MARLIN_DEVICE const TileExpert& MatrixOf(const Arguments& args, int entry) {
    return args.table[args.gated ? entry * args.sides : entry];
  }
  static MARLIN_DEVICE int ExpertOf(const Arguments& args, int entry) {
    return args.gated ? entry : entry / args.sides;
  }
  static MARLIN_DEVICE int RowTiles(const Arguments& args, int rows) {
    return (rows + args.tile_rows - 1) / args.tile_rows;
  }
  static MARLIN_DEVICE int Blocks(const Arguments& args, int n) {
    const int outputs = args.gated ? args.BlockOutputs() / 2 : args.BlockOutputs();
    return (n + outputs - 1) / outputs;
  }

  const Arguments& args_;
  const int* first_;
  int item_;
  int entry_ = 0;
};

}  // namespace marlin::cuda
