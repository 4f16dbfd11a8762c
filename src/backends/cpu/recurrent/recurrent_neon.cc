// The recurrent kernels for NEON.
#include "backends/cpu/recurrent/recurrent_kernels.h"
#include "backends/cpu/simd/simd_neon.h"

namespace marlin::cpu::neon {
#include "backends/cpu/recurrent/gated_delta.inl.h"
#include "backends/cpu/recurrent/mamba2.inl.h"
#include "backends/cpu/recurrent/short_convolution.inl.h"

}  // namespace marlin::cpu::neon
