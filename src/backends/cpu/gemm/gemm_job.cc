#include "backends/cpu/gemm/gemm_job.h"

#include <algorithm>

#include "backends/cpu/gemm/job_list.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/thread_pool.h"

namespace marlin::cpu {
namespace {

JobBytes BytesOfRows(const KernelDesc& kernel, GemmDesc desc, int64_t rows, int workers) {
  desc.m = rows;
  return kernel.level == Isa::kAmx ? AmxJob::Bytes(desc, workers)
                                   : RowsJob::Bytes(desc, RowKernelsOf(kernel, desc), workers);
}

/// The memory of jobs that share a run: their list, then each job's own, then the workers'.
struct SharedRun {
  int workers = 0;  ///< Per job.
  JobBytes each;
  int64_t list = 0;

  SharedRun(const KernelDesc& kernel, const GemmDesc& desc, int64_t count, int pool_workers)
      : workers(static_cast<int>(CeilDivide(pool_workers, count))),
        each(JobBytesOf(kernel, desc, workers)),
        list(JobList::BytesFor(count)) {
    each.job = RoundUp(each.job, kBufferAlignment);
  }
  int64_t Bytes(int64_t count, int pool_workers) const {
    return list + count * each.job + pool_workers * each.worker;
  }
};

/// Runs GEMMs of one MC block each.
void RunShared(const KernelDesc& kernel, std::span<const GemmCall> calls, ThreadPool& pool) {
  auto* const memory = static_cast<std::byte*>(calls[0].workspace);
  const auto count = static_cast<int64_t>(calls.size());
  const SharedRun run(kernel, calls[0].desc, count, pool.worker_count());
  JobList jobs(memory, count);
  std::byte* next = memory + run.list;
  for (const GemmCall& call : calls) {
    jobs.Add(MakeJob(kernel, call, run.workers, next));
    next += run.each.job;
  }
  jobs.Run(pool, next, run.each.worker);
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
  // Tasks of small M are wider, so that their accumulators may take more than in full blocks.
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

int64_t SharedRunBytes(const KernelDesc& kernel, const GemmDesc& desc, int64_t count, int workers) {
  if (count < 2 || desc.m > MaxJobRows(kernel, desc)) return 0;
  return SharedRun(kernel, desc, count, workers).Bytes(count, workers);
}

void RunGemms(const KernelDesc& kernel, std::span<const GemmCall> calls, int64_t workspace_bytes,
              ThreadPool& pool) {
  while (!calls.empty()) {
    size_t count = calls.size();
    const auto shared_bytes = [&] {
      return SharedRunBytes(kernel, calls[0].desc, static_cast<int64_t>(count),
                            pool.worker_count());
    };
    while (shared_bytes() > workspace_bytes) --count;
    if (shared_bytes() == 0) {
      count = 1;
      RunGemm(kernel, calls[0], pool);
    } else {
      RunShared(kernel, calls.first(count), pool);
    }
    calls = calls.subspan(count);
  }
}

}  // namespace marlin::cpu
