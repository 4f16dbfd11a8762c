// Experts and routers of the C API.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "c/handles.h"
#include "marlin/moe.h"

namespace marlin {
namespace {

static_assert(static_cast<int>(RouterOptions::Scoring::kSoftmaxOfChosen) ==
                  MARLIN_SCORING_SOFTMAX_OF_CHOSEN &&
              static_cast<int>(RouterOptions::Scoring::kSigmoid) == MARLIN_SCORING_SIGMOID);

Result<ExpertsProblem> ProblemOf(const marlin_experts_problem* given) {
  marlin_experts_problem read = MARLIN_EXPERTS_PROBLEM_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "problem", &read));
  ExpertsProblem problem;
  problem.tokens = read.tokens;
  problem.top_k = read.top_k;
  problem.x_type = Enumerator<DType>(read.x_type);
  problem.out_type = Enumerator<DType>(read.out_type);
  problem.gate = {Enumerator<Activation>(read.activation), read.limit, read.alpha};
  problem.accuracy = Enumerator<Accuracy>(read.accuracy);
  problem.determinism = Enumerator<Determinism>(read.determinism);
  problem.allow_bf16_activations = read.keep_activations == 0;
  return problem;
}

/// Everything of a problem that is an option of MoeForward.
MoeOptions OptionsOf(const ExpertsProblem& problem) {
  MoeOptions options;
  options.gate = problem.gate;
  options.accuracy = problem.accuracy;
  options.determinism = problem.determinism;
  options.allow_bf16_activations = problem.allow_bf16_activations;
  return options;
}

Result<Router> RouterOf(const marlin_router* given) {
  marlin_router read = MARLIN_ROUTER_INIT;
  MARLIN_RETURN_IF_ERROR(Read(given, "router", &read));
  MARLIN_RETURN_IF_ERROR(NotNull(read.weights, "router.weights"));
  Router router;
  router.weights = read.weights->weights;
  MARLIN_ASSIGN_OR_RETURN(router.bias, OptionalView(read.bias, "router.bias"));
  MARLIN_ASSIGN_OR_RETURN(router.options.choice_bias,
                          OptionalView(read.choice_bias, "router.choice_bias"));
  router.options.top_k = read.top_k;
  router.options.scoring = Enumerator<RouterOptions::Scoring>(read.scoring);
  router.options.normalize = read.keep_weights == 0;
  router.options.scaling_factor = read.scaling_factor;
  router.options.groups = read.groups;
  router.options.top_groups = read.top_groups;
  router.options.best_of_group = read.best_of_group;
  router.options.least_sum = read.least_sum;
  return router;
}

}  // namespace
}  // namespace marlin

using namespace marlin;  // NOLINT(google-build-using-namespace): the functions below are C's.

marlin_code marlin_experts_create(const marlin_device* device, const marlin_expert* experts,
                                  int64_t count, const marlin_expert* shared,
                                  const marlin_prepared* shared_gate, marlin_experts** made) {
  if (made != nullptr) *made = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(made);
    if (count > 0) MARLIN_NEED(experts);
    std::vector<Expert> all(static_cast<size_t>(std::max<int64_t>(count, 0)));
    for (size_t i = 0; i < all.size(); ++i) {
      const std::string name = "expert " + std::to_string(i);
      MARLIN_RETURN_IF_ERROR(ReadExpert(experts[i], name, &all[i]));
    }
    SharedExpert added;
    if (shared != nullptr) {
      Status status = ReadExpert(*shared, "shared expert", &added.expert);
      if (!status.ok()) return status;
    }
    if (shared_gate != nullptr) added.gate = shared_gate->weights;
    return Give(ExpertSet::Make(device->device, all, added), made);
  });
}

void marlin_experts_destroy(marlin_experts* experts) { delete experts; }

marlin_code marlin_plan_experts(const marlin_device* device, const marlin_experts* experts,
                                const marlin_experts_problem* problem, marlin_experts_plan** plan) {
  if (plan != nullptr) *plan = nullptr;
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(experts);
    MARLIN_NEED(plan);
    MARLIN_ASSIGN_OR_RETURN(const ExpertsProblem read, ProblemOf(problem));
    return Give(PlanExperts(device->device, read, experts->experts), plan);
  });
}

void marlin_experts_plan_destroy(marlin_experts_plan* plan) { delete plan; }

int64_t marlin_experts_plan_workspace_bytes(const marlin_experts_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

marlin_code marlin_experts_plan_run(const marlin_experts_plan* plan, const marlin_tensor* x,
                                    const marlin_tensor* ids, const marlin_tensor* weights,
                                    const marlin_tensor* out,
                                    const marlin_gemm_arguments* arguments) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(plan);
    MutableTensorView views[4];
    const std::pair<const marlin_tensor*, const char*> given[] = {
        {x, "x"}, {ids, "ids"}, {weights, "weights"}, {out, "out"}};
    for (size_t i = 0; i < 4; ++i) {
      MARLIN_ASSIGN_OR_RETURN(views[i], ViewOf(given[i].first, given[i].second));
    }
    MARLIN_ASSIGN_OR_RETURN(const GemmArguments read, ArgumentsOf(arguments));
    return plan->plan.Run(views[0], views[1], views[2], views[3],
                          {read.workspace, read.workspace_bytes, read.stream});
  });
}

marlin_code marlin_route_tokens(const marlin_device* device, const marlin_tensor* x,
                                const marlin_router* router, const marlin_tensor* ids,
                                const marlin_tensor* weights, void* stream) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_ASSIGN_OR_RETURN(const Router read, RouterOf(router));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView from, ViewOf(x, "x"));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView chosen, ViewOf(ids, "ids"));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView factors, ViewOf(weights, "weights"));
    return RouteHiddenStates(device->device, from, read, chosen, factors, stream);
  });
}

marlin_code marlin_moe_forward(const marlin_device* device, const marlin_tensor* x,
                               const marlin_router* router, const marlin_experts* experts,
                               const marlin_tensor* out, const marlin_experts_problem* problem,
                               const marlin_gemm_arguments* arguments) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(experts);
    MARLIN_ASSIGN_OR_RETURN(const Router read, RouterOf(router));
    MARLIN_ASSIGN_OR_RETURN(const ExpertsProblem how, ProblemOf(problem));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView from, ViewOf(x, "x"));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView to, ViewOf(out, "out"));
    MARLIN_ASSIGN_OR_RETURN(const GemmArguments with, ArgumentsOf(arguments));
    MoeOptions options = OptionsOf(how);
    options.workspace = with.workspace;
    options.workspace_bytes = with.workspace_bytes;
    options.stream = with.stream;
    return MoeForward(device->device, from, read, experts->experts, to, options);
  });
}

marlin_code marlin_moe_workspace_bytes(const marlin_device* device, const marlin_router* router,
                                       const marlin_experts* experts,
                                       const marlin_experts_problem* problem, int64_t* bytes) {
  return Guarded([&]() -> Status {
    MARLIN_NEED(device);
    MARLIN_NEED(experts);
    MARLIN_NEED(bytes);
    MARLIN_ASSIGN_OR_RETURN(const Router read, RouterOf(router));
    MARLIN_ASSIGN_OR_RETURN(const ExpertsProblem how, ProblemOf(problem));
    MARLIN_ASSIGN_OR_RETURN(
        *bytes, MoeWorkspaceBytes(device->device, how.tokens, how.x_type, how.out_type, read,
                                  experts->experts, OptionsOf(how)));
    return {};
  });
}
