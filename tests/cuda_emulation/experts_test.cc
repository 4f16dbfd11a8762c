// The GEMMs of a layer's experts on the host: few rows and many, sorted before or by every CTA,
// gathered or in the order of the slots, gated or not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/moe/experts/experts_gemv.cuh"
#include "backends/cuda/moe/experts/experts_mma.cuh"
#include "backends/cuda/moe/experts/experts_plan.h"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda {
namespace {

constexpr int kRelu = 3;
constexpr int kBlocks = 3;  ///< CTAs: each has several output tiles.

DeviceShape SmallCard() {
  DeviceShape device;
  device.code = kHasTma ? 120 : 80;
  device.has_wgmma = false;
  device.multiprocessors = kBlocks;
  device.shared_bytes = 99 * 1024;
  return device;
}

/// Every token selects two experts of four, of which expert 2 is not here; expert 0 has most.
struct Selected {
  static constexpr int kExperts = 4;
  static constexpr int kTopK = 2;

  explicit Selected(int count, bool shared) : tokens(count) {
    for (int t = 0; t < tokens; ++t) {
      ids.push_back(t % 5 == 4 ? 3 : 0);
      ids.push_back(t % 3 == 0 ? 2 : t % 3 == 1 ? 1 : 3);
    }
    slot_of.assign(ids.size(), -1);
    for (int e = 0; e < kExperts; ++e) {
      begin.push_back(static_cast<int32_t>(token.size()));
      for (size_t i = 0; i < ids.size() && e != kAbsent; ++i) {
        if (ids[i] != e) continue;
        slot_of[i] = static_cast<int32_t>(token.size());
        token.push_back(static_cast<int32_t>(i) / kTopK);
      }
    }
    begin.push_back(static_cast<int32_t>(token.size()));
    for (int t = 0; shared && t < tokens; ++t) token.push_back(t);
    begin.push_back(static_cast<int32_t>(token.size()));
  }

  SlotsView View() { return {kExperts, begin.data(), token.data(), slot_of.data()}; }
  int slots() const { return begin.back(); }
  int ExpertOf(int slot) const {
    return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), slot) - begin.begin()) - 1;
  }
  static constexpr int kAbsent = 2;

  int tokens;
  std::vector<int32_t> ids;
  std::vector<int32_t> slot_of;
  std::vector<int32_t> begin;
  std::vector<int32_t> token;
};

/// Gates and ups of four experts and a shared one, with biases.
struct Layer {
  explicit Layer(const WeightsShape& given, bool bf16) : shape(given) {
    for (int i = 0; i < 2 * (Selected::kExperts + 1); ++i) {
      weights.push_back(std::make_unique<TiledWeights>(shape, static_cast<uint32_t>(i + 1)));
      std::vector<float>& bias = biases.emplace_back();
      for (int n = 0; n < shape.n; ++n) bias.push_back(static_cast<float>((n + i) % 7 - 3));
      TileExpert expert = {weights.back()->view().tiles, bias.data(),
                           weights.back()->Multiplier(bf16), shape.n, i % 2 * shape.n};
      if (i % 3 == 1) expert.bias = nullptr;
      if (i / 2 == Selected::kAbsent) expert = {};
      table.push_back(expert);
    }
  }

  const TileView& view() const { return weights.front()->view(); }
  ExpertTilesProblem Problem(int64_t rows, int64_t own_sort_bytes = 0) const {
    ExpertTilesProblem problem;
    problem.weights = view();
    problem.kind = shape.kind;
    problem.experts = Selected::kExperts;
    problem.sides = 2;
    problem.matrix_weights = int64_t{shape.k} * shape.n;
    problem.rows_per_expert = rows;
    problem.own_sort_bytes = own_sort_bytes;
    problem.use = UseOf(view(), shape.kind);
    return problem;
  }
  /// [row: rows.m][gates | ups] of the expert.
  std::vector<float> Results(const Activations& rows, int expert) const {
    std::vector<float> all(static_cast<size_t>(rows.m * 2 * shape.n));
    for (int side = 0; side < 2; ++side) {
      const auto i = static_cast<size_t>(expert * 2 + side);
      const std::vector<float> sums = ExactProduct(rows, *weights[i], shape.n);
      for (int at = 0; at < rows.m * shape.n; ++at) {
        const int n = at % shape.n;
        const float bias = table[i].bias == nullptr ? 0.0f : table[i].bias[n];
        all[static_cast<size_t>(at / shape.n * 2 * shape.n + side * shape.n + n)] =
            sums[static_cast<size_t>(at)] + bias;
      }
    }
    return all;
  }

  WeightsShape shape;
  std::vector<std::unique_ptr<TiledWeights>> weights;
  std::vector<std::vector<float>> biases;
  std::vector<TileExpert> table;
};

/// [slot][gates | ups] of rows of tokens.
std::vector<float> Expected(const Layer& layer, const Activations& x, const Selected& selected) {
  const auto width = static_cast<size_t>(2 * layer.shape.n);
  std::vector<float> all;
  std::vector<std::vector<float>> of_expert(Selected::kExperts + 1);
  for (int slot = 0; slot < selected.slots(); ++slot) {
    std::vector<float>& results = of_expert[static_cast<size_t>(selected.ExpertOf(slot))];
    if (results.empty()) results = layer.Results(x, selected.ExpertOf(slot));
    const auto token = static_cast<size_t>(selected.token[static_cast<size_t>(slot)]);
    const float* const row = results.data() + token * width;
    all.insert(all.end(), row, row + width);
  }
  return all;
}

WeightsShape ShapeOf(CodeKind kind, bool sparse, const WeightsShape& given) {
  WeightsShape shape = given;
  shape.kind = kind;
  shape.sparse = sparse;
  return shape;
}

template <CodeKind kKind, typename T, ParameterUse kUse, bool kSparse = false>
struct ExpertsOf {
  /// Few rows; `sorts`: every CTA sorts the selections.
  static void Gemv(const WeightsShape& shape, int tokens, int64_t rows, bool sorts) {
    const Layer layer(ShapeOf(kKind, kSparse, shape), T::kIsBf16);
    Selected selected(tokens, true);
    const Activations x(tokens, shape.k, T::kIsBf16);
    const std::vector<float> expected = Expected(layer, x, selected);
    const auto plan =
        PlanExpertGemv(layer.Problem(rows, sorts ? OwnSortBytes(tokens) : 0), SmallCard());
    ASSERT_TRUE(plan.has_value());
    ExpertGemvArguments args = plan->arguments;
    const std::vector<int32_t> slot_of = selected.slot_of;
    args.table = layer.table.data();
    args.slots = selected.View();
    if (sorts) {
      ASSERT_LE(tokens * Selected::kTopK * kThreadsOfSelection, args.warps * 32);
      args.own_sort = {selected.ids.data(), tokens, Selected::kTopK, true, true, {0b1011}, {}};
      selected.slot_of.assign(slot_of.size(), -2);
      args.slots.token = nullptr;
    }
    args.rows.data = x.memory.data();
    args.rows.stride = x.stride;
    args.rows.type = T::kIsBf16 ? Element::kBf16 : Element::kF16;
    args.out_stride = 2 * shape.n;
    for (const uint32_t seed : {0u, 7u}) {
      std::vector<float> out(expected.size());
      args.out = out.data();
      const void* kernel = plan->octets == 1
                               ? ExpertGemvFunction<TilesOfKind<kKind, kSparse>, T, kUse, 1>()
                               : ExpertGemvFunction<TilesOfKind<kKind, kSparse>, T, kUse, 2>();
      Launch(kernel, {args.warps * 32, plan->shared_bytes, seed}, &args);
      EXPECT_EQ(out, expected) << "seed " << seed;
      EXPECT_EQ(selected.slot_of, slot_of);
    }
  }

  /// Many rows of tokens, which are gathered or already in the order of the slots.
  static void Mma(const WeightsShape& shape, int tokens, int64_t rows, bool gathered) {
    const Layer layer(ShapeOf(kKind, kSparse, shape), T::kIsBf16);
    Selected selected(tokens, true);
    const Activations x(tokens, shape.k, T::kIsBf16);
    const std::vector<float> expected = Expected(layer, x, selected);
    const auto plan = PlanExpertMma(layer.Problem(rows), false, SmallCard());
    ASSERT_TRUE(plan.has_value());
    const Activations staged = InOrder(x, selected);
    ExpertMmaArguments args = Arguments(*plan, layer, selected, gathered ? x : staged);
    args.gathered = gathered;
    args.out_stride = 2 * shape.n;
    for (const uint32_t seed : {0u, 7u}) {
      std::vector<float> out(expected.size());
      args.out = out.data();
      Launch(MmaKernelOf(args.tile_rows), {args.Threads(), plan->shared_bytes, seed}, &args);
      EXPECT_EQ(out, expected) << "tiles of " << args.tile_rows << ", seed " << seed;
    }
  }

  static void GatedMma(const WeightsShape& shape, int tokens, int64_t rows) {
    const Layer layer(ShapeOf(kKind, kSparse, shape), T::kIsBf16);
    Selected selected(tokens, false);
    const Activations x(tokens, shape.k, T::kIsBf16);
    const auto plan = PlanExpertMma(layer.Problem(rows), true, SmallCard());
    ASSERT_TRUE(plan.has_value());
    ExpertMmaArguments args = Arguments(*plan, layer, selected, x);
    args.gathered = true;
    args.gate.activation = kRelu;
    args.out_stride = StagedStride(shape.n);
    const auto stride = static_cast<size_t>(args.out_stride);
    const std::vector<float> sums = Expected(layer, x, selected);
    const auto width = static_cast<size_t>(shape.n);
    for (const uint32_t seed : {0u, 7u}) {
      std::vector<uint32_t> out(static_cast<size_t>(selected.slots()) * stride / 2);
      args.out = out.data();
      Launch(MmaKernelOf(args.tile_rows), {args.Threads(), plan->shared_bytes, seed}, &args);
      const auto* const got = reinterpret_cast<const uint16_t*>(out.data());
      for (size_t slot = 0; slot < static_cast<size_t>(selected.slots()); ++slot) {
        for (size_t n = 0; n < width; ++n) {
          const float* const row = sums.data() + slot * 2 * width + n;
          ASSERT_EQ(got[slot * stride + n], FloatToBf16(std::max(row[0], 0.0f) * row[width]))
              << "slot " << slot << ", column " << n << ", seed " << seed;
        }
      }
    }
  }

 private:
  struct Size {
    int threads;
    int shared_bytes;
    uint32_t seed;
  };

  static void Launch(const void* kernel, const Size& size, void* args) {
    void* parameters[] = {args};
    const dim3 block(static_cast<unsigned>(size.threads));
    ASSERT_EQ(cuda_emulation::EmulateUntyped(
                  kernel, {dim3(kBlocks), block, size.shared_bytes, size.seed}, parameters),
              "");
  }

  static const void* MmaKernelOf(int rows) {
    return ExpertMmaKernels::Function<TilesOfKind<kKind, kSparse>>({T::kIsBf16, kUse, rows});
  }

  static ExpertMmaArguments Arguments(const ExpertMmaPlan& plan, const Layer& layer,
                                      Selected& selected, const Activations& rows) {
    ExpertMmaArguments args = plan.arguments;
    args.table = layer.table.data();
    args.slots = selected.View();
    args.rows = rows.memory.data();
    args.row_stride = rows.stride;
    return args;
  }

  static Activations InOrder(const Activations& x, const Selected& selected) {
    Activations rows(selected.slots(), x.k, x.is_bf16);
    const auto* const from = reinterpret_cast<const uint16_t*>(x.memory.data());
    for (int slot = 0; slot < rows.m; ++slot) {
      const int token = selected.token[static_cast<size_t>(slot)];
      std::copy_n(from + token * x.stride, x.k, rows.numbers() + slot * rows.stride);
    }
    return rows;
  }
};

using enum CodeKind;

TEST(ExpertGemvKernel, TakesSortedRows) {
  ExpertsOf<kFp4, Bf16x2, ParameterUse::kOneScale>::Gemv({.k = 1100, .n = 72}, 9, 1, false);
  ExpertsOf<kFp4, F16x2, ParameterUse::kOneScale>::Gemv({.k = 384, .n = 70}, 30, 15, false);
}

TEST(ExpertGemvKernel, SortsFewSelections) {
  ExpertsOf<kInt4, Bf16x2, ParameterUse::kOneScale>::Gemv({.k = 900, .n = 40}, 7, 1, true);
  ExpertsOf<kDense16, Bf16x2, ParameterUse::kOneScale>::Gemv({.k = 2048, .n = 40}, 5, 1, true);
}

TEST(ExpertGemvKernel, ReadsEveryLayout) {
  ExpertsOf<kTable4, Bf16x2, ParameterUse::kOneScale>::Gemv({.k = 512, .n = 40}, 3, 1, true);
  ExpertsOf<kInt8, F16x2, ParameterUse::kAll>::Gemv({.k = 512, .n = 40, .zeros = ZeroKind::kBiases},
                                                    3, 1, false);
  ExpertsOf<kFp4, Bf16x2, ParameterUse::kOneScale, true>::Gemv({.k = 512, .n = 40}, 3, 1, true);
}

TEST(ExpertMmaKernel, HasEveryHeight) {
  ExpertsOf<kFp4, Bf16x2, ParameterUse::kOneScale>::Mma({.k = 300, .n = 72}, 50, 16, true);
  ExpertsOf<kFp4, F16x2, ParameterUse::kOneScale>::Mma({.k = 256, .n = 40}, 80, 30, false);
  ExpertsOf<kFp4, Bf16x2, ParameterUse::kOneScale>::Mma({.k = 256, .n = 40}, 170, 500, true);
}

TEST(ExpertMmaKernel, ActivatesGates) {
  ExpertsOf<kFp4, Bf16x2, ParameterUse::kOneScale>::GatedMma({.k = 300, .n = 72}, 50, 16);
  ExpertsOf<kInt4, Bf16x2, ParameterUse::kOneScale>::GatedMma({.k = 256, .n = 40}, 80, 30);
  ExpertsOf<kFp4, Bf16x2, ParameterUse::kOneScale>::GatedMma({.k = 128, .n = 160}, 170, 500);
}

TEST(ExpertMmaKernel, ReadsEveryLayout) {
  ExpertsOf<kTable3, Bf16x2, ParameterUse::kOneScale>::Mma({.k = 256, .n = 40}, 40, 16, true);
  ExpertsOf<kE4M3, Bf16x2, ParameterUse::kScales>::Mma({.k = 256, .n = 40, .group_size = 32}, 40,
                                                       16, false);
  ExpertsOf<kInt4, F16x2, ParameterUse::kAll>::Mma({.k = 256, .n = 40, .zeros = ZeroKind::kZeros},
                                                   40, 16, true);
  ExpertsOf<kDense16, Bf16x2, ParameterUse::kOneScale>::Mma({.k = 256, .n = 40}, 40, 16, true);
  ExpertsOf<kFp4, Bf16x2, ParameterUse::kOneScale, true>::Mma({.k = 256, .n = 40}, 40, 16, true);
}

}  // namespace
}  // namespace marlin::cuda
