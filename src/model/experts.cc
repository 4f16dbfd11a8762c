// How experts run: the tokens of each expert are gathered, go through its MLP as one product, and
// come back weighted. The only place that knows; expert operations will replace what is here.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/macros.h"
#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "model/forward.h"

namespace marlin {
namespace {

/// Tokens' choices, sorted by expert.
struct Assignment {
  std::vector<int32_t> token;  ///< Of each sorted slot, its row of x.
  std::vector<int32_t> place;  ///< Of each choice (token major), its sorted slot.
  std::vector<float> weight;   ///< Of each sorted slot.
  std::vector<int64_t> begin;  ///< Of each expert, its first slot; one more at the end.
};

Assignment Sort(const std::vector<int32_t>& ids, const std::vector<float>& weights, int64_t experts,
                int64_t top_k) {
  Assignment sorted;
  sorted.begin.assign(static_cast<size_t>(experts) + 1, 0);
  for (const int32_t id : ids) ++sorted.begin[static_cast<size_t>(id) + 1];
  std::partial_sum(sorted.begin.begin(), sorted.begin.end(), sorted.begin.begin());
  std::vector<int64_t> next(sorted.begin.begin(), sorted.begin.end() - 1);
  sorted.token.resize(ids.size());
  sorted.place.resize(ids.size());
  sorted.weight.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto slot = static_cast<size_t>(next[static_cast<size_t>(ids[i])]++);
    sorted.token[slot] = static_cast<int32_t>(i / static_cast<size_t>(top_k));
    sorted.place[i] = static_cast<int32_t>(slot);
    sorted.weight[slot] = weights[i];
  }
  return sorted;
}

MutableTensorView Rows(const MutableTensorView& view, int64_t first, int64_t count) {
  return {view.As<float>() + first * view.stride(0),
          DType::kF32,
          {count, view.dim(1)},
          {view.stride(0), 1}};
}

Result<Assignment> Choose(const Pass& pass, const ExpertsLayer& layer, const TensorView& x) {
  const DecoderConfig& config = pass.decoder.config;
  const int64_t rows = x.dim(0);
  const int64_t experts = config.shape.experts;
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView logits,
                          pass.arena.Take(DType::kF32, {rows, experts}));
  // A rounded score could change the choice.
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, layer.router, x, {Accuracy::kExact, false}, logits));
  RouterOptions options = config.router;
  if (!layer.choice_bias.empty()) {
    options.choice_bias = {layer.choice_bias.data(), DType::kF32, {experts}};
  }
  std::vector<int32_t> ids(static_cast<size_t>(rows * options.top_k));
  std::vector<float> weights(ids.size());
  const Shape shape{rows, options.top_k};
  MARLIN_RETURN_IF_ERROR(RouteTokens(pass.device, logits, options, {ids.data(), DType::kI32, shape},
                                     {weights.data(), DType::kF32, shape}));
  return Sort(ids, weights, experts, options.top_k);
}

/// out += the shared expert, gated by a sigmoid where there is a gate.
Status AddShared(const Pass& pass, const ExpertsLayer& layer, const TensorView& x,
                 const MutableTensorView& out) {
  const int64_t rows = x.dim(0);
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView shared,
                          pass.arena.Take(DType::kF32, out.shape()));
  TensorView row_weight;
  if (!layer.shared_gate.empty()) {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView gate, pass.arena.Take(DType::kF32, {rows, 1}));
    MARLIN_RETURN_IF_ERROR(Apply(pass.device, layer.shared_gate, x, pass.products, gate));
    MARLIN_RETURN_IF_ERROR(pass.device.Synchronize());
    for (int64_t i = 0; i < rows; ++i) {
      float& value = gate.As<float>()[i];
      value = 1.0F / (1.0F + std::exp(-value));
    }
    row_weight = {gate.data(), DType::kF32, {rows}};
  }
  MARLIN_RETURN_IF_ERROR(RunMlp(pass, layer.shared, x, shared, row_weight));
  return AddTo(pass.device, shared, out);
}

}  // namespace

Status RunExperts(const Pass& pass, const ExpertsLayer& layer, const TensorView& x,
                  const MutableTensorView& out) {
  const int64_t hidden = x.dim(1);
  const int64_t top_k = pass.decoder.config.router.top_k;
  MARLIN_ASSIGN_OR_RETURN(const Assignment sorted, Choose(pass, layer, x));
  const auto slots = static_cast<int64_t>(sorted.token.size());
  const ArenaScope scope(pass.arena);
  const auto take = [&] { return pass.arena.Take(DType::kF32, {slots, hidden}); };
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView gathered, take());
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView results, take());
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView weights,
                          pass.arena.Take(DType::kF32, {1, slots}));
  MARLIN_RETURN_IF_ERROR(
      Convert(pass.device, {sorted.weight.data(), DType::kF32, {1, slots}}, weights));
  MARLIN_RETURN_IF_ERROR(LookUpRows(pass.device, x, sorted.token, gathered));
  for (size_t expert = 0; expert < layer.experts.size(); ++expert) {
    const int64_t first = sorted.begin[expert];
    const int64_t count = sorted.begin[expert + 1] - first;
    if (count == 0) continue;
    const TensorView weight(weights.As<float>() + first, DType::kF32, {count});
    MARLIN_RETURN_IF_ERROR(RunMlp(pass, layer.experts[expert], Rows(gathered, first, count),
                                  Rows(results, first, count), weight));
  }
  // Back to the order of the tokens (the gathered inputs are done with), then added up choice by
  // choice, which does not depend on the experts' numbers.
  MARLIN_RETURN_IF_ERROR(LookUpRows(pass.device, results, sorted.place, gathered));
  for (int64_t choice = 0; choice < top_k; ++choice) {
    const TensorView part(gathered.As<float>() + choice * hidden, DType::kF32, {x.dim(0), hidden},
                          {top_k * hidden, 1});
    MARLIN_RETURN_IF_ERROR(choice == 0 ? Convert(pass.device, part, out)
                                       : AddTo(pass.device, part, out));
  }
  return layer.shared.down.empty() ? Status() : AddShared(pass, layer, x, out);
}

}  // namespace marlin
