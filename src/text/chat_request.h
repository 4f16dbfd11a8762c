// The call of `chat` into the program that holds the conversation.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "text/text_codec.h"

namespace marlin {

struct ChatRequest {
  std::string directory;
  std::optional<std::string> url;      ///< A server's, instead of a directory.
  std::optional<std::string> api_key;  ///< The server's.
  std::string sampling;                ///< The sampling options given, as a JSON object.
  ChatPrompt prompt;
  std::optional<int64_t> max_tokens;  ///< Per answer; none: as many as the context holds.
  bool stream = true;                 ///< Show an answer while it is generated.
  bool json = false;                  ///< Print a JSON document per answer instead of text.
  bool quiet = false;                 ///< Print answers and errors alone.
  /// Opens the model, and says how the tokens of an answer are chosen.
  std::function<Result<Model>(GenerateOptions*)> open;
  /// Prints the document of an answer as one line; false once the reader of stdout is gone.
  std::function<Result<bool>(std::string_view json)> print_json;
};

}  // namespace marlin
