// Decoder operation kernels for any processor.
#include "backends/cpu/decoder/decoder_kernels.h"
#include "backends/cpu/simd/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/decoder/decoder_kernels.inl.h"

}  // namespace marlin::cpu::scalar
