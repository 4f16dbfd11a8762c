// Texts of a batch with guesses, compared with the texts without.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "base/internals.h"
#include "engine/model_impl.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/speculation.h"

namespace marlin::testing {

/// Five guesses a pass, by a draft or from the text.
inline SpeculationOptions SpeculateBy(const std::optional<Model>& draft, bool always = true) {
  SpeculationOptions options{.tokens = 5, .always = always};
  if (draft) options.source = DraftSource::kModel;
  options.model = draft;
  return options;
}

/// Greedy and hot texts of several lengths, with five guesses a pass from the text, by a `twin`
/// with the model's weights, whose guesses are right, and by a `stranger`.
inline void ExpectDraftedBatch(const Model& model, const Model& twin, const Model& stranger,
                               const std::vector<std::vector<int32_t>>& prompts) {
  std::vector<GenerateOptions> options(prompts.size());
  for (size_t i = 0; i < options.size(); ++i) {
    options[i].max_tokens = 14 + 5 * static_cast<int64_t>(i);
    options[i].sampling = {.temperature = i % 2 == 0 ? 0.0F : 0.7F, .seed = i};
  }
  const auto plain = GenerateBatch(model, prompts, options);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  int64_t wrong = 0;
  for (const auto& draft : {std::optional<Model>(), std::optional(twin), std::optional(stranger)}) {
    for (GenerateOptions& of_text : options) of_text.speculation = SpeculateBy(draft);
    const auto made = GenerateBatch(model, prompts, options, {.prefill_tokens = 16});
    ASSERT_TRUE(made.ok()) << made.status().message();
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Generated& text = (*made)[i];
      EXPECT_EQ(text.token_ids, (*plain)[i].token_ids) << i;
      if (!draft) continue;
      EXPECT_GT(text.drafts.drafted, 0) << i;
      const int64_t misses = text.drafts.drafted - text.drafts.accepted;
      wrong += misses;
      // The first five of a text that has not been sampled yet are greedy.
      const int64_t most = i % 2 == 0 ? 0 : 5;
      const bool is_twin = &Internals::Impl(*draft) == &Internals::Impl(twin);
      EXPECT_LE(misses, is_twin ? most : text.drafts.drafted) << i;
    }
  }
  EXPECT_GT(wrong, 10);
}

}  // namespace marlin::testing
