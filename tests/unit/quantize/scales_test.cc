#include "quantize/scales.h"

#include <gtest/gtest.h>

#include <cmath>

#include "marlin/format.h"

namespace marlin::scales_test {
namespace {

GroupRange Symmetric(float amax) { return {amax, 0.0f, 0.0f}; }

float ScaleFor(Format format, ScaleType type, float amax) {
  const Encoder encoder(format, {});
  return ScaleRule(encoder, false).Choose(Symmetric(amax), ScaleCoder(type)).scale.value;
}

TEST(ScaleRule, SymmetricScalesDivideByTheLargestValue) {
  EXPECT_EQ(ScaleFor(Format::kFp4E2M1, ScaleType::kF32, 12.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kS4, ScaleType::kF32, 14.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kInt3, ScaleType::kF32, 6.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kInt2, ScaleType::kF32, 2.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kS8, ScaleType::kF32, 254.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kNf4, ScaleType::kF32, 2.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kCodebook4, ScaleType::kF32, 254.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kFp8E4M3, ScaleType::kF32, 896.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kFp8E5M2, ScaleType::kF32, 114688.0f), 2.0f);
}

TEST(ScaleRule, E8M0RulesByName) {
  const auto scale = [](E8M0Rule rule, Format format, float amax) {
    const Encoder encoder(format, {});
    const ScaleRule rounded(encoder, false, false, rule);
    return rounded.Choose(Symmetric(amax), ScaleCoder(ScaleType::kE8M0)).scale.value;
  };
  // The largest value is 6: 4.5 / 6 = 2^-0.41, 4 / 6 = 2^-0.58.
  EXPECT_EQ(scale(E8M0Rule::kFloor, Format::kFp4E2M1, 7.99F), 1.0F);
  EXPECT_EQ(scale(E8M0Rule::kCeil, Format::kFp4E2M1, 6.0F), 1.0F);
  EXPECT_EQ(scale(E8M0Rule::kCeil, Format::kFp4E2M1, 6.01F), 2.0F);
  EXPECT_EQ(scale(E8M0Rule::kCeil, Format::kFp4E2M1, 3.01F), 1.0F);
  EXPECT_EQ(scale(E8M0Rule::kNearest, Format::kFp4E2M1, 4.5F), 1.0F);
  EXPECT_EQ(scale(E8M0Rule::kNearest, Format::kFp4E2M1, 4.0F), 0.5F);
  EXPECT_EQ(scale(E8M0Rule::kFloor, Format::kNf4, 1.99F), 1.0F);
  EXPECT_EQ(scale(E8M0Rule::kDefault, Format::kNf4, 1.99F), 2.0F);
  for (const E8M0Rule rule : {E8M0Rule::kFloor, E8M0Rule::kCeil, E8M0Rule::kNearest}) {
    EXPECT_EQ(scale(rule, Format::kFp4E2M1, 0.0F), 0x1p-127F);
    EXPECT_EQ(scale(rule, Format::kFp4E2M1, 1e-44F), 0x1p-127F);
    EXPECT_EQ(scale(rule, Format::kFp4E2M1, 3e38F) > 0x1p124F, true);
  }
}

TEST(ScaleRule, E8M0FollowsOcpAndNeverCutsByMoreThanItsThird) {
  // floor(log2 amax) - 2.
  EXPECT_EQ(ScaleFor(Format::kFp4E2M1, ScaleType::kE8M0, 4.0f), 1.0f);
  EXPECT_EQ(ScaleFor(Format::kFp4E2M1, ScaleType::kE8M0, 7.99f), 1.0f);
  EXPECT_EQ(ScaleFor(Format::kFp4E2M1, ScaleType::kE8M0, 8.0f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kFp8E4M3, ScaleType::kE8M0, 511.0f), 1.0f);
  // Tables whose maximum is a power of two round up.
  EXPECT_EQ(ScaleFor(Format::kNf4, ScaleType::kE8M0, 1.0f), 1.0f);
  EXPECT_EQ(ScaleFor(Format::kNf4, ScaleType::kE8M0, 1.01f), 2.0f);
  EXPECT_EQ(ScaleFor(Format::kFp4E2M1, ScaleType::kE8M0, 0.0f), 0x1p-127f);
  EXPECT_EQ(ScaleFor(Format::kFp4E2M1, ScaleType::kE8M0, 1e-44f), 0x1p-127f);
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    for (float amax = 1.0f; amax < 2.0f; amax += 0.01f) {
      const float scale = ScaleFor(info.format, ScaleType::kE8M0, amax);
      const Encoder encoder(info.format, {});
      EXPECT_LT(amax / scale, encoder.levels() * 1.3334f) << info.name << " " << amax;
      EXPECT_GT(amax / scale, encoder.levels() * 0.4999f) << info.name << " " << amax;
    }
  }
}

TEST(ScaleRule, AffineZerosAreIntegersInsideTheTable) {
  const Encoder u4(Format::kU4, {});
  const ScaleRule rule(u4, true);
  const ScaleCoder f32(ScaleType::kF32);
  const auto choose = [&](float low, float high) {
    return rule.Choose({std::max(-low, high), low, high}, f32);
  };
  EXPECT_EQ(choose(-3.0f, 12.0f).scale.value, 1.0f);
  EXPECT_EQ(choose(-3.0f, 12.0f).zero, 3.0f);
  EXPECT_EQ(choose(0.0f, 30.0f).zero, 0.0f);
  EXPECT_EQ(choose(-30.0f, 0.0f).zero, 15.0f);
  EXPECT_EQ(choose(-2.4f, 12.6f).zero, 2.0f);
  EXPECT_EQ(choose(-2.6f, 12.4f).zero, 3.0f);
  EXPECT_EQ(choose(0.0f, 0.0f).scale.value, 0.0f);
  // The range overflows fp32, the scale does not.
  EXPECT_FALSE(choose(-3e38f, 3e38f).scale.overflow);
  const Encoder int3(Format::kInt3, {});
  const GroupParameters p = ScaleRule(int3, true).Choose({5.0f, -2.0f, 5.0f}, f32);
  EXPECT_EQ(p.scale.value, 1.0f);
  EXPECT_EQ(p.zero, -2.0f);  // -2 has value -4 = -2 + zero.
}

TEST(ScaleCoder, RoundsToTheStoredTypeAndReportsOverflow) {
  EXPECT_EQ(ScaleCoder(ScaleType::kF16).Round(1.0f / 3).value, 0x1.554p-2f);
  EXPECT_EQ(ScaleCoder(ScaleType::kBf16).Round(1.0f / 3).value, 0x1.56p-2f);
  EXPECT_EQ(ScaleCoder(ScaleType::kF32).Round(1.0f / 3).value, 1.0f / 3);
  EXPECT_TRUE(ScaleCoder(ScaleType::kF16).Round(65520.0f).overflow);
  EXPECT_FALSE(ScaleCoder(ScaleType::kF16).Round(65519.0f).overflow);
  EXPECT_TRUE(ScaleCoder(ScaleType::kBf16).Round(3.4e38f).overflow);
  EXPECT_EQ(ScaleCoder(ScaleType::kF16).Round(1e-8f).value, 0.0f);
  const StoredScale scale = ScaleCoder(ScaleType::kE4M3, 0.5f).Round(0.8f);
  EXPECT_EQ(scale.bits, 0x3du);  // 1.6 -> 1.625
  EXPECT_EQ(scale.value, 0.8125f);
  EXPECT_EQ(ScaleCoder(ScaleType::kE4M3, 0.0f).Round(0.8f).value, 0.0f);
}

}  // namespace
}  // namespace marlin::scales_test
