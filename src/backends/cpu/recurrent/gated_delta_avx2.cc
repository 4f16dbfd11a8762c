// The gated delta kernel for AVX2, FMA and F16C.
#include "backends/cpu/recurrent/gated_delta.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/recurrent/gated_delta.inl.h"

}  // namespace marlin::cpu::avx2
