// Decode of one token by one launch: all layers of a model in a kernel whose CTAs stay.
//
//   The CTAs, one per multiprocessor, run the phases of a layer together and exchange what a phase
//   needs of the one before through global memory (persistent_exchange.cuh):
//
//     phase    before it, in every CTA                             it publishes
//     kQkv     residual += downs; norm                             queries, keys, values
//     kOut     attention of a KV head's keys; merge of the parts   the attention block
//     kGates   residual += block; norm; router: a row of logits,   gates and ups
//              then the top-k selection
//     kDown    gated activation                                    the MLP block
//
//   Split-K has no reduction of its own: units publish partial sums, and readers add them in a
//   fixed order, so a step's bits do not depend on timing. The residual and the selection are
//   computed by every CTA alike. Weights stream into shared memory ahead of the phases
//   (persistent_tiles.cuh). Nothing that depends on the token is a kernel parameter.
//
//   The CTAs wait for each other, so all of them have to be resident: the launch is cooperative.
#pragma once

#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/persistent/persistent_attention.cuh"
#include "backends/cuda/kernels/persistent/persistent_exchange.cuh"
#include "backends/cuda/kernels/persistent/persistent_tiles.cuh"
#include "backends/cuda/kernels/router/token_router.cuh"

namespace marlin::cuda {

/// Quads (four adjacent features) of a thread, at most, and those whose norm weights are loaded
/// before the gather.
inline constexpr int kMostQuads = kMostPersistentHidden / 4 / kPersistentThreads;
inline constexpr int kEarlyQuads = 2;

/// A CTA of the kernel.
class PersistentBlock {
 public:
  MARLIN_DEVICE explicit PersistentBlock(const PersistentArguments& args)
      : args_(args),
        thread_(static_cast<int>(threadIdx.x)),
        tables_{args},
        ring_(args),
        clock_(*args.clock),
        position_(*args.position) {}

  /// The parts of shared memory that are there before the first layer.
  MARLIN_DEVICE void Begin() {
    if (thread_ < kWarpPairs) {
      InitBarrier(Base() + args_.shared.barriers + (kPersistentWarps * kMostSlots + thread_) * 8,
                  1);
    }
    FenceBarrierInit();
    CopyTable(0);
    auto* const rotations = reinterpret_cast<float2*>(Memory() + args_.shared.rotations);
    for (int pair = thread_; pair < args_.pairs; pair += kPersistentThreads) {
      RotationOf(args_.frequencies[pair], position_, args_.rotary_factor, &rotations[pair].x,
                 &rotations[pair].y);
    }
    auto* const residual = Residual();
    for (int i = thread_; i < args_.features / 4; i += kPersistentThreads) {
      residual[i] = reinterpret_cast<const float4*>(args_.hidden)[i];
    }
    if (thread_ < kMostChosenExperts) Scratch().ids[thread_] = 0;
    if (blockIdx.x == 0 && thread_ == 0) CheckPosition();
    const auto* const schedules = reinterpret_cast<const uint4*>(
        args_.schedules + static_cast<int64_t>(blockIdx.x) * args_.schedule_bytes);
    for (int i = thread_; i < args_.schedule_bytes / 16; i += kPersistentThreads) {
      CopyAsync16(Base() + args_.shared.schedules + i * 16, schedules + i, 16);
    }
    if (thread_ == 0) FindHeads();
    FinishTable();
    __syncthreads();
  }

  template <CodeKind kKind>
  MARLIN_DEVICE void Run() {
    const int phases = args_.layer_count * kPhases;
    int turns = 0;
#pragma unroll 1
    for (int phase = 0; phase < phases; ++phase) {
      const int index = phase / kPhases;
      const PersistentLayer& layer = tables_.LayerOf(index);
      const auto which = static_cast<Phase>(phase % kPhases);
      const PhaseGemm& gemm = layer.gemms[phase % kPhases];
      switch (which) {
        case Phase::kQkv:
          PrepareQkv(layer, index);
          break;
        case Phase::kOut:
          PrepareOut(layer, index, &turns);
          break;
        case Phase::kGates:
          PrepareGates(layer, phase);
          break;
        case Phase::kDown:
          PrepareDown(layer, phase, phases);
          break;
      }
      // A norm's results are those of all k.
      const bool whole = which == Phase::kQkv || which == Phase::kGates;
      const Schedule& schedule = tables_.ScheduleOf(gemm);
      const int first_tile = whole ? 0 : schedule.first_k_tile;
      auto* const sums = reinterpret_cast<float*>(Memory() + args_.shared.sums);
      const uint32_t activations = Base() + args_.shared.activations;
      switch (gemm.use) {
        case ParameterUse::kOneScale:
          MultiplyTiles<kKind, ParameterUse::kOneScale>(gemm, schedule, activations, first_tile,
                                                        sums, ring_);
          break;
        case ParameterUse::kScales:
          MultiplyTiles<kKind, ParameterUse::kScales>(gemm, schedule, activations, first_tile, sums,
                                                      ring_);
          break;
        default:
          MultiplyTiles<kKind, ParameterUse::kAll>(gemm, schedule, activations, first_tile, sums,
                                                   ring_);
      }
      __syncthreads();
      Publish(layer, index, which, schedule, sums);
    }
  }

  /// Stores the residual, and sets the clock for the next launch.
  MARLIN_DEVICE void End() {
    AddBlock(tables_.LayerOf(args_.layer_count - 1).gemms[static_cast<int>(Phase::kDown)],
             Words(args_.layer_count - 1) + args_.exchange.phases[static_cast<int>(Phase::kDown)],
             Tag(args_.layer_count - 1));
    __syncthreads();
    for (int i = static_cast<int>(blockIdx.x) * kPersistentThreads + thread_;
         i < args_.features / 4; i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      reinterpret_cast<float4*>(args_.hidden)[i] = Residual()[i];
    }
    // All CTAs have read the clock: this one has had sums of each since.
    if (blockIdx.x == 0 && thread_ == 0) *args_.clock = clock_ + args_.layer_count;
  }

 private:
  static MARLIN_DEVICE uint32_t Base() { return SharedAddress(Memory()); }
  MARLIN_DEVICE PersistentScratch& Scratch() const { return tables_.Scratch(); }
  MARLIN_DEVICE float4* Residual() const {
    return reinterpret_cast<float4*>(Memory() + args_.shared.residual);
  }
  /// The exchange buffer of a layer, and its tag.
  MARLIN_DEVICE uint32_t* Words(int layer) const {
    return args_.words + ((clock_ + layer) & 1) * args_.exchange.words;
  }
  MARLIN_DEVICE uint32_t Tag(int layer) const { return TagOf(clock_ + layer); }

  /// The CTA's part of attention: once, since divisions take a hundred clocks.
  MARLIN_DEVICE void FindHeads() const {
    const auto block = static_cast<int>(blockIdx.x);
    PersistentScratch& scratch = Scratch();
    scratch.kv_head = block / args_.attention_splits;
    scratch.split = block - scratch.kv_head * args_.attention_splits;
    scratch.head = block * 32 / args_.value_dim;
    scratch.head_kv_head = scratch.head / args_.group;
  }

  MARLIN_DEVICE void CheckPosition() const {
    if (position_ < 0) {
      RecordError(args_.errors, ValueError::kPosition, position_, 0);
      return;
    }
    const int block = position_ / kCachePageTokens;
    for (const CacheGroup& pages : args_.groups) {
      if (pages.block_table == nullptr || block < pages.blocks) continue;
      RecordError(args_.errors, ValueError::kBlock, position_, block, pages.blocks);
    }
  }

  /// Begins the copy of a layer's table.
  MARLIN_DEVICE void CopyTable(int layer) {
    if (layer >= args_.layer_count) return;
    constexpr int kChunks = sizeof(PersistentLayer) / 16;
    static_assert(kChunks <= kPersistentThreads);
    if (thread_ < kChunks) {
      CopyAsync16(
          Base() + args_.shared.layers + (layer & 1) * int{sizeof(PersistentLayer)} + thread_ * 16,
          reinterpret_cast<const uint4*>(args_.layers + layer) + thread_, 16);
    }
  }
  /// Begins the copy of a layer's experts.
  MARLIN_DEVICE void CopyExperts(const PersistentLayer& layer) {
    if (layer.experts == nullptr) return;
    const int chunks = args_.router.experts * int{sizeof(PersistentExpert)} / 16;
    for (int i = thread_; i < chunks; i += kPersistentThreads) {
      CopyAsync16(Base() + args_.shared.experts + i * 16,
                  reinterpret_cast<const uint4*>(layer.experts) + i, 16);
    }
  }
  /// Ends the copies of tables; __syncthreads has to follow.
  static MARLIN_DEVICE void FinishTable() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  /// Rows blockIdx.x, blockIdx.x + gridDim.x ... of the router's matrix.
  MARLIN_DEVICE int RouterRows() const {
    const int rest = args_.router.experts - static_cast<int>(blockIdx.x);
    return rest <= 0 ? 0 : (rest + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  }

  /// residual += the sums of a phase.
  MARLIN_DEVICE void AddBlock(const PhaseGemm& gemm, const uint32_t* words, uint32_t tag) {
#pragma unroll 1
    for (int i = thread_; i < args_.features / 4; i += kPersistentThreads) {
      const float4 block = GatherSums(words + 4 * i, gemm.splits, gemm.columns, tag);
      float4& x = Residual()[i];
      x = {x.x + block.x, x.y + block.y, x.z + block.z, x.w + block.w};
    }
  }

  /// The factor of the residual's norm. `squares`: of this thread's elements.
  MARLIN_DEVICE float NormFactor(float squares, float epsilon) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if (thread_ % 32 == 0) Scratch().squares[thread_ / 32] = squares;
    __syncthreads();
    double sum = 0.0;
#pragma unroll
    for (int warp = 0; warp < kPersistentWarps; ++warp) {
      sum += static_cast<double>(Scratch().squares[warp]);
    }
    return RmsFactor(sum / args_.features, epsilon);
  }

  MARLIN_DEVICE void StoreActivations(int quad, const float4& v) {
    reinterpret_cast<uint2*>(Memory() + args_.shared.activations)[quad] = {Bf16x2::Pack(v.x, v.y),
                                                                           Bf16x2::Pack(v.z, v.w)};
  }

  /// A quad of one of the CTA's rows of the router's matrix.
  MARLIN_DEVICE float4 RouterQuad(const float* router, int row, int quad) const {
    const int64_t first = static_cast<int64_t>(blockIdx.x + row * gridDim.x) * args_.features;
    return reinterpret_cast<const float4*>(router + first)[quad];
  }

  /// Adds the block of `before`, if there is one, to the residual and normalizes it: to the
  /// activations, and for the CTA's rows of the router. Then lets the weights up to `allowed` come.
  template <bool kRoutes>
  MARLIN_DEVICE void AddAndNormalize(const PhaseGemm* before, const uint32_t* words, uint32_t tag,
                                     const float* weight, float epsilon, const PhaseGemm& gemm,
                                     int allowed, const float* router = nullptr) {
    const int quads = args_.features / 4;
    const auto* const all_weights = reinterpret_cast<const float4*>(weight);
    float4 weights[kEarlyQuads];
    float4 router_quads[kEarlyQuads];
#pragma unroll
    for (int j = 0; j < kEarlyQuads; ++j) {
      const int i = thread_ + j * kPersistentThreads;
      if (i >= quads) break;
      weights[j] = all_weights[i];
      if (kRoutes && RouterRows() > 0) router_quads[j] = RouterQuad(router, 0, i);
    }
    if (before != nullptr) AddBlock(*before, words, tag);
    if (allowed >= 0) ring_.Allow(allowed);
    float squares = 0.0f;
    for (int i = thread_; i < quads; i += kPersistentThreads) {
      const float4 x = Residual()[i];
      squares += __fmaf_rn(x.x, x.x, x.y * x.y) + __fmaf_rn(x.z, x.z, x.w * x.w);
    }
    const float factor = NormFactor(squares, epsilon);
    float dots[kMostRouterRows] = {};
#pragma unroll
    for (int j = 0; j < kMostQuads; ++j) {
      const int i = thread_ + j * kPersistentThreads;
      if (i >= quads) break;
      const float4 x = Residual()[i];
      const float4 w = j < kEarlyQuads ? weights[j % kEarlyQuads] : all_weights[i];
      const float4 y = {x.x * factor * w.x, x.y * factor * w.y, x.z * factor * w.z,
                        x.w * factor * w.w};
      StoreActivations(i, y);
      if constexpr (kRoutes) {
#pragma unroll
        for (int row = 0; row < kMostRouterRows; ++row) {
          if (row >= RouterRows()) break;
          const float4 r = row == 0 && j < kEarlyQuads ? router_quads[j % kEarlyQuads]
                                                       : RouterQuad(router, row, i);
          dots[row] += __fmaf_rn(y.x, r.x, y.y * r.y) + __fmaf_rn(y.z, r.z, y.w * r.w);
        }
      }
    }
    for (int i = quads + thread_; i < gemm.k_tiles * (kTileK / 4); i += kPersistentThreads) {
      StoreActivations(i, {0.0f, 0.0f, 0.0f, 0.0f});
    }
    if constexpr (kRoutes) SumDots(dots);
    __syncthreads();
  }

  /// Leaves the warps' parts of the router's logits in the scratch.
  MARLIN_DEVICE void SumDots(float (&dots)[kMostRouterRows]) {
#pragma unroll
    for (int row = 0; row < kMostRouterRows; ++row) {
      if (row >= RouterRows()) break;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        dots[row] += __shfl_xor_sync(~0u, dots[row], step);
      }
      if (thread_ % 32 == 0) Scratch().dots[row][thread_ / 32] = dots[row];
    }
  }

  MARLIN_DEVICE void PrepareQkv(const PersistentLayer& layer, int index) {
    constexpr auto kDown = static_cast<int>(Phase::kDown);
    // The table of the layer before is still there: the next one's comes in PrepareOut.
    const PhaseGemm* const before = index == 0 ? nullptr : &tables_.LayerOf(index - 1).gemms[kDown];
    if (index == 0) ring_.Allow(static_cast<int>(Phase::kQkv));
    AddAndNormalize<false>(before, Words(index - 1) + args_.exchange.phases[kDown], Tag(index - 1),
                           layer.attention_norm, layer.attention_epsilon, layer.gemms[0],
                           index * kPhases + static_cast<int>(Phase::kOut));
    // Everything of the layer before has been read.
    if (thread_ == 0) {
      PublishWord(Words(index) + args_.exchange.arrived + blockIdx.x, 0.0f, Tag(index));
    }
  }

  MARLIN_DEVICE void PrepareOut(const PersistentLayer& layer, int index, int* turns) {
    // Attention takes the memory of the sums.
    __syncthreads();
    CopyTable(index + 1);
    CopyExperts(layer);
    TokenAttention attention(args_, layer, position_, turns);
    attention.RequestFirst();
    uint32_t* const words = Words(index);
    const uint32_t tag = Tag(index);
    attention.Run(layer.gemms[static_cast<int>(Phase::kQkv)],
                  words + args_.exchange.phases[static_cast<int>(Phase::kQkv)],
                  words + args_.exchange.attention, tag);
    // Weights and activations take the memory of attention.
    __syncthreads();
    attention.Combine(words + args_.exchange.attention, words + args_.exchange.mixed, Scratch(),
                      tag);
    const Schedule& schedule = tables_.ScheduleOf(layer.gemms[static_cast<int>(Phase::kOut)]);
    const int quads = args_.heads * args_.value_dim / 4;
    const int first = schedule.first_k_tile * (kTileK / 4);
    for (int i = first + thread_; i < schedule.end_k_tile * (kTileK / 4); i += kPersistentThreads) {
      const uint32_t* const from = words + args_.exchange.mixed + 4 * i;
      StoreActivations(i - first, i < quads ? AwaitQuad(from, PollQuad(from), tag)
                                            : float4{0.0f, 0.0f, 0.0f, 0.0f});
    }
    if (layer.experts == nullptr) ring_.Allow(index * kPhases + static_cast<int>(Phase::kGates));
    FinishTable();
    __syncthreads();
  }

  MARLIN_DEVICE void PrepareGates(const PersistentLayer& layer, int phase) {
    constexpr auto kOut = static_cast<int>(Phase::kOut);
    const int index = phase / kPhases;
    uint32_t* const words = Words(index);
    const uint32_t tag = Tag(index);
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kGates)];
    const uint32_t* const block = words + args_.exchange.phases[kOut];
    if (layer.experts == nullptr) {
      AddAndNormalize<false>(&layer.gemms[kOut], block, tag, layer.mlp_norm, layer.mlp_epsilon,
                             gemm, phase + 1);
      PublishLogits(words, tag, [](int) { return 0.0f; });
      AwaitArrivals(words, tag);
      return;
    }
    AddAndNormalize<true>(&layer.gemms[kOut], block, tag, layer.mlp_norm, layer.mlp_epsilon, gemm,
                          -1, layer.router);
    PublishLogits(words, tag, [&](int expert) {
      float logit = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kPersistentWarps; ++warp) logit += Scratch().dots[thread_][warp];
      return layer.router_bias != nullptr ? logit + layer.router_bias[expert] : logit;
    });
    AwaitArrivals(words, tag);
    auto* const logits = reinterpret_cast<float*>(Memory() + args_.shared.logits);
    for (int e = thread_; e < args_.router.experts; e += kPersistentThreads) {
      logits[e] = AwaitWord(words + args_.exchange.logits + e, tag);
    }
    __syncthreads();
    Route(layer, logits, phase + 1);
  }

  /// Publishes logit(expert) of the CTA's rows: in layers without a router too, so that no tag is
  /// one of long ago.
  template <typename Logit>
  MARLIN_DEVICE void PublishLogits(uint32_t* words, uint32_t tag, const Logit& logit) const {
    if (thread_ >= RouterRows()) return;
    const int expert = static_cast<int>(blockIdx.x) + thread_ * static_cast<int>(gridDim.x);
    PublishWord(words + args_.exchange.logits + expert, logit(expert), tag);
  }

  /// Selects the experts, lets the weights up to `allowed` come, and computes their weights.
  MARLIN_DEVICE void Route(const PersistentLayer& layer, const float* logits, int allowed) {
    RouterArguments router;
    router.logits = logits;
    router.ids = Scratch().ids;
    router.weights = Scratch().weights;
    router.bias = layer.choice_bias;
    router.tokens = 1;
    router.experts = args_.router.experts;
    router.top_k = args_.router.top_k;
    router.scoring = args_.router.scoring;
    router.groups = args_.router.groups;
    router.top_groups = args_.router.top_groups;
    router.normalize = args_.router.normalize;
    router.scaling_factor = args_.router.scaling_factor;
    router.errors = args_.errors;
    CheckBias(router);
    TokenRouter<kPersistentWarps> route(
        router, 0, reinterpret_cast<double*>(Memory() + args_.shared.sums), Scratch().router);
    const bool valid = route.Select();
    ring_.Allow(allowed);
    // Read after the next barrier.
    if (valid && thread_ < 32) route.Weigh();
  }

  /// Waits until every CTA has read all of the layer before.
  MARLIN_DEVICE void AwaitArrivals(const uint32_t* words, uint32_t tag) const {
    for (int i = thread_; i < static_cast<int>(gridDim.x); i += kPersistentThreads) {
      AwaitWord(words + args_.exchange.arrived + i, tag);
    }
  }

  /// The gated activation of the inputs that the CTA's units need; of an expert times its weight.
  MARLIN_DEVICE void PrepareDown(const PersistentLayer& layer, int phase, int phases) {
    const int index = phase / kPhases;
    const uint32_t tag = Tag(index);
    const PhaseGemm& gates = layer.gemms[static_cast<int>(Phase::kGates)];
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kDown)];
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[static_cast<int>(Phase::kGates)];
    const Schedule& schedule = tables_.ScheduleOf(gemm);
    const int inner = gemm.weights.k;
    const int of_copy = gates.sides * gates.strips * kStripOutputs;
    const int to_up = gates.sides == 2 ? gates.strips * kStripOutputs : inner;
    constexpr int kQuadsOfTile = kTileK / 4;
#pragma unroll 1
    for (int i = thread_; i < (schedule.end_k_tile - schedule.first_k_tile) * kQuadsOfTile;
         i += kPersistentThreads) {
      const int tile = schedule.first_k_tile + i / kQuadsOfTile;
      const int segment = tile * gemm.segment_factor >> kSegmentBits;
      const int element =
          (tile - segment * gemm.weights.tiles_of_strip) * kTileK + i % kQuadsOfTile * 4;
      float4 h = {0.0f, 0.0f, 0.0f, 0.0f};
      if (element < inner) {
        const uint32_t* const from = words + segment * of_copy + element;
        const float4 g = GatherSums(from, gates.splits, gates.columns, tag);
        const float4 u = GatherSums(from + to_up, gates.splits, gates.columns, tag);
        const float factor = layer.experts == nullptr ? 1.0f
                                                      : Scratch().weights[segment] *
                                                            tables_.Chosen(segment).down_multiplier;
        h = {GateProduct<true>(args_.gate, g.x, u.x) * factor,
             GateProduct<true>(args_.gate, g.y, u.y) * factor,
             GateProduct<true>(args_.gate, g.z, u.z) * factor,
             GateProduct<true>(args_.gate, g.w, u.w) * factor};
      }
      StoreActivations(i, h);
    }
    if (phase + 1 < phases) ring_.Allow(phase + 1);
    __syncthreads();
  }

  /// Adds the warps' sums of the CTA's units and publishes them, with their biases.
  MARLIN_DEVICE void Publish(const PersistentLayer& layer, int index, Phase phase,
                             const Schedule& schedule, const float* sums) const {
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(phase)];
    uint32_t* const words = Words(index) + args_.exchange.phases[static_cast<int>(phase)];
    // Words that other layers have are written in every layer, so that no tag is one of long ago.
    for (int i = gemm.splits * gemm.columns + static_cast<int>(blockIdx.x) * kPersistentThreads +
                 thread_;
         i < args_.exchange.phase_words[static_cast<int>(phase)];
         i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      PublishWord(words + i, 0.0f, Tag(index));
    }
    const int local = thread_ / kStripOutputs;
    if (local >= schedule.units) return;
    const int output = thread_ % kStripOutputs;
    const ScheduledUnit unit = UnitAt(schedule, local);
    const int n = static_cast<int>(unit.output) + output;
    const bool adds_bias = unit.first_split != 0 && n < gemm.n;
    float value = SumOfWarps(unit, sums + local * kPersistentWarps * kStripOutputs + output);
    const float* bias = gemm.bias;
    if (layer.experts == nullptr || phase < Phase::kGates) {
      value *= unit.side == 0 ? gemm.weights.multiplier : gemm.up_multiplier;
    } else if (phase == Phase::kGates) {
      const PersistentExpert& expert = tables_.Chosen(unit.copy);
      value *= unit.side == 0 ? expert.gate_multiplier : expert.up_multiplier;
      bias = expert.gate_bias;
    } else if (adds_bias) {
      // The multipliers are in the inputs.
      value += BiasOfDowns(n);
    }
    if (bias != nullptr && adds_bias) value += bias[unit.side * gemm.n + n];
    PublishWord(words + unit.word + output, value, Tag(index));
  }

  /// The weighted biases of the selected experts' outputs.
  MARLIN_DEVICE float BiasOfDowns(int n) const {
    float sum = 0.0f;
    for (int i = 0; i < args_.router.top_k; ++i) {
      const float* const bias = tables_.Chosen(i).down_bias;
      if (bias != nullptr) sum += Scratch().weights[i] * bias[n];
    }
    return sum;
  }

  const PersistentArguments& args_;
  int thread_;
  Tables tables_;
  TileRing ring_;
  uint32_t clock_;
  int position_;
};

template <CodeKind kKind>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    PersistentKernel(const __grid_constant__ PersistentArguments args) {
  PersistentBlock block(args);
  block.Begin();
  block.Run<kKind>();
  block.End();
}

}  // namespace marlin::cuda
