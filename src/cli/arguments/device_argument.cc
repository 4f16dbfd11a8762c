#include "cli/arguments/device_argument.h"

#include <fmt/core.h>

#include "base/macros.h"

namespace marlin::cli {

std::vector<std::string> DeviceChoices() { return {"auto", "cpu", "cuda", "metal", "metal-sim"}; }

void DeviceArgument::Declare(ArgumentList& arguments, const std::string& names) {
  arguments.Option("--device", &name_, "DEVICE",
                   (names + "; default: METAL_MARLIN_DEVICE, otherwise auto").c_str());
  arguments.Choices(DeviceChoices());
}

Result<std::string> DeviceArgument::Name() const {
  return name_ ? Result<std::string>(*name_) : DefaultDeviceName();
}

Result<Device> DeviceArgument::Open(const DeviceOptions& options) const {
  MARLIN_ASSIGN_OR_RETURN(const std::string name, Name());
  Result<Device> device = Device::Open(name, options);
  const bool from_environment = !name_ && name != "auto";
  if (device.ok() || !from_environment) return device;
  return device.status().WithContext("METAL_MARLIN_DEVICE");
}

void DeviceArgument::SayTaken(Console& console, const DeviceInfo& taken) const {
  const Result<std::string> name = Name();
  if (!name.ok() || *name != "auto") return;
  const std::string why =
      taken.passed_over.empty() ? "" : fmt::format(", since {}", taken.passed_over);
  console.Message(fmt::format("device: {}{}", DescribeDevice(taken), why));
}

}  // namespace marlin::cli
