#include "backends/cpu/runtime/roofline.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/runtime/roofline.inl.h"

const RooflineProbes kRooflineProbes = {&ReadStreams, &FmaChains};

}  // namespace marlin::cpu::avx512
