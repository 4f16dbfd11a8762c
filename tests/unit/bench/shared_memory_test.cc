// Benchmarks of GPUs with unified memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../../source_directory.h"
#include "backends/metal/metal_backend.h"
#include "bench/gemm.h"
#include "bench/model.h"
#include "bench/timed_device.h"
#include "bench/tuning_run.h"

namespace marlin::bench::shared_memory_test {
namespace {

TEST(BenchSharedMemory, TimesProductsAndCandidates) {
  // The simulator replaces a Mac's GPU; its times are meaningless.
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
  metal::Driver& driver = metal::DriverOf(Internals::Impl(*device).backend());
  auto roofline = metal::GpuRoofline::Make(driver, 0, 2);
  ASSERT_TRUE(roofline.ok()) << roofline.status().message();
  const auto result = RunBench(*device, *prepared, bench, ProbeOf(*roofline), nullptr);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->kernel, "marlin_gemv_wide");
  EXPECT_GT(result->timing.median, 0);
  EXPECT_GT(result->probe_rate, 0);

  const auto timings = TimeCandidates(*device, *prepared, bench);
  ASSERT_TRUE(timings.ok()) << timings.status().message();
  EXPECT_GT(timings->size(), 3U);
  ASSERT_NE(FastestOf(*timings), nullptr);
}

TEST(BenchSharedMemory, CeilingsOfAGpu) {
  const Result<Device> device = Device::Open("metal-sim");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  auto roofline =
      metal::GpuRoofline::Make(metal::DriverOf(Internals::Impl(*device).backend()), 0, 2);
  ASSERT_TRUE(roofline.ok()) << roofline.status().message();
  const auto ceilings = MeasureCeilings(*roofline);
  ASSERT_TRUE(ceilings.ok()) << ceilings.status().message();
  EXPECT_GT(ceilings->read, 0);
  EXPECT_GT(ceilings->fp32, 0);
  EXPECT_EQ(ceilings->bf16, 0);
  ASSERT_EQ(ceilings->figures.size(), 3U);
  EXPECT_DOUBLE_EQ(ceilings->figures[0].second, ceilings->read * 1e-9);
  EXPECT_THAT(ceilings->text, ::testing::HasSubstr("fp32 matrices"));
}

TEST(BenchSharedMemory, TimesModels) {
  const Result<Device> device = Device::Open("metal-sim");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  const auto model = Model::Open(SourceDirectory() + "/examples/tiny-qwen3-moe", *device);
  ASSERT_TRUE(model.ok()) << model.status().message();
  const auto phases = BenchModel(*model, {.prompt_tokens = 1, .new_tokens = {1}, .batch = 1});
  ASSERT_TRUE(phases.ok()) << phases.status().message();
  ASSERT_EQ(phases->size(), 2U);
  for (const ModelPhase& phase : *phases) {
    EXPECT_GT(phase.timing.median, 0) << phase.name;
    EXPECT_GT(phase.products.median, 0) << phase.name;
  }
  const auto prefill = BenchModel(*model, {.prompt_tokens = 1, .new_tokens = {0}});
  ASSERT_TRUE(prefill.ok()) << prefill.status().message();
  ASSERT_EQ(prefill->size(), 1U);
  EXPECT_EQ(prefill->front().Test(), "pp1");
  const auto nothing = BenchModel(*model, {.prompt_tokens = 0, .new_tokens = {0}});
  EXPECT_EQ(nothing.status().code(), Code::kInvalidArgument);
}

TEST(BenchSharedMemory, ASimulatorIsNotMeasured) {
  EXPECT_EQ(CheckTimed("metal-sim").code(), Code::kUnsupported);
  EXPECT_TRUE(CheckTimed("cpu").ok());
  const Result<Device> cpu = Device::Open("cpu");
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
}  // namespace marlin::bench::shared_memory_test
