#include "backends/cuda/persistent/persistent_description.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace marlin::cuda {
namespace {

bool SameAttention(const PersistentArguments& a, const PersistentArguments& b) {
  return a.features == b.features && a.heads == b.heads && a.kv_heads == b.kv_heads &&
         a.key_dim == b.key_dim && a.value_dim == b.value_dim && a.scale == b.scale &&
         a.frequencies == b.frequencies && a.pairs == b.pairs &&
         a.rotary_factor == b.rotary_factor && a.interleaved == b.interleaved &&
         a.norms_after_rotary == b.norms_after_rotary && a.cache_bytes == b.cache_bytes &&
         a.output_gate == b.output_gate;
}

/// `shape` with what all layers' attention has in common.
PersistentArguments ShapeOf(const AttentionStep& step, int64_t hidden, PersistentArguments shape) {
  shape.features = static_cast<int>(hidden);
  shape.heads = static_cast<int>(step.heads);
  shape.kv_heads = static_cast<int>(step.kv_heads);
  shape.key_dim = static_cast<int>(step.key_dim);
  shape.value_dim = static_cast<int>(step.value_dim);
  shape.scale = step.options.scale != 0.0F ? step.options.scale
                                           : 1.0F / std::sqrt(static_cast<float>(step.key_dim));
  shape.frequencies = step.rotary.inverse_frequencies.As<float>();
  shape.pairs = static_cast<int>(step.rotary.inverse_frequencies.ElementCount());
  shape.rotary_factor = step.rotary.attention_factor;
  shape.interleaved = step.rotary.interleaved;
  shape.norms_after_rotary = step.norms == AttentionStep::Norms::kAfterRotary;
  shape.output_gate = step.output_gate;
  shape.cache_bytes = step.cache.type == DType::kF8E4M3 ? 1 : 2;
  return shape;
}

/// Whether the same code multiplies both.
bool Alike(const PhaseGemm& a, const PhaseGemm& b) {
  return SameTiles(a.weights, b.weights) && a.sides == b.sides && a.use == b.use;
}

PersistentExpert ExpertOf(const PhaseGemm& gates, const PhaseGemm& down) {
  return {
      gates.weights.tiles, gates.up_tiles,           down.weights.tiles,  gates.bias,
      down.bias,           gates.weights.multiplier, gates.up_multiplier, down.weights.multiplier};
}

/// Sets the tiles of the shared expert, whose `parts` are the last selections. False if kernels
/// read them in another way.
bool JoinShared(const PhaseGemm& its, int selection, int parts, PhaseGemm* gemm) {
  TileView layout = its.weights;
  layout.tile_bytes = gemm->weights.tile_bytes;
  layout.groups_per_tile = gemm->weights.groups_per_tile;
  layout.k = gemm->weights.k;
  layout.n = gemm->weights.n;
  gemm->shared = its.weights;
  gemm->shared_selection = selection;
  gemm->shared_parts = parts;
  gemm->use = std::max(gemm->use, its.use);
  return SameTiles(gemm->weights, layout) && gemm->sides == its.sides;
}

PersistentDelta DeltaOf(const GatedDeltaStep& step) {
  const GatedDeltaSizes& sizes = step.weights.sizes;
  PersistentDelta delta;
  delta.key_heads = static_cast<int>(sizes.key_heads);
  delta.value_heads = static_cast<int>(sizes.value_heads);
  delta.key_dim = static_cast<int>(sizes.key_dim);
  delta.value_dim = static_cast<int>(sizes.value_dim);
  while (1 << delta.value_log2 < delta.value_dim) ++delta.value_log2;
  delta.slices = delta.value_dim / kDeltaColumns;
  delta.group = delta.value_heads / delta.key_heads;
  delta.states = static_cast<int>(step.cache_group);
  const int keys = delta.key_dim;
  const int values = delta.group * delta.value_dim;
  // In a key head's columns, or in all heads'.
  int next = 0;
  const auto take = [&](int width, int of_key_head) {
    const HeadColumns columns = {next, of_key_head};
    next += step.by_head ? width : width * delta.key_heads;
    return columns;
  };
  const int of_head = 2 * (keys + values);
  delta.queries = take(keys, step.by_head ? of_head : keys);
  delta.keys = take(keys, step.by_head ? of_head : keys);
  delta.values = take(values, step.by_head ? of_head : values);
  delta.gates = take(values, step.by_head ? of_head : values);
  next = 0;
  delta.writes = take(delta.group, step.by_head ? 2 * delta.group : delta.group);
  delta.decays = take(delta.group, step.by_head ? 2 * delta.group : delta.group);
  return delta;
}

}  // namespace

Support PersistentDescription::AddLayer(const LayerSteps& steps, int64_t hidden) {
  if (const Support support = SupportsLayer(steps, hidden); !support.ok()) return support;
  if (steps.latent != nullptr) return AddProjections(*steps.latent);
  if (steps.attention != nullptr) {
    const Support support = SetAttention(*steps.attention, hidden);
    if (!support.ok()) return support;
  }
  shape_.features = static_cast<int>(hidden);
  if (steps.hybrid) shape_.form = PersistentForm::kHybrid;
  if (steps.between) shape_.form = PersistentForm::kBetween;
  PersistentLayer& layer = layers_.emplace_back();
  if (const Support support = AddMixer(steps, &layer); !support.ok()) return support;
  if (steps.attention != nullptr) AddAttention(steps, &layer);
  if (steps.ends()) return {};
  return steps.experts != nullptr ? AddExperts(steps, &layer) : AddMlp(steps, &layer);
}

/// The projections before latent attention that a run ends with.
Support PersistentDescription::AddProjections(const LatentProjectStep& step) {
  const bool direct = !step.q.parts.empty();
  PersistentLayer layer;
  PhaseGemm& inputs = layer.gemms[static_cast<int>(Phase::kQkv)];
  const Support paired = gemms_.AddPair(direct ? step.q : step.q_a, step.kv_a, &inputs);
  if (!paired.ok()) return paired;
  SplitPhase(Phase::kQkv, blocks_, &inputs);
  if (!direct) {
    PhaseGemm& queries = layer.gemms[static_cast<int>(Phase::kOut)];
    if (const Support support = gemms_.Add(step.q_b, 1, &queries); !support.ok()) return support;
    // As kQkv's, its sums are not added to the residual.
    SplitPhase(Phase::kQkv, blocks_, &queries);
    layer.query_norm = step.q_norm.weight.As<float>();
    layer.query_epsilon = step.q_norm.epsilon;
  }
  layer.attention_norm = step.norm.weight.As<float>();
  layer.attention_epsilon = step.norm.epsilon;
  layer.key_norm = step.kv_norm.weight.As<float>();
  layer.key_epsilon = step.kv_norm.epsilon;
  layer.latent_features = static_cast<int>(step.kv_norm.weight.ElementCount());
  layers_.push_back(layer);
  return {};
}

/// Sets what all layers' attention has in common.
Support PersistentDescription::SetAttention(const AttentionStep& step, int64_t hidden) {
  const PersistentArguments shape = ShapeOf(step, hidden, shape_);
  if (shape_.attention_layers > 0 && !SameAttention(shape_, shape)) {
    return {"another shape of attention than the layers before"};
  }
  shape_ = shape;
  if (shape.norms_after_rotary) TakeGeneralForm();
  shape_.key_groups |= 1U << step.cache_group;
  CacheGroup& group = shape_.groups[step.cache_group];
  group.window = static_cast<int>(std::min<int64_t>(step.options.window, 1 << 30));
  std::optional<int>& window = windows_[step.cache_group];
  if (window.value_or(group.window) != group.window) return {"several windows in a cache group"};
  window = group.window;
  group.page_stride = step.cache.page_stride;
  group.slab_pages = static_cast<uint32_t>(std::min<int64_t>(step.cache.slab_pages, 1U << 31));
  return {};
}

/// The projections before and after a mixer, where the layer has them.
Support PersistentDescription::AddMixer(const LayerSteps& steps, PersistentLayer* layer) {
  PhaseGemm& inputs = layer->gemms[static_cast<int>(Phase::kQkv)];
  if (steps.delta != nullptr) {
    const Support support = AddDelta(*steps.delta, layer);
    if (!support.ok()) return support;
  } else if (steps.project != nullptr) {
    // The words of queries, keys and values are adjacent, as the outputs of one part are.
    const Support support = gemms_.Add(steps.project->linear, 1, &inputs);
    if (!support.ok()) return support;
    layer->attention_norm = steps.project->norm.weight.As<float>();
    layer->attention_epsilon = steps.project->norm.epsilon;
  }
  if (layer->attention_norm != nullptr) SplitPhase(Phase::kQkv, blocks_, &inputs);
  if (steps.ends()) return {};
  PhaseGemm& out = layer->gemms[static_cast<int>(Phase::kOut)];
  if (const Support support = gemms_.Add(steps.out->linear, 1, &out); !support.ok()) return support;
  SplitPhase(Phase::kOut, blocks_, &out);
  return {};
}

void PersistentDescription::AddAttention(const LayerSteps& steps, PersistentLayer* layer) {
  const AttentionStep& attention = *steps.attention;
  layer->attends = 1;
  layer->mixer_index = shape_.attention_layers++;
  layer->query_norm = attention.q_norm.weight.As<float>();
  layer->key_norm = attention.k_norm.weight.As<float>();
  layer->query_epsilon = attention.q_norm.epsilon;
  layer->key_epsilon = attention.k_norm.epsilon;
  layer->sinks = attention.options.sinks.As<float>();
  layer->cache_group = static_cast<int>(attention.cache_group);
  layer->first_element = attention.cache.first_element;
}

/// Sets what all gated delta nets have in common.
Support PersistentDescription::SetDelta(const GatedDeltaStep& step) {
  const PersistentDelta delta = DeltaOf(step);
  if (shape_.delta.value_heads == 0) shape_.delta = delta;
  if (shape_.delta != delta) return {"another shape of delta rules than the layers before"};
  if (delta.value_heads * delta.slices > blocks_) {
    return {"delta rules of {0} value features in all, which are too many",
            int64_t{delta.value_heads} * delta.value_dim};
  }
  CacheGroup& group = shape_.groups[step.cache_group];
  group.page_stride = step.states.page_stride;
  group.slab_pages = static_cast<uint32_t>(std::min<int64_t>(step.states.slab_pages, 1U << 31));
  return {};
}

Support PersistentDescription::AddDelta(const GatedDeltaStep& step, PersistentLayer* layer) {
  if (const Support support = SetDelta(step); !support.ok()) return support;
  const StepLinear inputs = {step.linear.parts.first(1), {}, step.linear.in, step.linear.out};
  PhaseGemm& gemm = layer->gemms[static_cast<int>(Phase::kQkv)];
  if (const Support support = gemms_.Add(inputs, 1, &gemm); !support.ok()) return support;
  const GatedDeltaSizes& sizes = step.weights.sizes;
  if (gemm.n != sizes.channels() + sizes.value_heads * sizes.value_dim) {
    return {"queries, keys, values and gates of a delta rule in several parts"};
  }
  for (const PreparedWeights& part : step.linear.parts.subspan(1)) {
    if (!gemms_.IsOnDevice(part)) return {"weights on the host"};
    delta_rows_.push_back(static_cast<const PreparedTiles*>(Internals::Storage(part)));
  }
  layer->mixer_index = shape_.delta_layers++;
  layer->attention_norm = step.norm.weight.As<float>();
  layer->attention_epsilon = step.norm.epsilon;
  // Replaced by an address, once there is memory.
  layer->delta_rows = layer->attention_norm;
  layer->conv = step.weights.conv.As<float>();
  layer->log_decay = step.weights.log_decay.As<float>();
  layer->decay_bias = step.weights.decay_bias.As<float>();
  layer->delta_norm = step.weights.norm.As<float>();
  layer->delta_epsilon = step.weights.epsilon;
  layer->cache_group = static_cast<int>(step.cache_group);
  layer->first_element = step.states.first_element;
  return {};
}

void PersistentDescription::AddAhead(std::span<const StepOperation> operations) {
  if (operations.size() < 2) return;
  const auto* const attention = std::get_if<AttentionStep>(&operations[0]);
  const auto* const out = std::get_if<ProjectAddStep>(&operations[1]);
  if (attention == nullptr || out == nullptr) return;
  for (const TensorView& matrices : {attention->latent_keys, attention->latent_values}) {
    AddAheadRange(matrices.data(), matrices.ElementCount() * DTypeBytes(matrices.dtype()));
  }
  PhaseGemm gemm;
  if (!gemms_.Add(out->linear, 1, &gemm).ok()) return;
  AddAheadRange(gemm.weights.tiles, Internals::Storage(out->linear.parts[0])->bytes);
}

void PersistentDescription::AddAheadRange(const void* data, int64_t bytes) {
  bytes = std::min(bytes, kMostAheadBytes - ahead_bytes_) / 16 * 16;
  if (data == nullptr || bytes == 0 || ahead_ == kMostAhead) return;
  shape_.ahead[ahead_++] = {static_cast<const uint8_t*>(data), bytes};
  ahead_bytes_ += bytes;
}

/// Takes the general form for what kToken lacks; kHybrid has shared experts of its own.
void PersistentDescription::TakeGeneralForm() {
  if (shape_.form == PersistentForm::kToken) shape_.form = PersistentForm::kGeneral;
}

Support PersistentDescription::SetGate(const GateOptions& gate) {
  const GateView view = {static_cast<int>(gate.activation), gate.limit, gate.alpha};
  if (layers_.size() == 1) shape_.gate = view;
  if (shape_.gate == view) return {};
  return {"another gated activation than the layers before"};
}

Support PersistentDescription::AddMlp(const LayerSteps& steps, PersistentLayer* layer) {
  PhaseGemm& gates = layer->gemms[static_cast<int>(Phase::kGates)];
  PhaseGemm& down = layer->gemms[static_cast<int>(Phase::kDown)];
  if (const Support support = SetGate(steps.gate_up->gate); !support.ok()) return support;
  const StepMlp mlp = {steps.gate_up->gate_up, steps.down->linear};
  if (const Support support = gemms_.AddGated(mlp, &gates, &down); !support.ok()) return support;
  SplitPhase(Phase::kGates, blocks_, &gates);
  SplitPhase(Phase::kDown, blocks_, &down);
  layer->mlp_norm = steps.gate_up->norm.weight.As<float>();
  layer->mlp_epsilon = steps.gate_up->norm.epsilon;
  return {};
}

Support PersistentDescription::SetRouter(const RouterOptions& options, const ExpertsStep& step) {
  PersistentRouter router;
  router.experts = static_cast<int>(step.experts.size());
  router.shared = SharedParts(step);
  router.shared_gated = step.shared_gate.parts.empty() ? 0 : 1;
  router.top_k = static_cast<int>(options.top_k);
  router.scoring = static_cast<int>(options.scoring);
  router.groups = static_cast<int>(options.groups);
  router.top_groups = static_cast<int>(options.top_groups);
  router.best_of_group = static_cast<int>(options.best_of_group);
  router.normalize = options.normalize;
  router.least_sum = static_cast<double>(options.least_sum);
  router.scaling_factor = static_cast<double>(options.scaling_factor);
  if (routers_.empty()) shape_.router = router;
  if (router.shared > 0) TakeGeneralForm();
  if (shape_.router == router) return {};
  return {"another router than the layers before"};
}

Support PersistentDescription::AddExperts(const LayerSteps& steps, PersistentLayer* layer) {
  const RouteStep& route = *steps.route;
  const std::vector<StepMlp>& experts = steps.experts->experts;
  if (const Support support = SetGate(steps.experts->gate); !support.ok()) return support;
  if (const Support support = SetRouter(route.options, *steps.experts); !support.ok()) {
    return support;
  }
  PhaseGemm& gates = layer->gemms[static_cast<int>(Phase::kGates)];
  PhaseGemm& down = layer->gemms[static_cast<int>(Phase::kDown)];
  for (const StepMlp& mlp : experts) {
    PhaseGemm its_gates;
    PhaseGemm its_down;
    if (const Support support = gemms_.AddGated(mlp, &its_gates, &its_down); !support.ok())
      return support;
    if (&mlp == &experts.front()) {
      gates = its_gates;
      down = its_down;
    }
    if (!Alike(gates, its_gates) || !Alike(down, its_down)) return {"experts in different tiles"};
    experts_.push_back(ExpertOf(its_gates, its_down));
    if (its_down.bias != nullptr) layer->down_biases = 1;
  }
  if (const Support support = AddShared(*steps.experts, &gates, &down); !support.ok()) {
    return support;
  }
  // The parts of the shared expert, if there is one, come last.
  if (experts_.back().down_bias != nullptr) layer->down_biases = 1;
  // Each expert has its own.
  gates.bias = nullptr;
  down.bias = nullptr;
  gates.copies = shape_.router.selected();
  down.segments = shape_.router.selected();
  down.k_tiles *= down.segments;
  SplitPhase(Phase::kGates, blocks_, &gates);
  SplitPhase(Phase::kDown, blocks_, &down);
  layer->mlp_norm = route.norm.weight.As<float>();
  layer->mlp_epsilon = route.norm.epsilon;
  layer->router_bias = route.router.bias.As<float>();
  layer->choice_bias = route.options.choice_bias.As<float>();
  // Replaced by addresses, once there is memory.
  layer->experts = reinterpret_cast<const PersistentExpert*>(experts_.data());
  routers_.push_back(static_cast<const PreparedTiles*>(Internals::Storage(route.router.parts[0])));
  if (shape_.router.shared_gated != 0) {
    const PreparedWeights& part = steps.experts->shared_gate.parts[0];
    routers_.push_back(static_cast<const PreparedTiles*>(Internals::Storage(part)));
  }
  return {};
}

/// The parts of the shared expert, the last ones of a layer's experts, whose tiles may have other
/// groups than the others'.
Support PersistentDescription::AddShared(const ExpertsStep& step, PhaseGemm* gates,
                                         PhaseGemm* down) {
  if (shape_.router.shared == 0) return {};
  PhaseGemm its_gates;
  PhaseGemm its_down;
  if (const Support support = gemms_.AddGated(step.shared, &its_gates, &its_down); !support.ok()) {
    return support;
  }
  const int selection = shape_.router.top_k;
  const int parts = shape_.router.shared;
  const bool fits = its_gates.weights.k == gates->weights.k && its_gates.n == parts * gates->n &&
                    its_down.weights.k == parts * down->weights.k && its_down.n == down->n;
  if (!fits || !JoinShared(its_gates, selection, parts, gates) ||
      !JoinShared(its_down, selection, parts, down)) {
    return {"a shared expert in other tiles than the experts"};
  }
  // A schedule has the places of its parts' tiles, from the beginning of the matrices.
  experts_.insert(experts_.end(), static_cast<size_t>(parts), ExpertOf(its_gates, its_down));
  return {};
}

}  // namespace marlin::cuda
