// The exact product on CPU panels, as one table of functions per instruction set.
#pragma once

#include <cstdint>

#include "backends/cpu/panels.h"
#include "marlin/gemm.h"
#include "marlin/tensor.h"

namespace marlin::cpu {

/// Floats of per-worker scratch that multiplying m rows needs: a decoded panel, and the lane sums.
constexpr int64_t ExactScratchFloats(int64_t m) { return 8 * kPassK + m * kBlockRows * 16; }

/// Columns that store_row finishes at a time.
inline constexpr int64_t kStoreRun = 64;

/// One finished run of outputs of a row.
struct EpilogueRow {
  const float* sums;        ///< [count] fp32 sums.
  const float* up;          ///< [count] sums of the up half when gated, or null.
  const float* bias;        ///< [count], or null.
  const float* up_bias;     ///< [count] bias of the up half, or null.
  const float* row_weight;  ///< One number, or null.
  Activation activation;
  int64_t count;
};

struct ExactKernels {
  /// Widens one row of k activations to fp32, 16 even then 16 odd of every 32, zero-padded to a
  /// multiple of 128.
  void (*pack_row)(const void* a, DType type, int64_t k, float* x);
  /// out[i, 0..15] = row i of x times the 16 rows of a block; x rows x_stride floats apart.
  using MultiplyBlock = void (*)(const PanelView& weights, int64_t block, const float* x,
                                 int64_t x_stride, int64_t m, float* out, int64_t out_stride,
                                 float* scratch);
  MultiplyBlock (*select)(const PanelView& weights);
  /// Applies bias, activation, gate and row weight and stores in the type of c.
  void (*store_row)(const EpilogueRow& row, void* c, DType type);
  /// out[r * 128 + i] = weight of row r of a block at k = 128 chunk + i, as fp32.
  void (*decode_block)(const PanelView& weights, int64_t block, int64_t chunk, float* out);
};

namespace scalar {
extern const ExactKernels kExactKernels;
}
namespace avx2 {
extern const ExactKernels kExactKernels;
}
namespace avx512 {
extern const ExactKernels kExactKernels;
}
namespace neon {
extern const ExactKernels kExactKernels;
}

}  // namespace marlin::cpu
