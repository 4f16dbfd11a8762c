#include "base/text_table.h"

#include <gtest/gtest.h>

namespace marlin::text_table_test {
namespace {

TEST(Table, AlignsColumns) {
  Table table({"name", "n"}, 1);
  table.AddRow({"a", "100"});
  table.AddRow({"longer", "7"});
  EXPECT_EQ(table.ToString(),
            "name      n\n"
            "------  ---\n"
            "a       100\n"
            "longer    7\n");
}

TEST(Table, EmptyCellsLeaveNoTrailingSpace) {
  Table table({"a", "b"}, 2);
  table.AddRow({"x", ""});
  EXPECT_EQ(table.ToString(), "a  b\n-  -\nx\n");
}

TEST(Format, Counts) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1.00 K");
  EXPECT_EQ(FormatCount(46702792704), "46.70 B");
  // Rounds up into the next unit instead of to "1000.00 K".
  EXPECT_EQ(FormatCount(999999), "1.00 M");
  EXPECT_EQ(FormatBytes(999), "999 B");
  EXPECT_EQ(FormatBytes(1500000000), "1.50 GB");
  EXPECT_EQ(FormatBytes(int64_t{2} * 1000 * 1000 * 1000 * 1000 * 1000), "2000.00 TB");
}

TEST(Format, IntegersInGroupsOfThree) {
  EXPECT_EQ(FormatInteger(0), "0");
  EXPECT_EQ(FormatInteger(999), "999");
  EXPECT_EQ(FormatInteger(46517), "46,517");
  EXPECT_EQ(FormatInteger(100000), "100,000");
  EXPECT_EQ(FormatInteger(-1234567), "-1,234,567");
  EXPECT_EQ(FormatInteger(-999), "-999");
}

TEST(Format, CountsThings) {
  EXPECT_EQ(FormatCounted(1, "tensor"), "1 tensor");
  EXPECT_EQ(FormatCounted(0, "tensor"), "0 tensors");
  EXPECT_EQ(FormatCounted(46517, "tensor"), "46,517 tensors");
}

TEST(Format, Rates) {
  EXPECT_EQ(FormatRate(3.44), "3.4");
  EXPECT_EQ(FormatRate(99.94), "99.9");
  EXPECT_EQ(FormatRate(99.96), "100");
  EXPECT_EQ(FormatRate(43077.3), "43,077");
}

TEST(Format, PercentagesWithOneDecimal) {
  EXPECT_EQ(FormatPercent(0.109), "10.9 %");
  EXPECT_EQ(FormatPercent(0), "0.0 %");
  EXPECT_EQ(FormatPercent(1), "100.0 %");
  EXPECT_EQ(FormatPercent(0.0001), "< 0.1 %");
  EXPECT_EQ(FormatPercent(0.9999), "> 99.9 %");
  EXPECT_EQ(FormatPercent(1.5), "150.0 %");
  EXPECT_EQ(FormatChange(0.051), "+5.1 %");
  EXPECT_EQ(FormatChange(-0.002), "-0.2 %");
}

}  // namespace
}  // namespace marlin::text_table_test
