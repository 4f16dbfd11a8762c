#include "backends/cuda/persistent/persistent_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/persistent/persistent_deal_layout.h"
#include "backends/cuda/plan/tile_problem.h"
#include "base/checked.h"

namespace marlin::cuda {
namespace {

constexpr int kMostSplits = 8;
constexpr int kLeastSlots = 2;  ///< Where rings have no other use.
constexpr int kMostKTiles = 1 << (kSegmentBits / 2);
constexpr int kRegionAlignment = 128;
constexpr int kRowPadding = 16;   ///< As in matrix_softmax.cuh.
constexpr int kKeysOfStage = 16;  ///< As kWarpKeys.
constexpr int kMergePadding = 8;  ///< As in persistent_attention.cuh.

int UnitsOf(const PhaseGemm& gemm) {
  const bool dealt = gemm.most_selected > 0 && gemm.segments == 1;
  return gemm.splits * (dealt ? gemm.most_selected : gemm.copies) * gemm.copy_strips;
}
/// Whether a phase's activations are a norm's, which needs all k.
bool IsNormalized(int phase) {
  return phase == static_cast<int>(Phase::kQkv) || phase == static_cast<int>(Phase::kGates);
}
/// The time of a CTA beside its tiles, in tiles: `of_split` for every split, another sum that every
/// CTA reads of each output that it needs; `of_input` for every k-tile of a split, whose inputs it
/// gathers. A norm needs all inputs.
struct PhaseCosts {
  double of_split;
  double of_input;
};
PhaseCosts CostsOf(Phase phase, int n) {
  if (phase != Phase::kOut && phase != Phase::kDown) return {0.75, 0.0};
  // Every CTA adds all outputs to its residual.
  return {n / 1024.0, phase == Phase::kOut ? 0.2 : 0.5};
}

/// Hands out adjacent parts of a memory.
class Offsets {
 public:
  int Take(int64_t bytes) {
    const int64_t offset = end_;
    end_ = RoundUp(end_ + bytes, int64_t{kRegionAlignment});
    return static_cast<int>(offset);
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

/// RMS norms are in fp32; none is missing.
bool HasNorm(const StepNorm& norm) { return norm.weight.As<float>() != nullptr && !norm.centers; }

/// Whether heads have sizes that the kernel, or its hybrid form, takes.
Support SupportsHeads(const AttentionStep& step, bool hybrid) {
  const auto fits = [](int64_t features, int64_t unit, int64_t most) {
    return features > 0 && features % unit == 0 && features <= most;
  };
  if (hybrid) {
    const bool keys = fits(step.key_dim, 16, kMostHybridFeatures);
    // A warp has 16 value features, or 32.
    if (keys && fits(step.value_dim, 128, kMostHybridFeatures)) return {};
    return {"values of {0} features in a hybrid model", step.value_dim};
  }
  if (!fits(step.key_dim, 16, kMostHeadFeatures)) {
    return {"keys of {0} features; supported: multiples of 16 up to 128", step.key_dim};
  }
  if (!fits(step.value_dim, 32, kMostHeadFeatures)) {
    return {"values of {0} features; supported: multiples of 32 up to 128", step.value_dim};
  }
  static_assert(kMostHeadFeatures == 128);
  return {};
}

Support SupportsAttention(const AttentionStep& step, bool hybrid) {
  const PagedCache& cache = step.cache;
  if (cache.values_in_keys || step.rope_dim != 0) return {"latent attention"};
  if (step.output_gate && !hybrid) return {"an output gate of attention"};
  if (!step.appends) return {"keys and values of another layer"};
  if (step.options.softcap != 0.0F) return {"capped scores"};
  if (step.options.chunked) return {"attention in chunks"};
  if (!step.v_norm.weight.empty()) return {"a norm of values"};
  if (cache.type != DType::kBf16 && cache.type != DType::kF8E4M3) {
    return {"a KV cache of {1}; supported: bf16 and f8_e4m3", 0, DTypeName(cache.type)};
  }
  if (hybrid && cache.type != DType::kBf16) return {"a hybrid model's KV cache of bytes"};
  if (const Support support = SupportsHeads(step, hybrid); !support.ok()) return support;
  if (step.norms == AttentionStep::Norms::kAllHeads && HasNorm(step.q_norm)) {
    return {"norms of all heads at once"};
  }
  if (step.norms == AttentionStep::Norms::kAfterRotary && hybrid) {
    return {"norms after RoPE in a hybrid model"};
  }
  if (step.query_scale.beta != 0.0F) return {"queries scaled by their position"};
  if (step.rotary.inverse_frequencies.empty()) return {"attention without RoPE"};
  // A lane rotates four features.
  const int64_t pairs = step.rotary.inverse_frequencies.ElementCount();
  if (pairs % 4 != 0) return {"RoPE of {0} pairs; supported: multiples of 4", pairs};
  if (2 * pairs > kMostHeadFeatures) return {"RoPE of {0} pairs; supported: up to 64", pairs};
  if (step.heads % step.kv_heads != 0) {
    return {"{0} query heads, not a multiple of the KV heads", step.heads};
  }
  if (step.heads / step.kv_heads > kMostGroupHeads) {
    return {"more than {0} query heads for a KV head", kMostGroupHeads};
  }
  if (step.cache_group >= kMostCacheGroups) return {"more than {0} cache groups", kMostCacheGroups};
  if (cache.page_tokens != kCachePageTokens) {
    return {"pages of {0} tokens in the KV cache", cache.page_tokens};
  }
  const int64_t elements = 16 / DTypeBytes(cache.type);
  if (cache.page_stride % elements != 0 || cache.first_element % elements != 0) {
    return {"KV cache pages that are not aligned to 16 bytes"};
  }
  return {};
}

Support SupportsDelta(const GatedDeltaStep& step) {
  const GatedDeltaSizes& sizes = step.weights.sizes;
  if (sizes.conv_width != kDeltaConvWidth) {
    return {"a convolution of {0} tokens; supported: 4", sizes.conv_width};
  }
  static_assert(kDeltaConvWidth == 4);
  if (sizes.key_dim % 32 != 0 || sizes.key_dim > kMostDeltaKeys) {
    return {"delta rules of {0} key features; supported: multiples of 32 up to 128", sizes.key_dim};
  }
  static_assert(kMostDeltaKeys == 128);
  if (sizes.value_dim != 32 && sizes.value_dim != 64 && sizes.value_dim != 128) {
    return {"delta rules of {0} value features; supported: 32, 64 and 128", sizes.value_dim};
  }
  static_assert(kDeltaColumns * kDeltaSquares == 128);
  if (step.linear.parts.size() < 2) return {"inputs of a delta rule in one part"};
  if (!step.linear.bias.empty()) return {"biases of a delta rule's inputs"};
  if (step.cache_group >= kMostCacheGroups) return {"more than {0} cache groups", kMostCacheGroups};
  if (step.states.page_stride % 4 != 0 || step.states.first_element % 4 != 0) {
    return {"states that are not aligned to 16 bytes"};
  }
  return {};
}

/// Whether a shared expert divides into parts that are as wide as the other experts.
Support SupportsShared(const ExpertsStep& step) {
  if (step.shared.gate_up.parts.empty()) return {};
  const int64_t width = step.experts.front().down.in;
  const int64_t its = step.shared.down.in;
  if (std::min(width, its) == 0 || its % width != 0) {
    return {"a shared expert of {0} features, not a multiple of the others'", its};
  }
  if (its == width) return {};
  if (width % kTileK != 0) {
    return {"experts of {0} features and a wider shared one; supported: multiples of 128", width};
  }
  static_assert(kTileK == 128);
  if (!step.shared.gate_up.bias.empty() || !step.shared.down.bias.empty()) {
    return {"biases of a shared expert that is wider than the others"};
  }
  return {};
}

Support SupportsExperts(const RouteStep& route, const ExpertsStep& step) {
  const auto count = static_cast<int64_t>(step.experts.size());
  if (count == 0) return {"no experts"};
  if (const Support support = SupportsShared(step); !support.ok()) return support;
  const int64_t shared = SharedParts(step);
  if (step.shared_gate.parts.size() > 1) {
    return {"a gate of the shared expert of {0} parts", std::ssize(step.shared_gate.parts)};
  }
  if (step.scales_inputs) return {"experts of scaled inputs"};
  if (route.router.parts.size() != 1)
    return {"a router of {0} parts", std::ssize(route.router.parts)};
  if (!route.options.scales.empty()) return {"factors of the experts' weights"};
  if (route.options.top_k + shared > kMostChosenExperts || route.options.top_k > count) {
    return {"{0} experts for a token; supported: up to 16", route.options.top_k + shared};
  }
  static_assert(kMostChosenExperts == 16);
  return {};
}

}  // namespace

int SharedParts(const ExpertsStep& step) {
  if (step.shared.gate_up.parts.empty()) return 0;
  return static_cast<int>(step.shared.down.in / step.experts.front().down.in);
}

namespace {

/// The MLP that a run of operations begins with; false if it does not.
bool TakeMlp(std::span<const StepOperation> operations, LayerSteps* steps) {
  if (operations.size() < 2) return false;
  steps->gate_up = std::get_if<GateUpStep>(&operations[0]);
  steps->down = std::get_if<ProjectAddStep>(&operations[1]);
  steps->route = std::get_if<RouteStep>(&operations[0]);
  steps->experts = std::get_if<ExpertsStep>(&operations[1]);
  const bool dense = steps->gate_up != nullptr && steps->down != nullptr;
  return dense || (steps->route != nullptr && steps->experts != nullptr);
}

}  // namespace

std::optional<LayerSteps> TakeLayer(std::span<const StepOperation> operations) {
  LayerSteps steps;
  if (operations.size() < 3 || !TakeMlp(operations.subspan(3), &steps)) return std::nullopt;
  steps.project = std::get_if<ProjectStep>(&operations[0]);
  steps.attention = std::get_if<AttentionStep>(&operations[1]);
  steps.out = std::get_if<ProjectAddStep>(&operations[2]);
  steps.count = 5;
  if (steps.project == nullptr || steps.attention == nullptr || steps.out == nullptr)
    return std::nullopt;
  return steps;
}

std::optional<LayerSteps> TakeHybridLayer(std::span<const StepOperation> operations, bool first) {
  LayerSteps steps = {.hybrid = true};
  if (operations.empty()) return std::nullopt;
  steps.project = std::get_if<ProjectStep>(&operations[0]);
  steps.delta = std::get_if<GatedDeltaStep>(&operations[0]);
  if (steps.project != nullptr) {
    std::optional<LayerSteps> whole = TakeLayer(operations);
    if (whole.has_value() && SupportsAttention(*whole->attention, true).ok()) {
      whole->hybrid = true;
      return whole;
    }
    steps.count = 1;
    if (first) return std::nullopt;
    return steps;
  }
  // Only the first layer's mixer may have run.
  const size_t at = steps.delta != nullptr ? 1 : 0;
  if ((at == 0 && !first) || operations.size() <= at) return std::nullopt;
  steps.out = std::get_if<ProjectAddStep>(&operations[at]);
  if (steps.out == nullptr || !TakeMlp(operations.subspan(at + 1), &steps)) return std::nullopt;
  steps.count = at + 3;
  return steps;
}

std::optional<LayerSteps> TakeLayerBetween(std::span<const StepOperation> operations, bool first) {
  LayerSteps steps = {.between = true};
  if (operations.empty()) return std::nullopt;
  if (!first) {
    steps.latent = std::get_if<LatentProjectStep>(&operations[0]);
    steps.count = 1;
    if (steps.latent == nullptr) return std::nullopt;
    return steps;
  }
  steps.out = std::get_if<ProjectAddStep>(&operations[0]);
  if (steps.out == nullptr || !TakeMlp(operations.subspan(1), &steps)) return std::nullopt;
  steps.count = 3;
  return steps;
}

namespace {

/// The projections before latent attention, apart from their tiles.
Support SupportsProjections(const LatentProjectStep& step) {
  if (!HasNorm(step.norm)) return {"no RMS norm before a block"};
  if (!HasNorm(step.kv_norm)) return {"no RMS norm of latents"};
  const int64_t rank = step.kv_norm.weight.ElementCount();
  if (rank % 4 != 0) return {"latents of {0} features; supported: multiples of 4", rank};
  const int64_t widest = std::max(step.kv_a.out, step.q_a.out);
  if (widest > kMostLatentFeatures) {
    return {"latents of {0} features; supported: up to 2048", widest};
  }
  static_assert(kMostLatentFeatures == 2048);
  if (!step.q.parts.empty()) return {};
  return HasNorm(step.q_norm) ? Support() : Support{"no RMS norm of queries' latents"};
}

/// The output projection and what comes after it.
Support SupportsMlp(const LayerSteps& steps) {
  const bool routed = steps.experts != nullptr;
  if (routed) {
    const Support support = SupportsExperts(*steps.route, *steps.experts);
    if (!support.ok()) return support;
  }
  const StepNorm& out_norm = routed ? steps.experts->out_norm : steps.down->out_norm;
  if (!steps.out->out_norm.weight.empty() || !out_norm.weight.empty()) {
    return {"a norm after a block"};
  }
  if (!routed && steps.down->scale != 1.0F) return {"scaled hidden states"};
  if (steps.out->from != ProjectAddStep::From::kMixed ||
      (!routed && steps.down->from != ProjectAddStep::From::kInner)) {
    return {"projections of other values"};
  }
  // Four inputs are read at a time.
  if (steps.out->linear.in % 4 != 0) {
    return {"{0} results of a mixer; supported: multiples of 4", steps.out->linear.in};
  }
  if (!HasNorm(routed ? steps.route->norm : steps.gate_up->norm)) {
    return {"no RMS norm before a block"};
  }
  return {};
}

}  // namespace

Support SupportsLayer(const LayerSteps& steps, int64_t hidden) {
  if (hidden % 4 != 0 || hidden > kMostPersistentHidden) {
    return {"{0} hidden features; supported: multiples of 4 up to 8192", hidden};
  }
  static_assert(kMostPersistentHidden == 8192);
  if (steps.attention != nullptr) {
    if (const Support support = SupportsAttention(*steps.attention, steps.hybrid); !support.ok())
      return support;
  }
  if (steps.delta != nullptr) {
    if (const Support support = SupportsDelta(*steps.delta); !support.ok()) return support;
  }
  if (steps.latent != nullptr) return SupportsProjections(*steps.latent);
  if (!steps.ends()) {
    if (const Support support = SupportsMlp(steps); !support.ok()) return support;
  }
  const bool projects = steps.project != nullptr || steps.delta != nullptr;
  if (projects && !HasNorm(steps.delta != nullptr ? steps.delta->norm : steps.project->norm)) {
    return {"no RMS norm before a block"};
  }
  return {};
}

namespace {

void SetSplits(int splits, PhaseGemm* gemm) {
  gemm->splits = splits;
  gemm->tiles_of_split = Ceil(gemm->k_tiles, splits);
  gemm->columns = gemm->copies * gemm->copy_strips * kStripOutputs;
}

/// n-tiles of all sides.
int StripsOfSides(const PhaseGemm& gemm) {
  if (gemm.up_n == 0) return gemm.sides * gemm.strips;
  return gemm.strips + Ceil(gemm.up_n, kStripOutputs);
}

}  // namespace

void SplitPhase(Phase phase, int blocks, PhaseGemm* gemm) {
  int best = 1;
  double least = 0;
  const PhaseCosts costs = CostsOf(phase, gemm->n);
  gemm->copy_strips = StripsOfSides(*gemm);
  const int units = gemm->copies * gemm->copy_strips;
  for (int splits = 1; splits <= std::min(kMostSplits, gemm->k_tiles); ++splits) {
    const int tiles = Ceil(gemm->k_tiles, splits);
    if (splits > 1 && Ceil(gemm->k_tiles, tiles) < splits) continue;
    if (splits > 1 && Ceil(units * splits, blocks) > kMostUnits) break;
    const double cost =
        Ceil(units * splits, blocks) * tiles + costs.of_split * splits + costs.of_input * tiles;
    if (splits > 1 && cost >= least) continue;
    best = splits;
    least = cost;
  }
  SetSplits(best, gemm);
  const int of_segment = gemm->weights.tiles_of_strip;
  gemm->segment_factor = gemm->segments > 1 ? Ceil(1 << kSegmentBits, of_segment) : 0;
}

namespace {

/// Chooses the splits of a phase of several rows whose sums are the residual's: `inputs` is the
/// rows that have inputs in a k-tile, on average.
void SplitResidual(double inputs, int rows, int blocks, PhaseGemm* gemm) {
  // In tiles of a CTA: the inputs of a k-tile and row that it gathers, and a row of a split's sums
  // that the owner of a strip adds.
  constexpr double kCostOfInput = 0.5;
  constexpr double kCostOfSum = 0.15;
  int best = 1;
  double least = 0;
  for (int splits = 1; splits <= std::min(kMostRowSplits, gemm->k_tiles); ++splits) {
    const int tiles = Ceil(gemm->k_tiles, splits);
    const double cost = Ceil(gemm->strips * splits, blocks) * tiles +
                        kCostOfInput * inputs * tiles + kCostOfSum * rows * splits;
    if (splits > 1 && cost >= least) continue;
    best = splits;
    least = cost;
  }
  SetSplits(best, gemm);
}

}  // namespace

void SplitRows(int rows, const PersistentRouter& router, int blocks, PersistentLayer* layer) {
  const auto gemm = [&](Phase phase) { return &layer->gemms[static_cast<int>(phase)]; };
  SplitResidual(rows, rows, blocks, gemm(Phase::kOut));
  PhaseGemm* const gates = gemm(Phase::kGates);
  PhaseGemm* const down = gemm(Phase::kDown);
  SetSplits(1, gates);
  double inputs = rows;
  if (layer->experts != nullptr) {
    const int selected = std::min(rows * router.top_k, router.experts) + router.shared;
    gates->most_selected = selected;
    down->most_selected = selected;
    down->segments = std::max(selected, 2);
    down->segment_factor = Ceil(1 << kSegmentBits, down->weights.tiles_of_strip);
    down->k_tiles = selected * down->weights.tiles_of_strip;
    inputs = static_cast<double>(rows * router.selected()) / selected;
  }
  SplitResidual(inputs, rows, blocks, down);
}

BlockSchedule ScheduleBlock(const PhaseGemm& gemm, int block, int blocks, int rows) {
  const PhaseDeal deal(gemm, rows, gemm.most_selected, block, blocks);
  BlockSchedule schedule;
  schedule.header = deal.Header();
  schedule.units.reserve(static_cast<size_t>(schedule.header.units));
  schedule.tiles.reserve(static_cast<size_t>(schedule.header.tiles));
  for (int unit = 0; unit < schedule.header.units; ++unit) {
    schedule.units.push_back(deal.Unit(unit));
  }
  if (schedule.header.tiles == 0) return schedule;
  TileWalk walk(gemm, schedule.header, 0);
  for (int number = 0; number < schedule.header.tiles; ++number, walk.Advance()) {
    schedule.tiles.push_back(walk.Tile(gemm.first_shared()));
    schedule.units[schedule.tiles.back().unit].warps |=
        static_cast<uint16_t>(1U << WarpOfTile(number, schedule.header.tiles));
  }
  return schedule;
}

namespace {

/// Everything that the schedule of a phase depends on.
auto KeyOf(const PhaseGemm& gemm) {
  return std::tuple(gemm.strips, gemm.copy_strips, gemm.sides, gemm.copies, gemm.segments,
                    gemm.k_tiles, gemm.splits, gemm.tiles_of_split, gemm.weights.tiles_of_strip,
                    gemm.weights.tile_bytes, gemm.shared_selection, gemm.shared_parts,
                    gemm.shared.tile_bytes, gemm.most_selected);
}

/// The parts of all CTAs in a phase, and their place in a CTA's schedules.
struct PhaseSchedule {
  std::vector<BlockSchedule> blocks;
  int offset = 0;
  int tiles_at = 0;  ///< From `offset`.
  int bytes = 0;
};

PhaseSchedule SchedulePhase(const PhaseGemm& gemm, int blocks, int rows) {
  PhaseSchedule phase;
  size_t units = 0;
  size_t tiles = 0;
  for (int block = 0; block < blocks; ++block) {
    BlockSchedule& made = phase.blocks.emplace_back(ScheduleBlock(gemm, block, blocks, rows));
    units = std::max(units, made.units.size());
    if (rows > 1) made.tiles.clear();
    tiles = std::max(tiles, made.tiles.size());
    // The kernel fills them in.
    if (gemm.most_selected > 0) made.units.clear();
  }
  phase.tiles_at = static_cast<int>(sizeof(Schedule) + units * sizeof(ScheduledUnit));
  for (BlockSchedule& made : phase.blocks) made.header.tiles_at = phase.tiles_at;
  const auto tile_bytes = static_cast<int64_t>(tiles * sizeof(ScheduledTile));
  phase.bytes = phase.tiles_at + static_cast<int>(RoundUp(tile_bytes, int64_t{16}));
  return phase;
}

/// The most k-tiles that a CTA needs in the phase at `offset`.
int SpanOf(std::span<const PhaseSchedule> phases, int offset) {
  const auto found = std::ranges::find(phases, offset, &PhaseSchedule::offset);
  int span = 0;
  for (const BlockSchedule& block : found->blocks) {
    span = std::max(span, block.header.end_k_tile - block.header.first_k_tile);
  }
  return span;
}

template <typename T>
void CopyTo(uint8_t* to, std::span<const T> from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size_bytes());
}

void CopyTo(uint8_t* to, const PhaseSchedule& phase, const BlockSchedule& block) {
  CopyTo(to, std::span(&block.header, 1));
  CopyTo(to + sizeof(Schedule), std::span(block.units));
  CopyTo(to + phase.tiles_at, std::span(block.tiles));
}

}  // namespace

Schedules ScheduleLayers(std::span<PersistentLayer> layers, int blocks, int rows) {
  std::map<decltype(KeyOf(PhaseGemm())), int> offsets;
  std::vector<PhaseSchedule> phases;
  Schedules made;
  for (PersistentLayer& layer : layers) {
    for (int phase = 0; phase < kPhases; ++phase) {
      PhaseGemm& gemm = layer.gemms[phase];
      const auto [found, inserted] = offsets.emplace(KeyOf(gemm), made.bytes);
      gemm.schedule = found->second;
      if (inserted) {
        phases.push_back(SchedulePhase(gemm, blocks, rows));
        phases.back().offset = made.bytes;
        made.bytes += phases.back().bytes;
      }
      if (IsNormalized(phase)) continue;
      made.span = std::max(made.span, SpanOf(phases, gemm.schedule));
    }
  }
  made.data.resize(static_cast<size_t>(made.bytes) * static_cast<size_t>(blocks));
  for (const PhaseSchedule& phase : phases) {
    for (int block = 0; block < blocks; ++block) {
      CopyTo(made.data.data() + int64_t{block} * made.bytes + phase.offset, phase,
             phase.blocks[static_cast<size_t>(block)]);
    }
  }
  return made;
}

namespace {

/// The largest sizes of any layer.
struct LargestLayer {
  int units = 1;  ///< A CTA has in a phase.
  int span = 1;   ///< k-tiles whose activations a CTA gathers.
  int tiles = 0;
  int words[kPhases] = {};
};

void LayOutExchange(const LargestLayer& most, int blocks, PersistentArguments* args) {
  Offsets exchange;
  PersistentExchange& at = args->exchange;
  for (int phase = 0; phase < kPhases; ++phase) {
    at.phases[phase] = exchange.Take(most.words[phase]);
    at.phase_words[phase] = most.words[phase];
  }
  const int64_t rows = args->rows;
  at.attention = exchange.Take(rows * args->kv_heads * args->attention_splits * args->group *
                               (args->value_dim + 4));
  const PersistentDelta& delta = args->delta;
  at.mixed = exchange.Take(rows * args->heads * args->value_dim);
  at.results = exchange.Take(int64_t{delta.value_heads} * delta.value_dim);
  at.squares = exchange.Take(int64_t{delta.value_heads} * kDeltaSquares);
  at.logits = exchange.Take(rows * args->router.rows());
  for (int i = 0; rows > 1 && i < 2; ++i) {
    at.inputs[i] = exchange.Take(rows * args->features);
    at.strips_squares[i] = exchange.Take(rows * Ceil(args->features, kStripOutputs));
  }
  at.arrived = exchange.Take(blocks);
  at.words = static_cast<int>(exchange.end());
}

/// The residual and the weights of both norms, where every CTA has all of them.
void TakeResidual(Offsets* shared, PersistentArguments* args) {
  shared->Take(ResidualAt(false) + int64_t{args->features} * 4);
  args->shared.norms = shared->Take(2 * int64_t{args->features} * 4);
}

/// The parts whose contents last longer than a phase.
void TakeTables(int blocks, Offsets* shared, PersistentArguments* args) {
  PersistentShared& at = args->shared;
  const int64_t rows = args->rows;
  const int64_t experts = RoundUp(int64_t{args->router.experts}, int64_t{4});
  at.router = shared->Take(int64_t{Ceil(args->router.rows(), blocks)} * args->features * 4);
  at.experts = shared->Take(args->router.table() * int64_t{sizeof(PersistentExpert)});
  at.schedules = shared->Take(args->schedule_bytes);
  // With several rows, the masks of the experts come after all logits.
  at.logits = shared->Take((rows > 1 ? rows + 1 : 1) * experts * 4);
  at.rotations = shared->Take(rows * args->pairs * 8);
}

/// Lays out the stages of keys and values, in upper slots, for teams of 2^team_warps_log2 warps,
/// and the end of all memory. False if they do not fit in `shared_bytes`.
bool LayOutKeys(int team_warps_log2, int shared_bytes, PersistentArguments* args) {
  PersistentShared& at = args->shared;
  const int teams = kPersistentWarps >> team_warps_log2;
  // A warp has 16 value features, or a multiple.
  if (args->kv_heads > 0 && args->value_dim % (16 << team_warps_log2) != 0) return false;
  const int key_row = args->key_dim * 2 + kRowPadding;
  const int value_row = args->value_dim * 2 + kRowPadding;
  const int keys = std::max(teams * kKeysOfStage * (key_row + value_row),
                            (teams * args->group * (2 + args->value_dim + kMergePadding) + 4) * 4);
  const PersistentDelta& delta = args->delta;
  const int state_end = at.conv + delta.own_channels() * kDeltaConvWidth * 4;
  const int slot = kPersistentWarps * args->slot_bytes;
  args->team_warps_log2 = team_warps_log2;
  args->slots = std::min((shared_bytes - at.ring) / slot, kMostSlots);
  at.bytes = std::max(
      {at.keys + keys, at.ring + args->slots * slot, delta.value_heads > 0 ? state_end : 0});
  return args->slots >= kLowSlots && at.bytes <= shared_bytes;
}

/// The inputs of a GEMM. Rows and limbs begin in different banks.
void TakeActivations(const LargestLayer& most, Offsets* shared, PersistentArguments* args) {
  PersistentShared& at = args->shared;
  const int features = most.span * kTileK;
  const bool limbs = HasLimbs(args->kind, args->rows);
  args->limb_stride = limbs ? features + kRowPadding : 0;
  args->activation_stride = limbs ? kLimbCount * args->limb_stride : features * 2 + kRowPadding;
  args->activation_factor =
      std::ldexp(1.0F, ActivationExponentOf(ExponentsOf(args->kind, /*bf16=*/true)));
  at.activations = shared->Take(int64_t{args->rows} * args->activation_stride);
  at.limb_units = shared->Take(limbs ? int64_t{most.span} * kMostLimbRows * 4 : 0);
}

/// The inputs and the sums of a GEMM of one row.
void TakeGemm(const LargestLayer& most, Offsets* shared, PersistentArguments* args) {
  PersistentShared& at = args->shared;
  TakeActivations(most, shared, args);
  at.sums = shared->Take(std::max(int64_t{most.units} * kPersistentWarps * kStripOutputs * 4,
                                  args->router.experts * 2 * int64_t{sizeof(double)}));
}

/// False if it does not fit in `shared_bytes`.
bool LayOutShared(const LargestLayer& most, int blocks, int shared_bytes,
                  PersistentArguments* args) {
  const int key_row = args->key_dim * 2 + kRowPadding;
  Offsets shared;
  PersistentShared& at = args->shared;
  TakeResidual(&shared, args);
  TakeTables(blocks, &shared, args);
  const PersistentDelta& delta = args->delta;
  const int64_t window = int64_t{kDeltaConvWidth - 1} * delta.own_channels() * 4;
  if (delta.value_heads > 0) {
    at.delta_rows = shared.Take(2 * int64_t{args->features} * 4);
    at.kept = shared.Take(window);
  }
  Offsets attention = shared;
  TakeGemm(most, &shared, args);
  at.queries = attention.Take(int64_t{kMostGroupHeads} * key_row);
  at.fresh = attention.Take((args->key_dim + args->value_dim) * 2);
  at.inputs = attention.Take(delta.value_heads > 0 ? sizeof(DeltaInputs) : 0);
  at.ring = static_cast<int>(std::max(shared.end(), attention.end()));
  at.keys = at.ring + kLowSlots * kPersistentWarps * args->slot_bytes;
  at.state = at.keys;
  at.window = at.state + delta.key_dim * kDeltaRowFloats * 4;
  at.conv = static_cast<int>(at.window + window);
  if (args->form == PersistentForm::kHybrid) {
    return LayOutKeys(kMostTeamWarpsLog2, shared_bytes, args);
  }
  // Many small teams have less work for each key, but more stages. The general form alone has
  // others than the smallest.
  for (int log2 = kLeastTeamWarpsLog2; log2 <= kMostTeamWarpsLog2; ++log2) {
    if (!LayOutKeys(log2, shared_bytes, args)) continue;
    if (log2 > kLeastTeamWarpsLog2) args->form = PersistentForm::kGeneral;
    return true;
  }
  return false;
}

/// The same of form kBetween, whose rings have the rest of the memory.
bool LayOutBetween(const LargestLayer& most, int blocks, int shared_bytes,
                   PersistentArguments* args) {
  Offsets shared;
  TakeResidual(&shared, args);
  TakeTables(blocks, &shared, args);
  TakeGemm(most, &shared, args);
  const int slot = kPersistentWarps * args->slot_bytes;
  PersistentShared& at = args->shared;
  at.ring = static_cast<int>(shared.end());
  args->slots = std::min((shared_bytes - at.ring) / slot, kMostSlots);
  at.bytes = at.ring + args->slots * slot;
  return args->slots >= kLeastSlots;
}

/// The same with several rows: keys have the memory of activations and sums, whose weights have all
/// of the ring.
bool LayOutRows(const LargestLayer& most, int blocks, int shared_bytes, PersistentArguments* args) {
  const int64_t experts = args->router.experts;
  const int64_t rows = args->rows;
  const int key_row = args->key_dim * 2 + kRowPadding;
  const int value_row = args->value_dim * 2 + kRowPadding;
  const int strips = Ceil(args->features, kStripOutputs);
  Offsets shared;
  PersistentShared& at = args->shared;
  const int64_t owned = int64_t{Ceil(strips, blocks)} * kStripOutputs;
  shared.Take(ResidualAt(true) + owned * rows * 4);
  at.norms = shared.Take(2 * owned * 4);
  TakeTables(blocks, &shared, args);
  Offsets attention = shared;
  args->team_warps_log2 = kLeastTeamWarpsLog2;
  TakeActivations(most, &shared, args);
  const int64_t routed = args->form == PersistentForm::kRows ? 1 : rows;
  at.sums = shared.Take(std::max((most.units + kPersistentWarps) * rows * kRowSumFloats * 4,
                                 routed * experts * 2 * int64_t{sizeof(double)}));
  at.queries = attention.Take(int64_t{kMostGroupHeads} * key_row);
  at.fresh = attention.Take(rows * (args->key_dim + args->value_dim) * 2);
  at.keys = attention.Take(
      std::max(kMostTeams * kKeysOfStage * (key_row + value_row),
               (kMostTeams * args->group * (2 + args->value_dim + kMergePadding) + 4) * 4));
  at.ring = static_cast<int>(std::max(shared.end(), attention.end()));
  const int64_t slot = int64_t{kPersistentWarps} * args->slot_bytes;
  args->slots = static_cast<int>(std::min<int64_t>((shared_bytes - at.ring) / slot, kMostSlots));
  at.bytes = static_cast<int>(at.ring + args->slots * slot);
  return args->slots >= kLeastSlots;
}

/// Which phases of which layers run.
void SetPhases(std::span<const PersistentLayer> layers, PersistentArguments* args) {
  args->layer_count = static_cast<int>(layers.size());
  const bool begins = layers.front().attention_norm != nullptr;
  args->first_phase = static_cast<int>(begins ? Phase::kQkv : Phase::kOut);
  args->end_phase = args->layer_count * kPhases;
  const PersistentLayer& last = layers.back();
  if (last.mlp_norm != nullptr) return;
  const bool projects_again = last.gemms[static_cast<int>(Phase::kOut)].n > 0;
  args->end_phase -= kPhases - (projects_again ? 2 : 1);
}

}  // namespace

std::optional<PersistentArguments> LayOutPersistent(const PersistentArguments& shape,
                                                    std::span<const PersistentLayer> layers,
                                                    const Schedules& schedules, int blocks,
                                                    int shared_bytes) {
  PersistentArguments args = shape;
  const int rows = args.rows;
  args.schedule_bytes = schedules.bytes;
  LargestLayer most = {.span = schedules.span};
  for (const PersistentLayer& layer : layers) {
    for (int phase = 0; phase < kPhases; ++phase) {
      const PhaseGemm& gemm = layer.gemms[phase];
      most.units = std::max(most.units, Ceil(UnitsOf(gemm), blocks));
      most.tiles = std::max(most.tiles, gemm.k_tiles);
      if (IsNormalized(phase)) most.span = std::max(most.span, gemm.k_tiles);
      most.words[phase] = std::max(most.words[phase], gemm.splits * rows * gemm.columns);
      args.slot_bytes =
          std::max({args.slot_bytes, gemm.weights.tile_bytes, gemm.shared.tile_bytes});
    }
  }
  if (most.units > (rows > 1 ? kMostRowUnits : kMostUnits) || most.tiles > kMostKTiles) {
    return std::nullopt;
  }
  if (args.kv_heads > 0) {
    args.group = args.heads / args.kv_heads;
    args.attention_splits = std::max(blocks / (rows * args.kv_heads), 1);
  }
  if (rows > 1 && args.router.experts > kMostRowExperts) return std::nullopt;
  // Each row's latent has a CTA.
  if (IsBetween(args.form) && rows >= blocks) return std::nullopt;
  if (rows * args.kv_heads > blocks || args.delta.value_heads * args.delta.slices > blocks ||
      Ceil(args.router.rows(), blocks) > kMostRouterRows) {
    return std::nullopt;
  }
  LayOutExchange(most, blocks, &args);
  SetPhases(layers, &args);
  const auto lay_out = rows > 1                                ? LayOutRows
                       : args.form == PersistentForm::kBetween ? LayOutBetween
                                                               : LayOutShared;
  if (!lay_out(most, blocks, shared_bytes, &args)) return std::nullopt;
  return args;
}

std::vector<int> ExchangeKey(const PersistentArguments& args,
                             std::span<const PersistentLayer> layers) {
  if (!IsBetween(args.form)) return {};
  std::vector<int> key = {static_cast<int>(args.form),
                          args.rows,
                          args.features,
                          args.first_phase,
                          args.end_phase,
                          args.router.rows(),
                          args.router.selected()};
  const auto offsets =
      std::bit_cast<std::array<int, sizeof(PersistentExchange) / sizeof(int)>>(args.exchange);
  key.insert(key.end(), offsets.begin(), offsets.end());
  for (const PersistentLayer& layer : layers) {
    for (const PhaseGemm& gemm : layer.gemms) {
      key.push_back(gemm.splits);
      key.push_back(gemm.columns);
    }
  }
  return key;
}

}  // namespace marlin::cuda
