#include "backends/cpu/runtime/roofline.h"
#include "backends/cpu/simd/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/runtime/roofline.inl.h"

const RooflineProbes kRooflineProbes = {&ReadStreams, &FmaChains};

}  // namespace marlin::cpu::scalar
