// Decode attention, with rings of every shape.
#include "backends/cuda/attention/decode/decode_attention.cu"

#include "attention_runner.h"

namespace marlin::cuda::decode_attention_test {
namespace {

using cuda_emulation::ExpectNear;
using cuda_emulation::RunAttention;

void Compare(const AttentionCase& of) {
  const AttentionProblem problem(of, {{1, 0}, {1, 200}, {1, 40}, {1, 129}});
  const std::vector<double> expected = problem.Results();
  for (const int shared_kib : {99, 227}) {
    SCOPED_TRACE(of.Name() + " " + std::to_string(shared_kib));
    DeviceShape device;
    device.has_wgmma = false;
    device.multiprocessors = 16;
    device.shared_bytes = shared_kib * 1024;
    const AttentionPlan plan = PlanMatrixAttention(problem.Shape(), device);
    ASSERT_GE(plan.segments, 1);
    // Parts that the last CTA merges, and that another kernel does.
    const std::vector<float> actual =
        RunAttention(problem, plan, device, LaunchDecodeAttention, plan.segments > 1);
    ExpectNear(actual, expected);
    EXPECT_EQ(RunAttention(problem, plan, device, LaunchDecodeAttention), actual);
  }
}

TEST(DecodeAttention, HeadsOfEverySize) {
  for (const auto& [key_dim, value_dim] :
       {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}, {256, 112}, {512, 512}, {512, 64}}) {
    for (const bool fp8 : {false, true}) {
      Compare({key_dim, value_dim, fp8, false, 0, 0, false, false, false, 1});
    }
  }
}

TEST(DecodeAttention, CapsWindowsAndSinks) {
  Compare({64, 64, false, true, 5.0F, 30, false, true, false, 1, 20});
  Compare({80, 48, true, true, 0, 50, true, false, false, 2, 2});
}

}  // namespace
}  // namespace marlin::cuda::decode_attention_test
