// Tasks over columns, the functions of a kernel and the epilogue, shared by all jobs of GEMMs.
#pragma once

#include <cstdint>

#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/pack/prepared_panels.h"
#include "base/thread_pool.h"
#include "plan/gemm/backend.h"

namespace marlin::cpu {

/// The vector kernels of a level (the AMX level uses the AVX-512 kernels).
const ExactKernels& ExactKernelsOf(Isa level);

/// The output columns of one task.
struct ColumnRange {
  int64_t first = 0;  ///< Output columns [first, last).
  int64_t last = 0;
};

/// The tiling of a GEMM into tasks. Every output is computed by one task in a fixed order, so the
/// tiling does not affect the result.
struct TaskGrid {
  int64_t columns = 0;           ///< Output columns: n, or n / 2 for GLU.
  int64_t columns_per_task = 0;  ///< A multiple of 16.
  int64_t tasks = 0;
  static TaskGrid Of(const GemmDesc& desc, int64_t blocks_per_task);
  ColumnRange Columns(int64_t task) const;
};

/// Whether bf16 kernels split activations into two bf16 terms.
bool NeedsTwoTerms(const GemmDesc& desc);

/// The functions of a GEMM kernel with row-major packed activations.
struct RowKernels {
  const ExactKernels* vector;  ///< Widening of activations, and the epilogue.
  int64_t slice_bytes;         ///< Size of 32 packed activations.
  /// Packs a row of k activations, zero-padded to a multiple of 128.
  void (*pack_row)(const ExactKernels& vector, const void* a, DType type, int64_t k, void* row);
  ExactKernels::MultiplyBlock (*select)(const PanelView& weights);
  /// Bytes of the packed activations of an MC block: 1 MiB stays in L2 while the weights stream
  /// through. A kernel that reads them once per 16 columns can take them from L3, and decodes the
  /// weights less often.
  int64_t block_bytes = int64_t{1} << 20;
};
RowKernels ExactRowKernels(Isa level);
RowKernels W4a8RowKernels(Isa level);
RowKernels Bf16RowKernels(const GemmDesc& desc);
RowKernels GemvRowKernels();
RowKernels SparseRowKernels();
RowKernels SparseAvx2RowKernels();
/// The functions of a kernel other than the AMX kernel.
RowKernels RowKernelsOf(const KernelDesc& kernel, const GemmDesc& desc);

/// The bias in fp32, widened into `target` if it is in another type; null if there is none.
const float* WidenBias(const GemmCall& call, float* target);

/// Complete accumulators of some rows: gate[i * stride + c] is row i, column c; for GLU, `up` is
/// the same for the up half, otherwise null.
struct FinishedSums {
  const float* gate;
  const float* up;
  int64_t stride;
};

/// Runs the epilogue on the accumulators of all rows of a call, from column columns.first on.
void StoreRows(const GemmCall& call, const ExactKernels& kernels, const float* bias,
               ColumnRange columns, const FinishedSums& sums);

}  // namespace marlin::cpu
