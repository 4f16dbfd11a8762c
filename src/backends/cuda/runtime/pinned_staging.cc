#include "backends/cuda/runtime/pinned_staging.h"

#include <string>
#include <utility>

#include "base/macros.h"

namespace marlin::cuda {
namespace {

class PinnedStaging final : public HostStaging {
 public:
  /// Takes the memory and the event.
  PinnedStaging(std::shared_ptr<DeviceHandle> device, void* data, int64_t bytes, cudaEvent_t event)
      : HostStaging(static_cast<std::byte*>(data), bytes),
        device_(std::move(device)),
        event_(event) {}
  ~PinnedStaging() override {
    const DeviceScope scope(device_->index);
    cudaEventSynchronize(event_);
    cudaEventDestroy(event_);
    cudaFreeHost(data());
  }

  Status Record(void* stream) override {
    const DeviceScope scope(device_->index);
    return device_->errors.Check(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)),
                                 "cudaEventRecord");
  }
  Status Wait() override {
    const DeviceScope scope(device_->index);
    return device_->errors.Check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }

 private:
  const std::shared_ptr<DeviceHandle> device_;
  const cudaEvent_t event_;
};

}  // namespace

Result<std::unique_ptr<HostStaging>> MakePinnedStaging(const std::shared_ptr<DeviceHandle>& device,
                                                       int64_t bytes) {
  MARLIN_RETURN_IF_ERROR(device->errors.Lost());
  const DeviceScope scope(device->index);
  cudaEvent_t event = nullptr;
  MARLIN_RETURN_IF_ERROR(device->errors.Check(
      cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
  void* data = nullptr;
  const std::string what = "cudaHostAlloc of " + std::to_string(bytes) + " bytes";
  const Status allocated = device->errors.Check(
      cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable), what.c_str());
  if (!allocated.ok()) {
    cudaEventDestroy(event);
    return allocated;
  }
  return {std::make_unique<PinnedStaging>(device, data, bytes, event)};
}

}  // namespace marlin::cuda
