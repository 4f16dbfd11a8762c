// The gated delta kernel for AVX-512.
#include "backends/cpu/recurrent/gated_delta.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/recurrent/gated_delta.inl.h"

}  // namespace marlin::cpu::avx512
