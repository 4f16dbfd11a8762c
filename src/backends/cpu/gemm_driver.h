// The drivers of the CPU GEMMs: pack activations, schedule tasks over columns, epilogue.
#pragma once

#include <cstdint>

#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/prepared_panels.h"
#include "base/thread_pool.h"
#include "plan/backend.h"

namespace marlin::cpu {

/// The vector kernels of a level (the AMX level uses those of AVX-512).
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

/// Block sizes of a driver: MC blocks of rows, tasks of columns. Conformance cases are placed
/// around these sizes, because only they reach the code for a second block of either.
struct GemmBlocking {
  int64_t rows_per_pass = 0;
  int64_t columns_per_task = 0;
};
/// The sizes of the exact kernels; the others have the same columns, and as many rows or more.
GemmBlocking RowsBlocking(const GemmDesc& desc, int workers);
GemmBlocking AmxBlocking(const GemmDesc& desc, int workers);

/// Workspace layout of one GEMM.
struct GemmWorkspace {
  int64_t bias_offset = 0;
  int64_t activations_offset = 0;
  int64_t worker_offset = 0;
  int64_t worker_bytes = 0;
  int64_t total_bytes = 0;
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
};
RowKernels ExactRowKernels(Isa level);
RowKernels W4a8RowKernels(Isa level);
RowKernels Bf16RowKernels(const GemmDesc& desc);
/// The functions of a kernel other than the AMX kernel.
RowKernels RowKernelsOf(const KernelDesc& kernel, const GemmDesc& desc);

int64_t RowsWorkspaceBytes(const GemmDesc& desc, const RowKernels& kernels, int workers);
void RunRows(const GemmCall& call, const RowKernels& kernels, ThreadPool& pool);

int64_t AmxWorkspaceBytes(const GemmDesc& desc, int workers);
void RunAmx(const GemmCall& call, ThreadPool& pool);

/// Widens the bias to fp32 into `target`; returns null if there is none.
const float* WidenBias(const GemmCall& call, float* target);

/// Complete accumulators of some rows: gate[i * stride + c] is row i, column c; for GLU, `up` is
/// the same for the up half, else null.
struct FinishedSums {
  const float* gate;
  const float* up;
  int64_t stride;
};

/// Runs the epilogue on accumulators that begin at output row first_m, column columns.first.
void StoreRows(const GemmCall& call, const ExactKernels& kernels, const float* bias,
               ColumnRange columns, int64_t first_m, int64_t rows, const FinishedSums& sums);

}  // namespace marlin::cpu
