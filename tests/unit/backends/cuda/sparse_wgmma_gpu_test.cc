// The WGMMA kernel on sparse tensor cores against the dense kernels on the expanded weights.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "sparse_fixture.h"

namespace marlin::sparse_wgmma_gpu_test {
namespace {

constexpr const char* kSparse = "marlin_gemm_sparse_wgmma";
constexpr const char* kDense = "marlin_gemm_wgmma";
constexpr int kWidths[] = {16, 32, 64, 96, 128, 192, 256};

std::string WithWidth(int width, int splits = 1) {
  return std::string(kSparse) + "@" + std::to_string(width) + "x" + std::to_string(splits);
}

class SparseWgmmaOnGpu : public SparseOnGpu {
 protected:
  void SetUp() override {
    SparseOnGpu::SetUp();
    if (!IsSkipped() && !Runs(kSparse)) GTEST_SKIP() << "this device does not run " << kSparse;
  }

  /// Weights as they are kept and as they are expanded, on the device.
  struct Pair {
    PreparedWeights sparse;
    PreparedWeights dense;
  };
  Pair Both(const QuantizedWeights& weights) const {
    return {Keep(weights), KeepExpanded(weights)};
  }
  void Compare(const Pair& weights, int64_t m, bool bf16, const GemmOptions& options = {},
               const std::string& on_sparse = kSparse, const std::string& on_dense = kDense) const {
    SparseOnGpu::Compare(weights.sparse, weights.dense, m, bf16, options, on_sparse, on_dense);
  }

  /// bf16 rows of Gaussian numbers.
  static std::vector<uint16_t> GaussianRows(int64_t m, int64_t k, uint32_t seed) {
    std::vector<uint16_t> rows;
    for (const float value : GaussianFloats(m * k, seed)) rows.push_back(FloatToBf16(value));
    return rows;
  }
  PreparedWeights KeepGaussian(int64_t k, int64_t n, uint32_t seed) const {
    const std::vector<float> numbers = GaussianFloats(k * n, seed);
    const Result<QuantizedWeights> weights =
        Quantize({numbers.data(), DType::kF32, {k, n}}, {.sparsity = Sparsity::k24});
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    return weights.ok() ? Keep(*weights) : PreparedWeights();
  }
};

TEST_F(SparseWgmmaOnGpu, EqualsTheExactKernelForAllPatterns) {
  if (IsSkipped()) return;
  for (const uint32_t nibble : kNibbles) {
    const Pair weights = Both(LatticeWeights(Format::kFp4E2M1, 256, 128, 128, nibble, nibble));
    Compare(weights, 40, true, {}, kSparse, "marlin_gemm_cuda_exact");
    if (HasFatalFailure()) FAIL() << "nibble " << nibble;
  }
}

TEST_F(SparseWgmmaOnGpu, EqualsDenseForAllWidthsAndTypes) {
  if (IsSkipped()) return;
  for (const Format format : {Format::kFp4E2M1, Format::kS4}) {
    for (const int64_t group : {16, 128}) {
      const Pair weights = Both(LatticeWeights(format, 1040, 392, group, 3));
      for (const int width : kWidths) {
        for (const int64_t m : {1, 17, 257}) {
          Compare(weights, m, true, {}, WithWidth(width));
          Compare(weights, m, false, {}, WithWidth(width));
          if (HasFatalFailure()) FAIL() << "tile_m " << width;
        }
      }
    }
  }
}

TEST_F(SparseWgmmaOnGpu, EqualsDenseForAllGroupsAndTails) {
  if (IsSkipped()) return;
  for (const int64_t group : {16, 32, 48, 64, 80, 128, 256, 0}) {
    for (const int64_t k : {16, 100, 128, 1000, 1022, 4096}) {
      for (const int64_t n : {1, 40, 136, 1000}) {
        const Pair weights = Both(LatticeWeights(Format::kFp4E2M1, k, n, group == 0 ? k : group,
                                                 static_cast<uint32_t>(group * 1000 + k + n)));
        for (const int64_t m : {17, 70}) {
          Compare(weights, m, m != 70);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(SparseWgmmaOnGpu, EqualsDenseInEveryTilingOfLargeShapes) {
  if (IsSkipped()) return;
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{8192, 8192},
                             {8192, 28672},
                             {14336, 4096},
                             {28672, 1024},
                             {4112, 520}}) {
    const Pair weights = Both(LatticeWeights(Format::kFp4E2M1, k, n, 128, 4));
    // Split-K in clusters and through memory, stream-K, tail launches and whole waves.
    for (const int64_t m : {20, 64, 130, 300, 1030}) {
      Compare(weights, m, true);
      if (HasFatalFailure()) return;
    }
    if (n != 1024) continue;
    for (const int splits : {2, 3, 4}) {
      Compare(weights, 64, true, {}, WithWidth(64, splits));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(SparseWgmmaOnGpu, AppliesTheEpilogue) {
  if (IsSkipped()) return;
  for (const int64_t n : {256, 400}) {
    const Pair weights = Both(LatticeWeights(Format::kFp4E2M1, 512, n, 64, 5));
    std::vector<float> numbers;
    for (int64_t i = 0; i < n; ++i) numbers.push_back(static_cast<float>(i % 7) - 3.0F);
    const DeviceBuffer bias = Upload(numbers);
    for (const int64_t m : {18, 150}) {
      std::vector<float> factors;
      for (int64_t i = 0; i < m; ++i) factors.push_back(i % 2 == 0 ? 0.5F : -2.0F);
      const DeviceBuffer row_weight = Upload(factors);
      GemmOptions options;
      options.bias = {bias.data(), DType::kF32, {n}};
      Compare(weights, m, true, options);
      options.activation = Activation::kRelu;
      options.row_weight = {row_weight.data(), DType::kF32, {m}};
      Compare(weights, m, true, options);
      options.activation = Activation::kSilu;
      options.gated = true;
      Compare(weights, m, true, options);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(SparseWgmmaOnGpu, IsSelectedAboveSixteenRowsAndNeedsNoDenseTiles) {
  if (IsSkipped()) return;
  const PreparedWeights sparse = KeepGaussian(4096, 512, 6);
  for (const Determinism determinism : {Determinism::kDefault, Determinism::kBatchInvariant}) {
    for (const int64_t m : {1, 17, 64, 300, 4096}) {
      const bool invariant = determinism == Determinism::kBatchInvariant;
      if (m == 1 && !invariant) continue;
      const DeviceBuffer a = Make(m * 4096 * 2);
      const DeviceBuffer c = Make(m * 512 * 2);
      GemmOptions options;
      options.determinism = determinism;
      const auto plan = PlanGemm(device(), {a.data(), DType::kBf16, {m, 4096}}, sparse,
                                 {c.data(), DType::kBf16, {m, 512}}, options);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      EXPECT_NE(plan->ToString().find(kSparse), std::string::npos) << plan->ToString();
      if (invariant) {
        EXPECT_EQ(plan->workspace_bytes(), 0) << plan->ToString();
      }
    }
  }
}

TEST_F(SparseWgmmaOnGpu, RowsAreBatchInvariantWhereAsked) {
  if (IsSkipped()) return;
  const PreparedWeights sparse = KeepGaussian(2064, 1040, 7);
  const std::vector<uint16_t> rows = GaussianRows(300, 2064, 8);
  GemmOptions options;
  options.determinism = Determinism::kBatchInvariant;
  const std::vector<float> all = Multiply(sparse, rows, 300, true, options);
  for (const int64_t m : {1, 16, 17, 130}) {
    const std::vector<uint16_t> first(rows.begin(), rows.begin() + m * 2064);
    const std::vector<float> some = Multiply(sparse, first, m, true, options);
    ASSERT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << m << " rows";
  }
}

TEST_F(SparseWgmmaOnGpu, RepeatsItsBits) {
  if (IsSkipped()) return;
  // Stream-K, split-K in a cluster, and a tail launch.
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{90, 10240}, {20, 1024}, {300, 8192}}) {
    constexpr int64_t kK = 4112;
    constexpr int kRepeats = 200;
    const PreparedWeights sparse = KeepGaussian(kK, n, 9);
    const std::vector<uint16_t> rows = GaussianRows(m, kK, 10);
    GemmOptions options;
    options.kernel = kSparse;
    const std::vector<float> first = Multiply(sparse, rows, m, true, options);
    const DeviceBuffer a = Upload(rows);
    const DeviceBuffer c = Make(m * n * 4);
    for (int i = 0; i < kRepeats; ++i) {
      ASSERT_TRUE(Gemm(device(), {a.data(), DType::kBf16, {m, kK}}, sparse,
                       {c.data(), DType::kF32, {m, n}}, options)
                      .ok());
      ASSERT_TRUE(device().Synchronize().ok());
      ASSERT_EQ(Download<float>(c), first) << "run " << i << " of " << m << " x " << n;
    }
  }
}

/// A pruned weight is not multiplied: a NaN reaches the outputs that have kept a weight for its k,
/// and no other row.
TEST_F(SparseWgmmaOnGpu, AppliesNanToKeptWeights) {
  if (IsSkipped()) return;
  constexpr uint32_t kFirstAndThird = 8;
  const PreparedWeights sparse =
      Keep(LatticeWeights(Format::kFp4E2M1, 256, 128, 128, 11, kFirstAndThird));
  constexpr int64_t kRows = 20;
  for (const int64_t k : {4, 5, 6, 7}) {
    std::vector<uint16_t> rows = LatticeRows(kRows * 256, true, 12);
    rows[static_cast<size_t>(3 * 256 + k)] = FloatToBf16(std::numeric_limits<float>::quiet_NaN());
    GemmOptions options;
    options.kernel = kSparse;
    const std::vector<float> got = Multiply(sparse, rows, kRows, true, options);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::isnan(got[i]), i / 128 == 3 && k % 2 == 0) << "k " << k << ", output " << i;
    }
  }
}

}  // namespace
}  // namespace marlin::sparse_wgmma_gpu_test
