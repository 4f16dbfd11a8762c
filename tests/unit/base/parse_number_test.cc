#include "base/parse_number.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace marlin::parse_number_test {
namespace {

TEST(ParseNumber, TakesTheWholeText) {
  int number = 7;
  EXPECT_TRUE(ParseNumber("-12", &number));
  EXPECT_EQ(number, -12);
  for (const char* text : {"", " 1", "1 ", "1x", "x", "1.5", "99999999999"}) {
    EXPECT_FALSE(ParseNumber(text, &number)) << text;
    EXPECT_EQ(number, -12);
  }
  uint64_t large = 0;
  EXPECT_TRUE(ParseNumber("18446744073709551615", &large));
  EXPECT_EQ(large, UINT64_MAX);
}

TEST(ParseNumber, OfFractions) {
  double number = 7;
  EXPECT_TRUE(ParseNumber("0.25", &number));
  EXPECT_EQ(number, 0.25);
  EXPECT_TRUE(ParseNumber("-1e-3", &number));
  EXPECT_EQ(number, -1e-3);
  for (const char* text : {"", " 1", "1 ", "1x", "0,5", "e"}) {
    EXPECT_FALSE(ParseNumber(text, &number)) << text;
    EXPECT_EQ(number, -1e-3);
  }
}

}  // namespace
}  // namespace marlin::parse_number_test
