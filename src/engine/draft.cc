#include "marlin/draft.h"

#include <fmt/core.h>

#include <algorithm>
#include <new>

#include "base/errors.h"
#include "base/macros.h"
#include "base/view_checks.h"
#include "engine/draft_window.h"
#include "engine/evaluation_windows.h"
#include "engine/model_impl.h"

namespace marlin {
namespace {

Status CheckDepth(int64_t depth) {
  if (depth >= 1 && depth <= kMostDraftDepth) return {};
  return Invalid(fmt::format("depth: expected 1..{}, got {}", kMostDraftDepth, depth));
}

Status WriteLogits(const Model& model, std::span<const int32_t> tokens, int64_t depth,
                   const MutableTensorView& logits) {
  MARLIN_ASSIGN_OR_RETURN(const Model draft, model.draft());
  MARLIN_RETURN_IF_ERROR(CheckDepth(depth));
  const int64_t rows = std::ssize(tokens) - depth;
  if (rows < 1) {
    return Invalid(
        fmt::format("tokens: expected more than {} (the depth), got {}", depth, tokens.size()));
  }
  const Shape expected{rows, model.info().vocab_size};
  if (logits.dtype() != DType::kF32 || !(logits.shape() == expected) || !logits.IsContiguous()) {
    return Invalid(fmt::format("logits: expected contiguous f32 {}, got {} {}", expected.ToString(),
                               DTypeName(logits.dtype()), logits.shape().ToString()));
  }
  MARLIN_RETURN_IF_ERROR(CheckData("logits", logits));
  DraftWindow window(model, draft, tokens);
  return window.Run(depth, 0, [&](int64_t at, int64_t token, std::span<const float> row) {
    if (at != depth) return;
    std::copy(row.begin(), row.end(), logits.As<float>() + token * std::ssize(row));
  });
}

int32_t MostLikely(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// Counts the guesses of one window after another.
class AcceptanceCounts {
 public:
  explicit AcceptanceCounts(int64_t depth) : counts_(static_cast<size_t>(depth)) {}

  Status Add(const Model& model, const Model& draft, std::span<const int32_t> tokens,
             int64_t scored) {
    std::vector<int32_t> said(tokens.size());
    DraftWindow window(model, draft, tokens);
    const auto listen = [&](int64_t depth, int64_t token, std::span<const float> logits) {
      const int32_t likely = MostLikely(logits);
      const int64_t about = token + depth;
      if (depth == 0) {
        said[static_cast<size_t>(token)] = likely;
      } else if (about >= scored) {
        Count& count = counts_[static_cast<size_t>(depth) - 1];
        ++count.positions;
        if (likely == said[static_cast<size_t>(about)]) ++count.same;
      }
    };
    return window.Run(std::ssize(counts_), scored, listen);
  }

  Result<AcceptanceResult> Finish(int64_t windows) const {
    AcceptanceResult result;
    result.windows = windows;
    for (const Count& count : counts_) {
      if (count.positions == 0) {
        return Invalid(fmt::format("window: too short for {} guesses in a row", counts_.size()));
      }
      result.depths.push_back({count.positions, static_cast<double>(count.same) /
                                                    static_cast<double>(count.positions)});
    }
    return result;
  }

 private:
  struct Count {
    int64_t positions = 0;
    int64_t same = 0;
  };
  std::vector<Count> counts_;
};

Result<AcceptanceResult> Measure(const Model& model, std::span<const int32_t> tokens, int64_t depth,
                                 const EvaluateOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const Model draft, model.draft());
  MARLIN_RETURN_IF_ERROR(CheckDepth(depth));
  MARLIN_RETURN_IF_ERROR(CheckEvaluation(model, tokens, options));
  MARLIN_RETURN_IF_ERROR(CheckTargets(model, tokens));
  const std::vector<Window> windows = EvaluationWindows(std::ssize(tokens), options);
  AcceptanceCounts counts(depth);
  int64_t done = 0;
  for (const Window& window : windows) {
    const auto fed =
        tokens.subspan(static_cast<size_t>(window.first), static_cast<size_t>(window.count));
    MARLIN_RETURN_IF_ERROR(counts.Add(model, draft, fed, window.scored));
    if (options.progress) options.progress(++done, std::ssize(windows));
  }
  return counts.Finish(std::ssize(windows));
}

}  // namespace

Status DraftLogits(const Model& model, std::span<const int32_t> tokens, int64_t depth,
                   const MutableTensorView& logits) {
  try {
    return WriteLogits(model, tokens, depth, logits);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "draft: cannot allocate");
  }
}

Result<AcceptanceResult> MeasureAcceptance(const Model& model, std::span<const int32_t> tokens,
                                           int64_t depth, const EvaluateOptions& options) {
  try {
    return Measure(model, tokens, depth, options);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "draft: cannot allocate");
  }
}

}  // namespace marlin
