// One call of a model: runs its tokens in passes of bounded size and returns the results.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

class RoutingObserver;
class StepTimer;

/// Several steps in one call. Every input has one token, which those that are sampled follow; its
/// pages for all steps are reserved. All inputs fit in one pass, no step of which expands pages.
struct StepsWanted {
  int64_t steps = 1;
  std::span<const int32_t> stop_token_ids;
  /// [inputs, steps]. After fewer tokens is what ended the row: a mark (sample_marks.h), or for a
  /// stop token kNoToken.
  std::span<int32_t> tokens;
  std::span<int32_t> counts;  ///< One per input: its tokens, by which its sequence has grown.
};

/// The requested results of a call: logits in host memory, or sampled tokens.
struct Wanted {
  MutableTensorView logits;    ///< f32 [rows, vocab], or empty.
  MutableTensorView samplers;  ///< u8 [inputs, SamplerStateBytes] in device memory, or empty.
  /// One per token that is sampled, if there are samplers: the token, or a mark (sample_marks.h).
  /// The sequence of an input whose logits cannot be sampled is unchanged.
  std::span<int32_t> tokens;
  RoutingObserver* routing = nullptr;
  StepTimer* timer = nullptr;  ///< Times every pass, which is then not recorded.
  /// The state of each input, of any number of samplers; empty: they are in order.
  std::span<const int32_t> sampler_rows = {};
  const StepsWanted* steps = nullptr;    ///< Needs sampler_rows, and replaces `tokens`.
  const SampleExtras* extras = nullptr;  ///< Masks and log-probabilities of samplers, or null.

  /// Whether tokens or their log-probabilities are wanted, and not logits.
  bool samples() const { return !samplers.empty() || wants_logprobs(); }
  bool wants_logprobs() const { return extras != nullptr && extras->likely >= 0; }
};

/// Rows of logits of an input.
inline int64_t WantedRows(const SequenceInput& input) {
  if (input.all_logits) return static_cast<int64_t>(input.tokens.size());
  return input.feed_only ? 0 : 1 + input.drafts;
}

/// Tokens that are sampled of an input, with those after drafts.
inline int64_t SampledTokens(const SequenceInput& input) {
  return input.feed_only ? 0 : 1 + input.drafts;
}

/// The blocks to which a pass of a model pads its block tables. A device that records passes gets
/// them in fewer sizes, so that their shape does not change with every page.
int64_t PaddedBlocks(const Model::Impl& model, int64_t blocks);

/// Runs checked inputs, whose sequences the caller has claimed. After an error of an
/// operation the sequences are unchanged.
Status RunForward(const Model::Impl& model, std::span<const SequenceInput> inputs,
                  const Wanted& wanted);

}  // namespace marlin
