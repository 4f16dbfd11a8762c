// The library's only JSON parser. Time and memory are proportional to the text: nesting, size and
// number of values are bounded, keys are unique, errors are values. Json is incomplete here,
// because its header is the dearest to compile: sources that use values include
// <nlohmann/json.hpp>.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "marlin/status.h"

namespace marlin {

using Json = nlohmann::json;

/// Deepest nesting accepted in any JSON text. It bounds the recursion of all code that walks a
/// value, its destructor and dump() included.
inline constexpr int kMaxJsonDepth = 16;

/// Limits for one kind of file. A value takes up to about 150 bytes of memory.
struct JsonLimits {
  int64_t bytes = 0;
  int64_t values = 0;
  std::string_view only = {};  ///< The one member of the object that is kept; empty: all are.
};
/// config.json, with the description of every quantized module; the index of a sharded model.
inline constexpr JsonLimits kCheckpointJson{int64_t{64} << 20, int64_t{1} << 22};
/// generation_config.json.
inline constexpr JsonLimits kGenerationJson{int64_t{1} << 20, int64_t{1} << 16};
/// tokenizer_config.json, with a chat template and every added token.
inline constexpr JsonLimits kTokenizerConfigJson = kCheckpointJson;
/// The added tokens of tokenizer.json, without its vocabulary.
inline constexpr JsonLimits kAddedTokensJson{int64_t{256} << 20, int64_t{1} << 20, "added_tokens"};
/// May have a choice for every matrix of a model.
inline constexpr JsonLimits kRecipeJson{int64_t{16} << 20, int64_t{1} << 18};
/// Sensitivities of every matrix of a model, in several formats.
inline constexpr JsonLimits kSensitivityJson{int64_t{64} << 20, int64_t{1} << 22};

/// Parses one JSON object. An infinite number, which Python writes as Infinity, is read as
/// transformers 5 writes it: {"__float__": "Infinity"}. `file` names the text in errors. Errors:
/// kMalformedFile for broken JSON, text that is not UTF-8, values other than an object, duplicate
/// keys, and exceeded limits; kOutOfMemory.
Result<Json> ParseJsonObject(std::string_view text, const std::string& file,
                             const JsonLimits& limits = kCheckpointJson);

/// Serializes a value; invalid UTF-8 becomes the replacement character. indent < 0: one line.
std::string DumpJson(const Json& json, int indent = -1);

/// A value for a message: its text if that is short, otherwise its type.
std::string DescribeJson(const Json& json);

/// The parser's error message without its prefix, made fit for one line.
std::string JsonErrorText(const std::string& what);

}  // namespace marlin
