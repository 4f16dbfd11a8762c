// The driver for Apple GPUs on a stand-in for one: what it asks of Metal, in which order, and what
// becomes of Metal's errors. What kernels compute is compared with the simulator's own device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/metal/driver.h"
#include "fake_gpu.h"
#include "marlin/device.h"
#include "objective_c.h"

namespace marlin::metal {
namespace {

using fake_gpu::TheBehaviour;
using fake_gpu::TheLog;
using testing::HasSubstr;

class AppleDriver : public testing::Test {
 protected:
  void SetUp() override { fake_gpu::Reset(); }
  // Whatever the test did, nothing may be left.
  void TearDown() override { EXPECT_EQ(fake_objc::LivingObjects(), "MTLDevice x 1\n"); }
};

TEST_F(AppleDriver, OpensWithItsSelfTest) {
  const Result<std::unique_ptr<Driver>> driver = OpenAppleDriver();
  ASSERT_TRUE(driver.ok()) << driver.status().message();
  EXPECT_EQ((*driver)->Info().name, "metal");
  EXPECT_EQ((*driver)->Info().model, "Apple M2");
  EXPECT_TRUE((*driver)->Shape().known_fragments);
  EXPECT_EQ((*driver)->Shape().cores, 2);
  EXPECT_FALSE((*driver)->calls_block());
  EXPECT_EQ(TheLog().dispatches, 1);
}

}  // namespace
}  // namespace marlin::metal
