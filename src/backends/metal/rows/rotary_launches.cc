// The launches of kernels/rows_rotary.metal.
#include <utility>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/rows/row_views.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/step/indices.h"

namespace marlin::metal {
namespace {

/// Binds heads that a launch changes in place, and their tokens' positions.
Status BindHeads(const MutableTensorView& x, const TensorView& positions, KernelLaunch* launch,
                 kernels::IndexParameters* parameters, CallContext* context) {
  launch->source = "rows_rotary.metal";
  launch->constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(x.dtype());
  launch->buffers.push_back(OperandOf(MARLIN_BUFFER_OUTPUT, x, Use::kChanged));
  return BindIndices("positions", positions, kPositionLimit, launch, parameters, context);
}

}  // namespace

bool Takes(const ApplyRotaryCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const ApplyRotaryCall& call, CallContext* context) {
  kernels::RotateParameters p{};
  p.x = StridesOf(call.x);
  p.rotary = RotaryOf(call.rotary);
  p.heads = static_cast<int32_t>(call.x.dim(1));
  KernelLaunch launch;
  launch.function = "rows_rotary";
  launch.threads = kernels::kRotarySimdgroups * kernels::kLanes;
  launch.threadgroups[0] =
      static_cast<uint32_t>(CeilDivide(call.x.dim(1), int64_t{kernels::kRotarySimdgroups}));
  launch.threadgroups[1] = static_cast<uint32_t>(call.x.dim(0));
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_FREQUENCIES, call.rotary.inverse_frequencies));
  MARLIN_RETURN_IF_ERROR(BindHeads(call.x, call.positions, &launch, &p.positions, context));
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

bool Takes(const ScaleByPositionCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const ScaleByPositionCall& call, CallContext* context) {
  kernels::PositionParameters p{};
  KernelLaunch launch = ElementLaunch("rows_scale_by_position", call.x, &p.rows);
  p.rows.out = StridesOf(call.x);
  p.offset = call.scale.offset;
  p.period = call.scale.period;
  p.beta = call.scale.beta;
  MARLIN_RETURN_IF_ERROR(BindHeads(call.x, call.positions, &launch, &p.positions, context));
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

}  // namespace marlin::metal
