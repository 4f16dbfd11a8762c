// The recurrent kernels for AVX2, FMA and F16C.
#include "backends/cpu/recurrent/recurrent_kernels.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/recurrent/gated_delta.inl.h"
#include "backends/cpu/recurrent/mamba2.inl.h"
#include "backends/cpu/recurrent/short_convolution.inl.h"

}  // namespace marlin::cpu::avx2
