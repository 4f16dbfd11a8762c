// Decoder operation kernels for NEON.
#include "backends/cpu/decoder_kernels.h"
#include "backends/cpu/simd_neon.h"

namespace marlin::cpu::neon {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/attention_kernel.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decoder_kernels.inl.h"

}  // namespace marlin::cpu::neon
