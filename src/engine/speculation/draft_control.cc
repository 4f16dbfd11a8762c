#include "engine/speculation/draft_control.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <vector>

namespace marlin {
namespace {

/// The share of a difference by which a measured time rises.
constexpr double kRise = 0.125;
/// Rows that may be tried at first.
constexpr int64_t kFirstRows = 8;
/// The weight of a guess after the next one: the estimate is of about twenty guesses.
constexpr double kKept = 0.95;
/// The acceptance of a text that nothing is known of, which counts as one guess.
constexpr double kPrior = 0.5;
/// The longest pause, after which a text may have become repetitive.
constexpr int64_t kMostPause = 32;
/// Guesses after which a text that none pays for may give up, and the share of its time that it may
/// cost to feed a draft without a guess.
constexpr double kTried = 2.5;
constexpr double kMostFollow = 0.05;
/// Numbers of guesses.
constexpr int64_t kCounts[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, kMostDrafts};

void Update(double seconds, double* estimate) {
  const bool falls = *estimate == 0 || seconds < *estimate;
  *estimate = falls ? seconds : *estimate + kRise * (seconds - *estimate);
}

}  // namespace

void DraftCosts::AddPass(int64_t rows, double seconds) {
  if (int& begun = begun_[rows]; begun < unsteady_) {
    ++begun;
  } else {
    Update(seconds, &passes_[rows]);
  }
}

void DraftCosts::AddGuess(int64_t tokens, double seconds) {
  if (tokens == 0) return;
  if (guesses_begun_ < unsteady_) {
    ++guesses_begun_;
  } else {
    Update(seconds / static_cast<double>(tokens), &guess_);
  }
}

void DraftCosts::AddFollow(int64_t tokens, double seconds) {
  if (tokens > 0) Update(seconds / static_cast<double>(tokens), &follow_);
}

double DraftCosts::PassSeconds(int64_t rows) const {
  const auto above = passes_.lower_bound(rows);
  if (above == passes_.end()) return passes_.rbegin()->second;
  double seconds = above->second;
  if (above->first != rows && above != passes_.begin()) {
    const auto below = std::prev(above);
    const double part =
        static_cast<double>(rows - below->first) / static_cast<double>(above->first - below->first);
    seconds = below->second + part * (above->second - below->second);
  }
  const auto cheaper = [](const auto& a, const auto& b) { return a.second < b.second; };
  return std::min(seconds, std::min_element(above, passes_.end(), cheaper)->second);
}

int64_t DraftCosts::MostRows() const {
  return passes_.empty() ? 1 : std::max(kFirstRows, 2 * passes_.rbegin()->first);
}

double DraftControl::Acceptance() const { return (accepted_ + kPrior) / (tried_ + 1); }

double DraftControl::ExpectedTokens(int64_t drafts) const {
  const double rate = Acceptance();
  return (1 - std::pow(rate, static_cast<double>(drafts + 1))) / (1 - rate);
}

bool DraftControl::IsTried() const { return tried_ >= kTried; }

bool DraftControl::Tries(int64_t pass) {
  if (pass % pause_ != 0) return false;
  pause_ = std::min(2 * pause_, kMostPause);
  return true;
}

void DraftControl::Learn(int64_t drafted, int64_t accepted) {
  if (drafted == 0) return;
  ++counts_.passes;
  counts_.drafted += drafted;
  counts_.accepted += accepted;
  // Guesses after the first that failed say nothing.
  const auto tried = static_cast<double>(std::min(accepted + 1, drafted));
  const double kept = std::pow(kKept, tried);
  tried_ = kept * tried_ + tried;
  accepted_ = kept * accepted_ + static_cast<double>(accepted);
}

namespace {

/// The rows of a pass, and the tokens that are expected of them, as guesses are added.
struct ExpectedPass {
  int64_t rows = 0;
  double tokens = 0;
  int64_t guesses = 0;  ///< The most of a text: all are made together.

  void Add(const DraftControl& control, int64_t drafts) {
    rows += drafts;
    tokens += control.ExpectedTokens(drafts) - 1;
    guesses = std::max(guesses, drafts);
  }
  double Rate(const DraftCosts& costs) const {
    return tokens / (costs.GuessSeconds(guesses) + costs.PassSeconds(rows));
  }
};

/// The guesses of a text that are accepted with a probability of `least` or more: one of kCounts,
/// or all that are asked for.
int64_t CountLikely(const DraftChoice& text, double least) {
  constexpr double kRounding = 1e-9;
  const double likely = std::log(least) / std::log(text.control->Acceptance()) + kRounding;
  const auto most = static_cast<double>(text.most);
  if (likely >= most && text.most == text.control->most()) return text.most;
  const auto above = std::ranges::upper_bound(kCounts, std::min(likely, most));
  return above == std::begin(kCounts) ? 0 : *std::prev(above);
}

/// The first `texts` make the guesses that are accepted with a probability of `least` or more.
struct BestGuesses {
  size_t texts = 0;
  double least = 1;
};

/// Those that promise the most tokens per second. `texts`: the ones with the highest acceptance
/// first.
BestGuesses FindBest(const DraftCosts& costs, const ExpectedPass& without, int64_t room,
                     std::span<DraftChoice* const> texts) {
  BestGuesses best;
  if (texts.empty()) return best;
  double highest = without.Rate(costs);
  const int64_t most_rows = std::min(without.rows + room, costs.MostRows());
  const double acceptance = texts.front()->control->Acceptance();
  for (const int64_t count : kCounts) {
    const double least = std::pow(acceptance, static_cast<double>(count));
    ExpectedPass pass = without;
    for (size_t i = 0; i < texts.size(); ++i) {
      const int64_t drafts = CountLikely(*texts[i], least);
      if (drafts == 0 || pass.rows + drafts > most_rows) break;
      pass.Add(*texts[i]->control, drafts);
      const double rate = pass.Rate(costs);
      if (rate <= highest) continue;
      highest = rate;
      best = {i + 1, least};
    }
  }
  return best;
}

}  // namespace

void ChooseGuesses(DraftCosts& costs, int64_t rows, int64_t room, std::span<DraftChoice> texts) {
  const int64_t pass = costs.BeginPass();
  ExpectedPass expected{rows, static_cast<double>(rows)};
  std::vector<DraftChoice*> free;
  const auto guess = [&](DraftChoice& text, int64_t drafts) {
    text.guesses = std::min(drafts, room);
    room -= text.guesses;
    expected.Add(*text.control, text.guesses);
  };
  for (DraftChoice& text : texts) {
    text.most = std::min(text.most, text.control->most());
    if (text.most <= 0) continue;
    if (text.control->always()) {
      guess(text, text.most);
    } else {
      free.push_back(&text);
    }
  }
  if (!costs.Knows(expected.rows)) return;
  std::ranges::stable_sort(free, std::greater(),
                           [](const DraftChoice* text) { return text->control->Acceptance(); });
  const BestGuesses best = FindBest(costs, expected, room, free);
  const double of_text = costs.PassSeconds(rows) / static_cast<double>(rows);
  const bool costs_much = costs.FollowSeconds() > kMostFollow * of_text;
  for (size_t i = 0; i < free.size(); ++i) {
    if (i < best.texts) {
      guess(*free[i], CountLikely(*free[i], best.least));
      free[i]->control->EndPause();
    } else if (costs_much && free[i]->has_draft && free[i]->control->IsTried()) {
      free[i]->gives_up = true;
    } else if (room > 0 && free[i]->control->Tries(pass)) {
      guess(*free[i], 1);
    }
  }
}

}  // namespace marlin
