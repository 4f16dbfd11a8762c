// The GEMV kernel on the host: its plans for several devices, on all kinds of tiles.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/gemm/gemv/gemv_instances.cuh"
#include "backends/cuda/gemm/gemv/gemv_plan.h"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda {
namespace {

DeviceShape SmallDevice(int multiprocessors) {
  DeviceShape device;
  device.code = kHasTma ? 100 : 80;
  device.has_wgmma = false;
  device.multiprocessors = multiprocessors;
  device.shared_bytes = 99 * 1024;
  for (int& clusters : device.clusters) clusters = 0;
  return device;
}

struct GemvCase {
  WeightsShape weights;
  int m = 1;
  bool bf16 = true;
  int multiprocessors = 4;
  std::optional<GemvShape> shape = std::nullopt;  ///< Not the usual plan.
};

template <CodeKind kKind, bool kSparse>
const void* FunctionOf(const GemvCase& problem, const TileView& view, const GemvPlan& plan) {
  return GemvKernels::Function<TilesOfKind<kKind, kSparse>>(
      {problem.bf16, UseOf(view, kKind), plan.strips, Ceil(problem.m, kOctet)});
}

template <CodeKind kKind, bool kSparse = false>
void ExpectExact(const GemvCase& given) {
  GemvCase problem = given;
  problem.weights.kind = kKind;
  problem.weights.sparse = kSparse;
  const int n = problem.weights.n;
  const TiledWeights weights(problem.weights);
  const Activations a(problem.m, problem.weights.k, problem.bf16);
  const TileView& view = weights.view();
  TileProblem tiles = {.m = problem.m, .n = n, .k = a.k, .tile_bytes = view.tile_bytes};
  tiles.pair_table = kKind == CodeKind::kTable4;
  tiles.sparse = kSparse;
  tiles.narrow_codes = CodeBits(kKind) <= 4 && UseOf(view, kKind) == ParameterUse::kOneScale;
  const DeviceShape device = SmallDevice(problem.multiprocessors);
  const GemvPlan plan =
      problem.shape ? *PlanGemvAs(tiles, device, *problem.shape) : PlanGemv(tiles, device);

  GemvArguments args = plan.arguments;
  args.weights = view;
  args.a = a.memory.data();
  args.a_stride = a.stride;
  std::vector<float> out(static_cast<size_t>(problem.m * n));
  args.epilogue.out = out.data();
  args.epilogue.type = Element::kF32;
  args.epilogue.stride = n;
  args.epilogue.n = n;
  args.epilogue.multiplier = weights.Multiplier(problem.bf16);
  std::vector<float> partials(static_cast<size_t>(plan.splits) * out.size());
  if (plan.partials) args.partials = partials.data();
  std::vector<uint32_t> scratch;
  if (plan.in_memory) {
    scratch.resize(static_cast<size_t>(SplitWorkspaceBytes(plan) / 4), ~0u);
    args.tile_counters = scratch.data();
    args.exchange = reinterpret_cast<float*>(scratch.data() + CounterWords(plan));
  }
  const dim3 grid(static_cast<unsigned>(plan.splits), static_cast<unsigned>(plan.groups));
  const void* const kernel = FunctionOf<kKind, kSparse>(problem, view, plan);
  void* parameters[] = {&args};
  for (const uint32_t seed : {0u, 7u}) {
    ASSERT_EQ(
        cuda_emulation::EmulateUntyped(
            kernel, {grid, dim3(static_cast<unsigned>(plan.warps * 32)), plan.shared_bytes, seed},
            parameters),
        "");
    if (plan.partials && !plan.in_memory) {
      LaunchReducePartials(partials.data(), plan.splits, a.m, args.epilogue, true, nullptr);
      ASSERT_EQ(cuda_emulation::TakeFindings(), "");
    }
    EXPECT_EQ(out, ExactProduct(a, weights, n)) << "splits " << plan.splits << ", seed " << seed;
    for (const uint32_t word : scratch) ASSERT_EQ(word, ~0u);
  }
}

TEST(GemvKernel, MultipliesFp4) {
  ExpectExact<CodeKind::kFp4>({{.k = 512, .n = 96}});
  ExpectExact<CodeKind::kFp4>({{.k = 300, .n = 70, .group_size = 16}, 3, false});
  ExpectExact<CodeKind::kFp4>({{.k = 1024, .n = 160}, 16, true, 32});
}

TEST(GemvKernel, MultipliesIntegersWithZeros) {
  ExpectExact<CodeKind::kInt4>({{.k = 256, .n = 64, .group_size = 64}, 5});
  ExpectExact<CodeKind::kInt4>({{.k = 256, .n = 64, .zeros = ZeroKind::kZeros}, 2, false});
  ExpectExact<CodeKind::kInt8>({{.k = 256, .n = 32, .zeros = ZeroKind::kBiases}, 9});
}

TEST(GemvKernel, MultipliesTables) {
  ExpectExact<CodeKind::kTable4>({{.k = 256, .n = 64}, 1, true, 16});
  ExpectExact<CodeKind::kTable3>({{.k = 256, .n = 64, .group_size = 32}, 1});
  ExpectExact<CodeKind::kTable2>({{.k = 256, .n = 64}, 8, false});
}

TEST(GemvKernel, MultipliesBytesAndNumbers) {
  ExpectExact<CodeKind::kE4M3>({{.k = 256, .n = 64}, 1});
  ExpectExact<CodeKind::kE5M2>({{.k = 130, .n = 64}, 1, false});
  ExpectExact<CodeKind::kDense16>({{.k = 256, .n = 40}, 2});
}

TEST(GemvKernel, MultipliesSparseTiles) {
  ExpectExact<CodeKind::kFp4, true>({{.k = 512, .n = 64}, 1});
  ExpectExact<CodeKind::kInt4, true>({{.k = 256, .n = 64, .group_size = 16}, 9, false});
}

/// Rings of every depth, with more and with fewer tiles than stages, with and without split-K
/// through global memory.
TEST(GemvKernel, FillsRingsOfEveryDepth) {
  for (int stages = 1; stages <= (kHasTma ? kMaxBulkStages : kMaxStages); ++stages) {
    for (const int splits : {1, 3}) {
      for (const int strips : {1, 2}) {
        const GemvShape shape = {4, stages, 1, splits, strips, 1, true};
        ExpectExact<CodeKind::kFp4>({{.k = 1664, .n = 160}, 2, true, 6, shape});
        ExpectExact<CodeKind::kFp4>({{.k = 300, .n = 64}, 1, true, 6, shape});
      }
    }
  }
}

}  // namespace
}  // namespace marlin::cuda
