// The measurements of GPUs, on the CPU: launches that run at once stand in for graphs.
#include "bench/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/macros.h"
#include "bench/gpu_report.h"

namespace marlin::bench::gpu_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// A timer whose replays run the launches again and report the given times.
class FakeTimer final : public cuda::GraphTimer {
 public:
  class Launches final : public cuda::CapturedLaunches {
   public:
    Launches(FakeTimer& timer, size_t index, int count, cuda::TimedLaunch launch)
        : timer_(timer), index_(index), count_(count), launch_(std::move(launch)) {}
    Result<double> Replay() override {
      timer_.replays.push_back(index_);
      for (int i = 0; i < count_; ++i) MARLIN_RETURN_IF_ERROR(launch_(i, &timer_));
      return timer_.seconds.empty() ? 1e-3 : timer_.seconds[index_ % timer_.seconds.size()];
    }

   private:
    FakeTimer& timer_;
    size_t index_;
    int count_;
    cuda::TimedLaunch launch_;
  };

  Result<std::unique_ptr<cuda::CapturedLaunches>> Capture(
      int count, const cuda::TimedLaunch& launch) override {
    MARLIN_RETURN_IF_ERROR(launch(0, this));
    counts.push_back(count);
    return std::unique_ptr<cuda::CapturedLaunches>(
        std::make_unique<Launches>(*this, counts.size() - 1, count, launch));
  }

  Status LaunchProbe(cuda::Probe probe, const void* data, int64_t bytes, void* stream) override {
    EXPECT_EQ(stream, this);
    EXPECT_EQ(data == nullptr, probe == cuda::Probe::kEmpty);
    EXPECT_EQ(bytes == 0, probe == cuda::Probe::kEmpty);
    return Status();
  }

  std::vector<int> counts;      ///< Launches of each capture.
  std::vector<size_t> replays;  ///< Captures, in the order of their replays.
  std::vector<double> seconds;  ///< Seconds per launch of each capture; empty: 1 ms.
};

struct BaselineCalls {
  std::set<const void*> weights;
  int64_t count = 0;
};

DenseBaseline CountingBaseline(BaselineCalls& calls) {
  return {"baseline", [&calls](const DenseProduct& product, void*) {
            calls.weights.insert(product.b);
            ++calls.count;
            return Status();
          }};
}

BenchCase SmallCase(int64_t m, int64_t copies) {
  BenchCase bench;
  bench.shape = {m, 256, 128};
  bench.spec.k = 128;
  bench.spec.n = 256;
  bench.spec.group_size = 64;
  bench.spec.experts = copies;
  return bench;
}

class BenchGpu : public ::testing::Test {
 protected:
  Result<GpuBenchResult> Run(GpuBench& gpu, const BenchCase& bench, bool compare = true) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, RandomWeights(bench.spec));
    MARLIN_ASSIGN_OR_RETURN(const PreparedWeights prepared, Prepare(weights, device_));
    return gpu.Run(prepared, bench, compare);
  }

  Device device_ = *Device::Open("cpu");
  FakeTimer timer_;
  BaselineCalls calls_;
  DenseBaseline baseline_ = CountingBaseline(calls_);
};

TEST_F(BenchGpu, CeilingsAreBytesAndOperationsOverTime) {
  GpuBench gpu(device_, timer_, &baseline_);
  timer_.seconds = {1e-6, 2e-6, 3e-7, 1e-3};
  const auto ceilings = gpu.MeasureCeilings(1 << 20, 64);
  ASSERT_TRUE(ceilings.ok()) << ceilings.status().message();
  EXPECT_DOUBLE_EQ(ceilings->read_bulk, (1 << 20) / 1e-6);
  EXPECT_DOUBLE_EQ(ceilings->read_loads, (1 << 20) / 2e-6);
  EXPECT_DOUBLE_EQ(ceilings->empty, 3e-7);
  EXPECT_DOUBLE_EQ(ceilings->tensor, 2.0 * 64 * 64 * 64 / 1e-3);
}

TEST_F(BenchGpu, WithoutABaselineFloorsAreMemorys) {
  GpuBench gpu(device_, timer_, nullptr);
  const auto ceilings = gpu.MeasureCeilings(1 << 20, 64);
  ASSERT_TRUE(ceilings.ok());
  EXPECT_EQ(ceilings->tensor, 0);
  const GpuCeilings made_up{4e12, 3e12, 1e-6, 0};
  EXPECT_DOUBLE_EQ(made_up.FloorSeconds(8e6, 1e18), 1.9e-6 + 2e-6);
}

TEST(GpuCeilingsTest, TheLargerFloorCounts) {
  const GpuCeilings ceilings{4e12, 3e12, 1e-6, 7e14};
  EXPECT_DOUBLE_EQ(ceilings.FloorSeconds(8e6, 0), 1.9e-6 + 2e-6);
  EXPECT_DOUBLE_EQ(ceilings.FloorSeconds(8e6, 7e12), 1e-2);
}

TEST_F(BenchGpu, TakesTurnsAndRotates) {
  GpuBench gpu(device_, timer_, &baseline_);
  ASSERT_TRUE(gpu.MeasureCeilings(1 << 20, 64).ok());
  timer_ = FakeTimer();
  calls_ = BaselineCalls();
  timer_.seconds = {4e-6, 2e-6, 1e-6};  // Baseline, alone, in a chain.
  const auto result = Run(gpu, SmallCase(3, 5));
  ASSERT_TRUE(result.ok()) << result.status().message();
  ASSERT_EQ(result->kernels.size(), 1U);
  ASSERT_EQ(result->baselines.size(), 1U);
  const KernelTiming& timing = result->kernels.front();
  EXPECT_TRUE(timing.planned);
  EXPECT_DOUBLE_EQ(result->baselines.front().timing.median, 4e-6);
  EXPECT_DOUBLE_EQ(timing.alone.median, 2e-6);
  ASSERT_TRUE(timing.chain.has_value());
  EXPECT_DOUBLE_EQ(timing.chain->median, 1e-6);
  EXPECT_GE(timing.alone.repetitions, 11);
  // Every copy equally often, and the baseline's weights beyond the cache.
  ASSERT_EQ(timer_.counts.size(), 3U);
  EXPECT_EQ(timer_.counts[1] % 5, 0);
  EXPECT_EQ(timer_.counts[1], timer_.counts[2]);
  EXPECT_EQ(static_cast<int64_t>(calls_.weights.size()), (kBeyondL2Bytes + 65535) / 65536);
  for (size_t i = 0; i < timer_.replays.size(); ++i) EXPECT_EQ(timer_.replays[i], i % 3);
}

TEST_F(BenchGpu, SlowProductsRunFewerRounds) {
  GpuBench gpu(device_, timer_, nullptr);
  ASSERT_TRUE(gpu.MeasureCeilings(1 << 20, 64).ok());
  timer_.seconds = {10.0};
  const auto result = Run(gpu, SmallCase(1, 2));
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->kernels.front().alone.repetitions, 5);
}

TEST_F(BenchGpu, AllKernelsAreThoseThatSupportTheProblem) {
  GpuBench gpu(device_, timer_, &baseline_);
  ASSERT_TRUE(gpu.MeasureCeilings(1 << 20, 64).ok());
  BenchCase bench = SmallCase(1, 2);
  bench.options.kernel = "all";
  const auto result = Run(gpu, bench, false);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_TRUE(result->baselines.empty());
  // Those of W4A8 need that accuracy, and some leave one row to others.
  const std::vector<KernelInfo> known = device_.info().kernels;
  const auto others = std::count_if(known.begin(), known.end(), [](const KernelInfo& kernel) {
    return kernel.available && !kernel.only_by_name &&
           kernel.name.find("w4a8") == std::string::npos;
  });
  EXPECT_LE(result->kernels.size(), static_cast<size_t>(others));
  EXPECT_TRUE(std::any_of(result->kernels.begin(), result->kernels.end(), [](const auto& timing) {
    return timing.kernel == "marlin_gemm_scalar";
  }));
  int planned = 0;
  for (const KernelTiming& timing : result->kernels) planned += timing.planned ? 1 : 0;
  EXPECT_EQ(planned, 1);
  bench.options.kernel = "marlin_gemm_absent";
  const auto refused = Run(gpu, bench, false);
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("marlin_gemm_absent"));
}

TEST_F(BenchGpu, DequantizeHasNoChain) {
  GpuBench gpu(device_, timer_, &baseline_);
  ASSERT_TRUE(gpu.MeasureCeilings(1 << 20, 64).ok());
  BenchCase bench = SmallCase(1, 2);
  bench.op = "dequantize";
  const auto result = Run(gpu, bench);
  ASSERT_TRUE(result.ok()) << result.status().message();
  ASSERT_EQ(result->kernels.size(), 1U);
  EXPECT_FALSE(result->kernels.front().chain.has_value());
  EXPECT_TRUE(result->baselines.empty());
}

KernelTiming Made(const char* kernel, const char* accuracy, double alone, double chain) {
  KernelTiming timing;
  timing.kernel = kernel;
  timing.accuracy = accuracy;
  timing.alone.median = alone;
  timing.chain.emplace().median = chain;
  return timing;
}

TEST(GpuBenchResultTest, WarnsOfFasterKernelsThatRoundNoMore) {
  GpuBenchResult result;
  result.kernels = {Made("planned", "exact", 1e-5, 9e-6), Made("as_fast", "exact", 9.8e-6, 8.8e-6),
                    Made("faster", "exact", 9e-6, 9e-6),
                    Made("rounds_more", "bf16_compute", 1e-6, 1e-6)};
  result.kernels.front().planned = true;
  const std::vector<std::string> warnings = result.Warnings();
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings.front(), HasSubstr("faster takes 9.00 us alone, the planned planned 10.00"));
}

TEST(GpuReport, RowsHoldTimesFloorsAndBaselines) {
  GpuBenchResult result;
  result.bench = SmallCase(4, 2);
  result.kernels = {Made("marlin_x", "exact", 1e-5, 8e-6)};
  result.kernels.front().planned = true;
  result.floor_seconds = 6e-6;
  result.weight_bytes = 2e7;
  BaselineTiming baseline{"cublas_bf16", {}};
  baseline.timing.median = 2e-5;
  result.baselines = {baseline};
  const GpuCeilings ceilings{4e12, 3e12, 1e-6, 7e14};
  const auto document = GpuDocument(ceilings, "13.1.0", std::span(&result, 1));
  EXPECT_DOUBLE_EQ(document["roofline"]["read_bulk_gbps"].get<double>(), 4e3);
  EXPECT_DOUBLE_EQ(document["roofline"]["bf16_tensor_tflops"].get<double>(), 700);
  const auto& row = document["results"][0];
  EXPECT_EQ(row["m"], 4);
  EXPECT_DOUBLE_EQ(row["floor_fraction"].get<double>(), 0.6);
  EXPECT_DOUBLE_EQ(row["chain"]["floor_fraction"].get<double>(), 0.75);
  EXPECT_DOUBLE_EQ(row["peers"][0]["speedup"].get<double>(), 2);
  EXPECT_DOUBLE_EQ(row["peers"][0]["chain_speedup"].get<double>(), 2.5);
  EXPECT_EQ(document["roofline"]["cublas_version"], "13.1.0");
  const std::string text = GpuText(std::span(&result, 1));
  for (const char* part :
       {"marlin_x: fp4_e2m1 m = 4", "10.00", "8.00 (75 %)", "60 %", "20.00 (2.00x, 2.50x)"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(text, Not(HasSubstr("all kernels")));
}

TEST(GpuReport, SeveralKernelsAreListedBelowThePlannedOnes) {
  GpuBenchResult result;
  result.bench = SmallCase(4, 2);
  result.kernels = {Made("first", "exact", 2e-5, 2e-5), Made("planned", "exact", 1e-5, 8e-6)};
  result.kernels.back().planned = true;
  const std::string text = GpuText(std::span(&result, 1));
  EXPECT_THAT(text, HasSubstr("planned: fp4_e2m1 m = 4"));
  EXPECT_THAT(text, HasSubstr("all kernels (*: the planned one)"));
  EXPECT_THAT(text, HasSubstr("planned *"));
}

}  // namespace
}  // namespace marlin::bench::gpu_test
