// The exact GEMM on any processor.
#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/activation.inl.h"
#include "backends/cpu/conversions.inl.h"
#include "backends/cpu/decode.inl.h"
#include "backends/cpu/exact_kernel.inl.h"
#include "backends/cpu/rows.inl.h"

const ExactKernels kExactKernels = {&PackRow, &SelectMultiply, &StoreRow, &DecodeBlock};

}  // namespace marlin::cpu::scalar
