#include "engine/draft_window.h"

#include <algorithm>

#include "base/macros.h"
#include "engine/evaluation_windows.h"

namespace marlin {

DraftWindow::DraftWindow(const Model& model, const Model& draft, std::span<const int32_t> tokens)
    : model_(model),
      draft_(draft),
      tokens_(tokens),
      width_(model.info().hidden_size),
      vocab_(model.info().vocab_size),
      most_rows_(MostEvaluatedRows(model)) {}

std::span<float> DraftWindow::Rows(std::vector<float>& of, int64_t first, int64_t count) const {
  return std::span(of).subspan(static_cast<size_t>(first * width_),
                               static_cast<size_t>(count * width_));
}

Status DraftWindow::Run(int64_t depth, int64_t first, Listener listener) {
  MARLIN_RETURN_IF_ERROR(RunModel(listener));
  MARLIN_ASSIGN_OR_RETURN(Sequence sequence, draft_.NewSequence());
  MARLIN_RETURN_IF_ERROR(RunDraft(&sequence, listener));
  if (depth < 2) return {};
  // Backwards, since what is fed after a token replaces what depth 1 has cached there.
  for (int64_t token = count() - 3; token >= std::max<int64_t>(first - depth, 0); --token) {
    MARLIN_RETURN_IF_ERROR(Follow(&sequence, token, depth, listener));
  }
  return {};
}

Result<std::span<const float>> DraftWindow::Feed(const Model& model, const SequenceInput& input) {
  const int64_t rows = std::ssize(input.tokens);
  logits_.resize(static_cast<size_t>(rows * vocab_));
  MARLIN_RETURN_IF_ERROR(model.Forward({&input, 1}, {logits_.data(), DType::kF32, {rows, vocab_}}));
  return std::span<const float>(logits_);
}

Status DraftWindow::RunModel(Listener listener) {
  MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model_.NewSequence({.truncatable = false}));
  hidden_.resize(static_cast<size_t>(count() * width_));
  for (int64_t first = 0; first < count(); first += most_rows_) {
    const int64_t rows = std::min(most_rows_, count() - first);
    SequenceInput input{&sequence,
                        tokens_.subspan(static_cast<size_t>(first), static_cast<size_t>(rows))};
    input.all_logits = true;
    input.hidden_out = Rows(hidden_, first, rows);
    MARLIN_ASSIGN_OR_RETURN(const std::span<const float> logits, Feed(model_, input));
    for (int64_t row = 0; row < rows; ++row) {
      listener(0, first + row,
               logits.subspan(static_cast<size_t>(row * vocab_), static_cast<size_t>(vocab_)));
    }
  }
  return {};
}

Status DraftWindow::RunDraft(Sequence* sequence, Listener listener) {
  const int64_t inputs = count() - 1;
  drafted_.resize(static_cast<size_t>(inputs * width_));
  for (int64_t first = 0; first < inputs; first += most_rows_) {
    const int64_t rows = std::min(most_rows_, inputs - first);
    SequenceInput input{sequence,
                        tokens_.subspan(static_cast<size_t>(first) + 1, static_cast<size_t>(rows))};
    input.all_logits = true;
    input.hidden = Rows(hidden_, first, rows);
    input.hidden_out = Rows(drafted_, first, rows);
    MARLIN_ASSIGN_OR_RETURN(const std::span<const float> logits, Feed(draft_, input));
    for (int64_t row = 0; row < rows; ++row) {
      listener(1, first + row,
               logits.subspan(static_cast<size_t>(row * vocab_), static_cast<size_t>(vocab_)));
    }
  }
  return {};
}

Status DraftWindow::Follow(Sequence* sequence, int64_t token, int64_t depth, Listener listener) {
  MARLIN_RETURN_IF_ERROR(sequence->Truncate(token + 1));
  const auto of_token = Rows(drafted_, token, 1);
  std::vector<float> hidden(of_token.begin(), of_token.end());
  std::vector<float> next(hidden.size());
  for (int64_t at = 2; at <= depth && token + at < count(); ++at) {
    SequenceInput input{sequence, tokens_.subspan(static_cast<size_t>(token + at), 1)};
    input.hidden = hidden;
    input.hidden_out = next;
    MARLIN_ASSIGN_OR_RETURN(const std::span<const float> logits, Feed(draft_, input));
    listener(at, token, logits);
    hidden.swap(next);
  }
  return {};
}

}  // namespace marlin
