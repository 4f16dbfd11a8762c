#include "quantize/gptq_tile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "marlin/layout.h"

namespace marlin::gptq_tile_test {
namespace {

constexpr int64_t kK = 192;
constexpr int64_t kN = 5;
constexpr int64_t kGroup = 16;

/// A matrix, H of correlated inputs, and a tile whose groups have their first scales.
struct Case {
  Case() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(2 * kK * kK));
    for (int64_t t = 0; t < 2 * kK; ++t) {
      const float shared = normal(random);
      for (int64_t i = 0; i < kK; ++i) x[static_cast<size_t>(t * kK + i)] = normal(random) + shared;
    }
    h.resize(static_cast<size_t>(kK * kK));
    for (int64_t i = 0; i < kK; ++i) {
      for (int64_t j = 0; j < kK; ++j) {
        for (int64_t t = 0; t < 2 * kK; ++t) {
          h[static_cast<size_t>(i * kK + j)] +=
              x[static_cast<size_t>(t * kK + i)] * x[static_cast<size_t>(t * kK + j)] / (2 * kK);
        }
      }
    }
    importance.resize(kK);
    for (size_t i = 0; i < kK; ++i) importance[i] = h[i * kK + i];
    dense.resize(static_cast<size_t>(kK * kN));
    for (float& w : dense) w = normal(random);
    options.format = Format::kNf3;
    options.group_size = kGroup;
    options.scale_type = ScaleType::kF32;
    spec = *QuantizedSpec({kK, kN}, options);
    buffer = *AllocateWeights(spec);
    order.resize(kK);
    std::iota(order.begin(), order.end(), 0);
    problem.emplace(GptqProblem{options, spec, encoder, rule, importance, &buffer, kK / kGroup});
    tile = std::make_unique<GptqTile>(*problem, 0);
    int64_t zeroed = 0;
    EXPECT_TRUE(
        tile->Load(MatrixOfExpert(TensorView(dense.data(), DType::kF32, {kK, kN}), 0)).ok());
    EXPECT_TRUE(tile->Begin(coder, &zeroed).ok());
  }

  /// Takes a step for all weights, so many at a time.
  void Run(int64_t weights, const std::function<void(GptqTile&, const GptqBlock&)>& step) {
    for (int64_t first = 0; first < kK; first += weights) {
      const int64_t count = std::min(weights, kK - first);
      const std::vector<float> errors = Errors();
      std::vector<float> factors;
      std::vector<float> products(static_cast<size_t>(kN * count));
      for (int64_t i = 0; i < count; ++i) {
        const float* const row = h.data() + (first + i) * kK;
        factors.insert(factors.end(), row + first, row + first + count);
        for (int64_t c = 0; c < kN; ++c) {
          const double sum = std::inner_product(row, row + kK, errors.data() + c * kK, 0.0);
          products[static_cast<size_t>(c * count + i)] = static_cast<float>(sum);
        }
      }
      std::vector<float> after(products.size());
      const std::span<const int32_t> all(order);
      step(*tile, {all.subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                   factors.data(), products.data(), after.data()});
      const std::vector<float> now = Errors();
      for (int64_t c = 0; c < kN; ++c) {
        for (int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(after[static_cast<size_t>(c * count + i)],
                    now[static_cast<size_t>(c * kK + first + i)]);
        }
      }
    }
  }

  /// [kN, kK]
  std::vector<float> Errors() const {
    std::vector<float> errors(static_cast<size_t>(kN * kK));
    tile->GatherErrors(order, errors.data());
    return errors;
  }

  std::vector<float> h;
  std::vector<float> importance;
  std::vector<float> dense;
  QuantizeOptions options;
  WeightsSpec spec;
  WeightsBuffer buffer;
  std::vector<int32_t> order;
  Encoder encoder{Format::kNf3, {}};
  ScaleRule rule{encoder, false};
  ScaleCoder coder{ScaleType::kF32};
  std::optional<GptqProblem> problem;
  std::unique_ptr<GptqTile> tile;
};

int Different(const std::vector<float>& a, const std::vector<float>& b) {
  int count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += std::fabs(a[i] - b[i]) > 1e-3F ? 1 : 0;
  return count;
}

/// A weight whose products are brought up to date inside of a block gets the code that it gets
/// where every block has one weight; one or another code may differ by rounding.
TEST(GptqTile, BlocksOfAnySizeTakeTheSameSteps) {
  const auto sweep = [](GptqTile& tile, const GptqBlock& block) { tile.Sweep(block); };
  const auto descend = [](GptqTile& tile, const GptqBlock& block) { tile.Descend(block); };
  Case single;
  Case blocks;
  single.Run(1, descend);
  blocks.Run(80, descend);
  EXPECT_LE(Different(single.Errors(), blocks.Errors()), 3);
  Case single_sweep;
  Case blocks_sweep;
  single_sweep.Run(1, sweep);
  blocks_sweep.Run(80, sweep);
  EXPECT_LE(Different(single_sweep.Errors(), blocks_sweep.Errors()), 3);
  EXPECT_GT(Different(single_sweep.Errors(), single.Errors()), 50);
}

TEST(GptqTile, GroupsOfOneBlockSeeEachOthersMoves) {
  Case single;
  Case blocks;
  for (Case* each : {&single, &blocks}) {
    each->Run(1, [](GptqTile& tile, const GptqBlock& block) { tile.Descend(block); });
  }
  ASSERT_EQ(single.Errors(), blocks.Errors());
  const std::vector<float> before = single.Errors();
  single.Run(kGroup, [&](GptqTile& tile, const GptqBlock& block) {
    tile.AdjustGroups(single.coder, block);
  });
  blocks.Run(8 * kGroup, [&](GptqTile& tile, const GptqBlock& block) {
    tile.AdjustGroups(blocks.coder, block);
  });
  EXPECT_EQ(Different(single.Errors(), blocks.Errors()), 0);
  EXPECT_GT(Different(before, single.Errors()), 50);
}

}  // namespace
}  // namespace marlin::gptq_tile_test
