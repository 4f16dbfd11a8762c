// The toy operation on the CPU and on a device with host memory; a device without decoder
// operations returns an error.
#include "ops/toy_reverse.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plan/step/decoder_backend.h"

namespace marlin::toy_reverse_test {
namespace {

TEST(ToyReverse, RunsWhereTheCpuDoes) {
  for (const std::string name : {"cpu", "metal-sim"}) {
    const auto device = Device::Open(name);
    ASSERT_TRUE(device.ok() || name != "cpu") << device.status().message();
    if (!device.ok()) continue;
    const std::vector<float> x = {1, 2, 3};
    std::vector<float> out(3);
    const Status status =
        ToyReverse(*device, {x.data(), DType::kF32, {3}}, {out.data(), DType::kF32, {3}});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(out, (std::vector<float>{3, 2, 1}));
  }
}

TEST(ToyReverse, HasAName) {
  EXPECT_EQ(DecoderOperationName(DecoderOperation::kToyReverse), "toy reverse");
}

}  // namespace
}  // namespace marlin::toy_reverse_test
