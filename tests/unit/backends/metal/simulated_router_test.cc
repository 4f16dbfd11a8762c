// The kernels of routers in the simulator: what is launched, every option and operand, errors, and
// what the host does in their place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/cpu_backend.h"
#include "backends/metal/metal_backend.h"
#include "backends/metal/moe/router_launches.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "base/scalars.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"
#include "ops/device/device.h"
#include "reference/decoder.h"

namespace marlin::metal::simulated_router_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Scoring = RouterOptions::Scoring;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

class SimulatedRouter : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_);
    opened_ = driver.status();
    if (!opened_.ok()) return;
    auto impl = std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver)));
    impl->AddHost(*cpu::OpenCpu({.threads = 1}));
    device_ = Internals::Make<Device>(std::move(impl));
  }
  static void TearDownTestSuite() { device_.reset(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
    launches_.clear();
  }

  std::vector<float> Gaussians(int64_t count, float deviation) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random_);
    return values;
  }
  /// Small integers, so that every order of their products gives the same sum.
  std::vector<float> Integers(int64_t count, int largest) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value =
          static_cast<float>(static_cast<int>(random_() % (2U * unsigned(largest) + 1)) - largest);
    }
    return values;
  }

  static Status Route(const std::vector<float>& logits, int64_t experts,
                      const RouterOptions& options, Routed* routed) {
    const auto tokens = static_cast<int64_t>(logits.size()) / experts;
    const Shape shape = Clear(tokens, options, routed);
    const Status status = RouteTokens(*device_, {logits.data(), DType::kF32, {tokens, experts}},
                                      options, {routed->ids.data(), DType::kI32, shape},
                                      {routed->weights.data(), DType::kF32, shape});
    const Status waited = device_->Synchronize();
    return status.ok() ? waited : status;
  }

  /// Room for the selections of a call, which must overwrite all of it.
  static Shape Clear(int64_t tokens, const RouterOptions& options, Routed* routed) {
    routed->ids.assign(static_cast<size_t>(tokens * options.top_k), -1);
    routed->weights.assign(routed->ids.size(), -1.0F);
    return {tokens, options.top_k};
  }

  static void ExpectReference(const std::vector<float>& logits, int64_t experts,
                              const RouterOptions& options, const Routed& routed) {
    const auto top_k = static_cast<size_t>(options.top_k);
    for (size_t token = 0; token * top_k < routed.ids.size(); ++token) {
      const auto first = logits.begin() + static_cast<int64_t>(token) * experts;
      const auto want = reference::RouteToken(std::vector<double>(first, first + experts), options);
      for (size_t i = 0; i < top_k; ++i) {
        ASSERT_EQ(routed.ids[token * top_k + i], want.ids[i]) << token << " " << i;
        ASSERT_NEAR(double{routed.weights[token * top_k + i]}, want.weights[i],
                    0x1.001p-24 * std::fabs(want.weights[i]) + 0x1p-149);
      }
    }
  }

  static std::vector<std::string> Functions() {
    std::vector<std::string> names;
    for (const SimulatedLaunch& launch : launches_) names.push_back(launch.function);
    return names;
  }

  std::mt19937 random_{11};
  inline static Status opened_;
  inline static std::vector<SimulatedLaunch> launches_;
  inline static std::optional<Device> device_;
};

TEST_F(SimulatedRouter, IsOneLaunch) {
  const std::vector<float> logits = Gaussians(3 * 40, 2.0F);
  Routed routed;
  ASSERT_TRUE(Route(logits, 40, {.top_k = 4}, &routed).ok());
  ExpectReference(logits, 40, {.top_k = 4}, routed);
  EXPECT_THAT(Functions(), ElementsAre("moe_router_topk"));
  const metal_sim::Counters& counters = launches_.front().counters;
  EXPECT_EQ(counters.threadgroups, 3);
  EXPECT_EQ(counters.threads, 3 * 32);
  EXPECT_EQ(counters.threadgroup_bytes, 13312);
  EXPECT_EQ(counters.threadgroup_barriers, 0);
  EXPECT_EQ(counters.atomics, 0);
}

TEST_F(SimulatedRouter, AgreesWithTheReference) {
  constexpr Scoring kScorings[] = {Scoring::kSoftmax, Scoring::kSoftmaxOfChosen, Scoring::kSigmoid};
  for (unsigned variant = 0; variant < 3 * 2 * 2 * 3; ++variant) {
    const int64_t experts = 72;
    const std::vector<float> bias = Gaussians(experts, 0.4F);
    RouterOptions options;
    options.scoring = kScorings[variant % 3];
    options.top_k = 40;  // More than lanes.
    options.normalize = variant / 3 % 2 == 0;
    options.scaling_factor = variant % 4 == 0 ? -0.75F : 2.5F;
    if (variant / 6 % 2 == 0) options.choice_bias = {bias.data(), DType::kF32, {experts}};
    options.groups = std::vector<int64_t>{1, 4, 36}[variant / 12];
    options.top_groups = std::vector<int64_t>{1, 3, 20}[variant / 12];
    options.best_of_group = variant % 8 < 4 ? 2 : 1;
    options.least_sum = variant % 7 < 4 ? 0.0F : 0.5F * static_cast<float>(variant % 7);
    std::vector<float> scales = Gaussians(experts, 1.0F);
    if (variant % 5 < 2) options.scales = {scales.data(), DType::kF32, {experts}};
    const std::vector<float> logits = Gaussians(5 * experts, variant % 5 == 0 ? 50.0F : 2.0F);
    Routed routed;
    const Status status = Route(logits, experts, options, &routed);
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectReference(logits, experts, options, routed);
  }
  EXPECT_EQ(launches_.size(), 36U);
}

TEST_F(SimulatedRouter, EqualAndInfiniteLogits) {
  Routed routed;
  ASSERT_TRUE(Route({1, 3, 3, 3, 0, 3}, 6, {.top_k = 3}, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 2, 3}));
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid, Scoring::kSoftmaxOfChosen}) {
    ASSERT_TRUE(Route({-kInf, 1, -kInf, -kInf}, 4, {.top_k = 3, .scoring = scoring}, &routed).ok());
    EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 0, 2}));
    // Scores that are 1 in double precision, and scores that are 0, are ties.
    ASSERT_TRUE(Route({-800, 37, 50, -720}, 4, {.top_k = 4, .scoring = scoring}, &routed).ok());
    if (scoring == Scoring::kSigmoid) {
      EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 2, 0, 3}));
    } else if (scoring == Scoring::kSoftmax) {
      EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 1, 0, 3}));
    } else {
      EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 1, 3, 0}));
    }
    // Both zeros are one logit.
    ASSERT_TRUE(Route({-0.0F, 0.0F, -0.0F}, 3, {.top_k = 3, .scoring = scoring}, &routed).ok());
    EXPECT_EQ(routed.ids, (std::vector<int32_t>{0, 1, 2}));
  }
  ASSERT_TRUE(Route({-5, -3, -4, -3.5F}, 4, {.top_k = 3}, &routed).ok());
  ExpectReference({-5, -3, -4, -3.5F}, 4, {.top_k = 3}, routed);
  // Large logits whose difference is small, and the largest float.
  ASSERT_TRUE(Route({-2050, -2040, -2049, -3e38F}, 4, {.top_k = 2}, &routed).ok());
  ExpectReference({-2050, -2040, -2049, -3e38F}, 4, {.top_k = 2}, routed);
  ASSERT_TRUE(Route({4096, 4097.5F, 3.4e38F}, 3, {.top_k = 3}, &routed).ok());
  ExpectReference({4096, 4097.5F, 3.4e38F}, 3, {.top_k = 3}, routed);
  // Infinite biases.
  const std::vector<float> bias = {-kInf, 0, kInf, -kInf};
  const RouterOptions options = {.top_k = 4, .choice_bias = {bias.data(), DType::kF32, {4}}};
  ASSERT_TRUE(Route({1, 2, 3, 4}, 4, options, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 1, 0, 3}));
}

// The least key of all rows is that of the error which the CPU reports, in any order of rows.
TEST_F(SimulatedRouter, ReportsTheFirstError) {
  Routed routed;
  std::vector<float> logits(40 * 8, 0.0F);
  const auto message = [&](const RouterOptions& options) {
    const Status status = Route(logits, 8, options, &routed);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  logits[39 * 8] = std::nanf("");
  EXPECT_THAT(message({}), HasSubstr("logits: NaN at [39, 0] (token, expert)"));
  logits[21 * 8 + 7] = kInf;
  logits[21 * 8 + 6] = std::nanf("");
  EXPECT_THAT(message({}), HasSubstr("logits: NaN at [21, 6] (token, expert)"));
  logits[21 * 8 + 5] = kInf;
  EXPECT_THAT(message({}), HasSubstr("logits: Inf at [21, 5] (token, expert)"));
  std::fill_n(logits.begin() + 20 * 8, 8, -kInf);
  EXPECT_THAT(message({}), HasSubstr("logits: expected a finite one per token, got -Inf for all 8 "
                                     "experts of token 20"));
  std::vector<float> bias(8, 0.0F);
  bias[7] = bias[3] = std::nanf("");
  EXPECT_THAT(message({.choice_bias = {bias.data(), DType::kF32, {8}}}),
              HasSubstr("choice_bias: NaN at 3"));
  // A call after it is right.
  std::fill(logits.begin(), logits.end(), 1.0F);
  EXPECT_TRUE(Route(logits, 8, {}, &routed).ok());
}

// Keys of a launch are 32 bits.
TEST(RouterError, IsThatOfTheRows) {
  const int64_t most = MostRouterRows(1024);
  EXPECT_EQ(most, 2096127);
  const RouterRows rows{5, most};
  const auto last = static_cast<uint32_t>(1024 + (most - 1) * 2049 + 2048);
  EXPECT_LT(last, kNoRouterError);
  EXPECT_THAT(RouterError(last, rows, 1024).message(), HasSubstr("of token 2096131"));
  EXPECT_THAT(RouterError(1023, rows, 1024).message(), HasSubstr("choice_bias: NaN at 1023"));
  EXPECT_THAT(RouterError(1024, rows, 1024).message(), HasSubstr("NaN at [5, 0]"));
  EXPECT_THAT(RouterError(1027, rows, 1024).message(), HasSubstr("Inf at [5, 1]"));
  EXPECT_TRUE(RouterError(kNoRouterError, rows, 1024).ok());
}

TEST_F(SimulatedRouter, HasRoomForManyExperts) {
  for (const int64_t experts : {1025, 2560}) {
    const std::vector<float> logits = Gaussians(2 * experts, 2.0F);
    const RouterOptions options = {.top_k = 7, .groups = 5, .top_groups = 2, .best_of_group = 1};
    Routed routed;
    ASSERT_TRUE(Route(logits, experts, options, &routed).ok());
    ExpectReference(logits, experts, options, routed);
  }
  EXPECT_THAT(Functions(), ElementsAre("moe_router_topk_many", "moe_router_topk_many"));
  EXPECT_LE(launches_.front().counters.threadgroup_bytes, 32768);
}

// Scales are any numbers, and the sum of the weights is used where it is not the smaller one.
TEST_F(SimulatedRouter, ScalesAreMultiplied) {
  const std::vector<float> scales = {1e-38F, kInf, -2.0F, std::nanf(""), 3e38F, -kInf};
  const RouterOptions options = {.top_k = 6,
                                 .scoring = Scoring::kSigmoid,
                                 .normalize = false,
                                 .scaling_factor = -4.0F,
                                 .scales = {scales.data(), DType::kF32, {6}}};
  Routed routed;
  ASSERT_TRUE(Route({6, 5, 4, 3, 2, -800}, 6, options, &routed).ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(routed.weights[1], -kInf);
  EXPECT_FLOAT_EQ(routed.weights[2], 8.0F / (1.0F + std::exp(-4.0F)));
  EXPECT_TRUE(std::isnan(routed.weights[3]));
  EXPECT_EQ(routed.weights[4], -kInf);
  EXPECT_TRUE(std::isnan(routed.weights[5]));
  EXPECT_EQ(launches_.size(), 1U);
}

// A router that is too large for a threadgroup, and weights that are not finite.
TEST_F(SimulatedRouter, LeavesTheRestToTheHost) {
  std::vector<float> logits = Gaussians(2 * 2561, 2.0F);
  Routed routed;
  ASSERT_TRUE(Route(logits, 2561, {.top_k = 3}, &routed).ok());
  ExpectReference(logits, 2561, {.top_k = 3}, routed);
  logits.resize(2 * 258);
  const RouterOptions grouped = {.top_k = 4, .groups = 129, .top_groups = 2};
  ASSERT_TRUE(Route(logits, 258, grouped, &routed).ok());
  ExpectReference(logits, 258, grouped, routed);
  ASSERT_TRUE(Route(logits, 258, {.scaling_factor = kInf}, &routed).ok());
  EXPECT_EQ(routed.weights[0], kInf);
  EXPECT_TRUE(launches_.empty());
  // All groups are kept, so there is nothing to remember of them.
  const RouterOptions all = {.top_k = 4, .groups = 129, .top_groups = 129};
  ASSERT_TRUE(Route(logits, 258, all, &routed).ok());
  ExpectReference(logits, 258, all, routed);
  EXPECT_EQ(launches_.size(), 1U);
}

/// A router's matrix and rows, whose products every order of sums gives exactly.
struct Hidden {
  int64_t tokens = 3;
  int64_t hidden = 200;
  int64_t experts = 20;
  Format format = Format::kBf16;
  DType x_type = DType::kF32;
  DType bias_type = DType::kF32;
  bool biased = true;
  Accuracy accuracy = Accuracy::kDefault;
  int64_t gap = 0;   ///< Elements between rows of x.
  float factor = 1;  ///< The matrix is times this.
};

class SimulatedFusedRouter : public SimulatedRouter {
 protected:
  /// Elements of f32 values in another type.
  static std::vector<std::byte> Cast(const std::vector<float>& values, DType type) {
    std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DTypeBytes(type)));
    for (size_t i = 0; i < values.size(); ++i) {
      if (type == DType::kF32) {
        reinterpret_cast<float*>(bytes.data())[i] = values[i];
      } else {
        reinterpret_cast<uint16_t*>(bytes.data())[i] =
            type == DType::kBf16 ? FloatToBf16(values[i]) : FloatToHalf(values[i]);
      }
    }
    return bytes;
  }

  /// Routes, and compares with the reference of the exact logits.
  void Check(const Hidden& h) {
    const int64_t stride = h.hidden + h.gap;
    const std::vector<float> x = Integers(h.tokens * stride, 2);
    std::vector<float> matrix = Integers(h.hidden * h.experts, h.factor == 1 ? 3 : 1);
    for (float& value : matrix) value *= h.factor;
    const std::vector<float> bias = Integers(h.experts, 1);
    std::vector<float> logits;
    for (int64_t t = 0; t < h.tokens; ++t) {
      for (int64_t e = 0; e < h.experts; ++e) {
        float sum = h.biased ? bias[static_cast<size_t>(e)] : 0.0F;
        for (int64_t k = 0; k < h.hidden; ++k) {
          sum += x[static_cast<size_t>(t * stride + k)] *
                 matrix[static_cast<size_t>(k * h.experts + e)];
        }
        logits.push_back(sum);
      }
    }
    const auto quantized = Quantize({matrix.data(), DType::kF32, {h.hidden, h.experts}},
                                    {.format = h.format, .group_size = 32});
    ASSERT_TRUE(quantized.ok()) << quantized.status().message();
    const std::vector<std::byte> rows = Cast(x, h.x_type);
    const std::vector<std::byte> biases = Cast(bias, h.bias_type);
    Router router;
    router.weights = *Prepare(*quantized, *device_);
    router.options = {.top_k = std::min<int64_t>(h.experts, 3), .scoring = Scoring::kSigmoid};
    router.accuracy = h.accuracy;
    if (h.biased) router.bias = TensorView(biases.data(), h.bias_type, {h.experts});
    Routed routed;
    const Shape shape = Clear(h.tokens, router.options, &routed);
    launches_.clear();
    const Status status = RouteHiddenStates(
        *device_, {rows.data(), h.x_type, {h.tokens, h.hidden}, {stride, 1}}, router,
        {routed.ids.data(), DType::kI32, shape}, {routed.weights.data(), DType::kF32, shape});
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectReference(logits, h.experts, router.options, routed);
  }
};

TEST_F(SimulatedFusedRouter, IsOneLaunch) {
  Check({});
  EXPECT_THAT(Functions(), ElementsAre("moe_router_topk_fused"));
  const metal_sim::Counters& counters = launches_.front().counters;
  EXPECT_EQ(counters.threads, 3 * 256);
  EXPECT_EQ(counters.threadgroup_bytes, 13312);
  EXPECT_EQ(counters.threadgroup_barriers, 3);
  // Whole strips and chunks of bf16, once per row.
  const auto codes = std::find_if(counters.buffers.begin(), counters.buffers.end(),
                                  [](const auto& buffer) { return buffer.name == "codes"; });
  ASSERT_NE(codes, counters.buffers.end());
  EXPECT_EQ(codes->bytes_read, 3 * 24 * 256 * 2);
}

TEST_F(SimulatedFusedRouter, TakesEveryTypeAndShape) {
  for (const Format format : {Format::kBf16, Format::kFp16, Format::kFp32}) {
    for (const DType type : {DType::kF32, DType::kBf16, DType::kF16}) {
      Check({.format = format, .x_type = type, .bias_type = type});
      EXPECT_THAT(Functions(), ElementsAre("moe_router_topk_fused"));
    }
  }
  // Strips of 1 to 9 by chunks, with tails; rows that cannot be loaded as vectors.
  for (const int64_t experts : {1, 8, 9, 17, 33, 64, 65, 130}) {
    for (const int64_t hidden : {1, 127, 128, 300}) {
      Check({.tokens = 2,
             .hidden = hidden,
             .experts = experts,
             .biased = experts % 2 == 0,
             .gap = experts % 4});
    }
  }
  Check({.tokens = 1, .hidden = 40, .experts = 1024});
  EXPECT_THAT(Functions(), ElementsAre("moe_router_topk_fused"));
  Check({.tokens = 1, .hidden = 40, .experts = 1030});
  EXPECT_THAT(Functions(), ElementsAre("moe_router_topk_fused_many"));
}

// Where the product is not the kernel's, a GEMM and the selection run.
TEST_F(SimulatedFusedRouter, LeavesTheRestToTheGemm) {
  Check({.tokens = 1, .accuracy = Accuracy::kExact});
  EXPECT_THAT(Functions(), ElementsAre("marlin_gemv_1", "moe_router_topk"));
  Check({.tokens = 1, .format = Format::kS8, .factor = 127});
  EXPECT_THAT(Functions(), ElementsAre("marlin_gemv_1", "moe_router_topk"));
  Check({.tokens = 1, .hidden = 16, .experts = 2561});
  EXPECT_THAT(Functions(), ElementsAre("marlin_gemv_1"));
}

// The order of sums depends on the matrix alone.
TEST_F(SimulatedFusedRouter, HasTheSameBitsForAnyNumberOfRows) {
  constexpr int64_t kHidden = 150;
  constexpr int64_t kExperts = 12;
  const std::vector<float> x = Gaussians(6 * kHidden, 1.0F);
  const std::vector<float> matrix = Gaussians(kHidden * kExperts, 1.0F);
  const auto dense =
      Quantize({matrix.data(), DType::kF32, {kHidden, kExperts}}, {.format = Format::kFp32});
  Router router;
  router.weights = *Prepare(*dense, *device_);
  router.options.top_k = kExperts;
  router.accuracy = Accuracy::kDefault;
  const auto route = [&](int64_t first, int64_t tokens) {
    Routed routed;
    const Shape shape = Clear(tokens, router.options, &routed);
    const Status status = RouteHiddenStates(
        *device_, {x.data() + first * kHidden, DType::kF32, {tokens, kHidden}}, router,
        {routed.ids.data(), DType::kI32, shape}, {routed.weights.data(), DType::kF32, shape});
    EXPECT_TRUE(status.ok()) << status.message();
    return routed.weights;
  };
  const std::vector<float> all = route(0, 6);
  for (int64_t row = 0; row < 6; ++row) {
    const std::vector<float> alone = route(row, 1);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + row * kExperts)) << row;
  }
}

TEST_F(SimulatedFusedRouter, ReportsErrors) {
  const std::vector<float> x = {1, 2, 3, std::nanf(""), 5, 6};
  const std::vector<float> matrix = {1, 1, 1, 1};
  const auto dense = Quantize({matrix.data(), DType::kF32, {2, 2}}, {.format = Format::kBf16});
  Router router;
  router.weights = *Prepare(*dense, *device_);
  router.options.top_k = 1;
  router.accuracy = Accuracy::kDefault;
  Routed routed;
  const Shape shape = Clear(3, router.options, &routed);
  const Status status = RouteHiddenStates(*device_, {x.data(), DType::kF32, {3, 2}}, router,
                                          {routed.ids.data(), DType::kI32, shape},
                                          {routed.weights.data(), DType::kF32, shape});
  EXPECT_THAT(status.message(), HasSubstr("logits: NaN at [1, 0] (token, expert)"));
  EXPECT_THAT(Functions(), ElementsAre("moe_router_topk_fused"));
}

}  // namespace
}  // namespace marlin::metal::simulated_router_test
