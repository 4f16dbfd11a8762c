// Devices whose speed means something.
#pragma once

#include <string>

#include "marlin/device.h"

namespace marlin::cli {

/// Opens a device that is to be measured. Errors: those of Device::Open, kUnsupported for the
/// simulator of Metal, and for a Mac's GPU, whose work ends later than its calls.
inline Result<Device> OpenTimedDevice(const std::string& name, const DeviceOptions& options) {
  if (name == "metal-sim") {
    return Status(Code::kUnsupported,
                  "metal-sim: a simulator has no speed; `metal-marlin metal-sim` counts bytes and "
                  "operations of a kernel");
  }
  if (name == "metal") {
    return Status(Code::kUnsupported, "metal: nothing here reads the clock of a Mac's GPU yet");
  }
  return Device::Open(name, options);
}

}  // namespace marlin::cli
