// Reduction across the CTAs that split an output tile's k: split-K in a cluster through DSMEM,
// stream-K through global memory.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_block.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_layout.h"

namespace marlin::cuda {

/// The parts of an output tile that the CTAs of a cluster finish: every CTA owns a run of units,
/// each two groups of a thread's sums, acc[4 i] to acc[4 i + 3].
template <int kTokens>
struct ClusterPart {
  static constexpr int kUnits = UnitsOfItem(kTokens) / 2;  ///< Per warpgroup.
  static constexpr int kSlotBytes = kUnitBytes / 2;        ///< One group of a warpgroup's threads.
  int rank;
  int splits;
  int sender_bytes;

  MARLIN_DEVICE ClusterPart(int my_rank, int blocks)
      : rank(my_rank), splits(blocks), sender_bytes(SenderBytes(kTokens, blocks)) {}

  MARLIN_DEVICE int OwnerOf(int unit) const { return unit * splits / (2 * kUnits); }
  /// The first unit of a CTA: the least u with OwnerOf(u) >= block.
  MARLIN_DEVICE int FirstOf(int block) const { return (block * 2 * kUnits + splits - 1) / splits; }
  /// Bytes that the other CTAs store to this one.
  MARLIN_DEVICE int BytesToCome() const {
    return (splits - 1) * (FirstOf(rank + 1) - FirstOf(rank)) * kUnitBytes;
  }
  /// Offset of the sums of CTA `from` in the reduction buffer of CTA `to`.
  MARLIN_DEVICE int SenderOffset(int from, int to) const {
    return (from < to ? from : from - 1) * sender_bytes;
  }
};

/// Adds four floats in shared memory to sums[first] to sums[first + 3].
template <int kCount>
MARLIN_DEVICE void AddReceived(uint32_t address, float (&sums)[kCount], int first) {
  const uint4 v = LoadShared16(address);
  sums[first] += __uint_as_float(v.x);
  sums[first + 1] += __uint_as_float(v.y);
  sums[first + 2] += __uint_as_float(v.z);
  sums[first + 3] += __uint_as_float(v.w);
}

/// Stores sums to the CTAs that own them and adds those that arrive, in the order of the CTAs, all
/// of which must be running. Afterwards only the sums of units that this CTA owns are complete.
template <int kTokens>
MARLIN_DEVICE void ReduceInCluster(const ClusterPart<kTokens>& part, int warpgroup,
                                   const WgmmaShared& shared, float (&acc)[kTokens / 2]) {
  constexpr int kSlotBytes = ClusterPart<kTokens>::kSlotBytes;
  constexpr int kUnits = ClusterPart<kTokens>::kUnits;
  const uint32_t mine = shared.reduction_buffer + (threadIdx.x & 127) * 16;
  int owner = part.OwnerOf(warpgroup * kUnits);
  int place = warpgroup * kUnits - part.FirstOf(owner);  // The unit's index among its owner's.
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const int next = part.OwnerOf(warpgroup * kUnits + unit);
    if (next != owner) place = 0;
    owner = next;
    if (owner != part.rank) {
      const uint32_t remote =
          AddressInBlock(mine + part.SenderOffset(part.rank, owner) + place * kUnitBytes, owner);
      const uint32_t barrier = AddressInBlock(shared.arrived, owner);
#pragma unroll
      for (int i = 2 * unit; i < 2 * unit + 2; ++i) {
        StoreToCluster(remote + i % 2 * kSlotBytes,
                       {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]}, barrier);
      }
    }
    ++place;
  }
  Wait(shared.arrived, 0);
  const int first = part.FirstOf(part.rank) - warpgroup * kUnits;
  const int last = part.FirstOf(part.rank + 1) - warpgroup * kUnits;
  const uint32_t base = mine - first * kUnitBytes;
#pragma unroll
  for (int i = 0; i < kTokens / 8; ++i) {
    if (i / 2 < first || i / 2 >= last) continue;
    if (part.splits == 2) {
      // With two CTAs the order does not matter, and no addition waits for another.
      AddReceived(base + i * kSlotBytes, acc, 4 * i);
      continue;
    }
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t from = base + i * kSlotBytes;
#pragma unroll 1
    for (int split = 0; split < part.splits; ++split) {
      if (split == part.rank) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += acc[4 * i + e];
      } else {
        AddReceived(from, sum, 0);
        from += part.sender_bytes;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[4 * i + e] = sum[e];
  }
}

/// Reduction of a stream-K tile, among one warpgroup of each CTA that has a part of it. The CTA
/// with the last ticket adds all parts; the others store theirs and do not wait. That is the CTA of
/// the first part, which takes its ticket when it is done, long after the others took theirs and
/// stored, unless one of them begins later still. So a CTA waits only for CTAs that are running.
template <int kTokens>
struct StreamReduction {
  static constexpr int kFloats = kTokens * 64;  ///< Per part.
  /// A tile counter is the parts stored, from this bit on, and below it the tickets taken, minus 1.
  static constexpr int kStoredShift = 16;
  static constexpr uint32_t kTaken = (1u << kStoredShift) - 1;
  const WgmmaArguments& args;
  int warpgroup;
  uint32_t* word;  ///< The warpgroup's, in shared memory.
  int streamed;
  int first_block;
  uint32_t others;  ///< Parts that other CTAs have.
  uint32_t* counter;

  MARLIN_DEVICE StreamReduction(const WgmmaArguments& arguments, const WgmmaItem& item,
                                int my_warpgroup, float* exchange)
      : args(arguments),
        warpgroup(my_warpgroup),
        word(reinterpret_cast<uint32_t*>(exchange)),
        streamed(item.streamed) {
    const int first_step = streamed * args.tiles;
    first_block = DivideStep(first_step, args.run_inverse);
    others = DivideStep(first_step + args.tiles - 1, args.run_inverse) - first_block;
    counter = args.tile_counters + streamed * kCountersPerTile + warpgroup;
  }

  MARLIN_DEVICE int Thread() const { return static_cast<int>(threadIdx.x) & 127; }
  MARLIN_DEVICE int Mine() const { return static_cast<int>(blockIdx.y) - first_block; }
  MARLIN_DEVICE void WaitForWarpgroup() const { SyncWarpgroup(warpgroup); }

  /// Parts are indexed by CTA, because a CTA begins at most one output tile in its middle; first
  /// parts, with which a tile begins, come after them, indexed by tile.
  MARLIN_DEVICE float* PartAt(int part) const {
    const int place = part == 0 ? static_cast<int>(gridDim.y) + streamed : first_block + part;
    return args.parts + (static_cast<int64_t>(place) * 2 + warpgroup) * kFloats + Thread() * 4;
  }

  /// Called before the WGMMAs of a part: takes the ticket, in one thread, unless End takes it. The
  /// count of parts stored before it is left out; End polls for it.
  MARLIN_DEVICE uint32_t Begin() const {
    return Thread() == 0 && Mine() > 0 ? (IncrementTileCounter(counter) + 1) & kTaken : 0;
  }

  /// Whether `acc` is now the sum of all parts in their order; otherwise another CTA adds them.
  MARLIN_DEVICE bool End(uint32_t ticket, float (&acc)[kTokens / 2]) const {
    if (Thread() == 0) *word = Mine() > 0 ? ticket : Take();
    WaitForWarpgroup();
    uint32_t taken_and_stored = *word;
    // Uniform across lanes, which the compiler must know: WGMMAs require uniform addresses.
    const bool last = __any_sync(~0u, (taken_and_stored & kTaken) == others);
    if (!last) {
      Store(acc);
      WaitForWarpgroup();
      if (Thread() == 0) Publish();
      return false;
    }
    while (__any_sync(~0u, taken_and_stored >> kStoredShift != others)) taken_and_stored = Look();
    WaitForWarpgroup();
    if (Thread() == 0) *counter = ~0u;
    Add(acc);
    return true;
  }

 private:
  /// Takes a ticket and returns the tile counter before it, plus 1.
  MARLIN_DEVICE uint32_t Take() const {
    uint32_t before;
    asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before + 1;
  }
  /// Counts a stored part, after all stores of the warpgroup that precede its barrier.
  MARLIN_DEVICE void Publish() const {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(1 << kStoredShift)
                 : "memory");
  }
  MARLIN_DEVICE uint32_t Look() const {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value + 1;
  }

  MARLIN_DEVICE void Store(const float (&acc)[kTokens / 2]) const {
    float* const to = PartAt(Mine());
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      __stcg(reinterpret_cast<float4*>(to + i * 512),
             make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
  }

  /// With two parts the order does not matter. With more, the parts before this CTA's are added in
  /// `acc` first, and this CTA's is kept in global memory meanwhile.
  MARLIN_DEVICE void Add(float (&acc)[kTokens / 2]) const {
    const int mine = Mine();
    if (mine > 1) {
      Store(acc);
      Load(PartAt(0), false, acc);
    }
#pragma unroll 1
    for (int part = mine > 1 ? 1 : 0; part <= static_cast<int>(others); ++part) {
      if (mine <= 1 && part == mine) continue;
      Load(PartAt(part), true, acc);
    }
  }

  static MARLIN_DEVICE void Load(const float* from, bool add, float (&acc)[kTokens / 2]) {
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      const float4 loaded = __ldcg(reinterpret_cast<const float4*>(from + i * 512));
      acc[4 * i] = add ? acc[4 * i] + loaded.x : loaded.x;
      acc[4 * i + 1] = add ? acc[4 * i + 1] + loaded.y : loaded.y;
      acc[4 * i + 2] = add ? acc[4 * i + 2] + loaded.z : loaded.z;
      acc[4 * i + 3] = add ? acc[4 * i + 3] + loaded.w : loaded.w;
    }
  }
};

}  // namespace marlin::cuda
