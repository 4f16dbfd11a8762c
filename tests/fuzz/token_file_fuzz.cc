// Files of token ids (--tokens): the ids equal those in the text, for any layout of it.
#include <string>
#include <vector>

#include "cli/arguments/model_arguments.h"
#include "fuzz_target.h"
#include "temporary_folder.h"

namespace {

using namespace marlin;

std::string Joined(const std::vector<int32_t>& tokens, const char* separator) {
  std::string text;
  for (const int32_t token : tokens) {
    if (!text.empty()) text += separator;
    text += std::to_string(token);
  }
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const TemporaryFolder folder;
  const auto read = [](std::string_view text) {
    folder.Write("tokens", text);
    return cli::ReadTokens(folder.Path("tokens"));
  };
  const auto tokens = read(TextOf(data, size));
  if (!tokens.ok()) {
    CheckError(tokens.status());
    return 0;
  }
  // A token takes at least one digit, and a separator after all but the last.
  MARLIN_FUZZ_CHECK(2 * tokens->size() <= size + 1);
  const std::string array = std::string(1, '[').append(Joined(*tokens, ",")).append(1, ']');
  for (const std::string& text : {Joined(*tokens, " "), array, Joined(*tokens, "\r\n")}) {
    const auto again = read(text);
    MARLIN_FUZZ_CHECK(again.ok());
    MARLIN_FUZZ_CHECK(*again == *tokens);
  }
  return 0;
}
