#include "cli/commands/demo_model.h"

#include <algorithm>
#include <filesystem>

#include "base/macros.h"
#include "cli/arguments/model_arguments.h"
#include "marlin/generate.h"

namespace marlin::cli {
namespace {

// As many as separate the recipes; the whole text would take half a minute.
constexpr size_t kEvaluatedTokens = 8192;
constexpr size_t kPromptTokens = 8;
constexpr int64_t kNewTokens = 192;
constexpr int kTexts = 5;
constexpr size_t kMinSentenceBytes = 40;
constexpr size_t kMaxSentenceBytes = 150;

/// The prompt and its continuation, up to the end of the sentence.
Result<std::string> FirstSentence(TextCodec& codec, std::span<const int32_t> prompt,
                                  std::span<const int32_t> generated) {
  MARLIN_ASSIGN_OR_RETURN(const std::string before, codec.Decode(prompt));
  std::vector<int32_t> all(prompt.begin(), prompt.end());
  all.insert(all.end(), generated.begin(), generated.end());
  MARLIN_ASSIGN_OR_RETURN(std::string text, codec.Decode(all));
  std::replace(text.begin(), text.end(), '\n', ' ');
  size_t end = text.find_first_of(".?!", before.size() + kMinSentenceBytes);
  end = end == std::string::npos ? text.size() : end + 1;
  if (end > kMaxSentenceBytes) {
    end = std::min(text.rfind(' ', kMaxSentenceBytes), kMaxSentenceBytes);
    return text.substr(0, end) + " ...";
  }
  return text.substr(0, end);
}

}  // namespace

Result<std::vector<int32_t>> ReadSampleTokens(const std::string& model) {
  const std::string path = model + "/validation_tokens.txt";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::vector<int32_t>();
  return ReadTokens(path);
}

Result<ModelResult> RunDemoModel(const Console& console, const Device& device,
                                 const std::string& path, std::span<const int32_t> tokens) {
  MARLIN_ASSIGN_OR_RETURN(const Model model, Model::Open(path, device));
  ModelResult result;
  const std::span<const int32_t> text = tokens.first(std::min(tokens.size(), kEvaluatedTokens));
  MARLIN_ASSIGN_OR_RETURN(result.perplexity, Perplexity(model, text));
  const std::span<const int32_t> prompt = tokens.first(std::min(tokens.size(), kPromptTokens));
  GenerateOptions options;
  options.max_tokens = kNewTokens;
  options.ignore_eos = true;
  options.sampling = {.temperature = 0.7F, .top_p = 0.9F, .seed = 1};
  Generated generated;
  for (int i = 0; i < kTexts; ++i) {
    MARLIN_ASSIGN_OR_RETURN(generated, Generate(model, prompt, options));
    const auto decoded = static_cast<double>(generated.token_ids.size()) - 1;
    result.tokens_per_second =
        std::max(result.tokens_per_second, decoded / std::max(generated.decode_seconds, 1e-9));
  }
  if (!console.text_codecs()) return result;
  MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, "demo", path));
  MARLIN_ASSIGN_OR_RETURN(result.sentence, FirstSentence(*codec, prompt, generated.token_ids));
  return result;
}

}  // namespace marlin::cli
