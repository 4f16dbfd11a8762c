// Decoder operation kernels for AVX-512 F, BW, DQ and VL.
#include "backends/cpu/decoder/decoder_kernels.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/decoder/decoder_kernels.inl.h"

}  // namespace marlin::cpu::avx512
