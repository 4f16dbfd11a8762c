// Guesses of how a text goes on, by the model's layer that predicts further tokens (MTP).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// The layer's cache of one text, which it fills from the model's hidden states after every token
/// of the text. A pass writes them to Receive, and Keep says how many are final.
class LayerDrafts {
 public:
  /// Guesses up to `most` tokens at a time. `draft`: Model::draft.
  LayerDrafts(Model draft, int64_t most);

  /// Begins again with an empty text. Errors: kOutOfMemory.
  Status Restart();
  /// Memory for the hidden states after the `rows` tokens that the next pass feeds.
  std::span<float> Receive(int64_t rows);
  /// Takes the first `rows` rows that were received last.
  void Keep(int64_t rows);
  /// Feeds the layer with what it has not seen yet, of a text of which all but the last of `tokens`
  /// were kept, and guesses up to `room` tokens that follow. Errors: as Model::Forward; the same
  /// text may be tried again.
  Result<std::vector<int32_t>> Guess(std::span<const int32_t> tokens, int64_t room);
  /// Feeds the layer without a guess, from a text of which a part was kept.
  Status Follow(std::span<const int32_t> tokens);

 private:
  /// Feeds the layer with what it has not seen yet. `hidden`: its hidden state after the last of
  /// them; `logits`: empty, or its logits there.
  Status Feed(std::span<const int32_t> tokens, std::span<float> logits, std::vector<float>* hidden);

  Model draft_;
  int64_t most_;
  int64_t width_;
  std::optional<Sequence> sequence_;
  int64_t seen_ = 0;             ///< Tokens of the text whose hidden states the layer was fed.
  std::vector<float> kept_;      ///< Hidden states after the tokens from seen_ on.
  std::vector<float> received_;  ///< By the last pass.
};

}  // namespace marlin
