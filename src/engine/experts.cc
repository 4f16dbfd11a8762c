// The operations of a layer of experts.
#include <vector>

#include "base/macros.h"
#include "engine/forward.h"
#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "ops/moe/moe.h"

namespace marlin {
namespace {

/// Tells the selections of a layer, once the device knows them.
Status Observe(const Pass& pass, int64_t index) {
  const TensorView& ids = pass.values.expert_ids;
  std::vector<int32_t> host(static_cast<size_t>(ids.ElementCount()));
  MARLIN_RETURN_IF_ERROR(pass.device.Synchronize());
  MARLIN_RETURN_IF_ERROR(pass.arena.Download(ids, host.data()));
  pass.routing->Add(index, host);
  return {};
}

/// The router's product and selection in one operation, if the device has one; false if not.
Result<bool> RouteFused(const Pass& pass, const ExpertsLayer& experts, const RouterOptions& options,
                        const MutableTensorView& logits) {
  const Projection& matrix = experts.router;
  if (pass.products.accuracy == Accuracy::kExact || matrix.parts.size() != 1) return false;
  const StepValues& values = pass.values;
  Router router{matrix.parts.front(), {}, options, Accuracy::kDefault};
  if (matrix.has_bias()) router.bias = {matrix.bias.data(), DType::kF32, {matrix.out}};
  return RouteInOne(pass.device, values.normed, router, logits, values.expert_ids,
                    values.expert_weights, pass.stream());
}

/// The result of an MLP, in the arena.
Result<MutableTensorView> RunMlp(const Pass& pass, const MlpLayer& mlp, const TensorView& x) {
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView inner,
                          pass.arena.Take(pass.products.activations, {pass.rows(), mlp.down.in}));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView out,
                          pass.arena.Take(DType::kF32, {pass.rows(), mlp.down.out}));
  MARLIN_RETURN_IF_ERROR(RunGate(pass, mlp, x, inner));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, mlp.down, inner, pass.products, out));
  return out;
}

}  // namespace

Status RunRoute(Pass& pass, int64_t index) {
  const DecoderLayer& layer = pass.layer(index);
  const StepValues& values = pass.values;
  const DeviceVector& norm = layer.experts.norm.empty() ? layer.mlp_norm : layer.experts.norm;
  const DeviceVector& own = layer.experts.router_norm;
  MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, own.empty() ? norm : own, values.normed));
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView logits,
                          pass.arena.Take(DType::kF32, {pass.rows(), layer.experts.router.out}));
  RouterOptions options = pass.decoder.config.router;
  options.choice_bias = layer.experts.choice_bias.view();
  options.scales = layer.experts.scales.view();
  MARLIN_ASSIGN_OR_RETURN(const bool routed, RouteFused(pass, layer.experts, options, logits));
  if (!routed) {
    // Exact: a rounded score could change the top-k selection.
    ProductOptions exact{Accuracy::kExact, false, pass.stream()};
    exact.determinism = pass.products.determinism;
    MARLIN_RETURN_IF_ERROR(Apply(pass.device, layer.experts.router, values.normed, exact, logits));
    MARLIN_RETURN_IF_ERROR(RouteTokens(pass.device, logits, options, values.expert_ids,
                                       values.expert_weights, pass.stream()));
  }
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kRouter));
  if (!own.empty()) MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, norm, values.normed));
  return pass.routing == nullptr ? Status() : Observe(pass, index);
}

Status RunExperts(Pass& pass, int64_t index) {
  const StepValues& values = pass.values;
  const ArenaScope scope(pass.arena);
  MutableTensorView shared;
  if (pass.decoder.config.family->scales_expert_inputs) {
    // The shared expert reads what is not scaled.
    const MlpLayer& mlp = pass.layer(index).experts.shared;
    MARLIN_ASSIGN_OR_RETURN(shared, RunMlp(pass, mlp, values.normed));
    MARLIN_RETURN_IF_ERROR(
        ScaleInputs(pass.device, values.expert_weights, values.normed, pass.stream()));
  }
  const DecoderConfig& config = pass.decoder.config;
  const ExpertsProblem problem{pass.rows(),
                               values.expert_ids.dim(1),
                               DType::kF32,
                               DType::kF32,
                               {config.activation, config.gate_limit, config.gate_alpha},
                               pass.products.accuracy,
                               pass.products.determinism,
                               pass.products.allow_bf16_activations};
  const ExpertsLayer& experts = pass.layer(index).experts;
  MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan plan,
                          experts.placed.count() > 0
                              ? PlanExperts(pass.device, problem, experts.placed)
                              : PlanExperts(pass.device, problem, experts.set));
  if (pass.plans != nullptr) pass.plans->push_back(plan);
  MARLIN_RETURN_IF_ERROR(plan.Run(values.normed, values.expert_ids, values.expert_weights,
                                  pass.block, {nullptr, 0, pass.stream()}));
  if (!shared.empty()) {
    MARLIN_RETURN_IF_ERROR(AddTo(pass.device, shared, pass.block, 1.0F, pass.stream()));
  }
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kExperts));
  if (!experts.out_norm.empty()) {
    MARLIN_RETURN_IF_ERROR(
        Normalize(pass, experts.out_norm, config.epsilon, pass.block, pass.block));
  }
  if (pass.layer(index).has_both()) {
    MARLIN_RETURN_IF_ERROR(AddTo(pass.device, pass.beside, pass.block, 1.0F, pass.stream()));
    MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kResidual));
  }
  return AddLastBlock(pass, index);
}

Status RunBeside(Pass& pass, int64_t index) {
  const DecoderLayer& layer = pass.layer(index);
  MARLIN_RETURN_IF_ERROR(RunGateUp(pass, index));
  MARLIN_RETURN_IF_ERROR(
      Apply(pass.device, layer.mlp.down, InnerOf(pass, index), pass.products, pass.beside));
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kDown));
  if (!layer.beside_out_norm.empty()) {
    MARLIN_RETURN_IF_ERROR(Normalize(pass, layer.beside_out_norm, pass.decoder.config.epsilon,
                                     pass.beside, pass.beside));
  }
  MARLIN_RETURN_IF_ERROR(RunRoute(pass, index));
  return RunExperts(pass, index);
}

}  // namespace marlin
