#include "cli/commands/generated_text.h"

#include <fmt/format.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

/// Set by Ctrl-C.
volatile std::sig_atomic_t interrupted = 0;

}  // namespace

bool Interrupted() { return interrupted != 0; }

InterruptGuard::InterruptGuard() {
  interrupted = 0;
  before_ = std::signal(SIGINT, [](int) {
    interrupted = 1;
    std::signal(SIGINT, SIG_DFL);
  });
}

InterruptGuard::~InterruptGuard() { std::signal(SIGINT, before_); }

GeneratedText::GeneratedText(TextCodec* codec, std::span<const int32_t> prompt,
                             const std::vector<std::string>& stops)
    : stop_(stops) {
  if (codec != nullptr) stream_.emplace(*codec, prompt);
}

Result<std::string> GeneratedText::Add(int32_t token) {
  if (!stream_) return std::string();
  MARLIN_ASSIGN_OR_RETURN(const std::string added, stream_->Add(token));
  std::string shown = stop_.Add(added);
  text_ += shown;
  return shown;
}

Result<std::string> GeneratedText::Finish() {
  if (!stream_ || stop_.stopped()) return std::string();
  MARLIN_ASSIGN_OR_RETURN(const std::string held, stream_->Finish());
  std::string shown = stop_.Add(held);
  shown += stop_.Finish();
  text_ += shown;
  return shown;
}

nlohmann::ordered_json GeneratedText::Text() const {
  return stream_ ? nlohmann::ordered_json(text_) : nlohmann::ordered_json();
}

std::string_view GeneratedText::ReasonName(const Console& console, StopReason reason) const {
  if (reason != StopReason::kCallback) return StopReasonName(reason);
  if (stopped()) return "stop_text";
  if (Interrupted()) return "interrupted";
  return console.reader_gone() ? "output_closed" : StopReasonName(reason);
}

nlohmann::ordered_json GeneratedJson(const Console& console, const GeneratedText& text,
                                     const Generated& generated, size_t prompt_tokens,
                                     const SamplingOptions& sampling) {
  return GeneratedDocument(text.Text(), text.ReasonName(console, generated.stop_reason), generated,
                           prompt_tokens, sampling);
}

void SaySampling(Console& console, const ModelInfo& model, const SamplingOptions& sampling) {
  constexpr const char* kFile = "generation_config.json";
  if (SamplingDocument(model.sampling) != SamplingDocument({})) {
    std::string text = "greedy";
    if (sampling.temperature > 0) {
      text = fmt::format("temperature {:.3g}, top-k {}, top-p {:.3g}, min-p {:.3g}",
                         sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p);
    }
    console.Message(
        fmt::format("sampling: {}, repetition penalty {:.3g}; {} says what no option "
                    "does",
                    text, sampling.repetition_penalty, kFile));
  }
  if (model.ignored_generation_keys.empty()) return;
  console.Message(
      fmt::format("{}: not applied: {}", kFile, fmt::join(model.ignored_generation_keys, ", ")));
}

Status AddStopTokens(TextCodec& codec, const std::vector<std::string>& stops,
                     const ModelInfo& model, GenerateOptions* options) {
  for (const std::string& stop : stops) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, codec.Encode(stop, false));
    if (tokens.size() != 1) continue;
    MARLIN_ASSIGN_OR_RETURN(const std::string text, codec.Decode(tokens));
    if (!text.empty()) continue;
    std::vector<int32_t>& ends = options->stop_token_ids;
    if (ends.empty() && !options->ignore_eos) ends = model.eos_token_ids;
    ends.push_back(tokens.front());
  }
  return {};
}

}  // namespace marlin::cli
