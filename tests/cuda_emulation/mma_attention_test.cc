// Prefill on mma.sync.
#include "backends/cuda/attention/prefill/mma_attention.cu"

#include "attention_runner.h"

namespace marlin::cuda::mma_attention_test {
namespace {

using cuda_emulation::ExpectNear;
using cuda_emulation::IsRun;
using cuda_emulation::RunAttention;

AttentionPlan PlanOf(const AttentionProblem& problem, const DeviceShape& device) {
  AttentionShape shape = problem.Shape();
  const int64_t rows = shape.rows * shape.group;
  // As if there were enough tokens to occupy the device.
  shape.rows = std::max<int64_t>(shape.rows, 1 << 20);
  AttentionPlan plan = PlanMatrixAttention(shape, device);
  EXPECT_EQ(plan.segments, 0);
  plan.tiles = rows / plan.tile_rows + shape.sequences;
  return plan;
}

DeviceShape Shape(int shared_kib) {
  DeviceShape device;
  device.has_wgmma = false;
  device.shared_bytes = shared_kib * 1024;
  return device;
}

void Compare(const AttentionCase& of, const std::vector<Feed>& feeds) {
  if (!IsRun(of.fp8)) return;
  const AttentionProblem problem(of, feeds);
  const std::vector<double> expected = problem.Results();
  for (const int shared_kib : {99, 227}) {
    if (of.fp8 && shared_kib != 99) continue;
    SCOPED_TRACE(of.Name() + " " + std::to_string(shared_kib));
    const DeviceShape device = Shape(shared_kib);
    const AttentionPlan plan = PlanOf(problem, device);
    ExpectNear(RunAttention(problem, plan, device, LaunchMmaAttention), expected,
               of.one_term ? 0.03 : 2e-4);
  }
}

const std::vector<Feed> kPrompts = {{37, 0}, {1, 40}, {0, 0}, {9, 100}};

TEST(MmaAttention, HeadsOfEverySize) {
  for (const auto& [key_dim, value_dim] :
       {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}, {80, 48}}) {
    for (const bool fp8 : {false, true}) {
      Compare({key_dim, value_dim, fp8, key_dim == 128 && fp8}, kPrompts);
    }
  }
}

TEST(MmaAttention, BfloatQueries) { Compare({128, 128, false, true}, kPrompts); }

TEST(MmaAttention, CapsWindowsAndSinks) {
  Compare({64, 64, false, false, 5.0F, 30}, kPrompts);
  Compare({64, 64, true, true, 0, 50, true, true}, kPrompts);
}

TEST(MmaAttention, OneTerm) {
  for (const bool bf16_queries : {false, true}) {
    AttentionCase of = {128, 80, false, bf16_queries, 5.0F, 30};
    of.one_term = true;
    Compare(of, kPrompts);
  }
}

/// One term of queries and weights is not as near as two: the weights' rounding shows.
TEST(MmaAttention, OneTermRounds) {
  if (!IsRun(false)) return;
  AttentionCase of = {64, 64, false, true};
  of.one_term = true;
  const AttentionProblem problem(of, {{60, 0}});
  const DeviceShape device = Shape(99);
  const std::vector<double> expected = problem.Results();
  const std::vector<float> actual =
      RunAttention(problem, PlanOf(problem, device), device, LaunchMmaAttention);
  double most = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    most = std::max(most, std::abs(actual[i] - expected[i]));
  }
  EXPECT_GT(most, 1e-4);
  EXPECT_LT(most, 0.01);
}

uint32_t seed = 0;

/// LaunchMmaAttention, in an order of threads drawn from `seed`.
cudaError_t LaunchInAnyOrder(const AttentionArguments& args, const DeviceShape& device,
                             cudaStream_t /*stream*/) {
  const MmaHeads heads = HeadsOf(args);
  const MmaAttentionShape shape = MmaShapeFor(heads, device.shared_bytes);
  const auto ctas = static_cast<unsigned>(args.tiles * args.kv_heads);
  const dim3 threads(static_cast<unsigned>(shape.warps * 32));
  cuda_emulation::Findings() += cuda_emulation::Emulate(
      KernelFor(shape, heads.fp8), {dim3(ctas), threads, shape.Bytes(heads), seed}, args);
  return cudaSuccess;
}

TEST(MmaAttention, TheOrderOfThreadsDoesNotMatter) {
  for (const bool fp8 : {false, true}) {
    if (!IsRun(fp8)) continue;
    const AttentionProblem problem({64, 64, fp8, false, 0, 0, false, false, false, 1}, {{60, 70}});
    const DeviceShape device = Shape(99);
    const AttentionPlan plan = PlanOf(problem, device);
    seed = 0;
    const std::vector<float> expected = RunAttention(problem, plan, device, LaunchInAnyOrder);
    for (seed = 1; seed < 4; ++seed) {
      EXPECT_EQ(RunAttention(problem, plan, device, LaunchInAnyOrder), expected) << seed;
    }
  }
}

TEST(MmaAttention, NanStaysInItsRows) {
  for (const bool fp8 : {false, true}) {
    AttentionProblem problem({64, 64, fp8, false, 0, 0, false, false, false, 1, 2}, {{100, 0}});
    const DeviceShape device = Shape(99);
    const AttentionPlan plan = PlanOf(problem, device);
    const std::vector<double> expected = problem.Results();
    problem.cache[static_cast<size_t>(problem.At(0, 0, 70, true) + 17)] = fp8 ? 0x7f : 0x7fc0;
    const std::vector<float> actual = RunAttention(problem, plan, device, LaunchMmaAttention);
    for (size_t i = 0; i < actual.size(); ++i) {
      if (i / 128 >= 70 && i % 64 == 17) {
        ASSERT_TRUE(std::isnan(actual[i])) << i;
      } else {
        ASSERT_NEAR(actual[i], expected[i], 2e-4) << i;
      }
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::mma_attention_test
