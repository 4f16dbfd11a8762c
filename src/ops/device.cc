#include "ops/device.h"

#include <algorithm>
#include <new>
#include <system_error>

#include "backends/cpu/cpu_backend.h"
#include "base/macros.h"

namespace marlin {

Result<AlignedBuffer> Device::Impl::TakeWorkspace(int64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_.empty()) {
      AlignedBuffer buffer = std::move(spare_.back());
      spare_.pop_back();
      if (buffer.size() >= bytes) return buffer;
    }
  }
  return AlignedBuffer::Allocate(bytes);
}

void Device::Impl::ReturnWorkspace(AlignedBuffer workspace) {
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(std::move(workspace));
}

Result<Device> Device::Open(std::string_view name, const DeviceOptions& options) {
  if (name != "cpu" && name != "auto") {
    return Status(Code::kInvalidArgument,
                  "device: unknown name '" + std::string(name) + "'; known: cpu, auto");
  }
  if (options.threads < 0) {
    return Status(Code::kInvalidArgument,
                  "threads: expected 0 or more, got " + std::to_string(options.threads));
  }
  try {
    MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, cpu::OpenCpu(options));
    return Device(std::make_shared<Impl>(std::move(backend)));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "device: cannot allocate");
  } catch (const std::system_error& error) {
    return Status(Code::kOutOfMemory,
                  std::string("device: cannot start a thread: ") + error.what());
  }
}

DeviceInfo Device::info() const { return impl_->backend().Info(); }

std::vector<DeviceInfo> ListDevices() {
  std::vector<DeviceInfo> devices;
  if (Result<Device> device = Device::Open("cpu"); device.ok()) devices.push_back(device->info());
  return devices;
}

}  // namespace marlin
