// A thread block of the warpgroup kernels: its shared memory, its threads, and the items it takes.
#pragma once

#include "backends/cuda/kernels/common/async_copy.cuh"
#include "backends/cuda/kernels/wgmma/wgmma_layout.h"

namespace marlin::cuda {

/// The strip of the weights that is strip `i` of a block.
MARLIN_DEVICE int StripOf(const WgmmaArguments& args, int block, int i) {
  if (args.half_strips == 0) return block * kStripsOfBlock + i;
  return block * 2 + i / 2 + (i % 2 == 0 ? 0 : args.half_strips);
}

/// Addresses in shared memory.
struct WgmmaShared {
  uint32_t activations;
  uint32_t weights;
  uint32_t full;  ///< Barriers of the slots of activations, which weights have come to as well.
  uint32_t empty;
  uint32_t reduction_buffer;  ///< In a cluster: where the other blocks' sums come to.
  uint32_t arrived;           ///< A barrier: they have come.
};

/// The items of a thread block, one after the other: its parts of streamed ones first, so that
/// nobody waits long for a part, then whole ones. Computed anew for each, not from the one before:
/// so the compiler knows that all lanes go the same way, without which products take more time.
struct TileScheduler {
  const WgmmaArguments& args;
  int first_step = 0;
  int end_step = 0;
  int first_streamed = 0;
  int parts = 0;  ///< Of streamed items.

  MARLIN_DEVICE explicit TileScheduler(const WgmmaArguments& arguments) : args(arguments) {
    if (args.streamed == 0) return;
    first_step = FirstStepOf(args, Block());
    end_step = FirstStepOf(args, Block() + 1);
    if (first_step == end_step) return;
    first_streamed = DivideStep(first_step, args.tiles_inverse);
    parts = DivideStep(end_step - 1, args.tiles_inverse) - first_streamed + 1;
  }

  static MARLIN_DEVICE int Split() { return static_cast<int>(blockIdx.x); }
  static MARLIN_DEVICE int Block() { return static_cast<int>(blockIdx.y); }

  MARLIN_DEVICE bool Has(int i) const { return i < parts || WholeItem(i) < args.items; }
  MARLIN_DEVICE WgmmaItem At(int i) const {
    const bool part = i < parts;
    WgmmaItem item = ItemAt(args, part ? args.items + first_streamed + i : WholeItem(i), Split());
    if (part) TakePart(args, first_streamed + i, first_step, end_step, &item);
    return item;
  }

 private:
  MARLIN_DEVICE int WholeItem(int i) const {
    return Block() + (i - parts) * static_cast<int>(gridDim.y);
  }
};

/// The same for all lanes, as the compiler knows from this.
MARLIN_DEVICE int WarpOfBlock() {
  return static_cast<int>(__reduce_or_sync(~0u, threadIdx.x / 32));
}

/// A consumer thread's place in its block.
struct ConsumerPlace {
  int lane;
  int strip;  ///< Of the block's four; gated: gates, ups, gates, ups.
  int tile;   ///< Where its tile lies among the step's four; gated: gates, gates, ups, ups.
  int rows;   ///< Which 16 outputs of the strip.
};

MARLIN_DEVICE ConsumerPlace PlaceOf(const WgmmaArguments& args, int warp) {
  ConsumerPlace place;
  place.lane = static_cast<int>(threadIdx.x) % 32;
  place.strip = warp / 2;
  place.tile = args.half_strips == 0 ? place.strip : place.strip % 2 * 2 + place.strip / 2;
  place.rows = warp % 2;
  return place;
}

}  // namespace marlin::cuda
