#include "engine/batch/drafted_generation.h"

#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "engine/batch/continuous_batch.h"
#include "engine/generation_checks.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/speculation/speculation.h"

namespace marlin {
namespace {

/// Carries the tokens of the text to the caller.
class TextCallback final : public BatchObserver {
 public:
  explicit TextCallback(const TokenCallback& callback) : callback_(callback) {}
  bool Sampled(BatchText& /*text*/, int32_t token, const TokenLogprobs* /*logprobs*/) override {
    return !callback_ || callback_(token);
  }
  void Ended(BatchText& /*text*/) override {}

 private:
  const TokenCallback& callback_;
};

}  // namespace

Result<Generated> GenerateDrafted(const Model& model, Sequence* sequence,
                                  std::span<const int32_t> prompt, const GenerateOptions& options,
                                  const TokenCallback& callback) {
  SequenceClaim claim;
  if (sequence != nullptr) {
    Sequence::State* const state = sequence->state();
    if (state == nullptr) return Invalid("sequence: was moved from");
    if (!state->BelongsTo(Internals::Shared(model))) return Invalid("sequence: of another model");
    if (!claim.Take(*state)) return Invalid("sequence: another call is feeding it");
  }
  MARLIN_ASSIGN_OR_RETURN(const Speculation speculation,
                          Speculation::Make(model, options.speculation));
  BatchText text;
  text.prompt = prompt;
  text.options = &options;
  text.stops = StopTokens(model, options);
  text.drafter = speculation.NewDrafter();
  text.control.emplace(options.speculation);
  text.given = sequence;
  TextCallback observer(callback);
  MARLIN_ASSIGN_OR_RETURN(ContinuousBatch batch,
                          ContinuousBatch::Make(model, {.max_running = 1}, observer));
  batch.Add(text);
  while (!batch.idle()) {
    const Status status = batch.Step();
    if (!status.ok()) batch.EndAll(status);
  }
  MARLIN_RETURN_IF_ERROR(text.error);
  return std::move(text.generated);
}

}  // namespace marlin
