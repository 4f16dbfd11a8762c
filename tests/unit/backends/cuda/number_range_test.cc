// The range of a set of numbers tells which 16-bit type holds all of them: compared with rounding
// every number and scaling it back.
#include "backends/cuda/layout/number_range.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "base/scalars.h"

namespace marlin::cuda {
namespace {

bool RoundsToItself(float value, int exponent, bool bf16) {
  const float scaled = std::ldexp(value, exponent);
  const float stored = bf16 ? Bf16ToFloat(FloatToBf16(scaled)) : HalfToFloat(FloatToHalf(scaled));
  return std::isfinite(stored) && std::ldexp(stored, -exponent) == value;
}

/// A float of few or many significant bits, of any exponent; some are subnormal or 0.
float AnyFloat(std::mt19937& random) {
  const uint32_t kept = ~uint32_t{0} << random() % 24;
  const auto bits = static_cast<uint32_t>(random()) & (0xff800000U | kept);
  const auto value = std::bit_cast<float>(bits);
  return std::isfinite(value) ? value : 0.0F;
}

TEST(NumberRangeTest, TellsWhatRoundingEveryNumberDoes) {
  std::mt19937 random(1);
  int64_t fitted = 0;
  for (int i = 0; i < 200'000; ++i) {
    const int exponent = static_cast<int>(random() % 221) - 100;
    std::vector<float> numbers(1 + random() % 2);
    for (float& number : numbers) {
      number = AnyFloat(random);
    }
    NumberRange range;
    for (const float number : numbers) range.Add(number);
    for (const bool bf16 : {false, true}) {
      const bool fits = std::all_of(numbers.begin(), numbers.end(), [&](float number) {
        return RoundsToItself(number, exponent, bf16);
      });
      fitted += fits ? 1 : 0;
      EXPECT_EQ(bf16 ? range.FitsBf16(exponent) : range.FitsF16(exponent), fits)
          << numbers.front() << " and " << numbers.back() << " * 2^" << exponent;
    }
  }
  EXPECT_GT(fitted, 1000);
}

TEST(NumberRangeTest, KnowsSmallIntegers) {
  const auto are = [](std::vector<float> numbers) {
    NumberRange range;
    for (const float number : numbers) range.Add(number);
    return range.AreSmallIntegers();
  };
  EXPECT_TRUE(are({}));
  EXPECT_TRUE(are({0.0F, -0.0F, 1.0F, 96.0F, 127.0F}));
  EXPECT_FALSE(are({127.5F}));
  EXPECT_FALSE(are({128.0F}));
  EXPECT_FALSE(are({8.0F, 0.5F}));
  EXPECT_FALSE(are({-1.0F}));
}

TEST(NumberRangeTest, ReadsEveryTypeInStepsAtAnyAddress) {
  // Elements 1 and 3 of four, one byte past an aligned address.
  const auto range_of = [](const auto& elements, DType type) {
    alignas(8) uint8_t bytes[32] = {};
    std::memcpy(bytes + 1, elements.data(), elements.size() * sizeof(elements[0]));
    NumberRange range;
    range.Add(bytes + 1 + sizeof(elements[0]), type, 2, 2);
    return range;
  };
  const std::vector<std::pair<DType, NumberRange>> ranges = {
      {DType::kF32, range_of(std::vector<float>{9, 0.5F, 9, -3}, DType::kF32)},
      {DType::kF16, range_of(std::vector<uint16_t>{0x7000, 0x3800, 0x7000, 0xc200}, DType::kF16)},
      {DType::kBf16, range_of(std::vector<uint16_t>{0x7000, 0x3f00, 0x7000, 0xc040}, DType::kBf16)},
      {DType::kF8E4M3, range_of(std::vector<uint8_t>{0x70, 0x30, 0x70, 0xc4}, DType::kF8E4M3)},
  };
  for (const auto& [type, range] : ranges) {
    EXPECT_EQ(range.smallest, 0.5F) << DTypeName(type);
    EXPECT_EQ(range.largest, 3.0F) << DTypeName(type);
    EXPECT_EQ(range.lowest_bit, -1) << DTypeName(type);
    EXPECT_EQ(range.significant_bits, 2) << DTypeName(type);
    EXPECT_TRUE(range.negative) << DTypeName(type);
  }
  const NumberRange powers =
      range_of(std::vector<uint8_t>{0, 126, 0, 128}, DType::kF8E8M0).Scaled(3);
  EXPECT_EQ(powers.smallest, 4.0F);
  EXPECT_EQ(powers.largest, 16.0F);
  EXPECT_EQ(powers.significant_bits, 1);
}

}  // namespace
}  // namespace marlin::cuda
