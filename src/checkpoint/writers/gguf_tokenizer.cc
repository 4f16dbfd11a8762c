// tokenizer.json as metadata of a GGUF file: the inverse of readers/gguf_tokenizer.cc.
#include "checkpoint/readers/gguf/gguf_tokenizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/printable.h"
#include "checkpoint/readers/gguf/gguf_cut.h"
#include "checkpoint/readers/gguf/gguf_generation.h"
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
    const std::string type = TextOf(Member(model, "type"));
    if (type != "BPE") {
      return Refuse(
          fmt::format("gguf: a tokenizer of type \"{}\" has no form here", Printable(type)));
    }
    pieces_ = FlagOf(Member(model, "byte_fallback"));
    const bool read = (pieces_ ? ReadPrefix() : ReadCut()) && ReadTokens(Member(model, "vocab")) &&
                      ReadMerges(Member(model, "merges"));
    if (!read) return false;
    if (pieces_) MakeScores();
    return ComesBack();
  }

  void Write(GgufMetadataBuilder* metadata) const {
    metadata->Text("tokenizer.ggml.model", pieces_ ? "llama" : "gpt2");
    metadata->Texts("tokenizer.ggml.tokens", tokens_);
    metadata->Integers("tokenizer.ggml.token_type", types_);
    if (pieces_) {
      metadata->Reals("tokenizer.ggml.scores", scores_);
      metadata->Flag("tokenizer.ggml.add_space_prefix", prefix_);
      return;
    }
    metadata->Text("tokenizer.ggml.pre", pre_);
    std::vector<std::string> merges;
    merges.reserve(merges_.size());
    for (const auto& [left, right] : merges_) merges.push_back(fmt::format("{} {}", left, right));
    metadata->Texts("tokenizer.ggml.merges", merges);
  }

  const std::string& obstacle() const { return obstacle_; }
  /// The special tokens before and after a text, empty for none, as the post-processor says; false
  /// if it has no template for texts.
  bool ReadTemplate(std::string* before, std::string* after) {
    const Json& first = Member(tokenizer_, "post_processor");
    const Json& list = Member(first, "processors");
    bool found = false;
    for (const Json& step : list.is_array() ? list : Json::array({first})) {
      if (TextOf(Member(step, "type")) != "TemplateProcessing") continue;
      found = true;
      std::string* side = before;
      for (const Json& part : Member(step, "single")) {
        const std::string token = TextOf(Member(Member(part, "SpecialToken"), "id"));
        if (token.empty()) {
          side = after;
        } else if (side->empty()) {
          *side = token;
        } else {
          Refuse(fmt::format("gguf: a tokenizer that adds both \"{}\" and \"{}\" has no form there",
                             Printable(*side), Printable(token)));
        }
      }
    }
    return found;
  }
  /// The token in place of what has none.
  std::optional<int64_t> Unknown() const {
    return Find(TextOf(Member(Member(tokenizer_, "model"), "unk_token")));
  }
  /// Whether readers know a token for an end by its text.
  bool IsEndText(int64_t id) const {
    return id < std::ssize(tokens_) && IsGgufEndText(tokens_[static_cast<size_t>(id)]);
  }
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
  bool AddStep(const Json& step, GgufCut* cut) const {
    const std::string type = TextOf(Member(step, "type"));
    if (type == "ByteLevel") {
      const Json& use = Member(step, "use_regex");
      if (!use.is_boolean() || use.get<bool>()) cut->patterns.emplace_back(Gpt2Pattern());
      return !FlagOf(Member(step, "add_prefix_space"));
    }
    if (type == "Digits") {
      cut->patterns.emplace_back(FlagOf(Member(step, "individual_digits")) ? R"(\p{N})"
                                                                           : R"(\p{N}+)");
      return true;
    }
    const std::string pattern = TextOf(Member(Member(step, "pattern"), "Regex"));
    const std::string behavior = TextOf(Member(step, "behavior"));
    // The patterns match every character: what they do not match can be kept or dropped.
    const bool inverted = FlagOf(Member(step, "invert"));
    const bool keeps = inverted ? behavior == "Removed" : behavior == "Isolated";
    if (type != "Split" || pattern.empty() || !keeps) return false;
    cut->patterns.push_back(pattern);
    return true;
  }

  bool ReadCut() {
    GgufCut cut;
    const Json& first = Member(tokenizer_, "pre_tokenizer");
    const Json& list = Member(first, "pretokenizers");
    const Json steps = list.is_array() ? list : Json::array({first});
    bool known = true;
    for (const Json& step : steps) known = known && AddStep(step, &cut);
    const Json& normalizer = Member(tokenizer_, "normalizer");
    const Json& rules = Member(normalizer, "normalizers");
    const bool none = normalizer.is_null() || (rules.is_array() && rules.empty());
    cut.composed = TextOf(Member(normalizer, "type")) == "NFC";
    cut.whole_words = FlagOf(Member(Member(tokenizer_, "model"), "ignore_merges"));
    if (known && (none || cut.composed)) pre_ = GgufCutName(cut);
    return !pre_.empty() ||
           Refuse("gguf: the way in which the tokenizer cuts texts has no name there");
  }

  /// SentencePiece: spaces become U+2581, with or without one before the text.
  bool ReadPrefix() {
    bool known = false;
    const auto add = [&](const Json& step) {
      const std::string type = TextOf(Member(step, "type"));
      const std::string scheme = TextOf(Member(step, "prepend_scheme"));
      if (type == "Prepend") prefix_ = true;
      if (type == "Metaspace") prefix_ = scheme != "never" && !scheme.empty();
      known = known || type == "Replace" || type == "Metaspace";
      return type == "Prepend" || type == "Replace" || type == "Metaspace";
    };
    for (const char* const part : {"normalizer", "pre_tokenizer"}) {
      const Json& first = Member(tokenizer_, part);
      if (first.is_null()) continue;
      const Json& list = Member(first, "normalizers");
      const Json steps = list.is_array() ? list : Json::array({first});
      for (const Json& step : steps) {
        if (!add(step)) return Refuse("gguf: the tokenizer's normalizer has no form there");
      }
    }
    return known || Refuse("gguf: a tokenizer of pieces that keeps spaces has no form there");
  }

  /// The rank of the first merge that makes a piece is its score: the format has no merges.
  void MakeScores() {
    scores_.resize(tokens_.size());
    std::unordered_map<std::string, float> ranks;
    for (const auto& [left, right] : merges_) {
      ranks.emplace(left + right, -static_cast<float>(ranks.size()));
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const auto found = ranks.find(tokens_[i]);
      if (found != ranks.end()) scores_[i] = found->second;
      if (tokens_[i].size() == 6 && tokens_[i].starts_with("<0x")) {
        types_[i] = static_cast<int32_t>(GgufTokenType::kByte);
      }
    }
    if (const auto id = Unknown()) {
      types_[static_cast<size_t>(*id)] = static_cast<int32_t>(GgufTokenType::kUnknown);
    }
  }

  /// Whether reading gives the same merges in the same order.
  bool ComesBack() {
    GgufMetadataBuilder metadata;
    Write(&metadata);
    const std::string header = metadata.Header();
    const Result<GgufFile> file = ParseGguf(header, "tokenizer");
    if (!file.ok()) return Refuse(std::string(file.status().message()));
    const std::vector<ContainedFile> files = GgufTokenizerFiles(file->metadata);
    if (files.empty() || !files.front().obstacle.empty()) {
      return Refuse(files.empty() ? "gguf: no tokenizer" : files.front().obstacle);
    }
    constexpr JsonLimits kLimits{int64_t{1} << 30, int64_t{1} << 26};
    const Result<Json> found = ParseJsonObject(files.front().content, "tokenizer.json", kLimits);
    if (!found.ok()) return Refuse(std::string(found.status().message()));
    const Json& merges = Member(Member(*found, "model"), "merges");
    bool same = merges.size() == merges_.size();
    for (size_t i = 0; same && i < merges_.size(); ++i) {
      same = TextOf(merges[i][0]) == merges_[i].first && TextOf(merges[i][1]) == merges_[i].second;
    }
    return same || Refuse("gguf: the order of the tokenizer's merges has no form there");
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
    // The model cannot take a token without a row.
    if (id && *id >= rows_) return true;
    if (!id || token.empty()) {
      return Refuse(fmt::format("tokenizer.json: token \"{}\" has the number {}", Printable(token),
                                DescribeJson(number)));
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
      const std::string text = TextOf(merge);
      const size_t space = text.find(' ', 1);
      if (space != std::string::npos) {
        merges_.emplace_back(text.substr(0, space), text.substr(space + 1));
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        merges_.emplace_back(TextOf(merge[0]), TextOf(merge[1]));
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
  std::vector<std::pair<std::string, std::string>> merges_;
  bool pieces_ = false;  ///< SentencePiece's BPE, with scores in place of merges.
  bool prefix_ = false;  ///< A space before the text.
  std::vector<float> scores_;
  std::string obstacle_;
};

/// Adds the special tokens: numbers of config.json, or else texts of tokenizer_config.json.
class SpecialTokensWriter {
 public:
  /// `tokens` may be null.
  SpecialTokensWriter(const TokenizerDescriber* tokens, const GgufTokenFiles& files,
                      GgufMetadataBuilder* metadata)
      : tokens_(tokens), files_(files), metadata_(metadata) {}

  /// `start`, `end`: the tokens that are added to a text, if these are other ones.
  void AddNumbers(std::optional<int64_t> start, std::optional<int64_t> end) {
    constexpr std::string_view kUnknown = "tokenizer.ggml.unknown_token_id";
    start_ = start ? start : NumberOf("bos_token_id", "bos_token");
    end_ = end ? end : NumberOf("eos_token_id", "eos_token");
    std::optional<int64_t> unknown = NumberOf("unk_token_id", "unk_token");
    if (!unknown && tokens_ != nullptr) unknown = tokens_->Unknown();
    if (start_) metadata_->Count("tokenizer.ggml.bos_token_id", *start_);
    if (end_) metadata_->Count("tokenizer.ggml.eos_token_id", *end_);
    if (const auto padding = NumberOf("pad_token_id", "pad_token")) {
      metadata_->Count("tokenizer.ggml.padding_token_id", *padding);
    }
    if (unknown) metadata_->Count(kUnknown, *unknown);
    AddEnds();
  }

  void AddFlags(bool adds_start, bool adds_end) {
    metadata_->Flag("tokenizer.ggml.add_bos_token", adds_start && start_);
    if (adds_end && end_) metadata_->Flag("tokenizer.ggml.add_eos_token", true);
  }

  /// Whether tokenizer_config.json says so.
  bool Says(const char* key) const { return FlagOf(Member(files_.tokenizer_config, key)); }

 private:
  std::optional<int64_t> NumberOf(const char* number, const char* text) const {
    const Json& stored = Member(files_.config, number);
    const std::optional<int64_t> id =
        IdOf(stored.is_array() && !stored.empty() ? stored[0] : stored);
    return id || tokens_ == nullptr ? id : NamedToken(text);
  }

  /// A token of tokenizer_config.json.
  std::optional<int64_t> NamedToken(const char* text) const {
    const Json& named = Member(files_.tokenizer_config, text);
    return tokens_->Find(TextOf(named.is_object() ? Member(named, "content") : named));
  }

  /// The end tokens of all files but the first. There are two more keys, for those that readers do
  /// not know by their texts.
  void AddEnds() const {
    std::vector<int64_t> others;
    const auto add = [&](std::optional<int64_t> id) {
      const bool known = tokens_ != nullptr && id && tokens_->IsEndText(*id);
      const bool listed = std::find(others.begin(), others.end(), id) != others.end();
      if (id && id != end_ && !known && !listed) others.push_back(*id);
    };
    for (const Json* const file : {&files_.config, &files_.generation_config}) {
      const Json& ends = Member(*file, "eos_token_id");
      for (const Json& end : ends.is_array() ? ends : Json::array({ends})) add(IdOf(end));
    }
    if (tokens_ != nullptr) add(NamedToken("eos_token"));
    constexpr std::string_view kKeys[] = {"tokenizer.ggml.eot_token_id",
                                          "tokenizer.ggml.eom_token_id"};
    for (size_t i = 0; i < std::min(others.size(), std::size(kKeys)); ++i) {
      metadata_->Count(kKeys[i], others[i]);
    }
  }

  const TokenizerDescriber* tokens_;
  const GgufTokenFiles& files_;
  GgufMetadataBuilder* metadata_;
  std::optional<int64_t> start_;
  std::optional<int64_t> end_;
};

/// The chat template of a tokenizer_config.json: a text, or the default one of a list.
std::string ChatTemplateOf(const Json& config) {
  const Json& chat = Member(config, "chat_template");
  if (!chat.is_array()) return TextOf(chat);
  for (const Json& named : chat) {
    if (TextOf(Member(named, "name")) == "default") return TextOf(Member(named, "template"));
  }
  return {};
}

}  // namespace

std::string DescribeGgufTokenizer(const GgufTokenFiles& files, int64_t rows,
                                  GgufMetadataBuilder* metadata) {
  TokenizerDescriber describer(files.tokenizer, rows);
  if (!describer.Read()) return describer.obstacle();
  std::string before;
  std::string after;
  const bool listed = describer.ReadTemplate(&before, &after);
  if (!describer.obstacle().empty()) return describer.obstacle();
  describer.Write(metadata);
  SpecialTokensWriter special(&describer, files, metadata);
  special.AddNumbers(describer.Find(before), describer.Find(after));
  special.AddFlags(listed ? !before.empty() : special.Says("add_bos_token"),
                   listed ? !after.empty() : special.Says("add_eos_token"));
  const std::string chat = ChatTemplateOf(files.tokenizer_config);
  if (!chat.empty()) metadata->Text("tokenizer.chat_template", chat);
  return {};
}

void DescribeGgufTokenNumbers(const Json& config, const Json& generation_config,
                              GgufMetadataBuilder* metadata) {
  const Json nothing;
  const GgufTokenFiles files{nothing, nothing, config, generation_config};
  SpecialTokensWriter(nullptr, files, metadata).AddNumbers({}, {});
}

void DescribeGgufSampling(const Json& generation_config, GgufMetadataBuilder* metadata) {
  if (!FlagOf(Member(generation_config, "do_sample"))) return;
  for (const auto& [key, name] : kGgufSamplingReals) {
    const Json& value = Member(generation_config, name);
    if (value.is_number()) metadata->Real(key, value.get<double>());
  }
  if (const auto most = IdOf(Member(generation_config, "top_k"))) {
    metadata->Count(kGgufTopK, *most);
  }
}

}  // namespace marlin
