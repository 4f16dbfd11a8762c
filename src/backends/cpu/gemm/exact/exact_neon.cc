// The exact GEMM on 64-bit Arm.
#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/simd/simd_neon.h"

namespace marlin::cpu::neon {
#include "backends/cpu/gemm/exact/exact_kernel.inl.h"
#include "backends/cpu/gemm/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::neon
