#include "ops/toy_double.h"

#include "base/macros.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "plan/toy_double_call.h"

namespace marlin {

Status ToyDouble(const Device& device, const TensorView& x, const MutableTensorView& out,
                 void* stream) {
  if (x.rank() != 1) return Invalid("x: expected rank 1");
  MARLIN_RETURN_IF_ERROR(CheckVector("x", x, x.dim(0), true));
  MARLIN_RETURN_IF_ERROR(CheckVector("out", out, x.dim(0), true));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "x", x, false));
  if (x.dim(0) == 0) return {};
  return RunOperation(device, ToyDoubleCall{x, out}, stream);
}

}  // namespace marlin
