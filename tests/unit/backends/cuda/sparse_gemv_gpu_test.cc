// 2:4 weights kept sparse on a GPU: their numbers, and the GEMV on sparse MMAs against the dense
// kernels on the expanded weights.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "ops/gemm/prepare_columns.h"
#include "sparse_fixture.h"

namespace marlin::sparse_gemv_gpu_test {
namespace {

class SparseGemvOnGpu : public SparseOnGpu {
 protected:
  /// The GEMV on the sparse weights against one on the dense weights for m rows.
  void Compare(const PreparedWeights& sparse, const PreparedWeights& dense, int64_t m, bool bf16,
               const GemmOptions& options = {}, const char* on_sparse = "marlin_gemv_sparse_mma",
               const char* on_dense = "marlin_gemv_mma") const {
    SparseOnGpu::Compare(sparse, dense, m, bf16, options, on_sparse, on_dense);
  }
};

TEST_F(SparseGemvOnGpu, KeepsTheWeightsInThreeQuarters) {
  if (IsSkipped()) return;
  const QuantizedWeights weights = LatticeWeights(Format::kFp4E2M1, 1024, 256, 128, 1);
  const PreparedWeights sparse = Keep(weights);
  EXPECT_EQ(sparse.spec().sparsity, Sparsity::k24);
  EXPECT_EQ(KeepExpanded(weights).bytes(), 1024 * 256 / (128 * 32) * (2048 + 64));
  EXPECT_EQ(sparse.bytes(), 1024 * 256 / (128 * 32) * (1536 + 64));
}

TEST_F(SparseGemvOnGpu, Dequantizes) {
  if (IsSkipped()) return;
  for (const Format format : {Format::kFp4E2M1, Format::kS4}) {
    const QuantizedWeights weights = LatticeWeights(format, 300, 136, 32, 2);
    const auto read = [&](const PreparedWeights& prepared) {
      const DeviceBuffer out = Make(int64_t{300} * 136 * 4);
      const Status status = Dequantize(device(), prepared, {out.data(), DType::kF32, {300, 136}});
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(device().Synchronize().ok());
      return Download<float>(out);
    };
    EXPECT_EQ(read(Keep(weights)), read(KeepExpanded(weights)));
  }
}

TEST_F(SparseGemvOnGpu, EqualsDenseForAllPatterns) {
  if (IsSkipped()) return;
  for (const uint32_t nibble : kNibbles) {
    const QuantizedWeights weights =
        LatticeWeights(Format::kFp4E2M1, 256, 128, 128, nibble, nibble);
    Compare(Keep(weights), KeepExpanded(weights), 8, true);
    if (HasFatalFailure()) FAIL() << "nibble " << nibble;
  }
}

TEST_F(SparseGemvOnGpu, EqualsDenseForAllRowsAndTypes) {
  if (IsSkipped()) return;
  for (const Format format : {Format::kFp4E2M1, Format::kS4}) {
    const QuantizedWeights weights = LatticeWeights(format, 2048, 1536, 128, 3);
    const PreparedWeights sparse = Keep(weights);
    const PreparedWeights dense = KeepExpanded(weights);
    for (int64_t m = 1; m <= 16; ++m) {
      for (const bool bf16 : {true, false}) {
        Compare(sparse, dense, m, bf16);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(SparseGemvOnGpu, EqualsDenseForAllGroupsAndTails) {
  if (IsSkipped()) return;
  for (const int64_t group : {16, 32, 48, 64, 80, 128, 256, 0}) {
    for (const int64_t k : {16, 100, 128, 1000, 1022, 4096}) {
      for (const int64_t n : {1, 40, 136, 1000}) {
        const QuantizedWeights weights =
            LatticeWeights(Format::kFp4E2M1, k, n, group == 0 ? k : group,
                           static_cast<uint32_t>(group * 1000 + k + n));
        const PreparedWeights sparse = Keep(weights);
        const PreparedWeights dense = KeepExpanded(weights);
        for (const int64_t m : {1, 7, 16}) {
          Compare(sparse, dense, m, m != 7);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(SparseGemvOnGpu, EqualsDenseInEveryTilingOfLargeShapes) {
  if (IsSkipped()) return;
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{8192, 8192},
                             {8192, 28672},
                             {28672, 1024},
                             {14336, 4096},
                             {4096, 256}}) {
    const QuantizedWeights weights = LatticeWeights(Format::kFp4E2M1, k, n, 128, 4);
    const PreparedWeights sparse = Keep(weights);
    const PreparedWeights dense = KeepExpanded(weights);
    for (const int64_t m : {1, 8, 16}) {
      Compare(sparse, dense, m, true);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(SparseGemvOnGpu, ExpandsForTheExactKernel) {
  if (IsSkipped()) return;
  for (const Format format : {Format::kFp4E2M1, Format::kS4}) {
    for (const int64_t group : {32, 128}) {
      const QuantizedWeights weights = LatticeWeights(format, 1000, 328, group, 9);
      const PreparedWeights sparse = Keep(weights);
      const PreparedWeights dense = KeepExpanded(weights);
      for (const int64_t m : {1, 16, 17, 64, 300, 1024}) {
        constexpr const char* kExact = "marlin_gemm_cuda_exact";
        Compare(sparse, dense, m, true, {}, kExact, kExact);
        if (HasFatalFailure()) FAIL() << kExact;
        // The kernels that selection takes.
        Compare(sparse, dense, m, true, {}, "", "");
        GemmOptions invariant;
        invariant.determinism = Determinism::kBatchInvariant;
        Compare(sparse, dense, m, true, invariant, "", "");
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(SparseGemvOnGpu, AppliesTheEpilogue) {
  if (IsSkipped()) return;
  const QuantizedWeights weights = LatticeWeights(Format::kFp4E2M1, 512, 256, 64, 5);
  const PreparedWeights sparse = Keep(weights);
  const PreparedWeights dense = KeepExpanded(weights);
  std::vector<float> numbers;
  for (int i = 0; i < 256; ++i) numbers.push_back(static_cast<float>(i % 7) - 3.0F);
  const DeviceBuffer bias = Upload(numbers);
  for (const int64_t m : {1, 11}) {
    GemmOptions options;
    options.bias = {bias.data(), DType::kF32, {256}};
    Compare(sparse, dense, m, true, options);
    options.activation = Activation::kRelu;
    Compare(sparse, dense, m, true, options);
    options.activation = Activation::kSilu;
    options.gated = true;
    Compare(sparse, dense, m, true, options);
    if (HasFatalFailure()) return;
  }
}

TEST_F(SparseGemvOnGpu, IsSelectedAndRepeatsItsBits) {
  if (IsSkipped()) return;
  const std::vector<float> numbers = GaussianFloats(int64_t{4096} * 512, 6);
  const Result<QuantizedWeights> weights =
      Quantize({numbers.data(), DType::kF32, {4096, 512}}, {.sparsity = Sparsity::k24});
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  const PreparedWeights sparse = Keep(*weights);
  std::vector<uint16_t> rows;
  for (const float value : GaussianFloats(int64_t{8} * 4096, 7)) {
    rows.push_back(FloatToBf16(value));
  }
  const std::vector<float> first = Multiply(sparse, rows, 8, true, {});
  constexpr int kRepeats = 1000;
  const DeviceBuffer a = Upload(rows);
  const DeviceBuffer c = Make(int64_t{8} * 512 * 4);
  const TensorView view(a.data(), DType::kBf16, {8, 4096});
  const MutableTensorView out(c.data(), DType::kF32, {8, 512});
  const auto plan = PlanGemm(device(), view, sparse, out, {});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_NE(plan->ToString().find("marlin_gemv_sparse_mma"), std::string::npos) << plan->ToString();
  for (int i = 0; i < kRepeats; ++i) {
    ASSERT_TRUE(Gemm(device(), view, sparse, out, {}).ok());
    ASSERT_TRUE(device().Synchronize().ok());
    ASSERT_EQ(Download<float>(c), first) << "run " << i;
  }
  // Sums in another order than the dense kernel's, of the same products.
  const std::vector<float> dense = Multiply(KeepExpanded(*weights), rows, 8, true, {});
  for (size_t i = 0; i < first.size(); ++i) ASSERT_NEAR(first[i], dense[i], 0.5F) << i;
}

TEST_F(SparseGemvOnGpu, ExpandsWhatHasNoSparseTiles) {
  if (IsSkipped()) return;
  const std::vector<float> numbers = GaussianFloats(int64_t{128} * 64, 8);
  const TensorView view(numbers.data(), DType::kF32, {128, 64});
  const Result<QuantizedWeights> bytes =
      Quantize(view, {.format = Format::kS8, .group_size = 32, .sparsity = Sparsity::k24});
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  const Result<PreparedWeights> prepared = Prepare(*bytes, device());
  if (!prepared.ok()) {
    GTEST_SKIP() << prepared.status().message();  // A build without the kernels of s8.
  }
  EXPECT_EQ(prepared->spec().sparsity, Sparsity::kDense);
}

class SparsityOffOnGpu : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    setenv("MARLIN_CUDA_SPARSE", "0", 1);
    GpuTest::SetUp();
    unsetenv("MARLIN_CUDA_SPARSE");
  }
};

TEST_F(SparsityOffOnGpu, Expands) {
  if (IsSkipped()) return;
  const QuantizedWeights weights = LatticeWeights(Format::kFp4E2M1, 256, 128, 128, 9);
  const Result<QuantizedWeights> dense = Expand24(weights);
  ASSERT_TRUE(dense.ok()) << dense.status().message();
  const Result<PreparedWeights> prepared = Prepare(weights, device());
  const Result<PreparedWeights> expanded = Prepare(*dense, device());
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  ASSERT_TRUE(expanded.ok()) << expanded.status().message();
  EXPECT_EQ(prepared->spec().sparsity, Sparsity::kDense);
  EXPECT_EQ(prepared->bytes(), expanded->bytes());
}

/// A device for which the variable is not set.
using SparsityByDefaultOnGpu = GpuTest<::testing::Test>;

TEST_F(SparsityByDefaultOnGpu, KeepsProductsSparseAndExpandsModels) {
  if (IsSkipped()) return;
  const QuantizedWeights weights = LatticeWeights(Format::kFp4E2M1, 256, 128, 128, 9);
  const Result<PreparedWeights> product = Prepare(weights, device());
  ASSERT_TRUE(product.ok()) << product.status().message();
  EXPECT_EQ(product->spec().sparsity, Sparsity::k24);
  const WeightColumns all{&weights, 0, 1, 128};
  const Result<PreparedWeights> layer = PrepareColumns({&all, 1}, device());
  ASSERT_TRUE(layer.ok()) << layer.status().message();
  EXPECT_EQ(layer->spec().sparsity, Sparsity::kDense);
  EXPECT_GT(layer->bytes(), product->bytes());
}

TEST_F(SparseGemvOnGpu, QuantizesActivationsForExpandedWeights) {
  if (IsSkipped()) return;
  const QuantizedWeights weights = LatticeWeights(Format::kFp4E2M1, 512, 256, 128, 10);
  const PreparedWeights sparse = Keep(weights);
  const PreparedWeights dense = KeepExpanded(weights);
  GemmOptions options;
  options.accuracy = Accuracy::kW4A8;
  for (const int64_t m : {1, 33, 300}) {
    const std::vector<uint16_t> rows = LatticeRows(m * 512, true, 11);
    EXPECT_EQ(Multiply(sparse, rows, m, true, options), Multiply(dense, rows, m, true, options));
  }
}

}  // namespace
}  // namespace marlin::sparse_gemv_gpu_test
