// The router's product and selection in one operation, against its reference and the exact GEMM.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/scalars.h"
#include "gpu_fixture.h"
#include "ops/moe/moe.h"
#include "reference/decoder.h"

namespace marlin::route_rows_gpu_test {
namespace {

using Scoring = RouterOptions::Scoring;
using ::testing::HasSubstr;

/// Operands of a router on the host; `matrix` has numbers of bf16.
struct Problem {
  int64_t tokens = 0;
  int64_t hidden = 0;
  int64_t experts = 0;
  std::vector<float> x = {};       ///< [tokens, hidden]
  std::vector<float> matrix = {};  ///< [hidden, experts]
  std::vector<float> bias = {};    ///< [experts], or empty.
  std::vector<float> choice_bias = {};
  RouterOptions options = {};
};

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  bool in_one = false;
  Status status;
};

float RoundToBf16(float value) { return Bf16ToFloat(FloatToBf16(value)); }

/// Multiples of 1/8 and of 1 whose sums are exact in fp32 in every order, with ties.
Problem Lattice(int64_t tokens, int64_t hidden, int64_t experts, uint32_t seed) {
  Problem p{tokens, hidden, experts};
  std::mt19937 bits(seed);
  const auto draw = [&](int most) {
    return static_cast<float>(static_cast<int>(bits() % static_cast<uint32_t>(2 * most + 1)) -
                              most);
  };
  for (int64_t i = 0; i < tokens * hidden; ++i) p.x.push_back(draw(2) * 0.125F);
  for (int64_t i = 0; i < hidden * experts; ++i) p.matrix.push_back(draw(1));
  for (int64_t e = 0; seed % 2 == 1 && e < experts; ++e) p.bias.push_back(draw(2));
  p.options.top_k = std::min<int64_t>(experts, 8);
  return p;
}

Problem Gaussian(int64_t tokens, int64_t hidden, int64_t experts, uint32_t seed) {
  Problem p{tokens, hidden, experts};
  p.x = GaussianFloats(tokens * hidden, seed);
  p.matrix = GaussianFloats(hidden * experts, seed + 1);
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(hidden)));
  for (float& w : p.matrix) w = RoundToBf16(w * scale);
  p.options.top_k = std::min<int64_t>(experts, 8);
  return p;
}

/// The logits of a token and the sums of their terms' magnitudes.
struct TokenLogits {
  std::vector<double> logits;
  std::vector<double> magnitudes;

  TokenLogits(const Problem& p, int64_t token)
      : logits(static_cast<size_t>(p.experts)), magnitudes(static_cast<size_t>(p.experts)) {
    for (int64_t k = 0; k < p.hidden; ++k) {
      const double x = p.x[static_cast<size_t>(token * p.hidden + k)];
      if (x == 0.0) continue;
      const float* const row = p.matrix.data() + k * p.experts;
      for (size_t e = 0; e < logits.size(); ++e) {
        logits[e] += x * static_cast<double>(row[e]);
        magnitudes[e] += std::abs(x * static_cast<double>(row[e]));
      }
    }
    for (size_t e = 0; e < p.bias.size(); ++e) logits[e] += static_cast<double>(p.bias[e]);
  }
};

class RouteRowsOnGpu : public GpuTest<::testing::Test> {
 protected:
  PreparedWeights PrepareMatrix(const Problem& p, Format format = Format::kBf16) const {
    const Result<QuantizedWeights> weights =
        Quantize({p.matrix.data(), DType::kF32, {p.hidden, p.experts}}, {.format = format});
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    if (!weights.ok()) return {};
    const Result<PreparedWeights> prepared = Prepare(*weights, device());
    EXPECT_TRUE(prepared.ok()) << prepared.status().message();
    return prepared.ok() ? *prepared : PreparedWeights();
  }

  /// Routes rows [first, first + rows); rows of every operand are padded, and guarded.
  Routed Route(const Problem& p, const PreparedWeights& matrix, int64_t first, int64_t rows) const {
    constexpr int64_t kPadding = 4;
    constexpr int32_t kGuard = 0x55555555;
    const int64_t x_stride = p.hidden + kPadding;
    const int64_t stride = p.options.top_k + kPadding;
    std::vector<float> x(static_cast<size_t>(rows * x_stride),
                         std::numeric_limits<float>::quiet_NaN());
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(p.x.begin() + (first + r) * p.hidden, p.hidden, x.begin() + r * x_stride);
    }
    const std::vector<int32_t> guards(static_cast<size_t>(rows * stride), kGuard);
    const std::vector<int32_t> logit_guards(static_cast<size_t>(rows * p.experts + kPadding),
                                            kGuard);
    const DeviceBuffer x_memory = Upload(x);
    const DeviceBuffer ids = Upload(guards);
    const DeviceBuffer weights = Upload(guards);
    const DeviceBuffer logits = Upload(logit_guards);
    const DeviceBuffer bias = p.bias.empty() ? DeviceBuffer() : Upload(p.bias);
    const DeviceBuffer choice = p.choice_bias.empty() ? DeviceBuffer() : Upload(p.choice_bias);
    Router router{matrix, {}, p.options, Accuracy::kDefault};
    if (!p.bias.empty()) router.bias = {bias.data(), DType::kF32, {p.experts}};
    if (!p.choice_bias.empty()) {
      router.options.choice_bias = {choice.data(), DType::kF32, {p.experts}};
    }
    const Shape shape{rows, p.options.top_k};
    const Result<bool> in_one =
        RouteInOne(device(), {x_memory.data(), DType::kF32, {rows, p.hidden}, {x_stride, 1}},
                   router, {logits.data(), DType::kF32, {rows, p.experts}},
                   {ids.data(), DType::kI32, shape, {stride, 1}},
                   {weights.data(), DType::kF32, shape, {stride, 1}}, nullptr);
    Routed routed;
    const Status waited = device().Synchronize();
    routed.status = in_one.ok() ? waited : in_one.status();
    routed.in_one = in_one.ok() && *in_one;
    const std::vector<int32_t> got_ids = Download<int32_t>(ids);
    const std::vector<float> got_weights = Download<float>(weights);
    const std::vector<int32_t> as_words = Download<int32_t>(weights);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < stride; ++i) {
        const auto at = static_cast<size_t>(r * stride + i);
        if (i < p.options.top_k) {
          routed.ids.push_back(got_ids[at]);
          routed.weights.push_back(got_weights[at]);
        } else {
          EXPECT_EQ(got_ids[at], kGuard) << "ids: wrote behind row " << r;
          EXPECT_EQ(as_words[at], kGuard) << "weights: wrote behind row " << r;
        }
      }
    }
    const std::vector<int32_t> got_logits = Download<int32_t>(logits);
    for (size_t i = got_logits.size() - kPadding; i < got_logits.size(); ++i) {
      EXPECT_EQ(got_logits[i], kGuard) << "logits: wrote behind them";
    }
    return routed;
  }

  /// The selections are those of the reference's logits, which are exact; weights are rounded once.
  void ExpectReference(const Problem& p) const {
    const Routed routed = Route(p, PrepareMatrix(p), 0, p.tokens);
    ASSERT_TRUE(routed.status.ok()) << routed.status.message();
    ASSERT_TRUE(routed.in_one);
    RouterOptions options = p.options;
    if (!p.choice_bias.empty()) {
      options.choice_bias = {p.choice_bias.data(), DType::kF32, {p.experts}};
    }
    // Every token of a small problem, else those at the ends of blocks.
    const int64_t step = p.tokens * p.hidden * p.experts > (int64_t{1} << 28) ? 31 : 1;
    for (int64_t token = 0; token < p.tokens; token += step) {
      const auto want = reference::RouteToken(TokenLogits(p, token).logits, options);
      for (int64_t i = 0; i < options.top_k; ++i) {
        const auto at = static_cast<size_t>(token * options.top_k + i);
        ASSERT_EQ(routed.ids[at], want.ids[static_cast<size_t>(i)])
            << p.tokens << " x " << p.hidden << " x " << p.experts << ": token " << token;
        ASSERT_NEAR(static_cast<double>(routed.weights[at]), want.weights[static_cast<size_t>(i)],
                    3e-7 * std::max(1.0, want.weights[static_cast<size_t>(i)]));
      }
    }
  }

  /// The same of 160 experts with these options, for decode and prefill.
  void ExpectReferenceWith(const RouterOptions& options, uint32_t seed) const {
    for (const int64_t tokens : {1, 11, 70}) {
      Problem p = Lattice(tokens, 256, 160, seed++);
      // Small scores, so that the rounding of exp does not decide ties.
      for (float& x : p.x) x *= 0.25F;
      p.options = options;
      if (options.scoring == Scoring::kSigmoid) p.choice_bias = GaussianFloats(p.experts, seed);
      ExpectReference(p);
      if (HasFatalFailure()) return;
    }
  }

  /// Sigmoids of all logits within the error of the product: (8 u_mma + (t + P + 2) u) of the sum
  /// of magnitudes, and a rounding.
  void ExpectWithinError(Problem p) const {
    p.options = {};
    p.options.top_k = p.experts;
    p.options.scoring = Scoring::kSigmoid;
    p.options.normalize = false;
    const Routed routed = Route(p, PrepareMatrix(p), 0, p.tokens);
    ASSERT_TRUE(routed.status.ok()) << routed.status.message();
    ASSERT_TRUE(routed.in_one);
    const double tiles = std::ceil(std::ceil(static_cast<double>(p.hidden) / 128.0) / 8.0);
    const double unit = std::ldexp(16.0 + tiles + 8.0 + 2.0, -24);
    for (int64_t token = 0; token < p.tokens; ++token) {
      const TokenLogits want(p, token);
      for (int64_t i = 0; i < p.experts; ++i) {
        const auto at = static_cast<size_t>(token * p.experts + i);
        const auto e = static_cast<size_t>(routed.ids[at]);
        ASSERT_LT(e, want.logits.size());
        const double sigmoid = 1.0 / (1.0 + std::exp(-want.logits[e]));
        const double bound =
            sigmoid * (1.0 - sigmoid) * unit * want.magnitudes[e] * 1.01 + std::ldexp(1.0, -24);
        ASSERT_NEAR(static_cast<double>(routed.weights[at]), sigmoid, bound)
            << "token " << token << ", expert " << e;
      }
    }
  }
};

TEST_F(RouteRowsOnGpu, IsExactOnALattice) {
  if (IsSkipped()) return;
  uint32_t seed = 1;
  for (const int64_t experts : {1, 8, 60, 64, 128, 160, 256, 384, 512}) {
    for (const int64_t hidden : {4, 128, 1024, 1156, 2048, 2880, 7168}) {
      for (const int64_t tokens : {1, 7, 8, 9, 64, 65, 150}) {
        if (tokens > 9 && hidden * experts > 2048 * 128) continue;
        ExpectReference(Lattice(tokens, hidden, experts, seed++));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RouteRowsOnGpu, IsExactOnALatticeOfManyRows) {
  if (IsSkipped()) return;
  uint32_t seed = 1;
  for (const auto& [hidden, experts] : {std::pair<int64_t, int64_t>{2048, 128},
                                        {1024, 8},
                                        {2880, 32},
                                        {2048, 512},
                                        {7168, 256},
                                        {7168, 384}}) {
    for (const int64_t tokens : {300, 2049, 4097}) {
      ExpectReference(Lattice(tokens, hidden, experts, seed++));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RouteRowsOnGpu, RoutesAsEveryOption) {
  if (IsSkipped()) return;
  uint32_t seed = 2;
  RouterOptions options;
  options.top_k = 8;
  options.scaling_factor = 2.5F;
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSoftmaxOfChosen, Scoring::kSigmoid}) {
    options.scoring = scoring;
    for (const bool normalize : {false, true}) {
      options.normalize = normalize;
      for (const int64_t groups : {1, 8}) {
        options.groups = groups;
        options.top_groups = groups == 1 ? 1 : 3;
        ExpectReferenceWith(options, seed);
        if (HasFatalFailure()) return;
        seed += 3;
      }
    }
  }
}

/// A row of one number: a term that is lost, or at another k, is seen at once.
TEST_F(RouteRowsOnGpu, KeepsEveryBitOfARow) {
  if (IsSkipped()) return;
  for (const int64_t tokens : {8, 200}) {
    Problem p = Gaussian(tokens, 2052, 128, 3);
    for (float& w : p.matrix) w = RoundToBf16(w * 45.0F);
    const std::vector<float> numbers = GaussianFloats(tokens, 4);
    std::fill(p.x.begin(), p.x.end(), 0.0F);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t k = t == 0 ? p.hidden - 1 : (t * 97 + 13) % p.hidden;
      p.x[static_cast<size_t>(t * p.hidden + k)] = numbers[static_cast<size_t>(t)];
    }
    ExpectWithinError(p);
  }
}

TEST_F(RouteRowsOnGpu, StaysWithinItsError) {
  if (IsSkipped()) return;
  uint32_t seed = 5;
  for (const auto& [hidden, experts] :
       {std::pair<int64_t, int64_t>{2048, 128}, {1024, 60}, {2880, 32}, {7168, 256}, {2048, 512}}) {
    for (const int64_t tokens : {8, 65}) {
      Problem p = Gaussian(tokens, hidden, experts, seed++);
      ExpectWithinError(p);
      if (HasFatalFailure()) return;
      // Sums of positive numbers show a term that is lost.
      for (float& x : p.x) x = std::abs(x);
      for (float& w : p.matrix) w = RoundToBf16(std::abs(w) * 0.05F);
      ExpectWithinError(p);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RouteRowsOnGpu, RowsDoNotDependOnOthers) {
  if (IsSkipped()) return;
  for (const auto& [hidden, experts] :
       {std::pair<int64_t, int64_t>{2048, 128}, {2880, 32}, {2048, 512}, {7168, 256}}) {
    const Problem p = Gaussian(4097, hidden, experts, 7);
    const PreparedWeights matrix = PrepareMatrix(p);
    const Routed all = Route(p, matrix, 0, p.tokens);
    ASSERT_TRUE(all.in_one);
    for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 1},
                                      {4096, 1},
                                      {5, 8},
                                      {3, 64},
                                      {77, 65},
                                      {1000, 1001},
                                      {1, 2112},
                                      {0, 2113}}) {
      const Routed part = Route(p, matrix, first, rows);
      ASSERT_TRUE(part.status.ok()) << part.status.message();
      const auto at = static_cast<std::ptrdiff_t>(first * p.options.top_k);
      EXPECT_TRUE(std::equal(part.ids.begin(), part.ids.end(), all.ids.begin() + at))
          << hidden << " x " << experts << ": ids of " << rows << " rows from " << first;
      EXPECT_TRUE(std::equal(part.weights.begin(), part.weights.end(), all.weights.begin() + at))
          << hidden << " x " << experts << ": weights of " << rows << " rows from " << first;
    }
  }
}

TEST_F(RouteRowsOnGpu, RepeatsItsBits) {
  if (IsSkipped()) return;
  for (const int64_t tokens : {8, 61, 300}) {
    const Problem p = Gaussian(tokens, 7168, 256, 8);
    const PreparedWeights matrix = PrepareMatrix(p);
    const Routed first = Route(p, matrix, 0, tokens);
    for (int i = 0; i < 100; ++i) {
      const Routed again = Route(p, matrix, 0, tokens);
      ASSERT_EQ(again.ids, first.ids) << "repetition " << i;
      ASSERT_EQ(again.weights, first.weights) << "repetition " << i;
    }
  }
}

TEST_F(RouteRowsOnGpu, TellsLogitsThatCannotBeRouted) {
  if (IsSkipped()) return;
  for (const int64_t tokens : {1, 9, 100}) {
    Problem p = Gaussian(tokens, 2048, 128, 9);
    const PreparedWeights matrix = PrepareMatrix(p);
    const int64_t bad = tokens * 2 / 3;
    const auto at = static_cast<size_t>(bad * p.hidden + 130);
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const float before = std::exchange(p.x[at], value);
      const Status status = Route(p, matrix, 0, tokens).status;
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_THAT(status.message(), HasSubstr("NaN at [" + std::to_string(bad) + ", 0]"));
      p.x[at] = before;
    }
    p.choice_bias.assign(static_cast<size_t>(p.experts), 0.0F);
    p.choice_bias[77] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_THAT(Route(p, matrix, 0, tokens).status.message(), HasSubstr("NaN at 77"));
    p.choice_bias.clear();
    EXPECT_TRUE(Route(p, matrix, 0, tokens).status.ok());
  }
}

TEST_F(RouteRowsOnGpu, LargestNumbersHaveTerms) {
  if (IsSkipped()) return;
  Problem p = Lattice(9, 256, 64, 10);
  std::fill(p.x.begin(), p.x.end(), 0.0F);
  for (float& w : p.matrix) w *= 0x1p-126F;
  for (int64_t t = 0; t < p.tokens; ++t) {
    p.x[static_cast<size_t>(t * p.hidden + 3 * t)] = std::numeric_limits<float>::max();
  }
  ExpectReference(p);
}

TEST_F(RouteRowsOnGpu, LeavesTheRestToTheExactGemm) {
  if (IsSkipped()) return;
  const Problem p = Lattice(5, 256, 64, 12);
  for (const Format format : {Format::kFp16, Format::kFp32, Format::kFp4E2M1}) {
    EXPECT_FALSE(Route(p, PrepareMatrix(p, format), 0, p.tokens).in_one) << FormatName(format);
  }
  const Problem odd = Lattice(5, 254, 64, 13);
  EXPECT_FALSE(Route(odd, PrepareMatrix(odd), 0, odd.tokens).in_one);
  const Problem wide = Lattice(5, 256, 513, 14);
  EXPECT_FALSE(Route(wide, PrepareMatrix(wide), 0, wide.tokens).in_one);
}

/// The public call takes the operation or the exact GEMM, with the same selections on a lattice.
TEST_F(RouteRowsOnGpu, TheCallOfUsersRoutesTheSame) {
  if (IsSkipped()) return;
  for (const int64_t tokens : {3, 130}) {
    const Problem p = Lattice(tokens, 2048, 128, 15);
    const DeviceBuffer x = Upload(p.x);
    const DeviceBuffer bias = Upload(p.bias);
    const PreparedWeights matrix = PrepareMatrix(p);
    std::vector<std::vector<int32_t>> ids;
    std::vector<std::vector<float>> weights;
    for (const Accuracy accuracy : {Accuracy::kDefault, Accuracy::kExact}) {
      const Router router{matrix, {bias.data(), DType::kF32, {p.experts}}, p.options, accuracy};
      const Shape shape{tokens, p.options.top_k};
      const DeviceBuffer to_ids = Make(shape.ElementCount() * 4);
      const DeviceBuffer to_weights = Make(shape.ElementCount() * 4);
      const Status status = RouteHiddenStates(device(), {x.data(), DType::kF32, {tokens, p.hidden}},
                                              router, {to_ids.data(), DType::kI32, shape},
                                              {to_weights.data(), DType::kF32, shape});
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(device().Synchronize().ok());
      ids.push_back(Download<int32_t>(to_ids));
      weights.push_back(Download<float>(to_weights));
    }
    EXPECT_EQ(ids[0], ids[1]);
    EXPECT_EQ(weights[0], weights[1]);
  }
}

}  // namespace
}  // namespace marlin::route_rows_gpu_test
