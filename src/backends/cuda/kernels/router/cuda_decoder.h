// The decoder operations that run on an NVIDIA GPU.
#pragma once

#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/decoder_backend.h"

namespace marlin::cuda {

class CudaDecoder final : public DecoderBackend {
 public:
  /// Both outlive the decoder.
  CudaDecoder(DeviceHandle& device, const ValueErrors& errors) : device_(device), errors_(errors) {}
  /// Call it before the first Run.
  Status Load() const;

  bool reads_host_memory() const override { return false; }
  bool Has(DecoderOperation operation) const override {
    return operation == DecoderOperation::kRouteTokens;
  }
  int64_t cache_page_tokens() const override { return 1; }
  int64_t sampler_state_bytes(int64_t /*vocab*/) const override { return 0; }

  Status Run(const RouteTokensCall& call, const OperationContext& context) const override;

 private:
  // The operations that are not overridden.
  using DecoderBackend::Run;

  DeviceHandle& device_;
  const ValueErrors& errors_;
};

}  // namespace marlin::cuda
