// Tests on the device that their parameter names.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "marlin/device.h"

namespace marlin::testing {

inline Result<Device> OpenByName(const std::string& name) {
  return Device::Open(name, {.threads = 2});
}

/// Skipped, with the reason, where the build has no such device. A device is opened once for all
/// tests: it compiles its kernels when they first run.
class DeviceTest : public ::testing::TestWithParam<std::string> {
 protected:
  using OpenDevice = Result<Device> (*)(const std::string& name);

  explicit DeviceTest(OpenDevice open = OpenByName)
      : opened_(Opened(open)), device_(opened_.ok() ? *opened_ : *OpenByName("cpu")) {}

  void SetUp() override {
    const Status status = opened_.ok() ? Status() : opened_.status();
    if (status.code() == Code::kUnsupported) GTEST_SKIP() << status.message();
    ASSERT_TRUE(status.ok()) << status.message();
  }

 private:
  static const Result<Device>& Opened(OpenDevice open) {
    static std::map<std::string, Result<Device>> devices;
    const auto found = devices.find(GetParam());
    if (found != devices.end()) return found->second;
    return devices.emplace(GetParam(), open(GetParam())).first->second;
  }

  const Result<Device>& opened_;

 protected:
  const Device device_;  ///< Skipped tests, which do not use it, have the CPU.
};

}  // namespace marlin::testing
