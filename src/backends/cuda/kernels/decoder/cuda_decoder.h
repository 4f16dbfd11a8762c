// The decoder operations on an NVIDIA GPU.
#pragma once

#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/decoder_backend.h"

namespace marlin::cuda {

class CudaDecoder final : public DecoderBackend {
 public:
  /// All outlive the decoder.
  CudaDecoder(DeviceHandle& device, const ValueErrors& errors, SplitKScratch& scratch)
      : device_(device), errors_(errors), scratch_(scratch) {}
  /// Call it before the first Run.
  Status Load() const;

  bool reads_host_memory() const override { return false; }
  bool Has(DecoderOperation operation) const override;
  int64_t cache_page_tokens() const override;
  int64_t sampler_state_bytes(int64_t vocab) const override;

  Status Run(const LookUpRowsCall& call, const OperationContext& context) const override;
  Status Run(const LookUpWeightRowsCall& call, const OperationContext& context) const override;
  Status Run(const ConvertCall& call, const OperationContext& context) const override;
  Status Run(const RmsNormCall& call, const OperationContext& context) const override;
  Status Run(const AddToCall& call, const OperationContext& context) const override;
  Status Run(const AddRmsNormCall& call, const OperationContext& context) const override;
  Status Run(const ApplyRotaryCall& call, const OperationContext& context) const override;
  Status Run(const ApplyGateCall& call, const OperationContext& context) const override;
  Status Run(const ApplySigmoidCall& call, const OperationContext& context) const override;
  Status Run(const AttentionCall& call, const OperationContext& context) const override;
  Status Run(const AppendToCacheCall& call, const OperationContext& context) const override;
  Status Run(const RotateAndAppendCall& call, const OperationContext& context) const override;
  Status Run(const PagedAttentionCall& call, const OperationContext& context) const override;
  Status Run(const RouteTokensCall& call, const OperationContext& context) const override;
  Status Run(const ResetSamplerCall& call, const OperationContext& context) const override;
  Status Run(const SampleTokensCall& call, const OperationContext& context) const override;

  using DecoderBackend::WorkspaceBytes;
  int64_t WorkspaceBytes(const AttentionCall& call) const override;
  int64_t WorkspaceBytes(const AppendToCacheCall& call) const override;
  int64_t WorkspaceBytes(const RotateAndAppendCall& call) const override;
  int64_t WorkspaceBytes(const PagedAttentionCall& call) const override;

 private:
  Status RunUnfused(const RotateAndAppendCall& call, const OperationContext& context) const;
  template <typename Launch>
  Status Enqueue(const char* kernel, const Launch& launch) const;

  DeviceHandle& device_;
  const ValueErrors& errors_;
  SplitKScratch& scratch_;
};

}  // namespace marlin::cuda
