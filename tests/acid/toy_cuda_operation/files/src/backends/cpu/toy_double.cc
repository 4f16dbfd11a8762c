#include "backends/cpu/decoder/cpu_decoder.h"
#include "plan/toy_double_call.h"

namespace marlin::cpu {

Status CpuDecoder::Run(const ToyDoubleCall& call, const OperationContext& /*context*/) const {
  const float* const x = call.x.As<float>();
  for (int64_t i = 0; i < call.x.dim(0); ++i) call.out.As<float>()[i] = 2 * x[i];
  return {};
}

}  // namespace marlin::cpu
