// A CTA of the WGMMA kernels: its shared memory, its threads, and its tile scheduler.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/warpgroup_products.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_layout.h"

namespace marlin::cuda {

/// The index, among the n-tiles of the weights, of n-tile `i` of a block of outputs.
MARLIN_DEVICE int StripOf(const WgmmaArguments& args, int block, int i) {
  if (args.half_strips == 0) return block * kStripsOfBlock + i;
  return block * 2 + i / 2 + (i % 2 == 0 ? 0 : args.half_strips);
}

/// Addresses in shared memory.
struct WgmmaShared {
  uint32_t activations;
  uint32_t weights;
  uint32_t full;  ///< mbarriers of the stages of activations; they count weights as well.
  uint32_t empty;
  uint32_t reduction_buffer;  ///< In a cluster: for the DSMEM stores of the other CTAs.
  uint32_t arrived;           ///< The mbarrier that counts them.
};

/// The persistent tile scheduler: a CTA's output tiles in order, its parts of stream-K tiles first,
/// so that no CTA waits long for a part, then whole tiles. Each is computed from its index, not
/// from the tile before: so the compiler knows that control flow is uniform, without which WGMMAs
/// take more time.
struct TileScheduler {
  const WgmmaArguments& args;
  int first_step = 0;
  int end_step = 0;
  int first_streamed = 0;
  int parts = 0;  ///< Parts of stream-K tiles.

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

/// A consumer thread's position in its CTA.
struct ConsumerPlace {
  int lane;
  int strip;  ///< Which of the CTA's four n-tiles; GLU: gates, ups, gates, ups.
  int tile;   ///< Position of its weight tile in the step's four; GLU: gates, gates, ups, ups.
  int rows;   ///< Which 16 outputs of the n-tile.
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
