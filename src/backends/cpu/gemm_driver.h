// The host side of a CPU product: activations in, tasks over columns, epilogue out.
#pragma once

#include <cstdint>

#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/prepared_panels.h"
#include "base/thread_pool.h"
#include "plan/backend.h"

namespace marlin::cpu {

/// The vector kernels of a level (AMX runs its vector parts on AVX-512).
const ExactKernels& ExactKernelsOf(Isa level);

/// Columns of the output that one task finishes, and the panel blocks behind them.
struct ColumnRange {
  int64_t first = 0;  ///< Output columns [first, last).
  int64_t last = 0;
};

/// How a product is cut into tasks. An output is always computed by one task in the same order, so
/// the cut does not show in the result.
struct TaskGrid {
  int64_t columns = 0;           ///< Output columns: n, or n / 2 when gated.
  int64_t columns_per_task = 0;  ///< A multiple of 16.
  int64_t tasks = 0;
  static TaskGrid Of(const GemmDesc& desc, int64_t blocks_per_task);
  ColumnRange Columns(int64_t task) const;
};

/// How a driver cuts a product: passes over its rows, tasks over its columns. Conformance cases are
/// placed around these sizes, because code beyond the first block of either is reached only there.
struct GemmBlocking {
  int64_t rows_per_pass = 0;
  int64_t columns_per_task = 0;
};
GemmBlocking RowsBlocking(const GemmDesc& desc, int workers);
GemmBlocking AmxBlocking(const GemmDesc& desc, int workers);

/// Offsets into the workspace of one product.
struct GemmWorkspace {
  int64_t bias_offset = 0;
  int64_t activations_offset = 0;
  int64_t worker_offset = 0;
  int64_t worker_bytes = 0;
  int64_t total_bytes = 0;
};

/// A product that reads activations row by row.
struct RowKernels {
  const ExactKernels* vector;                        ///< Packs rows and stores outputs.
  void (*quantize_row)(float* x, int64_t padded_k);  ///< Rewrites a packed row in place, or null.
  ExactKernels::MultiplyBlock (*select)(const PanelView& weights);
};
RowKernels ExactRowKernels(Isa level);
RowKernels W4a8RowKernels(Isa level);

int64_t RowsWorkspaceBytes(const GemmDesc& desc, int workers);
void RunRows(const GemmCall& call, const RowKernels& functions, ThreadPool& pool);

int64_t AmxWorkspaceBytes(const GemmDesc& desc, int workers);
void RunAmx(const GemmCall& call, ThreadPool& pool);

/// Widens the bias to fp32 in the workspace; null when there is none.
const float* WidenBias(const GemmCall& call, float* target);

/// Finished sums of some rows: gate[i * stride + c] is row i, column c of the gate half, up
/// likewise of the other half (null unless gated).
struct FinishedSums {
  const float* gate;
  const float* up;
  int64_t stride;
};

/// Stores finished sums, whose row 0 is row first_m and column 0 columns.first of the output.
void StoreRows(const GemmCall& call, const ExactKernels& kernels, const float* bias,
               ColumnRange columns, int64_t first_m, int64_t rows, const FinishedSums& sums);

}  // namespace marlin::cpu
