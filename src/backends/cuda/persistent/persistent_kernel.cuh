// Decode of one token by one launch: all layers of a model in a kernel whose CTAs stay.
//
//   The CTAs, one per multiprocessor, run the phases of a layer together and exchange what a phase
//   needs of the previous one through global memory (persistent_exchange.cuh):
//
//     phase    before it, in every CTA                             it publishes
//     kQkv     residual += downs; norm                             queries, keys, values
//     kOut     attention of a KV head's keys; merge of the parts   the attention block
//     kGates   residual += block; norm; router: a row of logits,   gates and ups
//              then the top-k selection
//     kDown    gated activation                                    the MLP block
//
//   In a hybrid model (PersistentForm) kOut comes after attention or a gated delta net's row
//   (persistent_delta.cuh). Attention may run elsewhere (persistent_between.cuh): then a run begins
//   with kOut, whose inputs are in memory, or ends with kQkv, whose sums it stores.
//
//   Split-K has no reduction of its own: units publish partial sums, and readers add them in a
//   fixed order, so a step's bits do not depend on timing. The residual and the selection are
//   computed by every CTA alike. Weights stream into shared memory ahead of the phases
//   (persistent_tiles.cuh). Nothing that depends on the token is a kernel parameter.
//
//   The CTAs wait for each other, so all of them have to be resident: the launch is cooperative.
#pragma once

#include <type_traits>

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/persistent/persistent_attention.cuh"
#include "backends/cuda/persistent/persistent_between.cuh"
#include "backends/cuda/persistent/persistent_delta.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_outputs.cuh"
#include "backends/cuda/persistent/persistent_router.cuh"
#include "backends/cuda/persistent/persistent_rows.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

MARLIN_DEVICE float Dot(const float4& y, const float4& r) {
  return __fmaf_rn(y.x, r.x, y.y * r.y) + __fmaf_rn(y.z, r.z, y.w * r.w);
}

/// A CTA of the kernel.
template <CodeKind kKind, PersistentForm kForm, bool kLimbs>
class PersistentBlock {
 public:
  MARLIN_DEVICE explicit PersistentBlock(const PersistentArguments& args)
      : args_(args), thread_(static_cast<int>(threadIdx.x)), tables_{args}, ring_(args) {}

  /// The parts of shared memory that are there before the first layer.
  MARLIN_DEVICE void Begin() {
    if constexpr (!kBetween) ReadResidual();
    if (thread_ < kMostChosenExperts) {
      const int of_shared = thread_ - args_.router.top_k;
      Scratch().ids[thread_] = of_shared < 0 ? 0 : args_.router.experts + of_shared;
    }
    if (thread_ == 0) FindParts();
    if constexpr (kBetween) {
      BeginBetween(args_);
      ReadResidual();
      if (thread_ == 0) Scratch().clock = args_.clock[0];
      SyncFirst<kPersistentThreads>();
      PublishArrival(0);
    } else {
      BeginTables<kForm>(args_);
    }
  }

  /// Runs all layers, and stores the residual. Every part is called from one place: code that is
  /// inlined twice would not stay in the instruction cache from layer to layer.
  MARLIN_DEVICE void Run() {
    const int phases = args_.end_phase;
#pragma unroll 1
    for (int phase = args_.first_phase;; ++phase) {
      const auto which = PhaseOf(phase);
      const bool normalizes = which == Phase::kQkv || which == Phase::kGates;
      // Sums that are multiplied by a norm's factor.
      const bool scales =
          normalizes || (kBetween && which == Phase::kOut && phase != args_.first_phase);
      if (phase == phases) {
        // The next kernel finds room once CTAs have ended, and waits for all that they store.
        if constexpr (kBetween) TriggerDependentLaunch();
        EndRun(phase);
        break;
      }
      if (normalizes) {
        AwaitLayer(which == Phase::kQkv ? LayerBarrier::kLayer : LayerBarrier::kMlp,
                   phase / kPhases);
      } else if (!kAttends && phase == args_.first_phase) {
        AwaitLayer(LayerBarrier::kLayer, phase / kPhases);
      }
      if constexpr (kAttends) {
        if (which == Phase::kOut) Attend(phase);
      }
      const PersistentOutputs outputs(args_, phase, tables_.ScheduleOf(tables_.GemmOf(phase)));
      PhaseStart start;
      PersistentOutputs::Published published;
      // These do not depend on the phase's inputs, so they are found before those are there.
      const auto find = [&] {
        start = PhaseStart::Of<kForm, kLimbs>(tables_, phase);
        if constexpr (kFindsEarly) published = outputs.template FindPublished<kForm>();
      };
      PrepareInputs(phase, find);
      const bool routes = LayerOf(phase).experts != nullptr;
      // Copies run a phase ahead, except experts' tiles, which the router chooses.
      const bool awaits_router = routes && (which == Phase::kOut || which == Phase::kGates);
      if (phase == args_.first_phase && which == Phase::kQkv) AllowCopies(Phase::kQkv);
      if (!awaits_router) AllowCopies(static_cast<Phase>((phase + 1) % kPhases));
      SyncFirst<kPersistentThreads>();
      if (!kBetween && which == Phase::kQkv) PublishArrival(phase / kPhases);
      if (which == Phase::kGates) Route(phase);
      if (scales) StoreNormFactor(phase);
      ring_.template Begin<kForm>(phase);
      // A norm needs all k.
      MultiplyPhase<kKind, kForm, kLimbs>(args_, phase, start,
                                          normalizes ? 0 : start.schedule->first_k_tile, ring_);
      if constexpr (!kFindsEarly) published = outputs.template FindPublished<kForm>();
      const PersistentOutputs::Finish finish = outputs.FindFinish();
      SyncFirst<kPersistentThreads>();
      outputs.Publish(published, finish, scales ? Scratch().norm : 1.0f);
    }
    EndLaunch();
  }

 private:
  static constexpr bool kHybrid = kForm == PersistentForm::kHybrid;
  static constexpr bool kBetween = kForm == PersistentForm::kBetween;
  static constexpr bool kAttends = !kHybrid && !kBetween;  ///< In every layer.
  /// The other forms lack registers for finding outputs early, and for as many words in flight.
  static constexpr bool kFindsEarly = kForm == PersistentForm::kToken || kBetween;

  MARLIN_DEVICE void ReadResidual() const {
    auto* const residual = Residual();
    for (int i = thread_; i < args_.features / 4; i += kPersistentThreads) {
      residual[i] = reinterpret_cast<const float4*>(args_.hidden)[i];
    }
  }

  /// The inputs of a phase, as activations. Calls meanwhile() once, before they are there.
  template <typename Meanwhile>
  MARLIN_DEVICE void PrepareInputs(int phase, const Meanwhile& meanwhile) {
    const auto which = PhaseOf(phase);
    const bool normalizes = which == Phase::kQkv || which == Phase::kGates;
    if (kFindsEarly && normalizes) return Normalize(phase, meanwhile);
    meanwhile();
    if (normalizes) {
      Normalize(phase, Nothing());
    } else if (which == Phase::kDown) {
      PrepareDown(phase);
    } else if constexpr (kHybrid) {
      PrepareMixed<kLimbs>(args_, phase, Words(phase / kPhases), Tag(phase / kPhases));
    } else if constexpr (kAttends) {
      GatherMixed(phase);
    } else if (phase == args_.first_phase) {
      GatherResults<kLimbs>(args_, tables_.GemmOf(phase), 1);
    } else {
      ProjectionsOf(phase).template PrepareQueries<kLimbs>();
    }
  }

  /// End after the last phase: adds its sums to the residual, or stores the last projections.
  MARLIN_DEVICE void EndRun(int phase) {
    const int index = phase / kPhases;
    if (kBetween && phase % kPhases != static_cast<int>(Phase::kQkv)) {
      ProjectionsOf(phase).Store();
    } else if (kHybrid && phase % kPhases == static_cast<int>(Phase::kOut)) {
      const uint32_t* const sums =
          Words(index) + args_.exchange.phases[static_cast<int>(Phase::kQkv)];
      StoreProjected(args_, tables_.GemmOf(phase - 1), sums, Tag(index), 1,
                     static_cast<int>(gridDim.x));
    } else {
      AddBlock(phase);
    }
  }

  /// Stores the residual, and advances the clocks.
  MARLIN_DEVICE void EndLaunch() const {
    SyncFirst<kPersistentThreads>();
    for (int i = static_cast<int>(blockIdx.x) * kPersistentThreads + thread_;
         i < args_.features / 4; i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      reinterpret_cast<float4*>(args_.hidden)[i] = Residual()[i];
    }
    // All CTAs have read the clock: this one has had sums of each since.
    if (blockIdx.x != 0 || thread_ != 0) return;
    args_.clock[0] = Scratch().clock + args_.layer_count;
    if constexpr (!kHybrid) return;
    args_.clock[1] = Scratch().attention_clock + args_.attention_layers;
    args_.clock[2] = Scratch().delta_clock + args_.delta_layers;
  }

  MARLIN_DEVICE const PersistentLayer& LayerOf(int phase) const {
    return tables_.LayerOf(phase / kPhases);
  }
  static MARLIN_DEVICE uint32_t Base() { return SharedAddress(Memory()); }
  MARLIN_DEVICE PersistentScratch& Scratch() const { return tables_.Scratch(); }
  MARLIN_DEVICE float4* Residual() const {
    return reinterpret_cast<float4*>(Memory() + ResidualAt(false));
  }
  /// The exchange buffer of a layer, and its tag.
  MARLIN_DEVICE uint32_t* Words(int layer) const {
    return args_.words + ((Scratch().clock + layer) & 1) * args_.exchange.words;
  }
  MARLIN_DEVICE uint32_t Tag(int layer) const { return TagOf(Scratch().clock + layer); }

  /// The CTA's part of attention and of the router: once, since divisions take a hundred clocks.
  MARLIN_DEVICE void FindParts() const {
    const auto block = static_cast<int>(blockIdx.x);
    PersistentScratch& scratch = Scratch();
    const auto blocks = static_cast<int>(gridDim.x);
    scratch.router_rows = max(args_.router.rows() - block + blocks - 1, 0) / blocks;
    if (kBetween || (kHybrid && args_.kv_heads == 0)) return;
    scratch.sequence = 0;
    scratch.kv_head = block / args_.attention_splits;
    scratch.split = block - scratch.kv_head * args_.attention_splits;
    FindKeys<kForm>(args_);
  }

  /// residual += the sums of the phase before, of kCount quads from quad `first` on, of which the
  /// thread has every kPersistentThreads-th, and those that there are. Returns them. Calls
  /// meanwhile() once.
  template <int kCount, typename Meanwhile = Nothing>
  MARLIN_DEVICE void AddQuads(int phase, int first, float4 (&x)[kCount],
                              const Meanwhile& meanwhile = {}) {
    const int quads = args_.features / 4;
    int places[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int quad = first + i * kPersistentThreads;
      places[i] = quad < quads ? 4 * quad : -1;
      x[i] = places[i] >= 0 ? Residual()[quad] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    if (phase == args_.first_phase) return meanwhile();
    const int index = (phase - 1) / kPhases;
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[(phase + kPhases - 1) % kPhases];
    const PhaseGemm& gemm = tables_.GemmOf(phase - 1);
    float4 block[kCount];
    constexpr int kSplits = 4 / kCount;
    GatherSums<kSplits>(words, places, gemm.splits, gemm.columns, Tag(index), block, meanwhile);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (places[i] < 0) break;
      x[i] = {x[i].x + block[i].x, x[i].y + block[i].y, x[i].z + block[i].z, x[i].w + block[i].w};
      Residual()[first + i * kPersistentThreads] = x[i];
    }
  }
  /// residual += the sums of the phase before.
  MARLIN_DEVICE void AddBlock(int phase) {
#pragma unroll 1
    for (int i = thread_; i < args_.features / 4; i += kPersistentThreads) {
      float4 x[1];
      AddQuads(phase, i, x);
    }
  }

  /// AddBlock; then stores the residual times its norm's weights as activations, with zeros up to
  /// whole tiles. All sums share the norm's factor and are multiplied by it at the end
  /// (NormFactor), so that nothing waits for it. With a router, or a gated delta net's write and
  /// decay, also stores the warps' parts of their dot products, without the factor. Calls
  /// meanwhile() once, when the first inputs are requested.
  template <typename Meanwhile>
  MARLIN_DEVICE void Normalize(int phase, const Meanwhile& meanwhile) {
    const int quads = args_.features / 4;
    const bool attends = phase % kPhases == static_cast<int>(Phase::kQkv);
    const PersistentLayer& layer = LayerOf(phase);
    const auto* const weights =
        reinterpret_cast<const float4*>(Memory() + args_.shared.norms) + (attends ? 0 : quads);
    int rows = layer.router != nullptr && !attends ? Scratch().router_rows : 0;
    int rows_at = args_.shared.router;
    if (kHybrid && attends) {
      rows_at = args_.shared.delta_rows;
      const bool mixes =
          layer.delta_rows != nullptr && Scratch().delta.head < args_.delta.value_heads;
      rows = mixes ? 2 : 0;
    }
    const auto* router = reinterpret_cast<const float4*>(Memory() + rows_at);
    float sums[2] = {};  // The squares, and the first row's products.
    if (quads > kPersistentThreads) {
      NormalizeQuads<2>(phase, weights, rows > 0 ? router : nullptr, sums, meanwhile);
    } else {
      NormalizeQuads<1>(phase, weights, rows > 0 ? router : nullptr, sums, meanwhile);
    }
    StoreWarpSums(sums, Scratch().squares, Scratch().dots[0]);
#pragma unroll 1
    for (int row = 1; row < rows; ++row) {
      router += quads;
      float dots[1] = {};
#pragma unroll 1
      for (int i = thread_; i < quads; i += kPersistentThreads) {
        dots[0] += Dot(Times(Residual()[i], weights[i]), router[i]);
      }
      StoreWarpSums(dots, Scratch().dots[row]);
    }
  }
  /// `router`: a row's weights, or null.
  template <int kCount, typename Meanwhile>
  MARLIN_DEVICE void NormalizeQuads(int phase, const float4* weights, const float4* router,
                                    float (&sums)[2], const Meanwhile& meanwhile) {
    const int quads = args_.features / 4;
    const int padded = tables_.GemmOf(phase).k_tiles * (kTileK / 4);
    // All threads have a first turn, in which they call meanwhile().
    const int end = kFindsEarly ? max(padded, kPersistentThreads) : padded;
#pragma unroll 1
    for (int first = thread_; first < end; first += kCount * kPersistentThreads) {
      float4 x[kCount];
      AddQuads(phase, first, x, [&] {
        if (first < kPersistentThreads) meanwhile();
      });
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int quad = first + i * kPersistentThreads;
        if (quad >= padded) break;
        float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
        if (quad < quads) y = Times(x[i], weights[quad]);
        StoreActivations<kLimbs>(args_, quad, y);
        if (quad >= quads) break;
        sums[0] += Squares(x[i]);
        if (router != nullptr) sums[1] += Dot(y, router[quad]);
      }
    }
  }
  /// Says that this CTA has read everything of the previous layer.
  MARLIN_DEVICE void PublishArrival(int index) const {
    if (thread_ != 0) return;
    PublishWord(Words(index) + args_.exchange.arrived + blockIdx.x, 0.0f, Tag(index));
  }

  /// Routes the token, if the layer has experts, whose tiles may then be copied.
  MARLIN_DEVICE void Route(int phase) {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const bool awaits = thread_ < static_cast<int>(gridDim.x);
    const uint32_t* const others = Words(index) + args_.exchange.arrived + thread_;
    const uint32_t arrived = awaits ? PollWord(others) : 0;
    const ExpertChoice<HasSharedExperts(kForm), HasSigmoids(kForm)> choice(
        args_, layer, Words(index) + args_.exchange.logits, Tag(index));
    choice.PublishLogits();
    if constexpr (kHybrid) DeltaRow(args_, layer).StoreWindow();
    // Every CTA has read all of the layer before.
    if (awaits) AwaitWord(others, arrived, Tag(index));
    if (layer.router == nullptr) return;
    choice.Route();
    AllowCopies(Phase::kGates);
    AllowCopies(Phase::kDown);
  }

  MARLIN_DEVICE void Attend(int phase) {
    const int index = phase / kPhases;
    // Attention takes the memory of the sums.
    SyncFirst<kPersistentThreads>();
    uint32_t* const parts = Words(index) + args_.exchange.attention;
    uint32_t* const mixed = Words(index) + args_.exchange.mixed;
    TokenAttention<kForm>(args_, LayerOf(phase), ProjectedBy(phase))
        .Run(parts, mixed, index, Tag(index));
    // Weights and activations take the memory of attention.
    SyncFirst<kPersistentThreads>();
    MergeOf(phase).Combine(parts, mixed, Tag(index));
  }

  MARLIN_DEVICE LatentProjections ProjectionsOf(int phase) const {
    const int index = phase / kPhases;
    return {args_, LayerOf(phase), Words(index), Tag(index)};
  }
  MARLIN_DEVICE ProjectedWords ProjectedBy(int phase) const {
    const int index = phase / kPhases;
    constexpr auto kQkv = static_cast<int>(Phase::kQkv);
    return {LayerOf(phase).gemms[kQkv], 1, Words(index) + args_.exchange.phases[kQkv], Tag(index)};
  }
  MARLIN_DEVICE AttentionMerge<kForm> MergeOf(int phase) const {
    return AttentionMerge<kForm>(args_, LayerOf(phase), ProjectedBy(phase));
  }

  /// Gathers the results of attention that the CTA's units need.
  MARLIN_DEVICE void GatherMixed(int phase) {
    const int index = phase / kPhases;
    const uint32_t* const words = Words(index);
    const Schedule& schedule = tables_.ScheduleOf(tables_.GemmOf(phase));
    const int quads = args_.heads * args_.value_dim / 4;
    const int first = schedule.first_k_tile * (kTileK / 4);
    const int end = schedule.end_k_tile * (kTileK / 4);
    const AttentionMerge<kForm> merge = MergeOf(phase);
    if (merge.ReadersMerge()) {
#pragma unroll 1
      for (int i = first + thread_; i < end; i += kPersistentThreads) {
        float4 result = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i < quads) {
          const int head = QuotientOf(4 * i, args_.value_dim);
          result = merge.GatherMerged(words + args_.exchange.attention, head,
                                      4 * i - head * args_.value_dim, Tag(index));
        }
        StoreActivations<kLimbs>(args_, i - first, result);
      }
      return;
    }
    constexpr int kAtOnce = 2;
#pragma unroll 1
    for (int i = first + thread_; i < end; i += kAtOnce * kPersistentThreads) {
      const AwaitedQuads<kAtOnce> mixed(
          words + args_.exchange.mixed + 4 * i, Tag(index),
          [](int q) { return 4 * q * kPersistentThreads; },
          [&](int q) { return i + q * kPersistentThreads < min(quads, end); });
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        const int quad = i + q * kPersistentThreads;
        if (quad >= end) break;
        StoreActivations<kLimbs>(args_, quad - first,
                                 quad < quads ? mixed.Value(q) : float4{0.0f, 0.0f, 0.0f, 0.0f});
      }
    }
  }

  /// The gated activation of the inputs that the CTA's units need; of an expert times its weight.
  MARLIN_DEVICE void PrepareDown(int phase) {
    // A thread awaits several elements together, or several splits of one.
    if (LayerOf(phase).gemms[static_cast<int>(Phase::kGates)].splits == 1) {
      ActivateGates<2, 1>(phase);
    } else {
      ActivateGates<1, 2>(phase);
    }
  }
  template <int kElements, int kSplits>
  MARLIN_DEVICE void ActivateGates(int phase) {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const PhaseGemm& gates = layer.gemms[static_cast<int>(Phase::kGates)];
    const PhaseGemm& gemm = layer.gemms[static_cast<int>(Phase::kDown)];
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[static_cast<int>(Phase::kGates)];
    const Schedule& schedule = tables_.ScheduleOf(gemm);
    const int inner = gemm.weights.k;
    const int of_copy = gates.copy_strips * kStripOutputs;
    const int to_up = gates.sides == 2 ? gates.strips * kStripOutputs : inner;
    constexpr int kQuadsOfTile = kTileK / 4;
    const int quads = (schedule.end_k_tile - schedule.first_k_tile) * kQuadsOfTile;
#pragma unroll 1
    for (int first = thread_; first < quads; first += kElements * kPersistentThreads) {
      int places[2 * kElements];
      float factors[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int i = first + e * kPersistentThreads;
        const int tile = schedule.first_k_tile + i / kQuadsOfTile;
        const int segment = tile * gemm.segment_factor >> kSegmentBits;
        const int element =
            (tile - segment * gemm.weights.tiles_of_strip) * kTileK + i % kQuadsOfTile * 4;
        const bool exists = i < quads && element < inner;
        places[2 * e] = exists ? segment * of_copy + element : -1;
        places[2 * e + 1] = exists ? places[2 * e] + to_up : -1;
        factors[e] = 1.0f;
        if (exists && layer.experts != nullptr) {
          factors[e] = Scratch().weights[segment] * tables_.Chosen(segment).down_multiplier;
        }
      }
      float4 sums[2 * kElements];
      GatherSums<kSplits>(words, places, gates.splits, gates.columns, Tag(index), sums);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int i = first + e * kPersistentThreads;
        if (i >= quads) break;
        // Zeros where there is no element.
        StoreActivations<kLimbs>(
            args_, i, GateProducts(args_.gate, sums[2 * e], sums[2 * e + 1], factors[e]));
      }
    }
  }

  /// The norm's factor, by a warp that has few tiles and does not weigh experts.
  MARLIN_DEVICE void StoreNormFactor(int phase) const {
    if (thread_ / 32 != kPersistentWarps - 2) return;
    const PersistentLayer& layer = LayerOf(phase);
    const auto which = PhaseOf(phase);
    float epsilon = which == Phase::kQkv ? layer.attention_epsilon : layer.mlp_epsilon;
    int count = args_.features;
    if (kBetween && which == Phase::kOut) {
      epsilon = layer.query_epsilon;
      count = layer.gemms[static_cast<int>(Phase::kQkv)].n;
    }
    const float factor = NormFactor(Scratch(), count, epsilon);
    if (thread_ % 32 == 0) Scratch().norm = factor;
  }

  const PersistentArguments& args_;
  int thread_;
  Tables tables_;
  TileRing ring_;
};

/// The warpgroup that copies: two warps copy tiles, the two between them the mixers' inputs, where
/// the kernel has mixers.
template <PersistentForm kForm>
MARLIN_DEVICE void RunCopiers(const PersistentArguments& args) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < kFirstKeyCopier || thread >= kFirstKeyCopier + kKeyCopiers) {
    TileCopier<kForm>(args, thread < kFirstKeyCopier ? 0 : 1).Run();
  } else if (thread < kFirstKeyCopier + kKeyCopiers) {
    if constexpr (kForm == PersistentForm::kHybrid) {
      CopyMixers(args, thread - kFirstKeyCopier);
    } else if constexpr (!IsBetween(kForm)) {
      CopyKeys<kForm>(args, thread - kFirstKeyCopier);
    }
  }
}

/// `kLimbs`: the activations are limbs.
template <CodeKind kKind, PersistentForm kForm, bool kLimbs = HasLimbs(kKind, 1)>
__global__ void __launch_bounds__(kPersistentBlock, 1)
    PersistentKernel(const __grid_constant__ PersistentArguments args) {
  constexpr bool kHybrid = kForm == PersistentForm::kHybrid;
  using Block = std::conditional_t<IsRows(kForm), PersistentRows<kKind, kForm, kLimbs>,
                                   PersistentBlock<kKind, kForm, kLimbs>>;
  if (!IsBetween(kForm) && threadIdx.x == 0) {
    PersistentScratch& scratch = Tables{args}.Scratch();
    scratch.clock = args.clock[0];
    scratch.position = *args.position;
    if constexpr (kHybrid) {
      scratch.attention_clock = args.clock[1];
      scratch.delta_clock = args.clock[2];
      scratch.delta = DeltaPartOf(args);
    }
  }
  if (threadIdx.x >= kPersistentThreads && threadIdx.x < kFirstKeyCopier) {
    TileCopier<kForm>::InitBarriers(args);
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= kPersistentThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    RunCopiers<kForm>(args);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
  Block block(args);
  block.Begin();
  block.Run();
}

template <typename Tiles, PersistentForm kForm>
const void* PersistentFunction(bool limbs) {
  constexpr CodeKind kKind = Tiles::kCodes;
  if constexpr (IsRows(kForm)) {
    if (!limbs) return reinterpret_cast<const void*>(&PersistentKernel<kKind, kForm, false>);
  }
  return reinterpret_cast<const void*>(&PersistentKernel<kKind, kForm>);
}

template <typename Tiles>
const void* PersistentKernels::Function(const Variant& variant) {
  const bool limbs = variant.limbs;
  switch (variant.form) {
    case PersistentForm::kToken:
      return PersistentFunction<Tiles, PersistentForm::kToken>(limbs);
    case PersistentForm::kHybrid:
      return PersistentFunction<Tiles, PersistentForm::kHybrid>(limbs);
    case PersistentForm::kRows:
      return PersistentFunction<Tiles, PersistentForm::kRows>(limbs);
    case PersistentForm::kGeneral:
      return PersistentFunction<Tiles, PersistentForm::kGeneral>(limbs);
    case PersistentForm::kGeneralRows:
      return PersistentFunction<Tiles, PersistentForm::kGeneralRows>(limbs);
    case PersistentForm::kBetween:
      return PersistentFunction<Tiles, PersistentForm::kBetween>(limbs);
    case PersistentForm::kBetweenRows:
      return PersistentFunction<Tiles, PersistentForm::kBetweenRows>(limbs);
  }
  return nullptr;
}

}  // namespace marlin::cuda
