// How many tokens to guess: as many as promise the most tokens per second.
#pragma once

#include <cstdint>
#include <map>
#include <span>

#include "marlin/speculation.h"

namespace marlin {

/// Measured times. They fall at once, since a disturbance only ever adds to them, and rise slowly.
class DraftCosts {
 public:
  /// `unsteady`: the first passes of each number of rows, and the first guesses, whose times do not
  /// count, as of a device that records passes.
  explicit DraftCosts(int unsteady = 0) : unsteady_(unsteady) {}

  /// The number of the next pass.
  int64_t BeginPass() { return next_pass_++; }
  /// A pass of `rows` rows, of texts that all decode.
  void AddPass(int64_t rows, double seconds);
  /// Calls that guessed up to `tokens` tokens of each text.
  void AddGuess(int64_t tokens, double seconds);
  /// Calls that fed a draft `tokens` tokens of a text without a guess.
  void AddFollow(int64_t tokens, double seconds);

  /// The time of a pass. More rows do not cost less. Between measured numbers of rows it is
  /// interpolated, and beyond them the largest one's: what has not been tried looks cheap.
  /// Precondition: Knows(rows).
  double PassSeconds(int64_t rows) const;
  /// Whether a pass of as many rows or fewer was measured.
  bool Knows(int64_t rows) const { return !passes_.empty() && passes_.begin()->first <= rows; }
  double GuessSeconds(int64_t tokens) const { return static_cast<double>(tokens) * guess_; }
  /// The time of a token that a draft is fed without a guess; 0: not measured.
  double FollowSeconds() const { return follow_; }
  /// Rows that may be tried: twice what was measured, so that what is unknown grows step by step.
  int64_t MostRows() const;

 private:
  int unsteady_;
  int64_t next_pass_ = 0;
  std::map<int64_t, int> begun_;      ///< Passes by rows, up to those that do not count.
  int guesses_begun_ = 0;             ///< Likewise.
  std::map<int64_t, double> passes_;  ///< Seconds by rows.
  double guess_ = 0;                  ///< Seconds per token; 0: not measured.
  double follow_ = 0;                 ///< Likewise.
};

/// The record of one text's guesses.
class DraftControl {
 public:
  explicit DraftControl(const SpeculationOptions& options)
      : most_(options.tokens), always_(options.always) {}

  int64_t most() const { return most_; }
  /// Whether it guesses as many in every pass.
  bool always() const { return always_; }
  /// The tokens that a text gets on average in a pass with `drafts` guesses.
  double ExpectedTokens(int64_t drafts) const;
  /// How often a guess is accepted, if those before it were.
  double Acceptance() const;
  /// Whether a text for which none would pay tries one guess in pass number `pass`: after pauses
  /// that double. Texts whose pauses are as long try in the same passes.
  bool Tries(int64_t pass);
  /// It guesses, so that the next pause is short.
  void EndPause() { pause_ = 2; }
  /// Whether some guesses were tried, so that more would hardly change what is chosen.
  bool IsTried() const;
  /// Learns how many of the tokens that a pass verified were accepted.
  void Learn(int64_t drafted, int64_t accepted);
  const DraftCounts& counts() const { return counts_; }

 private:
  int64_t most_;
  bool always_;
  double tried_ = 0;     ///< Guesses whose predecessors were accepted; older ones count less.
  double accepted_ = 0;  ///< Those that were accepted, too.
  int64_t pause_ = 2;    ///< Passes between tries: a power of two.
  DraftCounts counts_;
};

/// A text of a pass whose next tokens may be guessed.
struct DraftChoice {
  DraftControl* control = nullptr;
  int64_t most = 0;       ///< Guesses that it has room for.
  bool has_draft = true;  ///< Which is fed the text.
  int64_t guesses = 0;    ///< The result: how many to make.
  bool gives_up = false;  ///< Likewise: a draft is not worth what it costs to feed it the text.
};

/// Chooses the guesses of the texts of the next pass, as many as promise the most tokens per
/// second; `room` at most together, and none before a pass without guesses was measured. `rows`: of
/// the pass without guesses, of which each gives a token. A text guesses as far as a guess is
/// accepted as often as the last one of others; its number is one of few, so that a device that
/// records passes has seen their shapes before.
void ChooseGuesses(DraftCosts& costs, int64_t rows, int64_t room, std::span<DraftChoice> texts);

}  // namespace marlin
