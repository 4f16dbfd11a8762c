// Mixture of experts: gathers the tokens of each expert, runs its MLP as one GEMM per projection,
// and scatters the weighted results. Isolated here until grouped expert operations replace it.
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "model/forward.h"

namespace marlin {
namespace {

/// The top-k selections of some tokens, sorted by expert. A slot is a selection's index in that
/// order. All of it is in device memory, which the host shares.
struct Assignment {
  TensorView token;            ///< i32 [slots]: the row of x.
  TensorView slot_of;          ///< i32 [selections], token major: the slot.
  TensorView weight;           ///< f32 [slots].
  std::vector<int64_t> begin;  ///< The first slot of each expert, plus an end.
};

/// Sorts ids [tokens, top_k] and their weights by expert.
Result<Assignment> Sort(const Pass& pass, const TensorView& ids, const TensorView& weights,
                        int64_t experts) {
  const auto selections = static_cast<size_t>(ids.ElementCount());
  const std::span id_of(ids.As<int32_t>(), selections);
  const Shape shape{static_cast<int64_t>(selections)};
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView token, pass.arena.Take(DType::kI32, shape));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView slot_of, pass.arena.Take(DType::kI32, shape));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView weight, pass.arena.Take(DType::kF32, shape));
  std::vector<int64_t> begin(static_cast<size_t>(experts) + 1, 0);
  for (const int32_t id : id_of) ++begin[static_cast<size_t>(id) + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (size_t i = 0; i < selections; ++i) {
    const int64_t slot = next[static_cast<size_t>(id_of[i])]++;
    token.As<int32_t>()[slot] = static_cast<int32_t>(i / static_cast<size_t>(ids.dim(1)));
    slot_of.As<int32_t>()[i] = static_cast<int32_t>(slot);
    weight.As<float>()[slot] = weights.As<float>()[i];
  }
  return Assignment{token, slot_of, weight, std::move(begin)};
}

MutableTensorView Rows(const MutableTensorView& view, int64_t first, int64_t count) {
  return {view.As<float>() + first * view.stride(0),
          DType::kF32,
          {count, view.dim(1)},
          {view.stride(0), 1}};
}

/// out += the shared expert, times its sigmoid gate if it has one.
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
    MARLIN_RETURN_IF_ERROR(ApplySigmoid(pass.device, gate));
    row_weight = {gate.data(), DType::kF32, {rows}};
  }
  MARLIN_RETURN_IF_ERROR(RunMlp(pass, layer.shared, x, shared, row_weight));
  return AddTo(pass.device, shared, out);
}

}  // namespace

Status RunRoute(const Pass& pass, int64_t index) {
  const DecoderLayer& layer = pass.layer(index);
  const StepValues& values = pass.values;
  MARLIN_RETURN_IF_ERROR(Normalize(pass, layer.mlp_norm, values.hidden, values.normed));
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView logits,
                          pass.arena.Take(DType::kF32, {pass.rows(), layer.experts.router.out}));
  // Exact: a rounded score could change the top-k selection.
  MARLIN_RETURN_IF_ERROR(
      Apply(pass.device, layer.experts.router, values.normed, {Accuracy::kExact, false}, logits));
  RouterOptions options = pass.decoder.config.router;
  options.choice_bias = layer.experts.choice_bias.view();
  return RouteTokens(pass.device, logits, options, values.expert_ids, values.expert_weights);
}

Status RunExperts(const Pass& pass, int64_t index) {
  const ExpertsLayer& layer = pass.layer(index).experts;
  const TensorView x = pass.values.normed;
  const int64_t hidden = x.dim(1);
  const int64_t top_k = pass.values.expert_ids.dim(1);
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const Assignment sorted,
                          Sort(pass, pass.values.expert_ids, pass.values.expert_weights,
                               static_cast<int64_t>(layer.experts.size())));
  const int64_t slots = sorted.token.dim(0);
  const auto take = [&](int64_t rows) { return pass.arena.Take(DType::kF32, {rows, hidden}); };
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView out, take(x.dim(0)));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView gathered, take(slots));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView results, take(slots));
  MARLIN_RETURN_IF_ERROR(LookUpRows(pass.device, x, sorted.token, gathered));
  for (size_t expert = 0; expert < layer.experts.size(); ++expert) {
    const int64_t first = sorted.begin[expert];
    const int64_t count = sorted.begin[expert + 1] - first;
    if (count == 0) continue;
    const TensorView weight(sorted.weight.As<float>() + first, DType::kF32, {count});
    MARLIN_RETURN_IF_ERROR(RunMlp(pass, layer.experts[expert], Rows(gathered, first, count),
                                  Rows(results, first, count), weight));
  }
  // Scatter back to token order (the gathered inputs are no longer needed), then add selection by
  // selection, so that the sum's order does not depend on the expert ids.
  MARLIN_RETURN_IF_ERROR(LookUpRows(pass.device, results, sorted.slot_of, gathered));
  for (int64_t selection = 0; selection < top_k; ++selection) {
    const TensorView part(gathered.As<float>() + selection * hidden, DType::kF32,
                          {x.dim(0), hidden}, {top_k * hidden, 1});
    MARLIN_RETURN_IF_ERROR(selection == 0 ? Convert(pass.device, part, out)
                                          : AddTo(pass.device, part, out));
  }
  if (!layer.shared.down.empty()) MARLIN_RETURN_IF_ERROR(AddShared(pass, layer, x, out));
  return AddBlock(pass, pass.layer(index).mlp_out_norm, out);
}

}  // namespace marlin
