// The tiling of GEMMs into threadgroups, and kernel selection.
#include "backends/metal/plan/launch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "backends/metal/plan/kernel_table.h"
#include "plan/gemm/select.h"

namespace marlin::metal::launch_plan_test {
namespace {

GemmDesc Draw(std::mt19937& bits, int i) {
  const auto draw = [&](int most) {
    return int64_t{1} + static_cast<int>(bits() % unsigned(most));
  };
  GemmDesc desc;
  desc.m = draw(i % 3 == 0 ? 20 : (i % 3 == 1 ? 200 : 20000));
  desc.n = draw(i % 2 == 0 ? 300 : 100000);
  if (i % 21 == 0) desc.n = (desc.n + 15) / 16 * 16;  // Whole strips, so that GLU can pair.
  desc.k = i % 50 == 0 ? 0 : draw(i % 5 == 0 ? 100 : 40000);
  desc.format = i % 2 == 0 ? Format::kFp4E2M1 : (i % 4 == 1 ? Format::kU4 : Format::kNf3);
  desc.a_type = i % 3 == 0 ? DType::kF32 : (i % 3 == 1 ? DType::kBf16 : DType::kF16);
  desc.gated = i % 7 == 0;
  if (i % 11 == 0) desc.determinism = Determinism::kBatchInvariant;
  return desc;
}

const KernelDesc& Find(const std::string& name) {
  const auto kernels = MetalKernels();
  return *std::find_if(kernels.begin(), kernels.end(),
                       [&](const KernelDesc& kernel) { return kernel.name == name; });
}

Result<KernelChoice> Select(const GemmDesc& desc, bool known_fragments, const char* forced = "") {
  const DeviceProperties device = PropertiesOf({.known_fragments = known_fragments});
  const auto cost = [](const KernelDesc& kernel, const GemmDesc& problem) {
    return CostOf(kernel, problem);
  };
  const auto never = [](const KernelDesc&, const GemmDesc&, const KernelVariant&) { return false; };
  return SelectKernel(desc, {device, MetalKernels(), cost, never}, forced);
}

/// Splits consist of whole steps, cover k, and are not empty unless k is 0.
void CheckSplits(const LaunchPlan& plan, const GemmDesc& desc, int64_t steps) {
  ASSERT_GE(plan.splits, 1);
  ASSERT_LE(plan.splits, 16);
  ASSERT_GE(int64_t{plan.splits} * plan.steps_of_split, steps);
  ASSERT_LT(int64_t{plan.splits - 1} * plan.steps_of_split, std::max<int64_t>(steps, 1));
  const bool paired = plan.source != "gemm_staged.metal" && desc.n % 16 == 0;
  ASSERT_EQ(plan.partial, plan.splits > 1 || (desc.gated && !paired));
}

TEST(PlanLaunch, CoversEverythingOnce) {
  std::mt19937 bits(5);
  for (int i = 0; i < 20000; ++i) {
    const GemmDesc desc = Draw(bits, i);
    const DeviceShape device = {1 + static_cast<int>(bits() % 80), true};
    const int64_t chunks = (desc.k + 127) / 128;
    for (const KernelDesc& kernel : MetalKernels()) {
      if (!kernel.supports(desc, DeviceProperties()).ok()) continue;
      const LaunchPlan plan = PlanLaunch(kernel, desc, device);
      const auto [x, y, z] = plan.threadgroups;
      SCOPED_TRACE(std::string(kernel.name) + " " + desc.ToString());
      ASSERT_LE(plan.threads, 1024U);
      if (plan.source == "gemv.metal") {
        const bool paired = desc.gated && desc.n % 16 == 0;
        const int64_t strips = (desc.n + 7) / 8;
        const bool two = plan.function.ends_with("x2");
        ASSERT_EQ(two, strips >= (paired ? 1024 : 512) && desc.m <= 4);
        ASSERT_EQ(x, paired || two ? (strips + 1) / 2 : strips);
        const int64_t simdgroups = plan.threads / 32;
        const int64_t halves = paired && !two ? 2 : 1;
        ASSERT_LE(simdgroups, halves * std::max<int64_t>(chunks, 1));
        ASSERT_EQ(plan.partial, desc.gated && !paired);
        const int64_t rows =
            std::stoi(std::string(plan.function.substr(plan.function.rfind('_') + 1)));
        ASSERT_EQ(plan.rows, rows);
        ASSERT_TRUE(rows * y >= desc.m && rows * (y - 1) < desc.m);
        ASSERT_EQ(plan.splits, 1);
      } else if (plan.source == "gemm_direct.metal") {
        const int64_t rows =
            std::stoi(std::string(plan.function.substr(plan.function.rfind('_') + 1)));
        ASSERT_EQ(x, (desc.n + 63) / 64);
        ASSERT_EQ(y, (desc.m + rows - 1) / rows);
        ASSERT_EQ(z, plan.splits);
        CheckSplits(plan, desc, chunks);
      } else {
        const int64_t tiles = (desc.m + 63) / 64 * ((desc.n + 63) / 64);
        CheckSplits(plan, desc, chunks * 4);
        ASSERT_EQ(plan.steps_of_split % 4, 0);
        ASSERT_EQ(plan.units, tiles * plan.splits);
        ASSERT_GE(int64_t{x} * plan.units_of_group, plan.units);
        ASSERT_LT((int64_t{x} - 1) * plan.units_of_group, plan.units);
      }
    }
  }
}

// Batch invariance: the order of a row's additions depends only on the weights.
TEST(PlanLaunch, FewRowsAreCutAlikeForEveryM) {
  for (const int64_t n : {1, 100, 4095, 4096, 73448}) {
    GemmDesc desc;
    desc.n = n;
    desc.k = 4096;
    desc.m = 1;
    const LaunchPlan one = PlanLaunch(Find("marlin_gemv"), desc, {});
    for (desc.m = 2; desc.m <= 40; ++desc.m) {
      EXPECT_EQ(PlanLaunch(Find("marlin_gemv_wide"), desc, {}).threads, one.threads);
    }
    // Down projections of few chunks leave no simdgroup idle.
    desc.k = 768;
    desc.m = 1;
    const LaunchPlan down = PlanLaunch(Find("marlin_gemv"), desc, {});
    EXPECT_EQ(down.threads, n < 4089 ? 6U * 32 : 4U * 32);
    desc.k = 4096;
  }
}

TEST(Selection, IsTotal) {
  std::mt19937 bits(7);
  for (int i = 0; i < 5000; ++i) {
    GemmDesc desc = Draw(bits, i);
    for (const FormatInfo& format : AllFormats()) {
      desc.format = format.format;
      for (const bool known : {true, false}) {
        const Result<KernelChoice> choice = Select(desc, known);
        ASSERT_TRUE(choice.ok()) << choice.status().message();
        ASSERT_EQ(choice->kernel->chosen, Chosen::kByCost);
      }
    }
  }
}

TEST(Selection, TakesTheKernelForTheRows) {
  GemmDesc desc;
  desc.n = desc.k = 4096;
  const auto name = [&](int64_t m, Format format, bool known = true) {
    desc.m = m;
    desc.format = format;
    return std::string(Select(desc, known)->kernel->name);
  };
  EXPECT_EQ(name(1, Format::kNf4), "marlin_gemv");
  EXPECT_EQ(name(2, Format::kNf4), "marlin_gemv_wide");
  EXPECT_EQ(name(16, Format::kNf4), "marlin_gemv_wide");
  EXPECT_EQ(name(17, Format::kNf4), "marlin_gemm_split_k");
  EXPECT_EQ(name(64, Format::kNf4), "marlin_gemm_split_k");
  EXPECT_EQ(name(65, Format::kNf4), "marlin_gemm_fused");
  EXPECT_EQ(name(65, Format::kFp4E2M1), "marlin_gemm_fused_fp4");
  EXPECT_EQ(name(65, Format::kS4), "marlin_gemm_fused_u4");
  // With an unknown fragment layout, no kernel that depends on it is selected.
  EXPECT_EQ(name(17, Format::kNf4, false), "marlin_gemm_staged");
  EXPECT_EQ(name(65, Format::kFp4E2M1, false), "marlin_gemm_staged");
  desc.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(name(300, Format::kU4), "marlin_gemv_wide");
  EXPECT_EQ(name(1, Format::kU4), "marlin_gemv");
}

// Fast math may order sums differently for each m.
TEST(Selection, FastMathPromisesNoBatchInvariance) {
  GemmDesc desc;
  desc.n = desc.k = 256;
  const DeviceProperties device = PropertiesOf({.fast_math = true});
  for (desc.m = 1; desc.m <= 130; ++desc.m) {
    for (const KernelDesc& kernel : MetalKernels()) {
      desc.determinism = Determinism::kBatchInvariant;
      EXPECT_FALSE(CheckSupport(kernel, desc, device).ok()) << kernel.name << ", m " << desc.m;
    }
  }
  desc.determinism = Determinism::kDefault;
  desc.m = 1;
  EXPECT_TRUE(CheckSupport(Find("marlin_gemv"), desc, device).ok());
}

TEST(Selection, SaysWhyNot) {
  GemmDesc desc;
  desc.m = 20;
  desc.n = desc.k = 256;
  const auto reason = [&](const char* kernel) {
    return Select(desc, true, kernel).status().message();
  };
  EXPECT_NE(reason("marlin_gemv").find("takes one row"), std::string::npos);
  EXPECT_NE(reason("marlin_gemm_fused_u4").find("takes u4 and s4 alone"), std::string::npos);
  desc.accuracy = Accuracy::kW4A8;
  EXPECT_NE(reason("marlin_gemm_fp4").find("does not quantize"), std::string::npos);
  desc.accuracy = Accuracy::kDefault;
  desc.n = (int64_t{1} << 30) + 1;
  EXPECT_NE(reason("marlin_gemm_staged").find("2^30"), std::string::npos);
}

}  // namespace
}  // namespace marlin::metal::launch_plan_test
