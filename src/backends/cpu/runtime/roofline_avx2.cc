#include "backends/cpu/runtime/roofline.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/runtime/roofline.inl.h"

const RooflineProbes kRooflineProbes = {&ReadStreams, &FmaChains};

}  // namespace marlin::cpu::avx2
