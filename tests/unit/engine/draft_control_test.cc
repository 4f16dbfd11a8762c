// How many tokens are guessed, with costs that are given.
#include "engine/speculation/draft_control.h"

#include <gtest/gtest.h>

#include <functional>

namespace marlin::draft_control_test {
namespace {

using Cost = std::function<double(int64_t)>;

/// Passes of up to 65 rows were measured.
DraftCosts CostsOf(const Cost& pass, double guess) {
  DraftCosts costs;
  for (int64_t rows = 1; rows <= 65; ++rows) costs.AddPass(rows, pass(rows));
  costs.AddGuess(4, 4 * guess);
  return costs;
}

double Flat(int64_t /*rows*/) { return 1.0; }
double Linear(int64_t rows) { return static_cast<double>(rows); }

/// A text of which `accepted` of `drafted` guesses were accepted, many times.
DraftControl Learned(int64_t drafted, int64_t accepted, int64_t most = 64) {
  DraftControl control({.tokens = most});
  for (int i = 0; i < 100; ++i) control.Learn(drafted, accepted);
  return control;
}

TEST(DraftCosts, FallAtOnceAndRiseSlowly) {
  DraftCosts costs;
  EXPECT_FALSE(costs.Knows(5));
  costs.AddPass(1, 4);
  costs.AddPass(1, 2);
  EXPECT_EQ(costs.PassSeconds(1), 2);
  costs.AddPass(1, 10);
  EXPECT_EQ(costs.PassSeconds(1), 3);
  EXPECT_EQ(costs.GuessSeconds(3), 0);
  costs.AddGuess(2, 8);
  costs.AddGuess(0, 8);
  EXPECT_EQ(costs.GuessSeconds(3), 12);
}

TEST(DraftCosts, AreInterpolatedAndRiseWithRows) {
  DraftCosts costs;
  costs.AddPass(2, 10);
  costs.AddPass(6, 18);
  EXPECT_FALSE(costs.Knows(1));
  EXPECT_TRUE(costs.Knows(3));
  EXPECT_EQ(costs.PassSeconds(2), 10);
  EXPECT_EQ(costs.PassSeconds(3), 12);
  EXPECT_EQ(costs.PassSeconds(6), 18);
  EXPECT_EQ(costs.PassSeconds(60), 18);
  // A pass that was disturbed once does not hide a longer one.
  costs.AddPass(8, 12);
  EXPECT_EQ(costs.PassSeconds(6), 12);
  EXPECT_EQ(costs.PassSeconds(3), 12);
  EXPECT_EQ(costs.MostRows(), 16);
}

TEST(DraftControl, GuessesMoreWhereGuessesAreRight) {
  const DraftCosts costs = CostsOf(Flat, 0);
  // Rows cost nothing: every guess is worth it.
  EXPECT_EQ(Learned(4, 4).Choose(costs, {}, 100), 64);
  EXPECT_EQ(Learned(4, 1, 10).Choose(costs, {}, 100), 10);
  EXPECT_EQ(Learned(4, 4).Choose(costs, {}, 3), 3);
  EXPECT_EQ(Learned(4, 4).Choose(costs, {}, 0), 0);
  // A row costs a tenth of the first one.
  const DraftCosts rising = CostsOf([](int64_t rows) { return 0.9 + 0.1 * Linear(rows); }, 0);
  const int64_t right = Learned(8, 8).Choose(rising, {}, 64);
  const int64_t seldom = Learned(4, 1).Choose(rising, {}, 64);
  EXPECT_GT(right, 10);
  EXPECT_GE(seldom, 1);
  EXPECT_LE(seldom, 3);
}

/// The choice is the best of all, by the formula.
TEST(DraftControl, ChoosesTheMostTokensPerSecond) {
  for (const double slope : {0.02, 0.1, 0.3, 0.7}) {
    for (const int64_t accepted : {1, 2, 3, 4}) {
      const auto pass = [&](int64_t rows) { return 1 + slope * Linear(rows - 1); };
      DraftControl control = Learned(4, accepted);
      const DraftCosts costs = CostsOf(pass, 0.05);
      int64_t best = 0;
      for (int64_t k = 0; k <= 20; ++k) {
        const auto rate = [&](int64_t drafts) {
          return control.ExpectedTokens(drafts) / (pass(drafts + 1) + 0.05 * Linear(drafts));
        };
        if (rate(k) > rate(best) + 1e-9) best = k;
      }
      EXPECT_EQ(DraftControl(control).Choose(costs, {}, 20), best) << slope << " " << accepted;
    }
  }
}

TEST(DraftControl, DoesNotGuessWhereItCostsMore) {
  // A guess costs as much as a token.
  DraftControl control = Learned(4, 4);
  const DraftCosts costs = CostsOf(Linear, 0.1);
  // It tries again after 1, 2, 4, ... passes, whether or not the try is right.
  for (const int pause : {1, 2, 4, 8, 16, 32, 32}) {
    for (int i = 0; i < pause; ++i) ASSERT_EQ(control.Choose(costs, {}, 9), 0) << pause;
    ASSERT_EQ(control.Choose(costs, {}, 9), 1) << pause;
    control.Learn(1, 1);
  }
  // Where a pass turns out to be cheap, it does not wait.
  const DraftCosts cheap = CostsOf(Flat, 0);
  EXPECT_EQ(control.Choose(cheap, {}, 9), 9);
  EXPECT_EQ(control.Choose(costs, {}, 9), 0);
  EXPECT_EQ(control.Choose(costs, {}, 9), 1);
}

TEST(DraftControl, CountsWhatOthersInThePassCost) {
  const auto pass = [](int64_t rows) { return rows <= 8 ? 1.0 : 0.125 * Linear(rows); };
  const DraftCosts costs = CostsOf(pass, 0);
  DraftControl control = Learned(2, 1);
  EXPECT_EQ(control.Choose(costs, {}, 64), 7);
  // Seven others have one row each: another row costs as much as a token of them.
  EXPECT_EQ(control.Choose(costs, {.rows = 7, .tokens = 7}, 64), 0);
  EXPECT_EQ(control.Choose(costs, {.rows = 5, .tokens = 5}, 64), 2);
}

TEST(DraftControl, TriesMoreRowsStepByStep) {
  DraftCosts costs;
  DraftControl control({.tokens = 64});
  EXPECT_EQ(control.Choose(costs, {}, 64), 0);
  costs.AddPass(2, 1);
  EXPECT_EQ(control.Choose(costs, {}, 64), 0);
  costs.AddPass(1, 1);
  EXPECT_EQ(control.Choose(costs, {}, 64), 7);
  costs.AddPass(8, 1);
  EXPECT_EQ(control.Choose(costs, {}, 64), 15);
  costs.AddPass(16, 1);
  EXPECT_EQ(control.Choose(costs, {}, 64), 31);
}

TEST(DraftControl, AlwaysGuessesIfAsked) {
  DraftControl control({.tokens = 5, .always = true});
  const DraftCosts costs = CostsOf(Linear, 9);
  for (int i = 0; i < 9; ++i) control.Learn(5, 0);
  EXPECT_EQ(control.Choose(costs, {}, 64), 5);
  EXPECT_EQ(control.Choose(costs, {}, 2), 2);
}

TEST(DraftControl, CountsItsGuesses) {
  DraftControl control({.tokens = 5});
  control.Learn(4, 4);
  control.Learn(0, 0);
  control.Learn(5, 1);
  EXPECT_EQ(control.counts().passes, 2);
  EXPECT_EQ(control.counts().drafted, 9);
  EXPECT_EQ(control.counts().accepted, 5);
  EXPECT_EQ(control.counts().MeanAccepted(), 2.5);
  EXPECT_EQ(DraftCounts().MeanAccepted(), 0);
}

}  // namespace
}  // namespace marlin::draft_control_test
