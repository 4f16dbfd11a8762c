// tokenizer.json as metadata of a GGUF file: the inverse of readers/gguf_tokenizer.cc.
#include "checkpoint/readers/gguf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "base/printable.h"
#include "checkpoint/readers/gguf_cut.h"
#include "checkpoint/writers/gguf_metadata.h"

namespace marlin {
namespace {

/// A member of an object; null if it is absent or the value is no object.
const Json& Member(const Json& value, const char* key) {
  static const Json kNull;
  if (!value.is_object()) return kNull;
  const auto found = value.find(key);
  return found == value.end() ? kNull : *found;
}

std::string TextOf(const Json& value) { return value.is_string() ? value.get<std::string>() : ""; }
bool FlagOf(const Json& value) { return value.is_boolean() && value.get<bool>(); }

/// The id of a token; nothing for what is no token number.
std::optional<int64_t> IdOf(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto id = value.get<uint64_t>();
  return id < static_cast<uint64_t>(kMaxGgufTokens) ? std::optional(static_cast<int64_t>(id))
                                                    : std::nullopt;
}

class TokenizerDescriber {
 public:
  TokenizerDescriber(const Json& tokenizer, int64_t rows) : tokenizer_(tokenizer), rows_(rows) {}

  /// Reads all that is needed; false: `obstacle` says why it cannot be expressed.
  bool Read() {
    const Json& model = Member(tokenizer_, "model");
    if (TextOf(Member(model, "type")) != "BPE" || FlagOf(Member(model, "byte_fallback"))) {
      return Refuse(fmt::format("gguf: a tokenizer of type \"{}\"{} has no form here",
                                Printable(TextOf(Member(model, "type"))),
                                FlagOf(Member(model, "byte_fallback")) ? " with bytes" : ""));
    }
    return ReadCut() && ReadTokens(Member(model, "vocab")) && ReadMerges(Member(model, "merges"));
  }

  void Write(GgufMetadataBuilder* metadata) const {
    metadata->Text("tokenizer.ggml.model", "gpt2");
    metadata->Text("tokenizer.ggml.pre", pre_);
    metadata->Texts("tokenizer.ggml.tokens", tokens_);
    metadata->Integers("tokenizer.ggml.token_type", types_);
    metadata->Texts("tokenizer.ggml.merges", merges_);
  }

  const std::string& obstacle() const { return obstacle_; }
  std::optional<int64_t> Find(const std::string& token) const {
    const auto found = std::find(tokens_.begin(), tokens_.end(), token);
    if (token.empty() || found == tokens_.end()) return std::nullopt;
    return found - tokens_.begin();
  }

 private:
  bool Refuse(std::string why) {
    obstacle_ = std::move(why);
    return false;
  }

  /// Adds one step of the pre-tokenizer; false for one that no cut of the format has.
  bool AddStep(const Json& step, GgufCut* cut, bool* own_regex) const {
    const std::string type = TextOf(Member(step, "type"));
    if (type == "ByteLevel") {
      const Json& use = Member(step, "use_regex");
      *own_regex = !use.is_boolean() || use.get<bool>();
      return !FlagOf(Member(step, "add_prefix_space"));
    }
    const std::string pattern = TextOf(Member(Member(step, "pattern"), "Regex"));
    const bool isolated = TextOf(Member(step, "behavior")) == "Isolated";
    if (type != "Split" || pattern.empty() || !isolated || FlagOf(Member(step, "invert"))) {
      return false;
    }
    cut->patterns.push_back(pattern);
    return true;
  }

  bool ReadCut() {
    GgufCut cut;
    const Json& first = Member(tokenizer_, "pre_tokenizer");
    const Json& list = Member(first, "pretokenizers");
    const Json steps = list.is_array() ? list : Json::array({first});
    bool own_regex = false;
    bool known = true;
    for (const Json& step : steps) known = known && AddStep(step, &cut, &own_regex);
    const Json& normalizer = Member(tokenizer_, "normalizer");
    cut.composed = TextOf(Member(normalizer, "type")) == "NFC";
    cut.whole_words = FlagOf(Member(Member(tokenizer_, "model"), "ignore_merges"));
    known = known && (normalizer.is_null() || cut.composed) && own_regex == cut.patterns.empty();
    for (const std::string_view name : GgufCutNames()) {
      if (known && GgufCutOf(name) == cut) pre_ = name;
    }
    return !pre_.empty() ||
           Refuse("gguf: the way in which the tokenizer cuts texts has no name there");
  }

  bool ReadTokens(const Json& vocabulary) {
    if (!vocabulary.is_object()) return Refuse("tokenizer.json: model.vocab is missing");
    tokens_.resize(static_cast<size_t>(rows_));
    types_.resize(tokens_.size(), 0);
    for (const auto& [token, id] : vocabulary.items()) {
      if (!SetToken(token, id, GgufTokenType::kNormal)) return false;
    }
    const Json& added = Member(tokenizer_, "added_tokens");
    for (const Json& token : added.is_array() ? added : Json::array()) {
      const auto type =
          FlagOf(Member(token, "special")) ? GgufTokenType::kControl : GgufTokenType::kUserDefined;
      if (!SetToken(TextOf(Member(token, "content")), Member(token, "id"), type)) return false;
    }
    // Every row of the embedding needs a token.
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (types_[i] != 0) continue;
      tokens_[i] = fmt::format("[PAD{}]", i);
      types_[i] = static_cast<int32_t>(GgufTokenType::kUnused);
    }
    return true;
  }

  bool SetToken(const std::string& token, const Json& number, GgufTokenType type) {
    const std::optional<int64_t> id = IdOf(number);
    if (!id || *id >= rows_ || token.empty()) {
      return Refuse(
          fmt::format("tokenizer.json: token \"{}\" has the number {}, the embedding {} "
                      "rows",
                      Printable(token), DescribeJson(number), rows_));
    }
    const auto at = static_cast<size_t>(*id);
    if (types_[at] != 0 && tokens_[at] != token) {
      return Refuse(fmt::format("tokenizer.json: \"{}\" and \"{}\" are both token {}",
                                Printable(tokens_[at]), Printable(token), *id));
    }
    tokens_[at] = token;
    types_[at] = static_cast<int32_t>(type);
    return true;
  }

  bool ReadMerges(const Json& merges) {
    if (!merges.is_array()) return Refuse("tokenizer.json: model.merges is missing");
    for (const Json& merge : merges) {
      if (merge.is_string()) {
        merges_.push_back(merge.get<std::string>());
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        merges_.push_back(TextOf(merge[0]) + " " + TextOf(merge[1]));
      } else {
        return Refuse("tokenizer.json: a merge that is no pair of tokens");
      }
    }
    return true;
  }

  const Json& tokenizer_;
  int64_t rows_;
  std::string pre_;
  std::vector<std::string> tokens_;
  std::vector<int32_t> types_;
  std::vector<std::string> merges_;
  std::string obstacle_;
};

/// Adds the special tokens: numbers of config.json, or else texts of tokenizer_config.json.
/// `tokens` may be null.
void AddSpecialTokens(const TokenizerDescriber* tokens, const Json& tokenizer_config,
                      const Json& config, GgufMetadataBuilder* metadata) {
  struct Special {
    const char* number;
    const char* text;
    const char* key;
  };
  constexpr Special kSpecial[] = {
      {"bos_token_id", "bos_token", "tokenizer.ggml.bos_token_id"},
      {"eos_token_id", "eos_token", "tokenizer.ggml.eos_token_id"},
      {"pad_token_id", "pad_token", "tokenizer.ggml.padding_token_id"},
      {"unk_token_id", "unk_token", "tokenizer.ggml.unknown_token_id"},
  };
  for (const Special& special : kSpecial) {
    const Json& stored = Member(config, special.number);
    const Json& first = stored.is_array() && !stored.empty() ? stored[0] : stored;
    std::optional<int64_t> id = IdOf(first);
    const Json& text = Member(tokenizer_config, special.text);
    if (!id && tokens != nullptr)
      id = tokens->Find(TextOf(text.is_object() ? Member(text, "content") : text));
    if (id) metadata->Count(special.key, *id);
  }
  const Json& ends = Member(config, "eos_token_id");
  if (ends.is_array() && ends.size() > 1) {
    if (const auto turn = IdOf(ends[1])) metadata->Count("tokenizer.ggml.eot_token_id", *turn);
  }
  const Json& add = Member(tokenizer_config, "add_bos_token");
  if (add.is_boolean()) metadata->Flag("tokenizer.ggml.add_bos_token", add.get<bool>());
  const std::string chat = TextOf(Member(tokenizer_config, "chat_template"));
  if (!chat.empty()) metadata->Text("tokenizer.chat_template", chat);
}

}  // namespace

std::string DescribeGgufTokenizer(const Json& tokenizer, const Json& tokenizer_config,
                                  const Json& config, int64_t rows, GgufMetadataBuilder* metadata) {
  TokenizerDescriber describer(tokenizer, rows);
  if (!describer.Read()) return describer.obstacle();
  describer.Write(metadata);
  AddSpecialTokens(&describer, tokenizer_config, config, metadata);
  return {};
}

void DescribeGgufTokenNumbers(const Json& config, GgufMetadataBuilder* metadata) {
  AddSpecialTokens(nullptr, Json(), config, metadata);
}

}  // namespace marlin
