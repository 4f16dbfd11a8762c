// The GEMV of 4-, 3- and 2-bit weights on AVX2.
//
//   bytes = byte permutation of 32 codes     the high and the low byte of their values as bf16
//   value = interleaved, shifted or masked   8 fp32 per vector, 2.4 instructions each
//   total += scale * (sum of value * x)      lanes along k, one group of k at a time
//
// The scale is applied to the sum of a group, not to every weight, if that takes fewer
// instructions. Values that bf16 cannot represent are rounded to it.
#pragma once

#include <cstdint>

#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/pack/panels.h"

namespace marlin::cpu {

/// The most rows of the GEMV.
inline constexpr int64_t kGemvRows = 8;

namespace avx2 {
/// Reorders k elements that ExactKernels::pack_row packed: every 16 k are
/// 0..3, 8..11, 4..7, 12..15, the order in which interleaving vectors of bytes yields them.
void ReorderGemvRow(int64_t k, float* x);
/// As ExactKernels::select, for rows in that order. Preconditions: at most 4 bits, m <= kGemvRows.
ExactKernels::MultiplyBlock SelectGemv(const PanelView& weights);
}  // namespace avx2

}  // namespace marlin::cpu
