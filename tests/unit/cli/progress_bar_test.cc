#include "cli/progress_bar.h"

#include <gtest/gtest.h>

namespace marlin::cli::progress_bar_test {
namespace {

TEST(ClockTime, ShowsHoursOnlyWhereThereAreAny) {
  EXPECT_EQ(ClockTime(0), "0:00");
  EXPECT_EQ(ClockTime(45.4), "0:45");
  EXPECT_EQ(ClockTime(3599.6), "1:00:00");
  EXPECT_EQ(ClockTime(4350), "1:12:30");
}

TEST(TimeLeft, WaitsForFivePercent) {
  EXPECT_EQ(TimeLeft(0, 10), "");
  EXPECT_EQ(TimeLeft(0.05, 10), "");
  EXPECT_EQ(TimeLeft(0.5, 4350), ", 1:12:30 left");
  EXPECT_EQ(TimeLeft(1, 10), ", 0:00 left");
}

}  // namespace
}  // namespace marlin::cli::progress_bar_test
