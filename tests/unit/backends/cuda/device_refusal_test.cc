// The reasons that users read for devices that cannot be opened.
#include "backends/cuda/plan/device_refusal.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace marlin::cuda::device_refusal_test {
namespace {

constexpr DeviceSupport kAmpere = {"cuda:0", "NVIDIA A100", 80, 80, "8.0, 9.0a"};

TEST(DeviceRefusal, TakesAmpereAndLater) {
  DeviceSupport device = kAmpere;
  for (const auto& [capability, code] :
       {std::pair(80, 80), {86, 80}, {89, 80}, {90, 90}, {100, 90}, {120, 120}}) {
    device.capability = capability;
    device.code = code;
    EXPECT_EQ(RefusalOf(device), "") << capability;
  }
}

TEST(DeviceRefusal, SaysWhatOlderDevicesLack) {
  DeviceSupport device = kAmpere;
  device.model = "Tesla T4";
  device.capability = 75;
  device.code = 0;
  EXPECT_EQ(RefusalOf(device),
            "cuda:0: Tesla T4 has compute capability 7.5; the kernels need 8.0 (Ampere) or later");
}

TEST(DeviceRefusal, SaysWhatTheBuildLacks) {
  DeviceSupport device = kAmpere;
  device.code = 0;
  device.built = "9.0a";
  device.error = "no kernel image is available";
  EXPECT_EQ(RefusalOf(device),
            "cuda:0: NVIDIA A100 has compute capability 8.0; this build has code for 9.0a, none "
            "for this device (no kernel image is available); build with "
            "-DCMAKE_CUDA_ARCHITECTURES=80");
}

TEST(DeviceRefusal, SaysThatTheDriverCannotCompileThePtx) {
  DeviceSupport device = kAmpere;
  device.capability = 120;
  device.code = 0;
  device.built = "PTX of 9.0";
  device.lacks = LacksCode::kNeedsDriver;
  device.error = "the provided PTX was compiled with an unsupported toolchain.";
  EXPECT_NE(RefusalOf(device).find("PTX of 9.0, whose PTX needs a newer driver (the provided"),
            std::string::npos)
      << RefusalOf(device);
}

TEST(DeviceRefusal, SaysWhatADeviceWithCodeLacks) {
  DeviceSupport device = kAmpere;
  device.code = 0;
  for (const LacksCode lacks : {LacksCode::kNeedsMemory, LacksCode::kFails}) {
    device.lacks = lacks;
    device.error = "out of memory";
    EXPECT_EQ(RefusalOf(device), "cuda:0: NVIDIA A100: out of memory");
  }
}

TEST(DeviceRefusal, NamesTheVersionsOfAnOlderDriver) {
  const char* why = "CUDA driver version is insufficient for CUDA runtime version";
  EXPECT_EQ(NoDevice("cuda", why, 12040, 13000),
            std::string("cuda: no CUDA device (") + why +
                "; the driver is for CUDA 12.4, this build for 13.0)");
  EXPECT_EQ(NoDevice("cuda:9", "8 found", 13010, 13000), "cuda:9: no CUDA device (8 found)");
}

TEST(DeviceRefusal, SaysThatThereIsNoDriver) {
  EXPECT_EQ(NoDevice("cuda", "CUDA driver version is insufficient", 0, 12080),
            "cuda: no CUDA device (no driver: libcuda.so.1 does not load)");
}

}  // namespace
}  // namespace marlin::cuda::device_refusal_test
