#include "backends/metal/gemm/batch_launches.h"

#include <algorithm>
#include <string_view>

#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/kernels/gemm/batch_parameters.h"

namespace marlin::metal {
namespace {

using kernels::BatchParameters;
using kernels::kMostMatrices;

/// The kernel that does for a batch what another does for one matrix.
struct BatchedKernel {
  std::string_view of;
  std::string_view source;
  std::string_view function;
};
constexpr std::string_view kGemv = "batched_gemv.metal";
constexpr std::string_view kDirect = "batched_gemm_direct.metal";
constexpr std::string_view kStaged = "batched_gemm_staged.metal";
constexpr BatchedKernel kBatched[] = {
    {"marlin_gemv_1", kGemv, "marlin_batched_gemv_1"},
    {"marlin_gemv_2", kGemv, "marlin_batched_gemv_2"},
    {"marlin_gemv_4", kGemv, "marlin_batched_gemv_4"},
    {"marlin_gemv_8", kGemv, "marlin_batched_gemv_8"},
    {"marlin_gemv_16", kGemv, "marlin_batched_gemv_16"},
    {"marlin_gemv_1x2", kGemv, "marlin_batched_gemv_1x2"},
    {"marlin_gemv_2x2", kGemv, "marlin_batched_gemv_2x2"},
    {"marlin_gemv_4x2", kGemv, "marlin_batched_gemv_4x2"},
    {"marlin_gemm_direct_16x64", kDirect, "marlin_batched_gemm_direct_16x64"},
    {"marlin_gemm_direct_32x64", kDirect, "marlin_batched_gemm_direct_32x64"},
    {"marlin_gemm_direct_64x64", kDirect, "marlin_batched_gemm_direct_64x64"},
    {"marlin_gemm_staged_1xf32", kStaged, "marlin_batched_gemm_staged_1xf32"},
    {"marlin_gemm_staged_1xbf16", kStaged, "marlin_batched_gemm_staged_1xbf16"},
    {"marlin_gemm_staged_1xf16", kStaged, "marlin_batched_gemm_staged_1xf16"},
    {"marlin_gemm_staged_2xf32", kStaged, "marlin_batched_gemm_staged_2xf32"},
    {"marlin_gemm_staged_2xbf16", kStaged, "marlin_batched_gemm_staged_2xbf16"},
    {"marlin_gemm_staged_2xf16", kStaged, "marlin_batched_gemm_staged_2xf16"},
    {"marlin_finish", "batched_finish.metal", "marlin_batched_finish"},
};

/// Null: there is none.
const BatchedKernel* BatchedOf(std::string_view function) {
  const auto* const found =
      std::find_if(std::begin(kBatched), std::end(kBatched),
                   [&](const BatchedKernel& kernel) { return kernel.of == function; });
  return found == std::end(kBatched) ? nullptr : found;
}

int64_t BytesBetween(const void* first, const void* second) {
  return static_cast<const std::byte*>(second) - static_cast<const std::byte*>(first);
}

/// `sums`: the launch writes the partials, if there are any.
BatchParameters ParametersOf(const LaunchPlan& plan, std::span<const GemmCall> calls,
                             const kernels::Parameters& product, bool sums) {
  const GemmCall& first = calls[0];
  const GemmCall& second = calls[1];
  const auto& weights = static_cast<const PreparedStrips&>(*first.weights);
  BatchParameters batch{};
  batch.product = product;
  batch.codes = weights.codes(0).bytes;
  batch.scales = weights.scales(0).bytes;
  batch.extras = weights.extras(0).bytes;
  batch.input = BytesBetween(first.a, second.a);
  batch.partials = PartialBytes(plan, first.desc);
  batch.output = sums && plan.partial ? batch.partials : BytesBetween(first.c, second.c);
  batch.bias = BytesBetween(first.epilogue.bias, second.epilogue.bias);
  batch.row_weight = BytesBetween(first.epilogue.row_weight, second.epilogue.row_weight);
  for (size_t i = 0; i < calls.size(); ++i) {
    batch.global_scales[i] = weights.global_scale(calls[i].expert);
  }
  return batch;
}

int64_t StrideOf(const BatchParameters& batch, int buffer) {
  switch (buffer) {
    case MARLIN_BUFFER_CODES:
      return batch.codes;
    case MARLIN_BUFFER_SCALES:
      return batch.scales;
    case MARLIN_BUFFER_EXTRAS:
      return batch.extras;
    case MARLIN_BUFFER_INPUT:
      return batch.input;
    case MARLIN_BUFFER_OUTPUT:
      return batch.output;
    case MARLIN_BUFFER_PARTIALS:
      return batch.partials;
    case MARLIN_BUFFER_BIAS:
      return batch.bias;
    case MARLIN_BUFFER_ROW_WEIGHT:
      return batch.row_weight;
    default:
      return 0;  // All matrices have the same table.
  }
}

}  // namespace

int64_t MostMatricesOf(const LaunchPlan& plan, const GemmDesc& desc) {
  // Only a kernel that is chosen by name has partials that must be cleared.
  if (plan.zeroes || BatchedOf(plan.function) == nullptr) return 1;
  // Cannot overflow: RowsOfPart has at most kMostOperationsOfPart, or one tile of rows.
  return std::clamp<int64_t>(kMostOperationsOfPart / OperationsOf(desc), 1, kMostMatrices);
}

GemmLaunches BatchLaunchesOf(const LaunchPlan& plan, std::span<const GemmCall> calls) {
  const auto others = static_cast<int64_t>(calls.size()) - 1;
  GemmLaunches launches = LaunchesOf(plan, calls[0]);
  for (KernelLaunch& launch : launches) {
    const BatchParameters batch =
        ParametersOf(plan, calls, launch.parameters, launch.function == plan.function);
    const BatchedKernel& kernel = *BatchedOf(launch.function);
    launch.source = kernel.source;
    launch.function = kernel.function;
    launch.threadgroups[2] *= static_cast<uint32_t>(calls.size());
    launch.operations *= others + 1;
    launch.other_parameters = ParameterBlock(batch);
    for (KernelBuffer& buffer : launch.buffers) {
      buffer.bytes += others * StrideOf(batch, buffer.index);
    }
  }
  return launches;
}

}  // namespace marlin::metal
