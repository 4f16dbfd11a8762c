// GEMMs of 2:4 weights: on every device that is there the same bits as those of the dense weights
// with the same numbers, and the sums of the double-precision reference on data whose sums are
// exact.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "layout/weights_buffer.h"
#include "marlin/gemm.h"
#include "marlin/layout.h"
#include "ops/gemm/prepare_columns.h"
#include "reference/dequantize.h"

namespace marlin::sparse_gemm_test {
namespace {

constexpr uint32_t kNibbles[] = {4, 8, 9, 12, 13, 14};

/// Weights with random codes, every pattern, and scales that are powers of two.
QuantizedWeights Lattice(Format format, int64_t experts, int64_t k, int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  auto buffer = AllocateWeights({.format = format,
                                 .experts = experts,
                                 .k = k,
                                 .n = n,
                                 .group_size = 16,
                                 .sparsity = Sparsity::k24});
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  const QuantizedWeights& weights = buffer->weights;
  auto* const codes = static_cast<uint32_t*>(buffer->codes);
  for (int64_t i = 0; i < weights.codes.ElementCount(); ++i) {
    codes[i] = static_cast<uint32_t>(random());
    // All magnitudes of e4m3 together would need more than 24 bits of sums.
    if (GetFormatInfo(format).bits == 8) codes[i] &= 0x83838383u;
  }
  auto* const metadata = static_cast<uint32_t*>(buffer->metadata);
  for (int64_t i = 0; i < weights.metadata.ElementCount(); ++i) {
    metadata[i] = 0;
    for (int j = 0; j < 8; ++j) metadata[i] |= kNibbles[random() % 6] << (4 * j);
  }
  auto* const scales = static_cast<uint16_t*>(buffer->scales);
  for (int64_t i = 0; i < weights.scales.ElementCount(); ++i) {
    scales[i] = static_cast<uint16_t>(0x3800 + 0x400 * static_cast<int>(random() % 3));
  }
  return weights;
}

std::vector<float> Small(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random() % 5) - 2.0f);
  return values;
}

std::vector<float> Product(const Device& device, const PreparedWeights& weights,
                           const std::vector<float>& a, int64_t m,
                           const GemmOptions& options = {}) {
  const WeightsSpec& spec = weights.spec();
  std::vector<float> out(static_cast<size_t>(m * spec.n), -1.0f);
  const Status status = Gemm(device, TensorView(a.data(), DType::kF32, {m, spec.k}), weights,
                             MutableTensorView(out.data(), DType::kF32, {m, spec.n}), options);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

std::vector<float> Expected(const QuantizedWeights& weights, const std::vector<float>& a,
                            int64_t m) {
  const WeightsSpec& spec = weights.spec;
  const auto dense = reference::Dequantize(weights, 0);
  EXPECT_TRUE(dense.ok());
  std::vector<float> out;
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t n = 0; n < spec.n; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < spec.k; ++k) {
        sum += static_cast<double>(a[static_cast<size_t>(row * spec.k + k)]) *
               dense->value[static_cast<size_t>(k * spec.n + n)];
      }
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

class SparseGemm : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto opened = Device::Open(GetParam());
    if (opened.status().code() == Code::kUnsupported) GTEST_SKIP() << opened.status().message();
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    device_.emplace(*std::move(opened));
  }
  std::optional<Device> device_;
};

TEST_P(SparseGemm, IsTheDenseProductBitByBit) {
  const bool simulated = std::string(GetParam()) != "cpu";
  for (const Format format : {Format::kFp4E2M1, Format::kS4, Format::kNf4, Format::kFp8E4M3}) {
    for (const int64_t m : {1, 2, 3, 5, 33}) {
      if (simulated && m == 33) continue;
      for (const int64_t k : {64, 150}) {
        const int64_t n = 40;
        SCOPED_TRACE(std::string(FormatName(format)) + " m " + std::to_string(m) + " k " +
                     std::to_string(k));
        const QuantizedWeights sparse = Lattice(format, 1, k, n, 5);
        const auto dense = Expand24(sparse);
        ASSERT_TRUE(dense.ok());
        const auto a = Small(m * k, 9);
        const auto from_sparse = Prepare(sparse, *device_);
        const auto from_dense = Prepare(*dense, *device_);
        ASSERT_TRUE(from_sparse.ok() && from_dense.ok()) << from_sparse.status().message();
        if (GetFormatInfo(format).bits == 4) {
          EXPECT_EQ(from_sparse->spec(), sparse.spec);
          EXPECT_LT(from_sparse->bytes(), from_dense->bytes());
        } else {
          EXPECT_EQ(from_sparse->spec(), dense->spec);
          EXPECT_EQ(from_sparse->bytes(), from_dense->bytes());
        }
        // The values of nf4 have all 24 bits: sums round, and so do kernels that keep 16 of them.
        GemmOptions options;
        if (format == Format::kNf4) options.accuracy = Accuracy::kExact;
        const std::vector<float> product = Product(*device_, *from_sparse, a, m, options);
        EXPECT_EQ(product, Product(*device_, *from_dense, a, m, options));
        if (format != Format::kNf4) {
          EXPECT_EQ(product, Expected(sparse, a, m));
        }
      }
    }
  }
}

// The two blocks of four whose metadata shares a byte, and those 64 k apart, whose kept codes do.
TEST_P(SparseGemm, EveryPairOfPatternsIsReadBack) {
  constexpr int64_t kK = 256;
  constexpr int64_t kN = 36;
  for (const Format format : {Format::kFp4E2M1, Format::kS4, Format::kNf4}) {
    SCOPED_TRACE(FormatName(format));
    QuantizedWeights weights = Lattice(format, 1, kK, kN, 11);
    std::vector<uint32_t> metadata(kK / 32 * kN);
    for (int64_t block = 0; block < kK / 4; ++block) {
      for (int64_t n = 0; n < kN; ++n) {
        // Neighbours take every pair along n, and so do blocks 16 apart.
        const int64_t odd = block % 2 ^ block / 16 % 2;
        const uint32_t nibble = kNibbles[(odd == 0 ? n % 6 : n / 6 + block / 32) % 6];
        metadata[static_cast<size_t>(block / 8 * kN + n)] |= nibble << (block % 8 * 4);
      }
    }
    weights.metadata = TensorView(metadata.data(), DType::kU32, {1, kK / 32, kN});
    const auto prepared = Prepare(weights, *device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    std::vector<float> decoded(kK * kN);
    const Status status =
        Dequantize(*device_, *prepared, MutableTensorView(decoded.data(), DType::kF32, {kK, kN}));
    ASSERT_TRUE(status.ok()) << status.message();
    const auto expected = reference::Dequantize(weights, 0);
    ASSERT_TRUE(expected.ok());
    for (size_t i = 0; i < decoded.size(); ++i) {
      ASSERT_EQ(decoded[i], static_cast<float>(expected->value[i])) << i;
    }
  }
}

// A pruned weight is 0, so that its product with an infinite activation is NaN.
TEST_P(SparseGemm, InfiniteActivationsReachPrunedWeights) {
  constexpr int64_t kK = 64;
  constexpr int64_t kN = 16;
  const QuantizedWeights weights = Lattice(Format::kFp4E2M1, 1, kK, kN, 4);
  const auto prepared = Prepare(weights, *device_);
  const auto dense = Expand24(weights);
  ASSERT_TRUE(prepared.ok() && dense.ok());
  const auto from_dense = Prepare(*dense, *device_);
  ASSERT_TRUE(from_dense.ok());
  constexpr uint16_t kOne = 0x3f80;  // bf16
  constexpr uint16_t kInfinity = 0x7f80;
  std::vector<uint16_t> a(3 * kK, kOne);
  a[kK + 5] = kInfinity;
  const auto product = [&](const PreparedWeights& of) {
    std::vector<float> out(3 * kN);
    const Status status = Gemm(*device_, TensorView(a.data(), DType::kBf16, {3, kK}), of,
                               MutableTensorView(out.data(), DType::kF32, {3, kN}));
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  };
  const std::vector<float> sparse_product = product(*prepared);
  const std::vector<float> dense_product = product(*from_dense);
  int nans = 0;
  for (size_t i = 0; i < sparse_product.size(); ++i) {
    nans += std::isnan(dense_product[i]) ? 1 : 0;
    EXPECT_TRUE(sparse_product[i] == dense_product[i] ||
                (std::isnan(sparse_product[i]) && std::isnan(dense_product[i])))
        << i << ": " << sparse_product[i] << ", " << dense_product[i];
  }
  EXPECT_GT(nans, 0);
  EXPECT_LT(nans, 16);
}

TEST_P(SparseGemm, ColumnsAreJoined) {
  const QuantizedWeights gate_up = Lattice(Format::kS4, 1, 64, 32, 1);
  const QuantizedWeights q = Lattice(Format::kS4, 1, 64, 24, 2);
  const WeightColumns columns[] = {
      {&gate_up, 0, 2, 16}, {&gate_up, 1, 2, 16}, {&q, 0, 1, 24}, {&gate_up, 0, 1, 32}};
  const auto prepared = PrepareColumns(columns, *device_);
  const auto joined = JoinColumns(columns);
  ASSERT_TRUE(prepared.ok() && joined.ok()) << prepared.status().message();
  const auto a = Small(64, 3);
  EXPECT_EQ(Product(*device_, *prepared, a, 1), Expected(*joined, a, 1));
}

TEST_P(SparseGemm, InvalidNibblesAreNamed) {
  QuantizedWeights weights = Lattice(Format::kS4, 1, 64, 8, 2);
  std::vector<uint32_t> metadata(16, 0x44444444u);
  metadata[9] = 0x44444404u;
  weights.metadata = TensorView(metadata.data(), DType::kU32, {1, 2, 8});
  const auto prepared = Prepare(weights, *device_);
  EXPECT_EQ(prepared.status().code(), Code::kMalformedFile);
  EXPECT_EQ(prepared.status().message(),
            "metadata: nibble 0 of block 9, column 1 is not one of 4, 8, 9, 12, 13, 14");
}

INSTANTIATE_TEST_SUITE_P(Devices, SparseGemm, ::testing::Values("cpu", "metal-sim"),
                         [](const auto& parameter) {
                           return std::string(parameter.param) == "cpu" ? "Cpu" : "MetalSim";
                         });

}  // namespace
}  // namespace marlin::sparse_gemm_test
