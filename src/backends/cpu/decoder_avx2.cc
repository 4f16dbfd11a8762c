// Decoder operation kernels for AVX2, FMA and F16C.
#include "backends/cpu/decoder_kernels.h"
#include "backends/cpu/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/attention_kernel.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decoder_kernels.inl.h"

}  // namespace marlin::cpu::avx2
