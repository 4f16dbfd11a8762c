#include "cli/arguments/prompt_lines.h"

#include <fmt/core.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/macros.h"
#include "base/printable.h"

namespace marlin::cli {
namespace {

constexpr JsonLimits kPromptJson{int64_t{64} << 20, int64_t{1} << 22};
constexpr std::string_view kWhiteSpace = " \t\r\v\f";

/// One JSON object of a file of prompts.
class PromptObject {
 public:
  PromptObject(std::string place, Json object)
      : place_(std::move(place)), object_(std::move(object)) {}

  Result<PromptLine> Read() const {
    PromptLine prompt;
    for (const auto& [key, value] : object_.items()) {
      MARLIN_RETURN_IF_ERROR(ReadValue(key, value, &prompt));
    }
    if (object_.contains("prompt") == object_.contains("tokens")) {
      return Malformed("expected either \"prompt\" or \"tokens\"");
    }
    return prompt;
  }

 private:
  Status ReadValue(const std::string& key, const Json& value, PromptLine* prompt) const {
    if (key == "prompt") {
      if (!value.is_string()) return Wrong(key, "a text", value);
      prompt->text = value.get<std::string>();
      return {};
    }
    if (key == "tokens") {
      if (!value.is_array()) return Wrong(key, "an array of token ids", value);
      for (const Json& token : value) {
        MARLIN_ASSIGN_OR_RETURN(const int64_t id,
                                Whole(key, token, std::numeric_limits<int32_t>::max()));
        prompt->tokens.push_back(static_cast<int32_t>(id));
      }
      return {};
    }
    if (key == "max_tokens") {
      MARLIN_ASSIGN_OR_RETURN(prompt->max_tokens, Whole(key, value, INT64_MAX));
      return {};
    }
    if (key == "seed") {
      MARLIN_ASSIGN_OR_RETURN(const int64_t seed, Whole(key, value, INT64_MAX));
      prompt->seed = static_cast<uint64_t>(seed);
      return {};
    }
    return Malformed(fmt::format("expected the keys prompt, tokens, max_tokens and seed, got '{}'",
                                 Printable(key)));
  }

  Result<int64_t> Whole(const std::string& key, const Json& value, int64_t most) const {
    const bool fits =
        value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(most);
    if (fits) return value.get<int64_t>();
    return Wrong(key, fmt::format("0..{}", most), value);
  }

  Status Wrong(const std::string& key, const std::string& expected, const Json& value) const {
    return Malformed(fmt::format("{}: expected {}, got {}", key, expected, DescribeJson(value)));
  }
  Status Malformed(const std::string& what) const {
    return Status(Code::kMalformedFile, fmt::format("{}: {}", place_, what));
  }

  std::string place_;
  Json object_;
};

}  // namespace

std::string PlaceOf(std::string_view file, int64_t line) {
  return fmt::format("{}: line {}", Printable(file), line);
}

Result<std::vector<PromptLine>> ParsePromptLines(const std::string& file, std::string_view text) {
  std::vector<PromptLine> prompts;
  const bool json = text.starts_with('{');
  for (int64_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view content = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (content.ends_with('\r')) content.remove_suffix(1);
    if (content.find_first_not_of(kWhiteSpace) == std::string_view::npos) continue;
    if (json) {
      const std::string place = PlaceOf(file, line);
      MARLIN_ASSIGN_OR_RETURN(Json object, ParseJsonObject(content, place, kPromptJson));
      MARLIN_ASSIGN_OR_RETURN(PromptLine prompt, PromptObject(place, std::move(object)).Read());
      prompts.push_back(std::move(prompt));
    } else {
      prompts.emplace_back().text = content;
    }
    prompts.back().line = line;
  }
  if (!prompts.empty()) return prompts;
  return Invalid(fmt::format("{}: no prompts", Printable(file)));
}

}  // namespace marlin::cli
