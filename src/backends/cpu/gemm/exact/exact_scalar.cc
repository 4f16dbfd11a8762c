// The exact GEMM on any processor.
#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/simd/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/gemm/exact/exact_kernel.inl.h"
#include "backends/cpu/gemm/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::scalar
