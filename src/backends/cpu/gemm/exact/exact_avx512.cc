// The exact GEMM on AVX-512 F, BW, DQ and VL.
#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/gemm/exact/exact_kernel.inl.h"
#include "backends/cpu/gemm/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::avx512
