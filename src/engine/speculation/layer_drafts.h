// Guesses of how a text goes on, by the model's layer that predicts further tokens (MTP).
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

/// The layer's cache of one text, which it fills from the model's hidden states after every token
/// of the text. Of a text whose beginning was fed before, or adopted, the layer sees the rest only.
class LayerDrafts final : public Drafter {
 public:
  /// `draft`: Model::draft.
  LayerDrafts(Model draft, std::shared_ptr<DraftSamplers> samplers);

  Status Restart(int64_t first) override;
  Status GuessAll(std::span<GuessRequest> requests) override;
  Result<int64_t> Follow(std::span<const int32_t> tokens, int64_t fed) override;

  const Model::Impl* draft() const override { return &Internals::Impl(draft_); }
  bool reads_hidden() const override { return true; }
  std::span<float> Receive(int64_t rows) override;
  void Keep(int64_t rows) override;

 private:
  /// Forgets guesses, and returns an input of what the layer has not seen yet.
  Result<SequenceInput> Unseen(std::span<const int32_t> tokens);
  /// Notes that the layer was fed that.
  void See();
  int64_t kept_rows() const { return std::ssize(kept_) / width_; }

  Model draft_;
  std::shared_ptr<DraftSamplers> samplers_;
  int64_t width_;
  std::optional<Sequence> sequence_;
  int64_t first_ = 0;            ///< The text's token before the layer's first.
  int64_t seen_ = 0;             ///< Tokens of the text whose hidden states the layer was fed.
  std::vector<float> kept_;      ///< Hidden states after the tokens from seen_ on.
  std::vector<float> received_;  ///< By the last pass.
};

}  // namespace marlin
