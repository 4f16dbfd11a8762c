#include "cli/generated_text.h"

#include <csignal>
#include <nlohmann/json.hpp>

#include "base/macros.h"

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

double DecodeRate(const Generated& generated) {
  const auto decoded = static_cast<double>(generated.token_ids.size()) - 1;
  return generated.decode_seconds > 0 ? decoded / generated.decode_seconds : 0.0;
}

nlohmann::ordered_json GeneratedJson(const Console& console, const GeneratedText& text,
                                     const Generated& generated, size_t prompt_tokens) {
  return {{"text", text.Text()},
          {"token_ids", generated.token_ids},
          {"stop_reason", text.ReasonName(console, generated.stop_reason)},
          {"tokens_per_second", DecodeRate(generated)},
          {"prompt_tokens", prompt_tokens},
          {"prefill_seconds", generated.prefill_seconds},
          {"decode_seconds", generated.decode_seconds}};
}

}  // namespace marlin::cli
