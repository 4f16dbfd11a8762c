#include "backends/cpu/roofline.h"
#include "backends/cpu/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/roofline.inl.h"

const RooflineProbes kRooflineProbes = {&ReadStreams, &FmaChains};

}  // namespace marlin::cpu::scalar
