// The device of tests that run on more than one: the CPU, or that of the environment variable
// MARLIN_TEST_DEVICE, which tests/CMakeLists.txt sets to run them again.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

namespace marlin {

inline const char* TestDevice() {
  const char* const name = std::getenv("MARLIN_TEST_DEVICE");
  return name == nullptr ? "cpu" : name;
}

/// Whether it is not the CPU: the tests' own memory is then the device's, too (managed_memory.cc).
inline bool OnOtherDevice() { return std::string_view(TestDevice()) != "cpu"; }

/// The name of a test on a device.
inline std::string NameOfDevice(std::string device) {
  std::replace(device.begin(), device.end(), '-', '_');
  return device;
}

}  // namespace marlin
