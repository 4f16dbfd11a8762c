// Invalid names of CUDA devices in builds with CUDA, with and without a GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "marlin/device.h"

namespace marlin::open_cuda_test {
namespace {

class OpenCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const Result<Device> device = Device::Open("cuda");
    if (!device.ok() && device.status().message().ends_with("built without CUDA")) {
      GTEST_SKIP() << device.status().message();
    }
  }
};

TEST_F(OpenCudaTest, RefusesWhatIsNoNumber) {
  for (const std::string name : {"cuda:x", "cuda:-1", "cuda:", "cuda:1x", "cuda: 1", "cuda:0x0",
                                 "cuda:99999999999999999999"}) {
    const Result<Device> device = Device::Open(name);
    EXPECT_EQ(device.status().code(), Code::kInvalidArgument) << name;
    EXPECT_NE(device.status().message().find("'" + name + "'"), std::string::npos)
        << device.status().message();
  }
}

TEST_F(OpenCudaTest, SaysWhichDeviceIsNotThere) {
  const Result<Device> device = Device::Open("cuda:99");
  EXPECT_EQ(device.status().code(), Code::kUnsupported);
  EXPECT_TRUE(device.status().message().starts_with("cuda:99: no CUDA device ("))
      << device.status().message();
}

TEST(OpenCuda, LeavesOtherNamesToOthers) {
  for (const std::string name : {"cudax", "CUDA", "cuda0", "cud"}) {
    EXPECT_EQ(Device::Open(name).status().code(), Code::kInvalidArgument) << name;
  }
}

/// Devices that cannot be opened are not listed, but their errors are, and listing has no side
/// effects.
TEST(OpenCuda, ListsWhatCanBeOpened) {
  std::vector<Status> refused;
  for (const DeviceInfo& info : ListDevices(&refused)) {
    EXPECT_TRUE(Device::Open(info.name).ok()) << info.name;
  }
  for (const Status& status : refused) {
    const std::string name = status.message().substr(0, status.message().find(": "));
    EXPECT_EQ(Device::Open(name).status().message(), status.message());
  }
}

}  // namespace
}  // namespace marlin::open_cuda_test
