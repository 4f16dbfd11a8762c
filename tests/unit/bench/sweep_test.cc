// Sweeps: the problems are valid and repeatable, the report has every problem.
#include "bench/sweep.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "layout/weights_buffer.h"

namespace marlin::bench::sweep_test {
namespace {

TEST(Sweep, ProblemsAreValidAndVaried) {
  RandomCases cases(1);
  std::set<Format> formats;
  std::set<int64_t> groups;
  std::set<ScaleType> scale_types;
  std::set<DType> activations;
  int few_rows = 0;
  int odd = 0;
  constexpr int kCases = 600;
  for (int i = 0; i < kCases; ++i) {
    const BenchCase bench = cases.Next();
    const Status status = CheckSpec(bench.spec);
    ASSERT_TRUE(status.ok()) << i << ": " << status.message();
    ASSERT_EQ(bench.spec.n, bench.shape.n);
    ASSERT_EQ(bench.spec.k, bench.shape.k);
    ASSERT_TRUE(1 <= bench.shape.m && bench.shape.m <= 512) << bench.shape.m;
    ASSERT_TRUE(16 <= bench.shape.n && bench.shape.n <= 8192) << bench.shape.n;
    ASSERT_TRUE(16 <= bench.shape.k && bench.shape.k <= 8192) << bench.shape.k;
    formats.insert(bench.spec.format);
    groups.insert(bench.spec.group_size);
    scale_types.insert(bench.spec.scale_type);
    activations.insert(bench.activation_type);
    few_rows += static_cast<int>(bench.shape.m <= 8);
    odd += static_cast<int>(bench.shape.n % 16 != 0 || bench.shape.k % 16 != 0);
  }
  EXPECT_EQ(formats.size(), AllFormats().size());
  EXPECT_GT(groups.size(), 5U);
  EXPECT_EQ(scale_types.size(), 5U);
  EXPECT_EQ(activations.size(), 3U);
  // log(9) / log(513) of the problems have up to 8 rows.
  EXPECT_NEAR(few_rows, 0.352 * kCases, 0.08 * kCases);
  EXPECT_GT(odd, kCases / 3);
}

TEST(Sweep, ASeedGivesItsProblems) {
  RandomCases cases(7);
  RandomCases same(7);
  RandomCases other(8);
  int differ = 0;
  for (int i = 0; i < 50; ++i) {
    const BenchCase bench = cases.Next();
    const BenchCase again = same.Next();
    ASSERT_EQ(bench.spec, again.spec);
    ASSERT_EQ(bench.shape.m, again.shape.m);
    ASSERT_EQ(bench.activation_type, again.activation_type);
    differ += static_cast<int>(!(other.Next().spec == bench.spec));
  }
  EXPECT_GT(differ, 40);
}

TEST(Sweep, QuantilesAreOfTheSortedFractions) {
  std::vector<double> fractions;
  for (int i = 100; i >= 0; --i) fractions.push_back(i * 0.01);
  const std::vector<double> expected = {0, 0.1, 0.25, 0.5, 0.75, 0.9, 1};
  const std::vector<double> quantiles = Quantiles(fractions);
  ASSERT_EQ(quantiles.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(quantiles[i], expected[i], 1e-12) << i;
  for (const double value : Quantiles({0.3})) EXPECT_EQ(value, 0.3);
}

TEST(Sweep, ReportsEveryProblemBesideOtherKernels) {
  const Result<Device> device = Device::Open("cpu", {.threads = 1});
  ASSERT_TRUE(device.ok()) << device.status().message();
  MachineCeilings ceilings;
  ceilings.read = 1e10;
  ceilings.fp32 = 1e11;
  ceilings.bf16 = 2e11;
  SweepOptions options;
  options.seed = 3;
  options.count = 2;
  options.others = true;
  std::vector<std::string> names;
  const auto sweep = Sweep::Run(*device, {[] {}, 1.0}, ceilings, options,
                                [&](int64_t done, int64_t total, const std::string& name) {
                                  EXPECT_EQ(done, static_cast<int64_t>(names.size()));
                                  EXPECT_EQ(total, 2);
                                  names.push_back(name);
                                });
  ASSERT_TRUE(sweep.ok()) << sweep.status().message();
  ASSERT_EQ(names.size(), 2U);
  ASSERT_EQ(sweep->rows().size(), 2U);
  for (const SweepRow& row : sweep->rows()) {
    EXPECT_DOUBLE_EQ(row.fraction, RooflineFraction(row.result, ceilings));
    EXPECT_GT(row.fraction, 0);
    // Every processor has the scalar kernel, which no test runs by default.
    EXPECT_FALSE(row.fastest.empty());
    EXPECT_NE(row.fastest, row.result.kernel);
    EXPECT_GT(row.lead, 0);
    EXPECT_NE(sweep->ToText().find(row.fastest), std::string::npos);
  }
  const nlohmann::ordered_json document = sweep->ToJson();
  EXPECT_EQ(document["sweep"]["seed"], 3);
  EXPECT_EQ(document["sweep"]["measured"], 2);
  EXPECT_EQ(document["results"].size(), 2U);
  EXPECT_EQ(document["distribution"][0]["count"], 2);
  EXPECT_EQ(document["results"][0]["fastest_other"]["kernel"], sweep->rows()[0].fastest);
}

TEST(Sweep, SkipsProblemsThatAForcedKernelRefuses) {
  const Result<Device> device = Device::Open("cpu", {.threads = 1});
  ASSERT_TRUE(device.ok()) << device.status().message();
  MachineCeilings ceilings;
  ceilings.read = ceilings.fp32 = 1e10;
  SweepOptions options;
  options.count = 1;
  options.gemm.kernel = "marlin_gemm_w4a8_scalar";  // Needs the accuracy class.
  const auto refused = Sweep::Run(*device, {[] {}, 1.0}, ceilings, options, {});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_EQ(refused.status().message(), "bench sweep: no kernel for any of 1 problems");
}

}  // namespace
}  // namespace marlin::bench::sweep_test
