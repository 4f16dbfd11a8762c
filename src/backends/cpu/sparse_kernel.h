// The GEMV of 2:4 weights on AVX-512 BF16. It expands nothing: the activations of the kept weights
// are gathered, so that half of the products are done.
//
//   kept codes, 2 x 32 of a column and chunk   -> bf16 values       a permutation of words each
//   metadata, 2 bits per kept code             -> index of its k    a multishift and one logic op
//   64 activations                             -> 32 of kept k      a permutation of two registers
//   sum += value * activation                  lane i: both kept weights of block i of 16
//   total += scale * sum                       a group of k at a time
//
// A pruned weight is not multiplied, which would lose the NaN of 0 * Inf: rows with activations
// that are not finite are left to the kernel that expands (bf16_kernel.h).
#pragma once

#include <cstdint>

#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/panels.h"
#include "marlin/tensor.h"

namespace marlin::cpu {

/// The most rows of the GEMV.
inline constexpr int64_t kSparseGemvRows = 8;

namespace avx512bf16 {
/// Packs a row of k activations as one bf16 term (bf16_kernel.h). The 4 bytes behind it are not 0
/// if an activation is NaN or infinite.
void PackSparseRow(const void* a, DType type, int64_t k, void* row);
/// Preconditions: 2:4 panels, m <= kSparseGemvRows.
ExactKernels::MultiplyBlock SelectSparse(const PanelView& weights);
}  // namespace avx512bf16

}  // namespace marlin::cpu
