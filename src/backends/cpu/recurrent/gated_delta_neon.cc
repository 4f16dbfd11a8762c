// The gated delta kernel for NEON.
#include "backends/cpu/recurrent/gated_delta.h"
#include "backends/cpu/simd/simd_neon.h"

namespace marlin::cpu::neon {
#include "backends/cpu/recurrent/gated_delta.inl.h"

}  // namespace marlin::cpu::neon
