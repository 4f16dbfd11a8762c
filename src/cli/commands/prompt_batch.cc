#include "cli/commands/prompt_batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/chat_arguments.h"
#include "cli/arguments/model_arguments.h"
#include "cli/commands/generated_text.h"
#include "cli/progress_bar.h"
#include "engine/generation_checks.h"

namespace marlin::cli {
namespace {

/// Collects the texts of a batch and prints them in order.
class BatchOutput {
 public:
  /// `most`: the tokens of each text, at most.
  BatchOutput(Console& console, TextCodec* codec, const PromptBatch& batch,
              const std::vector<std::vector<int32_t>>& prompts, std::span<const int64_t> most)
      : console_(console),
        batch_(batch),
        prompts_(prompts),
        most_(most),
        bar_(console, "generating"),
        total_(std::accumulate(most.begin(), most.end(), int64_t{0})) {
    for (const std::vector<int32_t>& prompt : prompts) {
      texts_.emplace_back(codec, prompt, batch.stops);
    }
    ended_.resize(prompts.size());
  }

  /// False when a text should end: at a stop text.
  bool Add(size_t index, int32_t token) {
    ++tokens_;
    ++done_;
    bar_.Update(done_, total_, FormatRate(Rate()) + " tokens/s");
    const Result<std::string> added = texts_[index].Add(token);
    if (!added.ok()) status_ = added.status();
    return !texts_[index].stopped();
  }

  /// Prints all texts up to the first that has not ended.
  void End(size_t index, const Generated& text) {
    const Result<std::string> rest = texts_[index].Finish();
    if (!rest.ok()) status_ = rest.status();
    done_ += most_[index] - std::ssize(text.token_ids);
    ended_[index] = text;
    for (; printed_ < ended_.size() && ended_[printed_]; ++printed_) {
      bar_.Clear();
      if (status_.ok()) status_ = Print(printed_);
      ended_[printed_]->token_ids.clear();
    }
  }

  /// Whether all texts should end: after an error, Ctrl-C or with a closed output.
  bool ShouldStop() const { return !status_.ok() || Interrupted() || console_.reader_gone(); }

  Status Finish() {
    bar_.Clear();
    MARLIN_RETURN_IF_ERROR(status_);
    console_.Message(fmt::format("{}: {} at {} tokens/s, the time for {} of prompts included",
                                 FormatCounted(std::ssize(texts_), "text"),
                                 FormatCounted(tokens_, "token"), FormatRate(Rate()),
                                 FormatCounted(PromptTokens(), "token")));
    return {};
  }

 private:
  double Rate() const {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_;
    return static_cast<double>(tokens_) / std::max(since.count(), 1e-9);
  }
  int64_t PromptTokens() const {
    return std::accumulate(
        prompts_.begin(), prompts_.end(), int64_t{0},
        [](int64_t sum, const auto& prompt) { return sum + std::ssize(prompt); });
  }

  Status Print(size_t index) {
    const Generated& generated = *ended_[index];
    const PromptLine& prompt = batch_.prompts[index];
    if (console_.json()) {
      nlohmann::ordered_json row = {{"line", prompt.line}};
      row.update(GeneratedJson(console_, texts_[index], generated, prompts_[index].size(),
                               batch_.options.sampling));
      return console_.PrintJsonLine(row);
    }
    const std::string shown = prompt.text ? texts_[index].Text().get<std::string>()
                                          : fmt::format("{}", fmt::join(generated.token_ids, " "));
    return console_.Print(fmt::format("[{}] {}\n", prompt.line, shown));
  }

  Console& console_;
  const PromptBatch& batch_;
  const std::vector<std::vector<int32_t>>& prompts_;
  std::span<const int64_t> most_;
  ProgressBar bar_;
  std::vector<GeneratedText> texts_;
  std::vector<std::optional<Generated>> ended_;
  size_t printed_ = 0;
  int64_t tokens_ = 0;
  int64_t done_ = 0;  ///< Tokens; a text that ends early has done all that it could have.
  int64_t total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  Status status_;
};

}  // namespace

Status GeneratePromptBatch(Console& console, const Model& model, const std::string& directory,
                           TextCodec* codec, const PromptBatch& batch) {
  std::vector<std::vector<int32_t>> prompts;
  std::vector<GenerateOptions> options;
  std::vector<int64_t> most;
  for (const PromptLine& prompt : batch.prompts) {
    const std::string place = PlaceOf(batch.file, prompt.line);
    std::vector<int32_t> tokens = prompt.tokens;
    if (prompt.text) {
      Result<std::vector<int32_t>> encoded =
          EncodePrompt(*codec, *prompt.text, batch.special, batch.chat, directory, model);
      if (!encoded.ok()) return encoded.status().WithContext(place);
      tokens = *std::move(encoded);
    }
    MARLIN_RETURN_IF_ERROR(CheckPrompt(place, model, tokens));
    // The last token of a text is not fed.
    const int64_t room = model.info().max_positions - std::ssize(tokens) + 1;
    prompts.push_back(std::move(tokens));
    GenerateOptions& own = options.emplace_back(batch.options);
    own.max_tokens = prompt.max_tokens.value_or(own.max_tokens);
    own.sampling.seed = prompt.seed.value_or(own.sampling.seed);
    most.push_back(std::min(own.max_tokens, room));
  }
  const InterruptGuard guard;
  BatchOutput output(console, codec, batch, prompts, most);
  BatchOptions run;
  run.max_batch = batch.max_batch;
  run.token = [&](size_t index, int32_t token) { return output.Add(index, token); };
  run.ended = [&](size_t index, const Generated& text) { output.End(index, text); };
  run.stop = [&] { return output.ShouldStop(); };
  const auto texts = GenerateBatch(model, prompts, options, run);
  if (!texts.ok()) return texts.status().WithContext(batch.file);
  return output.Finish();
}

}  // namespace marlin::cli
