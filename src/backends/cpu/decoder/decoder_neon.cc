// Decoder operation kernels for NEON.
#include "backends/cpu/decoder/decoder_kernels.h"
#include "backends/cpu/simd/simd_neon.h"

namespace marlin::cpu::neon {
#include "backends/cpu/decoder/decoder_kernels.inl.h"

}  // namespace marlin::cpu::neon
