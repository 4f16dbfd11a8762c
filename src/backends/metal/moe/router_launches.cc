#include "backends/metal/moe/router_launches.h"

#include <algorithm>
#include <cmath>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/moe/router_parameters.h"
#include "plan/step/router_errors.h"

namespace marlin::metal {
namespace {

using Scoring = RouterOptions::Scoring;
static_assert(static_cast<int>(Scoring::kSoftmax) == kernels::kScoreSoftmax);
static_assert(static_cast<int>(Scoring::kSoftmaxOfChosen) == kernels::kScoreSoftmaxOfChosen);
static_assert(static_cast<int>(Scoring::kSigmoid) == kernels::kScoreSigmoid);

/// A row of a view that has contiguous columns.
const std::byte* RowOfView(const TensorView& view, int64_t row) {
  return static_cast<const std::byte*>(view.data()) +
         row * view.stride(0) * DTypeBytes(view.dtype());
}

int64_t BytesOfRows(const TensorView& view, int64_t rows) {
  return ExtentBytes(rows, view.dim(1), view.stride(0), view.dtype());
}

/// The parameters and the buffers that both kernels have. Absent buffers are bound to the input,
/// and not read.
KernelLaunch RouterLaunch(const TensorView& input, const RouterOptions& options, int64_t experts,
                          const TensorView& ids, const TensorView& weights,
                          const RouterRows& rows) {
  KernelLaunch launch;
  launch.source = "route.metal";
  launch.threadgroups[0] = static_cast<uint32_t>(rows.count);
  kernels::RouterParameters p{};
  p.ids_stride = ids.stride(0);
  p.weights_stride = weights.stride(0);
  p.experts = static_cast<int32_t>(experts);
  p.top_k = static_cast<int32_t>(options.top_k);
  p.scoring = static_cast<int32_t>(options.scoring);
  p.normalize = options.normalize ? 1 : 0;
  p.groups = static_cast<int32_t>(options.groups);
  p.top_groups = static_cast<int32_t>(options.top_groups);
  p.best_of_group = static_cast<int32_t>(options.best_of_group);
  p.has_choice_bias = options.choice_bias.empty() ? 0 : 1;
  p.has_scales = options.scales.empty() ? 0 : 1;
  p.scaling_factor = options.scaling_factor;
  p.least_sum = options.least_sum;
  launch.other_parameters = ParameterBlock(p);
  const std::byte* const first = RowOfView(input, rows.first);
  const int64_t bytes = BytesOfRows(input, rows.count);
  launch.buffers.push_back({MARLIN_BUFFER_INPUT, first, bytes});
  launch.buffers.push_back({MARLIN_BUFFER_ROUTER_IDS, RowOfView(ids, rows.first),
                            BytesOfRows(ids, rows.count), true, false});
  launch.buffers.push_back({MARLIN_BUFFER_ROUTER_WEIGHTS, RowOfView(weights, rows.first),
                            BytesOfRows(weights, rows.count), true, false});
  const auto of_experts = [&](int index, const TensorView& view) {
    return view.empty() ? KernelBuffer{index, first, bytes}
                        : KernelBuffer{index, view.data(), experts * int64_t{sizeof(float)}};
  };
  launch.buffers.push_back(of_experts(MARLIN_BUFFER_CHOICE_BIAS, options.choice_bias));
  launch.buffers.push_back(of_experts(MARLIN_BUFFER_ROUTER_SCALES, options.scales));
  return launch;
}

kernels::RouterParameters& RouterParametersOf(KernelLaunch* launch) {
  return launch->other_parameters.As<kernels::RouterParameters>();
}

void BindRouterError(void* error, int64_t bytes, KernelLaunch* launch) {
  launch->buffers.push_back({MARLIN_BUFFER_ROUTER_ERROR, error, bytes, true, true});
}

bool IsAligned(const TensorView& x, const RouterRows& rows) {
  constexpr uintptr_t kVector = 16;
  return reinterpret_cast<uintptr_t>(RowOfView(x, rows.first)) % kVector == 0 &&
         static_cast<uintptr_t>(x.stride(0) * DTypeBytes(x.dtype())) % kVector == 0;
}

/// Whether threadgroups have room for a router, and the factor of its weights is finite.
bool FitsRouter(const RouterOptions& options, int64_t experts) {
  const bool grouped = options.top_groups < options.groups;
  return experts <= kernels::kMostRouterExperts &&
         (!grouped || options.groups <= kernels::kMostRouterGroups) &&
         std::isfinite(options.scaling_factor);
}

/// Appends the launches of a router of `count` rows, in parts of at most `most`.
template <typename MakeLaunch>
Status LaunchParts(int64_t count, int64_t most, int64_t experts, const MakeLaunch& launch_of,
                   CallContext* context) {
  for (int64_t first = 0; first < count; first += most) {
    const RouterRows rows{first, std::min(most, count - first)};
    MARLIN_ASSIGN_OR_RETURN(ErrorWords::Word* const error,
                            context->TakeWord({static_cast<int32_t>(kNoRouterError), 0},
                                              [rows, experts](const ErrorWords::Word& word) {
                                                return RouterError(
                                                    static_cast<uint32_t>(word.selection), rows,
                                                    experts);
                                              }));
    context->launches.push_back(launch_of(rows, error));
  }
  return Status();
}

}  // namespace

int64_t MostRouterRows(int64_t experts) {
  return (int64_t{kNoRouterError} - experts) / kernels::RouterKeys(static_cast<int32_t>(experts));
}

KernelLaunch RouteTokensLaunch(const RouteTokensCall& call, const RouterRows& rows, void* error,
                               int64_t error_bytes) {
  KernelLaunch launch =
      RouterLaunch(call.logits, call.options, call.logits.dim(1), call.ids, call.weights, rows);
  launch.function =
      call.logits.dim(1) <= kernels::kFewRouterExperts ? "moe_router_topk" : "moe_router_topk_many";
  launch.threads = kernels::kLanes;
  RouterParametersOf(&launch).logits_stride = call.logits.stride(0);
  BindRouterError(error, error_bytes, &launch);
  return launch;
}

bool Takes(const RouteTokensCall& call, const DeviceShape& /*shape*/) {
  return FitsRouter(call.options, call.logits.dim(1));
}

Status Launch(const RouteTokensCall& call, CallContext* context) {
  const int64_t experts = call.logits.dim(1);
  const auto launch_of = [&](const RouterRows& rows, ErrorWords::Word* error) {
    return RouteTokensLaunch(call, rows, error, sizeof(*error));
  };
  return LaunchParts(call.logits.dim(0), MostRouterRows(experts), experts, launch_of, context);
}

bool RoutesRows(const RouteRowsCall& call) {
  const WeightsSpec& spec = call.matrix.spec;
  return !GetFormatInfo(spec.format).quantized && spec.experts == 1 && spec.k > 0 &&
         spec.sparsity == Sparsity::kDense && !TransformsInput(spec) &&
         FitsRouter(call.options, spec.n);
}

Status Launch(const RouteRowsCall& call, CallContext* context) {
  GemmDesc product;
  product.m = call.x.dim(0);
  product.n = call.matrix.spec.n;
  product.k = call.matrix.spec.k;
  const auto launch_of = [&](const RouterRows& rows, ErrorWords::Word* error) {
    return RouteRowsLaunch(call, rows, error, sizeof(*error));
  };
  const int64_t most = std::min(RowsOfPart(product), MostRouterRows(product.n));
  return LaunchParts(product.m, most, product.n, launch_of, context);
}

KernelLaunch RouteRowsLaunch(const RouteRowsCall& call, const RouterRows& rows, void* error,
                             int64_t error_bytes) {
  const auto& matrix = static_cast<const PreparedStrips&>(call.matrix);
  const int64_t experts = matrix.spec.n;
  KernelLaunch launch = RouterLaunch(call.x, call.options, experts, call.ids, call.weights, rows);
  launch.function = experts <= kernels::kFewRouterExperts ? "moe_router_topk_fused"
                                                          : "moe_router_topk_fused_many";
  launch.threads = kernels::kRouterSimdgroups * kernels::kLanes;
  launch.constants = WeightConstants(matrix.spec);
  launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(call.x.dtype());
  launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT] = IsAligned(call.x, rows) ? 1 : 0;
  launch.constants[MARLIN_CONSTANT_HAS_BIAS] = call.bias.empty() ? 0 : 1;
  if (!call.bias.empty()) {
    launch.constants[MARLIN_CONSTANT_BIAS_TYPE] = ElementTypeOf(call.bias.dtype());
  }
  kernels::Parameters& product = RouterParametersOf(&launch).product;
  product = WeightParameters(matrix, 0);
  product.m = static_cast<int32_t>(rows.count);
  product.input_stride = call.x.stride(0);
  launch.operations = 2 * rows.count * experts * matrix.spec.k;
  const StripPart codes = matrix.codes(0);
  launch.buffers.push_back({MARLIN_BUFFER_CODES, codes.data, codes.bytes});
  launch.buffers.push_back(call.bias.empty()
                               ? KernelBuffer{MARLIN_BUFFER_BIAS, codes.data, codes.bytes}
                               : KernelBuffer{MARLIN_BUFFER_BIAS, call.bias.data(),
                                              experts * DTypeBytes(call.bias.dtype())});
  BindRouterError(error, error_bytes, &launch);
  return launch;
}

Status RouterError(uint32_t key, const RouterRows& rows, int64_t experts) {
  if (key == kNoRouterError) return Status();
  if (key < experts) return NanChoiceBias(key);
  const int64_t keys = kernels::RouterKeys(static_cast<int32_t>(experts));
  const int64_t token = rows.first + (key - experts) / keys;
  const int64_t at = (key - experts) % keys;
  if (at == 2 * experts) return NoFiniteLogit(token, experts);
  return BadLogit(at % 2 == 0, token, at / 2);
}

}  // namespace marlin::metal
