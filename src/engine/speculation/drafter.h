// Guesses the tokens of texts, for ForwardAndSample to verify (SequenceInput::drafts).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

class Drafter;

/// A text whose next tokens are to be guessed.
struct GuessRequest {
  Drafter* drafter = nullptr;
  /// The prompt and what was generated, of which all but the last were fed to the model.
  std::span<const int32_t> tokens;
  int64_t most = 1;
  std::span<const uint8_t> sampler = {};  ///< The state of the text's sampler; empty: it is greedy.
  std::vector<int32_t> guess = {};        ///< The result: up to `most` tokens that follow.
};

/// The drafter of one text.
class Drafter {
 public:
  Drafter() = default;
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;
  virtual ~Drafter() = default;

  /// Begins again with a text of which `first` tokens were fed to the model before. Errors:
  /// kOutOfMemory.
  virtual Status Restart(int64_t first) = 0;
  /// Guesses the next tokens of texts, whose drafters have the same draft(). Errors: as
  /// Model::ForwardAndSample; what was guessed before it is right, and the same texts may be tried
  /// again.
  virtual Status GuessAll(std::span<GuessRequest> requests) = 0;
  /// Called instead of GuessAll in other passes. `fed`: the tokens of the text that the model was
  /// fed. Returns how many the draft was fed.
  virtual Result<int64_t> Follow(std::span<const int32_t> /*tokens*/, int64_t /*fed*/) { return 0; }

  /// The model whose calls guess, with the state of the text's sampler; null: none is called.
  virtual const Model::Impl* draft() const { return nullptr; }
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
