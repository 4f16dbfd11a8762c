// The exact GEMM on AVX2, FMA and F16C.
#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/gemm/exact/exact_kernel.inl.h"
#include "backends/cpu/gemm/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::avx2
