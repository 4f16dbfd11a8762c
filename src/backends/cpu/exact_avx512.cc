// The exact GEMM on AVX-512 F, BW, DQ and VL.
#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/simd_avx512.h"

namespace marlin::cpu::avx512 {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decode.inl.h"
#include "backends/cpu/exact_kernel.inl.h"
#include "backends/cpu/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::avx512
