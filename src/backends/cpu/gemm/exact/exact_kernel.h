// The exact (fp32) GEMM on CPU panels, as one table of functions per instruction set.
#pragma once

#include <cstdint>

#include "backends/cpu/pack/panels.h"
#include "marlin/gemm.h"
#include "marlin/tensor.h"

namespace marlin::cpu {

/// Floats of per-worker scratch for m rows: a decoded panel, and the lane accumulators.
constexpr int64_t ExactScratchFloats(int64_t m) { return 8 * kPassK + m * kBlockRows * 16; }

/// Columns per epilogue step of store_row.
inline constexpr int64_t kStoreRun = 64;

/// Epilogue operands of a run of outputs in one row.
struct EpilogueRow {
  const float* sums;        ///< [count] fp32 accumulators.
  const float* up;          ///< [count] accumulators of the up half (GLU), or null.
  const float* bias;        ///< [count], or null.
  const float* up_bias;     ///< [count] bias of the up half, or null.
  const float* row_weight;  ///< One factor, or null.
  Activation activation;
  int64_t count;
};

struct ExactKernels {
  /// Widens one row of k activations to fp32, deinterleaved (of every 32, 16 even then 16 odd), and
  /// zero-pads it to a multiple of 128.
  void (*pack_row)(const void* a, DType type, int64_t k, float* x);
  /// out[i, 0..15] = packed row i of x times the 16 columns of a block. x_stride is in bytes,
  /// out_stride in floats.
  using MultiplyBlock = void (*)(const PanelView& weights, int64_t block, const void* x,
                                 int64_t x_stride, int64_t m, float* out, int64_t out_stride,
                                 float* scratch);
  MultiplyBlock (*select)(const PanelView& weights);
  /// The epilogue: applies bias, activation, GLU and row weight, converts to `type` and stores.
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
