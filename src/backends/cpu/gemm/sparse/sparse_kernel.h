// GEMMs of 2:4 weights that expand nothing: the activations of the kept weights are gathered, so
// that half of the products are done.
//
// The GEMV on AVX-512 BF16:
//
//   kept codes, 2 x 32 of a column and chunk   -> bf16 values       a permutation of words each
//   metadata, 2 bits per kept code             -> index of its k    a multishift and one logic op
//   64 activations                             -> 32 of kept k      a permutation of two registers
//   sum += value * activation                  lane i: both kept weights of block i of 16
//   total += scale * sum                       a group of k at a time
//
// The GEMM on AVX2. Lanes are 4 columns of a block of four k, then of the block 32 k behind it:
//
//   rows of 4 columns             -> codes and metadata by column     unpacked in registers
//   kept codes                    -> pairs of bf16                    byte permutations
//   metadata                      -> index of a float                 loaded from any byte on of
//                                                                     shifted copies
//   4 activations of two blocks   -> 8 kept ones                      one permutation of floats
//   sum += value * activation     first and second kept weights apart
//   total += scale * sum          a group of k at a time
//
// Above 4 rows, a chunk is decoded once for all rows, and activations are gathered by permutations
// of bytes. A row's sums are the same for every number of rows: the kernel is batch-invariant.
//
// A pruned weight is not multiplied, which would lose the NaN of 0 * Inf: rows with activations
// that are not finite are left to the kernel that expands (bf16_kernel.h, exact_kernel.h).
#pragma once

#include <cstdint>

#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/pack/panels.h"
#include "marlin/tensor.h"

namespace marlin::cpu {

/// The most rows of the GEMV on AVX-512 BF16.
inline constexpr int64_t kSparseGemvRows = 8;

namespace avx512bf16 {
/// Packs a row of k activations as one bf16 term (bf16_kernel.h). The 4 bytes behind it are not 0
/// if an activation is NaN or infinite.
void PackSparseRow(const void* a, DType type, int64_t k, void* row);
/// Preconditions: 2:4 panels, m <= kSparseGemvRows.
ExactKernels::MultiplyBlock SelectSparse(const PanelView& weights);
}  // namespace avx512bf16

namespace avx2 {
/// Reorders k elements, a multiple of 128, that ExactKernels::pack_row packed: of every 64 k, 4 of
/// the first half and 4 of the second in turn. The 4 bytes behind the row are not 0 if an
/// activation is NaN or infinite; such a row is left as it is.
void ReorderSparseRow(int64_t k, float* x);
/// As ExactKernels::select, for rows in that order. Precondition: 2:4 panels.
ExactKernels::MultiplyBlock SelectSparse(const PanelView& weights);
}  // namespace avx2

}  // namespace marlin::cpu
