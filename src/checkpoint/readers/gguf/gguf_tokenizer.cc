#include "checkpoint/readers/gguf/gguf_tokenizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>

#include "base/json.h"
#include "base/printable.h"
#include "checkpoint/readers/gguf/gguf_cut.h"
#include "checkpoint/readers/gguf/gguf_generation.h"

namespace marlin {
namespace {

/// Longer pieces are no result of merges that occur in texts; a bound keeps the search linear.
constexpr size_t kMaxMergedBytes = 256;

/// A special token: its name, the key of its number, and the number that SentencePiece gives it.
struct SpecialToken {
  std::string_view name;
  std::string_view key;
  int64_t usual;
};
constexpr SpecialToken kSpecialTokens[] = {
    {"unk_token", "tokenizer.ggml.unknown_token_id", 0},
    {"bos_token", "tokenizer.ggml.bos_token_id", 1},
    {"eos_token", "tokenizer.ggml.eos_token_id", 2},
    {"pad_token", "tokenizer.ggml.padding_token_id", -1},
};

/// The kind of a tokenizer that cannot be expressed; empty where its name says enough.
std::string_view UnsupportedKind(std::string_view model) {
  if (model == "bert") return "a WPM (WordPiece) tokenizer,";
  if (model == "t5") return "a UGM (Unigram) tokenizer,";
  if (model == "rwkv") return "a tokenizer of RWKV,";
  if (model == "plamo2") return "a tokenizer of PLaMo-2,";
  return {};
}

Json BpeModel(Json vocabulary, Json merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", std::move(vocabulary)},
          {"merges", std::move(merges)}};
}

/// Whether merges can make a token of this type.
bool IsMerged(GgufTokenType type) {
  return type != GgufTokenType::kControl && type != GgufTokenType::kUnknown &&
         type != GgufTokenType::kByte;
}

class TokenizerBuilder {
 public:
  explicit TokenizerBuilder(const GgufMetadata& metadata) : metadata_(metadata) {}

  /// Sets `obstacle_` if the tokenizer cannot be expressed.
  std::string Build() {
    model_ = metadata_.Text("tokenizer.ggml.model").value_or(std::string_view());
    const bool pairs = model_ == "gpt2" || model_ == "gemma4";
    if (!pairs && model_ != "llama") {
      const std::string_view kind = UnsupportedKind(model_);
      obstacle_ = fmt::format(
          "tokenizer.ggml.model \"{}\"{}{} cannot be expressed; gpt2 (BPE) and "
          "llama (SPM) can",
          Printable(model_), kind.empty() ? "" : ", ", kind);
      return {};
    }
    if (!ReadTokens()) return {};
    Json file = {{"version", "1.0"},      {"truncation", nullptr},    {"padding", nullptr},
                 {"normalizer", nullptr}, {"pre_tokenizer", nullptr}, {"post_processor", nullptr}};
    if (!(pairs ? BuildPairs(&file) : BuildPieces(&file))) return {};
    file["added_tokens"] = AddedTokens();
    AddTemplate(&file);
    return DumpJson(file);
  }
  const std::string& obstacle() const { return obstacle_; }

  /// Text of a special token, named as in tokenizer_config.json.
  std::optional<std::string> TokenOf(std::string_view name) const {
    for (const SpecialToken& special : kSpecialTokens) {
      if (special.name != name) continue;
      const std::optional<size_t> id = NumberOf(special);
      return id ? std::optional(std::string(tokens_[*id])) : std::nullopt;
    }
    return std::nullopt;
  }
  /// Whether that token is added before or after a text.
  bool AddsStart() const {
    const bool usual = model_ == "llama" || GgufCutAddsBos(Pre());
    return metadata_.Bool("tokenizer.ggml.add_bos_token").value_or(usual) && TokenOf("bos_token");
  }
  bool AddsEnd() const {
    return metadata_.Bool("tokenizer.ggml.add_eos_token").value_or(false) && TokenOf("eos_token");
  }

 private:
  std::string_view Pre() const {
    if (model_ == "gemma4") return model_;
    return metadata_.Text("tokenizer.ggml.pre").value_or(std::string_view());
  }

  GgufTokenType TypeOf(size_t id) const {
    return types_.empty() ? GgufTokenType::kNormal : static_cast<GgufTokenType>(types_[id]);
  }

  std::optional<size_t> NumberOf(const SpecialToken& special) const {
    std::optional<int64_t> id = metadata_.Integer(special.key);
    const auto valid = [&] { return id && *id >= 0 && *id < std::ssize(tokens_); };
    if (!id && model_ == "llama") {
      id = special.usual;
      if (valid() && TypeOf(static_cast<size_t>(*id)) == GgufTokenType::kNormal) id.reset();
    }
    return valid() ? std::optional(static_cast<size_t>(*id)) : std::nullopt;
  }

  /// The special tokens around a text.
  void AddTemplate(Json* file) const {
    Json single = Json::array();
    Json pair = Json::array();
    Json named = Json::object();
    const auto add = [&](std::string_view name) {
      const std::string token = *TokenOf(name);
      const Json part = {{"SpecialToken", {{"id", token}, {"type_id", 0}}}};
      single.push_back(part);
      pair.push_back(part);
      named[token] = {{"id", token}, {"ids", {ids_.at(token)}}, {"tokens", {token}}};
    };
    if (!AddsStart() && !AddsEnd()) return;
    if (AddsStart()) add("bos_token");
    single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
    pair.push_back(single.back());
    pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
    if (AddsEnd()) add("eos_token");
    (*file)["post_processor"] = {{"type", "TemplateProcessing"},
                                 {"single", std::move(single)},
                                 {"pair", std::move(pair)},
                                 {"special_tokens", std::move(named)}};
  }

  bool Refuse(std::string why) {
    obstacle_ = std::move(why);
    return false;
  }

  bool ReadTokens() {
    std::optional<std::vector<std::string_view>> tokens = metadata_.Texts("tokenizer.ggml.tokens");
    if (!tokens || tokens->empty()) return Refuse("tokenizer.ggml.tokens is missing");
    if (static_cast<int64_t>(tokens->size()) > kMaxGgufTokens) {
      return Refuse(fmt::format("{} tokens, at most {} are read", tokens->size(), kMaxGgufTokens));
    }
    tokens_ = *std::move(tokens);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i].empty()) tokens_[i] = unnamed_.emplace_back(fmt::format("[EMPTY_{}]", i));
    }
    types_ = metadata_.Integers("tokenizer.ggml.token_type").value_or(std::vector<int64_t>());
    if (!types_.empty() && types_.size() != tokens_.size()) {
      return Refuse(fmt::format("tokenizer.ggml.token_type: {} types of {} tokens", types_.size(),
                                tokens_.size()));
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const auto [found, inserted] = ids_.emplace(tokens_[i], i);
      if (!inserted) {
        return Refuse(fmt::format("tokenizer.ggml.tokens: {} and {} are both \"{}\"", found->second,
                                  i, Printable(tokens_[i])));
      }
    }
    return true;
  }

  Json Vocabulary() const {
    Json vocabulary = Json::object();
    for (size_t i = 0; i < tokens_.size(); ++i) {
      vocabulary[std::string(tokens_[i])] = static_cast<uint64_t>(i);
    }
    return vocabulary;
  }

  Json AddedTokens() const {
    Json added = Json::array();
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const GgufTokenType type = TypeOf(i);
      // Files of old converters say normal of some ends. Merges make no token of this form.
      const bool end = tokens_[i].starts_with("<|") && IsGgufEndText(tokens_[i]);
      if (type != GgufTokenType::kControl && type != GgufTokenType::kUserDefined &&
          type != GgufTokenType::kUnknown && !end) {
        continue;
      }
      added.push_back({{"id", static_cast<uint64_t>(i)},
                       {"content", std::string(tokens_[i])},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", end || type != GgufTokenType::kUserDefined}});
    }
    return added;
  }

  /// BPE with the merges of the file.
  bool BuildPairs(Json* file) {
    const std::string_view pre = Pre();
    const std::optional<GgufCut> cut = GgufCutOf(pre);
    if (!cut) return Refuse(fmt::format("tokenizer.ggml.pre \"{}\" is not known", Printable(pre)));
    const std::optional<std::vector<std::string_view>> stored =
        metadata_.Texts("tokenizer.ggml.merges");
    if (!stored) return Refuse("tokenizer.ggml.merges is missing");
    Json merges = Json::array();
    for (const std::string_view merge : *stored) {
      // The first space after the first character: a part itself may begin with none.
      const size_t space = merge.find(' ', 1);
      if (space == std::string_view::npos) {
        return Refuse(fmt::format("tokenizer.ggml.merges: \"{}\" is no pair", Printable(merge)));
      }
      const std::string_view left = merge.substr(0, space);
      const std::string_view right = merge.substr(space + 1);
      const std::string whole = std::string(left) + std::string(right);
      if (!ids_.contains(left) || !ids_.contains(right) || !ids_.contains(whole)) {
        return Refuse(
            fmt::format("tokenizer.ggml.merges: \"{}\" is not made of tokens", Printable(merge)));
      }
      merges.push_back({std::string(left), std::string(right)});
    }
    (*file)["model"] = BpeModel(Vocabulary(), std::move(merges));
    (*file)["model"]["ignore_merges"] = cut->whole_words;
    AddCut(*cut, file);
    return true;
  }

  void AddCut(const GgufCut& cut, Json* file) const {
    const bool built_in = !cut.characters && cut.patterns.back() == Gpt2Pattern();
    Json parts = Json::array();
    for (const std::string& pattern : cut.patterns) {
      if (built_in && &pattern == &cut.patterns.back()) break;
      parts.push_back({{"type", "Split"},
                       {"pattern", {{"Regex", pattern}}},
                       {"behavior", "Isolated"},
                       {"invert", false}});
    }
    if (cut.composed) (*file)["normalizer"] = {{"type", "NFC"}};
    if (cut.characters) {
      AddCharacters(cut.marks_spaces, false, file);
    } else {
      parts.push_back({{"type", "ByteLevel"},
                       {"add_prefix_space", false},
                       {"trim_offsets", true},
                       {"use_regex", built_in}});
      (*file)["decoder"] = parts.back();
    }
    (*file)["pre_tokenizer"] =
        parts.size() == 1 ? parts.front() : Json{{"type", "Sequence"}, {"pretokenizers", parts}};
  }

  /// Tokens of characters: bytes are tokens of their own, and a space is U+2581 if it is marked.
  void AddCharacters(bool marks_spaces, bool prefix, Json* file) const {
    const char* const kSpace = "\xe2\x96\x81";
    Json decoders = Json::array();
    if (marks_spaces) {
      Json steps = Json::array();
      if (prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kSpace}});
      steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpace}});
      (*file)["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
      decoders.push_back(
          {{"type", "Replace"}, {"pattern", {{"String", kSpace}}}, {"content", " "}});
    }
    decoders.push_back({{"type", "ByteFallback"}});
    decoders.push_back({{"type", "Fuse"}});
    if (prefix) {
      decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    }
    (*file)["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
    Json& model = (*file)["model"];
    model["byte_fallback"] = true;
    model["fuse_unk"] = true;
    if (const auto unknown = TokenOf("unk_token")) model["unk_token"] = *unknown;
  }

  /// SentencePiece's BPE: a merge is any pair of pieces that make a piece, the best score first.
  bool BuildPieces(Json* file) {
    const std::optional<std::vector<double>> scores = metadata_.Reals("tokenizer.ggml.scores");
    if (!scores || scores->size() != tokens_.size()) {
      return Refuse(fmt::format("tokenizer.ggml.scores: {} scores of {} tokens",
                                scores ? scores->size() : 0, tokens_.size()));
    }
    struct Merge {
      size_t left;
      size_t right;
      double score;
    };
    std::vector<Merge> merges;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const std::string_view piece = tokens_[i];
      if (piece.size() > kMaxMergedBytes || !IsMerged(TypeOf(i))) continue;
      const size_t first = merges.size();
      for (size_t at = 1; at < piece.size(); ++at) {
        const auto left = ids_.find(piece.substr(0, at));
        const auto right = ids_.find(piece.substr(at));
        if (left == ids_.end() || right == ids_.end()) continue;
        merges.push_back({left->second, right->second, (*scores)[i]});
      }
      std::sort(merges.begin() + static_cast<std::ptrdiff_t>(first), merges.end(),
                [](const Merge& a, const Merge& b) {
                  return std::pair(a.left, a.right) < std::pair(b.left, b.right);
                });
    }
    std::stable_sort(merges.begin(), merges.end(),
                     [](const Merge& a, const Merge& b) { return a.score > b.score; });
    Json pairs = Json::array();
    for (const Merge& merge : merges) {
      pairs.push_back({std::string(tokens_[merge.left]), std::string(tokens_[merge.right])});
    }
    (*file)["model"] = BpeModel(Vocabulary(), std::move(pairs));
    AddCharacters(true, metadata_.Bool("tokenizer.ggml.add_space_prefix").value_or(true), file);
    return true;
  }

  const GgufMetadata& metadata_;
  std::string_view model_;
  std::string obstacle_;
  std::deque<std::string> unnamed_;  ///< Texts of tokens that have none.
  std::vector<std::string_view> tokens_;
  std::vector<int64_t> types_;
  std::unordered_map<std::string_view, size_t> ids_;
};

}  // namespace

std::vector<ContainedFile> GgufTokenizerFiles(const GgufMetadata& metadata) {
  const std::optional<std::string_view> model = metadata.Text("tokenizer.ggml.model");
  if (!model || *model == "none" || *model == "no_vocab") return {};
  TokenizerBuilder builder(metadata);
  std::string text = builder.Build();
  std::vector<ContainedFile> files = {{"tokenizer.json", std::move(text), builder.obstacle()}};
  if (!builder.obstacle().empty()) return files;
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}};
  for (const char* const name : {"bos_token", "eos_token", "unk_token", "pad_token"}) {
    if (const auto token = builder.TokenOf(name)) config[name] = *token;
  }
  config["add_bos_token"] = builder.AddsStart();
  config["add_eos_token"] = builder.AddsEnd();
  if (const auto text_of = metadata.Text("tokenizer.chat_template")) {
    config["chat_template"] = std::string(*text_of);
  }
  files.push_back({"tokenizer_config.json", DumpJson(config, 2) + "\n", ""});
  return files;
}

}  // namespace marlin
