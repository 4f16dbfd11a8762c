// The toy operation on the CPU, and on a GPU where there is one.
#include "ops/toy_double.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "marlin/device.h"

namespace marlin::toy_double_test {
namespace {

TEST(ToyDouble, RunsOnEveryDeviceThatHasIt) {
  for (const std::string name : {"cpu", "cuda"}) {
    const auto device = Device::Open(name);
    ASSERT_TRUE(device.ok() || name != "cpu") << device.status().message();
    if (!device.ok()) continue;
    const std::vector<float> x = {1, 2, 3};
    std::vector<float> out(3);
    auto from = DeviceBuffer::Allocate(*device, 12);
    auto to = DeviceBuffer::Allocate(*device, 12);
    ASSERT_TRUE(from.ok() && to.ok());
    ASSERT_TRUE(from->CopyFrom(x.data(), 12).ok());
    const Status status =
        ToyDouble(*device, {from->data(), DType::kF32, {3}}, {to->data(), DType::kF32, {3}});
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(to->CopyTo(out.data(), 12).ok());
    EXPECT_EQ(out, (std::vector<float>{2, 4, 6})) << name;
  }
}

}  // namespace
}  // namespace marlin::toy_double_test
