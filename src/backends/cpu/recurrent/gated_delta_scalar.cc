// The gated delta kernel for any processor.
#include "backends/cpu/recurrent/gated_delta.h"
#include "backends/cpu/simd/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/recurrent/gated_delta.inl.h"

}  // namespace marlin::cpu::scalar
