// Decoder operation kernels for AVX-512 F, BW, DQ and VL.
#include "backends/cpu/decoder_kernels.h"
#include "backends/cpu/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/attention_kernel.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decoder_kernels.inl.h"

}  // namespace marlin::cpu::avx512
