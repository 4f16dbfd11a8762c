// Fixture of GPU tests of 2:4 weights: weights on a lattice, and a device that keeps them sparse.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "gpu_fixture.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"

namespace marlin {

inline constexpr uint32_t kNibbles[] = {4, 8, 9, 12, 13, 14};

/// 2:4 weights whose products are exact: scales are powers of two, and all codes and nibbles are
/// random, or all nibbles are `nibble`.
inline QuantizedWeights LatticeWeights(Format format, int64_t k, int64_t n, int64_t group,
                                       uint32_t seed, uint32_t nibble = 0) {
  std::mt19937 bits(seed);
  WeightsSpec spec;
  spec.format = format;
  spec.k = k;
  spec.n = n;
  spec.group_size = group;
  spec.sparsity = Sparsity::k24;
  Result<WeightsBuffer> buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  if (!buffer.ok()) return {};
  auto* const codes = static_cast<uint32_t*>(buffer->codes);
  for (int64_t i = 0; i < buffer->weights.codes.ElementCount(); ++i)
    codes[i] = static_cast<uint32_t>(bits());
  auto* const metadata = static_cast<uint32_t*>(buffer->metadata);
  for (int64_t i = 0; i < buffer->weights.metadata.ElementCount(); ++i) {
    metadata[i] = 0;
    for (int b = 0; b < 8; ++b) {
      metadata[i] |= (nibble != 0 ? nibble : kNibbles[bits() % 6]) << (4 * b);
    }
  }
  auto* const scales = static_cast<uint16_t*>(buffer->scales);
  for (int64_t i = 0; i < buffer->weights.scales.ElementCount(); ++i) {
    const bool negative = bits() % 2 != 0;
    scales[i] = FloatToHalf(negative ? -0.5F : 1.0F);
  }
  return buffer->weights;
}

/// Numbers from -4 to 4.
inline std::vector<uint16_t> LatticeRows(int64_t count, bool bf16, uint32_t seed) {
  std::mt19937 bits(seed);
  std::vector<uint16_t> rows;
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(bits() % 9) - 4.0F;
    rows.push_back(bf16 ? FloatToBf16(value) : FloatToHalf(value));
  }
  return rows;
}

/// A device that keeps 2:4 weights sparse.
class SparseOnGpu : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    setenv("MARLIN_CUDA_SPARSE", "1", 1);
    GpuTest::SetUp();
    unsetenv("MARLIN_CUDA_SPARSE");
  }

  PreparedWeights Keep(const QuantizedWeights& weights) const {
    const Result<PreparedWeights> prepared = Prepare(weights, device());
    EXPECT_TRUE(prepared.ok()) << prepared.status().message();
    return prepared.ok() ? *prepared : PreparedWeights();
  }
  PreparedWeights KeepExpanded(const QuantizedWeights& weights) const {
    const Result<QuantizedWeights> dense = Expand24(weights);
    EXPECT_TRUE(dense.ok()) << dense.status().message();
    return dense.ok() ? Keep(*dense) : PreparedWeights();
  }

  /// The fp32 result.
  std::vector<float> Multiply(const PreparedWeights& weights, const std::vector<uint16_t>& rows,
                              int64_t m, bool bf16, GemmOptions options) const {
    const DeviceBuffer a = Upload(rows);
    const int64_t n = weights.spec().n / (options.gated ? 2 : 1);
    const DeviceBuffer c = Make(m * n * 4);
    const Status status =
        Gemm(device(), {a.data(), bf16 ? DType::kBf16 : DType::kF16, {m, weights.spec().k}},
             weights, {c.data(), DType::kF32, {m, n}}, options);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(device().Synchronize().ok());
    return Download<float>(c);
  }

  /// A kernel on the sparse weights against one on the dense weights for m rows.
  void Compare(const PreparedWeights& sparse, const PreparedWeights& dense, int64_t m, bool bf16,
               GemmOptions options, const std::string& on_sparse,
               const std::string& on_dense) const {
    const std::vector<uint16_t> rows =
        LatticeRows(m * sparse.spec().k, bf16, static_cast<uint32_t>(m));
    options.kernel = on_sparse;
    const std::vector<float> got = Multiply(sparse, rows, m, bf16, options);
    options.kernel = on_dense;
    const std::vector<float> expected = Multiply(dense, rows, m, bf16, options);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const auto n = static_cast<size_t>(sparse.spec().n);
      ASSERT_EQ(got[i], expected[i])
          << "m " << i / n << ", n " << i % n << " of " << m << " x " << sparse.spec().k << " x "
          << n << ", groups of " << sparse.spec().group_size << (bf16 ? ", bf16" : ", f16");
    }
  }
};

}  // namespace marlin
