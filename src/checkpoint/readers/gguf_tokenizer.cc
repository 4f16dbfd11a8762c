#include "checkpoint/readers/gguf_tokenizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>

#include "base/json.h"
#include "base/printable.h"
#include "checkpoint/readers/gguf_cut.h"

namespace marlin {
namespace {

/// Longer pieces are no result of merges that occur in texts; a bound keeps the search linear.
constexpr size_t kMaxMergedBytes = 256;

class TokenizerBuilder {
 public:
  explicit TokenizerBuilder(const GgufMetadata& metadata) : metadata_(metadata) {}

  /// Sets `obstacle_` if the tokenizer cannot be expressed.
  std::string Build() {
    const std::string_view model =
        metadata_.Text("tokenizer.ggml.model").value_or(std::string_view());
    if (model != "gpt2" && model != "llama") {
      obstacle_ = fmt::format("tokenizer.ggml.model \"{}\" cannot be expressed; gpt2 and llama can",
                              Printable(model));
      return {};
    }
    if (!ReadTokens()) return {};
    Json file = {{"version", "1.0"},      {"truncation", nullptr},    {"padding", nullptr},
                 {"normalizer", nullptr}, {"pre_tokenizer", nullptr}, {"post_processor", nullptr}};
    const bool built = model == "gpt2" ? BuildBytes(&file) : BuildPieces(&file);
    if (!built) return {};
    file["added_tokens"] = AddedTokens();
    return DumpJson(file);
  }
  const std::string& obstacle() const { return obstacle_; }

  /// Text of the token that a key of the metadata names.
  std::optional<std::string> TokenOf(std::string_view key) const {
    const std::optional<int64_t> id = metadata_.Integer(key);
    if (!id || *id < 0 || *id >= static_cast<int64_t>(tokens_.size())) return std::nullopt;
    return std::string(tokens_[static_cast<size_t>(*id)]);
  }

 private:
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
    for (size_t i = 0; i < types_.size(); ++i) {
      const auto type = static_cast<GgufTokenType>(types_[i]);
      if (type != GgufTokenType::kControl && type != GgufTokenType::kUserDefined &&
          type != GgufTokenType::kUnknown) {
        continue;
      }
      added.push_back({{"id", static_cast<uint64_t>(i)},
                       {"content", std::string(tokens_[i])},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", type != GgufTokenType::kUserDefined}});
    }
    return added;
  }

  Json BpeModel(Json merges) const {
    return {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", Vocabulary()},
            {"merges", std::move(merges)}};
  }

  /// Byte-level BPE with the merges of the file.
  bool BuildBytes(Json* file) {
    const std::string_view pre = metadata_.Text("tokenizer.ggml.pre").value_or(std::string_view());
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
    Json bytes = {{"type", "ByteLevel"},
                  {"add_prefix_space", false},
                  {"trim_offsets", true},
                  {"use_regex", cut->patterns.empty()}};
    Json parts = Json::array();
    for (const std::string& pattern : cut->patterns) {
      parts.push_back({{"type", "Split"},
                       {"pattern", {{"Regex", pattern}}},
                       {"behavior", "Isolated"},
                       {"invert", false}});
    }
    parts.push_back(bytes);
    (*file)["pre_tokenizer"] =
        parts.size() == 1 ? bytes : Json{{"type", "Sequence"}, {"pretokenizers", parts}};
    if (cut->composed) (*file)["normalizer"] = {{"type", "NFC"}};
    (*file)["decoder"] = bytes;
    (*file)["model"] = BpeModel(std::move(merges));
    (*file)["model"]["ignore_merges"] = cut->whole_words;
    return true;
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
      if (piece.size() > kMaxMergedBytes ||
          (!types_.empty() && types_[i] != static_cast<int64_t>(GgufTokenType::kNormal)))
        continue;
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
    const char* const kSpace = "\xe2\x96\x81";  // U+2581 stands for a space.
    Json steps = Json::array();
    const bool prefix = metadata_.Bool("tokenizer.ggml.add_space_prefix").value_or(true);
    if (prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kSpace}});
    steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpace}});
    (*file)["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
    Json decoders = Json::array();
    decoders.push_back({{"type", "Replace"}, {"pattern", {{"String", kSpace}}}, {"content", " "}});
    decoders.push_back({{"type", "ByteFallback"}});
    decoders.push_back({{"type", "Fuse"}});
    if (prefix) {
      decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    }
    (*file)["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
    (*file)["model"] = BpeModel(std::move(pairs));
    Json& model = (*file)["model"];
    model["byte_fallback"] = true;
    model["fuse_unk"] = true;
    if (const auto unknown = TokenOf("tokenizer.ggml.unknown_token_id")) {
      model["unk_token"] = *unknown;
    }
    return true;
  }

  const GgufMetadata& metadata_;
  std::string obstacle_;
  std::vector<std::string_view> tokens_;
  std::vector<int64_t> types_;
  std::unordered_map<std::string_view, size_t> ids_;
};

}  // namespace

std::vector<ContainedFile> GgufTokenizerFiles(const GgufMetadata& metadata) {
  if (!metadata.Has("tokenizer.ggml.model")) return {};
  TokenizerBuilder builder(metadata);
  std::string text = builder.Build();
  std::vector<ContainedFile> files = {{"tokenizer.json", std::move(text), builder.obstacle()}};
  if (!builder.obstacle().empty()) return files;
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}};
  constexpr std::pair<const char*, const char*> kNamed[] = {
      {"bos_token", "tokenizer.ggml.bos_token_id"},
      {"eos_token", "tokenizer.ggml.eos_token_id"},
      {"unk_token", "tokenizer.ggml.unknown_token_id"},
      {"pad_token", "tokenizer.ggml.padding_token_id"},
  };
  for (const auto& [name, key] : kNamed) {
    if (const auto token = builder.TokenOf(key)) config[name] = *token;
  }
  if (const auto add = metadata.Bool("tokenizer.ggml.add_bos_token"))
    config["add_bos_token"] = *add;
  if (const auto text_of = metadata.Text("tokenizer.chat_template")) {
    config["chat_template"] = std::string(*text_of);
  }
  files.push_back({"tokenizer_config.json", DumpJson(config, 2) + "\n", ""});
  return files;
}

}  // namespace marlin
