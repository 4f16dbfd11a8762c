// Decode attention, with rings of every shape.
#include "backends/cuda/attention/decode/decode_attention.cu"

#include "attention_runner.h"

namespace marlin::cuda::decode_attention_test {
namespace {

using cuda_emulation::ExpectNear;
using cuda_emulation::RunAttention;

void Compare(const AttentionCase& of) {
  const AttentionProblem problem(of, {{1, 0}, {1, 200}, {1, 40}});
  const std::vector<double> expected = problem.Results();
  for (const int shared_kib : {99, 227}) {
    if (of.fp8 && shared_kib != 99) continue;
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
    if (of.key_dim > 64) continue;
    EXPECT_EQ(RunAttention(problem, plan, device, LaunchDecodeAttention), actual);
  }
}

TEST(DecodeAttention, HeadsOfEverySize) {
  for (const auto& [key_dim, value_dim] :
       {std::pair{64, 64}, {128, 128}, {256, 256}, {512, 512}, {512, 64}}) {
    for (const bool fp8 : {false, true}) {
      Compare({key_dim, value_dim, fp8, false, 0, 0, false, false, false, 1});
    }
  }
}

uint32_t seed = 0;

/// LaunchDecodeAttention of one part, in an order of threads drawn from `seed`.
cudaError_t LaunchInAnyOrder(const AttentionArguments& args, const DeviceShape& device,
                             cudaStream_t /*stream*/) {
  const bool fp8 = args.pages.type == Element::kE4M3;
  const DecodeShape shape = DecodeShapeFor(args.key_dim, args.value_dim, fp8, device.shared_bytes);
  const dim3 grid(static_cast<unsigned>(args.tiles), static_cast<unsigned>(args.kv_heads));
  cuda_emulation::Findings() += cuda_emulation::Emulate(
      KernelFor(shape, fp8),
      {grid, dim3(kThreads), shape.Bytes(args.key_dim, args.value_dim, fp8), seed}, args);
  return cudaSuccess;
}

TEST(DecodeAttention, TheOrderOfThreadsDoesNotMatter) {
  for (const int features : {128, 256, 512}) {
    const AttentionProblem problem(
        {features, features, features == 128, false, 0, 0, false, false, false, 1}, {{1, 150}});
    DeviceShape device;
    device.has_wgmma = false;
    device.multiprocessors = 1;
    device.shared_bytes = 99 * 1024;
    AttentionPlan plan = PlanMatrixAttention(problem.Shape(), device);
    plan.segments = 1;
    seed = 0;
    const std::vector<float> expected = RunAttention(problem, plan, device, LaunchInAnyOrder);
    for (seed = 1; seed < 4; ++seed) {
      EXPECT_EQ(RunAttention(problem, plan, device, LaunchInAnyOrder), expected) << seed;
    }
  }
}

TEST(DecodeAttention, CapsWindowsAndSinks) {
  Compare({64, 64, false, true, 5.0F, 30, false, true, false, 1, 20});
  Compare({80, 48, true, true, 0, 50, true, false, false, 2, 2});
}

}  // namespace
}  // namespace marlin::cuda::decode_attention_test
