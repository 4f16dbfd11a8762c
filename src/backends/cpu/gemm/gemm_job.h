// A GEMM as tasks of a thread pool, so that several GEMMs can share one run of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

#include "backends/cpu/gemm/gemm_driver.h"
#include "plan/gemm/backend.h"

namespace marlin::cpu {

/// The most rows of a GEMM that is bound by streaming its weights.
inline constexpr int64_t kSmallM = 8;

/// Sizes of a job's memory.
struct JobBytes {
  int64_t job = 0;     ///< The bias and the packed activations.
  int64_t worker = 0;  ///< Scratch of each worker, which jobs of one run share.
};

/// The rows of a GEMM's A: consecutive, or gathered.
struct JobRows {
  const int32_t* gather = nullptr;  ///< [m] the row of A of each row of the job, or null.

  int64_t operator[](int64_t i) const { return gather == nullptr ? i : gather[i]; }
};

/// A GEMM, at most one MC block of rows, of a kernel with row-major packed activations. Every
/// Pack(0 .. pack_tasks), in any order and on any thread, then every Run(0 .. tasks).
class RowsJob {
 public:
  /// `workers` share the columns: fewer than the pool has, if several jobs run together.
  static JobBytes Bytes(const GemmDesc& desc, const RowKernels& kernels, int workers);
  /// The rows of an MC block.
  static int64_t MaxRows(const GemmDesc& desc, const RowKernels& kernels);
  /// `memory` has Bytes().job bytes, aligned to 64.
  RowsJob(const GemmCall& call, const RowKernels& kernels, int workers, std::byte* memory,
          const JobRows& rows = {});

  int64_t pack_tasks() const { return call_.desc.m; }
  void Pack(int64_t task) const;
  int64_t tasks() const { return grid_.tasks; }
  void Run(int64_t task, std::byte* scratch) const;

 private:
  const float* MultiplyColumns(ColumnRange columns, float* out, float* scratch) const;

  GemmCall call_;
  JobRows rows_;
  RowKernels kernels_;
  PanelView weights_;
  ExactKernels::MultiplyBlock multiply_;
  const float* bias_;
  uint8_t* x_;
  int64_t x_stride_;  ///< Bytes.
  int64_t sums_stride_;
  TaskGrid grid_;
};

/// The same for the AMX kernel.
class AmxJob {
 public:
  static JobBytes Bytes(const GemmDesc& desc, int workers);
  static int64_t MaxRows();
  AmxJob(const GemmCall& call, int workers, std::byte* memory, const JobRows& rows = {});

  int64_t pack_tasks() const;
  void Pack(int64_t task) const;
  int64_t tasks() const { return grid_.tasks; }
  void Run(int64_t task, std::byte* scratch) const;

 private:
  GemmCall call_;
  JobRows rows_;
  PanelView weights_{};
  const float* bias_ = nullptr;
  uint16_t* high_ = nullptr;
  uint16_t* low_ = nullptr;  ///< Rounding errors of the activations, or null if not needed.
  int64_t sums_bytes_ = 0;
  TaskGrid grid_;
};

/// A job of any kernel.
using GemmJob = std::variant<RowsJob, AmxJob>;
GemmJob MakeJob(const KernelDesc& kernel, const GemmCall& call, int workers, std::byte* memory,
                const JobRows& rows = {});
/// Enough for every job of a GEMM of up to desc.m rows.
JobBytes JobBytesOf(const KernelDesc& kernel, const GemmDesc& desc, int workers);
int64_t MaxJobRows(const KernelDesc& kernel, const GemmDesc& desc);

/// Block sizes of a kind of job: MC blocks of rows, tasks of columns. Conformance cases are placed
/// around these sizes, because only they reach the code for a second block of either.
struct GemmBlocking {
  int64_t rows_per_pass = 0;
  int64_t columns_per_task = 0;
};
/// The sizes of the exact kernels; the others have the same columns, and as many rows or more.
GemmBlocking RowsBlocking(const GemmDesc& desc, int workers);
GemmBlocking AmxBlocking(const GemmDesc& desc, int workers);

/// Runs a GEMM in `workspace`, which has GemmWorkspaceBytes.
int64_t GemmWorkspaceBytes(const KernelDesc& kernel, const GemmDesc& desc, int workers);
void RunGemm(const KernelDesc& kernel, const GemmCall& call, ThreadPool& pool);

/// The workspace in which `count` GEMMs of a problem share one run of the pool; 0 if they do not,
/// because each has several MC blocks, and so more work than a fork and join.
int64_t SharedRunBytes(const KernelDesc& kernel, const GemmDesc& desc, int64_t count, int workers);
/// Runs GEMMs of one problem in the workspace of the first, of `workspace_bytes`: as many at a time
/// as it has room for, at least one.
void RunGemms(const KernelDesc& kernel, std::span<const GemmCall> calls, int64_t workspace_bytes,
              ThreadPool& pool);

}  // namespace marlin::cpu
