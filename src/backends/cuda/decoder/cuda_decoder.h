// The decoder operations on an NVIDIA GPU.
#pragma once

#include <memory>
#include <utility>

#include "backends/cuda/decoder/operations.h"
#include "backends/cuda/persistent/persistent_pool.h"
#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "backends/cuda/runtime/value_errors.h"
#include "plan/step/decoder_backend.h"

namespace marlin::cuda {

class CudaDecoder final : public DecoderBackend {
 public:
  /// All outlive the decoder. `persistent`: steps may become launches of the persistent kernel.
  CudaDecoder(std::shared_ptr<DeviceHandle> device, const ValueErrors& errors,
              SplitKScratch& scratch, const DeviceShape& shape, bool persistent)
      : device_(std::move(device)),
        errors_(errors),
        scratch_(scratch),
        shape_(shape),
        persistent_(persistent),
        pool_(std::make_unique<PersistentPool>(device_)) {}
  /// Prepares all kernels. Call it before the first Run.
  Status Load() const;

  bool reads_host_memory() const override { return false; }
  bool Has(DecoderOperation operation) const override;
  int64_t cache_page_tokens() const override;
  int64_t sampler_state_bytes(int64_t vocab) const override;

  Result<FusedRun> Fuse(const StepDescription& step,
                        std::span<const StepOperation> operations) const override;
  Result<FusedRun> FuseWithin(const StepDescription& step,
                              std::span<const StepOperation> operations) const override;

  bool RoutesRows(const RouteRowsCall& call) const override;
  Status RouteRows(const RouteRowsCall& call, const OperationContext& context) const override;

#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal)   \
  int64_t WorkspaceBytes(const Name##Call& call) const override; \
  Status Run(const Name##Call& call, const OperationContext& context) const override;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

 private:
  template <typename Call>
  Status RunOnDevice(const Call& call, const OperationContext& context) const;

  const std::shared_ptr<DeviceHandle> device_;
  const ValueErrors& errors_;
  SplitKScratch& scratch_;
  const DeviceShape& shape_;
  const bool persistent_;
  const std::unique_ptr<PersistentPool> pool_;
};

}  // namespace marlin::cuda
