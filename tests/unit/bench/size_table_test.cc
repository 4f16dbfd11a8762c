// Tables of measurements over sizes.
#include "bench/size_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "bench/model.h"

namespace marlin::bench::size_table_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Timing Made(double median) { return {median, 0.9 * median, 1.1 * median, 15, 15}; }

SizeRow MadeRow(const char* matrix, int64_t m, const char* weights, double seconds) {
  SizeRow row;
  row.matrix = matrix;
  row.m = m;
  row.weights = weights;
  row.kernel = m < 8 ? "marlin_a" : "marlin_b";
  row.timing = Made(seconds);
  row.bytes = 1e6;
  row.operations = 2e6;
  row.fraction = 0.5;
  return row;
}

TEST(SizeTables, HaveALineForEverySizeAndFormat) {
  const std::vector<SizeRow> rows = {
      MadeRow("n=1 k=2", 16, "u4", 1e-4), MadeRow("n=1 k=2", 1, "u4", 1e-5),
      MadeRow("n=1 k=2", 1, "s8", 2e-5), MadeRow("n=3 k=4", 4, "u4", 1e-6)};
  EXPECT_EQ(SizeTables(rows, "m"),
            "n=1 k=2\n"
            "\n"
            "m   weights      us  spread   GB/s  TFLOP/s  roofline\n"
            "--  -------  ------  ------  -----  -------  --------\n"
            "1   u4        10.00    20 %  100.0    0.200      50 %\n"
            "1   s8        20.00    20 %   50.0    0.100      50 %\n"
            "16  u4       100.00    20 %   10.0    0.020      50 %\n"
            "\n"
            "marlin_a: s8 m = 1; u4 m = 1\n"
            "marlin_b: u4 m = 16\n"
            "\n"
            "n=3 k=4\n"
            "\n"
            "m  weights    us  spread    GB/s  TFLOP/s  roofline\n"
            "-  -------  ----  ------  ------  -------  --------\n"
            "4  u4       1.00    20 %  1000.0    2.000      50 %\n"
            "\n"
            "marlin_a: u4 m = 4\n");
}

TEST(SizeTables, ListTheSizesOfAKernelOnce) {
  const std::vector<SizeRow> rows = {MadeRow("", 1, "u4", 1e-5), MadeRow("", 2, "u4", 1e-5),
                                     MadeRow("", 1, "u4 2:4", 1e-5)};
  EXPECT_THAT(SizeTables(rows, "m"), HasSubstr("\nmarlin_a: u4 m = 1, 2; u4 2:4 m = 1\n"));
}

TEST(SizeTables, ShowPeersOfSomeRows) {
  std::vector<SizeRow> rows = {MadeRow("", 1, "s4", 1e-5), MadeRow("", 1, "s4 2:4", 5e-6)};
  rows.back().peers.push_back({"dense", Made(1e-5)});
  const std::string text = SizeTables(rows, "m");
  EXPECT_THAT(text, HasSubstr("roofline       dense us\n"));
  EXPECT_THAT(text, HasSubstr("50 %\n"));
  EXPECT_THAT(text, HasSubstr("10.00 (2.00x)\n"));
}

TEST(SizeTables, LeaveOutColumnsWithoutValues) {
  SizeRow row = MadeRow("n=1 k=2", 1, "u4", 1e-5);
  row.operations = 0;
  const std::string text = SizeTables(std::span(&row, 1), "");
  EXPECT_THAT(text, HasSubstr("\nweights     us  spread   GB/s  roofline\n"));
  EXPECT_THAT(text, HasSubstr("\nmarlin_a: u4\n"));
  EXPECT_THAT(text, Not(HasSubstr("TFLOP/s")));
  row.active = 3.25;
  row.chain = Made(6.25e-6);
  const std::string more = SizeTables(std::span(&row, 1), "tokens");
  EXPECT_THAT(more, HasSubstr("tokens  weights  active     us  spread  us in a chain"));
  EXPECT_THAT(more, HasSubstr(" 6.25 (80 %)"));
}

TEST(MicrosecondsText, HasAsManyDecimalsAsMatter) {
  EXPECT_EQ(MicrosecondsText(1.2345e-6), "1.23");
  EXPECT_EQ(MicrosecondsText(1.23456e-3), "1234.6");
  EXPECT_EQ(MicrosecondsText(0.123456), "123456");
}

TEST(ModelPhase, IsNamedAsLlamaBenchDoes) {
  ModelPhase phase;
  phase.prompt_tokens = 512;
  EXPECT_EQ(phase.Test(), "pp512");
  phase.new_tokens = 64;
  EXPECT_EQ(phase.Test(), "tg64 @ d512");
  phase.prompt_tokens = 0;
  EXPECT_EQ(phase.Test(), "tg64");
}

}  // namespace
}  // namespace marlin::bench::size_table_test
