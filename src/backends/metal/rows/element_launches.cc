// The launches of kernels/rows_elementwise.metal.
#include "backends/metal/rows/element_launches.h"

#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/rows/row_views.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

void SetType(int constant, const TensorView& view, KernelLaunch* launch) {
  launch->constants[static_cast<size_t>(constant)] = ElementTypeOf(view.dtype());
}

/// A launch over the rows of `out`, with an input for MARLIN_BUFFER_INPUT and perhaps another.
KernelLaunch RowsLaunch(std::string_view function, const MutableTensorView& out, Use use,
                        const TensorView& x, const TensorView& other, kernels::RowParameters* p) {
  KernelLaunch launch = ElementLaunch(function, out, p);
  SetType(MARLIN_CONSTANT_OUTPUT_TYPE, out, &launch);
  SetType(MARLIN_CONSTANT_INPUT_TYPE, x, &launch);
  SetType(MARLIN_CONSTANT_EXTRA_TYPE, other, &launch);
  BindRows({{MARLIN_BUFFER_INPUT, x, &p->x}, {MARLIN_BUFFER_ROW_OTHER, other, &p->other}}, out, use,
           &p->out, &launch);
  return launch;
}

Status Append(KernelLaunch launch, const kernels::RowParameters& p, CallContext* context) {
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

}  // namespace

bool Takes(const LookUpRowsCall& call, const DeviceShape& /*shape*/) { return Fits(call.out); }

Status Launch(const LookUpRowsCall& call, CallContext* context) {
  kernels::LookUpParameters p{};
  KernelLaunch launch =
      RowsLaunch("rows_look_up", call.out, Use::kWritten, call.table, {}, &p.rows);
  MARLIN_RETURN_IF_ERROR(BindIndices("ids", call.ids, call.table.dim(0), &launch, &p.ids, context));
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

bool Takes(const ConvertCall& call, const DeviceShape& /*shape*/) { return Fits(call.out); }

Status Launch(const ConvertCall& call, CallContext* context) {
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_convert", call.out, Use::kWritten, call.x, {}, &p);
  return Append(std::move(launch), p, context);
}

bool Takes(const AddToCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const AddToCall& call, CallContext* context) {
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_add_to", call.x, Use::kChanged, call.y, {}, &p);
  p.scale = call.scale;
  return Append(std::move(launch), p, context);
}

bool Takes(const ApplyGateCall& call, const DeviceShape& /*shape*/) { return Fits(call.out); }

Status Launch(const ApplyGateCall& call, CallContext* context) {
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_glu", call.out, Use::kWritten, call.gate, call.up, &p);
  launch.constants[MARLIN_CONSTANT_ACTIVATION] = static_cast<int32_t>(call.options.activation);
  launch.constants[MARLIN_CONSTANT_GATE_LIMITED] = call.options.limit > 0.0F ? 1 : 0;
  p.gate_limit = call.options.limit;
  p.gate_alpha = call.options.alpha;
  return Append(std::move(launch), p, context);
}

bool Takes(const ApplySigmoidCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const ApplySigmoidCall& call, CallContext* context) {
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_sigmoid", call.x, Use::kChanged, {}, {}, &p);
  return Append(std::move(launch), p, context);
}

bool Takes(const ApplyOutputGateCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const ApplyOutputGateCall& call, CallContext* context) {
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_gate", call.x, Use::kChanged, call.gate, {}, &p);
  return Append(std::move(launch), p, context);
}

bool Takes(const ScaleAndCapCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const ScaleAndCapCall& call, CallContext* context) {
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_cap", call.x, Use::kChanged, {}, {}, &p);
  p.scale = call.scale;
  p.softcap = call.softcap;
  return Append(std::move(launch), p, context);
}

bool Takes(const ScaleInputsCall& call, const DeviceShape& /*shape*/) {
  return Fits(call.x) && !Interleaved(call.weights, call.x);
}

Status Launch(const ScaleInputsCall& call, CallContext* context) {
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_scale", call.x, Use::kChanged, {}, {}, &p);
  launch.threadgroups[0] = 1;
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_INDICES, call.weights, Use::kChanged));
  return Append(std::move(launch), p, context);
}

KernelLaunch AddRowsLaunch(const AddRowsCall& call) {
  const Shape shape = {call.tokens, call.width};
  const MutableTensorView out(call.out, call.out_type, shape, {call.out_stride, 1});
  const TensorView sum(call.sum, DType::kF32, shape);
  const TensorView rows(call.rows, DType::kF32, {call.slots, call.width});
  kernels::RowParameters p{};
  KernelLaunch launch = RowsLaunch("rows_add", out, Use::kWritten, sum, rows, &p);
  p.has_sum = call.sum != nullptr ? 1 : 0;
  p.has_rows = call.rows != nullptr ? 1 : 0;
  const TensorView slots(call.slot_of, DType::kI32, {call.tokens});
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_INDICES, slots));
  launch.other_parameters = ParameterBlock(p);
  return launch;
}

}  // namespace marlin::metal
