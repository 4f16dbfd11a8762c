// Guesses the tokens of one text, for ForwardAndSample to verify (SequenceInput::drafts).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/status.h"

namespace marlin {

class Drafter {
 public:
  Drafter() = default;
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;
  virtual ~Drafter() = default;

  /// Begins again with a text of which `first` tokens were fed to the model before. Errors:
  /// kOutOfMemory.
  virtual Status Restart(int64_t first) = 0;
  /// Guesses up to `most` tokens, 1 or more, that follow `tokens`: the prompt and what was
  /// generated, of which all but the last were fed to the model. `sampler`: the state of the text's
  /// sampler, or empty if that is greedy. Errors: as Model::ForwardAndSample; the same text may be
  /// tried again.
  virtual Result<std::vector<int32_t>> Guess(std::span<const int32_t> tokens, int64_t most,
                                             std::span<const uint8_t> sampler) = 0;
  /// Called instead of Guess in other passes. `fed`: the tokens of the text that the model was fed.
  virtual Status Follow(std::span<const int32_t> /*tokens*/, int64_t /*fed*/) { return {}; }

  /// Whether it draws with the state of the text's sampler.
  virtual bool draws() const { return false; }
  /// Whether passes write the model's hidden states to Receive, and Keep says how many are final.
  virtual bool reads_hidden() const { return false; }
  /// Memory for the hidden states after the `rows` tokens that the next pass feeds.
  virtual std::span<float> Receive(int64_t /*rows*/) { return {}; }
  /// Takes the first `rows` rows that were received last.
  virtual void Keep(int64_t /*rows*/) {}
};

/// Tokens that a drafter with a cache of its own lets come before it feeds them without a guess:
/// one pass of many rows costs little more than one of one.
inline constexpr int64_t kLeastFollowed = 32;

}  // namespace marlin
