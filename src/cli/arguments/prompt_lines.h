// A file of prompts, one per line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"

namespace marlin::cli {

/// One prompt: text or token ids, with options of its own.
struct PromptLine {
  int64_t line = 0;  ///< Its number in the file, from 1.
  std::optional<std::string> text;
  std::vector<int32_t> tokens;  ///< Without a text.
  std::optional<int64_t> max_tokens;
  std::optional<uint64_t> seed;
};

/// The place of a prompt in messages: "FILE: line 7".
std::string PlaceOf(std::string_view file, int64_t line);

/// Parses a file of prompts. If its first character is "{", every line is a JSON object with
/// "prompt" (text) or "tokens" (ids), and with "max_tokens" and "seed" if they differ from
/// the command; otherwise every line is a text. Lines of white space are skipped. Errors:
/// kMalformedFile naming file and line, kInvalidArgument for a file without prompts.
Result<std::vector<PromptLine>> ParsePromptLines(const std::string& file, std::string_view text);

}  // namespace marlin::cli
