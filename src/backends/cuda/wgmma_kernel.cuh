// Products of more than a few rows on Hopper's warpgroup matrix instructions.
//
//   C^T = W^T A^T: the 64-row operand is the weights, decoded in registers and never written back;
//   the tokens are the other operand, k-major in shared memory, put there by tensor copies.
//
//                      kTokens tokens (shared memory, both warpgroups read the same)
//                    +----------------------------+
//     outputs  0..63 | consumer warpgroup 0       |   each thread: kTokens / 2 sums
//                    +----------------------------+
//     outputs 64.127 | consumer warpgroup 1       |   + two producer threads that issue every copy
//                    +----------------------------+
//
//   Steps of 128 k, activations and four tiles of weights, of which several are in flight. Within a
//   step the codes of one half of 64 k are decoded while the matrix instructions of the other half
//   run. A slot is what comes and is given back as one: a step, or half of one (SlotsOfStep).
//   Thread blocks are persistent and take items (token tile, block of outputs) in an order that
//   keeps neighbouring token tiles on the same weights. Where items are few, the blocks of a
//   cluster divide k among them, send each other their sums through shared memory and finish a part
//   of the item each; sums are added in the order of the blocks. Where clusters are too few, parts
//   of k go to the workspace, and another kernel adds them. What whole waves of items leave may be
//   streamed: all blocks take as many of its steps, and parts of an item meet in memory. Gated
//   products: a block holds 64 gates and the 64 ups that belong to them, warps 0 and 1 of a
//   warpgroup the gates, warps 2 and 3 the ups.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/decode_fragment.cuh"
#include "backends/cuda/epilogue.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/tile_loads.cuh"
#include "backends/cuda/warp_matrix.cuh"
#include "backends/cuda/wgmma_instructions.cuh"
#include "backends/cuda/wgmma_layout.h"

namespace marlin::cuda {

constexpr int kConsumerWarps = 8;
static_assert(kWgmmaThreads == 32 * kConsumerWarps + 128);

MARLIN_DEVICE void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MARLIN_DEVICE void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
MARLIN_DEVICE void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving sums in flight: for it, an asynchronous product is done at once.
template <int kCount>
MARLIN_DEVICE void PinSums(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

/// Describes k-major rows of 64 16-bit numbers in the 128-byte swizzle; `low` is address / 16 with
/// the leading offset (unused by this swizzle) in the upper half.
MARLIN_DEVICE uint64_t Descriptor(uint32_t low) {
  // Atoms of 8 rows are 1024 bytes apart; bit 62 is the 128-byte swizzle.
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(64u | (1u << 30)));
  return descriptor;
}

/// The strip of the weights that is strip `i` of a block.
MARLIN_DEVICE int StripOf(const WgmmaArguments& args, int block, int i) {
  if (args.half_strips == 0) return block * kStripsOfBlock + i;
  return block * 2 + i / 2 + (i % 2 == 0 ? 0 : args.half_strips);
}

/// A place in a ring of slots.
struct SlotCursor {
  int slot = 0;
  int parity = 0;
  MARLIN_DEVICE void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

/// Addresses in shared memory.
struct WgmmaShared {
  uint32_t activations;
  uint32_t weights;
  uint32_t full;  ///< Barriers of the slots of activations, which weights have come to as well.
  uint32_t empty;
  uint32_t inbox;    ///< In a cluster: where the other blocks' sums come to.
  uint32_t arrived;  ///< A barrier: they have come.
};

/// One lane arrives for its warp, for arrivals cost time. The racecheck tool of compute-sanitizer
/// does not see that the other lanes' reads come before: builds for it let every lane arrive.
#ifdef MARLIN_CUDA_RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

/// For a consumer warp after the products that use a slot. They are instructions that wait for all
/// lanes of the warp, and take what every lane has read from the slot: no barrier of the warp is
/// needed, which costs up to 9 % with few tokens.
MARLIN_DEVICE void LeaveSlot(uint32_t empty, int lane) {
  if (lane < kArrivalsOfWarp) Arrive(empty);
}

/// Divides shared memory, makes the barriers of the slots ready and lets the next kernel begin.
/// For all threads of the block.
MARLIN_DEVICE WgmmaShared BeginSlots(const WgmmaArguments& args, const uint8_t* memory) {
  WgmmaShared shared;
  shared.activations = SharedAddress(memory);
  shared.weights = shared.activations + args.weights_offset;
  shared.full = shared.activations + args.barriers_offset;
  shared.empty = shared.full + args.slots * 8;
  shared.inbox = shared.activations + args.inbox_offset;
  shared.arrived = shared.empty + args.slots * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < args.slots; ++s) {
      InitBarrier(shared.full + 8 * s, 1);
      InitBarrier(shared.empty + 8 * s, kConsumerWarps * kArrivalsOfWarp);
    }
    if (args.in_cluster) InitBarrier(shared.arrived, 1);
    FenceBarrierInit();
  }
  __syncthreads();
  // What is sent to another block of the cluster must find it running, its barrier ready.
  if (args.in_cluster) ArriveInCluster();
  LetNextBegin();
  return shared;
}

/// The items of a thread block, one after the other: its parts of streamed ones first, so that
/// nobody waits long for a part, then whole ones. Computed anew for each, not from the one before:
/// so the compiler knows that all lanes go the same way, without which products take more time.
struct ItemSequence {
  const WgmmaArguments& args;
  int first_step = 0;
  int end_step = 0;
  int first_streamed = 0;
  int parts = 0;  ///< Of streamed items.

  MARLIN_DEVICE explicit ItemSequence(const WgmmaArguments& arguments) : args(arguments) {
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

/// Where the weights of an item begin, and the copies that bring one step of them: all four strips
/// of a block at once, or two strips of gates and their two strips of ups.
struct WeightSource {
  const uint8_t* from[2];
  int copies;
  int bytes;        ///< Of one copy.
  int64_t to_next;  ///< From one step to the next.

  MARLIN_DEVICE WeightSource(const WgmmaArguments& args, const WgmmaItem& item) {
    const TileView& view = args.weights;
    copies = args.half_strips == 0 ? 1 : 2;
    bytes = kStripsOfBlock / copies * view.tile_bytes;
    to_next = static_cast<int64_t>(kStripsOfBlock) * view.tile_bytes;
    const int strip = copies == 1 ? item.block * kStripsOfBlock : item.block * 2;
    from[0] = view.tiles + TileOffset(view, strip, item.first_tile);
    from[1] = view.tiles + TileOffset(view, strip + args.half_strips, item.first_tile);
  }

  MARLIN_DEVICE void Copy(uint32_t to, uint32_t barrier) {
    CopyBulk(to, from[0], bytes, barrier);
    from[0] += to_next;
    if (copies == 2) {
      CopyBulk(to + bytes, from[1], bytes, barrier);
      from[1] += to_next;
    }
  }
};

/// One thread copies the weights. Those of the first steps go ahead of earlier work on the stream.
/// What it waits for is that the slots of the step's activations are free: those of its weights are
/// then, because slots are given back in order and `weight_slots` steps hold all slots.
template <int kSlotsOfStep>
MARLIN_DEVICE void ProduceWeights(const WgmmaArguments& args, const WgmmaShared& shared,
                                  int slot_bytes) {
  const int weight_bytes = kStripsOfBlock * args.weights.tile_bytes;
  const ItemSequence items(args);
  SlotCursor cursor;
  SlotCursor weights;
  for (int i = 0; items.Has(i); ++i) {
    const WgmmaItem item = items.At(i);
    WeightSource source(args, item);
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      const uint32_t full = shared.full + 8 * cursor.slot;
#pragma unroll
      for (int slot = 0; slot < kSlotsOfStep; ++slot) {
        Wait(shared.empty + 8 * cursor.slot, cursor.parity ^ 1);
        ArriveExpecting(shared.full + 8 * cursor.slot, slot_bytes + (slot == 0 ? weight_bytes : 0));
        cursor.Advance(args.slots);
      }
      source.Copy(shared.weights + weights.slot * weight_bytes, full);
      weights.Advance(args.weight_slots);
    }
  }
}

/// One thread of another warp copies the activations, when earlier work is done.
template <int kTokens, int kSlotsOfStep>
MARLIN_DEVICE void ProduceActivations(const WgmmaArguments& args, const CUtensorMap* map,
                                      const WgmmaShared& shared) {
  constexpr int kHalfBytes = StepActivationBytes(kTokens) / 2;
  constexpr int kHalvesOfSlot = 2 / kSlotsOfStep;
  const ItemSequence items(args);
  SlotCursor cursor;
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
  WaitForEarlierWork();
  for (int i = 0; items.Has(i); ++i) {
    const WgmmaItem item = items.At(i);
    const int m = item.token_tile * kTokens;
    int k = item.first_tile * kTileK;
#pragma unroll 1
    for (int slot = 0; slot < item.tiles * kSlotsOfStep; ++slot) {
      const uint32_t full = shared.full + 8 * cursor.slot;
      uint32_t to = shared.activations + cursor.slot * (kHalvesOfSlot * kHalfBytes);
      Wait(shared.empty + 8 * cursor.slot, cursor.parity ^ 1);
#pragma unroll
      for (int half = 0; half < kHalvesOfSlot; ++half) {
        CopyBox(to, map, k, m, full);
        to += kHalfBytes;
        k += kTileK / 2;
      }
      cursor.Advance(args.slots);
    }
  }
}

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

/// A tile's 16 outputs of this warp: codes, and the operands of the group that is being decoded.
template <CodeKind kKind, typename T, ParameterUse kUse>
struct WarpTile {
  static constexpr int kBits = CodeBits(kKind);
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;
  uint32_t words[2][kBits];
  GroupOperands operands;
  uint32_t tile;

  MARLIN_DEVICE void LoadOperands(const ConsumerPlace& place, int group, int groups,
                                  const ParameterMode& mode) {
    const uint32_t at =
        tile + TileCodeBytes(kBits) + (place.lane >> 2) * 8 + place.rows * 4 + group * kGroupBytes;
    uint32_t zeros = 0;
    if (mode.integer_zeros || (kUse == ParameterUse::kAll && mode.extra != 0))
      zeros = LoadShared4(at + groups * kGroupBytes);
    MakeOperands<kKind, T, kUse>(LoadShared4(at), zeros, mode, operands);
  }

  MARLIN_DEVICE void Load(uint32_t from, const ConsumerPlace& place, int groups,
                          const ParameterMode& mode) {
    tile = from;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      LoadWords<kBits>(tile + (half * 2 + place.rows) * BlockBytes(kBits), place.lane, words[half]);
    }
    if constexpr (kKind != CodeKind::kDense16) LoadOperands(place, 0, groups, mode);
  }

  /// The four fragments of a half; half 0 first.
  MARLIN_DEVICE void Decode(int half, const ConsumerPlace& place, int groups,
                            const ParameterMode& mode, const DecodeTable<kKind, T>& table,
                            uint32_t (&fragments)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Eight steps to a tile: this one begins a group where its multiple of `groups` / 8 does.
      const int at = (half * 4 + j) * groups;
      if (!kOneGroup && kKind != CodeKind::kDense16 && at > 0 && (at & 7) < groups) {
        LoadOperands(place, at >> 3, groups, mode);
      }
      DecodeScaled<kKind, T, kUse>(words[half], j, table, mode, operands, fragments[j]);
    }
  }
};

/// A consumer warp's place in the rings. What it is made of stays in registers: fetched from the
/// parameters in every step it costs 3 %.
template <int kTokens, int kSlotsOfStep>
struct ConsumerCursor {
  uint32_t full;  ///< The barrier of the slot.
  uint32_t tile;  ///< The warp's tile.
  uint32_t activations;
  int parity = 0;
  uint32_t first_full;
  uint32_t last_full;
  uint32_t first_tile;
  uint32_t last_tile;
  uint32_t first_activations;
  int weight_bytes;  ///< Of a step.
  int to_empty;      ///< From the barrier of a slot to the one that gives it back.

  MARLIN_DEVICE ConsumerCursor(const WgmmaArguments& args, const WgmmaShared& shared,
                               const ConsumerPlace& place)
      : full(shared.full),
        tile(shared.weights + place.tile * args.weights.tile_bytes),
        activations(shared.activations),
        first_full(full),
        last_full(full + (args.slots - 1) * 8),
        first_tile(tile),
        last_tile(tile + (args.weight_slots - 1) * kStripsOfBlock * args.weights.tile_bytes),
        first_activations(activations),
        weight_bytes(kStripsOfBlock * args.weights.tile_bytes),
        to_empty(args.slots * 8) {
    asm volatile(""
                 : "+r"(first_full), "+r"(last_full), "+r"(first_tile), "+r"(first_activations),
                   "+r"(weight_bytes), "+r"(to_empty));
    if (kSlotsOfStep > 1) asm volatile("" : "+r"(last_tile));
  }

  MARLIN_DEVICE uint32_t Empty() const { return full + to_empty; }

  /// The low half of the descriptor of the slot's activations, in a uniform register, which the
  /// instruction wants.
  MARLIN_DEVICE uint32_t UniformActivations() const {
    return __reduce_or_sync(~0u, (activations & 0x3ffffu) >> 4 | 1u << 16);
  }

  MARLIN_DEVICE void NextSlot() {
    const bool anew = full == last_full;
    full = anew ? first_full : full + 8;
    activations = anew ? first_activations : activations + kSlotBytes;
    parity ^= anew ? 1 : 0;
    if (kSlotsOfStep == 1) tile = anew ? first_tile : tile + weight_bytes;
  }
  /// From the last slot of a step to the first of the next one.
  MARLIN_DEVICE void NextStep() {
    NextSlot();
    if (kSlotsOfStep > 1) tile = tile == last_tile ? first_tile : tile + weight_bytes;
  }

 private:
  static constexpr int kSlotBytes = StepActivationBytes(kTokens) / kSlotsOfStep;
};

/// The sums of one item.
template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse>
struct WgmmaConsumer {
  const WgmmaArguments& args;
  ConsumerPlace place;
  DecodeTable<kKind, T> table;
  ParameterMode mode;

  static constexpr int kSlots = SlotsOfStep(CodeBits(kKind), kTokens);
  using Cursor = ConsumerCursor<kTokens, kSlots>;

  /// `activations`: the low half of the descriptor, as UniformActivations gives it.
  MARLIN_DEVICE void Multiply(const uint32_t (&fragments)[4][4], uint32_t activations,
                              bool accumulate, float (&acc)[kTokens / 2]) const {
    FenceProducts();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      WarpgroupProduct<T, kTokens>::Run(acc, fragments[j], Descriptor(activations + 2 * j),
                                        accumulate || j > 0 ? 1 : 0);
    }
    CommitProducts();
  }

  MARLIN_DEVICE void Run(int tiles, Cursor& cursor, float (&acc)[kTokens / 2]) const {
    constexpr int kHalfBytes = StepActivationBytes(kTokens) / 2;
    const int groups = args.weights.groups_per_tile;
    uint32_t fragments[2][4][4];
    WarpTile<kKind, T, kUse> weights;
    uint32_t empty_before = 0;
    PinSums(acc);
    uint32_t activations = cursor.UniformActivations();
    Wait(cursor.full, cursor.parity);
    weights.Load(cursor.tile, place, groups, mode);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      weights.Decode(0, place, groups, mode, table, fragments[0]);
      Multiply(fragments[0], activations, tile > 0, acc);
      WaitForProducts<1>();
      if (tile > 0) LeaveSlot(empty_before, place.lane);
      const uint32_t empty_first = cursor.Empty();
      activations += kHalfBytes >> 4;
      if constexpr (kSlots == 2) {
        cursor.NextSlot();
        activations = cursor.UniformActivations();
      }
      weights.Decode(1, place, groups, mode, table, fragments[1]);
      if constexpr (kSlots == 2) Wait(cursor.full, cursor.parity);
      Multiply(fragments[1], activations, true, acc);
      empty_before = cursor.Empty();
      cursor.NextStep();
      activations = cursor.UniformActivations();
      if (tile + 1 < tiles) {
        // What the next step needs arrives while the products run.
        Wait(cursor.full, cursor.parity);
        weights.Load(cursor.tile, place, groups, mode);
      }
      WaitForProducts<1>();
      if constexpr (kSlots == 2) LeaveSlot(empty_first, place.lane);
    }
    WaitForProducts<0>();
    PinSums(acc);
    LeaveSlot(empty_before, place.lane);
  }
};

/// The parts of an item that the blocks of a cluster finish: every block owns a run of units, whose
/// sums are two groups of a thread's, acc[4 i] to acc[4 i + 3] each.
template <int kTokens>
struct ClusterPart {
  static constexpr int kUnits = UnitsOfItem(kTokens) / 2;  ///< Of a warpgroup.
  static constexpr int kSlotBytes = kUnitBytes / 2;        ///< One group of a warpgroup's threads.
  int rank;
  int splits;
  int sender_bytes;

  MARLIN_DEVICE ClusterPart(int my_rank, int blocks)
      : rank(my_rank), splits(blocks), sender_bytes(SenderBytes(kTokens, blocks)) {}

  MARLIN_DEVICE int OwnerOf(int unit) const { return unit * splits / (2 * kUnits); }
  /// The first unit of a block: the least u with OwnerOf(u) >= block.
  MARLIN_DEVICE int FirstOf(int block) const { return (block * 2 * kUnits + splits - 1) / splits; }
  /// Bytes that the other blocks send to this one.
  MARLIN_DEVICE int BytesToCome() const {
    return (splits - 1) * (FirstOf(rank + 1) - FirstOf(rank)) * kUnitBytes;
  }
  /// Where the sums of block `from` begin in the inbox of block `to`.
  MARLIN_DEVICE int SenderOffset(int from, int to) const {
    return (from < to ? from : from - 1) * sender_bytes;
  }
};

/// sums[first] to sums[first + 3] plus four floats in shared memory.
template <int kCount>
MARLIN_DEVICE void AddSent(uint32_t address, float (&sums)[kCount], int first) {
  const uint4 v = LoadShared16(address);
  sums[first] += __uint_as_float(v.x);
  sums[first + 1] += __uint_as_float(v.y);
  sums[first + 2] += __uint_as_float(v.z);
  sums[first + 3] += __uint_as_float(v.w);
}

/// Sends sums to the blocks that finish them and adds what comes, in the order of the blocks, all
/// of which must run. Afterwards only the sums of units that this block owns are whole.
template <int kTokens>
MARLIN_DEVICE void ReduceInCluster(const ClusterPart<kTokens>& part, int warpgroup,
                                   const WgmmaShared& shared, float (&acc)[kTokens / 2]) {
  constexpr int kSlotBytes = ClusterPart<kTokens>::kSlotBytes;
  constexpr int kUnits = ClusterPart<kTokens>::kUnits;
  const uint32_t mine = shared.inbox + (threadIdx.x & 127) * 16;
  int owner = part.OwnerOf(warpgroup * kUnits);
  int place = warpgroup * kUnits - part.FirstOf(owner);  // Of the unit among its owner's.
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
        SendFloats(remote + i % 2 * kSlotBytes,
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
      // Of two the order does not matter, and no step waits for another.
      AddSent(base + i * kSlotBytes, acc, 4 * i);
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
        AddSent(from, sum, 0);
        from += part.sender_bytes;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[4 * i + e] = sum[e];
  }
}

/// What comes after the sums of an item. `acc[4 i + e]` is output g + 8 (e >> 1) of the warp's 16
/// and token 8 i + 2 t + (e & 1), for lane 4 g + t. Partial sums, fp32 outputs and plain 16-bit
/// outputs (a multiplier and a bias) are stored by each warp for itself, the last turned in its
/// part of the exchange. For all others the 64 outputs of a warpgroup go through shared memory for
/// kExchangeTokens tokens at a time, where gates meet their ups; in rolled loops, because unrolled
/// this code would be larger than the instruction cache.
template <int kTokens>
struct WgmmaEpilogue {
  const WgmmaArguments& args;
  ConsumerPlace place;
  int warpgroup;
  float* exchange;  ///< Of the warpgroup: [kExchangeTokens][kExchangeStride]
  int first_group;  ///< Groups of 8 tokens that are stored.
  int last_group;

  MARLIN_DEVICE void Run(const WgmmaItem& item, const float (&acc)[kTokens / 2]) const {
    const EpilogueView& view = args.epilogue;
    const bool partial = args.partials != nullptr;
    const bool plain = view.activation == 0 && view.row_weight == nullptr && args.half_strips == 0;
    // One place each: what is unrolled is large.
    if (partial || (plain && view.type == Element::kF32)) {
      const int split = args.in_cluster ? 0 : ItemSequence::Split();
      float* const partials = args.partials + static_cast<int64_t>(split) * args.m * view.n;
      StoreFloats(item, acc, partial ? partials : static_cast<float*>(view.out),
                  partial ? view.n : view.stride, partial ? 1.0f : view.multiplier,
                  partial ? nullptr : view.bias);
    } else if (plain && args.eights && view.type == Element::kBf16) {
      StoreEights<Bf16x2>(item, acc);
    } else if (plain && args.eights) {
      StoreEights<F16x2>(item, acc);
    } else {
      RunThroughShared(item, acc);
    }
  }

 private:
  MARLIN_DEVICE int FirstColumn(const WgmmaItem& item) const {
    return StripOf(args, item.block, place.strip) * kStripOutputs + place.rows * 16;
  }

  /// The biases of rows g and g + 8.
  MARLIN_DEVICE float2 LoadBias(const void* bias, int n) const {
    float2 values = {0.0f, 0.0f};
    if (bias == nullptr) return values;
    if (n < args.epilogue.n) values.x = LoadFloat(bias, args.epilogue.bias_type, n);
    if (n + 8 < args.epilogue.n) values.y = LoadFloat(bias, args.epilogue.bias_type, n + 8);
    return values;
  }

  /// Eight lanes store eight neighbouring floats: whole sectors.
  MARLIN_DEVICE void StoreFloats(const WgmmaItem& item, const float (&acc)[kTokens / 2], float* to,
                                 int64_t stride, float multiplier, const void* bias) const {
    const int n = FirstColumn(item) + (place.lane >> 2);
    const int m = item.token_tile * kTokens + (place.lane & 3) * 2;
    const float2 biases = LoadBias(bias, n);
    const bool inside[2] = {n < args.epilogue.n, n + 8 < args.epilogue.n};
    to += m * stride + n;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      if (i < first_group || i >= last_group) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = acc[4 * i + e] * multiplier + (e < 2 ? biases.x : biases.y);
        if (m + i * 8 + (e & 1) < args.m && inside[e >> 1]) {
          __stcg(to + (i * 8 + (e & 1)) * stride + 8 * (e >> 1), value);
        }
      }
    }
  }

  /// In the warp's part of the exchange, two buffers of 16 tokens x 16 outputs of 16 bits: where 8
  /// outputs of a token lie, such that neither rows of matrices nor whole tokens meet in a bank.
  static MARLIN_DEVICE uint32_t EightAt(int token, int eight) {
    return static_cast<uint32_t>(token * 32 + (eight ^ (token >> 2 & 1)) * 16);
  }

  /// Eight neighbouring 16-bit outputs a lane, brought together by way of shared memory.
  /// Precondition: they are one aligned store.
  template <typename Out>
  MARLIN_DEVICE void StoreEights(const WgmmaItem& item, const float (&acc)[kTokens / 2]) const {
    constexpr uint32_t kBufferBytes = 16 * 16 * 2;
    const EpilogueView& view = args.epilogue;
    const int lane = place.lane;
    const int first_n = FirstColumn(item);
    const float2 bias = LoadBias(view.bias, first_n + (lane >> 2));
    const uint32_t buffers =
        SharedAddress(exchange) + ((place.strip & 1) * 2 + place.rows) * 2 * kBufferBytes;
    const uint32_t put = buffers + EightAt((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
    const uint32_t get = buffers + EightAt(lane >> 1, lane & 1);
    const int n = first_n + (lane & 1) * 8;
    const int m = item.token_tile * kTokens + (lane >> 1);
    const int rows = n < view.n ? args.m - m : 0;  // From here on, that exist.
    uint16_t* to = static_cast<uint16_t*>(view.out) + m * view.stride + n;
    const int64_t step = view.stride * 16;
#pragma unroll
    for (int c = 0; c < kTokens / 16; ++c, to += step) {
      if (2 * c < first_group || 2 * c >= last_group) continue;
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = acc + 8 * c + 2 * i;
        const float to_add = i % 2 == 0 ? bias.x : bias.y;
        packed[i] =
            Out::Pack(pair[0] * view.multiplier + to_add, pair[1] * view.multiplier + to_add);
      }
      const uint32_t buffer = c % 2 * kBufferBytes;
      StoreTurned(put + buffer, packed);
      __syncwarp();
      const uint4 eight = LoadShared16(get + buffer);
      if (c * 16 < rows) *reinterpret_cast<uint4*>(to) = eight;
    }
    __syncwarp();
  }

  MARLIN_DEVICE void RunThroughShared(const WgmmaItem& item,
                                      const float (&acc)[kTokens / 2]) const {
#pragma unroll 1
    for (int chunk = first_group / 2; chunk < last_group / 2; ++chunk) {
      const int first_m = item.token_tile * kTokens + chunk * kExchangeTokens;
      if (first_m >= args.m) break;
      Put(acc, chunk);
      asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
      if (args.half_strips != 0) {
        StoreGated(item, first_m);
      } else {
        StorePairs(item, first_m);
      }
      asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
    }
  }

  MARLIN_DEVICE int Thread() const { return static_cast<int>(threadIdx.x) & 127; }

  /// The sums of a chunk; the loop over constants is what indexes registers.
  MARLIN_DEVICE void Put(const float (&acc)[kTokens / 2], int chunk) const {
    float* to = exchange + (place.lane & 3) * 2 * kExchangeStride + (place.strip & 1) * 32 +
                place.rows * 16 + (place.lane >> 2);
#pragma unroll
    for (int c = 0; c < kTokens / kExchangeTokens; ++c) {
      if (c != chunk) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        to[((e >> 2) * 8 + (e & 1)) * kExchangeStride + ((e >> 1) & 1) * 8] = acc[8 * c + e];
      }
    }
  }

  /// Two outputs of a token at a time.
  MARLIN_DEVICE void StorePairs(const WgmmaItem& item, int first_m) const {
    const EpilogueView& view = args.epilogue;
    const int pair = Thread() % 32;
    const int n = item.block * kBlockOutputs + warpgroup * 64 + pair * 2;
    if (n >= view.n) return;
    const bool both = n + 1 < view.n;
    float bias[2] = {0.0f, 0.0f};
    if (view.bias != nullptr) {
      bias[0] = LoadFloat(view.bias, view.bias_type, n);
      if (both) bias[1] = LoadFloat(view.bias, view.bias_type, n + 1);
    }
#pragma unroll 1
    for (int token = Thread() / 32; token < kExchangeTokens; token += 4) {
      const int m = first_m + token;
      if (m >= args.m) break;
      float2 sum = *reinterpret_cast<const float2*>(exchange + token * kExchangeStride + pair * 2);
      sum.x = sum.x * view.multiplier;
      sum.y = sum.y * view.multiplier;
      if (view.bias != nullptr) {
        sum.x += bias[0];
        sum.y += bias[1];
      }
      if (view.activation != 0) {
        sum.x = Activate(view.activation, sum.x);
        sum.y = Activate(view.activation, sum.y);
      }
      if (view.row_weight != nullptr) {
        sum.x *= view.row_weight[m];
        sum.y *= view.row_weight[m];
      }
      StorePair(view, m * view.stride + n, sum, both);
    }
  }

  /// Two neighbouring outputs, in one store where they lie as one.
  static MARLIN_DEVICE void StorePair(const EpilogueView& view, int64_t at, float2 value,
                                      bool both) {
    const bool small = view.type != Element::kF32;
    auto* to = static_cast<uint8_t*>(view.out) + at * (small ? 2 : 4);
    if (both && small && (reinterpret_cast<uintptr_t>(to) & 3) == 0) {
      *reinterpret_cast<uint32_t*>(to) = view.type == Element::kBf16
                                             ? Bf16x2::Pack(value.x, value.y)
                                             : F16x2::Pack(value.x, value.y);
      return;
    }
    StoreFloat(view.out, view.type, at, value.x);
    if (both) StoreFloat(view.out, view.type, at + 1, value.y);
  }

  MARLIN_DEVICE void StoreGated(const WgmmaItem& item, int first_m) const {
    const int column = Thread() % 32;
    const int n = (item.block * 2 + warpgroup) * kStripOutputs + column;
    if (n >= args.epilogue.n / 2) return;
#pragma unroll 1
    for (int token = Thread() / 32; token < kExchangeTokens; token += 4) {
      const int m = first_m + token;
      if (m >= args.m) break;
      const float* row = exchange + token * kExchangeStride + column;
      FinishGated(args.epilogue, m, n, row[0], row[32]);
    }
  }
};

/// Where the parts of a streamed item meet: what one warpgroup of each block has of it. Whoever
/// takes the last ticket adds all parts, the others store theirs and wait for nobody. That is the
/// first part's block, which takes its ticket when it is done, long after the others took theirs
/// and stored, unless one of them begins later still. So nobody waits but for blocks at work.
template <int kTokens>
struct StreamMeeting {
  static constexpr int kFloats = kTokens * 64;  ///< Of a part.
  /// In a ticket: parts stored above, tickets taken below, less one of all.
  static constexpr int kStoredShift = 16;
  static constexpr uint32_t kTaken = (1u << kStoredShift) - 1;
  const WgmmaArguments& args;
  int warpgroup;
  uint32_t* word;  ///< In shared memory, of the warpgroup.
  int streamed;
  int first_block;
  uint32_t others;  ///< Parts that other blocks have.
  uint32_t* tickets;

  MARLIN_DEVICE StreamMeeting(const WgmmaArguments& arguments, const WgmmaItem& item,
                              int my_warpgroup, float* exchange)
      : args(arguments),
        warpgroup(my_warpgroup),
        word(reinterpret_cast<uint32_t*>(exchange)),
        streamed(item.streamed) {
    const int first_step = streamed * args.tiles;
    first_block = DivideStep(first_step, args.run_inverse);
    others = DivideStep(first_step + args.tiles - 1, args.run_inverse) - first_block;
    tickets = args.tickets + streamed * kTicketsOfItem + warpgroup;
  }

  MARLIN_DEVICE int Thread() const { return static_cast<int>(threadIdx.x) & 127; }
  MARLIN_DEVICE int Mine() const { return static_cast<int>(blockIdx.y) - first_block; }
  MARLIN_DEVICE void WaitForWarpgroup() const {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
  }

  /// A block begins one item at most in its middle, and only the first part of an item does not.
  MARLIN_DEVICE float* PartAt(int part) const {
    const int place = part == 0 ? static_cast<int>(gridDim.y) + streamed : first_block + part;
    return args.parts + (static_cast<int64_t>(place) * 2 + warpgroup) * kFloats + Thread() * 4;
  }

  /// Before the products of a part: the ticket, in one thread, unless it is to be taken later.
  /// Parts that were stored before it are looked for later.
  MARLIN_DEVICE uint32_t Begin() const {
    return Thread() == 0 && Mine() > 0 ? (TakeTicket(tickets) + 1) & kTaken : 0;
  }

  /// Whether `acc` is now the sum of all parts in their order; else another block adds them.
  MARLIN_DEVICE bool End(uint32_t ticket, float (&acc)[kTokens / 2]) const {
    if (Thread() == 0) *word = Mine() > 0 ? ticket : Take();
    WaitForWarpgroup();
    uint32_t taken_and_stored = *word;
    // The same for all lanes, as the compiler must know: products want addresses that are.
    const bool last = __any_sync(~0u, (taken_and_stored & kTaken) == others);
    if (!last) {
      Store(acc);
      WaitForWarpgroup();
      if (Thread() == 0) Publish();
      return false;
    }
    while (__any_sync(~0u, taken_and_stored >> kStoredShift != others)) taken_and_stored = Look();
    WaitForWarpgroup();
    if (Thread() == 0) *tickets = ~0u;
    Add(acc);
    return true;
  }

 private:
  /// What came before this one.
  MARLIN_DEVICE uint32_t Take() const {
    uint32_t before;
    asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(tickets)
                 : "memory");
    return before + 1;
  }
  /// Behind what all threads of the warpgroup stored before they met.
  MARLIN_DEVICE void Publish() const {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(tickets), "r"(1 << kStoredShift)
                 : "memory");
  }
  MARLIN_DEVICE uint32_t Look() const {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(tickets) : "memory");
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

  /// Of two parts the order does not matter; of more, what comes before this block's part is added
  /// up in its place, and this block's is kept in memory for as long.
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
      const float4 come = __ldcg(reinterpret_cast<const float4*>(from + i * 512));
      acc[4 * i] = add ? acc[4 * i] + come.x : come.x;
      acc[4 * i + 1] = add ? acc[4 * i + 1] + come.y : come.y;
      acc[4 * i + 2] = add ? acc[4 * i + 2] + come.z : come.z;
      acc[4 * i + 3] = add ? acc[4 * i + 3] + come.w : come.w;
    }
  }
};

template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse>
MARLIN_DEVICE void Consume(const WgmmaArguments& args, const WgmmaShared& shared, float* exchange) {
  const int warp = WarpOfBlock() - 4;
  const int warpgroup = warp / 4;
  const ConsumerPlace place = PlaceOf(args, warp);
  WaitForEarlierWork();
  using Consumer = WgmmaConsumer<kKind, T, kTokens, kUse>;
  const Consumer consumer{args, place, DecodeTable<kKind, T>(args.weights),
                          ParameterModeOf<kKind, T>(args.weights)};
  WgmmaEpilogue<kTokens> epilogue{
      args, place,      warpgroup, exchange + warpgroup * kExchangeTokens * kExchangeStride,
      0,    kTokens / 8};
  typename Consumer::Cursor cursor(args, shared, place);
  const int splits = args.splits;
  const ItemSequence items(args);
  for (int i = 0; items.Has(i); ++i) {
    const WgmmaItem item = items.At(i);
    float acc[kTokens / 2];
    const bool divided = item.streamed >= 0 && item.tiles < args.tiles;
    const StreamMeeting<kTokens> meeting(args, item, warpgroup, epilogue.exchange);
    const uint32_t ticket = divided ? meeting.Begin() : 0;
    consumer.Run(item.tiles, cursor, acc);
    if (divided && !meeting.End(ticket, acc)) continue;
    if constexpr (kTokens <= kMaxClusterTokens) {
      if (args.in_cluster) {
        constexpr int kUnits = kTokens / 16;
        const ClusterPart<kTokens> part(items.Split(), splits);
        if (threadIdx.x == 128) ArriveExpecting(shared.arrived, part.BytesToCome());
        WaitForCluster();
        ReduceInCluster<kTokens>(part, warpgroup, shared, acc);
        const int first = max(part.FirstOf(part.rank) - warpgroup * kUnits, 0);
        const int last = min(part.FirstOf(part.rank + 1) - warpgroup * kUnits, kUnits);
        epilogue.first_group = first * 2;
        epilogue.last_group = last * 2;
        if (first >= last) continue;
      }
    }
    epilogue.Run(item, acc);
  }
}

template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    WgmmaKernel(const __grid_constant__ CUtensorMap map,
                const __grid_constant__ WgmmaArguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const WgmmaShared shared = BeginSlots(args, memory);
  if (threadIdx.x < 128) {
    constexpr int kSlots = SlotsOfStep(CodeBits(kKind), kTokens);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      ProduceWeights<kSlots>(args, shared, StepActivationBytes(kTokens) / kSlots);
    if (threadIdx.x == 32) ProduceActivations<kTokens, kSlots>(args, &map, shared);
    if (kTokens <= kMaxClusterTokens && args.in_cluster) {
      __syncwarp();
      WaitForCluster();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consume<kKind, T, kTokens, kUse>(args, shared,
                                     reinterpret_cast<float*>(memory + args.exchange_offset));
  }
}

}  // namespace marlin::cuda
