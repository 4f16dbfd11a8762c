// The bf16 GEMM on AVX-512 BF16 (vdpbf16ps): dot products of 32 bf16 weights and activations,
// summed in 16 fp32 lanes. Weights are rounded once to bf16 after scaling, as on AMX tiles.
#pragma once

#include <cstdint>

#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/pack/panels.h"
#include "marlin/tensor.h"

namespace marlin::cpu::avx512bf16 {

/// Bytes of 32 packed activations in one bf16 term. A packed row is one term, or two: the rounded
/// activations, then their rounding errors.
inline constexpr int64_t kTermSliceBytes = kSliceK * 2;

/// Packs a row of k activations, zero-padded to a multiple of 128.
void PackOneTerm(const void* a, DType type, int64_t k, void* row);
void PackTwoTerms(const void* a, DType type, int64_t k, void* row);

ExactKernels::MultiplyBlock SelectOneTerm(const PanelView& weights);
ExactKernels::MultiplyBlock SelectTwoTerms(const PanelView& weights);

/// Runs independent dot products in registers; returns the number of floating-point operations.
int64_t DotChains(int64_t iterations, float* sink);

}  // namespace marlin::cpu::avx512bf16
