// GEMMs with int8 activations: the quantization of a row, bit-identical results on all instruction
// sets, and selection on request only.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/gemm/w4a8/w4a8_kernel.h"
#include "marlin/marlin.h"

namespace marlin::w4a8_test {
namespace {

constexpr const char* kKernels[] = {"marlin_gemm_w4a8_scalar", "marlin_gemm_w4a8_avx2",
                                    "marlin_gemm_w4a8_vnni"};

std::vector<float> Gaussian(size_t count, uint32_t seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& value : values) value = draw(bits);
  return values;
}

/// The k of byte i of a block, as defined in w4a8_kernel.h.
int PositionOf(int i) {
  constexpr int kOffset[4] = {0, 16, 1, 17};
  return 2 * (i / 4) + kOffset[i % 4];
}

/// A row of one block as packed by ExactKernels::pack_row: 16 even k, then 16 odd ones.
struct alignas(64) PackedRow {
  float x[128] = {};
  cpu::Int8Block blocks[4] = {};
  void Set(int k, float value) { x[k / 2 + 16 * (k % 2)] = value; }
  const cpu::Int8Block& Quantize() {
    cpu::QuantizeRow(x, 128, blocks);
    return blocks[0];
  }
};

TEST(QuantizeRow, RoundsToNearestEvenInUnitsOfTheLargest) {
  PackedRow row;
  std::vector<float> values(32);
  for (int k = 0; k < 32; ++k) values[static_cast<size_t>(k)] = 0.5f * static_cast<float>(k - 20);
  values[7] = 127.0f;
  int sum = 0;
  for (int k = 0; k < 32; ++k) row.Set(k, values[static_cast<size_t>(k)]);
  const cpu::Int8Block& block = row.Quantize();
  EXPECT_EQ(block.scale, 1.0f);
  for (int i = 0; i < 32; ++i) {
    const float expected = std::nearbyint(values[static_cast<size_t>(PositionOf(i))]);
    EXPECT_EQ(static_cast<float>(block.q[i]), expected) << "byte " << i;
    sum += block.q[i];
  }
  EXPECT_EQ(block.sum, static_cast<float>(sum));
}

TEST(QuantizeRow, KeepsZeroTinyAndNonFiniteBlocksDefined) {
  PackedRow zero;
  EXPECT_EQ(zero.Quantize().sum, 0);

  PackedRow tiny;  // Its scale would be subnormal and its reciprocal infinite.
  tiny.Set(3, 0x1p-140f);
  EXPECT_EQ(tiny.Quantize().scale, 0x1p-126f);

  PackedRow largest;
  largest.Set(0, std::numeric_limits<float>::max());
  EXPECT_EQ(largest.Quantize().q[0], 127);

  PackedRow nan;
  nan.Set(5, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(nan.Quantize().scale));

  PackedRow infinite;
  infinite.Set(0, -std::numeric_limits<float>::infinity());
  infinite.Set(1, 3.0f);
  const cpu::Int8Block& block = infinite.Quantize();
  EXPECT_EQ(block.scale, std::numeric_limits<float>::infinity());
  EXPECT_EQ(block.q[0], -1);
  EXPECT_EQ(block.sum, -1);
}

struct Product {
  Device device;
  PreparedWeights weights;
  int64_t k = 0;
  int64_t n = 0;
};

Product MakeProduct(Format format, int64_t k, int64_t n, int64_t group_size) {
  Product product{*Device::Open("cpu"), {}, k, n};
  const std::vector<float> dense = Gaussian(static_cast<size_t>(k * n), 1);
  QuantizeOptions options;
  options.format = format;
  options.group_size = group_size;
  const Result<QuantizedWeights> weights =
      Quantize(TensorView(dense.data(), DType::kF32, {k, n}), options);
  product.weights = *Prepare(*weights, product.device);
  return product;
}

/// The GEMM of m rows with one kernel; empty if the kernel is not available on this machine.
std::vector<float> Multiply(const Product& product, std::vector<float>& a, int64_t m,
                            const std::string& kernel) {
  for (const KernelInfo& info : product.device.info().kernels) {
    if (info.name == kernel && !info.available) return {};
  }
  std::vector<float> out(static_cast<size_t>(m * product.n), -1.0f);
  GemmOptions options;
  options.accuracy = Accuracy::kW4A8;
  options.kernel = kernel;
  const Status status =
      Gemm(product.device, TensorView(a.data(), DType::kF32, {m, product.k}), product.weights,
           MutableTensorView(out.data(), DType::kF32, {m, product.n}), options);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST(W4a8, AllInstructionSetsGiveTheSameBits) {
  for (Format format : {Format::kFp4E2M1, Format::kU4, Format::kS4, Format::kInt3, Format::kInt2,
                        Format::kS8, Format::kInt6, Format::kU6, Format::kInt5, Format::kU5}) {
    const Product product = MakeProduct(format, 1300, 37, 96);
    for (int64_t m : {1, 3, 8, 13}) {
      std::vector<float> a = Gaussian(static_cast<size_t>(m * product.k), 2);
      const std::vector<float> expected = Multiply(product, a, m, kKernels[0]);
      for (const char* kernel : {kKernels[1], kKernels[2]}) {
        const std::vector<float> got = Multiply(product, a, m, kernel);
        if (got.empty()) continue;
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(expected[i]))
              << kernel << " " << FormatName(format) << " m=" << m << " at " << i;
        }
      }
    }
  }
}

TEST(W4a8, LargestCodesDoNotSaturate) {
  // Both products of every pair have the same sign and the largest magnitude.
  for (Format format :
       {Format::kS8, Format::kFp4E2M1, Format::kU4, Format::kInt6, Format::kU6, Format::kU5}) {
    Product product = MakeProduct(format, 64, 16, 32);
    QuantizeOptions options;
    options.format = format;
    options.group_size = 32;
    std::vector<float> dense(64 * 16, -1.0f);
    for (size_t n = 0; n < 16; ++n)
      dense[n] = 0.25f;  // Gives formats with zero points a nonzero range.
    const QuantizedWeights weights =
        *Quantize(TensorView(dense.data(), DType::kF32, {64, 16}), options);
    product.weights = *Prepare(weights, product.device);
    std::vector<float> a(64, -127.0f);
    for (const char* kernel : kKernels) {
      const std::vector<float> got = Multiply(product, a, 1, kernel);
      for (float value : got) EXPECT_NEAR(value, 127.0f * 62.75f, 127.0f) << kernel;
    }
  }
}

TEST(W4a8, NonFiniteActivationsStayInTheirRow) {
  const Product product = MakeProduct(Format::kS4, 128, 20, 32);
  std::vector<float> a = Gaussian(3 * 128, 3);
  a[40] = std::numeric_limits<float>::infinity();
  a[128 + 70] = std::numeric_limits<float>::quiet_NaN();
  for (const char* kernel : kKernels) {
    const std::vector<float> got = Multiply(product, a, 3, kernel);
    int infinite = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(std::isfinite(got[i]), i >= 40) << kernel;
      // Inf times a weight of zero is NaN too, but not every weight is zero.
      if (i >= 20) {
        EXPECT_EQ(std::isnan(got[i]), i < 40) << kernel;
      }
      infinite += std::isinf(got[i]) ? 1 : 0;
    }
    EXPECT_TRUE(got.empty() || infinite > 10) << kernel;
  }
}

TEST(W4a8, RunsOnRequestOnly) {
  const Product product = MakeProduct(Format::kFp4E2M1, 128, 16, 32);
  std::vector<float> a(64 * 128, 1.0f);
  std::vector<float> out(64 * 16);
  for (int64_t m : {1, 64}) {
    const TensorView a_view(a.data(), DType::kF32, {m, 128});
    const MutableTensorView out_view(out.data(), DType::kF32, {m, 16});
    GemmOptions options;
    EXPECT_NE(PlanGemm(product.device, a_view, product.weights, out_view, options)->accuracy(),
              "w4a8");
    options.kernel = kKernels[0];  // Naming a kernel does not allow a lower accuracy class.
    const auto named = PlanGemm(product.device, a_view, product.weights, out_view, options);
    EXPECT_EQ(named.status().code(), Code::kUnsupported);
    options.kernel.clear();
    options.accuracy = Accuracy::kW4A8;
    EXPECT_EQ(PlanGemm(product.device, a_view, product.weights, out_view, options)->accuracy(),
              "w4a8");
  }
}

TEST(W4a8, RefusesWhatBytesCannotHold) {
  std::vector<float> a(128, 1.0f);
  std::vector<float> out(16);
  GemmOptions options;
  options.accuracy = Accuracy::kW4A8;
  const auto refusal = [&](Format format, int64_t group_size) {
    const Product product = MakeProduct(format, 128, 16, group_size);
    return Gemm(product.device, TensorView(a.data(), DType::kF32, {1, 128}), product.weights,
                MutableTensorView(out.data(), DType::kF32, {1, 16}), options);
  };
  EXPECT_EQ(refusal(Format::kNf4, 32).code(), Code::kUnsupported);
  EXPECT_NE(refusal(Format::kFp8E4M3, 32).message().find("not small integers"), std::string::npos);
  EXPECT_NE(refusal(Format::kFp6E2M3, 32).message().find("not small integers"), std::string::npos);
  EXPECT_NE(refusal(Format::kS4, 16).message().find("group size 16"), std::string::npos);
  EXPECT_TRUE(refusal(Format::kS4, 64).ok());
}

}  // namespace
}  // namespace marlin::w4a8_test
