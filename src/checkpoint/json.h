// JSON from files that nobody vouches for: bounded depth, no duplicate keys, errors as values.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "marlin/status.h"

namespace marlin {

using Json = nlohmann::json;

/// Deepest nesting that any JSON text of a checkpoint may have.
inline constexpr int kMaxJsonDepth = 16;
/// Largest config.json and index that are read.
inline constexpr int64_t kMaxJsonFileBytes = int64_t{64} << 20;

/// Parses one JSON object. `file` names the text in errors. Errors: kMalformedFile for broken
/// JSON, another kind of value, duplicate keys, deep nesting.
Result<Json> ParseJsonObject(std::string_view text, const std::string& file);

/// The text of a value; what is not UTF-8 becomes the replacement character. indent < 0: one line.
std::string DumpJson(const Json& json, int indent = -1);

/// The parser's own words about an error, without its prefix and fit for one line.
std::string JsonErrorText(const std::string& what);

}  // namespace marlin
