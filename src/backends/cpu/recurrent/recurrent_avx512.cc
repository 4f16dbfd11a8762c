// The recurrent kernels for AVX-512.
#include "backends/cpu/recurrent/recurrent_kernels.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/recurrent/gated_delta.inl.h"
#include "backends/cpu/recurrent/mamba2.inl.h"
#include "backends/cpu/recurrent/short_convolution.inl.h"

}  // namespace marlin::cpu::avx512
