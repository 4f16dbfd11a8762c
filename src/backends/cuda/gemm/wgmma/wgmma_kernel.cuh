// Large-M and prefill GEMMs with Hopper's warpgroup MMA (WGMMA).
//
//   C^T = W^T A^T: the 64-row operand is the weights, decoded in registers and never written back;
//   the tokens are the other operand, k-major in shared memory, loaded by TMA.
//
//                      kTokens tokens (shared memory, both warpgroups read the same)
//                    +----------------------------+
//     outputs  0..63 | consumer warpgroup 0       |   each thread: kTokens / 2 sums
//                    +----------------------------+
//     outputs 64.127 | consumer warpgroup 1       |   + two producer threads that issue every copy
//                    +----------------------------+
//
//   Steps (k-iterations) of 128 k: activations and four weight tiles; several are in flight. Within
//   a step the codes of one half of 64 k are decoded while the WGMMAs of the other half run. A slot
//   is a pipeline stage, which is filled and released as a whole: a step, or half of one
//   (SlotsOfStep).
//
//   CTAs are persistent; a tile scheduler assigns output tiles (token tile, block of outputs) in an
//   order that keeps adjacent token tiles on the same weights. Where output tiles are few,
//   split-K in clusters: the CTAs of a cluster exchange sums through DSMEM, add them in the order
//   of the CTAs and finish a part of the tile each. Where too few clusters run at once, split-K
//   partials go to the workspace, and a reduction kernel adds them. A partly filled last wave may
//   be stream-K: every CTA takes an equal run of its k-iterations, and the parts of a tile are
//   reduced in global memory.
//
//   GLU: a CTA holds 64 gates and the 64 ups that belong to them, warps 0 and 1 of a warpgroup the
//   gates, warps 2 and 3 the ups.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/common/tile_loads.cuh"
#include "backends/cuda/common/warpgroup_products.cuh"
#include "backends/cuda/common/wgmma_instructions.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_block.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_epilogue.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_layout.h"
#include "backends/cuda/gemm/wgmma/wgmma_reduction.cuh"

namespace marlin::cuda {

constexpr int kConsumerWarps = 8;
static_assert(kWgmmaThreads == 32 * kConsumerWarps + 128);

/// A position in the pipeline: a stage and the parity of its phase.
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

/// Releases a stage; called by a consumer warp after the WGMMAs that use it. WGMMAs wait for all
/// lanes of the warp and consume what every lane has read from the stage, so that no __syncwarp()
/// is needed, which costs up to 9 % with few tokens.
MARLIN_DEVICE void ReleaseStage(uint32_t empty, int lane) {
  if (lane < ArrivalsOf(32)) Arrive(empty);
}

/// Lays out shared memory, initializes the mbarriers of the stages and triggers the dependent
/// launch. Called by all threads of the CTA.
MARLIN_DEVICE WgmmaShared BeginSlots(const WgmmaArguments& args, const uint8_t* memory) {
  WgmmaShared shared;
  shared.activations = SharedAddress(memory);
  shared.weights = shared.activations + args.weights_offset;
  shared.full = shared.activations + args.barriers_offset;
  shared.empty = shared.full + args.slots * 8;
  shared.reduction_buffer = shared.activations + args.reduction_offset;
  shared.arrived = shared.empty + args.slots * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < args.slots; ++s) {
      InitBarrier(shared.full + 8 * s, 1);
      InitBarrier(shared.empty + 8 * s, kConsumerWarps * ArrivalsOf(32));
    }
    if (args.in_cluster) InitBarrier(shared.arrived, 1);
    FenceBarrierInit();
  }
  __syncthreads();
  // DSMEM stores need the other CTAs of the cluster to be running and to have initialized their
  // mbarriers.
  if (args.in_cluster) ArriveInCluster();
  TriggerDependentLaunch();
  return shared;
}

/// The weights of an output tile and the TMA bulk copies of a step: all four n-tiles at once, or
/// two n-tiles of gates and the two of their ups.
struct WeightSource {
  const uint8_t* from[2];
  int copies;
  int bytes;        ///< Per copy.
  int64_t to_next;  ///< Bytes from one step to the next.

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

/// The weight producer, one thread. PDL: it copies the first steps before earlier work on the
/// stream has ended. It waits until the stages of a step's activations are free; its weights'
/// stages are free then, because stages are released in order and `weight_slots` steps hold all
/// stages.
template <int kSlotsOfStep>
MARLIN_DEVICE void ProduceWeights(const WgmmaArguments& args, const WgmmaShared& shared,
                                  int slot_bytes) {
  const int weight_bytes = kStripsOfBlock * args.weights.tile_bytes;
  const TileScheduler items(args);
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

/// The activation producer, one thread of another warp; it begins when earlier work has ended.
template <int kTokens, int kSlotsOfStep>
MARLIN_DEVICE void ProduceActivations(const WgmmaArguments& args, const CUtensorMap* map,
                                      const WgmmaShared& shared) {
  constexpr int kHalfBytes = StepActivationBytes(kTokens) / 2;
  constexpr int kHalvesOfSlot = 2 / kSlotsOfStep;
  const TileScheduler items(args);
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

/// This warp's 16 outputs of a weight tile: codes, and the operands of the group that is being
/// decoded.
template <CodeKind kKind, typename T, ParameterUse kUse>
struct WarpTile {
  static constexpr int kBits = CodeBits(kKind);
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;
  /// The decoded weights of 64 k, which WGMMAs in flight read.
  using Fragments = uint32_t[4][4];
  uint32_t words[2][kBits];
  GroupOperands operands;
  uint32_t tile;

  MARLIN_DEVICE void LoadOperands(const ConsumerPlace& place, int group, int groups,
                                  const ParameterMode& mode) {
    const uint32_t at =
        tile + TileCodeBytes(kBits) + (place.lane >> 2) * 8 + place.rows * 4 + group * kGroupBytes;
    uint32_t zeros = 0;
    if (mode.integer_zeros || (kUse == ParameterUse::kAll && mode.extra != ZeroKind::kNone))
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

  /// Decodes the four fragments of a half; half 0 first.
  MARLIN_DEVICE void Decode(int half, const ConsumerPlace& place, int groups,
                            const ParameterMode& mode, const DecodeTable<kKind, T>& table,
                            uint32_t /*never*/, Fragments& fragments) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // A tile has eight k16 steps; a step begins a group where step x groups / 8 crosses an
      // integer.
      const int at = (half * 4 + j) * groups;
      if (!kOneGroup && kKind != CodeKind::kDense16 && at > 0 && (at & 7) < groups) {
        LoadOperands(place, at >> 3, groups, mode);
      }
      DecodeScaled<kKind, T, kUse>(words[half], j, table, mode, operands, fragments[j]);
    }
  }

  /// Called when the WGMMAs that read the fragments are complete; `never` is 0, which the compiler
  /// does not know. The compiler keeps the registers of these fragments by itself.
  static MARLIN_DEVICE void KeepUntilHere(Fragments& /*fragments*/, uint32_t /*never*/) {}

  /// Adds the products of a half to the sums, or begins them. `activations`: the low half of the
  /// descriptor.
  template <int kTokens>
  static MARLIN_DEVICE void Multiply(const Fragments& fragments, uint32_t activations,
                                     bool accumulate, float (&acc)[kTokens / 2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      WarpgroupProduct<T, kTokens>::Run(acc, fragments[j], Descriptor(activations + 2 * j),
                                        accumulate || j > 0 ? 1 : 0);
    }
  }
};

/// The bytes of 64 k of a stage's activations where every stage has kTokens tokens.
template <int kTokens>
struct FixedStages {
  static MARLIN_DEVICE constexpr int HalfBytes() { return StepActivationBytes(kTokens) / 2; }
};

/// A consumer warp's position in the pipelines, counted in stages. The compiler sees that these are
/// the same for all lanes and keeps addresses in uniform registers (unless kUniform is false),
/// which costs less than addresses that every lane advances. The terms of addresses are pinned to
/// registers: fetching them from the kernel parameters in every step costs 3 %. `Stages`: the size
/// of a stage, as FixedStages.
template <typename Stages, int kSlotsOfStep, bool kUniform>
struct ConsumerCursor {
  static constexpr int kSlots = kSlotsOfStep;

  Stages stages;
  uint32_t full;         ///< The full mbarrier of the stage.
  uint32_t tile;         ///< The warp's weight tile.
  uint32_t activations;  ///< The low half of their descriptor.
  int parity = 0;
  int slot = 0;
  int weight_slot = 0;
  int last_slot;
  int last_weight_slot;
  uint32_t first_full;
  uint32_t first_tile;
  uint32_t first_activations;
  int weight_bytes;  ///< Per step.
  int to_empty;      ///< From the full mbarrier of a stage to its empty mbarrier.

  MARLIN_DEVICE ConsumerCursor(const WgmmaArguments& args, const WgmmaShared& shared,
                               const ConsumerPlace& place, const Stages& size = {})
      : stages(size),
        full(shared.full),
        tile(shared.weights + place.tile * args.weights.tile_bytes),
        activations((shared.activations & 0x3ffffu) >> 4 | 1u << 16),
        last_slot(args.slots - 1),
        last_weight_slot(args.weight_slots - 1),
        first_full(full),
        first_tile(tile),
        first_activations(activations),
        weight_bytes(kStripsOfBlock * args.weights.tile_bytes),
        to_empty(args.slots * 8) {
    asm volatile(""
                 : "+r"(first_full), "+r"(first_tile), "+r"(first_activations), "+r"(last_slot),
                   "+r"(weight_bytes), "+r"(to_empty));
    if (kSlotsOfStep > 1) asm volatile("" : "+r"(last_weight_slot));
  }

  MARLIN_DEVICE uint32_t Empty() const { return full + to_empty; }

  /// The low half of the descriptor of the stage's activations, in a uniform register, as the
  /// instruction requires.
  MARLIN_DEVICE uint32_t UniformActivations() const { return __reduce_or_sync(~0u, activations); }

  MARLIN_DEVICE void NextSlot() {
    const bool anew = slot == last_slot;
    slot = anew ? 0 : slot + 1;
    if (!kUniform) asm volatile("" : "+r"(slot));
    parity ^= anew ? 1 : 0;
    full = first_full + slot * 8;
    activations = first_activations + slot * (2 * stages.HalfBytes() / kSlotsOfStep >> 4);
    if (kSlotsOfStep == 1) tile = first_tile + slot * weight_bytes;
  }
  /// From the last stage of a step to the first of the next one.
  MARLIN_DEVICE void NextStep() {
    NextSlot();
    if (kSlotsOfStep == 1) return;
    weight_slot = weight_slot == last_weight_slot ? 0 : weight_slot + 1;
    tile = first_tile + weight_slot * weight_bytes;
  }
};

/// Computes the sums of one output tile. `Tile`: how a warp reads, decodes and multiplies weight
/// tiles, as WarpTile.
template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Tile = WarpTile>
struct WgmmaConsumer {
  using Weights = Tile<kKind, T, kUse>;

  const WgmmaArguments& args;
  ConsumerPlace place;
  DecodeTable<kKind, T> table;
  ParameterMode mode;

  /// With 64 tokens and codes other than FP4, uniform registers make the compiler schedule the loop
  /// worse: 1 to 5 %.
  static constexpr bool kUniformPlaces = kTokens != 64 || (kKind == CodeKind::kFp4 && T::kIsBf16);
  using Cursor =
      ConsumerCursor<FixedStages<kTokens>, SlotsOfStep(CodeBits(kKind), kTokens), kUniformPlaces>;

  /// `activations`: the low half of the descriptor, from UniformActivations.
  MARLIN_DEVICE void Multiply(const typename Weights::Fragments& fragments, uint32_t activations,
                              bool accumulate, float (&acc)[kTokens / 2]) const {
    FenceProducts();
    Weights::template Multiply<kTokens>(fragments, activations, accumulate, acc);
    CommitProducts();
  }

  /// `AnyCursor`: a ConsumerCursor whose stages hold kTokens tokens or more.
  template <typename AnyCursor>
  MARLIN_DEVICE void Run(int tiles, AnyCursor& cursor, float (&acc)[kTokens / 2]) const {
    const int groups = args.weights.groups_per_tile;
    // A launch has less than 2^30 k-iterations.
    const uint32_t never = static_cast<uint32_t>(args.tiles) >> 30;
    typename Weights::Fragments fragments[2] = {};
    Weights weights;
    uint32_t empty_before = 0;
    PinSums(acc);
    uint32_t activations = cursor.UniformActivations();
    Wait(cursor.full, cursor.parity);
    weights.Load(cursor.tile, place, groups, mode);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      weights.Decode(0, place, groups, mode, table, never, fragments[0]);
      Multiply(fragments[0], activations, tile > 0, acc);
      WaitForProducts<1>();
      Weights::KeepUntilHere(fragments[1], never);
      if (tile > 0) ReleaseStage(empty_before, place.lane);
      const uint32_t empty_first = cursor.Empty();
      activations += cursor.stages.HalfBytes() >> 4;
      if constexpr (AnyCursor::kSlots == 2) {
        cursor.NextSlot();
        activations = cursor.UniformActivations();
      }
      weights.Decode(1, place, groups, mode, table, never, fragments[1]);
      if constexpr (AnyCursor::kSlots == 2) Wait(cursor.full, cursor.parity);
      Multiply(fragments[1], activations, true, acc);
      empty_before = cursor.Empty();
      cursor.NextStep();
      activations = cursor.UniformActivations();
      if (tile + 1 < tiles) {
        // Loads the codes of the next step while the WGMMAs run.
        Wait(cursor.full, cursor.parity);
        weights.Load(cursor.tile, place, groups, mode);
      }
      WaitForProducts<1>();
      Weights::KeepUntilHere(fragments[0], never);
      if constexpr (AnyCursor::kSlots == 2) ReleaseStage(empty_first, place.lane);
    }
    WaitForProducts<0>();
    Weights::KeepUntilHere(fragments[1], never);
    PinSums(acc);
    ReleaseStage(empty_before, place.lane);
  }
};

template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Tile>
MARLIN_DEVICE void Consume(const WgmmaArguments& args, const WgmmaShared& shared, float* exchange) {
  const int warp = WarpOfBlock() - 4;
  const int warpgroup = warp / 4;
  const ConsumerPlace place = PlaceOf(args, warp);
  WaitForEarlierWork();
  using Consumer = WgmmaConsumer<kKind, T, kTokens, kUse, Tile>;
  const Consumer consumer{args, place, DecodeTable<kKind, T>(args.weights),
                          ParameterModeOf<kKind, T>(args.weights)};
  WgmmaEpilogue<kTokens> epilogue{
      args, place,      warpgroup, exchange + warpgroup * kExchangeTokens * kExchangeStride,
      0,    kTokens / 8};
  typename Consumer::Cursor cursor(args, shared, place);
  const int splits = args.splits;
  const TileScheduler items(args);
  for (int i = 0; items.Has(i); ++i) {
    const WgmmaItem item = items.At(i);
    float acc[kTokens / 2];
    const bool divided = item.streamed >= 0 && item.tiles < args.tiles;
    // Not used for a whole output tile.
    const StreamReduction<kTokens> reduction(args, item, warpgroup, epilogue.exchange);
    const uint32_t ticket = divided ? reduction.Begin() : 0;
    consumer.Run(item.tiles, cursor, acc);
    if (divided && !reduction.End(ticket, acc)) continue;
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

template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Tile = WarpTile>
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
    Consume<kKind, T, kTokens, kUse, Tile>(args, shared,
                                           reinterpret_cast<float*>(memory + args.exchange_offset));
  }
}

}  // namespace marlin::cuda
