#include "cli/table.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cli/console.h"
#include "cli/verification.h"

namespace marlin::cli {
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

TEST(ExitCode, MapsEveryCode) {
  EXPECT_EQ(ExitCode(Code::kOk), 0);
  EXPECT_EQ(ExitCode(Code::kInvalidArgument), 1);
  EXPECT_EQ(ExitCode(Code::kUnsupported), 1);
  EXPECT_EQ(ExitCode(Code::kMalformedFile), 2);
  EXPECT_EQ(ExitCode(Code::kNonFiniteInput), 2);
  EXPECT_EQ(ExitCode(Code::kIo), 3);
  EXPECT_EQ(ExitCode(Code::kOutOfMemory), 4);
  EXPECT_EQ(ExitCode(Code::kDeviceLost), 5);
  EXPECT_EQ(ExitCode(Code::kInternal), 70);
}

TEST(ErrorSums, FollowTheirDefinitions) {
  ErrorSums sums{.weight_squares = 400, .error_squares = 4, .max_error = 1.5, .parameters = 10};
  EXPECT_DOUBLE_EQ(sums.RelativeError(), 0.1);
  EXPECT_DOUBLE_EQ(sums.SqnrDb(), 20.0);
  sums.Add({.weight_squares = 0, .error_squares = 0, .max_error = 2, .parameters = 5});
  EXPECT_EQ(sums.max_error, 2);
  EXPECT_EQ(sums.parameters, 15);
  EXPECT_EQ(ErrorSums().RelativeError(), 0);
  EXPECT_TRUE(std::isinf(ErrorSums().SqnrDb()));
}

}  // namespace
}  // namespace marlin::cli
