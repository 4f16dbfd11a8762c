// How many tokens to guess: as many as promise the most tokens per second.
#pragma once

#include <cstdint>
#include <map>

#include "marlin/speculation.h"

namespace marlin {

/// Measured times. They fall at once, since a disturbance only ever adds to them, and rise slowly.
class DraftCosts {
 public:
  /// A pass of `rows` rows, of texts that all decode.
  void AddPass(int64_t rows, double seconds);
  /// Calls that guessed up to `tokens` tokens of each text.
  void AddGuess(int64_t tokens, double seconds);

  /// The time of a pass. More rows do not cost less. Between measured numbers of rows it is
  /// interpolated, and beyond them the largest one's: what has not been tried looks cheap.
  /// Precondition: Knows(rows).
  double PassSeconds(int64_t rows) const;
  /// Whether a pass of as many rows or fewer was measured.
  bool Knows(int64_t rows) const { return !passes_.empty() && passes_.begin()->first <= rows; }
  double GuessSeconds(int64_t tokens) const { return static_cast<double>(tokens) * guess_; }
  /// Rows that may be tried: twice what was measured, so that what is unknown grows step by step.
  int64_t MostRows() const;

 private:
  std::map<int64_t, double> passes_;  ///< Seconds by rows.
  double guess_ = 0;                  ///< Seconds per token; 0: not measured.
};

/// A pass while its guesses are chosen, text by text.
struct DraftedPass {
  int64_t rows = 0;     ///< Rows of texts that decode, without the one whose guesses are chosen.
  double tokens = 0;    ///< Tokens expected of them.
  int64_t guesses = 0;  ///< The most guesses of any of them: texts are guessed together.
};

/// Chooses the guesses of one text.
class DraftControl {
 public:
  explicit DraftControl(const SpeculationOptions& options)
      : most_(options.tokens), always_(options.always) {}

  /// How many tokens to guess, up to `room`; none before a pass without guesses was measured. Where
  /// none would pay, it tries one after a pause that doubles.
  int64_t Choose(const DraftCosts& costs, const DraftedPass& pass, int64_t room);
  /// The tokens that a text gets on average in a pass with `drafts` guesses.
  double ExpectedTokens(int64_t drafts) const;
  /// Learns how many of the tokens that a pass verified were accepted.
  void Learn(int64_t drafted, int64_t accepted);
  const DraftCounts& counts() const { return counts_; }

 private:
  /// How often a guess is accepted, if those before it were.
  double Acceptance() const;
  int64_t Best(const DraftCosts& costs, const DraftedPass& pass, int64_t room) const;

  int64_t most_;
  bool always_;
  double tried_ = 0;     ///< Guesses whose predecessors were accepted; older ones count less.
  double accepted_ = 0;  ///< Those that were accepted, too.
  int64_t waited_ = 0;   ///< Passes since a guess was chosen.
  int64_t pause_ = 1;    ///< Passes until the next try.
  DraftCounts counts_;
};

}  // namespace marlin
