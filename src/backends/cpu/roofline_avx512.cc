#include "backends/cpu/roofline.h"
#include "backends/cpu/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/roofline.inl.h"

const RooflineProbes kRooflineProbes = {&ReadStreams, &FmaChains};

}  // namespace marlin::cpu::avx512
