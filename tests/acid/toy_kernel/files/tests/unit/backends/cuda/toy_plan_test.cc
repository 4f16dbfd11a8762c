#include <gtest/gtest.h>

#include <string>

#include "backends/cuda/plan/kernel_table.h"
#include "plan/gemm/select.h"

namespace marlin::cuda::toy_plan_test {
namespace {

TEST(ToyKernel, IsPlannedByItsRowAlone) {
  GemmDesc desc;
  desc.m = 2;
  desc.n = desc.k = 256;
  desc.group_size = 128;
  desc.a_type = DType::kBf16;
  desc.weights.tiled = true;
  const auto cost = [](const KernelDesc& kernel, const GemmDesc& problem) {
    return FamilyOf(kernel).microseconds(problem, {});
  };
  const auto can_run_as = [](const KernelDesc& kernel, const GemmDesc& problem,
                             const KernelVariant& variant) {
    return CanRunAs(kernel, problem, {}, variant);
  };
  const Candidates candidates = {{.level = Isa::kCuda}, CudaKernels(), cost, can_run_as};
  const auto forced = SelectKernel(desc, candidates, "marlin_gemm_toy");
  ASSERT_TRUE(forced.ok()) << forced.status().message();
  EXPECT_EQ(FamilyOf(*forced->kernel).microseconds(desc, {}), 2.0 * 256 / 132);
  EXPECT_NE(std::string(SelectKernel(desc, candidates, "")->kernel->name), "marlin_gemm_toy");
  desc.m = 5;
  EXPECT_NE(SelectKernel(desc, candidates, "marlin_gemm_toy").status().message().find("up to 4"),
            std::string::npos);
}

}  // namespace
}  // namespace marlin::cuda::toy_plan_test
