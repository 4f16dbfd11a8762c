// Latent attention, with blocks of 64 and of 32 keys.
#include "backends/cuda/attention/latent/latent_attention.cu"

#include "attention_runner.h"

namespace marlin::cuda::latent_attention_emulation_test {
namespace {

using cuda_emulation::ExpectNear;
using cuda_emulation::IsRun;
using cuda_emulation::RunAttention;

void Compare(const AttentionCase& of) {
  if (!IsRun(of.fp8)) return;
  const AttentionProblem problem(of, {{1, 100}, {5, 60}, {1, 0}});
  const std::vector<double> expected = problem.Results();
  for (const int shared_kib : {99, 227}) {
    if (of.fp8 && shared_kib != 99) continue;
    SCOPED_TRACE(of.Name() + " " + std::to_string(shared_kib));
    DeviceShape device;
    device.has_wgmma = false;
    device.multiprocessors = 16;
    device.shared_bytes = shared_kib * 1024;
    const AttentionPlan plan = PlanLatentAttention(problem.Shape(), device);
    ExpectNear(RunAttention(problem, plan, device, LaunchLatentAttention), expected);
  }
}

AttentionCase Latents(int key_dim, int value_dim, bool fp8, int group) {
  return {key_dim, value_dim, fp8, false, 0, 0, false, false, true, 1, group};
}

TEST(LatentAttention, RowsOfOneOrTwoGroups) {
  for (const bool fp8 : {false, true}) {
    Compare(Latents(576, 512, fp8, fp8 ? 16 : 4));
  }
}

TEST(LatentAttention, ValuesApart) {
  Compare({512, 400, false, false, 5.0F, 40, false, true, false, 1, 16});
  Compare({320, 64, true, false, 0, 0, false, false, false, 1, 3});
}

TEST(LatentAttention, NanStaysInItsRows) {
  AttentionProblem problem({320, 64, false, false, 0, 0, false, false, false, 1, 4}, {{50, 0}});
  DeviceShape device;
  device.multiprocessors = 1;
  device.shared_bytes = 64 * 1024;
  const AttentionPlan plan = PlanLatentAttention(problem.Shape(), device);
  const std::vector<double> expected = problem.Results();
  problem.cache[static_cast<size_t>(problem.At(0, 0, 20, true) + 17)] = 0x7fc0;
  const std::vector<float> actual = RunAttention(problem, plan, device, LaunchLatentAttention);
  for (size_t i = 0; i < actual.size(); ++i) {
    if (i / 256 >= 20 && i % 64 == 17) {
      ASSERT_TRUE(std::isnan(actual[i])) << i;
    } else {
      ASSERT_NEAR(actual[i], expected[i], 2e-4) << i;
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::latent_attention_emulation_test
