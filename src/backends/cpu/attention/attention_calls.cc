// The two attention operations as lists of jobs: contiguous keys and values, and paged KV cache.
// Workspace layout: the jobs, then the addresses of their segments, then the workers' scratch.
#include <new>

#include "backends/cpu/attention/paged_rows.h"
#include "backends/cpu/decoder/cpu_decoder.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cpu {
namespace {

/// Bytes of the jobs at the front of a workspace.
int64_t AttentionJobBytes(int64_t jobs) {
  return RoundUp(jobs * int64_t{sizeof(AttentionJob)}, kBufferAlignment);
}

}  // namespace

int64_t CpuDecoder::WorkspaceBytes(const AttentionCall& call) const {
  const auto jobs = static_cast<int64_t>(call.inputs.size());
  const AttentionContext context = ContextOf(jobs, call.options);
  AttentionTotals totals;
  for (const AttentionInput& input : call.inputs) totals.Add(AttentionJob::Of(input), context);
  return AttentionJobBytes(jobs) + totals.Floats(context.workers) * int64_t{sizeof(float)};
}

Status CpuDecoder::Run(const AttentionCall& call, const OperationContext& context) const {
  auto* const jobs = static_cast<AttentionJob*>(context.workspace);
  const size_t count = call.inputs.size();
  for (size_t i = 0; i < count; ++i) new (jobs + i) AttentionJob(AttentionJob::Of(call.inputs[i]));
  void* const scratch =
      static_cast<uint8_t*>(context.workspace) + AttentionJobBytes(static_cast<int64_t>(count));
  RunJobs({jobs, count}, call.options, static_cast<float*>(scratch));
  return {};
}

int64_t CpuDecoder::WorkspaceBytes(const PagedAttentionCall& call) const {
  const PagedRows rows(call.rows, call.cache);
  // Run reports the error.
  if (!rows.Check(call.options.window).ok()) return 0;
  const AttentionContext context = ContextOf(rows.sequences(), call.options);
  AttentionTotals totals;
  for (int64_t s = 0; s < rows.sequences(); ++s) {
    totals.Add(rows.JobOf(s, call.queries, call.out, nullptr), context);
  }
  return AttentionJobBytes(rows.sequences()) + rows.SegmentBytes() +
         totals.Floats(context.workers) * int64_t{sizeof(float)};
}

Status CpuDecoder::Run(const PagedAttentionCall& call, const OperationContext& context) const {
  const PagedRows rows(call.rows, call.cache);
  MARLIN_RETURN_IF_ERROR(rows.Check(call.options.window));
  auto* const jobs = static_cast<AttentionJob*>(context.workspace);
  auto* memory = static_cast<uint8_t*>(context.workspace) + AttentionJobBytes(rows.sequences());
  void* const scratch = memory + rows.SegmentBytes();
  auto* segments = reinterpret_cast<const uint8_t**>(memory);
  for (int64_t s = 0; s < rows.sequences(); ++s) {
    new (jobs + s) AttentionJob(rows.JobOf(s, call.queries, call.out, segments));
    segments += rows.SegmentsOf(s);
  }
  RunJobs({jobs, static_cast<size_t>(rows.sequences())}, call.options,
          static_cast<float*>(scratch));
  return {};
}

}  // namespace marlin::cpu
