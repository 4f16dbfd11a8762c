// The roofline kernels in the simulator: they read all bytes and do all multiplies that they claim.
#include "backends/metal/runtime/gpu_roofline.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <span>

#include "backends/metal/runtime/simulated_driver.h"

namespace marlin::metal::gpu_roofline_test {
namespace {

class GpuRooflineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Driver>> driver = OpenSimulatedDriver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    driver_ = *std::move(driver);
  }
  std::unique_ptr<Driver> driver_;
};

TEST_F(GpuRooflineTest, ReadsEveryWordOnce) {
  auto roofline = GpuRoofline::Make(*driver_, 600'000, 1);
  ASSERT_TRUE(roofline.ok()) << roofline.status().message();
  EXPECT_EQ(roofline->read_bytes(), 2 * 256 * 1024);  // Whole threadgroups.
  const auto seconds = roofline->ReadSeconds();
  ASSERT_TRUE(seconds.ok()) << seconds.status().message();
  EXPECT_GT(*seconds, 0);
  const std::span sums(roofline->read_sums(), static_cast<size_t>(roofline->read_threads()));
  const auto words = static_cast<uint64_t>(roofline->read_bytes() / 4);
  const auto all = static_cast<uint32_t>(words * (words - 1) / 2);
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), 0U), all);
}

TEST_F(GpuRooflineTest, MultipliesEveryMatrix) {
  constexpr int kSteps = 5;
  auto roofline = GpuRoofline::Make(*driver_, 0, kSteps);
  ASSERT_TRUE(roofline.ok()) << roofline.status().message();
  const auto flops = roofline->MatrixFlops();
  ASSERT_TRUE(flops.ok()) << flops.status().message();
  EXPECT_GT(*flops, 0);
  // Two elements per fragment; fragment i starts from i, and a step adds 8 x (1 x -1).
  constexpr int kBegin = 2 * (0 + 1 + 2 + 3 + 4 + 5 + 6 + 7);
  constexpr int kAdded = 2 * kernels::kRooflineSums * kSteps * 8 * -1;
  for (int64_t i = 0; i < roofline->matrix_threads(); ++i) {
    ASSERT_EQ(roofline->matrix_sums()[i], static_cast<float>(kBegin + kAdded)) << i;
  }
}

TEST_F(GpuRooflineTest, TimesCallsAndTellsErrors) {
  auto roofline = GpuRoofline::Make(*driver_, 0, 1);
  ASSERT_TRUE(roofline.ok()) << roofline.status().message();
  const auto seconds = roofline->CallSeconds();
  ASSERT_TRUE(seconds.ok()) << seconds.status().message();
  EXPECT_EQ(roofline->read_sums()[0], 0U);
  EXPECT_EQ(GpuRoofline::Make(*driver_, int64_t{1} << 60).status().code(), Code::kOutOfMemory);
}

}  // namespace
}  // namespace marlin::metal::gpu_roofline_test
