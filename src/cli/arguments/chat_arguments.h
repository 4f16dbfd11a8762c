// Options of commands that put texts into a model's chat template.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/arguments/arguments.h"
#include "cli/arguments/model_arguments.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "text/text_codec.h"

namespace marlin::cli {

/// --system, --chat-template and --chat-template-kwargs.
class ChatArguments {
 public:
  void Declare(ArgumentList& arguments);
  const ChatPrompt& prompt() const { return prompt_; }
  /// The first of these options that is given, or null.
  const char* FirstGiven() const;

 private:
  ChatPrompt prompt_;
};

/// The token ids of a prompt: a message in the chat template where `chat` is not null, otherwise
/// the text itself. Errors: as EncodeText, the template's.
Result<std::vector<int32_t>> EncodePrompt(TextCodec& codec, std::string_view text,
                                          const SpecialTokensArgument& special,
                                          const ChatPrompt* chat, const std::string& directory,
                                          const Model& model);

}  // namespace marlin::cli
