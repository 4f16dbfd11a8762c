// Every code of every format against the hand-written table, and every encoder against a walk over
// its values: a few hundred thousand floats here, all 2^32 with MARLIN_EXHAUSTIVE=full.
#include "formats/codecs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "marlin/format.h"
#include "value_grid.h"

namespace marlin::codecs_test {
namespace {

using test::GridWalk;
using test::Mismatches;
using test::ValueGrid;

struct Case {
  const char* name;
  int bits;
  float (*value)(uint32_t);
  uint32_t (*encode)(float);
};

const Case kCases[] = {
#define MARLIN_FORMAT(enumerator, name, codec)                                              \
  {#name, formats::codec::kBits, [](uint32_t code) { return formats::codec::Value(code); }, \
   [](float x) { return static_cast<uint32_t>(formats::codec::Encode(x)); }},
#include "marlin/formats.def"
#undef MARLIN_FORMAT
};

std::vector<double> ExpectedValues(const Case& format) {
  if (std::string(format.name) == "bf16") return test::SixteenBitValues(8);
  if (std::string(format.name) == "fp16") return test::SixteenBitValues(5);
  return test::GoldenValues()[format.name];
}

uint32_t InfinityCode(const Case& format) {
  return std::string(format.name) == "bf16" ? 0x7f80u : 0x7c00u;
}

class Codecs : public ::testing::TestWithParam<Case> {};

TEST_P(Codecs, EveryCodeHasItsValue) {
  const Case& format = GetParam();
  const auto expected = ExpectedValues(format);
  ASSERT_EQ(expected.size(), size_t{1} << format.bits);
  for (uint32_t code = 0; code < expected.size(); ++code) {
    const float got = format.value(code);
    if (std::isnan(expected[code])) {
      EXPECT_TRUE(std::isnan(got)) << code;
      continue;
    }
    EXPECT_EQ(std::signbit(got), std::signbit(expected[code])) << code;
    // In the 16-bit tables infinity is replaced by the power of two past the largest value.
    const bool infinite = format.bits == 16 && (code & 0x7fffu) == InfinityCode(format);
    if (infinite) {
      EXPECT_TRUE(std::isinf(got)) << code;
    } else {
      EXPECT_EQ(static_cast<double>(got), expected[code]) << code;
    }
  }
}

TEST_P(Codecs, PublicTableIsTheCodecs) {
  const Case& format = GetParam();
  const auto parsed = ParseFormat(format.name);
  ASSERT_TRUE(parsed.ok());
  const auto values = FormatValues(*parsed);
  if (format.bits == 16) {
    EXPECT_TRUE(values.empty());
    return;
  }
  ASSERT_EQ(values.size(), size_t{1} << format.bits);
  for (uint32_t code = 0; code < values.size(); ++code) {
    EXPECT_EQ(std::bit_cast<uint32_t>(values[code]), std::bit_cast<uint32_t>(format.value(code)));
  }
}

TEST_P(Codecs, EncodeGivesTheNearestValueTiesToTheEvenCode) {
  const Case& format = GetParam();
  const ValueGrid grid = test::MakeGrid(ExpectedValues(format));
  GridWalk walk(grid);
  Mismatches mismatches;
  test::ForEachFloatAscending(grid, [&](float x) {
    uint32_t expected = walk.Nearest(static_cast<double>(x));
    // Unquantized formats keep the sign of values that round to zero.
    if (format.bits == 16 && expected == 0 && std::signbit(x)) expected = 0x8000u;
    mismatches.Check(x, format.encode(x), expected);
  });
  EXPECT_EQ(mismatches.count(), 0) << mismatches.first();
  EXPECT_GT(mismatches.checked(), 300000);
}

TEST_P(Codecs, EncodeTurnsMinusZeroIntoTheCodeOfZero) {
  const Case& format = GetParam();
  if (format.bits == 16) return;
  EXPECT_EQ(format.encode(-0.0f), format.encode(0.0f)) << format.name;
}

TEST_P(Codecs, EncodeOfNanIsACodeThatMeansNanWhereThereIsOne) {
  const Case& format = GetParam();
  const uint32_t code = format.encode(std::numeric_limits<float>::quiet_NaN());
  EXPECT_LT(code, 1u << format.bits);
  const auto values = ExpectedValues(format);
  const bool has_nan =
      std::any_of(values.begin(), values.end(), [](double v) { return std::isnan(v); });
  EXPECT_EQ(std::isnan(format.value(code)), has_nan) << format.name;
}

TEST(Fp32Codec, CodesAreTheNumbersThemselves) {
  for (uint64_t code = 0; code <= 0xffffffffu; code += 65521) {
    const auto bits = static_cast<uint32_t>(code);
    const float value = formats::Fp32::Value(bits);
    EXPECT_EQ(std::bit_cast<uint32_t>(value), bits);
    EXPECT_EQ(formats::Fp32::Encode(value), bits);
  }
}

std::vector<Case> CasesOfAtMost16Bits() {
  std::vector<Case> cases;
  std::copy_if(std::begin(kCases), std::end(kCases), std::back_inserter(cases),
               [](const Case& format) { return format.bits <= 16; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(AllFormats, Codecs, ::testing::ValuesIn(CasesOfAtMost16Bits()),
                         [](const auto& case_info) { return std::string(case_info.param.name); });

}  // namespace
}  // namespace marlin::codecs_test
