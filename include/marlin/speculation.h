// Speculation: guesses of how a text goes on, which the model verifies several at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "marlin/model.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The source of guesses.
enum class DraftSource : uint8_t {
  kLookup,  ///< The text so far.
  kLayer,   ///< The layer that predicts further tokens (MTP), of a model opened with
            ///< ModelOptions::draft.
  kModel,   ///< Another model of the same vocabulary.
};
/// "lookup", "mtp", "model".
std::string_view DraftSourceName(DraftSource source);

/// How tokens are guessed. A guess is part of the text only if the model samples the same token, so
/// that the texts are those without speculation: bit for bit with ModelOptions::batch_invariant,
/// and otherwise up to rounding.
struct SpeculationOptions {
  /// Most tokens that are guessed for a pass, up to kMostDrafts. 0: none. Of a model with recurrent
  /// states each guess takes as much memory as the states of a sequence.
  int64_t tokens = 0;
  /// Guesses that many in every pass. False: as many as promise the most tokens per second, by the
  /// measured time of passes and guesses and the guesses accepted so far.
  bool always = false;
  DraftSource source = DraftSource::kLookup;
  /// The model of kModel, which CheckDraftModel accepts.
  std::optional<Model> model = std::nullopt;
};

/// The guesses of a text.
struct DraftCounts {
  int64_t passes = 0;    ///< Passes with guesses.
  int64_t drafted = 0;   ///< Guessed tokens that were verified.
  int64_t accepted = 0;  ///< Those that the model sampled, too.

  /// Accepted tokens of a pass with guesses, on average.
  double MeanAccepted() const {
    return passes == 0 ? 0 : static_cast<double>(accepted) / static_cast<double>(passes);
  }
};

/// The rows by which the vocabularies of a model and its draft may differ: padding.
inline constexpr int64_t kVocabularyPadding = 128;

/// Errors: kInvalidArgument naming both models for vocabularies that differ by more than
/// kVocabularyPadding or that have no end token in common, and for a moved-from model.
Status CheckDraftModel(const Model& model, const Model& draft);

}  // namespace marlin
#pragma GCC visibility pop
