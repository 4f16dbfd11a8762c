// The decoder operations on the CPU.
#pragma once

#include "backends/cpu/attention/cpu_attention.h"
#include "backends/cpu/decoder/decoder_kernels.h"
#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "base/thread_pool.h"
#include "plan/gemm/kernel_desc.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"

namespace marlin::cpu {

/// The vector kernels of a level.
const DecoderKernels& DecoderKernelsOf(Isa level);

class CpuDecoder final : public DecoderBackend {
 public:
  /// The pool must outlive this.
  CpuDecoder(Isa level, ThreadPool& pool);

  bool reads_host_memory() const override { return true; }
  bool Has(DecoderOperation /*operation*/) const override { return true; }
  int64_t cache_page_tokens() const override { return kSegment; }
  int64_t sampler_state_bytes(int64_t vocab) const override;

  using DecoderBackend::WorkspaceBytes;
#define MARLIN_CPU_kRuns(Name) \
  Status Run(const Name##Call& call, const OperationContext& context) const override;
#define MARLIN_CPU_kScratch(Name) \
  MARLIN_CPU_kRuns(Name) int64_t WorkspaceBytes(const Name##Call& call) const override;
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) MARLIN_CPU_##cpu(Name)
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
#undef MARLIN_CPU_kRuns
#undef MARLIN_CPU_kScratch

 private:
  AttentionContext ContextOf(int64_t jobs, const AttentionOptions& options) const;
  void RunJobs(std::span<const AttentionJob> jobs, const AttentionOptions& options,
               float* scratch) const;

  Isa level_;
  ThreadPool& pool_;
  const DecoderKernels& kernels_;
  const SegmentKernel* segment_kernel_;  ///< Null below the AMX level.
  const ExactKernels& exact_;
};

}  // namespace marlin::cpu
