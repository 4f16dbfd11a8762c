// The GEMMs of the persistent kernel: which tiles a warp multiplies, its ring of copies, which runs
// ahead of the MMAs into the next phase, and the sums of a unit.
//
//   The tiles of a CTA's units are numbered; warp w has numbers w, w + 16, w + 32 ... The ring
//   copies them in this order, phase after phase, up to the last one that is known: the experts'
//   tiles are not before the router has chosen. Copies are issued after a gather, never before
//   one: a multiprocessor's requests are served in order, and polls would wait behind them.
#pragma once

#include "backends/cuda/kernels/gemv/gemv_kernel.cuh"
#include "backends/cuda/kernels/persistent/persistent_layout.h"

namespace marlin::cuda {

/// The CTA's shared memory. Its parts are found from here again and again: the compiler knows the
/// address, and pointers would take registers that the GEMMs need.
MARLIN_DEVICE uint8_t* Memory() {
  extern __shared__ __align__(128) uint8_t memory[];
  return memory;
}

/// The tables of a CTA, in shared memory.
struct Tables {
  const PersistentArguments& args;

  /// A layer, if it is this one or the one beside it.
  MARLIN_DEVICE const PersistentLayer& LayerOf(int index) const {
    return reinterpret_cast<const PersistentLayer*>(Memory() + args.shared.layers)[index & 1];
  }
  MARLIN_DEVICE const PhaseGemm& GemmOf(int phase) const {
    return LayerOf(phase / kPhases).gemms[phase % kPhases];
  }
  MARLIN_DEVICE PersistentScratch& Scratch() const {
    return *reinterpret_cast<PersistentScratch*>(Memory() + args.shared.scratch);
  }
  /// A selected expert of the layer.
  MARLIN_DEVICE const PersistentExpert& Chosen(int selection) const {
    return reinterpret_cast<const PersistentExpert*>(Memory() +
                                                     args.shared.experts)[Scratch().ids[selection]];
  }

  MARLIN_DEVICE const Schedule& ScheduleOf(const PhaseGemm& gemm) const {
    return *reinterpret_cast<const Schedule*>(Memory() + args.shared.schedules + gemm.schedule);
  }

  /// The address of a tile of a phase.
  MARLIN_DEVICE const uint8_t* Find(int phase, const ScheduledTile& tile) const {
    const PersistentLayer& layer = LayerOf(phase / kPhases);
    const PhaseGemm& gemm = layer.gemms[phase % kPhases];
    const uint8_t* tiles = tile.side == 0 ? gemm.weights.tiles : gemm.up_tiles;
    if (layer.experts != nullptr && phase % kPhases == static_cast<int>(Phase::kGates)) {
      const PersistentExpert& expert = Chosen(tile.selection);
      tiles = tile.side == 0 ? expert.gate_tiles : expert.up_tiles;
    } else if (layer.experts != nullptr && phase % kPhases == static_cast<int>(Phase::kDown)) {
      tiles = Chosen(tile.selection).down_tiles;
    }
    return tiles + static_cast<int64_t>(tile.offset) * 16;
  }
};

/// Tile `number` of a CTA.
MARLIN_DEVICE ScheduledTile TileAt(const Schedule& schedule, int number) {
  const auto* const tiles = reinterpret_cast<const uint8_t*>(&schedule) + schedule.tiles_at;
  return reinterpret_cast<const ScheduledTile*>(tiles)[number];
}
MARLIN_DEVICE const ScheduledUnit& UnitAt(const Schedule& schedule, int number) {
  return reinterpret_cast<const ScheduledUnit*>(&schedule + 1)[number];
}

/// The ring of a warp. Tiles take the lowest free slot, and come out in the order in which they
/// went in.
class TileRing {
 public:
  MARLIN_DEVICE explicit TileRing(const PersistentArguments& args)
      : args_(args), free_((1u << args.slots) - 1) {
    if (!IsFirstLane()) return;
    for (int slot = 0; slot < args_.slots; ++slot) InitBarrier(Barrier(slot), 1);
  }

  /// Lets copies go on up to the end of a phase.
  MARLIN_DEVICE void Allow(int phase) {
    last_phase_ = phase;
    Fill();
  }

  /// The address of the warp's next tile.
  MARLIN_DEVICE uint32_t Await() const {
    Wait(Barrier(First()), static_cast<int>(parities_ >> First() & 1));
    return Slot(First());
  }
  /// The tile that Await returned has been read, by all lanes.
  MARLIN_DEVICE void Release() {
    __syncwarp();
    free_ |= 1u << First();
    parities_ ^= 1u << First();
    queue_ >>= kSlotBits;
    --in_flight_;
    Fill();
  }

 private:
  static constexpr int kSlotBits = 4;
  static_assert(kMostSlots * kSlotBits <= 32);

  static MARLIN_DEVICE bool IsFirstLane() { return (threadIdx.x & 31) == 0; }
  static MARLIN_DEVICE int Warp() { return static_cast<int>(threadIdx.x >> 5); }
  MARLIN_DEVICE int First() const { return static_cast<int>(queue_ & ((1u << kSlotBits) - 1)); }
  MARLIN_DEVICE uint32_t Barrier(int slot) const {
    return SharedAddress(Memory()) + args_.shared.barriers + (Warp() * kMostSlots + slot) * 8;
  }
  MARLIN_DEVICE uint32_t Slot(int slot) const {
    return SharedAddress(Memory()) + args_.shared.ring +
           (slot * kPersistentWarps + Warp()) * args_.slot_bytes;
  }

  MARLIN_DEVICE void Fill() {
    const Tables tables{args_};
#pragma unroll 1
    while (true) {
      while (next_ >= end_) {
        if (phase_ == last_phase_) return;
        ++phase_;
        next_ = Warp();
        end_ = tables.ScheduleOf(tables.GemmOf(phase_)).tiles;
      }
      const bool low = phase_ % kPhases <= static_cast<int>(Phase::kOut);
      uint32_t slots = free_ & (low ? (1u << kLowSlots) - 1 : ~0u);
      if (slots == 0) return;
      // Each lane copies a tile: the chain of loads that finds it is the same for one and for all.
      const int count =
          min(__popc(slots), (end_ - next_ + kPersistentWarps - 1) / kPersistentWarps);
      const int lane = static_cast<int>(threadIdx.x) & 31;
      int mine = 0;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int slot = __ffs(static_cast<int>(slots)) - 1;
        slots &= slots - 1;
        if (i == lane) mine = slot;
        free_ &= ~(1u << slot);
        queue_ |= static_cast<uint32_t>(slot) << (kSlotBits * in_flight_);
        ++in_flight_;
      }
      if (lane < count) {
        const PhaseGemm& gemm = tables.GemmOf(phase_);
        const ScheduledTile tile = TileAt(tables.ScheduleOf(gemm), next_ + lane * kPersistentWarps);
        ArriveExpecting(Barrier(mine), gemm.weights.tile_bytes);
        CopyBulk(Slot(mine), tables.Find(phase_, tile), gemm.weights.tile_bytes, Barrier(mine));
      }
      __syncwarp();
      next_ += count * kPersistentWarps;
    }
  }

  const PersistentArguments& args_;
  int phase_ = -1;
  int last_phase_ = -1;
  int next_ = 0;  ///< The tile to be copied, of the CTA's.
  int end_ = 0;
  int in_flight_ = 0;
  uint32_t free_;          ///< A bit for every slot.
  uint32_t parities_ = 0;  ///< A bit for every slot: its next phase's.
  uint32_t queue_ = 0;     ///< The slots in flight, the next one lowest.
};

/// Multiplies a warp's tiles of a phase, and stores its part of each unit's sums.
/// `activations`: those of the CTA's first k-tile in shared memory, `first_tile`.
template <CodeKind kKind, ParameterUse kUse>
MARLIN_DEVICE void MultiplyTiles(const PhaseGemm& gemm, const Schedule& schedule,
                                 uint32_t activations, int first_tile, float* sums,
                                 TileRing& ring) {
  using T = Bf16x2;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const TileLane tile_lane(lane);
  const DecodeTable<kKind, T> table(gemm.weights);
  const ParameterMode mode = ParameterModeOf<kKind, T>(gemm.weights);
  float acc[2][1][4] = {};
  int open = -1;
  const auto flush = [&] {
    if ((lane & 3) != 0) return;
    float* const mine = sums + (open * kPersistentWarps + warp) * kStripOutputs + (lane >> 2);
    constexpr float kUnit = GroupSums<kKind, T, kUse>::kUnit;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      mine[r * 16] = acc[r][0][0] * kUnit;
      mine[r * 16 + 8] = acc[r][0][2] * kUnit;
    }
  };
  const int tiles = schedule.tiles;
#pragma unroll 1
  for (int number = warp; number < tiles; number += kPersistentWarps) {
    const ScheduledTile tile = TileAt(schedule, number);
    if (tile.unit != open) {
      if (open >= 0) flush();
      open = tile.unit;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[r][0][e] = 0.0f;
      }
    }
    const uint32_t rows[1] = {activations + (lane >> 3) * 16 +
                              (tile.k_tile - first_tile) * (kTileK * 2)};
    TileProduct<kKind, T, kUse, 1, 1>::Run(ring.Await(), gemm.weights, rows, tile_lane, mode, table,
                                           acc, [&] { ring.Release(); });
  }
  if (open >= 0) flush();
}

/// The sum of a unit's output over the warps that had its tiles, in a fixed order.
/// `sums`: of the unit's output.
MARLIN_DEVICE float SumOfWarps(const ScheduledUnit& unit, const float* sums) {
  float parts[kPersistentWarps];
#pragma unroll
  for (int i = 0; i < kPersistentWarps; ++i) {
    const int warp = (unit.first_warp + i) & (kPersistentWarps - 1);
    parts[i] = i < unit.warps ? sums[warp * kStripOutputs] : 0.0f;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPersistentWarps; i += 4) {
    sum += (parts[i] + parts[i + 1]) + (parts[i + 2] + parts[i + 3]);
  }
  return sum;
}

}  // namespace marlin::cuda
