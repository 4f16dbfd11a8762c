#include "quantize/gptq.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "base/host_cholesky.h"
#include "base/thread_pool.h"
#include "calibrate/device_products.h"
#include "gptq_on_cpu.h"
#include "marlin/device.h"
#include "marlin/quantize.h"

namespace marlin::gptq_test {
namespace {

using Square = std::vector<double>;  // [k, k]

size_t At(int64_t k, int64_t i, int64_t j) { return static_cast<size_t>(i * k + j); }

/// Inputs [tokens, k] with correlated features of very different sizes.
std::vector<double> Inputs(int64_t tokens, int64_t k, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> x(static_cast<size_t>(tokens * k));
  for (int64_t t = 0; t < tokens; ++t) {
    const double shared = normal(random);
    for (int64_t i = 0; i < k; ++i) {
      x[At(k, t, i)] = (normal(random) + shared) * std::exp2(static_cast<double>(i % 5) - 2.0);
    }
  }
  return x;
}

/// Mean of y^T x.
Square Product(const std::vector<double>& y, const std::vector<double>& x, int64_t k) {
  const auto tokens = static_cast<int64_t>(x.size()) / k;
  Square product(static_cast<size_t>(k * k));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        product[At(k, i, j)] += y[At(k, t, i)] * x[At(k, t, j)] / static_cast<double>(tokens);
      }
    }
  }
  return product;
}

/// The inverse, by Gauss-Jordan elimination with pivots.
Square Inverse(Square a, int64_t k) {
  Square inverse(a.size());
  for (int64_t i = 0; i < k; ++i) inverse[At(k, i, i)] = 1.0;
  for (int64_t column = 0; column < k; ++column) {
    int64_t pivot = column;
    for (int64_t i = column; i < k; ++i) {
      if (std::fabs(a[At(k, i, column)]) > std::fabs(a[At(k, pivot, column)])) pivot = i;
    }
    for (int64_t j = 0; j < k; ++j) {
      std::swap(a[At(k, column, j)], a[At(k, pivot, j)]);
      std::swap(inverse[At(k, column, j)], inverse[At(k, pivot, j)]);
    }
    const double factor = a[At(k, column, column)];
    for (int64_t j = 0; j < k; ++j) {
      a[At(k, column, j)] /= factor;
      inverse[At(k, column, j)] /= factor;
    }
    for (int64_t i = 0; i < k; ++i) {
      const double other = a[At(k, i, column)];
      if (i == column || other == 0.0) continue;
      for (int64_t j = 0; j < k; ++j) {
        a[At(k, i, j)] -= other * a[At(k, column, j)];
        inverse[At(k, i, j)] -= other * inverse[At(k, column, j)];
      }
    }
  }
  return inverse;
}

Square Damped(Square h, int64_t k, double damping) {
  double mean = 0;
  for (int64_t i = 0; i < k; ++i) mean += h[At(k, i, i)] / static_cast<double>(k);
  for (int64_t i = 0; i < k; ++i) h[At(k, i, i)] += damping * mean;
  return h;
}

struct Dense {
  int64_t k;
  int64_t n;
  std::vector<float> data;
  TensorView view() const { return {data.data(), DType::kF32, {k, n}}; }
};

Dense Gaussian(int64_t k, int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 0.02F);
  Dense dense{k, n, std::vector<float>(static_cast<size_t>(k * n))};
  for (float& x : dense.data) x = normal(random);
  return dense;
}

std::vector<float> Decoded(const QuantizedWeights& weights) {
  std::vector<float> out(static_cast<size_t>(weights.spec.k * weights.spec.n));
  EXPECT_TRUE(
      Dequantize(weights, {out.data(), DType::kF32, {weights.spec.k, weights.spec.n}}).ok());
  return out;
}

/// Sum over columns of d H d^T.
double Loss(const Dense& dense, const std::vector<float>& decoded, const Square& h) {
  double loss = 0;
  for (int64_t c = 0; c < dense.n; ++c) {
    for (int64_t i = 0; i < dense.k; ++i) {
      for (int64_t j = 0; j < dense.k; ++j) {
        const auto a = static_cast<size_t>(i * dense.n + c);
        const auto b = static_cast<size_t>(j * dense.n + c);
        loss += h[At(dense.k, i, j)] * static_cast<double>(dense.data[a] - decoded[a]) *
                static_cast<double>(dense.data[b] - decoded[b]);
      }
    }
  }
  return loss;
}

TEST(LayerInputs, FeedbackGivesTheTargetsOfGptq) {
  // Published form: with U the upper factor of the inverse of H, weight i takes the nearest code of
  // what is left of it, and every later weight j loses e * U[i, j], e the error over U[i, i].
  constexpr int64_t kK = 40;
  ThreadPool pool(1);
  const std::vector<double> x = Inputs(200, kK, 1);
  const Square gram = Product(x, x, kK);
  const auto curvature = MakeCurvature(pool, HostCholesky(pool), gram, kK);
  ASSERT_TRUE(curvature.ok()) << curvature.status().message();
  const Square h = Damped(gram, kK, 0.01);
  Square ordered(h.size());
  for (int64_t i = 0; i < kK; ++i) {
    for (int64_t j = 0; j < kK; ++j) {
      ordered[At(kK, i, j)] = h[At(kK, curvature->order[static_cast<size_t>(i)],
                                   curvature->order[static_cast<size_t>(j)])];
    }
  }
  // Eliminating weight i from the inverse is what U does.
  Square inverse = Inverse(ordered, kK);
  std::vector<double> left(kK);
  std::vector<double> w(kK);
  std::mt19937 random(2);
  std::uniform_real_distribution<double> uniform(-9.0, 9.0);
  for (double& value : w) value = uniform(random);
  left = w;
  std::vector<double> errors(kK);
  for (int64_t i = 0; i < kK; ++i) {
    double target = w[static_cast<size_t>(i)];
    for (int64_t j = 0; j < i; ++j) {
      target +=
          static_cast<double>(curvature->feedback[At(kK, i, j)]) * errors[static_cast<size_t>(j)];
    }
    EXPECT_NEAR(target, left[static_cast<size_t>(i)], 1e-3) << i;
    const double code = std::nearbyint(left[static_cast<size_t>(i)]);
    errors[static_cast<size_t>(i)] = w[static_cast<size_t>(i)] - code;
    const double step = (left[static_cast<size_t>(i)] - code) / inverse[At(kK, i, i)];
    const Square row = inverse;
    for (int64_t j = i; j < kK; ++j) {
      left[static_cast<size_t>(j)] -= step * row[At(kK, i, j)];
      for (int64_t m = i; m < kK; ++m) {
        inverse[At(kK, j, m)] -= row[At(kK, j, i)] * row[At(kK, i, m)] / row[At(kK, i, i)];
      }
    }
  }
}

TEST(LayerInputs, OrderIsByDecreasingDiagonal) {
  constexpr int64_t kK = 24;
  ThreadPool pool(1);
  const std::vector<double> x = Inputs(100, kK, 3);
  const Square gram = Product(x, x, kK);
  const auto curvature = MakeCurvature(pool, HostCholesky(pool), gram, kK);
  ASSERT_TRUE(curvature.ok());
  for (size_t i = 1; i < static_cast<size_t>(kK); ++i) {
    const int64_t a = curvature->order[i - 1];
    const int64_t b = curvature->order[i];
    EXPECT_GE(gram[At(kK, a, a)], gram[At(kK, b, b)]);
  }
}

TEST(LayerInputs, CorrectionIsHalfOfTheExactOne) {
  constexpr int64_t kK = 20;
  ThreadPool pool(1);
  const std::vector<double> x = Inputs(300, kK, 4);
  std::vector<double> y = x;
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0.0, 0.1);
  for (double& value : y) value += normal(random);
  const Square gram = Product(x, x, kK);
  const Square cross = Product(y, x, kK);
  const auto correction = MakeCorrection(pool, HostCholesky(pool), gram, cross, kK);
  ASSERT_TRUE(correction.ok()) << correction.status().message();
  const Square inverse = Inverse(Damped(gram, kK, 0.02), kK);
  for (int64_t i = 0; i < kK; ++i) {
    for (int64_t j = 0; j < kK; ++j) {
      // Weight j changes by sum over i of w[i] * ((C - H) H^-1)[i, j].
      double expected = 0;
      for (int64_t m = 0; m < kK; ++m) {
        expected += (cross[At(kK, i, m)] - gram[At(kK, i, m)]) * inverse[At(kK, m, j)];
      }
      EXPECT_NEAR(correction->shift[At(kK, j, i)], 0.5 * expected, 1e-4);
    }
  }
}

TEST(LayerInputs, RefusesInputsThatTellNothing) {
  ThreadPool pool(1);
  const auto zero = MakeCurvature(pool, HostCholesky(pool), Square(16 * 16), 16);
  EXPECT_EQ(zero.status().code(), Code::kUnsupported);
  EXPECT_EQ(zero.status().message(), "all inputs of the layer are zero");
  Square indefinite(4 * 4);
  for (int64_t i = 0; i < 4; ++i) indefinite[At(4, i, i)] = i == 2 ? -1.0 : 1.0;
  const auto bad = MakeCurvature(pool, HostCholesky(pool), indefinite, 4);
  EXPECT_EQ(bad.status().code(), Code::kUnsupported);
  EXPECT_EQ(bad.status().message(), "the inputs' Gram matrix [4, 4] is not positive definite");
  Square nan = indefinite;
  nan[0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(MakeCurvature(pool, HostCholesky(pool), nan, 4).ok());
}

struct Case {
  Dense dense;
  Square gram;
  InputCurvature curvature;
};

Case MakeCase(ThreadPool& pool, int64_t k, int64_t n, unsigned seed) {
  const std::vector<double> x = Inputs(4 * k, k, seed);
  Case made{Gaussian(k, n, seed + 1), Product(x, x, k), {}};
  auto curvature = MakeCurvature(pool, HostCholesky(pool), made.gram, k);
  EXPECT_TRUE(curvature.ok());
  made.curvature = *std::move(curvature);
  return made;
}

TEST(QuantizeGptq, EveryFormatLosesLessThanMse) {
  ThreadPool pool(2);
  const Case problem = MakeCase(pool, 144, 37, 7);
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    for (const ScaleType scale :
         {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32, ScaleType::kE8M0, ScaleType::kE4M3}) {
      for (const int64_t group : {int64_t{16}, int64_t{64}, int64_t{0}}) {
        SCOPED_TRACE(std::string(info.name) + " " + std::string(ScaleTypeName(scale)) + " g" +
                     std::to_string(group));
        QuantizeOptions options;
        options.format = info.format;
        options.scale_type = scale;
        options.group_size = group;
        options.method = QuantizeMethod::kMse;
        const auto mse = Quantize(problem.dense.view(), options);
        ASSERT_TRUE(mse.ok()) << mse.status().message();
        const auto gptq = Gptq(pool, problem.dense.view(), options, problem.curvature);
        ASSERT_TRUE(gptq.ok()) << gptq.status().message();
        EXPECT_TRUE(gptq->spec == mse->spec);
        ASSERT_TRUE(Validate(*gptq).ok()) << Validate(*gptq).message();
        const double before = Loss(problem.dense, Decoded(*mse), problem.gram);
        const double after = Loss(problem.dense, Decoded(*gptq), problem.gram);
        EXPECT_LT(after, 0.85 * before);
      }
    }
  }
}

/// Codes of one weight that would lower the loss.
int BetterCodes(const Case& problem, int64_t k, int64_t n, const QuantizedWeights& weights) {
  const Square h = Damped(problem.gram, k, 0.01);
  std::vector<float> decoded = Decoded(weights);
  const double best = Loss(problem.dense, decoded, h);
  // The loss moves by d (2 g + d H[i, i]), with g the gradient of the errors.
  int better = 0;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t c = 0; c < n; ++c) {
      double gradient = 0;
      for (int64_t j = 0; j < k; ++j) {
        const auto at = static_cast<size_t>(j * n + c);
        gradient += h[At(k, i, j)] * static_cast<double>(problem.dense.data[at] - decoded[at]);
      }
      const float value = decoded[static_cast<size_t>(i * n + c)];
      const float scale = weights.scales.As<float>()[i / weights.spec.group_size * n + c];
      for (const float code : FormatValues(weights.spec.format)) {
        const auto step = static_cast<double>(value - code * scale);
        better += step * (2 * gradient + step * h[At(k, i, i)]) < -1e-4 * best ? 1 : 0;
      }
    }
  }
  return better;
}

TEST(QuantizeGptq, NoOtherCodeOfOneWeightIsBetter) {
  ThreadPool pool(1);
  // The weights of one block of products, and of several with a short last one.
  for (const int64_t k : {32, 304}) {
    SCOPED_TRACE(k);
    constexpr int64_t kN = 3;
    const Case problem = MakeCase(pool, k, kN, 11);
    QuantizeOptions options;
    options.format = Format::kNf3;
    options.group_size = 16;
    options.scale_type = ScaleType::kF32;
    const auto weights = Gptq(pool, problem.dense.view(), options, problem.curvature);
    ASSERT_TRUE(weights.ok());
    // The last round is over when every code in turn was the best; the first ones may have become
    // improvable by the last ones' moves, but hardly.
    EXPECT_LE(BetterCodes(problem, k, kN, *weights), 2);
  }
}

/// By which part of themselves scales of one sign would move to the minimum of the loss of their
/// codes: the mean over the groups that have such a scale.
double MeanMove(const Case& problem, const QuantizedWeights& weights, bool negative) {
  const auto& [k, n, data] = problem.dense;
  const Square h = Damped(problem.gram, k, 0.01);
  const std::vector<float> decoded = Decoded(weights);
  double sum = 0;
  int64_t count = 0;
  for (int64_t c = 0; c < n; ++c) {
    for (int64_t first = 0; first < k; first += weights.spec.group_size) {
      const double scale = weights.scales.As<float>()[first / weights.spec.group_size * n + c];
      if ((scale < 0) != negative) continue;
      double slope = 0;
      double curve = 0;
      for (int64_t i = first; i < first + weights.spec.group_size; ++i) {
        const double own = decoded[At(n, i, c)];
        for (int64_t j = 0; j < k; ++j) {
          const double other = decoded[At(n, j, c)];
          const bool within = j >= first && j < first + weights.spec.group_size;
          slope += own * h[At(k, i, j)] * (static_cast<double>(data[At(n, j, c)]) - other);
          curve += within ? own * h[At(k, i, j)] * other : 0.0;
        }
      }
      sum += std::fabs(slope / curve);
      ++count;
    }
  }
  EXPECT_GT(count, 40);
  return sum / static_cast<double>(count);
}

TEST(QuantizeGptq, ScalesOfEitherSignFitTheirCodes) {
  ThreadPool pool(2);
  const Case problem = MakeCase(pool, 128, 48, 17);
  QuantizeOptions options;
  options.scale_type = ScaleType::kF32;
  options.group_size = 32;
  for (const Format format : {Format::kS4, Format::kNf3, Format::kInt5}) {
    SCOPED_TRACE(std::string(FormatName(format)));
    options.format = format;
    const auto weights = Gptq(pool, problem.dense.view(), options, problem.curvature);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_LT(MeanMove(problem, *weights, true), 1.3 * MeanMove(problem, *weights, false));
  }
}

TEST(QuantizeGptq, FractionalZerosLoseLess) {
  ThreadPool pool(2);
  const Case problem = MakeCase(pool, 128, 24, 13);
  for (const Format format : {Format::kU4, Format::kInt3, Format::kInt2}) {
    QuantizeOptions options;
    options.format = format;
    options.group_size = 32;
    const auto integer = Gptq(pool, problem.dense.view(), options, problem.curvature);
    options.fractional_zeros = true;
    const auto fractional = Gptq(pool, problem.dense.view(), options, problem.curvature);
    ASSERT_TRUE(integer.ok() && fractional.ok());
    ASSERT_TRUE(Validate(*fractional).ok());
    EXPECT_LT(Loss(problem.dense, Decoded(*fractional), problem.gram),
              0.95 * Loss(problem.dense, Decoded(*integer), problem.gram));
  }
}

void ExpectSame(const QuantizedWeights& a, const QuantizedWeights& b) {
  for (const TensorView QuantizedWeights::*part :
       {&QuantizedWeights::codes, &QuantizedWeights::scales, &QuantizedWeights::zeros,
        &QuantizedWeights::global_scale}) {
    ASSERT_EQ((a.*part).empty(), (b.*part).empty());
    if ((a.*part).empty()) continue;
    ASSERT_EQ((a.*part).ByteCount(), (b.*part).ByteCount());
    EXPECT_EQ(
        std::memcmp((a.*part).data(), (b.*part).data(), static_cast<size_t>((a.*part).ByteCount())),
        0);
  }
}

TEST(QuantizeGptq, TheSameBitsWithAnyNumberOfThreads) {
  const auto run = [](int threads) {
    ThreadPool pool(threads);
    const std::vector<double> x = Inputs(500, 96, 17);
    const Square gram = Product(x, x, 96);
    const Dense dense = Gaussian(96, 200, 18);
    const auto curvature = MakeCurvature(pool, HostCholesky(pool), gram, 96);
    Square cross = gram;
    for (double& value : cross) value *= 1.01;
    const auto correction = MakeCorrection(pool, HostCholesky(pool), gram, cross, 96);
    QuantizeOptions options;
    options.format = Format::kU4;
    options.group_size = 32;
    return *Gptq(pool, dense.view(), options, *curvature, &*correction, nullptr);
  };
  const QuantizedWeights one = run(1);
  for (const int threads : {2, 16}) ExpectSame(run(threads), one);
}

TEST(QuantizeGptq, MatricesBesideOthersGetTheSameBits) {
  ThreadPool pool(2);
  DeviceProducts products(*Device::Open("cpu"), pool);
  constexpr int64_t kK = 272;
  const Case problem = MakeCase(pool, kK, 1, 23);
  // Scales with and without a global one, formats with and without zeros; tiles of 32 columns that
  // are full or not.
  std::vector<Dense> dense;
  std::vector<GptqMatrix> matrices;
  for (const int64_t n : {40, 7, 64})
    dense.push_back(Gaussian(kK, n, 24 + static_cast<unsigned>(n)));
  for (size_t i = 0; i < dense.size(); ++i) {
    QuantizeOptions options;
    options.group_size = 16;
    options.format = i == 1 ? Format::kU4 : Format::kFp4E2M1;
    options.scale_type = i == 2 ? ScaleType::kE4M3 : ScaleType::kF16;
    matrices.push_back({dense[i].view(), options});
  }
  const auto together = QuantizeGptq(pool, products, matrices, problem.curvature, nullptr);
  ASSERT_TRUE(together.ok()) << together.status().message();
  ASSERT_EQ(together->size(), matrices.size());
  // Panels of two tiles, of which some hold columns of two matrices.
  const auto panels =
      QuantizeGptq(pool, products, matrices, problem.curvature, nullptr, {kK * 64, false});
  ASSERT_TRUE(panels.ok()) << panels.status().message();
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto alone = QuantizeGptq(pool, products, {&matrices[i], 1}, problem.curvature, nullptr);
    ASSERT_TRUE(alone.ok()) << alone.status().message();
    ExpectSame((*together)[i].weights, alone->front().weights);
    ExpectSame((*panels)[i].weights, alone->front().weights);
  }
}

TEST(QuantizeGptq, MeasuresTheErrorWithTheDampedMatrix) {
  ThreadPool pool(2);
  DeviceProducts products(*Device::Open("cpu"), pool);
  constexpr int64_t kK = 272;
  const Case problem = MakeCase(pool, kK, 70, 31);
  const Square hessian(problem.curvature.hessian.begin(), problem.curvature.hessian.end());
  for (const Sparsity sparsity : {Sparsity::kDense, Sparsity::k24}) {
    QuantizeOptions options;
    options.format = Format::kS4;
    options.group_size = 48;
    options.sparsity = sparsity;
    const GptqMatrix matrix{problem.dense.view(), options};
    // One panel, and three.
    for (const int64_t panel_weights : {kGptqPanelWeights, kK * 32}) {
      const auto made = QuantizeGptq(pool, products, {&matrix, 1}, problem.curvature, nullptr,
                                     {panel_weights, true});
      ASSERT_TRUE(made.ok()) << made.status().message();
      const double expected = Loss(problem.dense, Decoded(made->front().weights), hessian);
      EXPECT_NEAR(made->front().error, expected, 1e-4 * expected);
    }
  }
}

TEST(QuantizeGptq, CountsZeroedGroupsAndNamesBadWeights) {
  ThreadPool pool(1);
  Case problem = MakeCase(pool, 32, 4, 19);
  QuantizeOptions options;
  options.format = Format::kS4;
  options.group_size = 16;
  options.tensor_name = "model.x";
  for (int64_t i = 0; i < 16; ++i) problem.dense.data[static_cast<size_t>(i * 4 + 2)] = 1e-9F;
  QuantizeReport report;
  const auto weights =
      Gptq(pool, problem.dense.view(), options, problem.curvature, nullptr, &report);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(report.zeroed_groups, 1);
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(Decoded(*weights)[static_cast<size_t>(i * 4 + 2)], 0);
  problem.dense.data[static_cast<size_t>(20 * 4 + 3)] = 1e8F;
  EXPECT_EQ(Gptq(pool, problem.dense.view(), options, problem.curvature).status().code(),
            Code::kUnsupported);
  problem.dense.data[static_cast<size_t>(20 * 4 + 3)] = std::numeric_limits<float>::infinity();
  const auto bad = Gptq(pool, problem.dense.view(), options, problem.curvature);
  EXPECT_EQ(bad.status().code(), Code::kNonFiniteInput);
  EXPECT_EQ(bad.status().message(), "tensor 'model.x': Inf at [20, 3] of [k, n]");
}

TEST(QuantizeGptq, QuantizeRefusesItWithoutInputs) {
  const Dense dense = Gaussian(32, 4, 1);
  QuantizeOptions options;
  options.method = QuantizeMethod::kGptq;
  options.tensor_name = "model.x";
  const auto weights = Quantize(dense.view(), options);
  EXPECT_EQ(weights.status().code(), Code::kUnsupported);
  EXPECT_NE(weights.status().message().find("tensor 'model.x': gptq needs the inputs"),
            std::string::npos);
}

}  // namespace
}  // namespace marlin::gptq_test
