#include <algorithm>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "plan/toy_reverse_call.h"

namespace marlin::cpu {

Status CpuDecoder::Run(const ToyReverseCall& call, const OperationContext& /*context*/) const {
  const float* const x = call.x.As<float>();
  std::reverse_copy(x, x + call.x.dim(0), call.out.As<float>());
  return {};
}

}  // namespace marlin::cpu
