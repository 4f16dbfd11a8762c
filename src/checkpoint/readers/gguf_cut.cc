#include "checkpoint/readers/gguf_cut.h"

#include <fmt/core.h>

#include <array>

namespace marlin {
namespace {

// \p{..} are Unicode classes.
constexpr const char* kContractions = R"((?i:'s|'t|'re|'ve|'m|'ll|'d))";
constexpr const char* kSpaces = R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kUpper = R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])";
constexpr const char* kLower = R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])";

/// Words, runs of up to `digits` digits, punctuation, white space: the cut of GPT-4 and its kin.
std::string WordsPattern(std::string_view digits) {
  return fmt::format(R"({}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{})",
                     kContractions, digits, kSpaces);
}

/// The same with words split where lower case meets upper case; `suffix` may end a word.
std::string CasePattern(std::string_view suffix, std::string_view digits) {
  return fmt::format(R"({0}*{1}+{2}|{0}+{1}*{2}|{3}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{4})", kUpper,
                     kLower, suffix, digits, kSpaces);
}

constexpr std::array<std::string_view, 6> kNames = {"gpt-2",  "llama-bpe", "qwen2",
                                                    "gpt-4o", "tekken",    "deepseek-v3"};

}  // namespace

std::optional<GgufCut> GgufCutOf(std::string_view pre) {
  constexpr std::string_view kThree = R"(\p{N}{1,3})";
  constexpr std::string_view kOne = R"(\p{N})";
  if (pre == "gpt-2") return GgufCut{};
  if (pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3") {
    return GgufCut{{WordsPattern(kThree)}, true, false};
  }
  if (pre == "qwen2" || pre == "deepseek-r1-qwen")
    return GgufCut{{WordsPattern(kOne)}, false, true};
  if (pre == "glm4" || pre == "chatglm-bpe") return GgufCut{{WordsPattern(kThree)}, true, false};
  if (pre == "gpt-4o") {
    return GgufCut{{CasePattern(fmt::format("{}?", kContractions), kThree)}, false, false};
  }
  if (pre == "tekken") return GgufCut{{CasePattern("", kOne)}, true, false};
  if (pre == "deepseek-v3") {
    return GgufCut{{std::string(kThree),
                    "[\xe4\xb8\x80-\xe9\xbe\xa5\xe3\x81\x80-\xe3\x82\x9f"
                    "\xe3\x82\xa0-\xe3\x83\xbf]+",
                    fmt::format(R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|)"
                                R"([^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|)"
                                R"( ?[\p{{P}}\p{{S}}]+[\r\n]*|{})",
                                kSpaces)},
                   false,
                   false};
  }
  return std::nullopt;
}

std::span<const std::string_view> GgufCutNames() { return kNames; }

}  // namespace marlin
