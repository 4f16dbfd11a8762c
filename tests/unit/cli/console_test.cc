#include "cli/console.h"

#include <gtest/gtest.h>

namespace marlin::cli::console_test {
namespace {

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

}  // namespace
}  // namespace marlin::cli::console_test
