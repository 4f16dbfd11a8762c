// Speculation without a draft model: guesses of how a text goes on, from what it has said before.
// ForwardAndSample verifies them (SequenceInput::drafts).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace marlin {

/// Prompt lookup in one text: where its last tokens occurred before, the same tokens may follow. A
/// text whose guesses fail gets fewer of them, and less often.
class PromptLookup {
 public:
  /// Guesses up to `most` tokens at a time; 0: none.
  explicit PromptLookup(int64_t most) : most_(most), length_(most) {}

  /// Guesses up to `room` tokens that follow `tokens`: the prompt and what was generated, which has
  /// only grown since the last call. Empty without an earlier occurrence of the last two tokens. Of
  /// several occurrences it takes the one with the longest match, and of those the latest one.
  std::vector<int32_t> Guess(std::span<const int32_t> tokens, int64_t room);
  /// Learns how many of the tokens guessed last were accepted. Tokens that were not fed count as
  /// not guessed.
  void Learn(int64_t guessed, int64_t accepted);

 private:
  void Index(std::span<const int32_t> tokens);
  int64_t FindEnd(std::span<const int32_t> tokens) const;

  int64_t most_;
  int64_t length_;       ///< Tokens of the next guess, at most.
  int64_t pause_ = 0;    ///< Calls that guess nothing.
  int64_t penalty_ = 1;  ///< The next pause.
  /// Where pairs of tokens end: the last place of each pair, and for each place the previous one.
  std::unordered_map<uint64_t, int32_t> last_end_;
  std::vector<int32_t> previous_end_;  ///< For each token that ends an indexed pair; -1: none.
};

}  // namespace marlin
