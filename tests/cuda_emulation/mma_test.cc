// The MMA kernel on the host: all widths, with and without split-K, on several kinds of tiles.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/gemm/mma/mma_instances.cuh"
#include "backends/cuda/gemm/mma/mma_plan.h"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda {
namespace {

struct MmaCase {
  int m = 1;
  WeightsShape weights;
  int splits = 1;
  bool batch_invariant = false;
};

template <typename T, int kTokens, CodeKind kKind, ParameterUse kUse, bool kSparse = false>
void ExpectExact(const MmaCase& given) {
  MmaCase problem = given;
  problem.weights.kind = kKind;
  problem.weights.sparse = kSparse;
  const int n = problem.weights.n;
  const TiledWeights weights(problem.weights);
  const TileView& view = weights.view();
  ASSERT_EQ(UseOf(view, kKind), kUse);
  const Activations a(problem.m, problem.weights.k, T::kIsBf16);
  TileProblem tiles = {.m = problem.m, .n = n, .k = a.k, .tile_bytes = view.tile_bytes};
  tiles.batch_invariant = problem.batch_invariant;
  tiles.pair_table = kKind == CodeKind::kTable4;
  tiles.sparse = kSparse;
  DeviceShape device;
  device.code = kHasTma ? 120 : 80;
  device.has_wgmma = false;
  device.multiprocessors = 8;
  device.shared_bytes = 99 * 1024;
  const MmaShape shape = {kTokens, problem.splits};
  ASSERT_TRUE(CanPlanMmaAs(tiles, device, shape));
  const MmaPlan plan = PlanMmaAs(tiles, device, shape);

  MmaArguments args = plan.arguments;
  args.weights = view;
  args.a = a.memory.data();
  args.a_stride = a.stride;
  std::vector<float> out(static_cast<size_t>(problem.m * n));
  args.epilogue.out = out.data();
  args.epilogue.type = Element::kF32;
  args.epilogue.stride = n;
  args.epilogue.n = n;
  args.epilogue.multiplier = weights.Multiplier(T::kIsBf16);
  std::vector<uint32_t> workspace(static_cast<size_t>(MmaWorkspaceBytes(tiles, plan)) / 4, ~0u);
  auto* const sums = reinterpret_cast<float*>(workspace.data());
  if (plan.partials) {
    args.partials = sums;
  } else if (args.splits > 1) {
    args.tile_counters = workspace.data();
    args.parts = sums + MmaCounterBytes(plan) / 4;
  }
  const void* kernel;
  if constexpr (kSparse) {
    kernel = cuda_emulation::Untyped(&MmaKernel<kKind, T, kTokens, kUse, SparseStripTile>);
  } else {
    kernel = cuda_emulation::Untyped(&MmaKernel<kKind, T, kTokens, kUse>);
  }
  void* parameters[] = {&args};
  const dim3 grid(static_cast<unsigned>(plan.items), static_cast<unsigned>(args.splits));
  const dim3 block(static_cast<unsigned>(plan.warps * 32));
  for (const uint32_t seed : {0u, 7u}) {
    ASSERT_EQ(
        cuda_emulation::EmulateUntyped(kernel, {grid, block, plan.shared_bytes, seed}, parameters),
        "");
    if (plan.partials) {
      LaunchReducePartials(sums, args.splits, a.m, args.epilogue, true, nullptr);
      ASSERT_EQ(cuda_emulation::TakeFindings(), "");
    }
    EXPECT_EQ(out, ExactProduct(a, weights, n)) << "splits " << args.splits << ", seed " << seed;
  }
}

TEST(MmaKernel, HasEveryWidth) {
  ExpectExact<Bf16x2, 16, CodeKind::kFp4, ParameterUse::kOneScale>({5, {.k = 512, .n = 96}});
  ExpectExact<Bf16x2, 32, CodeKind::kFp4, ParameterUse::kOneScale>({20, {.k = 300, .n = 70}});
  ExpectExact<Bf16x2, 64, CodeKind::kFp4, ParameterUse::kOneScale>({80, {.k = 256, .n = 160}});
  ExpectExact<F16x2, 128, CodeKind::kFp4, ParameterUse::kOneScale>({129, {.k = 384, .n = 128}});
}

TEST(MmaKernel, SplitsK) {
  ExpectExact<Bf16x2, 16, CodeKind::kFp4, ParameterUse::kOneScale>({9, {.k = 1100, .n = 160}, 2});
  ExpectExact<F16x2, 64, CodeKind::kFp4, ParameterUse::kOneScale>({33, {.k = 2000, .n = 64}, 3});
}

TEST(MmaKernel, AppliesParameters) {
  ExpectExact<Bf16x2, 16, CodeKind::kInt4, ParameterUse::kAll>(
      {3, {.k = 256, .n = 64, .group_size = 64, .zeros = ZeroKind::kZeros}});
  ExpectExact<F16x2, 16, CodeKind::kInt8, ParameterUse::kAll>(
      {3, {.k = 256, .n = 32, .zeros = ZeroKind::kBiases}});
  ExpectExact<Bf16x2, 64, CodeKind::kFp4, ParameterUse::kScales>(
      {40, {.k = 256, .n = 64, .group_size = 16}});
}

TEST(MmaKernel, DecodesEveryKind) {
  ExpectExact<Bf16x2, 16, CodeKind::kTable4, ParameterUse::kOneScale>({3, {.k = 256, .n = 64}});
  ExpectExact<Bf16x2, 16, CodeKind::kTable3, ParameterUse::kOneScale>({3, {.k = 256, .n = 64}});
  ExpectExact<F16x2, 16, CodeKind::kTable2, ParameterUse::kOneScale>({3, {.k = 256, .n = 64}});
  ExpectExact<Bf16x2, 16, CodeKind::kE4M3, ParameterUse::kOneScale>({3, {.k = 256, .n = 64}});
  ExpectExact<F16x2, 16, CodeKind::kE5M2, ParameterUse::kOneScale>({3, {.k = 256, .n = 64}});
  ExpectExact<Bf16x2, 16, CodeKind::kDense16, ParameterUse::kOneScale>({3, {.k = 256, .n = 64}});
}

TEST(MmaKernel, MultipliesSparseTiles) {
  ExpectExact<Bf16x2, 16, CodeKind::kFp4, ParameterUse::kOneScale, true>({3, {.k = 256, .n = 64}});
  ExpectExact<F16x2, 32, CodeKind::kInt4, ParameterUse::kScales, true>(
      {17, {.k = 256, .n = 96, .group_size = 16}});
}

}  // namespace
}  // namespace marlin::cuda
