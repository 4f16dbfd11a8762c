// The kernels of experts in the simulator: every routing, shape and format, and what is launched.
#include "simulated_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/metal_backend.h"
#include "backends/metal/moe/expert_launches.h"
#include "backends/metal/moe/expert_table.h"
#include "backends/metal/moe/expert_tiling.h"
#include "backends/metal/moe/metal_experts.h"
#include "backends/metal/runtime/error_words.h"
#include "base/scalars.h"
#include "ops/gemm/select_for.h"
#include "plan/moe/expert_slots.h"

namespace marlin::metal::simulated_experts_test {
namespace {

using ::testing::ElementsAre;

// Gate and up with the activation, then down with the weighted sum; batch invariance needs the
// sort.
TEST_F(SimulatedExperts, DecodeIsTwoLaunches) {
  Layer layer = MakeLayer({.shared = true});
  MakeSet(&layer);
  const Batch batch = MakeBatch(layer, 1, 2);
  ExpertsProblem problem = ProblemOf(batch);
  ExpectEqual(Run(layer, batch, problem), Reference(layer, batch));
  EXPECT_THAT(Functions(), ElementsAre("moe_gate_up_1", "moe_down_sum_1"));
  problem.determinism = Determinism::kBatchInvariant;
  std::vector<float> out;
  const Status status = TryRun(layer, batch, problem, &out);
  if (status.code() == Code::kUnsupported) return;  // Fast math.
  ExpectEqual(out, Reference(layer, batch));
  EXPECT_THAT(Functions(), ElementsAre("moe_sort_experts", "moe_expert_gemv_1", "moe_expert_gemv_1",
                                       "moe_sum_experts"));
}

TEST_F(SimulatedExperts, DecodeHasALaunchPerKind) {
  const auto quantized = [](Format format) {
    return QuantizeOptions{.format = format, .group_size = 32};
  };
  LayerOptions options{.hidden = 160, .inner = 72, .experts = 4, .biased = true};
  options.shared = options.shared_gate = true;
  options.quantized = quantized(Format::kFp4E2M1);
  Layer layer = MakeLayer(options);
  options.quantized = quantized(Format::kNf4);
  layer.shared = MakeMlp(options);
  layer.experts[1].down = MakeMatrix(72, 160, quantized(Format::kU4), true);
  layer.experts[2].gate = MakeMatrix(160, 144, quantized(Format::kS8), true);
  layer.experts[3].present = false;
  MakeSet(&layer);
  for (const int64_t top_k : {1, 4, 9}) {
    Batch batch = MakeBatch(layer, 1, top_k);
    for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<int32_t>(i % 4);
    ExpectClose(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    EXPECT_THAT(Functions(), ElementsAre("moe_expert_gemm_fp4", "moe_gate_up_1",
                                         "moe_shared_expert", "moe_shared_score", "moe_down_sum_1",
                                         "moe_down_sum_1", "moe_down_sum_1", "moe_sum_experts"));
  }
}

TEST_F(SimulatedExperts, FewTokensAreNotSorted) {
  Layer layer = MakeLayer({.hidden = 136, .inner = 8, .experts = 64, .apart = true});
  layer.experts[7].present = layer.experts[60].present = false;
  MakeSet(&layer);
  for (const auto& [tokens, top_k] : {std::pair<int64_t, int64_t>{62, 1}, {31, 2}, {1, 64}}) {
    const Batch batch = MakeBatch(layer, tokens, top_k);
    ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    EXPECT_THAT(Functions(), ElementsAre("moe_gate_up_1", "moe_down_sum_1"));
  }
  for (const auto& [tokens, top_k] : {std::pair<int64_t, int64_t>{63, 1}, {1, 65}}) {
    const Batch batch = MakeBatch(layer, tokens, top_k);
    ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    EXPECT_TRUE(Launched("moe_sort_experts"));
  }
}

TEST_F(SimulatedExperts, DecodeClampsAndNamesTheFirstWrongSelection) {
  Layer layer = MakeLayer({.hidden = 8, .inner = 16, .experts = 12, .biased = true});
  MakeSet(&layer);
  Batch batch = MakeBatch(layer, 3, 4);
  ExpertsProblem problem = ProblemOf(batch);
  problem.gate = {Activation::kSilu, 1.5F, 1.7F};
  ExpectClose(Run(layer, batch, problem), Reference(layer, batch, problem.gate));
  EXPECT_THAT(Functions(), ElementsAre("moe_gate_up_1", "moe_down_sum_1"));
  batch.ids[6] = 12;
  batch.ids[9] = -1;
  batch.ids[11] = 1 << 20;
  std::vector<float> out;
  EXPECT_EQ(TryRun(layer, batch, problem, &out).message(),
            "ids: token 1, selection 2: 12 is not in 0..11");
}

// Weights without scales: the kernels read nothing but codes through addresses.
TEST_F(SimulatedExperts, ReadTheWeightsOfChosenExpertsOnce) {
  Layer layer = MakeLayer({.hidden = 256, .inner = 128, .experts = 5});
  MakeSet(&layer);
  constexpr int64_t kBytesOfExpert = 3 * 256 * 128 * 2;
  for (const int64_t tokens : {1, 2, 16}) {
    // Every token selects experts 1 and 3.
    Batch batch = MakeBatch(layer, tokens, 2);
    for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = i % 2 == 0 ? 3 : 1;
    ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    int64_t bytes = 0;
    for (const SimulatedLaunch& launch : launches_) bytes += launch.counters.reached_bytes_read;
    // Few selections are not sorted, and read an expert's weights for each.
    const int64_t rows =
        tokens <= 2 ? 1 : TileExperts({tokens, 2, 5, false, false}, {}).few_tile_rows;
    EXPECT_EQ(bytes, 2 * kBytesOfExpert * ((tokens + rows - 1) / rows)) << tokens;
  }
}

TEST_F(SimulatedExperts, KeepTheirBudgets) {
  Layer layer = MakeLayer({.hidden = 64, .inner = 64, .experts = 4});
  MakeSet(&layer);
  Batch batch = MakeBatch(layer, 60, 2);
  std::fill(batch.ids.begin(), batch.ids.begin() + 80, 1);  // Both kinds of tiles.
  ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
  for (const SimulatedLaunch& launch : launches_) {
    const metal_sim::Counters& counters = launch.counters;
    if (launch.function == "moe_sort_experts") {
      EXPECT_EQ(counters.threadgroup_bytes, 1152);
      EXPECT_EQ(counters.threadgroup_barriers, 7);
    } else if (launch.function == "moe_expert_gemv_16") {
      EXPECT_EQ(counters.threadgroup_bytes, 256 * 16);
      EXPECT_LE(counters.threadgroup_barriers, counters.threadgroups);
    } else {
      EXPECT_EQ(counters.threadgroup_bytes, 0) << launch.function;
      EXPECT_EQ(counters.threadgroup_barriers, 0) << launch.function;
    }
  }
  EXPECT_TRUE(Launched("moe_expert_gemm_32x64"));
}

TEST_F(SimulatedExperts, RowsAroundTheEdgesOfTiles) {
  Layer layer = MakeLayer({.hidden = 72, .inner = 40});
  MakeSet(&layer);
  for (const int64_t rows : {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65, 129}) {
    // Expert 1 takes `rows` rows, expert 0 one, expert 2 none.
    Batch batch = MakeBatch(layer, rows + 1, 1);
    std::fill(batch.ids.begin(), batch.ids.end(), 1);
    batch.ids[batch.ids.size() / 2] = 0;
    ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    EXPECT_EQ(Launched("moe_expert_gemm"), rows >= 16) << rows;
  }
}

TEST_F(SimulatedExperts, TailsOfEveryDimension) {
  std::vector<LayerOptions> layers;
  for (const auto& [hidden, inner] :
       {std::pair<int64_t, int64_t>{1, 1}, {8, 8}, {7, 20}, {130, 72}, {136, 4}, {33, 129}}) {
    for (const bool apart : {false, true}) {
      layers.push_back({.hidden = hidden, .inner = inner, .apart = apart, .biased = false});
      layers.push_back({.hidden = hidden, .inner = inner, .apart = apart, .biased = true});
    }
  }
  for (const LayerOptions& options : layers) {
    Layer layer = MakeLayer(options);
    MakeSet(&layer);
    for (const int64_t tokens : {int64_t{1}, int64_t{2}, int64_t{35}}) {
      SCOPED_TRACE(::testing::Message() << options.hidden << " " << options.inner << " " << tokens);
      const Batch batch = MakeBatch(layer, tokens, 2);
      ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
      // Gate and up side by side can be computed together if both are whole strips.
      EXPECT_EQ(Launched("moe_gate_experts"), !options.apart && options.inner % 8 != 0);
    }
  }
}

TEST_F(SimulatedExperts, WithoutInnerFeaturesAreBiases) {
  for (const bool apart : {false, true}) {
    Layer layer = MakeLayer({.inner = 0, .experts = 2, .apart = apart, .biased = true});
    MakeSet(&layer);
    const Batch batch = MakeBatch(layer, 3, 1);
    const std::vector<float> out = Run(layer, batch, ProblemOf(batch));
    for (size_t i = 0; i < out.size(); ++i) {
      const Mlp& mlp = layer.experts[static_cast<size_t>(batch.ids[i / 24])];
      ASSERT_EQ(out[i], batch.weights[i / 24] * mlp.down.bias[i % 24]) << i;
    }
  }
}

TEST_F(SimulatedExperts, SelectionsOfSeveralBlocks) {
  Layer layer = MakeLayer({.hidden = 8, .inner = 8, .experts = 5, .shared = true});
  layer.experts[2].present = false;
  MakeSet(&layer);
  for (const int64_t tokens : {128, 129, 300}) {
    const Batch batch = MakeBatch(layer, tokens, 2);
    ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    EXPECT_EQ(Launched("moe_sort_experts"), tokens == 128);
    EXPECT_EQ(Launched("moe_scan_experts"), tokens != 128);
  }
}

TEST_F(SimulatedExperts, AThousandExpertsOfWhichMostAreElsewhere) {
  Layer layer = MakeLayer({.hidden = 8, .inner = 8});
  layer.experts.resize(1024, layer.experts[0]);
  for (size_t e = 0; e < layer.experts.size(); ++e) layer.experts[e].present = e % 3 != 1;
  layer.experts[1023] = layer.experts[2];
  MakeSet(&layer);
  for (const int64_t tokens : {int64_t{1}, int64_t{12}}) {
    Batch batch = MakeBatch(layer, tokens, 32);
    batch.ids[3] = 1023;
    batch.ids[4] = 1;
    ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
  }
}

TEST_F(SimulatedExperts, OfWhichNoneIsHere) {
  for (const bool shared : {false, true}) {
    Layer layer = MakeLayer({.shared = shared});
    for (size_t e = 0; e < 3; ++e) layer.experts[e].present = e == 2;
    MakeSet(&layer);
    Batch batch = MakeBatch(layer, 20, 5);  // More than there are.
    for (int32_t& id : batch.ids) id %= 2;
    ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
  }
}

TEST_F(SimulatedExperts, TheSharedExpertTakesEveryToken) {
  for (const bool gated : {false, true}) {
    Layer layer = MakeLayer({.experts = 2, .shared = true, .shared_gate = gated});
    MakeSet(&layer);
    for (const int64_t tokens : {1, 2, 16, 17, 40}) {
      const Batch batch = MakeBatch(layer, tokens, 1);
      ExpectClose(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    }
  }
}

TEST_F(SimulatedExperts, EveryFormatAndItsGroups) {
  for (const FormatInfo& info : AllFormats()) {
    for (const int64_t group_size : {int64_t{16}, int64_t{128}}) {
      for (const bool symmetric : {false, true}) {
        const bool has_choice = info.zero_point == ZeroPoint::kOptional;
        if (!has_choice && symmetric) continue;
        if (!info.quantized && group_size != 16) continue;
        LayerOptions options{.hidden = 160, .inner = 48, .experts = 2};
        options.quantized = QuantizeOptions{
            .format = info.format, .group_size = group_size, .symmetric = symmetric};
        SCOPED_TRACE(::testing::Message() << info.name << " " << group_size << " " << symmetric);
        Layer layer = MakeLayer(options);
        MakeSet(&layer);
        // One expert for the GEMV, one for the GEMM.
        Batch batch = MakeBatch(layer, 20, 1);
        std::fill(batch.ids.begin(), batch.ids.end(), 1);
        batch.ids[2] = batch.ids[7] = batch.ids[19] = 0;
        ExpectClose(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
        EXPECT_TRUE(Launched("moe_expert_gemm"));
        // Without sorting.
        batch = MakeBatch(layer, 1, 3);
        ExpectClose(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
        EXPECT_TRUE(Launched("moe_down_sum_1"));
      }
    }
  }
}

TEST_F(SimulatedExperts, FormatsMayDifferInOneExpertAndOneLayer) {
  LayerOptions options{.hidden = 96, .inner = 64, .experts = 4, .apart = true, .biased = true};
  options.quantized = QuantizeOptions{.format = Format::kU4, .group_size = 32};
  Layer layer = MakeLayer(options);
  const auto other = [&](Format format, ScaleType scale, int64_t k, int64_t n, bool biased) {
    return MakeMatrix(
        k, n, QuantizeOptions{.format = format, .group_size = 32, .scale_type = scale}, biased);
  };
  layer.experts[1].up = other(Format::kNf4, ScaleType::kF32, 96, 64, true);
  layer.experts[2].gate = other(Format::kFp8E4M3, ScaleType::kBf16, 96, 128, false);
  layer.experts[2].up = Matrix();
  layer.experts[2].down = other(Format::kFp4E2M1, ScaleType::kE4M3, 64, 96, true);
  layer.experts[3].up = other(Format::kU4, ScaleType::kF16, 96, 64, false);  // Without a bias.
  MakeSet(&layer);
  for (const int64_t tokens : {int64_t{3}, int64_t{50}}) {
    const Batch batch = MakeBatch(layer, tokens, 2);
    ExpectClose(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    EXPECT_TRUE(Launched("moe_gate_experts"));
  }
}

TEST_F(SimulatedExperts, SparseWeightsBesideDenseOnes) {
  for (const bool apart : {false, true}) {
    LayerOptions options{.hidden = 96, .inner = 64, .experts = 3, .apart = apart};
    options.quantized =
        QuantizeOptions{.format = Format::kS4, .group_size = 32, .sparsity = Sparsity::k24};
    Layer layer = MakeLayer(options);
    layer.experts[1].down =
        MakeMatrix(64, 96, QuantizeOptions{.format = Format::kS4, .group_size = 32}, false);
    MakeSet(&layer);
    for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{50}}) {
      SCOPED_TRACE(::testing::Message() << apart << " " << tokens);
      const Batch batch = MakeBatch(layer, tokens, 2);
      ExpectClose(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    }
  }
}

TEST_F(SimulatedExperts, SizesMayDifferInOneLayer) {
  for (const bool apart : {false, true}) {
    Layer layer = MakeLayer({.hidden = 40, .experts = 0, .apart = apart, .shared = true});
    for (const int64_t inner : {8, 72, 200}) {
      LayerOptions options = layer.options;
      options.inner = inner;
      layer.experts.push_back(MakeMlp(options));
    }
    MakeSet(&layer);
    for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{60}}) {
      const Batch batch = MakeBatch(layer, tokens, 2);
      ExpectEqual(Run(layer, batch, ProblemOf(batch)), Reference(layer, batch));
    }
  }
}

TEST_F(SimulatedExperts, ClampsKeepNans) {
  for (const bool apart : {false, true}) {
    LayerOptions options{.hidden = 8, .inner = 4, .experts = 1, .apart = apart, .biased = true};
    Layer layer = MakeLayer(options);
    MakeSet(&layer);
    Batch batch = MakeBatch(layer, 3, 1);
    ExpertsProblem problem = ProblemOf(batch);
    problem.gate = {Activation::kSilu, 1.5F, 1.7F};
    ExpectClose(Run(layer, batch, problem), Reference(layer, batch, problem.gate));
    batch.x[8] = NAN;
    const std::vector<float> out = Run(layer, batch, problem);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i / 8 == 1) << i;
  }
}

TEST_F(SimulatedExperts, UnalignedAndStridedRows) {
  Layer layer = MakeLayer({.hidden = 40});
  MakeSet(&layer);
  const Batch batch = MakeBatch(layer, 20, 2);
  const std::vector<double> expected = Reference(layer, batch);
  for (const int64_t stride : {41, 48}) {
    for (const int64_t first : {int64_t{0}, int64_t{1}}) {
      ExpertsProblem problem = ProblemOf(batch);
      problem.x_type = problem.out_type = DType::kF16;
      std::vector<uint16_t> x(static_cast<size_t>(first + 20 * stride), 0x7e00);
      std::vector<uint16_t> out(x.size(), 0x1234);
      for (size_t i = 0; i < batch.x.size(); ++i) {
        x[static_cast<size_t>(first) + i / 40 * static_cast<size_t>(stride) + i % 40] =
            FloatToHalf(batch.x[i]);
      }
      const auto plan = PlanExperts(*device_, problem, layer.set);
      const Shape rows{20, 40};
      const Status status = plan->Run({x.data() + first, DType::kF16, rows, {stride, 1}},
                                      {batch.ids.data(), DType::kI32, {20, 2}},
                                      {batch.weights.data(), DType::kF32, {20, 2}},
                                      {out.data() + first, DType::kF16, rows, {stride, 1}});
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t i = static_cast<size_t>(first); i < out.size(); ++i) {
        const size_t row = (i - static_cast<size_t>(first)) / static_cast<size_t>(stride);
        const size_t column = (i - static_cast<size_t>(first)) % static_cast<size_t>(stride);
        const uint16_t wanted =
            column < 40 ? FloatToHalf(static_cast<float>(expected[row * 40 + column])) : 0x1234;
        ASSERT_EQ(out[i], wanted) << stride << " " << i;
      }
    }
  }
}

TEST_F(SimulatedExperts, RowsHaveTheSameBitsHoweverManyThereAre) {
  LayerOptions options{.hidden = 160, .inner = 48, .experts = 3, .shared = true};
  options.quantized = QuantizeOptions{.format = Format::kU4, .group_size = 32};
  Layer layer = MakeLayer(options);
  MakeSet(&layer);
  const Batch all = MakeBatch(layer, 33, 2);
  ExpertsProblem problem = ProblemOf(all);
  problem.determinism = Determinism::kBatchInvariant;
  std::vector<float> expected;
  const Status status = TryRun(layer, all, problem, &expected);
  if (status.code() == Code::kUnsupported) GTEST_SKIP() << status.message();
  EXPECT_FALSE(Launched("moe_expert_gemm"));
  for (const int64_t tokens : {1, 2, 5, 16, 17}) {
    Batch some{tokens, 2, {}, {}, {}};
    some.x.assign(all.x.begin(), all.x.begin() + tokens * 160);
    some.ids.assign(all.ids.begin(), all.ids.begin() + tokens * 2);
    some.weights.assign(all.weights.begin(), all.weights.begin() + tokens * 2);
    problem.tokens = tokens;
    const std::vector<float> out = Run(layer, some, problem);
    EXPECT_TRUE(std::equal(out.begin(), out.end(), expected.begin())) << tokens;
  }
}

TEST_F(SimulatedExperts, NameTheFirstWrongSelection) {
  Layer layer = MakeLayer({.hidden = 8, .inner = 8});
  MakeSet(&layer);
  for (const int64_t tokens : {int64_t{4}, int64_t{300}}) {
    Batch batch = MakeBatch(layer, tokens, 2);
    const size_t first = batch.ids.size() / 2;  // Not in the last block, of several.
    batch.ids[first] = -5;
    batch.ids[first + 1] = 3;
    batch.ids.back() = 1 << 20;
    std::vector<float> out;
    const Status status = TryRun(layer, batch, ProblemOf(batch), &out);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message(),
              "ids: token " + std::to_string(tokens / 2) + ", selection 0: -5 is not in 0..2");
  }
}

/// The operands of a layer as the backend gets them; the vector has the experts'.
LayerExperts OperandsOf(const Layer& layer, std::vector<ExpertOperands>* operands) {
  const auto take = [](const Mlp& mlp) {
    ExpertOperands made;
    if (!mlp.present || !mlp.down.ready.valid()) return made;
    made.gate.weights = Internals::Storage(mlp.gate.ready);
    made.down.weights = Internals::Storage(mlp.down.ready);
    return made;
  };
  for (const Mlp& mlp : layer.experts) operands->push_back(take(mlp));
  LayerExperts experts;
  experts.experts = *operands;
  experts.shared = take(layer.shared);
  experts.hidden = layer.options.hidden;
  return experts;
}

/// The arrays of a sort of so many selections on the host.
struct HostSort {
  HostSort(const LayerExperts& layer, const Batch& batch)
      : begin(layer.experts.size() + 2),
        token(batch.ids.size() + static_cast<size_t>(batch.tokens)),
        weight(token.size()),
        slot_of(batch.ids.size()) {
    const ExpertSlots slots{static_cast<int64_t>(layer.experts.size()), begin.data(), token.data(),
                            weight.data(), slot_of.data()};
    EXPECT_TRUE(SortByExpert({batch.ids.data(), batch.weights.data(), batch.tokens, batch.top_k, 0},
                             layer, slots)
                    .ok());
    token.resize(static_cast<size_t>(slots.slots()));
  }
  std::vector<int32_t> begin;
  std::vector<int32_t> token;
  std::vector<float> weight;
  std::vector<int32_t> slot_of;
};

std::vector<int32_t> Words(const MemoryRange& range, size_t count) {
  const auto* const data = static_cast<const int32_t*>(range.data);
  return {data, data + count};
}

/// A layer's pass as ExpertLaunches takes it.
struct PlannedLayer {
  PlannedLayer(const Layer& layer, int64_t tokens, int64_t top_k, Driver& driver)
      : experts(OperandsOf(layer, &operands)), table(*ExpertTable::Make(experts, driver)) {
    planned.pass = {tokens, top_k, table->present_experts(), layer.options.shared, false};
    planned.tiling = TileExperts(planned.pass, {});
  }
  PlannedLayer(const PlannedLayer&) = delete;
  PlannedLayer& operator=(const PlannedLayer&) = delete;

  ExpertArrays Arrays(std::byte* workspace) const {
    return LayOutArrays(planned, experts, *table, workspace);
  }
  std::vector<KernelLaunch> Launches(const ExpertsProblem& problem, const ExpertsCall& call,
                                     ErrorWords::Word* error) const {
    return ExpertLaunches(planned, problem, experts, *table, call, error);
  }

  std::vector<ExpertOperands> operands;
  LayerExperts experts;
  std::shared_ptr<const ExpertTable> table;
  PlannedPass planned;
};

TEST_F(SimulatedExperts, TheSortIsTheHosts) {
  for (const auto& [tokens, top_k, count] :
       {std::array<int64_t, 3>{4, 1, 1}, {8, 32, 300}, {400, 3, 700}, {2100, 32, 40}}) {
    Layer layer = MakeLayer({.hidden = 8, .inner = 8, .experts = 1, .shared = count != 300});
    layer.experts.resize(static_cast<size_t>(count), layer.experts[0]);
    for (size_t e = 0; e < layer.experts.size(); ++e) layer.experts[e].present = e % 7 != 3;
    Batch batch = MakeBatch(layer, tokens, top_k);
    Driver& driver = DriverOf(Internals::Impl(*device_).backend());
    const PlannedLayer plan(layer, tokens, top_k, driver);
    const DriverMemory<std::byte> workspace =
        *AllocateMemory<std::byte>(driver, plan.Arrays(nullptr).bytes);
    ExpertsCall call;
    call.ids = batch.ids.data();
    call.workspace = workspace.get();
    ErrorWords::Word error{};
    std::vector<KernelLaunch> launches = plan.Launches(ProblemOf(batch), call, &error);
    std::erase_if(launches,
                  [](const KernelLaunch& each) { return each.source != "sort_experts.metal"; });
    const HostSort host(plan.experts, batch);
    ASSERT_TRUE(driver.Run(launches, nullptr).ok());
    const ExpertArrays arrays = plan.Arrays(workspace.get());
    EXPECT_EQ(Words(arrays.begin, host.begin.size()), host.begin);
    EXPECT_EQ(Words(arrays.tokens, host.token.size()), host.token);
    EXPECT_EQ(Words(arrays.slot_of, host.slot_of.size()), host.slot_of);
    EXPECT_EQ(error.selection, kernels::kNoSelection);
    // An id that is no expert, in the last block.
    batch.ids.back() = -9;
    ASSERT_TRUE(driver.Run(launches, nullptr).ok());
    EXPECT_EQ(error.selection, tokens * top_k - 1);
    EXPECT_EQ(error.id, -9);
  }
}

// The simulator's processor reads vectors at any address, a GPU does not.
TEST_F(SimulatedExperts, VectorLoadsAreForAlignedRows) {
  const Layer layer = MakeLayer({});
  const PlannedLayer plan(layer, 2, 1, DriverOf(Internals::Impl(*device_).backend()));
  ExpertsProblem problem{2, 1, DType::kF16, DType::kF32};
  const auto aligned = [&](uintptr_t address, int64_t stride) {
    ExpertsCall call;
    call.x = reinterpret_cast<const void*>(address);
    call.x_stride = stride;
    std::vector<int32_t> constants;
    for (const KernelLaunch& launch : plan.Launches(problem, call, nullptr)) {
      if (launch.source != "expert_gemm.metal") continue;
      constants.push_back(launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT]);
    }
    return constants;
  };
  // Gate and up, then down.
  EXPECT_THAT(aligned(4096, 24), ElementsAre(1, 1));
  EXPECT_THAT(aligned(4098, 24), ElementsAre(0, 1));
  EXPECT_THAT(aligned(4096, 28), ElementsAre(0, 1));
}

TEST_F(SimulatedExperts, RunsOfSeveralPassesAreOne) {
  Layer layer = MakeLayer({.hidden = 16, .inner = 8, .experts = 2, .shared = true});
  MakeSet(&layer);
  Batch batch = MakeBatch(layer, 20, 2);
  const ExpertsProblem problem = ProblemOf(batch);
  std::vector<ExpertOperands> operands;
  const LayerExperts experts = OperandsOf(layer, &operands);
  Driver& driver = DriverOf(Internals::Impl(*device_).backend());
  const SelectGemm select = [](const GemmDesc& desc) {
    return SelectFor(Internals::Impl(*device_), desc);
  };
  // 3 x 24 floats per token: passes of 9, 9 and 2 tokens.
  const auto plan = ExpertPlanner(driver).Plan(problem, experts, select, {9 * 3 * 24 * 4});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<std::byte> workspace(static_cast<size_t>((*plan)->workspace_bytes()) + 64);
  std::vector<float> out(batch.x.size());
  ExpertsCall call;
  call.x = batch.x.data();
  call.x_stride = call.out_stride = 16;
  call.ids = batch.ids.data();
  call.weights = batch.weights.data();
  call.out = out.data();
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  call.workspace = workspace.data() + (64 - address % 64) % 64;
  launches_.clear();
  Status status = (*plan)->Run(call);
  ASSERT_TRUE(status.ok()) << status.message();
  ExpectEqual(out, Reference(layer, batch));
  const std::vector<std::string> names = Functions();
  EXPECT_EQ(std::count(names.begin(), names.end(), "moe_sum_experts"), 3);
  batch.ids[2 * 18 + 1] = 2;
  status = (*plan)->Run(call);
  EXPECT_EQ(status.message(), "ids: token 18, selection 1: 2 is not in 0..1");
}

}  // namespace
}  // namespace marlin::metal::simulated_experts_test
