// The oracle is checked against hand-computed numbers.
#include "reference/gemm.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "reference/dequantize.h"
#include "reference/elements.h"

namespace marlin::gemm_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// k = 3, n = 2, groups of 2: u4 with scales 1 2 / 0.5 4 and zeros 1 0 / 2 8.
struct SmallU4 {
  std::array<uint32_t, 2> codes = {0x321, 0xf0a};  // column 0: 1 2 3; column 1: 10 0 15
  std::array<uint16_t, 4> scales = {0x3c00, 0x4000, 0x3800, 0x4400};
  std::array<uint16_t, 4> zeros = {0x3c00, 0x0000, 0x4000, 0x4800};
  QuantizedWeights weights;

  SmallU4() {
    weights.spec = {.format = Format::kU4, .k = 3, .n = 2, .group_size = 2, .has_zeros = true};
    weights.codes = TensorView(codes.data(), DType::kU32, {1, 1, 2});
    weights.scales = TensorView(scales.data(), DType::kF16, {1, 2, 2});
    weights.zeros = TensorView(zeros.data(), DType::kF16, {1, 2, 2});
  }
};

TEST(ReferenceDequantize, AppliesScaleAndZeroOfTheGroup) {
  const SmallU4 small;
  const auto dense = reference::Dequantize(small.weights);
  ASSERT_TRUE(dense.ok()) << dense.status().message();
  EXPECT_EQ(dense->value, (std::vector<double>{0, 20, 1, 0, 0.5, 28}));
  EXPECT_EQ(dense->magnitude, (std::vector<double>{2, 20, 3, 0, 2.5, 92}));
}

TEST(ReferenceDequantize, ReadsThreeBitCodesAcrossWords) {
  // Codes k mod 8 for k = 0..31 as one little-endian bit string of 96 bits.
  std::array<uint32_t, 3> codes = {};
  for (uint32_t k = 0; k < 32; ++k) {
    for (uint32_t bit = 0; bit < 3; ++bit) {
      const uint32_t at = 3 * k + bit;
      codes[at / 32] |= ((k >> bit) & 1u) << (at % 32);
    }
  }
  const float scale = 1.0f;
  QuantizedWeights weights;
  weights.spec = {
      .format = Format::kInt3, .k = 32, .n = 1, .group_size = 32, .scale_type = ScaleType::kF32};
  weights.codes = TensorView(codes.data(), DType::kU32, {1, 3, 1});
  weights.scales = TensorView(&scale, DType::kF32, {1, 1, 1});
  const auto dense = reference::Dequantize(weights);
  ASSERT_TRUE(dense.ok()) << dense.status().message();
  for (int k = 0; k < 32; ++k) EXPECT_EQ(dense->value[static_cast<size_t>(k)], k % 8 - 4) << k;
}

TEST(ReferenceDequantize, SelectsTheExpertAndItsGlobalScale) {
  const std::array<uint32_t, 2> codes = {1, 2};        // 0.5 and 1
  const std::array<uint8_t, 2> scales = {0x38, 0x40};  // 1 and 2 in E4M3
  const std::array<float, 2> global = {3.0f, 0.25f};
  QuantizedWeights weights;
  weights.spec = {.format = Format::kFp4E2M1,
                  .experts = 2,
                  .k = 1,
                  .n = 1,
                  .group_size = 16,
                  .scale_type = ScaleType::kE4M3,
                  .has_global_scale = true};
  weights.codes = TensorView(codes.data(), DType::kU32, {2, 1, 1});
  weights.scales = TensorView(scales.data(), DType::kF8E4M3, {2, 1, 1});
  weights.global_scale = TensorView(global.data(), DType::kF32, {2});
  EXPECT_EQ(reference::Dequantize(weights, 0)->value[0], 1.5);
  EXPECT_EQ(reference::Dequantize(weights, 1)->value[0], 0.5);
  EXPECT_EQ(reference::Dequantize(weights, 2).status().code(), Code::kInvalidArgument);
}

TEST(ReferenceGemm, SumsAndBounds) {
  const SmallU4 small;
  const auto dense = reference::Dequantize(small.weights);
  ASSERT_TRUE(dense.ok());
  const std::array<float, 6> a = {1, -2, 4, 0, 1, 1};
  const auto product = reference::Multiply(TensorView(a.data(), DType::kF32, {2, 3}), *dense);
  EXPECT_EQ(product.sum, (std::vector<double>{0, 132, 1.5, 28}));
  EXPECT_EQ(product.magnitude, (std::vector<double>{18, 388, 5.5, 92}));
  EXPECT_DOUBLE_EQ(product.root_square[0], std::sqrt(4.0 + 36.0 + 100.0));
}

TEST(ReferenceGemm, EpilogueOrderIsBiasActivationGateRowWeight) {
  reference::Product product{1, 2, {-1, 3}, {1, 3}, {1, 3}};
  const std::array<float, 2> bias = {3, 1};
  const float row_weight = 0.5f;
  reference::Epilogue epilogue{.bias = TensorView(bias.data(), DType::kF32, {2}),
                               .activation = Activation::kRelu,
                               .gated = true,
                               .row_weight = TensorView(&row_weight, DType::kF32, {1})};
  EXPECT_EQ(reference::Finish(product, epilogue), std::vector<double>{4});  // relu(2) * 4 * 0.5
  epilogue.bias = {};
  EXPECT_EQ(reference::Finish(product, epilogue), std::vector<double>{0});
}

TEST(ReferenceGemm, Activations) {
  EXPECT_DOUBLE_EQ(reference::Activate(Activation::kSilu, 1.0), 0.7310585786300049);
  EXPECT_DOUBLE_EQ(reference::Activate(Activation::kGeluTanh, 1.0), 0.8411919906082768);
  EXPECT_EQ(reference::Activate(Activation::kRelu, -2.0), 0.0);
  EXPECT_TRUE(std::isnan(reference::Activate(Activation::kRelu, NAN)));
}

TEST(ReferenceElements, RoundsOnceToNearestEven) {
  EXPECT_EQ(reference::RoundTo(1.0 + 0x1p-8, DType::kBf16), 1.0);
  EXPECT_EQ(reference::RoundTo(1.0 + 0x1p-8 + 0x1p-40, DType::kBf16), 1.0 + 0x1p-7);
  EXPECT_EQ(reference::RoundTo(65519.0, DType::kF16), 65504.0);
  EXPECT_EQ(reference::RoundTo(65520.0, DType::kF16), kInf);
  EXPECT_EQ(reference::RoundTo(-0x1.8p-25, DType::kF16), -0x1p-24);
  EXPECT_EQ(reference::RoundTo(0x1p-25, DType::kF16), 0.0);
  EXPECT_EQ(reference::RoundTo(0x1.FFFFFFp127, DType::kF32), kInf);
}

}  // namespace
}  // namespace marlin::gemm_test
