// The GEMMs of a layer's experts with tiled weights: one launch for all experts of one kind of
// codes, with a tile scheduler over the slots that the sort has counted.
//
//   item: an n-tile of 32 outputs of one side, for up to 8 or 16 of its expert's rows
//
//     expert 0            expert 3                    experts without rows have no items; a CTA
//     [rows 0..7: n-tiles][rows 0..7: n-tiles][8..15] takes a run of adjacent items, so that its
//     '------ CTA 0 -----'------ CTA 1 ----- ...      rows change once or twice
//
//   C^T = W^T A^T with m16n8k16, as the GEMV kernel (gemv_kernel.cuh), whose tile product this is:
//   warps / share units at a time, `share` warps split the k of a unit. The rows of a run of items
//   are gathered to shared memory by all threads, rounded to 16 bits; the down projection computes
//   the gated activation there. Every warp streams its weight tiles through a ring of its own,
//   which it fills ahead across changes of rows.
//
//   Few selections are not sorted before: every CTA does that for itself (experts_own_sort.cuh).
//
//   A row's sums depend on k and the row alone, not on the other rows or their number.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/instances.cuh"
#include "backends/cuda/gemm/gemv/sparse_product.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"
#include "backends/cuda/moe/experts/experts_own_sort.cuh"
#include "backends/cuda/moe/experts/experts_rows.cuh"
#include "backends/cuda/moe/experts/experts_schedule.cuh"

namespace marlin::cuda {

/// Warps of a CTA: all of them on Hopper, which is known to the compiler there.
MARLIN_DEVICE int WarpCount(const ExpertGemvArguments& args) {
  return kHasWgmma ? kExpertWarps : args.warps;
}

/// A run of items of one expert and one tile of its rows. Its strips are the n-tiles of all sides,
/// one side after another.
struct ExpertRun {
  const TileExpert* sides = nullptr;
  int first_slot = 0;
  int rows = 0;
  int first_strip = 0;
  int end_strip = 0;
  int end_item = 0;
};

/// One of the sides of a run, and its strips among the run's.
struct ExpertSide {
  const TileExpert* matrix = nullptr;
  int first_strip = 0;
  int end_strip = 0;
};

/// The tile scheduler: items of all active experts, counted from their slots.
class ExpertSchedule {
 public:
  /// `memory`: ScheduleBytes of shared memory.
  MARLIN_DEVICE ExpertSchedule(const ExpertGemvArguments& args, const ActiveExperts& active,
                               int* memory)
      : args_(args), active_(active), first_(memory) {}

  /// Called by all threads; __syncthreads() has to follow.
  MARLIN_DEVICE void Count() {
    CountItems(
        32 * WarpCount(args_), active_.count, [&](int i) { return ItemsOf(i); }, first_);
  }

  /// This CTA's items: [First(block), First(block + 1)).
  MARLIN_DEVICE int First(int block) const {
    return static_cast<int>(static_cast<int64_t>(first_[active_.count]) * block /
                            static_cast<int>(gridDim.x));
  }

  /// The run that begins with `item`, up to item `end` at most.
  MARLIN_DEVICE ExpertRun RunAt(int item, int end) const {
    int low = 0;
    int high = active_.count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_[middle] <= item ? low : high) = middle;
    }
    ExpertRun run;
    run.sides = SidesOf(low);
    const int strips = StripsOfAll(run.sides);
    const int local = item - first_[low];
    const int tile = local / strips;
    const int last_slot = active_.begin[low + 1];
    run.first_slot = active_.begin[low] + tile * args_.tile_rows;
    run.rows = min(last_slot - run.first_slot, args_.tile_rows);
    run.first_strip = local - tile * strips;
    run.end_item = min(first_[low] + (tile + 1) * strips, end);
    run.end_strip = run.first_strip + run.end_item - item;
    return run;
  }

  /// The side that has a strip of the run.
  MARLIN_DEVICE ExpertSide SideAt(const ExpertRun& run, int strip) const {
    ExpertSide side = {run.sides, 0, StripsOf(run.sides[0])};
    while (strip >= side.end_strip) {
      ++side.matrix;
      side.first_strip = side.end_strip;
      side.end_strip += StripsOf(*side.matrix);
    }
    return side;
  }

 private:
  static MARLIN_DEVICE int StripsOf(const TileExpert& matrix) {
    return matrix.tiles == nullptr ? 0 : (matrix.n + kStripOutputs - 1) / kStripOutputs;
  }
  MARLIN_DEVICE int StripsOfAll(const TileExpert* sides) const {
    int strips = 0;
    for (int side = 0; side < args_.sides; ++side) strips += StripsOf(sides[side]);
    return strips;
  }

  MARLIN_DEVICE const TileExpert* SidesOf(int active) const {
    return args_.table + active_.ExpertAt(active) * args_.sides;
  }

  MARLIN_DEVICE int ItemsOf(int active) const {
    const int rows = active_.begin[active + 1] - active_.begin[active];
    return (rows + args_.tile_rows - 1) / args_.tile_rows * StripsOfAll(SidesOf(active));
  }

  const ExpertGemvArguments& args_;
  const ActiveExperts& active_;
  int* first_;
};

/// The weight tiles of a warp in the order of its MMAs, across runs, copied as the GEMV kernel's
/// (gemv_ring.cuh). `kCodeBytes`: a tile's bytes without parameters.
template <int kCodeBytes>
struct ExpertStream {
  const ExpertGemvArguments& args;
  const ExpertSchedule& schedule;
  int unit_lane;
  int sharer;
  int end;  ///< The CTA's last item + 1.
  ExpertRun run;
  ExpertSide side;
  int strip = 0;
  int left_in_strip = 0;           ///< Tiles; 0: no tile of any strip is left.
  const uint8_t* tiles = nullptr;  ///< The side's, read from its table once.
  const uint8_t* next = nullptr;

  /// Goes to the first tile from `item` on.
  MARLIN_DEVICE void Begin(int item) {
    left_in_strip = 0;
    if (sharer >= args.weights.tiles_of_strip) return;
    while (item < end) {
      run = schedule.RunAt(item, end);
      side.end_strip = 0;
      strip = run.first_strip + unit_lane;
      if (strip < run.end_strip) return BeginStrip();
      item = run.end_item;
    }
  }

  /// Copies the next tile, if there is one, to a stage whose tile all lanes have read. Called by
  /// all lanes; with TMA the one with `copies` issues the copy.
  MARLIN_DEVICE void Refill(uint32_t slot, uint32_t barrier, bool copies) {
    if (left_in_strip > 0) Copy(slot, barrier, copies);
    if constexpr (!kHasTma) CommitCopies();  // Empty groups as well: waits count groups.
  }

 private:
  MARLIN_DEVICE void Copy(uint32_t slot, uint32_t barrier, bool copies) {
    if constexpr (!kHasTma) {
      CopyByLanes<kCodeBytes>(slot, next, args.weights.tile_bytes);
    } else if (copies) {
      ArriveExpecting(barrier, args.weights.tile_bytes);
      CopyBulk(slot, next, args.weights.tile_bytes, barrier);
    }
    next += (args.weights.tile_bytes * kStripsOfBlock) << args.share_log2;
    if (--left_in_strip > 0) return;
    strip += WarpCount(args) >> args.share_log2;
    if (strip < run.end_strip) {
      BeginStrip();
    } else {
      Begin(run.end_item);
    }
  }

  MARLIN_DEVICE void BeginStrip() {
    if (strip >= side.end_strip) {
      side = schedule.SideAt(run, strip);
      tiles = side.matrix->tiles;
    }
    next = tiles + TileOffset(args.weights, strip - side.first_strip, sharer);
    left_in_strip = ((args.weights.tiles_of_strip - sharer - 1) >> args.share_log2) + 1;
  }
};

/// Waits until the tile of a warp's current stage has arrived: every other stage has a later group.
MARLIN_DEVICE void AwaitTile(int stages, uint32_t barrier, int parity) {
  if constexpr (kHasTma) {
    Wait(barrier, parity);
  } else {
    if (stages == 1) {
      WaitForCopies<0>();
    } else {
      WaitForCopies<1>();
    }
    __syncwarp();  // The other lanes' copies.
  }
}

/// Loads the rows of a run to shared memory. Called by all threads.
template <typename T>
MARLIN_DEVICE void LoadRunRows(const ExpertGemvArguments& args, const int* token,
                               const ExpertRun& run, uint8_t* shared) {
  const int chunks = args.weights.tiles_of_strip * (kTileK / 8);
  for (int i = static_cast<int>(threadIdx.x); i < run.rows * chunks; i += 32 * WarpCount(args)) {
    const int row = i / chunks;
    const int chunk = i - row * chunks;
    *reinterpret_cast<uint4*>(shared + args.rows_offset + row * args.row_bytes + chunk * 16) =
        LoadEightOfRow<T>(args.rows, token, run.first_slot + row, args.weights.k, chunk * 8);
  }
}

/// A barrier across the warps of a unit.
MARLIN_DEVICE void SyncUnit(const ExpertGemvArguments& args, int unit_lane) {
  __syncwarp();
  if (args.share_log2 > 0) {
    asm volatile("bar.sync %0, %1;" ::"r"(unit_lane + 1), "r"(32 << args.share_log2) : "memory");
  }
}

/// Adds the sums of a unit's warps, in their order, and stores the rows' results. The warps write
/// to two buffers in turn, so that one barrier is enough: a warp that writes to a buffer again has
/// passed the next barrier, which the readers passed after their last read.
template <int kOctets>
class UnitFinish {
 public:
  MARLIN_DEVICE UnitFinish(const ExpertGemvArguments& args, float* sums, int unit_lane, int sharer,
                           int lane)
      : args_(args),
        share_(1 << args.share_log2),
        first_(sums + 2 * unit_lane * share_ * kSumFloats),
        unit_lane_(unit_lane),
        sharer_(sharer),
        lane_(lane) {}

  MARLIN_DEVICE void Run(const ExpertRun& run, const ExpertSide& side, int strip,
                         const float (&acc)[2][kOctets][4], float factor) {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (o * kOctet >= run.rows) break;
      float* const buffer = first_ + (turn_ & 1) * share_ * kSumFloats;
      float* const mine = buffer + sharer_ * kSumFloats;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = (lane_ & 3) * 2 + (e & 1);
          mine[row * kSumStride + r * 16 + (lane_ >> 2) + 8 * (e >> 1)] = acc[r][o][e] * factor;
        }
      }
      SyncUnit(args_, unit_lane_);
      Store(run, side, strip, o, buffer);
      ++turn_;
    }
  }

 private:
  /// The row at which a warp starts rotates, which spreads few rows over the warps.
  MARLIN_DEVICE void Store(const ExpertRun& run, const ExpertSide& side, int strip, int octet,
                           const float* buffer) const {
    const TileExpert& matrix = *side.matrix;
    const int rows = min(run.rows - octet * kOctet, kOctet);
    const int n = (strip - side.first_strip) * kStripOutputs + lane_;
    if (n >= matrix.n) return;
    for (int row = (sharer_ + turn_) & (share_ - 1); row < rows; row += share_) {
      const float* from = buffer + row * kSumStride + lane_;
      float sum = from[0];
      for (int s = 1; s < share_; ++s) sum += from[s * kSumFloats];
      sum *= matrix.multiplier;
      if (matrix.bias != nullptr) sum += matrix.bias[n];
      const int64_t slot = run.first_slot + octet * kOctet + row;
      args_.out[slot * args_.out_stride + matrix.column + n] = sum;
    }
  }

  const ExpertGemvArguments& args_;
  int share_;
  float* first_;
  int unit_lane_;
  int sharer_;
  int lane_;
  int turn_ = 0;
};

/// `Product`: as in GemvKernel.
template <CodeKind kKind, typename T, ParameterUse kUse, int kOctets,
          template <CodeKind, typename, ParameterUse, int, int> typename Product = TileProduct>
__global__ void __launch_bounds__(kExpertThreads, 1)
    ExpertGemvKernel(const __grid_constant__ ExpertGemvArguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = SharedAddress(shared);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int unit_lane = warp >> args.share_log2;
  const int sharer = warp & ((1 << args.share_log2) - 1);
  const int lanes = WarpCount(args) >> args.share_log2;
  const int slot_bytes = args.weights.tile_bytes;
  const uint32_t ring = base + warp * args.stages * slot_bytes;
  const uint32_t barriers = base + args.barriers_offset + warp * args.stages * 8;
  if (kHasTma && lane == 0) {
    for (int s = 0; s < args.stages; ++s) InitBarrier(barriers + 8 * s, 1);
    FenceBarrierInit();
  }
  if constexpr (kKind == CodeKind::kTable4) {
    SharedPairTable<T>::Fill(base + args.table_offset, args.weights);
  }
  // The slots are there before earlier work ends, unless that is the sort. Triggering comes after
  // waiting in all kernels, so that at this kernel's start all but the last one have ended.
  if (!args.sorted_early) WaitForEarlierWork();
  ActiveExperts active = {args.slots.experts + 1, nullptr, args.slots.begin, args.slots.token};
  if (args.own_sort.ids != nullptr) {
    auto* const memory = reinterpret_cast<int*>(shared + args.own_sort_offset);
    active = OwnSort(args.own_sort, args.slots, memory).Run();
  }
  ExpertSchedule schedule(args, active, reinterpret_cast<int*>(shared + args.schedule_offset));
  schedule.Count();
  __syncthreads();
  const int block = static_cast<int>(blockIdx.x);
  const int end = schedule.First(block + 1);
  int item = schedule.First(block);
  using TileOfProduct = Product<kKind, T, kUse, 1, kOctets>;
  ExpertStream<TileOfProduct::kCodeBytes> stream{args, schedule, unit_lane, sharer, end, {}};
  stream.Begin(item);
#pragma unroll 1
  for (int s = 0; s < args.stages && (!kHasTma || stream.left_in_strip > 0); ++s) {
    stream.Refill(ring + s * slot_bytes, barriers + 8 * s, lane == 0);
  }
  if (args.sorted_early) WaitForEarlierWork();
  TriggerDependentLaunch();

  const auto table = [&] {
    if constexpr (kKind == CodeKind::kTable4) {
      return SharedPairTable<T>(base + args.table_offset);
    } else {
      return DecodeTable<kKind, T>(args.weights);
    }
  }();
  const ParameterMode mode = ParameterModeOf<kKind, T>(args.weights);
  const TileLane tile_lane(lane);
  UnitFinish<kOctets> finish(args, reinterpret_cast<float*>(shared + args.sums_offset), unit_lane,
                             sharer, lane);
  int slot = 0;
  int parity = 0;
#pragma unroll 1
  while (item < end) {
    const ExpertRun run = schedule.RunAt(item, end);
    LoadRunRows<T>(args, active.token, run, shared);
    __syncthreads();
    uint32_t my_rows[kOctets];
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      // Rows beyond the run repeat its last one.
      my_rows[o] = base + args.rows_offset + (lane >> 3) * 16 + sharer * (kTileK * 2) +
                   min(o * kOctet + (lane & 7), run.rows - 1) * args.row_bytes;
    }
    ExpertSide side;
#pragma unroll 1
    for (int strip = run.first_strip + unit_lane; strip < run.end_strip; strip += lanes) {
      if (strip >= side.end_strip) side = schedule.SideAt(run, strip);
      float acc[2][kOctets][4] = {};
      uint32_t rows[kOctets];
#pragma unroll
      for (int o = 0; o < kOctets; ++o) rows[o] = my_rows[o];
#pragma unroll 1
      for (int tile = sharer; tile < args.weights.tiles_of_strip; tile += 1 << args.share_log2) {
        const uint32_t address = ring + slot * slot_bytes;
        const uint32_t barrier = barriers + slot * 8;
        AwaitTile(args.stages, barrier, parity);
        const auto release = [&] {
          __syncwarp();
          stream.Refill(address, barrier, lane == 0);
        };
        TileOfProduct::Run(address, args.weights, rows, tile_lane, mode, table, acc, release);
        if (++slot == args.stages) {
          slot = 0;
          parity ^= 1;
        }
#pragma unroll
        for (int o = 0; o < kOctets; ++o) rows[o] += (kTileK * 2) << args.share_log2;
      }
      finish.Run(run, side, strip, acc, TileOfProduct::Group::kUnit);
    }
    item = run.end_item;
    // Before the rows are overwritten.
    __syncthreads();
  }
}

template <typename Tiles, typename T, ParameterUse kUse, int kOctets>
const void* ExpertGemvFunction() {
  if constexpr (Tiles::kSparse) {
    return reinterpret_cast<const void*>(
        &ExpertGemvKernel<Tiles::kCodes, T, kUse, kOctets, SparseTileProduct>);
  } else {
    return reinterpret_cast<const void*>(&ExpertGemvKernel<Tiles::kCodes, T, kUse, kOctets>);
  }
}

template <typename Tiles>
const void* ExpertGemvKernels::Function(const Variant& variant) {
  const auto function = [&]<typename T, ParameterUse kUse>() {
    return variant.octets == 1 ? ExpertGemvFunction<Tiles, T, kUse, 1>()
                               : ExpertGemvFunction<Tiles, T, kUse, 2>();
  };
  return WithOperands<Tiles>(variant.bf16, variant.use, function);
}

}  // namespace marlin::cuda
