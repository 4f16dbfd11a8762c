// Decoder operation kernels for AVX2, FMA and F16C.
#include "backends/cpu/decoder/decoder_kernels.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/decoder/decoder_kernels.inl.h"

}  // namespace marlin::cpu::avx2
