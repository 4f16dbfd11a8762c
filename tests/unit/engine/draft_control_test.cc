// How many tokens are guessed, with costs that are given.
#include "engine/speculation/draft_control.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
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

/// The guesses that one text chooses, next to `others` rows without any.
int64_t Choose(DraftControl& control, DraftCosts& costs, int64_t room, int64_t others = 0) {
  DraftChoice text{&control, room};
  ChooseGuesses(costs, 1 + others, 100, {&text, 1});
  return text.guesses;
}

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

/// The first passes of every shape do not count where a device records them.
TEST(DraftCosts, LeaveOutUnsteadyPasses) {
  DraftCosts costs(2);
  for (const double seconds : {90, 99, 4}) {
    EXPECT_FALSE(costs.Knows(3));
    costs.AddPass(3, seconds);
  }
  EXPECT_EQ(costs.PassSeconds(3), 4);
  for (const double seconds : {90, 99, 5}) {
    EXPECT_EQ(costs.PassSeconds(6), 4);
    costs.AddPass(6, seconds);
  }
  EXPECT_EQ(costs.PassSeconds(6), 5);
  for (const double seconds : {90, 99, 8}) {
    EXPECT_EQ(costs.GuessSeconds(1), 0);
    costs.AddGuess(2, seconds);
  }
  EXPECT_EQ(costs.GuessSeconds(1), 4);
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
  DraftCosts costs = CostsOf(Flat, 0);
  DraftControl right = Learned(4, 4);
  DraftControl seldom = Learned(4, 1, 10);
  // Rows cost nothing: every guess is worth it.
  EXPECT_EQ(Choose(right, costs, 100), 64);
  EXPECT_EQ(Choose(seldom, costs, 100), 10);
  EXPECT_EQ(Choose(right, costs, 5), 4);
  EXPECT_EQ(Choose(right, costs, 0), 0);
  // A row costs a tenth of the first one.
  DraftCosts rising = CostsOf([](int64_t rows) { return 0.9 + 0.1 * Linear(rows); }, 0);
  EXPECT_GT(Choose(right, rising, 64), 10);
  EXPECT_GE(Choose(seldom, rising, 64), 1);
  EXPECT_LE(Choose(seldom, rising, 64), 3);
}

/// The choice is the best of few, by the formula.
TEST(DraftControl, ChoosesTheMostTokensPerSecond) {
  for (const double slope : {0.02, 0.1, 0.3, 0.7}) {
    for (const int64_t accepted : {1, 2, 3, 4}) {
      const auto pass = [&](int64_t rows) { return 1 + slope * Linear(rows - 1); };
      DraftControl control = Learned(4, accepted);
      DraftCosts costs = CostsOf(pass, 0.05);
      costs.BeginPass();  // The next one is not for tries.
      int64_t best = 0;
      for (const int64_t k : {1, 2, 3, 4, 6, 8, 12, 16}) {
        const auto rate = [&](int64_t drafts) {
          return control.ExpectedTokens(drafts) / (pass(drafts + 1) + 0.05 * Linear(drafts));
        };
        if (rate(k) > rate(best) + 1e-9) best = k;
      }
      EXPECT_EQ(Choose(control, costs, 20), best) << slope << " " << accepted;
    }
  }
}

TEST(DraftControl, DoesNotGuessWhereItCostsMore) {
  // A guess costs as much as a token.
  DraftControl control = Learned(4, 4);
  DraftCosts costs = CostsOf(Linear, 0.1);
  const auto passes_until_try = [&](DraftControl& text) {
    for (int passes = 1; passes < 99; ++passes) {
      if (Choose(text, costs, 9) > 0) return passes;
    }
    return 99;
  };
  EXPECT_EQ(passes_until_try(control), 1);
  // It tries again after longer pauses, whether or not the try is right.
  for (const int pause : {4, 4, 8, 16, 32, 32}) {
    EXPECT_EQ(passes_until_try(control), pause);
    control.Learn(1, 1);
  }
  // One that came later tries in the same passes.
  DraftControl later = Learned(4, 0);
  for (int i = 0; i < 5; ++i) passes_until_try(later);
  DraftChoice texts[] = {{&control, 9}, {&later, 9}};
  int64_t together = 0;
  int64_t alone = 0;
  for (int i = 0; i < 200; ++i) {
    ChooseGuesses(costs, 2, 100, texts);
    together += texts[0].guesses * texts[1].guesses;
    alone += std::abs(texts[0].guesses - texts[1].guesses);
    texts[0].guesses = texts[1].guesses = 0;
  }
  EXPECT_GE(together, 6);
  EXPECT_LE(alone, 1);
  // Where a pass turns out to be cheap, it does not wait, nor for long then.
  DraftCosts cheap = CostsOf(Flat, 0);
  EXPECT_EQ(Choose(control, cheap, 9), 8);
  EXPECT_LE(passes_until_try(control), 2);
}

TEST(DraftControl, CountsWhatOthersInThePassCost) {
  const auto pass = [](int64_t rows) { return rows <= 8 ? 1.0 : 0.125 * Linear(rows); };
  DraftCosts costs = CostsOf(pass, 0);
  costs.BeginPass();  // The next one is not for tries.
  DraftControl control = Learned(2, 1);
  EXPECT_EQ(Choose(control, costs, 7), 6);
  costs.BeginPass();
  // Seven others have one row each: another row costs as much as a token of them.
  EXPECT_EQ(Choose(control, costs, 64, 7), 0);
  EXPECT_EQ(Choose(control, costs, 64, 5), 2);
}

/// Texts guess as many if they are right as often, and fewer, or none, if they are not.
TEST(DraftControl, TextsOfAPassGuessAsFar) {
  DraftCosts costs = CostsOf([](int64_t rows) { return 0.9 + 0.02 * Linear(rows); }, 0.01);
  costs.BeginPass();
  DraftControl right = Learned(4, 4);
  DraftControl often = Learned(4, 3);
  DraftControl seldom = Learned(4, 0);
  DraftControl always({.tokens = 5, .always = true});
  DraftChoice texts[] = {{&seldom, 60}, {&often, 60}, {&right, 60},
                         {&right, 60},  {&right, 2},  {&always, 60}};
  ChooseGuesses(costs, 6, 60, texts);
  EXPECT_EQ(texts[0].guesses, 0);
  EXPECT_GT(texts[1].guesses, 0);
  EXPECT_GT(texts[2].guesses, 2 * texts[1].guesses);
  EXPECT_EQ(texts[3].guesses, texts[2].guesses);
  EXPECT_EQ(texts[4].guesses, 2);
  EXPECT_EQ(texts[5].guesses, 5);
  // There is room for some of them.
  for (DraftChoice& text : texts) text.guesses = 0;
  costs.BeginPass();
  ChooseGuesses(costs, 6, 7, texts);
  EXPECT_EQ(texts[5].guesses, 5);
  EXPECT_EQ(texts[2].guesses + texts[3].guesses + texts[4].guesses, 2);
}

TEST(DraftControl, TriesMoreRowsStepByStep) {
  DraftCosts costs;
  DraftControl control({.tokens = 64});
  EXPECT_EQ(Choose(control, costs, 64), 0);
  costs.AddPass(2, 1);
  EXPECT_EQ(Choose(control, costs, 64), 0);
  costs.AddPass(1, 1);
  EXPECT_EQ(Choose(control, costs, 64), 6);
  costs.AddPass(7, 1);
  EXPECT_EQ(Choose(control, costs, 64), 12);
  costs.AddPass(13, 1);
  EXPECT_EQ(Choose(control, costs, 64), 24);
}

/// A text that no guess pays for gives up where it costs much to let the draft follow it.
TEST(DraftControl, GivesUpWhereFollowingCostsMuch) {
  DraftControl wrong = Learned(4, 0);
  DraftControl unknown({.tokens = 4});
  DraftControl right = Learned(4, 4);
  const auto give_up = [](DraftControl& control, double follow, bool has_draft = true,
                          const Cost& pass = Linear) {
    DraftCosts costs = CostsOf(pass, 0.1);
    costs.BeginPass();
    costs.AddFollow(32, 32 * follow);
    DraftChoice text{&control, 9, has_draft};
    ChooseGuesses(costs, 4, 100, {&text, 1});
    return text.gives_up;
  };
  // A token of a text costs 1, and so does a guess.
  EXPECT_FALSE(give_up(wrong, 0));
  EXPECT_FALSE(give_up(wrong, 0.04));
  EXPECT_TRUE(give_up(wrong, 0.06));
  EXPECT_FALSE(give_up(wrong, 0.06, false));
  EXPECT_FALSE(give_up(unknown, 0.06));
  EXPECT_TRUE(give_up(right, 0.06));
  EXPECT_FALSE(give_up(right, 0.06, true, Flat));
}

TEST(DraftControl, AlwaysGuessesIfAsked) {
  DraftControl control({.tokens = 5, .always = true});
  DraftCosts costs = CostsOf(Linear, 9);
  for (int i = 0; i < 9; ++i) control.Learn(5, 0);
  EXPECT_EQ(Choose(control, costs, 64), 5);
  EXPECT_EQ(Choose(control, costs, 2), 2);
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
