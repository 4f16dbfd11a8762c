#include "checkpoint/readers/gguf/gguf_generation.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json.h"

namespace marlin {
namespace {

constexpr std::string_view kMessageEnd = "<|end|>";
constexpr std::string_view kTextEnd = "</s>";

// Ends of texts, turns and messages, and of the parts of a prompt that is filled in.
constexpr std::array<std::string_view, 33> kEnds = {
    kMessageEnd,
    kTextEnd,
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\xef\xbd\x9c"
    "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
};

/// Ends by their texts. Two texts end something else in vocabularies that have others.
std::vector<int64_t> EndsByText(const std::vector<std::string_view>& tokens) {
  std::vector<int64_t> ends;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (IsGgufEndText(tokens[i])) ends.push_back(static_cast<int64_t>(i));
  }
  const auto has = [&](std::string_view text) {
    return std::any_of(ends.begin(), ends.end(),
                       [&](int64_t id) { return tokens[static_cast<size_t>(id)] == text; });
  };
  const auto drop = [&](std::string_view text) {
    std::erase_if(ends, [&](int64_t id) { return tokens[static_cast<size_t>(id)] == text; });
  };
  const bool calls = has("<|call|>") || has("<|calls|>");
  if (calls && (has("<|return|>") || has("<|flush|>"))) drop(kMessageEnd);
  if (has("<|tool_response>")) drop(kTextEnd);
  return ends;
}

}  // namespace

bool IsGgufEndText(std::string_view token) {
  return std::find(kEnds.begin(), kEnds.end(), token) != kEnds.end();
}

std::vector<int64_t> GgufEndTokens(const GgufMetadata& metadata) {
  std::vector<int64_t> ends;
  const auto add = [&ends](std::optional<int64_t> id) {
    const bool valid = id && *id >= 0 && *id <= INT32_MAX;
    if (valid && std::find(ends.begin(), ends.end(), *id) == ends.end()) ends.push_back(*id);
  };
  const auto tokens =
      metadata.Texts("tokenizer.ggml.tokens").value_or(std::vector<std::string_view>());
  std::optional<int64_t> text_end = metadata.Integer("tokenizer.ggml.eos_token_id");
  if (!text_end && metadata.Text("tokenizer.ggml.model") == "llama" && tokens.size() > 2) {
    text_end = 2;  // SentencePiece's own number.
  }
  add(text_end);
  for (const char* const key :
       {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id",
        "tokenizer.ggml.fim_pad_token_id", "tokenizer.ggml.fim_rep_token_id",
        "tokenizer.ggml.fim_sep_token_id"}) {
    add(metadata.Integer(key));
  }
  for (const int64_t id : EndsByText(tokens)) add(id);
  return ends;
}

std::string GgufGenerationConfig(const GgufMetadata& metadata) {
  Json config = Json::object();
  for (const auto& [key, name] : kGgufSamplingReals) {
    if (const auto value = metadata.Real(key)) config[name] = Shortest(*value);
  }
  if (const auto most = metadata.Integer(kGgufTopK); most && *most >= 0) {
    config["top_k"] = static_cast<uint64_t>(*most);
  }
  if (config.empty()) return {};
  config["do_sample"] = true;
  return DumpJson(config, 2) + "\n";
}

}  // namespace marlin
