// The GEMMs of the persistent kernel: which tiles a warp multiplies, the rings of copies, which run
// ahead of the MMAs into the next phase, and the sums of a unit.
//
//   The tiles of a CTA's units are numbered, and a warp has adjacent ones (TilesBefore), so that it
//   has few units. More warps copy them in this order, phase after phase, up to the last one that
//   they are allowed: the experts' tiles are not known before the router has chosen.
//   Copies are issued after a gather, never before one: a multiprocessor's requests are served in
//   order, and polls would wait behind them.
#pragma once

#include <cstddef>

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/persistent/persistent_deal_layout.h"
#include "backends/cuda/persistent/persistent_limbs.cuh"
#include "backends/cuda/persistent/persistent_products.cuh"

namespace marlin::cuda {

/// Teams of warps in attention (LayOutKeys); the general form's have the arguments' size, all rows
/// the least.
template <PersistentForm kForm>
MARLIN_DEVICE int TeamWarpsLog2(const PersistentArguments& args) {
  return kForm == PersistentForm::kGeneral ? args.team_warps_log2
                                           : TeamWarpsLog2(kForm == PersistentForm::kHybrid);
}
template <PersistentForm kForm>
MARLIN_DEVICE int TeamsOf(const PersistentArguments& args) {
  return kPersistentWarps >> TeamWarpsLog2<kForm>(args);
}

/// The phase of a layer that number `phase` of all layers' is: unsigned, without code for negative
/// numbers.
MARLIN_DEVICE Phase PhaseOf(int phase) {
  return static_cast<Phase>(static_cast<uint32_t>(phase) % kPhases);
}

/// The tables of a CTA, in shared memory.
struct Tables {
  const PersistentArguments& args;

  /// A layer, if it is this one or a neighbour.
  MARLIN_DEVICE const PersistentLayer& LayerOf(int index) const {
    return Fixed().layers[index & 1];
  }
  MARLIN_DEVICE const PhaseGemm& GemmOf(int phase) const {
    return LayerOf(phase / kPhases).gemms[phase % kPhases];
  }
  MARLIN_DEVICE PersistentScratch& Scratch() const { return Fixed().scratch; }
  /// A selected expert of the layer.
  MARLIN_DEVICE const PersistentExpert& Chosen(int selection) const {
    return reinterpret_cast<const PersistentExpert*>(Memory() +
                                                     args.shared.experts)[Scratch().ids[selection]];
  }

  MARLIN_DEVICE const Schedule& ScheduleOf(const PhaseGemm& gemm) const {
    return *reinterpret_cast<const Schedule*>(Memory() + args.shared.schedules + gemm.schedule);
  }

  /// The first selection of a phase that is the shared expert's: with several rows, one of the last
  /// tasks.
  template <PersistentForm kForm>
  MARLIN_DEVICE int FirstShared(const PhaseGemm& gemm) const {
    if (!HasSharedExperts(kForm)) return kMostTasks;
    if (!IsRows(kForm) || gemm.shared_selection < 0) return gemm.first_shared();
    return FixedRows().tasks - args.router.shared;
  }
  /// The layout of a selection's tiles.
  template <PersistentForm kForm>
  MARLIN_DEVICE const TileView& LayoutOf(const PhaseGemm& gemm, int selection) const {
    return selection >= FirstShared<kForm>(gemm) ? gemm.shared : gemm.weights;
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

/// The strips of the residual that a CTA owns, with several rows.
struct OwnedStrips {
  const PersistentArguments& args;
  int first;
  int count;

  MARLIN_DEVICE explicit OwnedStrips(const PersistentArguments& args) : args(args) {
    const auto block = static_cast<int>(blockIdx.x);
    const auto blocks = static_cast<int>(gridDim.x);
    first = QuotientOf(Strips(args) * block, blocks);
    count = QuotientOf(Strips(args) * (block + 1), blocks) - first;
  }
  static MARLIN_DEVICE int Strips(const PersistentArguments& args) {
    return (args.features + kStripOutputs - 1) / kStripOutputs;
  }

  /// Attention's norm, or the MLP's: the weights of the strips' features, and their bytes.
  MARLIN_DEVICE float* Norm(int which) const {
    const int most = (Strips(args) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    return reinterpret_cast<float*>(Memory() + args.shared.norms) + which * most * kStripOutputs;
  }
  MARLIN_DEVICE int bytes() const {
    return min(count * kStripOutputs, args.features - first * kStripOutputs) * 4;
  }
};

/// Tile `number` of a CTA.
MARLIN_DEVICE const ScheduledTile& TileAt(const Schedule& schedule, int number) {
  const auto* const tiles = reinterpret_cast<const uint8_t*>(&schedule) + schedule.tiles_at;
  return reinterpret_cast<const ScheduledTile*>(tiles)[number];
}
MARLIN_DEVICE const ScheduledUnit& UnitAt(const Schedule& schedule, int number) {
  return reinterpret_cast<const ScheduledUnit*>(&schedule + 1)[number];
}

/// Stores four adjacent activations of a row, in the place of quad number `quad`. Called by all
/// lanes of a warp together, whose quads are a tile's.
template <bool kLimbs>
MARLIN_DEVICE void StoreActivations(const PersistentArguments& args, int quad, const float4& v,
                                    int row = 0) {
  if constexpr (kLimbs) return StoreLimbs(args, quad, v, row);
  uint8_t* const first = Memory() + args.shared.activations + row * args.activation_stride;
  const float factor = args.activation_factor;
  reinterpret_cast<uint2*>(first)[quad] = {Bf16x2::Pack(v.x * factor, v.y * factor),
                                           Bf16x2::Pack(v.z * factor, v.w * factor)};
}

/// The gated activation of four gates and ups, times `factor`.
MARLIN_DEVICE float4 GateProducts(const GateView& gate, const float4& g, const float4& u,
                                  float factor) {
  float products[4] = {g.x, g.y, g.z, g.w};
  ReplaceByProducts<true>(gate, products, {u.x, u.y, u.z, u.w});
  return {products[0] * factor, products[1] * factor, products[2] * factor, products[3] * factor};
}

MARLIN_DEVICE float4 Times(const float4& x, const float4& w) {
  return {x.x * w.x, x.y * w.y, x.z * w.z, x.w * w.w};
}
MARLIN_DEVICE float Squares(const float4& x) {
  return __fmaf_rn(x.x, x.x, x.y * x.y) + __fmaf_rn(x.z, x.z, x.w * x.w);
}

/// Stores the sums of a warp's values in its places.
template <int kCount, typename... Places>
MARLIN_DEVICE void StoreWarpSums(float (&values)[kCount], Places*... places) {
  static_assert(sizeof...(Places) == kCount);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, step);
  }
  if (threadIdx.x % 32 != 0) return;
  float* const to[kCount] = {places...};
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i][threadIdx.x / 32] = values[i];
}

/// The factor of a norm of `count` values, whose squares the warps have summed.
MARLIN_DEVICE float NormFactor(const PersistentScratch& scratch, int count, float epsilon) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kPersistentWarps; warp += 4) {
    const float4 v = *reinterpret_cast<const float4*>(scratch.squares + warp);
    sum += (v.x + v.y) + (v.z + v.w);
  }
  return rsqrtf(__fdividef(sum, static_cast<float>(count)) + epsilon);
}

/// The order of a ring's slots, and how often each was used. Where the memory of upper slots has
/// the keys meanwhile, tiles of kQkv and kOut take the first kLowSlots in turn; the others begin
/// after them in every layer.
class SlotOrder {
 public:
  struct Use {
    int slot;
    int parity;  ///< The parity of the slot's earlier uses.
  };

  /// The slots that a phase's tiles take.
  template <PersistentForm kForm>
  static MARLIN_DEVICE int CountOf(int phase, int slots) {
    return SharesRing(kForm) && phase % kPhases <= static_cast<int>(Phase::kOut) ? kLowSlots
                                                                                 : slots;
  }
  /// Called before the first tile of every phase.
  template <PersistentForm kForm>
  MARLIN_DEVICE void Begin(int phase, int slots) {
    if constexpr (!SharesRing(kForm)) return;
    if (phase % kPhases == static_cast<int>(Phase::kQkv)) {
      SetNext(state_ >> kLowAt);
    } else if (phase % kPhases == static_cast<int>(Phase::kGates)) {
      state_ = (state_ & ((1u << kLowAt) - 1)) | Next() << kLowAt;
      SetNext(slots > kLowSlots ? kLowSlots : 0);
    }
  }
  /// The next of `count` slots.
  MARLIN_DEVICE Use Take(int count) {
    const uint32_t slot = Next();
    const int parity = static_cast<int>(state_ >> slot & 1);
    const bool wraps = slot + 1 == static_cast<uint32_t>(count);
    const uint32_t step = wraps ? 1u - static_cast<uint32_t>(count) : 1u;
    state_ = (state_ ^ 1u << slot) + (step << kNextAt);
    return {static_cast<int>(slot), parity};
  }

 private:
  static constexpr int kNextAt = 16;
  static constexpr int kLowAt = 24;
  static constexpr uint32_t kNextMask = 15;
  static_assert(kMostSlots <= kNextMask);

  MARLIN_DEVICE uint32_t Next() const { return state_ >> kNextAt & kNextMask; }
  MARLIN_DEVICE void SetNext(uint32_t slot) {
    state_ = (state_ & ~(kNextMask << kNextAt)) | slot << kNextAt;
  }

  /// A bit for every slot's parity, then the next slot, and the next low one of other layers: a
  /// single register.
  uint32_t state_ = 0;
};

/// The ring of a warp: full barriers say that a tile has arrived, empty ones that it was read.
struct RingAddress {
  uint32_t barriers;
  uint32_t slots;
  int slot_stride;

  MARLIN_DEVICE RingAddress(const PersistentArguments& args, int warp)
      : barriers(SharedAddress(Fixed().barriers + warp * kMostSlots)),
        slots(SharedAddress(Memory()) + args.shared.ring + warp * args.slot_bytes),
        slot_stride(kPersistentWarps * args.slot_bytes) {}

  MARLIN_DEVICE uint32_t Full(int slot) const { return barriers + slot * 8; }
  MARLIN_DEVICE uint32_t Empty(int slot) const {
    return barriers + (kPersistentWarps * kMostSlots + slot) * 8;
  }
  MARLIN_DEVICE uint32_t Slot(int slot) const { return slots + slot * slot_stride; }
};

MARLIN_DEVICE uint32_t AddressOf(LayerBarrier barrier) {
  return SharedAddress(Fixed().layer_barriers + static_cast<int>(barrier));
}
/// Waits for what a layer's barrier counts.
MARLIN_DEVICE void AwaitLayer(LayerBarrier barrier, int layer) {
  Wait(AddressOf(barrier), layer & 1);
}

/// The barrier at which a phase's copies are allowed.
MARLIN_DEVICE LayerBarrier AllowedOf(Phase phase) {
  return static_cast<LayerBarrier>(static_cast<int>(LayerBarrier::kAllowed) +
                                   static_cast<int>(phase));
}
/// Lets the copying warps fill the places that a barrier's copies take. Called by all threads that
/// compute, after a barrier that follows their last access to what is there.
MARLIN_DEVICE void AllowCopies(LayerBarrier barrier) {
  if (threadIdx.x < ArrivalsOf(kPersistentThreads)) Arrive(AddressOf(barrier));
}
MARLIN_DEVICE void AllowCopies(Phase phase) { AllowCopies(AllowedOf(phase)); }

/// A warp that copies half of the warps' tiles, one warp's per lane; the first one also the layers'
/// tables. Two issue twice as fast as one; four are slower.
template <PersistentForm kForm>
class TileCopier {
 public:
  MARLIN_DEVICE TileCopier(const PersistentArguments& args, int half)
      : tables_{args}, half_(half), ring_(args, FirstWarp() + Lane()) {}

  static MARLIN_DEVICE void InitBarriers(const PersistentArguments& args) {
    if (Lane() == kPersistentWarps) {
      for (int i = 0; i < kLayerBarriers; ++i) {
        const auto barrier = static_cast<LayerBarrier>(i);
        const int arrivals = barrier >= LayerBarrier::kAllowed ? ArrivalsOf(kPersistentThreads)
                             : barrier == LayerBarrier::kKeys  ? kKeyCopiers
                                                               : 2;  // Both TileCopiers.
        InitBarrier(AddressOf(barrier), arrivals);
      }
    }
    if (Lane() >= kPersistentWarps) return;
    const RingAddress ring(args, Lane());
#pragma unroll 1
    for (int slot = 0; slot < args.slots; ++slot) {
      InitBarrier(ring.Full(slot), 1);
      InitBarrier(ring.Empty(slot), ArrivalsOf(32));
    }
  }

  /// Tables are copied when their places have been read for the last time: a layer's while the
  /// gates of the previous one are, the MLP's parts with the projection of attention.
  MARLIN_DEVICE void Run() {
    const PersistentArguments& args = tables_.args;
    CopyLayer(0);
    // Where the first layer's kQkv has run elsewhere: no barrier is arrived at twice without a
    // wait.
    if (args.first_phase > 0) AwaitLayer(AllowedOf(Phase::kQkv), 0);
#pragma unroll 1
    for (int phase = args.first_phase; phase < args.end_phase; ++phase) {
      const int layer = phase / kPhases;
      const auto which = static_cast<Phase>(phase % kPhases);
      AwaitLayer(AllowedOf(which), layer);
      if (which == Phase::kQkv || phase == args.first_phase) {
        AwaitLayer(LayerBarrier::kLayer, layer);
      }
      if (which == Phase::kGates) AwaitLayer(LayerBarrier::kMlp, layer);
      // Where a run ends with projections, there may be no MLP.
      if (which == Phase::kOut && (!kBetween || layer == 0)) CopyMlp(layer);
      CopyPhase(phase);
      if (kForm == PersistentForm::kBetween && phase == args.first_phase) PrefetchShared(layer);
      if (which == Phase::kGates && layer + 1 < args.layer_count) CopyLayer(layer + 1);
    }
    if constexpr (kBetween) RequestAhead();
  }

 private:
  static constexpr int kWarps = kPersistentWarps / 2;
  static constexpr bool kHybrid = kForm == PersistentForm::kHybrid;
  static constexpr bool kBetween = IsBetween(kForm);
  static constexpr bool kRows = IsRows(kForm);

  static MARLIN_DEVICE int Lane() { return static_cast<int>(threadIdx.x) & 31; }
  MARLIN_DEVICE int FirstWarp() const { return half_ * kWarps; }

  // The warp that copies no tables arrives at their barriers too: so it never lags by a layer.

  MARLIN_DEVICE void CopyLayer(int layer) const {
    if (!ElectOne()) return;
    const PersistentArguments& args = tables_.args;
    const uint32_t barrier = AddressOf(LayerBarrier::kLayer);
    if (half_ != 0) return Arrive(barrier);
    const uint32_t base = SharedAddress(Memory());
    const PersistentLayer* const from = args.layers + layer;
    constexpr int kBytes = sizeof(PersistentLayer);
    const int row_bytes = args.features * 4;
    // A run between attentions begins after the first layer's: nothing waits for its table here.
    const float* const norm = kBetween && layer == 0 ? nullptr : from->attention_norm;
    int rows = kRows || ((kHybrid || kBetween) && norm == nullptr) ? 0 : 1;
    const float* delta_rows = nullptr;
    if constexpr (kHybrid) {
      delta_rows =
          tables_.Scratch().delta.head < args.delta.value_heads ? from->delta_rows : nullptr;
      if (delta_rows != nullptr) rows += 2;
    }
    const bool has_owned = kRows && (!kBetween || norm != nullptr);
    ArriveExpecting(barrier,
                    kBytes + rows * row_bytes + (has_owned ? OwnedStrips(args).bytes() : 0));
    CopyBulk(SharedAddress(&Fixed().layers[layer & 1]), from, kBytes, barrier);
    if (has_owned) CopyOwned(norm, 0, barrier);
    if (rows > 0) CopyBulk(base + args.shared.norms, norm, row_bytes, barrier);
    if (delta_rows == nullptr) return;
    CopyDeltaRow(args.delta.writes, delta_rows, base + args.shared.delta_rows, barrier);
    CopyDeltaRow(args.delta.decays, delta_rows, base + args.shared.delta_rows + row_bytes, barrier);
  }

  /// The norm's weights of the CTA's strips of the residual.
  MARLIN_DEVICE void CopyOwned(const float* norm, int which, uint32_t barrier) const {
    const PersistentArguments& args = tables_.args;
    const OwnedStrips owned(args);
    if (owned.bytes() == 0) return;
    CopyBulk(SharedAddress(owned.Norm(which)), norm + owned.first * kStripOutputs, owned.bytes(),
             barrier);
  }

  MARLIN_DEVICE void CopyDeltaRow(const HeadColumns& rows, const float* from, uint32_t to,
                                  uint32_t barrier) const {
    const PersistentArguments& args = tables_.args;
    const DeltaPart& part = tables_.Scratch().delta;
    const int row = rows.first + part.key_head * rows.of_key_head + part.head -
                    part.key_head * args.delta.group;
    CopyBulk(to, from + row * args.features, args.features * 4, barrier);
  }

  MARLIN_DEVICE void CopyMlp(int index) const {
    if (!ElectOne()) return;
    const PersistentArguments& args = tables_.args;
    const PersistentLayer& layer = tables_.LayerOf(index);
    const uint32_t barrier = AddressOf(LayerBarrier::kMlp);
    if (half_ != 0) return Arrive(barrier);
    const uint32_t base = SharedAddress(Memory());
    const int row_bytes = args.features * 4;
    const bool routes = layer.experts != nullptr;
    const int rows = routes ? tables_.Scratch().router_rows : 0;
    const int expert_bytes = routes ? args.router.table() * int{sizeof(PersistentExpert)} : 0;
    const int norm_bytes = kRows ? OwnedStrips(args).bytes() : row_bytes;
    ArriveExpecting(barrier, norm_bytes + rows * row_bytes + expert_bytes);
    if constexpr (kRows) {
      CopyOwned(layer.mlp_norm, 1, barrier);
    } else {
      CopyBulk(base + args.shared.norms + row_bytes, layer.mlp_norm, row_bytes, barrier);
    }
    if (!routes) return;
    CopyBulk(base + args.shared.experts, layer.experts, expert_bytes, barrier);
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const float* const from = layer.router + (blockIdx.x + row * gridDim.x) * args.features;
      CopyBulk(base + args.shared.router + row * row_bytes, from, row_bytes, barrier);
    }
  }

  /// Requests the CTA's share of what comes after the run.
  MARLIN_DEVICE void RequestAhead() const {
    constexpr int kChunk = 4096;
    const int64_t stride = int64_t{64} * kChunk * gridDim.x;
#pragma unroll 1
    for (const AheadRange& range : tables_.args.ahead) {
      const int first = static_cast<int>(blockIdx.x + gridDim.x * (32 * half_ + Lane())) * kChunk;
#pragma unroll 1
      for (int64_t at = first; at < range.bytes; at += stride) {
        const int64_t left = range.bytes - at;
        PrefetchBulk(range.data + at, left < kChunk ? static_cast<int>(left) : kChunk);
      }
    }
  }
  /// Brings the CTA's tiles of the shared expert to L2 while memory would wait for the router.
  MARLIN_DEVICE void PrefetchShared(int layer) const {
    const PersistentArguments& args = tables_.args;
    if (args.router.shared == 0) return;
    AwaitLayer(LayerBarrier::kMlp, layer);
#pragma unroll 1
    for (int phase = layer * kPhases + static_cast<int>(Phase::kGates);
         phase < (layer + 1) * kPhases; ++phase) {
      const PhaseGemm& gemm = tables_.GemmOf(phase);
      const Schedule& schedule = tables_.ScheduleOf(gemm);
#pragma unroll 1
      for (int i = 32 * half_ + Lane(); i < schedule.tiles; i += 64) {
        const ScheduledTile& tile = TileAt(schedule, i);
        if (tile.selection < gemm.first_shared()) continue;
        PrefetchBulk(tables_.Find(phase, tile), gemm.shared.tile_bytes);
      }
    }
  }

  MARLIN_DEVICE void CopyPhase(int phase) {
    const PhaseGemm& gemm = tables_.GemmOf(phase);
    const Schedule& schedule = tables_.ScheduleOf(gemm);
    order_.template Begin<kForm>(phase, tables_.args.slots);
    if (schedule.tiles == 0) return;
    const int slots = SlotOrder::CountOf<kForm>(phase, tables_.args.slots);
    // Every warp's part of the tiles is the same or one more.
    const int warp = FirstWarp() + Lane() % kWarps;
    const int first = TilesBefore(warp, schedule.tiles);
    const int count = TilesBefore(warp + 1, schedule.tiles) - first;
    const int most = (schedule.tiles + kPersistentWarps - 1) / kPersistentWarps;
    const bool copies = Lane() < kWarps;
    if constexpr (kRows) {
      TileWalk walk(gemm, schedule, count > 0 ? first : 0);
#pragma unroll 1
      for (int i = 0; i < most; ++i) {
        if (copies && i < count) Copy(phase, gemm, TileOf(walk, gemm), slots);
        walk.Advance();
        __syncwarp();
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < most; ++i) {
        if (copies && i < count) Copy(phase, gemm, TileAt(schedule, first + i), slots);
        __syncwarp();
      }
    }
  }
  MARLIN_DEVICE ScheduledTile TileOf(const TileWalk& walk, const PhaseGemm& gemm) const {
    if constexpr (!HasSharedExperts(kForm)) return walk.Tile();
    return walk.Tile(tables_.FirstShared<kForm>(gemm));
  }
  MARLIN_DEVICE void Copy(int phase, const PhaseGemm& gemm, const ScheduledTile& tile, int slots) {
    const uint8_t* const from = tables_.Find(phase, tile);
    const int bytes = tables_.LayoutOf<kForm>(gemm, tile.selection).tile_bytes;
    const SlotOrder::Use use = order_.Take(slots);
    Wait(ring_.Empty(use.slot), use.parity ^ 1);
    ArriveExpecting(ring_.Full(use.slot), bytes);
    CopyBulk(ring_.Slot(use.slot), from, bytes, ring_.Full(use.slot));
  }

  const Tables tables_;
  const int half_;
  RingAddress ring_;
  SlotOrder order_;
};

/// A warp's side of its ring.
class TileRing {
 public:
  MARLIN_DEVICE explicit TileRing(const PersistentArguments& args) : args_(args) {}

  template <PersistentForm kForm>
  MARLIN_DEVICE void Begin(int phase) {
    order_.template Begin<kForm>(phase, args_.slots);
  }
  /// The address of the warp's next tile, in a phase whose tiles take `slots` slots.
  MARLIN_DEVICE uint32_t Await(int slots) {
    const SlotOrder::Use use = order_.Take(slots);
    slot_ = use.slot;
    const RingAddress ring(args_, Warp());
    Wait(ring.Full(use.slot), use.parity);
    return ring.Slot(use.slot);
  }
  /// The tile that Await returned has been read, by all lanes.
  MARLIN_DEVICE void Release() const {
    __syncwarp();
    if ((threadIdx.x & 31) < ArrivalsOf(32)) Arrive(RingAddress(args_, Warp()).Empty(slot_));
  }

 private:
  static MARLIN_DEVICE int Warp() { return static_cast<int>(threadIdx.x) >> 5; }

  const PersistentArguments& args_;
  SlotOrder order_;
  int slot_ = 0;
};

/// Code for the products of a tile: the most common cases have no tests for the ends of groups.
enum class TileCode : uint8_t { kOneScale, kTwoGroups, kOneGroup, kAnyGroups, kAllParameters };

/// Entry of a tile, as far as its products need it: one register.
class TilePlace {
 public:
  TilePlace() = default;
  MARLIN_DEVICE explicit TilePlace(const ScheduledTile* tile)
      : word_(reinterpret_cast<const uint32_t*>(
            tile)[offsetof(ScheduledTile, k_tile) / sizeof(uint32_t)]) {}
  MARLIN_DEVICE int k_tile() const { return static_cast<int>(word_ & 0xffff); }
  MARLIN_DEVICE int unit() const { return static_cast<int>(word_ >> 16 & 0xff); }
  MARLIN_DEVICE int selection() const { return static_cast<int>(word_ >> 24 & 0x7f); }

 private:
  uint32_t word_ = 0;
};

/// Beginning of a warp's products in a phase, found before the phase's inputs are there: reading
/// one table after another takes hundreds of clocks.
struct PhaseStart {
  const Schedule* schedule;
  int first;  ///< The warp's first one of the CTA's tiles,
  int tiles;  ///< and how many it has.
  TileCode code;
  TilePlace place = {};  ///< The first one's; with several rows a TileWalk finds it.

  template <PersistentForm kForm, bool kLimbs>
  static MARLIN_DEVICE PhaseStart Of(const Tables& tables, int phase) {
    const PhaseGemm& gemm = tables.GemmOf(phase);
    PhaseStart start;
    start.schedule = &tables.ScheduleOf(gemm);
    const int warp = static_cast<int>(threadIdx.x) >> 5;
    start.first = TilesBefore(warp, start.schedule->tiles);
    start.tiles = TilesBefore(warp + 1, start.schedule->tiles) - start.first;
    if (!IsRows(kForm) && start.tiles > 0) {
      start.place = TilePlace(&TileAt(*start.schedule, start.first));
    }
    const bool all_same =
        gemm.shared_selection < 0 ||
        (HasSharedExperts(kForm) && gemm.shared.groups_per_tile == gemm.weights.groups_per_tile);
    const int groups = all_same ? gemm.weights.groups_per_tile : 0;
    // Products of limbs have the same code for all uses.
    start.code = !kLimbs && gemm.use == ParameterUse::kAll        ? TileCode::kAllParameters
                 : !kLimbs && gemm.use == ParameterUse::kOneScale ? TileCode::kOneScale
                 : groups == 2                                    ? TileCode::kTwoGroups
                 : groups == 1                                    ? TileCode::kOneGroup
                                                                  : TileCode::kAnyGroups;
    return start;
  }
};

/// Multiplies a warp's tiles of a phase by `products` (TileProducts or LimbProducts), and stores
/// its part of each unit's sums.
template <PersistentForm kForm, typename Products>
MARLIN_DEVICE void MultiplyTiles(const PersistentArguments& args, const PhaseGemm& gemm,
                                 const PhaseStart& start, Products products, int slots,
                                 TileRing& ring) {
  if (start.tiles == 0) return;
  int open = -1;
  const auto multiply = [&](int unit, int k_tile, const TileView& layout) {
    if (unit != open) {
      if (open >= 0) products.Store(open);
      open = unit;
      products.Clear();
    }
    const uint32_t at = ring.Await(slots);
    products.Add(at, k_tile, layout, [&] { ring.Release(); });
  };
  if constexpr (IsRows(kForm)) {
    TileWalk walk(gemm, *start.schedule, start.first);
#pragma unroll 1
    for (int left = start.tiles; left > 0; --left, walk.Advance()) {
      multiply(walk.unit(), walk.k_tile(), Tables{args}.LayoutOf<kForm>(gemm, walk.selection()));
    }
  } else {
    const int end = start.first + start.tiles;
    TilePlace next = start.place;
#pragma unroll 1
    for (int number = start.first; number < end; ++number) {
      const TilePlace tile = next;
      if (number + 1 < end) next = TilePlace(&TileAt(*start.schedule, number + 1));
      multiply(tile.unit(), tile.k_tile(), Tables{args}.LayoutOf<kForm>(gemm, tile.selection()));
    }
  }
  products.Store(open);
}

/// The products of the CTA's tiles. `first_tile`: of k, with which the activations begin.
template <CodeKind kKind, PersistentForm kForm, bool kLimbs>
MARLIN_DEVICE void MultiplyPhase(const PersistentArguments& args, int phase,
                                 const PhaseStart& start, int first_tile, TileRing& ring) {
  const PhaseGemm& gemm = Tables{args}.GemmOf(phase);
  const int slots = SlotOrder::CountOf<kForm>(phase, args.slots);
  const auto multiply = [&]<typename Products>() {
    MultiplyTiles<kForm>(args, gemm, start, Products(args, gemm.weights, first_tile), slots, ring);
  };
  const auto multiply_limbs = [&]<int kGroups>() {
    if (gemm.weights.zero_kind == ZeroKind::kNone) {
      multiply.template operator()<LimbProducts<kForm, kGroups, false>>();
    } else {
      multiply.template operator()<LimbProducts<kForm, kGroups, true>>();
    }
  };
  const auto multiply_bf16 = [&]<ParameterUse kUse, int kGroups = 0>() {
    multiply.template operator()<TileProducts<kKind, kUse, kForm, kGroups>>();
  };
  if constexpr (kLimbs) {
    if (start.code == TileCode::kTwoGroups) {
      multiply_limbs.template operator()<2>();
    } else if (start.code == TileCode::kOneGroup) {
      multiply_limbs.template operator()<1>();
    } else {
      multiply_limbs.template operator()<0>();
    }
  } else if (start.code == TileCode::kOneScale) {
    multiply_bf16.template operator()<ParameterUse::kOneScale>();
  } else if (start.code == TileCode::kTwoGroups) {
    multiply_bf16.template operator()<ParameterUse::kScales, 2>();
  } else if (start.code == TileCode::kOneGroup) {
    multiply_bf16.template operator()<ParameterUse::kScales, 1>();
  } else if (start.code == TileCode::kAnyGroups) {
    multiply_bf16.template operator()<ParameterUse::kScales>();
  } else {
    multiply_bf16.template operator()<ParameterUse::kAll>();
  }
}

/// The sum of a unit's output over the warps that had its tiles, in their order.
/// `sums`: of the unit's output.
MARLIN_DEVICE float SumOfWarps(uint32_t warps, const float* sums) {
  float parts[kPersistentWarps];
#pragma unroll
  for (int i = 0; i < kPersistentWarps; ++i) parts[i] = sums[i * kStripOutputs];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPersistentWarps; i += 4) {
    const auto part = [&](int warp) { return (warps >> warp & 1) != 0 ? parts[warp] : 0.0f; };
    sum += (part(i) + part(i + 1)) + (part(i + 2) + part(i + 3));
  }
  return sum;
}

}  // namespace marlin::cuda
