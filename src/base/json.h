// The one reader of JSON texts. Time and memory are proportional to the text: its nesting, its size
// and the number of its values are bounded, keys are unique, errors are values.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "marlin/status.h"

namespace marlin {

using Json = nlohmann::json;

/// Deepest nesting that any JSON text may have. What walks a value, its destructor and dump()
/// included, recurses no deeper.
inline constexpr int kMaxJsonDepth = 16;

/// How much one kind of file may hold. A value takes up to some 150 bytes of memory.
struct JsonLimits {
  int64_t bytes = 0;
  int64_t values = 0;
};
/// config.json, with the description of every quantized module; the index of a sharded model.
inline constexpr JsonLimits kCheckpointJson{int64_t{64} << 20, int64_t{1} << 22};
/// generation_config.json.
inline constexpr JsonLimits kGenerationJson{int64_t{1} << 20, int64_t{1} << 16};
inline constexpr JsonLimits kRecipeJson{int64_t{1} << 20, int64_t{1} << 16};

/// Parses one JSON object. `file` names the text in errors. Errors: kMalformedFile for broken JSON,
/// text that is not UTF-8, another kind of value, duplicate keys, and what exceeds a limit;
/// kOutOfMemory.
Result<Json> ParseJsonObject(std::string_view text, const std::string& file,
                             const JsonLimits& limits = kCheckpointJson);

/// The text of a value; what is not UTF-8 becomes the replacement character. indent < 0: one line.
std::string DumpJson(const Json& json, int indent = -1);

/// A value in a message: its text where that is short, else its type.
std::string DescribeJson(const Json& json);

/// The parser's own words about an error, without its prefix and fit for one line.
std::string JsonErrorText(const std::string& what);

}  // namespace marlin
