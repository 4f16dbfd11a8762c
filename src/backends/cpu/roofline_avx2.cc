#include "backends/cpu/roofline.h"
#include "backends/cpu/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/roofline.inl.h"

const RooflineProbes kRooflineProbes = {&ReadStreams, &FmaChains};

}  // namespace marlin::cpu::avx2
