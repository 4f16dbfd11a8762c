// Costs of devices without measurements.
#include "backends/cuda/plan/device_costs.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <iterator>

#include "backends/cuda/gemm/gemv/gemv_plan.h"
#include "plan_cases.h"

namespace marlin::cuda::device_costs_test {
namespace {

TEST(DeviceCosts, HaveTheBandwidthsOfDataSheets) {
  EXPECT_NEAR(GigabytesOf(3201000, 6144), DeviceRates().gigabytes, 1);  // H200
  EXPECT_NEAR(GigabytesOf(1593000, 5120), 2039, 1);                     // A100 80 GB
  EXPECT_NEAR(GigabytesOf(9751000, 384), 936, 1);                       // RTX 3090
  EXPECT_NEAR(GigabytesOf(14001000, 512), 1792, 1);                     // RTX 5090
  EXPECT_EQ(GigabytesOf(0, 384), 0);
}

TEST(DeviceCosts, AreThoseOfAnH200ForItsRates) {
  const DeviceCosts costs = EstimatedCosts({}, DeviceShape().multiprocessors);
  EXPECT_EQ(costs.gemv.memory_tile, kH200Costs.gemv.memory_tile);
  EXPECT_EQ(costs.wgmma.steps[0].step, kH200Costs.wgmma.steps[0].step);
  EXPECT_EQ(costs.wgmma.cycles_per_microsecond, kH200Costs.wgmma.cycles_per_microsecond);
}

/// Rates that a driver does not tell change nothing.
TEST(DeviceCosts, IgnoreUnknownRates) {
  const DeviceCosts costs = CostsOf("unknown", {0, 0, 0}, 24);
  EXPECT_EQ(costs.gemv.step[0][0], kH200Costs.gemv.step[0][0]);
  EXPECT_EQ(costs.gemv.memory_tile, kH200Costs.gemv.memory_tile);
}

TEST(DeviceCosts, FollowMemoryAndClock) {
  // Half of the bandwidth at the same clock: what memory bounds takes twice as long.
  const DeviceRates slow = {1980, DeviceRates().gigabytes / 2, 0};
  const DeviceCosts costs = EstimatedCosts(slow, DeviceShape().multiprocessors);
  EXPECT_DOUBLE_EQ(costs.gemv.memory_tile, 2 * kH200Costs.gemv.memory_tile);
  EXPECT_DOUBLE_EQ(costs.gemv.round[0], kH200Costs.gemv.round[0]);
  EXPECT_DOUBLE_EQ(costs.wgmma.steps[0].step, 2 * kH200Costs.wgmma.steps[0].step);
  const size_t widest = std::size(kH200Costs.wgmma.steps) - 1;
  EXPECT_DOUBLE_EQ(costs.wgmma.steps[widest].step, kH200Costs.wgmma.steps[widest].step);
  // A device with all rates halved takes twice as long for everything.
  const DeviceRates half = {990, DeviceRates().gigabytes / 2, 0};
  const DeviceShape h200;
  DeviceShape device;
  const DeviceCosts of_half = EstimatedCosts(half, h200.multiprocessors);
  device.costs = &of_half;
  const TileProblem problem = Fp4Problem(4, 8192, 8192);
  const GemvPlan plan = PlanGemv(problem, h200);
  EXPECT_NEAR(GemvMicroseconds(problem, device, plan), 2 * GemvMicroseconds(problem, h200, plan),
              1e-9);
}

TEST(DeviceCosts, NameWhatWasMeasured) {
  EXPECT_EQ(CostsOf("NVIDIA H200", {1, 1, 0}, 1).gemv.tile[0], kH200Costs.gemv.tile[0]);
  EXPECT_EQ(TunedName("NVIDIA H200", 90, 90), "NVIDIA H200");
  EXPECT_EQ(TunedName("NVIDIA GeForce RTX 3090", 86, 80), "NVIDIA GeForce RTX 3090");
  EXPECT_EQ(TunedName("NVIDIA H200", 90, 80), "NVIDIA H200 with code of 8.0");
}

}  // namespace
}  // namespace marlin::cuda::device_costs_test
