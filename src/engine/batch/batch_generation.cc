// GenerateBatch: a continuous batch whose texts are all there at the start.
#include <fmt/core.h>

#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "engine/batch/continuous_batch.h"
#include "engine/generation_checks.h"
#include "engine/model_impl.h"
#include "engine/speculation/speculation.h"
#include "marlin/generate.h"

namespace marlin {
namespace {

std::string NameOf(size_t index) { return fmt::format("prompts[{}]", index); }

/// Carries what happens to the texts, one per prompt, to the caller's callbacks.
class BatchCallbacks final : public BatchObserver {
 public:
  BatchCallbacks(const BatchOptions& batch, std::span<const BatchText> texts)
      : batch_(batch), texts_(texts) {}

  bool Sampled(BatchText& text, int32_t token, const TokenLogprobs* /*logprobs*/) override {
    return !batch_.token || batch_.token(IndexOf(text), token);
  }
  void Ended(BatchText& text) override {
    if (text.error.ok()) {
      if (batch_.ended) batch_.ended(IndexOf(text), text.generated);
    } else if (error_.ok()) {
      error_ = text.error.WithContext(NameOf(IndexOf(text)));
    }
  }
  /// The first error of a text.
  const Status& error() const { return error_; }

 private:
  size_t IndexOf(const BatchText& text) const { return static_cast<size_t>(&text - texts_.data()); }

  const BatchOptions& batch_;
  std::span<const BatchText> texts_;
  Status error_;
};

Result<std::vector<Generated>> Run(const Model& model, const BatchOptions& batch,
                                   std::span<BatchText> texts) {
  std::vector<Generated> results;
  if (texts.empty()) return results;
  BatchCallbacks callbacks(batch, texts);
  const int64_t most = MaxRunning(model, batch.max_batch);
  MARLIN_ASSIGN_OR_RETURN(
      ContinuousBatch running,
      ContinuousBatch::Make(model, {std::min(most, std::ssize(texts)), batch.prefill_tokens},
                            callbacks));
  for (BatchText& text : texts) running.Add(text);
  while (!running.idle()) {
    if (batch.stop && batch.stop()) {
      for (BatchText& text : texts) {
        if (!text.ended) running.Cancel(text);
      }
      break;
    }
    MARLIN_RETURN_IF_ERROR(running.Step());
    MARLIN_RETURN_IF_ERROR(callbacks.error());
  }
  for (BatchText& text : texts) results.push_back(std::move(text.generated));
  return results;
}

Status CheckBatch(const Model& model, std::span<const std::vector<int32_t>> prompts,
                  std::span<const GenerateOptions> options, const BatchOptions& batch) {
  const auto invalid = [](const std::string& message) {
    return Status(Code::kInvalidArgument, message);
  };
  if (options.size() > 1 && options.size() != prompts.size()) {
    return invalid(
        fmt::format("options: expected 1 or {} (prompts), got {}", prompts.size(), options.size()));
  }
  for (size_t i = 0; i < options.size(); ++i) {
    const Status status = CheckGenerateOptions(model, options[i]);
    if (status.ok()) continue;
    return options.size() == 1 ? status : status.WithContext(fmt::format("options[{}]", i));
  }
  if (batch.max_batch < 0) {
    return invalid(fmt::format("max_batch: expected 0 or more, got {}", batch.max_batch));
  }
  if (batch.prefill_tokens >= 0) return {};
  return invalid(fmt::format("prefill_tokens: expected 0 or more, got {}", batch.prefill_tokens));
}

Result<std::vector<Generated>> Continue(const Model& model,
                                        std::span<const std::vector<int32_t>> prompts,
                                        std::span<const GenerateOptions> options,
                                        const BatchOptions& batch) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckBatch(model, prompts, options, batch));
  const GenerateOptions usual;
  std::vector<BatchText> texts(prompts.size());
  std::optional<Speculation> speculation;
  for (size_t i = 0; i < prompts.size(); ++i) {
    MARLIN_RETURN_IF_ERROR(CheckPrompt(NameOf(i), model, prompts[i]));
    texts[i].prompt = prompts[i];
    texts[i].options = options.empty() ? &usual : &options[options.size() == 1 ? 0 : i];
    texts[i].stops = StopTokens(model, *texts[i].options);
    // Options of all prompts share what their drafts share.
    if (!speculation || options.size() > 1) {
      MARLIN_ASSIGN_OR_RETURN(speculation, Speculation::Make(model, texts[i].options->speculation));
    }
    texts[i].drafter = speculation->NewDrafter();
    texts[i].control.emplace(texts[i].options->speculation);
  }
  return Run(model, batch, texts);
}

}  // namespace

Result<std::vector<Generated>> GenerateBatch(const Model& model,
                                             std::span<const std::vector<int32_t>> prompts,
                                             std::span<const GenerateOptions> options,
                                             const BatchOptions& batch) {
  try {
    return Continue(model, prompts, options, batch);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "generate: cannot allocate");
  }
}

}  // namespace marlin
