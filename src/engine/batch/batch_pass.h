// The passes of a continuous batch, and the tokens that they sample.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/batch/batch_slots.h"
#include "engine/batch/batch_text.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// The tokens of a call, [texts, steps], of which text i has counts[i], followed by the mark
/// (sample_marks.h) of a text that has no more because its logits cannot be sampled.
struct SampledTexts {
  std::vector<BatchText*> texts;
  size_t steps = 1;
  std::vector<int32_t> tokens;
  std::vector<int64_t> counts;

  bool empty() const {
    return std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count == 0; });
  }
  std::span<const int32_t> Row(size_t i) const {
    return std::span(tokens).subspan(i * steps, static_cast<size_t>(counts[i]));
  }
  Status ErrorOf(size_t i) const;
};

/// Samples up to `steps` next tokens of texts that all decode and have slots. A stop token of
/// another text ends a row, but not its text. Errors: as Model::Decode.
Status DecodeTexts(const Model& model, const BatchSlots& slots, int64_t steps,
                   SampledTexts* sampled);

/// Feeds the pieces of the texts that have some, and samples one token of each text that then has
/// no more. Errors: as Model::ForwardAndSample.
Status FeedTexts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                 SampledTexts* sampled);

}  // namespace marlin
