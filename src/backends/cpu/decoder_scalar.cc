// Decoder operation kernels for any processor.
#include "backends/cpu/decoder_kernels.h"
#include "backends/cpu/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/attention_kernel.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decoder_kernels.inl.h"

}  // namespace marlin::cpu::scalar
