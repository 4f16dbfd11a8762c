#include "backends/cuda/persistent/persistent_description.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "backends/cuda/common/tile_gemm.h"

namespace marlin::cuda {
namespace {

/// Whether tiles of two matrices are read alike.
bool SameTiles(const TileView& a, const TileView& b) { return a.n == b.n && SameTileLayout(a, b); }

bool SameAttention(const PersistentArguments& a, const PersistentArguments& b) {
  return a.features == b.features && a.heads == b.heads && a.kv_heads == b.kv_heads &&
         a.key_dim == b.key_dim && a.value_dim == b.value_dim && a.scale == b.scale &&
         a.frequencies == b.frequencies && a.pairs == b.pairs &&
         a.rotary_factor == b.rotary_factor && a.interleaved == b.interleaved &&
         a.cache_bytes == b.cache_bytes;
}

}  // namespace

Support PersistentDescription::AddLayer(const LayerSteps& steps, int64_t hidden) {
  if (const Support support = SupportsLayer(steps, hidden); !support.ok()) return support;
  if (const Support support = SetAttention(*steps.attention, hidden); !support.ok()) return support;
  PersistentLayer& layer = layers_.emplace_back();
  if (const Support support = AddAttention(steps, &layer); !support.ok()) return support;
  return steps.experts != nullptr ? AddExperts(steps, &layer) : AddMlp(steps, &layer);
}

/// The tiles of a part, if they are of the kind of all.
Support PersistentDescription::TakeTiles(const PreparedWeights& part, TileView* tiles) {
  if (backend_ == nullptr) backend_ = Internals::Storage(part)->backend;
  if (Internals::Storage(part)->backend != backend_) return {"experts on the host"};
  const auto& prepared = static_cast<const PreparedTiles&>(*Internals::Storage(part));
  if (!prepared.traits.tiled || prepared.traits.marlin_w4) return {"weights that are not in tiles"};
  if (prepared.traits.sparse) return {"sparse weights"};
  if (TransformsInput(prepared.spec)) return {"weights with an input transform"};
  if (!kind_.has_value()) kind_ = prepared.kind();
  if (*kind_ != prepared.kind()) return {"weights with several kinds of codes"};
  *tiles = prepared.Tiles(0);
  tiles->multiplier *= std::ldexp(1.0F, ExponentsOf(*kind_, true).shift + tiles->table_exponent);
  return {};
}

/// A linear map of one part, or of two equal ones: gate and up.
Support PersistentDescription::AddGemm(const StepLinear& linear, size_t most_parts,
                                       PhaseGemm* gemm) {
  const size_t parts = linear.parts.size();
  if (parts == 0 || parts > most_parts) {
    return {"a projection of {0} parts", static_cast<int64_t>(parts)};
  }
  TileView tiles;
  if (const Support support = TakeTiles(linear.parts[0], &tiles); !support.ok()) return support;
  if (tiles.k == 0 || tiles.n % 4 != 0) {
    return {"a projection to {0} features; supported: multiples of 4", tiles.n};
  }
  gemm->weights = tiles;
  gemm->use = UseOf(tiles, *kind_);
  gemm->sides = static_cast<int>(parts);
  if (parts == 2) {
    TileView up;
    if (const Support support = TakeTiles(linear.parts[1], &up); !support.ok()) return support;
    if (!SameTiles(tiles, up)) return {"gate and up in different tiles"};
    gemm->up_tiles = up.tiles;
    gemm->up_multiplier = up.multiplier;
  }
  gemm->bias = linear.bias.As<float>();
  gemm->n = tiles.n;
  gemm->strips = (tiles.n + kStripOutputs - 1) / kStripOutputs;
  gemm->k_tiles = tiles.tiles_of_strip;
  return {};
}

/// Sets what all layers' attention has in common.
Support PersistentDescription::SetAttention(const AttentionStep& step, int64_t hidden) {
  PersistentArguments shape = shape_;
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
  shape.cache_bytes = step.cache.type == DType::kF8E4M3 ? 1 : 2;
  if (!layers_.empty() && !SameAttention(shape_, shape)) {
    return {"another shape of attention than the layers before"};
  }
  shape_ = shape;
  CacheGroup& group = shape_.groups[step.cache_group];
  group.window = static_cast<int>(std::min<int64_t>(step.options.window, 1 << 30));
  std::optional<int>& window = windows_[step.cache_group];
  if (window.value_or(group.window) != group.window) return {"several windows in a cache group"};
  window = group.window;
  group.page_stride = step.cache.page_stride;
  group.slab_pages = static_cast<uint32_t>(std::min<int64_t>(step.cache.slab_pages, 1U << 31));
  return {};
}

Support PersistentDescription::AddAttention(const LayerSteps& steps, PersistentLayer* layer) {
  // The words of queries, keys and values are adjacent, as the outputs of one part are.
  for (const auto& [phase, linear] : {std::pair(Phase::kQkv, &steps.project->linear),
                                      std::pair(Phase::kOut, &steps.out->linear)}) {
    PhaseGemm& gemm = layer->gemms[static_cast<int>(phase)];
    if (const Support support = AddGemm(*linear, 1, &gemm); !support.ok()) return support;
    SplitPhase(phase, blocks_, &gemm);
  }
  const AttentionStep& attention = *steps.attention;
  layer->attention_norm = steps.project->norm.weight.As<float>();
  layer->attention_epsilon = steps.project->norm.epsilon;
  layer->query_norm = attention.q_norm.weight.As<float>();
  layer->key_norm = attention.k_norm.weight.As<float>();
  layer->query_epsilon = attention.q_norm.epsilon;
  layer->key_epsilon = attention.k_norm.epsilon;
  layer->sinks = attention.options.sinks.As<float>();
  layer->cache_group = static_cast<int>(attention.cache_group);
  layer->first_element = attention.cache.first_element;
  return {};
}

Support PersistentDescription::SetGate(const GateOptions& gate) {
  const GateView view = {static_cast<int>(gate.activation), gate.limit, gate.alpha};
  if (layers_.size() == 1) shape_.gate = view;
  if (shape_.gate == view) return {};
  return {"another gated activation than the layers before"};
}

/// The two products of a gated MLP.
Support PersistentDescription::AddGates(const StepMlp& mlp, PhaseGemm* gates, PhaseGemm* down) {
  if (const Support support = AddGemm(mlp.gate_up, 2, gates); !support.ok()) return support;
  if (const Support support = AddGemm(mlp.down, 1, down); !support.ok()) return support;
  const int inner = down->weights.k;
  if (gates->n * gates->sides == 2 * inner && inner % 4 == 0) return {};
  return {"{0} inner features; supported: multiples of 4, half of gate and up", inner};
}

Support PersistentDescription::AddMlp(const LayerSteps& steps, PersistentLayer* layer) {
  PhaseGemm& gates = layer->gemms[static_cast<int>(Phase::kGates)];
  PhaseGemm& down = layer->gemms[static_cast<int>(Phase::kDown)];
  if (const Support support = SetGate(steps.gate_up->gate); !support.ok()) return support;
  const StepMlp mlp = {steps.gate_up->gate_up, steps.down->linear};
  if (const Support support = AddGates(mlp, &gates, &down); !support.ok()) return support;
  SplitPhase(Phase::kGates, blocks_, &gates);
  SplitPhase(Phase::kDown, blocks_, &down);
  layer->mlp_norm = steps.gate_up->norm.weight.As<float>();
  layer->mlp_epsilon = steps.gate_up->norm.epsilon;
  return {};
}

Support PersistentDescription::SetRouter(const RouterOptions& options, int64_t experts) {
  PersistentRouter router;
  router.experts = static_cast<int>(experts);
  router.top_k = static_cast<int>(options.top_k);
  router.scoring = static_cast<int>(options.scoring);
  router.groups = static_cast<int>(options.groups);
  router.top_groups = static_cast<int>(options.top_groups);
  router.best_of_group = static_cast<int>(options.best_of_group);
  router.normalize = options.normalize;
  router.least_sum = static_cast<double>(options.least_sum);
  router.scaling_factor = static_cast<double>(options.scaling_factor);
  if (routers_.empty()) shape_.router = router;
  if (shape_.router == router) return {};
  return {"another router than the layers before"};
}

Support PersistentDescription::AddExperts(const LayerSteps& steps, PersistentLayer* layer) {
  const RouteStep& route = *steps.route;
  const std::vector<StepMlp>& experts = steps.experts->experts;
  if (const Support support = SetGate(steps.experts->gate); !support.ok()) return support;
  if (const Support support = SetRouter(route.options, std::ssize(experts)); !support.ok()) {
    return support;
  }
  PhaseGemm& gates = layer->gemms[static_cast<int>(Phase::kGates)];
  PhaseGemm& down = layer->gemms[static_cast<int>(Phase::kDown)];
  for (const StepMlp& mlp : experts) {
    PhaseGemm its_gates;
    PhaseGemm its_down;
    if (const Support support = AddGates(mlp, &its_gates, &its_down); !support.ok()) return support;
    if (&mlp == &experts.front()) {
      gates = its_gates;
      down = its_down;
    }
    if (!SameTiles(gates.weights, its_gates.weights) || gates.sides != its_gates.sides ||
        gates.use != its_gates.use || !SameTiles(down.weights, its_down.weights) ||
        down.use != its_down.use) {
      return {"experts in different tiles"};
    }
    experts_.push_back({its_gates.weights.tiles, its_gates.up_tiles, its_down.weights.tiles,
                        its_gates.bias, its_down.bias, its_gates.weights.multiplier,
                        its_gates.up_multiplier, its_down.weights.multiplier});
  }
  // Each expert has its own.
  gates.bias = nullptr;
  down.bias = nullptr;
  gates.copies = shape_.router.top_k;
  down.segments = shape_.router.top_k;
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
  return {};
}

}  // namespace marlin::cuda
