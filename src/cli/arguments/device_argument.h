// The option --device, whose default METAL_MARLIN_DEVICE sets.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/arguments/arguments.h"
#include "cli/console.h"
#include "marlin/device.h"

namespace marlin::cli {

/// The names of devices that shell completions offer.
std::vector<std::string> DeviceChoices();

class DeviceArgument {
 public:
  /// `names` are the devices that --help lists for the command.
  void Declare(ArgumentList& arguments, const std::string& names);
  /// The name on the command line, otherwise DefaultDeviceName. Errors: as DefaultDeviceName.
  Result<std::string> Name() const;
  /// Errors: as Device::Open; for a device that METAL_MARLIN_DEVICE names, the message begins
  /// with the variable.
  Result<Device> Open(const DeviceOptions& options) const;
  /// A line on stderr with the device of a loaded model, where "auto" chose it.
  void SayTaken(Console& console, const DeviceInfo& taken) const;

 private:
  std::optional<std::string> name_;
};

}  // namespace marlin::cli
