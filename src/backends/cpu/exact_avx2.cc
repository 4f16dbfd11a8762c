// The exact GEMM on AVX2, FMA and F16C.
#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decode.inl.h"
#include "backends/cpu/exact_kernel.inl.h"
#include "backends/cpu/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::avx2
