// The launches of kernels/rows_norm.metal.
#include <algorithm>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/rows/row_views.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// A launch over the rows of x. It binds nothing.
KernelLaunch NormLaunch(std::string_view function, const TensorView& x,
                        kernels::NormParameters* p) {
  p->rows = static_cast<int32_t>(RowsOf(x));
  p->of_outer = x.rank() == 3 ? static_cast<int32_t>(x.dim(1)) : 1;
  p->columns = static_cast<int32_t>(x.dim(x.rank() - 1));
  p->simdgroups = kernels::NormSimdgroups(p->columns);
  p->one = 1.0F;
  KernelLaunch launch;
  launch.source = "rows_norm.metal";
  launch.function = function;
  const bool narrow = p->simdgroups == 1;
  launch.threads =
      static_cast<uint32_t>(kernels::kLanes * (narrow ? kernels::kNormRows : p->simdgroups));
  launch.threadgroups[0] =
      static_cast<uint32_t>(narrow ? CeilDivide(p->rows, int64_t{kernels::kNormRows}) : p->rows);
  launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(x.dtype());
  return launch;
}

void BindWeight(const TensorView& weight, const MutableTensorView& out, KernelLaunch* launch) {
  launch->constants[MARLIN_CONSTANT_SCALE_TYPE] = ElementTypeOf(weight.dtype());
  launch->constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(out.dtype());
  launch->buffers.push_back(OperandOf(MARLIN_BUFFER_NORM_WEIGHT, weight));
}

Status Append(KernelLaunch launch, const kernels::NormParameters& p, CallContext* context) {
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

}  // namespace

bool Takes(const RmsNormCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const RmsNormCall& call, CallContext* context) {
  kernels::NormParameters p{};
  KernelLaunch launch = NormLaunch("rows_norm", call.x, &p);
  p.epsilon = call.epsilon;
  BindRows({{MARLIN_BUFFER_INPUT, call.x, &p.x}}, call.out, Use::kWritten, &p.out, &launch);
  BindWeight(call.weight, call.out, &launch);
  return Append(std::move(launch), p, context);
}

bool Takes(const AddRmsNormCall& call, const DeviceShape& /*shape*/) { return Fits(call.residual); }

Status Launch(const AddRmsNormCall& call, CallContext* context) {
  // The launch writes two buffers, which must not overlap each other or the third.
  if (Interleaved(call.residual, call.out) || Interleaved(call.block, call.residual) ||
      Interleaved(call.block, call.out)) {
    MARLIN_RETURN_IF_ERROR(Launch(AddToCall{call.block, call.residual, 1.0F}, context));
    return Launch(RmsNormCall{call.residual, call.weight, call.epsilon, call.out}, context);
  }
  kernels::NormParameters p{};
  KernelLaunch launch = NormLaunch("rows_add_norm", call.residual, &p);
  p.epsilon = call.epsilon;
  p.x = StridesOf(call.residual);
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_INPUT, call.residual, Use::kChanged));
  BindRows({{MARLIN_BUFFER_ROW_OTHER, call.block, &p.block}}, call.out, Use::kWritten, &p.out,
           &launch);
  launch.constants[MARLIN_CONSTANT_EXTRA_TYPE] = ElementTypeOf(call.block.dtype());
  BindWeight(call.weight, call.out, &launch);
  return Append(std::move(launch), p, context);
}

bool Takes(const CenterRowsCall& call, const DeviceShape& /*shape*/) { return Fits(call.x); }

Status Launch(const CenterRowsCall& call, CallContext* context) {
  kernels::NormParameters p{};
  KernelLaunch launch = NormLaunch("rows_center", call.x, &p);
  p.x = StridesOf(call.x);
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_INPUT, call.x, Use::kChanged));
  return Append(std::move(launch), p, context);
}

}  // namespace marlin::metal
