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

}  // namespace
}  // namespace marlin::text_table_test
