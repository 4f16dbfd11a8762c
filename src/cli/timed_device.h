// Devices whose speed means something.
#pragma once

#include <string>

#include "marlin/device.h"

namespace marlin::cli {

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

}  // namespace marlin::cli
