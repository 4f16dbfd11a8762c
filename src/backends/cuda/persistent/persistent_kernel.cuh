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
//   In a hybrid model (PersistentKernels::Variant) kOut comes after attention or a gated delta
//   net's row (persistent_delta.cuh). Attention may run elsewhere: then a run begins with kOut,
//   whose inputs are in memory, or ends with kQkv, whose sums it stores.
//
//   Split-K has no reduction of its own: units publish partial sums, and readers add them in a
//   fixed order, so a step's bits do not depend on timing. The residual and the selection are
//   computed by every CTA alike. Weights stream into shared memory ahead of the phases
//   (persistent_tiles.cuh). Nothing that depends on the token is a kernel parameter.
//
//   The CTAs wait for each other, so all of them have to be resident: the launch is cooperative.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/persistent/persistent_attention.cuh"
#include "backends/cuda/persistent/persistent_delta.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_router.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// A CTA of the kernel.
template <bool kHybrid>
class PersistentBlock {
 public:
  MARLIN_DEVICE explicit PersistentBlock(const PersistentArguments& args)
      : args_(args), thread_(static_cast<int>(threadIdx.x)), tables_{args}, ring_(args) {}

  /// The parts of shared memory that are there before the first layer.
  MARLIN_DEVICE void Begin() {
    auto* const rotations = reinterpret_cast<float2*>(Memory() + args_.shared.rotations);
    for (int pair = thread_; pair < args_.pairs; pair += kPersistentThreads) {
      RotationOf(args_.frequencies[pair], Scratch().position, args_.rotary_factor,
                 &rotations[pair].x, &rotations[pair].y);
    }
    auto* const residual = Residual();
    for (int i = thread_; i < args_.features / 4; i += kPersistentThreads) {
      residual[i] = reinterpret_cast<const float4*>(args_.hidden)[i];
    }
    if (thread_ < kMostChosenExperts) {
      Scratch().ids[thread_] = thread_ == args_.router.top_k ? args_.router.experts : 0;
    }
    if (blockIdx.x == 0 && thread_ == 0) CheckPosition();
    const auto* const schedules = reinterpret_cast<const uint4*>(
        args_.schedules + static_cast<int64_t>(blockIdx.x) * args_.schedule_bytes);
    for (int i = thread_; i < args_.schedule_bytes / 16; i += kPersistentThreads) {
      CopyAsync16(Base() + args_.shared.schedules + i * 16, schedules + i, 16);
    }
    if (thread_ == 0) FindParts();
    WaitForAllCopies();
    SyncFirst<kPersistentThreads>();
    FindPages();
    SyncFirst<kPersistentThreads>();
  }

  /// Runs all layers, and stores the residual. Every part is called from one place: code that is
  /// inlined twice would not stay in the instruction cache from layer to layer.
  template <CodeKind kKind>
  MARLIN_DEVICE void Run() {
    const int phases = args_.end_phase;
#pragma unroll 1
    for (int phase = args_.first_phase;; ++phase) {
      const auto which = static_cast<Phase>(phase % kPhases);
      const bool normalizes = which == Phase::kQkv || which == Phase::kGates;
      float squares = 0.0f;
      if (normalizes) {
        squares = AddBlock(phase);
        if (phase == phases) break;
        AwaitLayer(args_, which == Phase::kQkv ? LayerBarrier::kLayer : LayerBarrier::kMlp,
                   phase / kPhases);
      } else if (which == Phase::kOut) {
        if constexpr (kHybrid) {
          uint32_t* const words = Words(phase / kPhases);
          if (phase == phases) {
            StoreProjected(args_, tables_.GemmOf(phase - 1), words, Tag(phase / kPhases));
            break;
          }
          PrepareMixed(args_, phase, words, Tag(phase / kPhases));
        } else {
          PrepareOut(phase);
        }
      } else {
        PrepareDown(phase);
      }
      const bool routes = LayerOf(phase).experts != nullptr;
      // Copies run a phase ahead, but for experts' tiles, which the router chooses.
      const bool awaits_router = routes && (which == Phase::kOut || which == Phase::kGates);
      if (phase == args_.first_phase && which == Phase::kQkv) AllowCopies(args_, Phase::kQkv);
      if (!awaits_router) AllowCopies(args_, static_cast<Phase>((phase + 1) % kPhases));
      if (normalizes) {
        PrepareNormalized(phase, squares);
        if (awaits_router) {
          AllowCopies(args_, Phase::kGates);
          AllowCopies(args_, Phase::kDown);
        }
      }
      SyncFirst<kPersistentThreads>();
      ring_.Begin(phase);
      const Schedule& schedule = tables_.ScheduleOf(tables_.GemmOf(phase));
      auto* const sums = reinterpret_cast<float*>(Memory() + args_.shared.sums);
      // A norm needs all k.
      Multiply<kKind>(phase, schedule, normalizes ? 0 : schedule.first_k_tile, sums);
      const Published published = FindPublished(phase, schedule);
      SyncFirst<kPersistentThreads>();
      Publish(phase, published, sums);
    }
    Finish();
  }

 private:
  static constexpr int kTeams = TeamsOf(kHybrid);

  /// The products of the CTA's tiles. `first_tile`: of k, with which the activations begin.
  template <CodeKind kKind>
  MARLIN_DEVICE void Multiply(int phase, const Schedule& schedule, int first_tile, float* sums) {
    const PhaseGemm& gemm = tables_.GemmOf(phase);
    const bool is_low = SlotOrder::IsLow(phase);
    const uint32_t activations = Base() + args_.shared.activations;
    switch (gemm.use) {
      case ParameterUse::kOneScale:
        MultiplyTiles<kKind, ParameterUse::kOneScale, kHybrid>(gemm, schedule, activations,
                                                               first_tile, is_low, sums, ring_);
        break;
      case ParameterUse::kScales:
        MultiplyTiles<kKind, ParameterUse::kScales, kHybrid>(gemm, schedule, activations,
                                                             first_tile, is_low, sums, ring_);
        break;
      default:
        MultiplyTiles<kKind, ParameterUse::kAll, kHybrid>(gemm, schedule, activations, first_tile,
                                                          is_low, sums, ring_);
    }
  }

  /// Stores the residual, and advances the clocks.
  MARLIN_DEVICE void Finish() const {
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
    return reinterpret_cast<float4*>(Memory() + args_.shared.residual);
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
    if (kHybrid && args_.kv_heads == 0) return;
    scratch.kv_head = block / args_.attention_splits;
    scratch.split = block - scratch.kv_head * args_.attention_splits;
    scratch.head = block * 32 / args_.value_dim;
    scratch.head_kv_head = scratch.head / args_.group;
    for (int group = 0; group < kMostCacheGroups; ++group) {
      if (!HasKeys(group)) continue;
      scratch.attention[group] = PartOf(args_, group, Scratch().position, kTeams);
    }
  }
  MARLIN_DEVICE bool HasKeys(int group) const {
    return args_.groups[group].block_table != nullptr && (args_.key_groups >> group & 1) != 0;
  }

  /// The pages of the CTA's first keys and of the new one.
  MARLIN_DEVICE void FindPages() const {
    if (thread_ > kTeams) return;
    for (int group = 0; group < kMostCacheGroups; ++group) {
      if (!HasKeys(group)) continue;
      AttentionPart& part = Scratch().attention[group];
      const int block =
          thread_ < kTeams ? part.first_block + thread_ : Scratch().position / kWarpKeys;
      if (block < part.first_block || block >= part.end_block) continue;
      uint8_t* const page = FindPage(args_, group, block * kWarpKeys);
      if (thread_ < kTeams) {
        part.pages[thread_] = page;
      } else {
        part.fresh = page;
      }
    }
  }

  MARLIN_DEVICE void CheckPosition() const {
    if (args_.key_groups == 0) return;
    if (Scratch().position < 0) {
      RecordError(args_.errors, ValueError::kPosition, Scratch().position, 0);
      return;
    }
    const int block = Scratch().position / kCachePageTokens;
    for (int group = 0; group < kMostCacheGroups; ++group) {
      const CacheGroup& pages = args_.groups[group];
      if (!HasKeys(group) || block < pages.blocks) continue;
      RecordError(args_.errors, ValueError::kBlock, Scratch().position, block, pages.blocks);
    }
  }

  /// residual += the sums of the phase before. Returns the squares of the thread's elements.
  MARLIN_DEVICE float AddBlock(int phase) {
    const int index = (phase - 1) / kPhases;
    const uint32_t* const words =
        Words(index) + args_.exchange.phases[(phase + kPhases - 1) % kPhases];
    float squares = 0.0f;
#pragma unroll 1
    for (int i = thread_; i < args_.features / 4; i += kPersistentThreads) {
      float4 x = Residual()[i];
      if (phase > args_.first_phase) {
        const PhaseGemm& gemm = tables_.GemmOf(phase - 1);
        const float4 block = GatherSums(words + 4 * i, gemm.splits, gemm.columns, Tag(index));
        x = {x.x + block.x, x.y + block.y, x.z + block.z, x.w + block.w};
        Residual()[i] = x;
      }
      squares += __fmaf_rn(x.x, x.x, x.y * x.y) + __fmaf_rn(x.z, x.z, x.w * x.w);
    }
    return squares;
  }

  /// The factor of the residual's norm. `squares`: of this thread's elements.
  MARLIN_DEVICE float NormFactor(float squares, float epsilon) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if (thread_ % 32 == 0) Scratch().squares[thread_ / 32] = squares;
    SyncFirst<kPersistentThreads>();
    // Every warp adds the warps' parts, in the same order.
    float sum = Scratch().squares[thread_ % kPersistentWarps];
#pragma unroll
    for (int step = kPersistentWarps / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
    }
    return rsqrtf(__fdividef(sum, static_cast<float>(args_.features)) + epsilon);
  }

  /// Normalizes the residual to the activations, and routes the token if the layer has experts.
  MARLIN_DEVICE void PrepareNormalized(int phase, float squares) {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    if (phase % kPhases == static_cast<int>(Phase::kQkv)) {
      const bool mixes =
          kHybrid && layer.delta_rows != nullptr && Scratch().delta.head < args_.delta.value_heads;
      Normalize(phase, layer.attention_epsilon, mixes ? 2 : 0, squares);
      // Everything of the layer before has been read.
      if (thread_ == 0) {
        PublishWord(Words(index) + args_.exchange.arrived + blockIdx.x, 0.0f, Tag(index));
      }
      return;
    }
    const bool awaits = thread_ < static_cast<int>(gridDim.x);
    const uint32_t* const others = Words(index) + args_.exchange.arrived + thread_;
    const uint32_t arrived = awaits ? PollWord(others) : 0;
    const int rows = layer.router != nullptr ? Scratch().router_rows : 0;
    Normalize(phase, layer.mlp_epsilon, rows, squares);
    if (layer.router != nullptr) SyncFirst<kPersistentThreads>();
    const ExpertChoice<kHybrid> choice(args_, layer, Words(index) + args_.exchange.logits,
                                       Tag(index));
    choice.PublishLogits();
    if constexpr (kHybrid) DeltaRow(args_, layer).StoreWindow();
    // Every CTA has read all of the layer before.
    if (awaits) AwaitWord(others, arrived, Tag(index));
    if (layer.router != nullptr) choice.Route();
  }

  /// The residual times its norm's weights, to the activations, and zeros up to whole tiles; with a
  /// router also the warps' parts of the CTA's logits, to the scratch; or of a gated delta net's
  /// write and decay.
  MARLIN_DEVICE void Normalize(int phase, float epsilon, int rows, float squares) {
    const int quads = args_.features / 4;
    const bool attends = phase % kPhases == static_cast<int>(Phase::kQkv);
    const auto* const weights =
        reinterpret_cast<const float4*>(Memory() + args_.shared.norms) + (attends ? 0 : quads);
    const int rows_at = kHybrid && attends ? args_.shared.delta_rows : args_.shared.router;
    const auto* router = reinterpret_cast<const float4*>(Memory() + rows_at);
    const float factor = NormFactor(squares, epsilon);
#pragma unroll 1
    for (int row = 0; row < max(rows, 1); ++row) {
      float dot = 0.0f;
#pragma unroll 1
      for (int i = thread_; i < quads; i += kPersistentThreads) {
        const float4 x = Residual()[i];
        const float4 w = weights[i];
        const float4 y = {x.x * factor * w.x, x.y * factor * w.y, x.z * factor * w.z,
                          x.w * factor * w.w};
        if (row == 0) StoreActivations(args_, i, y);
        if (rows == 0) continue;
        const float4 r = router[i];
        dot += __fmaf_rn(y.x, r.x, y.y * r.y) + __fmaf_rn(y.z, r.z, y.w * r.w);
      }
      if (rows == 0) break;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
      if (thread_ % 32 == 0) Scratch().dots[row][thread_ / 32] = dot;
      router += quads;
    }
    for (int i = quads + thread_; i < tables_.GemmOf(phase).k_tiles * (kTileK / 4);
         i += kPersistentThreads) {
      StoreActivations(args_, i, {0.0f, 0.0f, 0.0f, 0.0f});
    }
  }

  MARLIN_DEVICE void PrepareOut(int phase) {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    // Attention takes the memory of the sums.
    SyncFirst<kPersistentThreads>();
    uint32_t* const words = Words(index);
    const uint32_t tag = Tag(index);
    TokenAttention<false> attention(
        args_, layer,
        {layer.gemms[static_cast<int>(Phase::kQkv)],
         words + args_.exchange.phases[static_cast<int>(Phase::kQkv)], tag});
    attention.Run(words + args_.exchange.attention, words + args_.exchange.mixed, index, tag);
    // Weights and activations take the memory of attention.
    SyncFirst<kPersistentThreads>();
    attention.Combine(words + args_.exchange.attention, words + args_.exchange.mixed, tag);
    const Schedule& schedule = tables_.ScheduleOf(layer.gemms[static_cast<int>(Phase::kOut)]);
    const int quads = args_.heads * args_.value_dim / 4;
    const int first = schedule.first_k_tile * (kTileK / 4);
    for (int i = first + thread_; i < schedule.end_k_tile * (kTileK / 4); i += kPersistentThreads) {
      const uint32_t* const from = words + args_.exchange.mixed + 4 * i;
      StoreActivations(
          args_, i - first,
          i < quads ? AwaitQuad(from, PollQuad(from), tag) : float4{0.0f, 0.0f, 0.0f, 0.0f});
    }
  }

  /// The gated activation of the inputs that the CTA's units need; of an expert times its weight.
  MARLIN_DEVICE void PrepareDown(int phase) {
    const PersistentLayer& layer = LayerOf(phase);
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
        float4 g;
        float4 u;
        if (gates.splits == 1) {
          const uint4 first = PollQuad(from);
          const uint4 second = PollQuad(from + to_up);
          g = AwaitQuad(from, first, tag);
          u = AwaitQuad(from + to_up, second, tag);
        } else {
          g = GatherSums(from, gates.splits, gates.columns, tag);
          u = GatherSums(from + to_up, gates.splits, gates.columns, tag);
        }
        const float factor = layer.experts == nullptr ? 1.0f
                                                      : Scratch().weights[segment] *
                                                            tables_.Chosen(segment).down_multiplier;
        h = {GateProduct<true>(args_.gate, g.x, u.x) * factor,
             GateProduct<true>(args_.gate, g.y, u.y) * factor,
             GateProduct<true>(args_.gate, g.z, u.z) * factor,
             GateProduct<true>(args_.gate, g.w, u.w) * factor};
      }
      StoreActivations(args_, i, h);
    }
  }

  /// The output of one of the CTA's units that a thread publishes in a phase.
  struct Published {
    uint32_t* to = nullptr;  ///< Null: nothing.
    uint32_t warps = 0;
    float factor = 1.0f;
    float bias = 0.0f;
  };

  /// Everything about a published output but its sum; found before the sums are there.
  MARLIN_DEVICE Published FindPublished(int phase_number, const Schedule& schedule) const {
    Published published;
    const int local = thread_ / kStripOutputs;
    if (local >= schedule.units) return published;
    const PersistentLayer& layer = LayerOf(phase_number);
    const auto phase = static_cast<Phase>(phase_number % kPhases);
    const PhaseGemm& gemm = tables_.GemmOf(phase_number);
    const ScheduledUnit unit = UnitAt(schedule, local);
    const int output = thread_ % kStripOutputs;
    const int n = static_cast<int>(unit.output) + output;
    const bool adds_bias = unit.first_split != 0 && n < gemm.n;
    const float* bias = gemm.bias;
    if (layer.experts == nullptr || phase < Phase::kGates) {
      published.factor = unit.side == 0 ? gemm.weights.multiplier : gemm.up_multiplier;
    } else if (phase == Phase::kGates) {
      const PersistentExpert& expert = tables_.Chosen(unit.copy);
      published.factor = unit.side == 0 ? expert.gate_multiplier : expert.up_multiplier;
      bias = expert.gate_bias;
    } else if (adds_bias) {
      // The multipliers are in the inputs.
      published.bias = BiasOfDowns(n);
    }
    if (bias != nullptr && adds_bias) published.bias += bias[unit.side * gemm.n + n];
    published.to = Words(phase_number / kPhases) + args_.exchange.phases[static_cast<int>(phase)] +
                   unit.word + output;
    published.warps = unit.warps;
    return published;
  }

  /// Adds the warps' sums of the CTA's units and publishes them, with their biases.
  MARLIN_DEVICE void Publish(int phase_number, const Published& published,
                             const float* sums) const {
    const uint32_t tag = Tag(phase_number / kPhases);
    if (published.to != nullptr) {
      const float sum = SumOfWarps(
          published.warps, sums + thread_ / kStripOutputs * kPersistentWarps * kStripOutputs +
                               thread_ % kStripOutputs);
      PublishWord(published.to, __fmaf_rn(sum, published.factor, published.bias), tag);
    }
    // Words that other layers have are written in every layer, so that no tag is one of long ago.
    const int phase = phase_number % kPhases;
    const PhaseGemm& gemm = tables_.GemmOf(phase_number);
    uint32_t* const words = Words(phase_number / kPhases) + args_.exchange.phases[phase];
#pragma unroll 1
    for (int i = gemm.splits * gemm.columns + static_cast<int>(blockIdx.x) * kPersistentThreads +
                 thread_;
         i < args_.exchange.phase_words[phase];
         i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      PublishWord(words + i, 0.0f, tag);
    }
  }

  /// The weighted biases of the selected experts' outputs.
  MARLIN_DEVICE float BiasOfDowns(int n) const {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < args_.router.selected(); ++i) {
      const float* const bias = tables_.Chosen(i).down_bias;
      if (bias != nullptr) sum += Scratch().weights[i] * bias[n];
    }
    return sum;
  }

  const PersistentArguments& args_;
  int thread_;
  Tables tables_;
  TileRing ring_;
};

/// The warpgroup that copies.
template <bool kHybrid>
MARLIN_DEVICE void RunCopiers(const PersistentArguments& args) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < kFirstKeyCopier) {
    TileCopier<kHybrid>(args).Run();
  } else if (thread < kFirstKeyCopier + kKeyCopiers) {
    if constexpr (kHybrid) {
      CopyMixers(args, thread - kFirstKeyCopier);
    } else {
      CopyKeys(args, thread - kFirstKeyCopier);
    }
  }
}

template <CodeKind kKind, bool kHybrid>
__global__ void __launch_bounds__(kPersistentBlock, 1)
    PersistentKernel(const __grid_constant__ PersistentArguments args) {
  if (threadIdx.x == 0) {
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
    TileCopier<kHybrid>::InitBarriers(args);
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= kPersistentThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    RunCopiers<kHybrid>(args);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  PersistentBlock<kHybrid> block(args);
  block.Begin();
  block.template Run<kKind>();
}

template <typename Tiles>
const void* PersistentKernels::Function(const Variant& variant) {
  return variant.hybrid ? reinterpret_cast<const void*>(&PersistentKernel<Tiles::kCodes, true>)
                        : reinterpret_cast<const void*>(&PersistentKernel<Tiles::kCodes, false>);
}

}  // namespace marlin::cuda
