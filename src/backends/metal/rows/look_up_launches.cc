// The launch of kernels/look_up.metal.
#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/rows/row_views.h"
#include "base/macros.h"

namespace marlin::metal {

/// All calls: the host cannot read prepared weights.
bool Takes(const LookUpWeightRowsCall& /*call*/, const DeviceShape& /*shape*/) { return true; }

Status Launch(const LookUpWeightRowsCall& call, CallContext* context) {
  KernelLaunch launch = LookUpLaunch(static_cast<const PreparedStrips&>(call.table), call.out);
  kernels::LookUpWeightParameters p{};
  p.weights = launch.parameters;
  MARLIN_RETURN_IF_ERROR(BindIndices("ids", call.ids, call.table.spec.n, &launch, &p.ids, context));
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

}  // namespace marlin::metal
