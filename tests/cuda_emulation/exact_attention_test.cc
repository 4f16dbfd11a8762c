// Exact attention, with keys in parts.
#include "attention_runner.h"
#include "backends/cuda/attention/exact/attention.cu"

namespace marlin::cuda::exact_attention_test {
namespace {

using cuda_emulation::ExpectNear;
using cuda_emulation::RunAttention;

// The bits do not depend on the tile, and so not on the card.
TEST(ExactAttention, HasTheSameBitsOnEveryCard) {
  for (const int key_dim : {72, 576, 1000}) {
    const AttentionProblem problem({key_dim, 40, false, false, 0, 70, false, true, false, 1, 3},
                                   {{9, 60}, {1, 150}, {2, 0}});
    const std::vector<double> expected = problem.Results();
    std::vector<float> first;
    for (const int shared_kib : {227, 163, 99}) {
      SCOPED_TRACE(std::to_string(key_dim) + " " + std::to_string(shared_kib));
      DeviceShape device;
      device.shared_bytes = shared_kib * 1024;
      const AttentionPlan plan = PlanAttention(problem.Shape(), device);
      const std::vector<float> actual = RunAttention(problem, plan, device, LaunchAttention);
      ExpectNear(actual, expected, 1e-5);
      if (first.empty()) first = actual;
      EXPECT_EQ(actual, first);
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::exact_attention_test
