// 2:4 with compensated errors: fewer losses than pruning alone, at most two codes of a block.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/host_cholesky.h"
#include "base/thread_pool.h"
#include "gptq_on_cpu.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "quantize/gptq.h"

namespace marlin::sparse_gptq_test {
namespace {

struct Case {
  int64_t k;
  int64_t n;
  std::vector<float> dense;
  std::vector<double> gram;
  InputCurvature curvature;

  TensorView view() const { return {dense.data(), DType::kF32, {k, n}}; }
};

/// Gaussian weights, and inputs that are correlated and of very different sizes.
Case MakeCase(ThreadPool& pool, int64_t k, int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Case made{k, n, {}, std::vector<double>(static_cast<size_t>(k * k)), {}};
  const int64_t tokens = 4 * k;
  std::vector<double> x(static_cast<size_t>(k));
  for (int64_t t = 0; t < tokens; ++t) {
    const double shared = normal(random);
    for (int64_t i = 0; i < k; ++i) {
      x[static_cast<size_t>(i)] =
          (normal(random) + shared) * std::exp2(static_cast<double>(i % 5) - 2.0);
    }
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        made.gram[static_cast<size_t>(i * k + j)] +=
            x[static_cast<size_t>(i)] * x[static_cast<size_t>(j)] / static_cast<double>(tokens);
      }
    }
  }
  for (int64_t i = 0; i < k * n; ++i) made.dense.push_back(static_cast<float>(normal(random)));
  auto curvature = MakeCurvature(pool, HostCholesky(pool), made.gram, k);
  EXPECT_TRUE(curvature.ok()) << curvature.status().message();
  made.curvature = *std::move(curvature);
  return made;
}

std::vector<float> Decoded(const QuantizedWeights& weights) {
  const Shape shape{weights.spec.k, weights.spec.n};
  std::vector<float> out(static_cast<size_t>(shape.ElementCount()));
  EXPECT_TRUE(Dequantize(weights, {out.data(), DType::kF32, shape}).ok());
  return out;
}

/// Sum over columns of d H d^T.
double Loss(const Case& problem, const std::vector<float>& decoded) {
  double loss = 0;
  for (int64_t c = 0; c < problem.n; ++c) {
    const auto error = [&](int64_t i) {
      const auto at = static_cast<size_t>(i * problem.n + c);
      return static_cast<double>(problem.dense[at]) - static_cast<double>(decoded[at]);
    };
    for (int64_t i = 0; i < problem.k; ++i) {
      for (int64_t j = 0; j < problem.k; ++j) {
        loss += problem.gram[static_cast<size_t>(i * problem.k + j)] * error(i) * error(j);
      }
    }
  }
  return loss;
}

/// The largest number of weights of a block that are not 0.
int LargestBlock(const std::vector<float>& decoded, int64_t k, int64_t n) {
  int largest = 0;
  for (int64_t first = 0; first < k; first += 4) {
    for (int64_t c = 0; c < n; ++c) {
      int kept = 0;
      for (int64_t i = first; i < std::min(first + 4, k); ++i) {
        kept += decoded[static_cast<size_t>(i * n + c)] != 0.0f ? 1 : 0;
      }
      largest = std::max(largest, kept);
    }
  }
  return largest;
}

TEST(SparseGptq, CompensationLosesLessThanWeightsAndWeightsLessThanMagnitude) {
  ThreadPool pool(2);
  for (const int64_t k : {288, 289, 290, 291}) {
    const Case problem = MakeCase(pool, k, 37, 7);
    for (const Format format : {Format::kFp4E2M1, Format::kS4, Format::kNf4, Format::kFp8E4M3}) {
      for (const ScaleType scale : {ScaleType::kF16, ScaleType::kE8M0, ScaleType::kE4M3}) {
        SCOPED_TRACE(std::string(FormatName(format)) + " " + std::string(ScaleTypeName(scale)) +
                     " k " + std::to_string(k));
        QuantizeOptions options;
        options.format = format;
        options.scale_type = scale;
        options.group_size = 48;
        options.method = QuantizeMethod::kMse;
        const auto dense = Quantize(problem.view(), options);
        ASSERT_TRUE(dense.ok());
        const auto magnitude = Prune24(*dense);
        const auto weighted = Prune24(*dense, DiagonalOf(problem.curvature));
        options.sparsity = Sparsity::k24;
        QuantizeReport report;
        const auto compensated =
            Gptq(pool, problem.view(), options, problem.curvature, nullptr, &report);
        ASSERT_TRUE(magnitude.ok() && weighted.ok());
        ASSERT_TRUE(compensated.ok()) << compensated.status().message();
        ASSERT_TRUE(Validate(*compensated).ok());
        EXPECT_TRUE(compensated->spec == magnitude->spec);
        const std::vector<float> decoded = Decoded(*compensated);
        EXPECT_LE(LargestBlock(decoded, k, 37), 2);
        const double plain = Loss(problem, Decoded(*magnitude));
        const double better = Loss(problem, Decoded(*weighted));
        EXPECT_LT(better, 0.9 * plain);
        EXPECT_LT(Loss(problem, decoded), 0.6 * better);
      }
    }
  }
}

TEST(SparseGptq, DoesNotDependOnThreads) {
  ThreadPool one(1);
  ThreadPool many(3);
  const Case problem = MakeCase(one, 96, 70, 3);
  QuantizeOptions options;
  options.group_size = 32;
  options.sparsity = Sparsity::k24;
  const auto a = Gptq(one, problem.view(), options, problem.curvature);
  const auto b = Gptq(many, problem.view(), options, problem.curvature);
  ASSERT_TRUE(a.ok() && b.ok());
  for (const TensorView QuantizedWeights::*part :
       {&QuantizedWeights::codes, &QuantizedWeights::metadata, &QuantizedWeights::scales}) {
    EXPECT_EQ(std::memcmp(((*a).*part).data(), ((*b).*part).data(),
                          static_cast<size_t>(((*a).*part).ByteCount())),
              0);
  }
}

/// The least loss of every pattern and every pair of codes of a block, the others as they are.
double BestOfBlock(const Case& problem, std::vector<float> decoded, size_t first, float scale) {
  double best = Loss(problem, decoded);
  for (size_t pair = 0; pair < 16; ++pair) {
    const size_t p = pair / 4;
    const size_t q = pair % 4;
    for (int codes = 0; codes < 256 && p < q; ++codes) {
      const int high = codes / 16;
      std::fill_n(decoded.begin() + static_cast<std::ptrdiff_t>(first), 4, 0.0f);
      decoded[first + p] = scale * static_cast<float>(codes % 16 - 8);
      decoded[first + q] = scale * static_cast<float>(high - 8);
      best = std::min(best, Loss(problem, decoded));
    }
  }
  return best;
}

/// The descent may miss the best only by its rounding of one code after the other.
TEST(SparseGptq, HardlyAnyBlockHasABetterPattern) {
  ThreadPool pool(1);
  constexpr int64_t kK = 32;
  Case problem = MakeCase(pool, kK, 1, 11);
  QuantizeOptions options;
  options.format = Format::kS4;
  options.group_size = 0;
  options.scale_type = ScaleType::kF32;
  options.sparsity = Sparsity::k24;
  const auto weights = Gptq(pool, problem.view(), options, problem.curvature);
  ASSERT_TRUE(weights.ok());
  // The loss that was minimized is that of the damped matrix.
  for (size_t i = 0; i < problem.gram.size(); ++i) {
    problem.gram[i] = static_cast<double>(problem.curvature.hessian[i]);
  }
  const std::vector<float> decoded = Decoded(*weights);
  const double found = Loss(problem, decoded);
  const float scale = *weights->scales.As<float>();
  int better = 0;
  for (size_t first = 0; first < kK; first += 4) {
    better += BestOfBlock(problem, decoded, first, scale) < 0.98 * found ? 1 : 0;
  }
  EXPECT_LE(better, 1);
}

TEST(SparseGptq, RefusesFormatsWithout24) {
  ThreadPool pool(1);
  const Case problem = MakeCase(pool, 32, 2, 5);
  QuantizeOptions options;
  options.format = Format::kU4;
  options.sparsity = Sparsity::k24;
  EXPECT_EQ(Gptq(pool, problem.view(), options, problem.curvature).status().code(),
            Code::kUnsupported);
}

}  // namespace
}  // namespace marlin::sparse_gptq_test
