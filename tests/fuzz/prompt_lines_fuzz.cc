// Files of prompts (--prompts): prompts have the numbers of their lines, and JSON lines
// are the same when they are written again.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/json.h"
#include "cli/arguments/prompt_lines.h"
#include "fuzz_target.h"

namespace {

using namespace marlin;

std::string Written(const cli::PromptLine& prompt) {
  Json object = Json::object();
  if (prompt.text) {
    object["prompt"] = *prompt.text;
  } else {
    object["tokens"] = prompt.tokens;
  }
  if (prompt.max_tokens) object["max_tokens"] = *prompt.max_tokens;
  if (prompt.seed) object["seed"] = *prompt.seed;
  return DumpJson(object) + "\n";
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = TextOf(data, size);
  const auto prompts = cli::ParsePromptLines("prompts", text);
  if (!prompts.ok()) {
    CheckError(prompts.status());
    return 0;
  }
  MARLIN_FUZZ_CHECK(!prompts->empty());
  const int64_t lines = 1 + std::count(text.begin(), text.end(), '\n');
  int64_t line = 0;
  std::string again;
  for (const cli::PromptLine& prompt : *prompts) {
    MARLIN_FUZZ_CHECK(prompt.line > line && prompt.line <= lines);
    line = prompt.line;
    MARLIN_FUZZ_CHECK(!prompt.text || prompt.tokens.empty());
    for (const int32_t token : prompt.tokens) MARLIN_FUZZ_CHECK(token >= 0);
    again += Written(prompt);
  }
  // Lines of plain text need not be UTF-8.
  if (!text.starts_with('{')) return 0;
  const auto same = cli::ParsePromptLines("again", again);
  MARLIN_FUZZ_CHECK(same.ok());
  MARLIN_FUZZ_CHECK(same->size() == prompts->size());
  for (size_t i = 0; i < same->size(); ++i) {
    MARLIN_FUZZ_CHECK(Written((*same)[i]) == Written((*prompts)[i]));
  }
  return 0;
}
