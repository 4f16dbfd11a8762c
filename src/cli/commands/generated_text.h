// The text of tokens as they are generated, up to a stop text; and Ctrl-C, which ends generation.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/console.h"
#include "marlin/generate.h"
#include "marlin/status.h"
#include "text/text_codec.h"

namespace marlin::cli {

/// Whether Ctrl-C was pressed during an InterruptGuard.
bool Interrupted();

/// Lets Ctrl-C end generation, with its output kept. A second Ctrl-C kills the process.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  void (*before_)(int);
};

/// The text that continues one prompt.
class GeneratedText {
 public:
  /// Without a codec (null) there is no text.
  GeneratedText(TextCodec* codec, std::span<const int32_t> prompt,
                const std::vector<std::string>& stops);

  /// The text that a token adds, once it can be shown. Errors: the codec's.
  Result<std::string> Add(int32_t token);
  /// The text held back.
  Result<std::string> Finish();
  /// Whether a stop text ended it.
  bool stopped() const { return stop_.stopped(); }
  /// All text so far; null without a codec.
  nlohmann::ordered_json Text() const;
  /// Why generation ended, with the reasons that only the command knows.
  std::string_view ReasonName(const Console& console, StopReason reason) const;

 private:
  std::optional<TextStream> stream_;
  StopText stop_;
  std::string text_;
};

/// The JSON of a text, as --json prints it. `sampling`: how its tokens were chosen.
nlohmann::ordered_json GeneratedJson(const Console& console, const GeneratedText& text,
                                     const Generated& generated, size_t prompt_tokens,
                                     const SamplingOptions& sampling);

/// Says how tokens are chosen where generation_config.json says so, and what it asks for without
/// effect.
void SaySampling(Console& console, const ModelInfo& model, const SamplingOptions& sampling);

/// Ends texts at tokens that a stop text names and that have no text of their own.
Status AddStopTokens(TextCodec& codec, const std::vector<std::string>& stops,
                     const ModelInfo& model, GenerateOptions* options);

}  // namespace marlin::cli
