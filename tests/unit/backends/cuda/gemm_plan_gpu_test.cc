// Runs of a plan on a GPU: the bits of Gemm, and no allocation by the host.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../../count_allocations.h"
#include "base/scalars.h"
#include "gpu_fixture.h"

namespace marlin::gemm_plan_gpu_test {
namespace {

constexpr int64_t kN = 1536;
constexpr int64_t kK = 2048;

struct Case {
  int64_t m;
  DType a_type;
  Accuracy accuracy;
  const char* kernel;
};

class GemmPlanOnGpu : public GpuTest<::testing::TestWithParam<Case>> {};

TEST_P(GemmPlanOnGpu, HasTheBitsOfGemmAndAllocatesNothing) {
  if (IsSkipped()) return;
  const Case& test = GetParam();
  const PreparedWeights weights = PrepareGaussian(device(), kK, kN, 5);
  const std::vector<float> values = GaussianFloats(test.m * kK, 6);
  std::vector<uint16_t> rounded;
  for (const float value : values) rounded.push_back(FloatToBf16(value));
  const DeviceBuffer input = test.a_type == DType::kF32 ? Upload(values) : Upload(rounded);
  const DeviceBuffer first = Make(test.m * kN * 4);
  const DeviceBuffer second = Make(test.m * kN * 4);
  const TensorView a(input.data(), test.a_type, {test.m, kK});
  GemmOptions options;
  options.accuracy = test.accuracy;
  options.allow_bf16_activations = test.a_type == DType::kF32;
  if (*test.kernel != '\0') {
    options.kernel = KernelHere(test.kernel);
    if (options.kernel.empty()) GTEST_SKIP() << "this device does not run " << test.kernel;
  }
  const auto plan =
      PlanGemm(device(), a, weights, {first.data(), DType::kF32, {test.m, kN}}, options);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const DeviceBuffer workspace = Make(std::max<int64_t>(plan->workspace_bytes(), 256));
  options.workspace = workspace.data();
  options.workspace_bytes = workspace.bytes();
  GemmArguments arguments;
  arguments.workspace = workspace.data();
  arguments.workspace_bytes = workspace.bytes();
  bool ok = true;
  const auto run_both = [&] {
    ok = ok &&
         Gemm(device(), a, weights, {first.data(), DType::kF32, {test.m, kN}}, options).ok() &&
         plan->Run(a, {second.data(), DType::kF32, {test.m, kN}}, arguments).ok();
  };
  // The first round loads modules and leases scratch memory.
  run_both();
  const int64_t allocations = AllocationsOf([&] {
    run_both();
    run_both();
  });
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0) << plan->ToString();
  ASSERT_TRUE(device().Synchronize().ok());
  EXPECT_EQ(Download<float>(first), Download<float>(second));
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, GemmPlanOnGpu,
    ::testing::Values(Case{1, DType::kBf16, Accuracy::kDefault, ""},
                      Case{16, DType::kBf16, Accuracy::kDefault, ""},
                      Case{16, DType::kBf16, Accuracy::kDefault, "marlin_gemv_mma"},
                      Case{3, DType::kF32, Accuracy::kDefault, ""},
                      Case{300, DType::kBf16, Accuracy::kDefault, ""},
                      Case{2048, DType::kBf16, Accuracy::kDefault, "marlin_gemm_wgmma"},
                      Case{300, DType::kBf16, Accuracy::kW4A8, ""},
                      Case{7, DType::kBf16, Accuracy::kExact, ""},
                      Case{70, DType::kBf16, Accuracy::kDefault, "marlin_gemm_fp4_striped"}));

}  // namespace
}  // namespace marlin::gemm_plan_gpu_test
