// Decode of two to eight next tokens of one or more texts by one launch: the persistent kernel with
// rows.
//
//   As with one token (persistent_kernel.cuh), except what rows make more expensive or possible:
//
//   - The rows are columns of the MMAs, so weights are read once. Attention has a part of the keys
//     of one row and one KV head for each CTA; of rows of one sequence see
//     persistent_attention.cuh.
//   - A strip of 32 features of the residual has an owner. It adds the partial sums of a block, of
//     which there may be many, and publishes the strip times the norm's weights: every CTA adding
//     all sums of all rows would take more of L2 than it has.
//   - Experts that several rows have selected are multiplied once (persistent_rows_router.cuh). A
//     row that has not selected an expert has zeros in its inputs of the downs; of the gates, its
//     sums are not published.
//   - A unit's sums have places for the warps that have tiles of it alone.
#pragma once

#include "backends/cuda/persistent/persistent_begin.cuh"
#include "backends/cuda/persistent/persistent_deal_layout.h"
#include "backends/cuda/persistent/persistent_rows_between.cuh"
#include "backends/cuda/persistent/persistent_rows_inputs.cuh"
#include "backends/cuda/persistent/persistent_rows_outputs.cuh"
#include "backends/cuda/persistent/persistent_rows_residual.cuh"
#include "backends/cuda/persistent/persistent_rows_router.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// A CTA of the kernel.
template <CodeKind kKind, PersistentForm kForm, bool kLimbs>
class PersistentRows : private RowsPart {
 public:
  MARLIN_DEVICE explicit PersistentRows(const PersistentArguments& args)
      : RowsPart(args), ring_(args) {}

  MARLIN_DEVICE void Begin() {
    if (thread_ == 0) FindParts();
    if (thread_ < kMostTasks) {
      // A row whose logits are errors selects nothing: each of its places has an expert even so.
      const int place = thread_ % kMostChosenExperts;
      const int of_shared = place - args_.router.top_k;
      Rows().chosen[thread_] = of_shared < 0 ? place : args_.router.experts + of_shared;
      Scratch().weights[thread_] = of_shared < 0 ? 0.0f : 1.0f;
    }
    if constexpr (kBetween) {
      BeginBetween(args_);
      RowsResidual(args_).Read();
      if (thread_ == 0) Scratch().clock = args_.clock[0];
      SyncFirst<kPersistentThreads>();
      PublishArrival(0);
    } else {
      BeginAttention();
    }
  }

  /// Runs all layers, and stores the residual.
  MARLIN_DEVICE void Run() {
#pragma unroll 1
    for (int phase = args_.first_phase;; ++phase) {
      const auto which = static_cast<Phase>(phase % kPhases);
      const int index = phase / kPhases;
      const bool normalizes = which == Phase::kQkv || which == Phase::kGates;
      if (kBetween && phase == args_.end_phase) TriggerDependentLaunch();
      if (kBetween && phase == args_.end_phase && which != Phase::kQkv) {
        ProjectionsOf(phase).Store();
        break;
      }
      if (normalizes) {
        if (phase < args_.end_phase) {
          AwaitLayer(which == Phase::kQkv ? LayerBarrier::kLayer : LayerBarrier::kMlp, index);
        }
        RowsResidual(args_).AddBlock<kForm>(phase);
        if (phase == args_.end_phase) break;
        Inputs(args_).GatherResidual(phase);
      } else if (which == Phase::kOut) {
        PrepareOut(phase);
      } else {
        Inputs(args_).GatherGates(phase);
      }
      // Copies run a phase ahead, except experts' tiles, which the router chooses.
      const bool awaits_router =
          LayerOf(phase).experts != nullptr && (which == Phase::kOut || which == Phase::kGates);
      if (!kBetween && phase == args_.first_phase) AllowCopies(Phase::kQkv);
      SyncFirst<kPersistentThreads>();
      if (!awaits_router) AllowCopies(static_cast<Phase>((phase + 1) % kPhases));
      if (!kBetween && which == Phase::kQkv) PublishArrival(index);
      if (which == Phase::kGates) Route(phase);
      if (kBetween && which == Phase::kOut && phase != args_.first_phase) {
        Queries(args_).FindFactors(phase);
        // They are read before the barrier that follows the products.
        SyncFirst<kPersistentThreads>();
      }
      const PhaseStart start = PhaseStart::Of<kForm, kLimbs>(tables_, phase);
      // A norm needs all k.
      MultiplyPhase<kKind, kForm, kLimbs>(args_, phase, start,
                                          normalizes ? 0 : start.schedule->first_k_tile, ring_);
      const RowsOutputs outputs(args_, phase, *start.schedule);
      const RowsOutputs::Output output = outputs.FindFirst<kForm>();
      SyncFirst<kPersistentThreads>();
      outputs.Publish<kForm>(output);
    }
    Finish();
  }

 private:
  static constexpr bool kGeneral = HasSharedExperts(kForm);
  static constexpr bool kBetween = IsBetween(kForm);
  using Inputs = RowsInputs<kLimbs>;
  using Queries = RowsQueries<kLimbs>;
  static constexpr int kHalf = kPersistentThreads / 2;

  /// The parts of attention.
  MARLIN_DEVICE void BeginAttention() const {
    SyncFirst<kPersistentThreads>();
    for (int i = thread_; i < kMostPersistentRows * kMostCacheGroups; i += kPersistentThreads) {
      const int row = i % kMostPersistentRows;
      const int group = i / kMostPersistentRows;
      if (row >= args_.rows || !HasKeys(args_, group)) continue;
      Rows().active_splits[group][row] =
          PartOf<kForm>(args_, group, args_.position[row]).active_splits;
    }
    RowsResidual(args_).Read();
    BeginRows(args_);
    BeginTables<kForm>(args_);
  }

  MARLIN_DEVICE void FindParts() const {
    const auto block = static_cast<int>(blockIdx.x);
    const auto blocks = static_cast<int>(gridDim.x);
    PersistentScratch& scratch = Scratch();
    scratch.router_rows = max(args_.router.rows() - block + blocks - 1, 0) / blocks;
    if constexpr (kBetween) return;
    const int part = block / args_.attention_splits;
    const bool attends = part < args_.rows * args_.kv_heads;
    const int row = attends ? part / args_.kv_heads : 0;
    scratch.kv_head = attends ? part - row * args_.kv_heads : args_.kv_heads;
    scratch.split = block - part * args_.attention_splits;
    scratch.position = args_.position[row];
    FindKeys<kForm>(args_);
    FindNewKeys(args_, row);
  }

  /// Says that this CTA has read everything of the previous layer.
  MARLIN_DEVICE void PublishArrival(int index) const {
    if (thread_ != 0) return;
    PublishWord(Words(index) + args_.exchange.arrived + blockIdx.x, 0.0f, Tag(index));
  }

  /// Routes the rows, if the layer has experts, whose tiles may then be copied.
  MARLIN_DEVICE void Route(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    const bool awaits = thread_ < static_cast<int>(gridDim.x);
    const uint32_t* const others = Words(index) + args_.exchange.arrived + thread_;
    const uint32_t arrived = awaits ? PollWord(others) : 0;
    const RowsChoice<kGeneral, HasSigmoids(kForm)> choice(
        args_, layer, Words(index) + args_.exchange.logits, Tag(index));
    choice.PublishLogits();
    // Every CTA has read all of the layer before.
    if (awaits) AwaitWord(others, arrived, Tag(index));
    if (layer.router == nullptr) return;
    choice.Route();
    choice.FindTasks();
    // Copies need the headers; the units are filled in while the first tiles are copied.
    const PhaseGemm& gates = layer.gemms[static_cast<int>(Phase::kGates)];
    const PhaseGemm& down = layer.gemms[static_cast<int>(Phase::kDown)];
    const bool has_gates = thread_ < kHalf;
    const PhaseGemm& gemm = has_gates ? gates : down;
    const int thread = has_gates ? thread_ : thread_ - kHalf;
    Schedule* const schedule = ExpertSchedule(args_, gemm);
    const PhaseDeal deal(gemm, args_.rows, Rows().tasks, static_cast<int>(blockIdx.x),
                         static_cast<int>(gridDim.x));
    if (thread == 0) *schedule = deal.Header();
    SyncFirst<kPersistentThreads>();
    AllowCopies(Phase::kGates);
    AllowCopies(Phase::kDown);
    auto* const units = reinterpret_cast<ScheduledUnit*>(schedule + 1);
#pragma unroll 1
    for (int i = thread; i < deal.units(); i += kHalf) units[i] = deal.Unit(i);
    // They are read before the barrier that follows the products.
    SyncFirst<kPersistentThreads>();
  }

  MARLIN_DEVICE LatentProjections ProjectionsOf(int phase) const {
    const int index = phase / kPhases;
    return {args_, LayerOf(phase), Words(index), Tag(index), args_.rows};
  }
  /// The inputs of kOut, as activations: of attention that has run elsewhere, or of the second
  /// projection of queries.
  MARLIN_DEVICE void PrepareBetween(int phase) const {
    if (phase != args_.first_phase) return Queries(args_).Gather(phase);
    AwaitLayer(LayerBarrier::kLayer, phase / kPhases);
    GatherResults<kLimbs>(args_, tables_.GemmOf(phase), args_.rows);
  }

  MARLIN_DEVICE void PrepareOut(int phase) const {
    if constexpr (kBetween) {
      PrepareBetween(phase);
    } else {
      Attend(phase);
    }
  }
  MARLIN_DEVICE void Attend(int phase) const {
    const PersistentLayer& layer = LayerOf(phase);
    const int index = phase / kPhases;
    // Keys take the memory of activations and sums.
    SyncFirst<kPersistentThreads>();
    AllowCopies(LayerBarrier::kKeysAllowed);
    uint32_t* const words = Words(index);
    const uint32_t tag = Tag(index);
    const PhaseGemm& inputs = layer.gemms[static_cast<int>(Phase::kQkv)];
    const int row = Rows().row;
    uint32_t* const parts = words + args_.exchange.attention;
    uint32_t* const mixed = words + args_.exchange.mixed;
    const int features = args_.heads * args_.value_dim;
    const ProjectedWords projected = {
        inputs, args_.rows,
        words + args_.exchange.phases[static_cast<int>(Phase::kQkv)] + row * inputs.columns, tag};
    const int row_parts = args_.kv_heads * args_.attention_splits * args_.group;
    TokenAttention<kForm>(args_, layer, projected)
        .Run(parts + row * row_parts * (args_.value_dim + 4), mixed + row * features, index, tag);
    // Activations take the memory of attention.
    SyncFirst<kPersistentThreads>();
    AttentionMerge<kForm>(args_, layer, projected)
        .CombineRows(parts, args_.rows, Rows().active_splits[layer.cache_group], mixed, tag);
    const Schedule& schedule = tables_.ScheduleOf(layer.gemms[static_cast<int>(Phase::kOut)]);
    Inputs(args_).GatherMixed(mixed, features, schedule, tag);
  }

  /// Advances the clock: all CTAs have read it, as this one has had the arrivals of each since.
  MARLIN_DEVICE void Finish() const {
    if (blockIdx.x == 0 && thread_ == 0) args_.clock[0] = Scratch().clock + args_.layer_count;
  }

  TileRing ring_;
};

}  // namespace marlin::cuda
