// The rows and states of the sequences of a recurrent operation, which its tasks share.
#pragma once

#include <cstdint>

#include "backends/cpu/recurrent/recurrent_kernels.h"
#include "base/thread_pool.h"
#include "marlin/recurrent.h"
#include "marlin/status.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::cpu {

const RecurrentKernels& RecurrentKernelsOf(Isa level);

class RecurrentSequences {
 public:
  /// `memory`: Integers(rows) of them. Everything must outlive this.
  RecurrentSequences(const RecurrentRows& rows, const RecurrentStates& states, int32_t* memory)
      : rows_(rows), states_(states), taking_(memory), counts_(memory + rows.positions.dim(0)) {}
  static int64_t Integers(const RecurrentRows& rows) {
    return rows.positions.dim(0) + rows.pages.dim(0);
  }

  int64_t count() const { return rows_.pages.dim(0); }
  /// Checks the contents of the index vectors, and lists the rows that take part.
  Status Prepare();
  /// The state of a sequence before (0) or after (1) its rows; null if there is none.
  float* Page(int64_t sequence, int64_t which) const;
  /// The rows of a sequence that take part.
  const int32_t* Taking(int64_t sequence) const { return taking_ + FirstRow(sequence); }
  int64_t TakingCount(int64_t sequence) const { return counts_[sequence]; }
  /// Zeros the results of rows that do not take part, in `columns` columns.
  void ClearOthers(int64_t sequence, const MixedColumn& out, int64_t columns) const;

 private:
  int64_t FirstRow(int64_t sequence) const { return rows_.first_rows.As<int32_t>()[sequence]; }
  Status CheckPages(int64_t sequence) const;

  const RecurrentRows& rows_;
  const RecurrentStates& states_;
  int32_t* taking_;  ///< Each sequence's from its first row on.
  int32_t* counts_;  ///< [sequences]: how many take part.
};

/// Keeps the last inputs of channels. `after` is the oldest one, which may be the oldest before:
/// inputs only move towards it.
void KeepInputs(const ConvRows& conv, const ConvChannels& channels, float* after);

/// Copies a state that no row changes; `before` may be null (zeros) or `after`.
void CopyState(const float* before, int64_t elements, float* after);

/// Runs tasks.Run(task, worker) for every task; calls of at most kSerialWork multiplications on the
/// calling thread.
template <class Tasks>
void RunTasks(const Tasks& tasks, int64_t work, ThreadPool& pool) {
  constexpr int64_t kSerialWork = 1 << 14;
  if (work <= kSerialWork) {
    for (int64_t task = 0; task < tasks.count(); ++task) tasks.Run(task, 0);
    return;
  }
  pool.Run(tasks.count(), [&](int64_t task, int worker) { tasks.Run(task, worker); });
}

/// The column of a tensor [rows, heads, features] or [rows, features] in which the heads or
/// features from `first` on begin.
inline RowColumn ColumnOf(const TensorView& x, int64_t first) {
  return {x.As<float>() + first * x.stride(1), x.stride(0)};
}
inline MixedColumn MixedColumnOf(const MutableTensorView& x, int64_t first) {
  const int64_t bytes = DTypeBytes(x.dtype());
  return {x.As<uint8_t>() + first * x.stride(1) * bytes, x.stride(0) * bytes, x.dtype()};
}

}  // namespace marlin::cpu
