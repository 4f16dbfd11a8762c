#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/scalars.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "quantize/rounding.h"

namespace marlin::dequantize_test {
namespace {

/// u4 codes 0..15 down one column, group of 16, scale 0.5.
WeightsBuffer OneColumn(WeightsSpec spec) {
  spec.format = Format::kU4;
  spec.k = 16;
  spec.n = 1;
  spec.group_size = 16;
  auto buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  auto* words = static_cast<uint32_t*>(buffer->codes);
  words[0] = 0x76543210u;
  words[1] = 0xfedcba98u;
  static_cast<uint16_t*>(buffer->scales)[0] = FloatToHalf(0.5f);
  return *std::move(buffer);
}

TEST(Dequantize, SubtractsZerosAndAddsBiases) {
  std::vector<float> out(16);
  const MutableTensorView view(out.data(), DType::kF32, {16, 1});
  WeightsSpec spec;
  spec.has_zeros = true;
  const WeightsBuffer with_zeros = OneColumn(spec);
  static_cast<uint16_t*>(with_zeros.zeros)[0] = FloatToHalf(7.25f);
  ASSERT_TRUE(Dequantize(with_zeros.weights, view).ok());
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(out[static_cast<size_t>(i)], 0.5f * (static_cast<float>(i) - 7.25f));
  }
  spec.has_zeros = false;
  spec.has_biases = true;
  const WeightsBuffer with_biases = OneColumn(spec);
  static_cast<uint16_t*>(with_biases.biases)[0] = FloatToHalf(-3.0f);
  ASSERT_TRUE(Dequantize(with_biases.weights, view).ok());
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(out[static_cast<size_t>(i)], 0.5f * static_cast<float>(i) - 3.0f);
  }
}

TEST(Dequantize, RoundsBiasSumsOnce) {
  WeightsSpec spec;
  spec.has_biases = true;
  spec.scale_type = ScaleType::kF32;
  const WeightsBuffer buffer = OneColumn(spec);
  static_cast<float*>(buffer.scales)[0] = 7.515625f;  // Code 1: a tie between 7.5 and 7.53125.
  std::vector<uint16_t> out(16);
  const MutableTensorView view(out.data(), DType::kBf16, {16, 1});
  static_cast<float*>(buffer.biases)[0] = 0.0f;
  ASSERT_TRUE(Dequantize(buffer.weights, view).ok());
  EXPECT_EQ(Bf16ToFloat(out[1]), 7.5f);
  // The bias is far below the last bit of an fp32 or even a double sum, and still decides the
  // rounding.
  static_cast<float*>(buffer.biases)[0] = 0x1p-60f;
  ASSERT_TRUE(Dequantize(buffer.weights, view).ok());
  EXPECT_EQ(Bf16ToFloat(out[1]), 7.53125f);
  static_cast<float*>(buffer.biases)[0] = -0x1p-60f;
  ASSERT_TRUE(Dequantize(buffer.weights, view).ok());
  EXPECT_EQ(Bf16ToFloat(out[1]), 7.5f);
}

TEST(Dequantize, SubtractsZerosOfEveryTypeAndRoundsOnce) {
  std::vector<float> out(16);
  const MutableTensorView view(out.data(), DType::kF32, {16, 1});
  WeightsSpec spec;
  spec.has_zeros = true;
  spec.scale_type = ScaleType::kF32;
  spec.zero_type = ScaleType::kF32;
  const WeightsBuffer wide = OneColumn(spec);
  static_cast<float*>(wide.scales)[0] = 0.1f;
  static_cast<float*>(wide.zeros)[0] = 7.6511517f;
  ASSERT_TRUE(Dequantize(wide.weights, view).ok());
  for (int i = 0; i < 16; ++i) {
    // Both products and their sum fit a double, which is rounded once.
    const double expected = double{0.1f} * i - double{0.1f} * double{7.6511517f};
    EXPECT_EQ(out[static_cast<size_t>(i)], static_cast<float>(expected));
  }
  spec.scale_type = ScaleType::kF16;
  spec.zero_type = ScaleType::kBf16;
  const WeightsBuffer narrow = OneColumn(spec);
  static_cast<uint16_t*>(narrow.zeros)[0] = FloatToBf16(7.75f);
  ASSERT_TRUE(Dequantize(narrow.weights, view).ok());
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(out[static_cast<size_t>(i)], 0.5f * (static_cast<float>(i) - 7.75f));
  }
}

TEST(Dequantize, DividesByAGlobalScaleThatDivides) {
  WeightsSpec spec;
  spec.format = Format::kFp4E2M1;
  spec.k = 16;
  spec.n = 1;
  spec.group_size = 16;
  spec.scale_type = ScaleType::kE4M3;
  spec.has_global_scale = true;
  spec.global_scale_divides = true;
  const auto buffer = AllocateWeights(spec);
  ASSERT_TRUE(buffer.ok());
  for (int i = 0; i < 2; ++i) static_cast<uint32_t*>(buffer->codes)[i] = 0x22222222u;  // 1
  static_cast<uint8_t*>(buffer->scales)[0] = 0x3c;                                     // 1.5
  std::vector<float> out(16);
  const MutableTensorView view(out.data(), DType::kF32, {16, 1});
  int inexact_products = 0;
  for (const float global : {3.0f, 7.0f, 1234.567f, 0.3f}) {
    buffer->global_scale[0] = global;
    ASSERT_TRUE(Dequantize(buffer->weights, view).ok());
    EXPECT_EQ(out[0], 1.5f / global);
    inexact_products += 1.5f * (1.0f / global) == 1.5f / global ? 0 : 1;
  }
  EXPECT_GT(inexact_products, 0);  // Otherwise a reciprocal would pass.
}

TEST(Dequantize, MultipliesTheGlobalScaleOfTheExpert) {
  WeightsSpec spec;
  spec.format = Format::kFp4E2M1;
  spec.experts = 2;
  spec.k = 16;
  spec.n = 1;
  spec.group_size = 16;
  spec.scale_type = ScaleType::kE4M3;
  spec.has_global_scale = true;
  const auto buffer = AllocateWeights(spec);
  ASSERT_TRUE(buffer.ok());
  for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(buffer->codes)[i] = 0x22222222u;  // 1
  static_cast<uint8_t*>(buffer->scales)[0] = 0x38;                                     // 1
  static_cast<uint8_t*>(buffer->scales)[1] = 0x40;                                     // 2
  buffer->global_scale[0] = 3.0f;
  buffer->global_scale[1] = 0.1f;
  std::vector<float> out(32);
  ASSERT_TRUE(
      Dequantize(buffer->weights, MutableTensorView(out.data(), DType::kF32, {2, 16, 1})).ok());
  EXPECT_EQ(out[0], 3.0f);
  EXPECT_EQ(out[16], 0.2f);
}

TEST(Dequantize, WritesAnyStridesAndNothingElse) {
  WeightsSpec spec;
  spec.has_zeros = true;
  const WeightsBuffer buffer = OneColumn(spec);
  static_cast<uint16_t*>(buffer.zeros)[0] = 0;
  std::vector<float> out(64, -1.0f);
  const MutableTensorView view(out.data() + 1, DType::kF32, {16, 1}, {3, 1});
  ASSERT_TRUE(Dequantize(buffer.weights, view).ok());
  for (size_t i = 0; i < out.size(); ++i) {
    const bool written = i >= 1 && (i - 1) % 3 == 0 && (i - 1) / 3 < 16;
    EXPECT_EQ(out[i], written ? 0.5f * static_cast<float>((i - 1) / 3) : -1.0f) << i;
  }
}

TEST(Dequantize, NamesBothShapes) {
  WeightsSpec spec;
  spec.has_zeros = true;
  const WeightsBuffer buffer = OneColumn(spec);
  static_cast<uint16_t*>(buffer.zeros)[0] = 0;
  std::vector<float> out(16);
  const auto message = [&](DType dtype, Shape shape) {
    const Status status = Dequantize(buffer.weights, MutableTensorView(out.data(), dtype, shape));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message(DType::kF32, {1, 16}), "out: expected [16, 1], got [1, 16]");
  EXPECT_EQ(message(DType::kF32, {2, 16, 1}), "out: expected [16, 1], got [2, 16, 1]");
  EXPECT_EQ(message(DType::kI32, {16, 1}), "out: expected f32, bf16 or f16, got i32");
}

TEST(Rounding, OddRoundingSurvivesASecondRounding) {
  EXPECT_EQ(AddToOdd(1.0, 0.5), 1.5);
  EXPECT_GT(AddToOdd(1.0, 0x1p-100), 1.0);
  EXPECT_LT(AddToOdd(1.0, -0x1p-100), 1.0);
  EXPECT_LT(AddToOdd(-1.0, -0x1p-100), -1.0);
  EXPECT_EQ(FloatToOdd(1.5), 1.5f);
  EXPECT_EQ(FloatToOdd(1.0 + 0x1p-40), 1.0f + 0x1p-23f);
  EXPECT_EQ(FloatToOdd(1.0 - 0x1p-40), 1.0f - 0x1p-24f);
  EXPECT_EQ(FloatToOdd(-1.0 - 0x1p-40), -1.0f - 0x1p-23f);
  EXPECT_EQ(FloatToOdd(0x1p-200), 0x1p-149f);
  // Through odd-rounded fp32 to bf16: just above a tie rounds up, which double rounding would lose.
  const double above_tie = 1.0 + 0x1p-8 + 0x1p-40;
  EXPECT_EQ(FloatToBf16(static_cast<float>(above_tie)), FloatToBf16(1.0f));
  EXPECT_EQ(Bf16Element::Round(above_tie), FloatToBf16(1.0f + 0x1p-7f));
}

}  // namespace
}  // namespace marlin::dequantize_test
