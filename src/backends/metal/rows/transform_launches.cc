#include "backends/metal/rows/transform_launches.h"

#include <algorithm>
#include <cmath>

#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/rows/rows_parameters.h"
#include "backends/metal/rows/row_views.h"
#include "base/checked.h"

namespace marlin::metal {
namespace {

/// Threadgroups along the columns of rows_move, at most; its threads stride over the others.
constexpr int64_t kMostGroups = 1024;

}  // namespace

bool TakesTransform(const TransformColumnsCall& call) {
  const InputTransform& transform = call.transform;
  return Fits(call.from) && transform.hadamard <= kernels::kMostHadamard &&
         (transform.hadamard == 0 || transform.permutation == nullptr);
}

KernelLaunch TransformLaunch(const TransformColumnsCall& call) {
  const InputTransform& transform = call.transform;
  const int64_t columns = call.from.dim(1);
  const int64_t of_group =
      transform.hadamard > 0 ? kernels::kMostHadamard : kernels::kTransformThreads;
  const int64_t groups = CeilDivide(columns, of_group);
  KernelLaunch launch;
  launch.source = "rows_transform.metal";
  launch.function = transform.hadamard > 0 ? "rows_hadamard" : "rows_move";
  launch.threads = kernels::kTransformThreads;
  launch.threadgroups[0] =
      static_cast<uint32_t>(transform.hadamard > 0 ? groups : std::min(groups, kMostGroups));
  launch.threadgroups[1] = static_cast<uint32_t>(call.from.dim(0));
  launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(call.from.dtype());
  launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(call.to.dtype());
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_INPUT, call.from));
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_OUTPUT, call.to, Use::kWritten));
  // Absent operands are bound to the input, and not read.
  const TensorView scale(transform.scale, DType::kF32, {columns});
  const TensorView permutation(transform.permutation, DType::kI32, {columns});
  launch.buffers.push_back(
      OperandOf(MARLIN_BUFFER_TRANSFORM_SCALE, scale.empty() ? call.from : scale));
  if (transform.hadamard == 0) {
    launch.buffers.push_back(
        OperandOf(MARLIN_BUFFER_INDICES, permutation.empty() ? call.from : permutation));
  }
  kernels::TransformParameters p{};
  p.from_row = call.from.stride(0);
  p.from_column = call.from.stride(1);
  p.to_row = call.to.stride(0);
  p.to_column = call.to.stride(1);
  p.columns = static_cast<int32_t>(columns);
  p.step = static_cast<int32_t>(launch.threadgroups[0] * launch.threads);
  p.hadamard = static_cast<int32_t>(transform.hadamard);
  p.has_scale = scale.empty() ? 0 : 1;
  p.has_permutation = permutation.empty() ? 0 : 1;
  p.inverse = call.inverse ? 1 : 0;
  p.norm = static_cast<float>(
      1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(transform.hadamard, 1))));
  launch.other_parameters = ParameterBlock(p);
  return launch;
}

}  // namespace marlin::metal
