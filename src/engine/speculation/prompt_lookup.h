// Speculation without a second model: guesses of how a text goes on, from what it has said before.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/speculation/drafter.h"
#include "marlin/status.h"

namespace marlin {

/// Prompt lookup in one text: where its last tokens occurred before, the same tokens may follow.
class PromptLookup final : public Drafter {
 public:
  /// The prompt and what was generated stay the same when a text is put back.
  Status Restart(int64_t /*first*/) override { return {}; }
  Status GuessAll(std::span<GuessRequest> requests) override;

  /// Empty without an earlier occurrence of the last two tokens. Of several occurrences it takes
  /// the one with the longest match, and of those the latest one. The text has only grown since the
  /// last call.
  std::vector<int32_t> Guess(std::span<const int32_t> tokens, int64_t most);

 private:
  void Index(std::span<const int32_t> tokens);
  int64_t FindEnd(std::span<const int32_t> tokens) const;

  /// Where pairs of tokens end: the last place of each pair, and for each place the previous one.
  std::unordered_map<uint64_t, int32_t> last_end_;
  std::vector<int32_t> previous_end_;  ///< For each token that ends an indexed pair; -1: none.
};

}  // namespace marlin
