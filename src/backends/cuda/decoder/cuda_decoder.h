// The decoder operations on an NVIDIA GPU.
#pragma once

#include <memory>
#include <utility>

#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/step/decoder_backend.h"

namespace marlin::cuda {

class CudaDecoder final : public DecoderBackend {
 public:
  /// All outlive the decoder. `persistent`: steps may become a launch of the persistent kernel.
  CudaDecoder(std::shared_ptr<DeviceHandle> device, const ValueErrors& errors,
              SplitKScratch& scratch, const DeviceShape& shape, bool persistent)
      : device_(std::move(device)),
        errors_(errors),
        scratch_(scratch),
        shape_(shape),
        persistent_(persistent) {}
  /// Call it before the first Run.
  Status Load() const;

  bool reads_host_memory() const override { return false; }
  bool Has(DecoderOperation operation) const override;
  int64_t cache_page_tokens() const override;
  int64_t sampler_state_bytes(int64_t vocab) const override;

  Result<FusedRun> Fuse(const StepDescription& step,
                        std::span<const StepOperation> operations) const override;

  Status Run(const LookUpRowsCall& call, const OperationContext& context) const override;
  Status Run(const LookUpWeightRowsCall& call, const OperationContext& context) const override;
  Status Run(const ConvertCall& call, const OperationContext& context) const override;
  Status Run(const RmsNormCall& call, const OperationContext& context) const override;
  Status Run(const AddToCall& call, const OperationContext& context) const override;
  Status Run(const AddRmsNormCall& call, const OperationContext& context) const override;
  Status Run(const ApplyRotaryCall& call, const OperationContext& context) const override;
  Status Run(const ApplyGateCall& call, const OperationContext& context) const override;
  Status Run(const ApplySigmoidCall& call, const OperationContext& context) const override;
  Status Run(const HeadProductCall& call, const OperationContext& context) const override;
  Status Run(const ExpandLatentsCall& call, const OperationContext& context) const override;
  Status Run(const AttentionCall& call, const OperationContext& context) const override;
  Status Run(const AppendToCacheCall& call, const OperationContext& context) const override;
  Status Run(const RotateAndAppendCall& call, const OperationContext& context) const override;
  Status Run(const PagedAttentionCall& call, const OperationContext& context) const override;
  Status Run(const RouteTokensCall& call, const OperationContext& context) const override;
  bool RoutesRows(const RouteRowsCall& call) const override;
  Status RouteRows(const RouteRowsCall& call, const OperationContext& context) const override;
  Status Run(const ResetSamplerCall& call, const OperationContext& context) const override;
  Status Run(const SampleTokensCall& call, const OperationContext& context) const override;
  Status Run(const AdvanceTokensCall& call, const OperationContext& context) const override;

  using DecoderBackend::WorkspaceBytes;
  int64_t WorkspaceBytes(const ExpandLatentsCall& call) const override;
  int64_t WorkspaceBytes(const AttentionCall& call) const override;
  int64_t WorkspaceBytes(const AppendToCacheCall& call) const override;
  int64_t WorkspaceBytes(const RotateAndAppendCall& call) const override;
  int64_t WorkspaceBytes(const PagedAttentionCall& call) const override;

 private:
  Status RunUnfused(const RotateAndAppendCall& call, const OperationContext& context) const;
  template <typename Launch>
  Status Enqueue(const char* kernel, const Launch& launch) const;

  const std::shared_ptr<DeviceHandle> device_;
  const ValueErrors& errors_;
  SplitKScratch& scratch_;
  const DeviceShape& shape_;
  const bool persistent_;
};

}  // namespace marlin::cuda
