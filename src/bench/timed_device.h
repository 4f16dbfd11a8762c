// Opening devices for measurement.
#pragma once

#include <string>

#include "marlin/device.h"
#include "ops/device.h"

namespace marlin::bench {

/// Opens a device that is to be measured. Errors: those of Device::Open, kUnsupported for the
/// simulator of Metal.
inline Result<Device> OpenTimedDevice(const std::string& name, const DeviceOptions& options) {
  if (name == "metal-sim") {
    return Status(Code::kUnsupported,
                  "metal-sim: a simulator has no speed; `metal-marlin metal-sim` counts bytes and "
                  "operations of a kernel");
  }
  return Device::Open(name, options);
}

/// Calls per timed run. Where calls return before their work is done, many calls share one wait.
inline int64_t CallsOfRun(const Device& device) {
  constexpr int64_t kCalls = 32;
  return device.impl().backend().calls_block() ? 1 : kCalls;
}

}  // namespace marlin::bench
