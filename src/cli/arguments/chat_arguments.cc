#include "cli/arguments/chat_arguments.h"

#include "base/macros.h"

namespace marlin::cli {

void ChatArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--system", &prompt_.system, "TEXT", "The system message");
  arguments.Option(
      "--chat-template", &prompt_.file, "FILE",
      "A Jinja chat template, or the name of one of the model's; default: the model's");
  arguments.Option("--chat-template-kwargs", &prompt_.variables, "JSON",
                   "Variables of the template: '{\"enable_thinking\": false}'");
}

const char* ChatArguments::FirstGiven() const {
  if (prompt_.system) return "--system";
  if (prompt_.file) return "--chat-template";
  return prompt_.variables ? "--chat-template-kwargs" : nullptr;
}

Result<std::vector<int32_t>> EncodePrompt(TextCodec& codec, std::string_view text,
                                          const SpecialTokensArgument& special,
                                          const ChatPrompt* chat, const std::string& directory,
                                          const Model& model) {
  if (chat == nullptr) return EncodeText(codec, text, special, directory, model);
  MARLIN_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, codec.EncodeChat(text, *chat));
  MARLIN_RETURN_IF_ERROR(CheckVocabulary(tokens, directory, model));
  return tokens;
}

}  // namespace marlin::cli
