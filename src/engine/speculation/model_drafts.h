// Guesses of how a text goes on, by another model of the same vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/internals.h"
#include "engine/speculation/draft_samplers.h"
#include "engine/speculation/drafter.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// The draft's cache of one text. It is fed what the model is fed, and its own guesses, which it
/// forgets where the text went on otherwise.
class ModelDrafts final : public Drafter {
 public:
  /// `vocab`: the tokens of the model that verifies. Precondition: CheckDraftModel.
  ModelDrafts(Model draft, int64_t vocab, std::shared_ptr<DraftSamplers> samplers);

  Status Restart(int64_t first) override;
  Status GuessAll(std::span<GuessRequest> requests) override;
  Result<int64_t> Follow(std::span<const int32_t> tokens, int64_t fed) override;
  const Model::Impl* draft() const override { return &Internals::Impl(draft_); }

 private:
  /// Goes back to where the text is what the draft was fed, before the text's last token, or, with
  /// recurrent states, to before its guesses.
  Status GoBack(std::span<const int32_t> tokens);
  /// Appends tokens of the text that the draft was fed.
  void Know(std::span<const int32_t> tokens);
  /// Takes what the draft has guessed and was fed, and drops what the model does not know.
  void TakeGuess(GuessRequest* request);
  /// The tokens that it was not fed, or nothing if the draft cannot be fed all of them.
  std::span<const int32_t> Unfed(std::span<const int32_t> tokens) const;

  Model draft_;
  int64_t vocab_;
  std::shared_ptr<DraftSamplers> samplers_;
  std::optional<Sequence> sequence_;
  std::vector<int32_t> fed_;
  size_t known_ = 0;  ///< The first of these, which are no guesses; their states are kept.
};

}  // namespace marlin
