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
  const int64_t most = std::min(desc.m, MaxJobRows(kernel, desc));
  const JobBytes full = BytesOfRows(kernel, desc, most, workers);
  // Tasks of small M are wider, so that their accumulators may need more than those of full blocks.
  const JobBytes small = BytesOfRows(kernel, desc, std::min(most, kSmallM), workers);
  return {full.job, std::max(full.worker, small.worker)};
}

int64_t MaxJobRows(const KernelDesc& kernel, const GemmDesc& desc) {
  return kernel.level == Isa::kAmx ? AmxJob::MaxRows()
                                   : RowsJob::MaxRows(desc, RowKernelsOf(kernel, desc));
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
