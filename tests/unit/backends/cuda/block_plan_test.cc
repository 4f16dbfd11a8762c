// Plans of the 64 x 64 kernels: output tiles, slices of k and their assignment to CTAs.
#include "backends/cuda/gemm/block/block_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/plan/kernel_table.h"
#include "plan/gemm/select.h"

namespace marlin::cuda::block_plan_test {
namespace {

constexpr BlockKernel kKernels[] = {BlockKernel::kDoubleBuffered, BlockKernel::kSingleStage,
                                    BlockKernel::kStriped, BlockKernel::kFused,
                                    BlockKernel::kMarlinW4};

/// Every k-iteration of every tile belongs to one unit, and every unit to one CTA.
void CheckPlan(const BlockPlan& plan, const TileProblem& problem, int step) {
  const int64_t tiles = int64_t{(problem.m + 63) / 64} * ((problem.n + 63) / 64);
  ASSERT_EQ(plan.token_tiles, (problem.m + 63) / 64);
  ASSERT_EQ(plan.units, tiles * plan.parallel);
  ASSERT_GE(plan.grid * plan.units_of_block, plan.units);
  ASSERT_LT((plan.grid - 1) * plan.units_of_block, plan.units);
  ASSERT_GE(int64_t{plan.steps} * step, problem.k);
  ASSERT_LT(int64_t{plan.steps - 1} * step, problem.k);
  ASSERT_GE(int64_t{plan.parallel} * plan.steps_of_slice, plan.steps);
  // No slice is empty unless k is 0.
  ASSERT_LT((plan.parallel - 1) * plan.steps_of_slice, std::max(plan.steps, 1));
  ASSERT_EQ(plan.partials, plan.parallel > 1 || problem.gated);
}

TEST(PlanBlocks, CoversEverythingOnce) {
  std::mt19937 bits(3);
  const auto draw = [&](int most) { return 1 + static_cast<int>(bits() % unsigned(most)); };
  for (int i = 0; i < 20000; ++i) {
    TileProblem problem;
    problem.m = draw(i % 2 == 0 ? 200 : 20000);
    problem.n = draw(i % 3 == 0 ? 300 : 100000);
    problem.k = i % 50 == 0 ? 0 : draw(i % 5 == 0 ? 100 : 40000);
    problem.gated = i % 4 == 0;
    problem.batch_invariant = i % 7 == 0;
    DeviceShape device;
    device.multiprocessors = i % 2 == 0 ? 132 : draw(150);
    for (const BlockKernel kernel : kKernels) {
      const bool fused = kernel == BlockKernel::kFused || kernel == BlockKernel::kMarlinW4;
      const BlockPlan plan = PlanBlocks(kernel, problem, device);
      CheckPlan(plan, problem, fused ? kFusedStep : kStagedStep);
      if (HasFatalFailure()) {
        FAIL() << "m " << problem.m << ", n " << problem.n << ", k " << problem.k;
      }
      if (kernel != BlockKernel::kStriped || problem.batch_invariant) {
        ASSERT_EQ(plan.parallel, 1);
      }
    }
  }
}

TEST(PlanBlocks, SlicesWhereTilesAreFew) {
  const TileProblem few = {.m = 16, .n = 4096, .k = 4096};
  const BlockPlan plan = PlanBlocks(BlockKernel::kStriped, few, DeviceShape());
  EXPECT_GT(plan.parallel, 1);
  const TileProblem many = {.m = 4096, .n = 8192, .k = 8192};
  EXPECT_EQ(PlanBlocks(BlockKernel::kStriped, many, DeviceShape()).parallel, 1);
}

// A run of several slices of a tile leaves partial sums that must be zeroed. The conformance cases
// have this shape.
TEST(PlanBlocks, GivesBlocksSeveralSlices) {
  const TileProblem problem = {.m = 2049, .n = 1040, .k = 8208};
  const BlockPlan plan = PlanBlocks(BlockKernel::kStriped, problem, DeviceShape());
  EXPECT_GT(plan.parallel, 1);
  EXPECT_GT(plan.units_of_block, 1);
  EXPECT_NE(plan.units_of_block % plan.parallel, 0);
}

TEST(PlanBlocks, KeepsPartialSumsFew) {
  for (const int m : {1, 100, 1000, 5000}) {
    for (const int n : {64, 1000, 30000}) {
      const TileProblem problem = {.m = m, .n = n, .k = 65536};
      const BlockPlan plan = PlanBlocks(BlockKernel::kStriped, problem, DeviceShape());
      if (plan.parallel == 1) continue;
      EXPECT_LE(PartialBytes(problem, plan.parallel), int64_t{34} << 20) << m << " x " << n;
    }
  }
}

GemmDesc Problem(Format format) {
  GemmDesc desc;
  desc.m = 16;
  desc.n = desc.k = 256;
  desc.group_size = 128;
  desc.format = format;
  desc.a_type = DType::kBf16;
  desc.weights.tiled = desc.weights.fits_f16 = true;
  return desc;
}

std::string Chosen(const GemmDesc& desc, const std::string& forced) {
  const auto never = [](const KernelDesc&, const GemmDesc&, const KernelVariant&) { return false; };
  const auto cost = [](const KernelDesc& kernel, const GemmDesc& problem) {
    return FamilyOf(kernel).microseconds(problem, {});
  };
  const Candidates candidates = {{.level = Isa::kCuda}, CudaKernels(), cost, never};
  const auto choice = SelectKernel(desc, candidates, forced);
  return choice.ok() ? choice->kernel->name : choice.status().message();
}

TEST(BlockKernels, RunByNameAlone) {
  for (const KernelDesc& kernel : CudaKernels()) {
    if (!BlockKernelOf(kernel.name)) {
      EXPECT_FALSE(kernel.chosen == Chosen::kByName || kernel.reads_marlin_w4) << kernel.name;
      continue;
    }
    EXPECT_NE(kernel.chosen == Chosen::kByName, kernel.reads_marlin_w4) << kernel.name;
    const std::string name = kernel.name;
    const bool integers = name == "marlin_gemm_fused_u4";
    for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kS4, Format::kNf4}) {
      GemmDesc desc = Problem(format);
      desc.weights.marlin_w4 = kernel.reads_marlin_w4;
      desc.weights.tiled = !desc.weights.marlin_w4;
      const bool four = format == Format::kU4 || format == Format::kS4;
      const bool takes = desc.weights.marlin_w4 || (integers ? four : format == Format::kFp4E2M1);
      EXPECT_EQ(Chosen(desc, name) == name, takes) << FormatName(format);
      EXPECT_EQ(Chosen(desc, "") == name, desc.weights.marlin_w4) << FormatName(format);
    }
  }
}

TEST(BlockKernels, SayWhatTheyTake) {
  const auto mentions = [](const GemmDesc& desc, const std::string& forced,
                           const std::string& words) {
    const std::string message = Chosen(desc, forced);
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  mentions(Problem(Format::kU4), "marlin_gemm_fp4", "takes fp4_e2m1 alone");
  mentions(Problem(Format::kFp4E2M1), "marlin_gemm_fused_u4", "takes u4 and s4 alone");
  mentions(Problem(Format::kFp4E2M1), "marlin_gemm_w4", "prepared in the marlin_w4 layout");
  GemmDesc w4 = Problem(Format::kFp4E2M1);
  w4.weights.marlin_w4 = true;
  w4.weights.tiled = false;
  mentions(w4, "marlin_gemm_wgmma", "does not read the marlin_w4 layout");
  mentions(w4, "marlin_gemm_cuda_exact", "does not read the marlin_w4 layout");
  w4.a_type = DType::kF32;
  mentions(w4, "", "needs allow_bf16_activations");
}

}  // namespace
}  // namespace marlin::cuda::block_plan_test
