// Generates the texts of a file of prompts, and prints them in the order of the file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/arguments/model_arguments.h"
#include "cli/arguments/prompt_lines.h"
#include "cli/console.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "text/text_codec.h"

namespace marlin::cli {

/// The prompts of a file, and the options of their texts.
struct PromptBatch {
  std::string file;  ///< For messages.
  std::vector<PromptLine> prompts;
  GenerateOptions options;           ///< The command's.
  std::vector<std::string> stops;    ///< Texts that end a text.
  SpecialTokensArgument special;     ///< For prompts that are texts.
  const ChatPrompt* chat = nullptr;  ///< How those become messages; null where they do not.
  int64_t max_batch = 0;
};

/// Generates all texts; each is printed when it and all before it have ended: as "[LINE] text", or
/// with --json as an object on one line. `codec` may be null where no prompt is a text. Ctrl-C ends
/// all texts with what they have. Errors: as GenerateBatch and of the codec, naming the line
/// of the file.
Status GeneratePromptBatch(Console& console, const Model& model, const std::string& directory,
                           TextCodec* codec, const PromptBatch& batch);

}  // namespace marlin::cli
