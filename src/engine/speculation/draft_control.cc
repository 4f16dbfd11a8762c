#include "engine/speculation/draft_control.h"

#include <algorithm>
#include <cmath>
#include <iterator>

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

void Update(double seconds, double* estimate) {
  const bool falls = *estimate == 0 || seconds < *estimate;
  *estimate = falls ? seconds : *estimate + kRise * (seconds - *estimate);
}

}  // namespace

void DraftCosts::AddPass(int64_t rows, double seconds) { Update(seconds, &passes_[rows]); }

void DraftCosts::AddGuess(int64_t tokens, double seconds) {
  if (tokens > 0) Update(seconds / static_cast<double>(tokens), &guess_);
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

int64_t DraftControl::Best(const DraftCosts& costs, const DraftedPass& pass, int64_t room) const {
  int64_t best = 0;
  double most = 0;
  for (int64_t drafts = 0; drafts <= room; ++drafts) {
    const int64_t rows = pass.rows + 1 + drafts;
    if (drafts > 0 && rows > costs.MostRows()) break;
    const double rate =
        (pass.tokens + ExpectedTokens(drafts)) /
        (costs.GuessSeconds(std::max(pass.guesses, drafts)) + costs.PassSeconds(rows));
    if (rate <= most) continue;
    most = rate;
    best = drafts;
  }
  return best;
}

int64_t DraftControl::Choose(const DraftCosts& costs, const DraftedPass& pass, int64_t room) {
  room = std::min(room, most_);
  if (room <= 0) return 0;
  if (always_) return room;
  if (!costs.Knows(pass.rows + 1)) return 0;
  const int64_t best = Best(costs, pass, room);
  if (best > 0) {
    waited_ = 0;
    pause_ = 1;
    return best;
  }
  if (++waited_ <= pause_) return 0;
  waited_ = 0;
  pause_ = std::min(2 * pause_, kMostPause);
  return 1;
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

}  // namespace marlin
