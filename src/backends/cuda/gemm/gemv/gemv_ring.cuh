// The weight tiles of a warp of the GEMV kernel: which they are, their copies, and the warp's ring.
//
//   9.0 and later   one lane's TMA bulk copy for each tile; a stage's mbarrier counts its bytes
//   before          cp.async of 16 bytes by all lanes, and a group of copies for each stage: a warp
//                   waits for its own groups, in order
#pragma once

#include <type_traits>

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/gemm/gemv/gemv_layout.h"

namespace marlin::cuda {

/// The tiles that a warp copies, in the order of its MMAs. A unit is `kStrips` adjacent n-tiles,
/// whose tiles of the same k are contiguous; `kCodeBytes`: a tile's bytes without parameters.
template <int kStrips, int kCodeBytes>
struct TileStream {
  const TileView& view;
  const uint8_t* next;
  int64_t to_next_tile;  ///< Bytes to this warp's next tile of the unit.
  int unit;
  int first_tile;
  int lanes;  ///< Distance from one of this warp's units to the next.
  int tiles_of_unit;
  int left_in_unit;  ///< 0: no tile of any unit is left.
  int last_unit;
  int lane;

  /// Called by all lanes; with TMA, the one with `copies` issues the copy.
  MARLIN_DEVICE void Copy(uint32_t slot, uint32_t barrier, bool copies) {
    const int bytes = kStrips * view.tile_bytes;
    if constexpr (!kHasTma) {
      CopyByLanes<kStrips * kCodeBytes>(slot, next, bytes, lane);
    } else if (copies) {
      ArriveExpecting(barrier, bytes);
      CopyBulk(slot, next, bytes, barrier);
    }
    next += to_next_tile;
    if (--left_in_unit == 0 && unit < last_unit) {
      left_in_unit = tiles_of_unit;
      unit += lanes;
      next = view.tiles + TileOffset(view, unit * kStrips, first_tile);
    }
  }

  /// Copies the next tile, if there is one, to a stage whose tile all lanes have read.
  template <typename Ring>
  MARLIN_DEVICE void Refill(const Ring& slot) {
    if (left_in_unit > 0) Copy(slot.address, slot.barrier, ElectOne());
    if constexpr (!kHasTma) CommitCopies();  // Empty groups as well: waits count groups.
  }
};

/// The units and tiles of a warp, and the layout of shared memory.
template <int kStrips>
struct GemvBlock {
  int lane;
  int warp;
  int unit_lane;  ///< Which of the concurrent units.
  int sharer;     ///< Which of the unit's warps.
  int first_unit;
  int units;
  int first_tile;
  int my_units;
  int my_tiles;  ///< Per unit.
  int slot_bytes;
  uint32_t ring;
  uint32_t barriers;  ///< The ring's mbarriers.
  uint32_t activations;
  uint32_t arrived;  ///< mbarriers of the pieces of activations.

  MARLIN_DEVICE GemvBlock(const GemvArguments& args, uint32_t base) {
    // Volatile, so that it stays in a register: from threadIdx it is recomputed for every tile.
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    warp = static_cast<int>(threadIdx.x) >> 5;
    unit_lane = warp >> args.share_log2;
    sharer = warp & (args.share - 1);
    const int group = static_cast<int>(blockIdx.y);
    first_unit = group * args.units_base + min(group, args.units_rest);
    units = args.units_base + (group < args.units_rest ? 1 : 0);
    first_tile = static_cast<int>(blockIdx.x) * args.tiles_of_split;
    const int tiles = min(args.tiles_of_split, args.tiles - first_tile);
    const int lanes = 1 << args.lanes_log2;
    my_units = units > unit_lane ? (units - unit_lane + lanes - 1) >> args.lanes_log2 : 0;
    my_tiles = tiles > sharer ? (tiles - sharer + args.share - 1) >> args.share_log2 : 0;
    slot_bytes = kStrips * args.weights.tile_bytes;
    ring = base + warp * args.stages * slot_bytes;
    activations = base + args.activations_offset;
    arrived = base + args.barriers_offset;
    barriers = arrived + (kMaxPieces + warp * args.stages) * 8;
  }

  template <int kCodeBytes>
  MARLIN_DEVICE TileStream<kStrips, kCodeBytes> Stream(const GemvArguments& args) const {
    const TileView& view = args.weights;
    TileStream<kStrips, kCodeBytes> stream{view};
    stream.unit = first_unit + unit_lane;
    stream.first_tile = first_tile + sharer;
    stream.lanes = 1 << args.lanes_log2;
    stream.to_next_tile = (static_cast<int64_t>(view.tile_bytes) * kStripsOfBlock)
                          << args.share_log2;
    stream.next = view.tiles + TileOffset(view, stream.unit * kStrips, stream.first_tile);
    stream.tiles_of_unit = my_tiles;
    stream.left_in_unit = my_units > 0 ? my_tiles : 0;
    stream.last_unit = stream.unit + ((my_units - 1) << args.lanes_log2);
    stream.lane = lane;
    return stream;
  }
};

/// A stage of a ring before its first tile, without TMA.
struct RingStage {
  uint32_t address;
  static constexpr uint32_t barrier = 0;  ///< It has none.
};

/// A position in a warp's ring of one or two stages, with TMA. Its fields are pinned to registers:
/// the compiler would recompute them for every tile.
struct BulkRing {
  uint32_t address;
  uint32_t barrier;
  uint32_t tiles = 0;  ///< Tiles consumed.
  uint32_t addresses;  ///< The sum of both stages' addresses: leads from either to the other.
  uint32_t barriers;
  int slots_log2;

  template <int kStrips>
  MARLIN_DEVICE BulkRing(const GemvBlock<kStrips>& block, int stages)
      : address(block.ring),
        barrier(block.barriers),
        addresses(2 * block.ring + (stages - 1) * block.slot_bytes),
        barriers(2 * block.barriers + (stages - 1) * 8),
        slots_log2(stages - 1) {
    asm volatile("" : "+r"(addresses), "+r"(barriers), "+r"(slots_log2));
  }

  /// Waits until the tile has arrived.
  MARLIN_DEVICE void Await() const { Wait(barrier, static_cast<int>(tiles >> slots_log2 & 1)); }

  MARLIN_DEVICE void Advance() {
    address = addresses - address;
    barrier = barriers - barrier;
    ++tiles;
  }

  /// Pins the fields that change.
  MARLIN_DEVICE void Pin() { asm volatile("" : "+r"(address), "+r"(barrier), "+r"(tiles)); }
};

/// The same without TMA: one to kMaxStages stages, each a group of this thread's copies.
struct GroupRing : RingStage {
  uint32_t end;
  int slot_bytes;
  int stages;

  template <int kStrips>
  MARLIN_DEVICE GroupRing(const GemvBlock<kStrips>& block, int ring_stages)
      : RingStage{block.ring},
        end(block.ring + ring_stages * block.slot_bytes),
        slot_bytes(block.slot_bytes),
        stages(ring_stages) {}

  /// Every stage but this one has a later group.
  MARLIN_DEVICE void Await() const {
    if (stages == kMaxStages) {
      WaitForCopies<kMaxStages - 1>();
    } else if (stages == 3) {
      WaitForCopies<2>();
    } else if (stages == 2) {
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncwarp();  // The other lanes' copies.
  }

  MARLIN_DEVICE void Advance() {
    address += slot_bytes;
    if (address == end) address -= stages * slot_bytes;
  }

  MARLIN_DEVICE void Pin() { asm volatile("" : "+r"(address)); }
};
static_assert(kMaxStages == 4, "GroupRing::Await");

using RingCursor = std::conditional_t<kHasTma, BulkRing, GroupRing>;

}  // namespace marlin::cuda
