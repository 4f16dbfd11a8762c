// The exact GEMM on 64-bit Arm.
#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/simd_neon.h"

namespace marlin::cpu::neon {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decode.inl.h"
#include "backends/cpu/exact_kernel.inl.h"
#include "backends/cpu/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::neon
