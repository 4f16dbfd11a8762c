// The selection of experts, from logits, or from rows and a router's matrix.
#include <fmt/core.h>

#include <limits>
#include <optional>

#include "backends/cuda/decoder/operations.h"
#include "backends/cuda/moe/router/router_launch.h"
#include "backends/cuda/moe/router/router_plan.h"
#include "backends/cuda/moe/router/router_product.h"
#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/weights/prepared_tiles.h"

namespace marlin::cuda {
namespace {

constexpr int64_t kMostIndex = std::numeric_limits<int32_t>::max();

// The kernel switches on these numbers.
static_assert(static_cast<int>(RouterOptions::Scoring::kSoftmaxOfChosen) == 1);
static_assert(static_cast<int>(RouterOptions::Scoring::kSigmoid) == 2);

/// A selection's arguments without its logits.
RouterArguments SelectionOf(const RouterOptions& options, int64_t experts,
                            const MutableTensorView& ids, const MutableTensorView& weights,
                            const ErrorView& errors) {
  RouterArguments args;
  args.ids = ids.As<int32_t>();
  args.ids_stride = ids.stride(0);
  args.weights = weights.As<float>();
  args.weights_stride = weights.stride(0);
  args.bias = options.choice_bias.As<float>();
  args.scales = options.scales.As<float>();
  args.tokens = static_cast<int>(ids.dim(0));
  args.experts = static_cast<int>(experts);
  args.top_k = static_cast<int>(options.top_k);
  args.scoring = static_cast<int>(options.scoring);
  args.groups = static_cast<int>(options.groups);
  args.top_groups = static_cast<int>(options.top_groups);
  args.best_of_group = static_cast<int>(options.best_of_group);
  args.normalize = options.normalize;
  args.least_sum = static_cast<double>(options.least_sum);
  args.scaling_factor = static_cast<double>(options.scaling_factor);
  args.errors = errors;
  return args;
}

/// The plan of a router's matrix, if it has bf16 tiles and a shape that is supported.
std::optional<RouterPlan> PlanOf(const PreparedTiles& matrix, const DeviceShape& device) {
  const WeightsSpec& spec = matrix.spec;
  const bool tiles = matrix.traits.tiled && matrix.kind() == CodeKind::kDense16 &&
                     spec.format == Format::kBf16 && spec.experts == 1 && !TransformsInput(spec);
  if (!tiles || spec.k > kMostIndex || spec.n > kMostTeamExperts) return std::nullopt;
  return PlanRouter({static_cast<int>(spec.k), static_cast<int>(spec.n)}, device);
}

}  // namespace

template <>
cudaError_t Load<RouteTokensCall>() {
  const cudaError_t error = LoadRouter();
  return error == cudaSuccess ? LoadRouteRows() : error;
}

Status Run(const RouteTokensCall& call, const CallContext& context) {
  const int64_t experts = call.logits.dim(1);
  if (const int64_t most = MostRouterExperts(context.shape); experts > most) {
    return Status(Code::kUnsupported,
                  fmt::format("router: {} experts; supported: up to {}", experts, most));
  }
  RouterArguments args = SelectionOf(call.options, experts, call.ids, call.weights, context.errors);
  args.logits = call.logits.As<float>();
  args.logits_stride = call.logits.stride(0);
  return context.Check(LaunchRouter(args, context.shape, context.stream), "moe_router_topk");
}

bool RoutesRows(const RouteRowsCall& call, const DeviceShape& shape) {
  const TensorView& x = call.x;
  const bool rows = x.dtype() == DType::kF32 && x.rank() == 2 && x.stride(1) == 1 &&
                    x.stride(0) % 4 == 0 && reinterpret_cast<uintptr_t>(x.data()) % 16 == 0 &&
                    x.dim(0) <= kMostIndex;
  const bool bias = call.bias.empty() || call.bias.dtype() == DType::kF32;
  return rows && bias && PlanOf(static_cast<const PreparedTiles&>(call.matrix), shape).has_value();
}

Status Run(const RouteRowsCall& call, const CallContext& context) {
  const auto& matrix = static_cast<const PreparedTiles&>(call.matrix);
  const std::optional<RouterPlan> plan = PlanOf(matrix, context.shape);
  if (!plan.has_value()) return Status(Code::kInternal, "router: a call that has no plan");
  RouteRowsArguments args;
  args.plan = *plan;
  args.router = SelectionOf(call.options, matrix.spec.n, call.ids, call.weights, context.errors);
  args.logits = static_cast<float*>(context.workspace);
  args.router.logits = args.logits;
  args.router.logits_stride = matrix.spec.n;
  args.x = call.x.As<float>();
  args.x_stride = call.x.stride(0);
  args.hidden = static_cast<int>(matrix.spec.k);
  args.bias = call.bias.As<float>();
  args.weights = matrix.Tiles(0);
  return context.Check(LaunchRouteRows(args, context.shape, context.stream), "moe_router");
}

}  // namespace marlin::cuda
