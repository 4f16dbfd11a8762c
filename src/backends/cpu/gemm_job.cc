#include "backends/cpu/gemm_job.h"

#include <algorithm>

#include "base/checked.h"
#include "base/thread_pool.h"

namespace marlin::cpu {
namespace {

JobBytes BytesOfRows(const KernelDesc& kernel, GemmDesc desc, int64_t rows, int workers) {
  desc.m = rows;
  return kernel.level == Isa::kAmx ? AmxJob::Bytes(desc, workers)
                                   : RowsJob::Bytes(desc, RowKernelsOf(kernel, desc), workers);
}

}  // namespace

GemmJob MakeJob(const KernelDesc& kernel, const GemmCall& call, int workers, std::byte* memory,
                const JobRows& rows) {
  if (kernel.level == Isa::kAmx) return AmxJob(call, workers, memory, rows);
  return RowsJob(call, RowKernelsOf(kernel, call.desc), workers, memory, rows);
}

JobBytes JobBytesOf(const KernelDesc& kernel, const GemmDesc& desc, int workers) {
  const int64_t most = MaxJobRows(kernel, desc);
  const JobBytes full = BytesOfRows(kernel, desc, std::min(desc.m, most), workers);
  if (desc.m <= most) return full;
  // The tasks of few rows have more columns, so the last job may need more than the others.
  const JobBytes last = BytesOfRows(kernel, desc, (desc.m - 1) % most + 1, workers);
  return {std::max(full.job, last.job), std::max(full.worker, last.worker)};
}

int64_t MaxJobRows(const KernelDesc& kernel, const GemmDesc& desc) {
  return kernel.level == Isa::kAmx ? AmxJob::MaxRows()
                                   : RowsJob::MaxRows(desc, RowKernelsOf(kernel, desc));
}

GemmCall RowsOf(const GemmCall& call, int64_t first, int64_t count) {
  GemmCall part = call;
  part.desc.m = count;
  part.a =
      static_cast<const std::byte*>(call.a) + first * call.a_stride * DTypeBytes(call.desc.a_type);
  part.c = static_cast<std::byte*>(call.c) + first * call.c_stride * DTypeBytes(call.desc.c_type);
  if (call.epilogue.row_weight != nullptr) part.epilogue.row_weight += first;
  return part;
}

int64_t GemmWorkspaceBytes(const KernelDesc& kernel, const GemmDesc& desc, int workers) {
  const JobBytes bytes = JobBytesOf(kernel, desc, workers);
  return bytes.job + workers * bytes.worker;
}

void RunGemm(const KernelDesc& kernel, const GemmCall& call, ThreadPool& pool) {
  const JobBytes bytes = JobBytesOf(kernel, call.desc, pool.worker_count());
  auto* const memory = static_cast<std::byte*>(call.workspace);
  const int64_t most = MaxJobRows(kernel, call.desc);
  for (int64_t first = 0; first < call.desc.m; first += most) {
    const GemmCall part = RowsOf(call, first, std::min(most, call.desc.m - first));
    const GemmJob job = MakeJob(kernel, part, pool.worker_count(), memory);
    std::visit(
        [&](const auto& each) {
          // Packing one row takes less time than waking a second thread.
          pool.Run(each.pack_tasks(), [&](int64_t task, int) { each.Pack(task); });
          pool.Run(each.tasks(), [&](int64_t task, int worker) {
            each.Run(task, memory + bytes.job + worker * bytes.worker);
          });
        },
        job);
  }
}

}  // namespace marlin::cpu
