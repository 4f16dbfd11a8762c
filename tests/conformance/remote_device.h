// A fake GPU: the CPU's kernels behind memory that the host cannot access and with asynchronous
// calls, with fault injection.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/cpu/cpu_backend.h"
#include "ops/device/device.h"
#include "plan/gemm/backend.h"

namespace marlin::conformance {

enum class RemoteFault : uint8_t {
  kNone,
  kWritesBeforeOutput,
  kWritesBehindOutput,
  kWritesBetweenRows,
  kWritesBehindWorkspace,
  kWritesActivations,
  kWritesBias,
  kWritesRowWeights,
  kForgetsLastOutput,
  kOtherBitsFromRun9,
  kFailsLater,
};

class RemoteDevice final : public Backend {
 public:
  RemoteDevice(std::unique_ptr<Backend> cpu, RemoteFault fault)
      : cpu_(std::move(cpu)), fault_(fault) {}

  DeviceInfo Info() const override {
    DeviceInfo info = cpu_->Info();
    info.name = info.backend = "remote";
    return info;
  }
  DeviceProperties Properties() const override { return cpu_->Properties(); }
  std::span<const KernelDesc> Kernels() const override { return cpu_->Kernels(); }
  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override;
  double Cost(const KernelDesc& kernel, const GemmDesc& desc) const override {
    return cpu_->Cost(kernel, desc);
  }
  Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& weights) const override;
  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override;
  const DecoderBackend* decoder() const override { return nullptr; }
  Result<void*> Allocate(int64_t bytes) const override;
  void Free(void* data) const override;
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override;
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override;
  Status Synchronize(void* stream) const override;
  bool calls_block() const override { return false; }

 private:
  class RemoteGemm;
  // Maps a device address to host memory; null for an address that is not the device's.
  std::byte* Local(const void* address) const;
  Status Put(std::function<Status()> work) const;
  Status RunNow(const PlannedGemm& plan, const GemmCall& call) const;
  void Spoil(const PlannedGemm& plan, const GemmCall& call) const;

  std::unique_ptr<Backend> cpu_;
  RemoteFault fault_;
  mutable std::mutex mutex_;
  mutable std::map<uintptr_t, int64_t> blocks_;
  mutable std::vector<std::function<Status()>> queue_;
  mutable int runs_ = 0;
};

}  // namespace marlin::conformance
