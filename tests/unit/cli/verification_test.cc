#include "cli/commands/verification.h"

#include <gtest/gtest.h>

#include <cmath>

namespace marlin::cli::verification_test {
namespace {

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
}  // namespace marlin::cli::verification_test
