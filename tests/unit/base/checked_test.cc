#include "base/checked.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace marlin::checked_test {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

static_assert(!std::is_convertible_v<Checked, int64_t>, "only Take() yields a number");
static_assert(!std::is_convertible_v<int64_t, Checked>, "a plain number does not mix in silently");

TEST(Checked, ComputesWhatFits) {
  EXPECT_EQ((Checked(3) * Checked(5) + Checked(7) - Checked(2)).Take(), 20);
  EXPECT_EQ((Checked(kMax) + Checked(0)).Take(), kMax);
  EXPECT_EQ((Checked(kMax) * Checked(1)).Take(), kMax);
  EXPECT_EQ((Checked(5) - Checked(5)).Take(), 0);
  EXPECT_EQ(Checked::FromUnsigned(static_cast<uint64_t>(kMax)).Take(), kMax);
}

TEST(Checked, RefusesWhatDoesNotFit) {
  EXPECT_FALSE(Checked(-1).valid());
  EXPECT_FALSE(Checked::FromUnsigned(static_cast<uint64_t>(kMax) + 1).valid());
  EXPECT_FALSE((Checked(kMax) + Checked(1)).valid());
  EXPECT_FALSE((Checked(int64_t{1} << 32) * Checked(int64_t{1} << 32)).valid());
  EXPECT_FALSE((Checked(4) - Checked(5)).valid());
  EXPECT_FALSE(CeilDiv(Checked(4), Checked(0)).valid());
}

TEST(Checked, OverflowSticksThroughEveryOperation) {
  const Checked bad = Checked(kMax) + Checked(1);
  EXPECT_FALSE((bad * Checked(0)).Take().has_value());
  EXPECT_FALSE((Checked(0) * bad).Take().has_value());
  EXPECT_FALSE((bad + Checked(0)).Take().has_value());
  EXPECT_FALSE((bad - bad).Take().has_value());
  EXPECT_FALSE(CeilDiv(bad, Checked(1)).Take().has_value());
  EXPECT_FALSE(CeilDiv(Checked(1), bad).Take().has_value());
}

TEST(Checked, CeilDivRoundsUpWithoutOverflow) {
  EXPECT_EQ(CeilDiv(Checked(0), Checked(8)).Take(), 0);
  EXPECT_EQ(CeilDiv(Checked(8), Checked(8)).Take(), 1);
  EXPECT_EQ(CeilDiv(Checked(9), Checked(8)).Take(), 2);
  EXPECT_EQ(CeilDiv(Checked(kMax), Checked(2)).Take(), kMax / 2 + 1);
  EXPECT_EQ(CeilDivide(kMax, 2), kMax / 2 + 1);
  EXPECT_EQ(RoundUp(65, 64), 128);
  EXPECT_EQ(RoundUp(64, 64), 64);
  EXPECT_EQ(RoundUp(0, 64), 0);
}

}  // namespace
}  // namespace marlin::checked_test
