// Benchmarks of devices whose memory is the host's and that have no roofline of ours.
#include <gtest/gtest.h>

#include "cli/bench_gemm.h"
#include "cli/timed_device.h"
#include "cli/tuning_run.h"

namespace marlin::cli {
namespace {

TEST(BenchSharedMemory, TimesProductsAndCandidatesWithoutARoofline) {
  // The simulator stands for a Mac's GPU; its times mean nothing.
  const Result<Device> device = Device::Open("metal-sim");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  BenchCase bench;
  bench.shape = {3, 64, 128};
  bench.spec.k = 128;
  bench.spec.n = 64;
  bench.spec.experts = 2;
  bench.spec.group_size = 64;
  const auto weights = RandomWeights(bench.spec);
  ASSERT_TRUE(weights.ok());
  const auto prepared = Prepare(*weights, *device);
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  const auto result = RunBench(*device, *prepared, bench, nullptr, nullptr);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->kernel, "marlin_gemv_wide");
  EXPECT_GT(result->timing.median, 0);
  EXPECT_EQ(result->probe.median, 0);

  const auto timings = TimeCandidates(*device, *prepared, bench);
  ASSERT_TRUE(timings.ok()) << timings.status().message();
  EXPECT_GT(timings->size(), 3U);
  ASSERT_NE(FastestOf(*timings), nullptr);
}

TEST(BenchSharedMemory, ASimulatorIsNotMeasured) {
  EXPECT_EQ(OpenTimedDevice("metal-sim", {}).status().code(), Code::kUnsupported);
  const Result<Device> cpu = OpenTimedDevice("cpu", {});
  ASSERT_TRUE(cpu.ok());
  EXPECT_EQ(CallsOfRun(*cpu), 1);
}

TEST(PerCall, SharesTheTime) {
  const Timing timing = PerCall({.median = 8, .p10 = 4, .p90 = 16, .repetitions = 3}, 4);
  EXPECT_EQ(timing.median, 2);
  EXPECT_EQ(timing.p10, 1);
  EXPECT_EQ(timing.p90, 4);
  EXPECT_EQ(timing.repetitions, 3);
}

}  // namespace
}  // namespace marlin::cli
