#include "engine/speculation/prompt_lookup.h"

#include <algorithm>

namespace marlin {
namespace {

/// A match of this many tokens is as good as a longer one.
constexpr int64_t kLongMatch = 4;
/// Occurrences that are compared, so that a frequent pair does not cost more in a longer text.
constexpr int kMostCompared = 64;

uint64_t PairAt(std::span<const int32_t> tokens, size_t end) {
  return uint64_t{static_cast<uint32_t>(tokens[end - 1])} << 32 |
         static_cast<uint32_t>(tokens[end]);
}

/// Tokens before two ends that are equal, up to kLongMatch.
int64_t MatchBefore(std::span<const int32_t> tokens, int64_t a, int64_t b) {
  int64_t count = 0;
  while (count < kLongMatch && count <= a &&
         tokens[static_cast<size_t>(a - count)] == tokens[static_cast<size_t>(b - count)]) {
    ++count;
  }
  return count;
}

}  // namespace

/// Adds the pairs whose last token has another one after it: those that may be found.
void PromptLookup::Index(std::span<const int32_t> tokens) {
  if (previous_end_.empty() && !tokens.empty()) previous_end_.push_back(-1);
  for (size_t end = previous_end_.size(); end + 1 < tokens.size(); ++end) {
    const auto [place, added] =
        last_end_.try_emplace(PairAt(tokens, end), static_cast<int32_t>(end));
    previous_end_.push_back(added ? -1 : place->second);
    place->second = static_cast<int32_t>(end);
  }
}

/// The last token of the best earlier occurrence of the text's last tokens, or -1.
int64_t PromptLookup::FindEnd(std::span<const int32_t> tokens) const {
  const auto last = static_cast<int64_t>(tokens.size()) - 1;
  const auto found = last_end_.find(PairAt(tokens, tokens.size() - 1));
  int64_t best = -1;
  int64_t longest = 0;
  int64_t end = found == last_end_.end() ? -1 : found->second;
  for (int i = 0; end >= 0 && i < kMostCompared && longest < kLongMatch; ++i) {
    const int64_t match = MatchBefore(tokens, end, last);
    if (match > longest) {
      longest = match;
      best = end;
    }
    end = previous_end_[static_cast<size_t>(end)];
  }
  return best;
}

Status PromptLookup::GuessAll(std::span<GuessRequest> requests) {
  for (GuessRequest& request : requests) {
    request.guess =
        static_cast<PromptLookup&>(*request.drafter).Guess(request.tokens, request.most);
  }
  return {};
}

std::vector<int32_t> PromptLookup::Guess(std::span<const int32_t> tokens, int64_t most) {
  std::vector<int32_t> guess;
  if (tokens.size() < 2) return guess;
  Index(tokens);
  const int64_t end = FindEnd(tokens);
  if (end < 0) return guess;
  const auto first = static_cast<size_t>(end) + 1;
  for (size_t i = 0; i < static_cast<size_t>(most); ++i) {
    // Past the end of the text it repeats what it has guessed.
    const size_t place = first + i;
    guess.push_back(place < tokens.size() ? tokens[place] : guess[place - tokens.size()]);
  }
  return guess;
}

}  // namespace marlin
