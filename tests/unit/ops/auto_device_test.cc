// The order in which "auto" takes devices, and the name that a program takes where its user gives
// none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/device/device.h"

namespace marlin::auto_device_test {
namespace {

using Open = std::function<Result<Device>()>;

class AutoDevice : public ::testing::Test {
 protected:
  /// A device that opens, and counts how often it does.
  Open Opens(int threads) {
    return [this, threads] {
      ++opened_;
      return Device::Open("cpu", {.threads = threads});
    };
  }
  static Open Fails(Code code, const std::string& message) {
    return [code, message]() -> Result<Device> { return Status(code, message); };
  }
  int opened_ = 0;
};

TEST_F(AutoDevice, TakesTheFirstThatIsThere) {
  const Result<Device> device =
      OpenFirst({Fails(Code::kUnsupported, "no GPU"), Opens(2), Opens(3)});
  ASSERT_TRUE(device.ok()) << device.status().message();
  EXPECT_EQ(device->info().threads, 2);
  EXPECT_EQ(device->info().passed_over, "no GPU");
  EXPECT_EQ(opened_, 1);
}

TEST_F(AutoDevice, SaysWhatItPassedOver) {
  const Result<Device> device = OpenFirst({Fails(Code::kOutOfMemory, "no GPU"), Opens(1),
                                           Fails(Code::kUnsupported, "its self-test"), Opens(2)});
  ASSERT_TRUE(device.ok());
  const Result<std::optional<Device>> next = Internals::Impl(*device).Next();
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_EQ((*next)->info().passed_over, "no GPU; its self-test");
  EXPECT_EQ(Device::Open("cpu", {.threads = 1})->info().passed_over, "");
}

TEST_F(AutoDevice, OpensTheNextOneWhenAskedForAndOnce) {
  const Result<Device> device =
      OpenFirst({Opens(1), Fails(Code::kUnsupported, "not there"), Opens(2)});
  ASSERT_TRUE(device.ok());
  const Result<std::optional<Device>> next = Internals::Impl(*device).Next();
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_EQ((*next)->info().threads, 2);
  const Result<std::optional<Device>> again = Internals::Impl(*device).Next();
  ASSERT_TRUE(again.ok() && again->has_value());
  EXPECT_EQ(&Internals::Impl(*(*again)), &Internals::Impl(*(*next)));
  EXPECT_EQ(opened_, 2);
  const Result<std::optional<Device>> last = Internals::Impl(*(*next)).Next();
  ASSERT_TRUE(last.ok());
  EXPECT_FALSE(last->has_value());
}

// A GPU that is lost or full is not passed over in silence.
TEST_F(AutoDevice, OtherErrorsEndTheSearch) {
  const Result<Device> lost = OpenFirst({Fails(Code::kDeviceLost, "lost"), Opens(1)});
  EXPECT_EQ(lost.status().code(), Code::kDeviceLost);
  EXPECT_EQ(opened_, 0);
  const Result<Device> none =
      OpenFirst({Fails(Code::kUnsupported, "first"), Fails(Code::kUnsupported, "last")});
  EXPECT_EQ(none.status().message(), "last");
}

TEST_F(AutoDevice, NamedDevicesHaveNoNext) {
  const Result<Device> device = Device::Open("cpu", {.threads = 1});
  ASSERT_TRUE(device.ok());
  const Result<std::optional<Device>> next = Internals::Impl(*device).Next();
  ASSERT_TRUE(next.ok());
  EXPECT_FALSE(next->has_value());
}

TEST_F(AutoDevice, IsAGpuWhereOneIsListed) {
  std::string expected = "cpu";
  for (const DeviceInfo& info : ListDevices()) {
    if (info.backend == "cuda" || Device::Open(info.name).ok()) expected = info.backend;
    if (expected == "cuda") break;
  }
  const Result<Device> device = Device::Open("auto", {.threads = 1});
  ASSERT_TRUE(device.ok()) << device.status().message();
  EXPECT_EQ(device->info().backend, expected);
}

class DefaultName : public ::testing::Test {
 protected:
  void SetUp() override { unsetenv(kVariable); }
  void TearDown() override { unsetenv(kVariable); }
  static constexpr const char* kVariable = "METAL_MARLIN_DEVICE";
};

TEST_F(DefaultName, IsTheVariablesElseAuto) {
  EXPECT_EQ(*DefaultDeviceName(), "auto");
  setenv(kVariable, "", 1);
  EXPECT_EQ(*DefaultDeviceName(), "auto");
  for (const char* const name : {"cpu", "cuda", "cuda:3", "metal", "metal-sim", "auto"}) {
    setenv(kVariable, name, 1);
    EXPECT_EQ(*DefaultDeviceName(), name);
  }
}

TEST_F(DefaultName, AnUnknownOneIsAnErrorThatNamesTheVariable) {
  setenv(kVariable, "tpu", 1);
  const Result<std::string> name = DefaultDeviceName();
  EXPECT_EQ(name.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(name.status().message(),
            "METAL_MARLIN_DEVICE: device: unknown name 'tpu'; known: cpu, cuda, cuda:N, metal, "
            "metal-sim, auto");
}

TEST(DescribeDevice, SaysTheThreadsOfACpu) {
  DeviceInfo cpu;
  cpu.name = cpu.backend = "cpu";
  cpu.model = "Model 7";
  cpu.threads = 2;
  EXPECT_EQ(DescribeDevice(cpu), "cpu (Model 7, 2 threads)");
  cpu.threads = 1;
  EXPECT_EQ(DescribeDevice(cpu), "cpu (Model 7, 1 thread)");
  DeviceInfo gpu;
  gpu.name = "cuda:1";
  gpu.backend = "cuda";
  gpu.model = "NVIDIA H200";
  EXPECT_EQ(DescribeDevice(gpu), "cuda:1 (NVIDIA H200)");
}

}  // namespace
}  // namespace marlin::auto_device_test
