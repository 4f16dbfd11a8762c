// A model and its layer that predicts further tokens (MTP), over the tokens of one window.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

class DraftWindow {
 public:
  /// Gets the logits of the model (depth 0) or of DraftLogits, row `token`. Depths 0 and 1 come in
  /// the order of tokens; all later depths of a token follow each other.
  using Listener = FunctionRef<void(int64_t depth, int64_t token, std::span<const float> logits)>;

  /// `draft` is the model's. The arguments must outlive this.
  DraftWindow(const Model& model, const Model& draft, std::span<const int32_t> tokens);

  /// Runs depths up to `depth`, those from 2 on only where they are about tokens from `first` on.
  Status Run(int64_t depth, int64_t first, Listener listener);

 private:
  Status RunModel(Listener listener);
  /// The first depth, over all tokens at once.
  Status RunDraft(Sequence* sequence, Listener listener);
  /// The depths from 2 on after one token.
  Status Follow(Sequence* sequence, int64_t token, int64_t depth, Listener listener);
  /// Feeds an input, and returns its logits.
  Result<std::span<const float>> Feed(const Model& model, const SequenceInput& input);

  int64_t count() const { return std::ssize(tokens_); }
  std::span<float> Rows(std::vector<float>& of, int64_t first, int64_t count) const;

  const Model& model_;
  const Model& draft_;
  const std::span<const int32_t> tokens_;
  const int64_t width_;
  const int64_t vocab_;
  const int64_t most_rows_;
  std::vector<float> hidden_;   ///< The model's, [tokens, width].
  std::vector<float> drafted_;  ///< The layer's at depth 1.
  std::vector<float> logits_;
};

}  // namespace marlin
