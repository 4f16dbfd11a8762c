// The small floats of base/ over all their bit patterns, and the roundings to them over a few
// hundred thousand floats, or all 2^32 with MARLIN_EXHAUSTIVE=full.
#include "base/scalars.h"

#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>

#include "value_grid.h"

namespace marlin::scalars_test {
namespace {

using test::GridWalk;
using test::Mismatches;
using test::ValueGrid;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Scalars, EveryHalfAndBf16HasItsValue) {
  const auto half = test::SixteenBitValues(5);
  const auto bf16 = test::SixteenBitValues(8);
  const auto check = [](float got, double expected, bool infinite) {
    if (std::isnan(expected)) return std::isnan(got);
    if (std::signbit(got) != std::signbit(expected)) return false;
    return infinite ? std::isinf(got) : static_cast<double>(got) == expected;
  };
  for (uint32_t code = 0; code < 0x10000u; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    EXPECT_TRUE(check(HalfToFloat(bits), half[code], (code & 0x7fffu) == 0x7c00u)) << code;
    EXPECT_TRUE(check(Bf16ToFloat(bits), bf16[code], (code & 0x7fffu) == 0x7f80u)) << code;
  }
}

TEST(Scalars, EveryByteOfFp8AndE8M0HasItsValue) {
  auto golden = test::GoldenValues();
  for (uint32_t code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const auto same = [](float got, double expected) {
      if (std::isnan(expected)) return std::isnan(got);
      return static_cast<double>(got) == expected && std::signbit(got) == std::signbit(expected);
    };
    EXPECT_TRUE(same(Fp8E4M3ToFloat(byte), golden["fp8_e4m3"][code])) << code;
    EXPECT_TRUE(same(Fp8E5M2ToFloat(byte), golden["fp8_e5m2"][code])) << code;
    const double power = code == 255 ? std::nan("") : std::ldexp(1.0, static_cast<int>(code) - 127);
    EXPECT_TRUE(same(E8M0ToFloat(byte), power)) << code;
  }
}

/// Walks the floats; roundings with `keeps_sign` give -0 for negative values that round to zero.
template <typename Encode>
void CheckRounding(const std::vector<double>& values, uint32_t minus_zero, Encode encode) {
  const ValueGrid grid = test::MakeGrid(values);
  GridWalk walk(grid);
  Mismatches mismatches;
  test::ForEachFloatAscending(grid, [&](float x) {
    uint32_t expected = walk.Nearest(static_cast<double>(x));
    if (expected == 0 && std::signbit(x)) expected = minus_zero;
    mismatches.Check(x, encode(x), expected);
  });
  EXPECT_EQ(mismatches.count(), 0) << mismatches.first();
  EXPECT_GT(mismatches.checked(), 300000);
}

TEST(Scalars, FloatToHalfRoundsToNearestEven) {
  CheckRounding(test::SixteenBitValues(5), 0x8000u, FloatToHalf);
  EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(kNan))));
}

TEST(Scalars, FloatToBf16RoundsToNearestEven) {
  CheckRounding(test::SixteenBitValues(8), 0x8000u, FloatToBf16);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(kNan))));
  // A NaN whose upper half alone would be infinity.
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Scalars, FloatToFp8RoundsToNearestEvenAndSaturates) {
  auto golden = test::GoldenValues();
  CheckRounding(golden["fp8_e4m3"], 0x80u, FloatToFp8E4M3);
  EXPECT_EQ(FloatToFp8E4M3(kNan), 0x7f);
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) uint16_t HardwareHalf(float x) {
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}

/// A second oracle, NaN payloads included.
TEST(Scalars, FloatToHalfIsWhatF16cDoes) {
  if (!__builtin_cpu_supports("f16c")) {
    std::puts("skipped: no F16C");
    return;
  }
  const uint64_t step = test::AllFloats() ? 1 : 977;
  Mismatches mismatches;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += step) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    mismatches.Check(x, FloatToHalf(x), HardwareHalf(x));
  }
  EXPECT_EQ(mismatches.count(), 0) << mismatches.first();
}
#endif

}  // namespace
}  // namespace marlin::scalars_test
