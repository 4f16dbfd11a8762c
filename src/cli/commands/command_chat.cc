// chat: a conversation with a model. The command declares the options and opens the model; the
// program that embeds it, which has the tokenizer and the chat template, talks to the user.
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "cli/arguments/chat_arguments.h"
#include "cli/arguments/draft_arguments.h"
#include "cli/arguments/model_arguments.h"
#include "cli/arguments/sampling_arguments.h"
#include "cli/command.h"
#include "cli/commands/generated_text.h"
#include "text/chat_request.h"

namespace marlin::cli {
namespace {

class ChatCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory, or a GGUF file");
    arguments.Model(&path_);
    arguments.Group("Server");
    arguments.Option("--url", &url_, "URL",
                     "Talk to a server with OpenAI's API instead of loading MODEL");
    arguments.Option("--api-key", &api_key_, "KEY",
                     "The server's key; also as METAL_MARLIN_API_KEY, which other users of this "
                     "machine cannot see");
    arguments.Group("Conversation");
    template_.Declare(arguments);
    arguments.Flag("--no-stream", &no_stream_, "Show an answer when it is complete");
    arguments.Option("--max-tokens", &max_tokens_, {.least = 1}, "N",
                     "Tokens of an answer; default: as many as the context holds");
    arguments.Group("Sampling");
    sampling_.Declare(arguments);
    arguments.Group("Speculation");
    draft_.Declare(arguments);
    arguments.Group(RunArguments::kGroup);
    run_.Declare(arguments);
    arguments.Exclude("--url", "Speculation");
    arguments.Exclude("--url", RunArguments::kGroup);
  }

  Status Check(const Console& console) const override {
    if (path_.has_value() == url_.has_value())
      return Invalid("chat: expected either MODEL or --url");
    if (api_key_ && !url_) return Invalid("--api-key: only with --url");
    if (url_ && template_.prompt().file) {
      return Invalid("--chat-template: not with --url, whose server has the template");
    }
    MARLIN_RETURN_IF_ERROR(draft_.Check());
    return CheckHasCodec(console, "chat", "");
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, "chat", path_.value_or("")));
    ChatRequest request;
    request.directory = path_.value_or("");
    request.url = url_;
    request.api_key = api_key_;
    request.sampling = sampling_.Given().dump();
    request.prompt = template_.prompt();
    request.max_tokens = max_tokens_;
    request.stream = !no_stream_;
    request.json = console.json();
    request.quiet = console.quiet();
    request.open = [&](GenerateOptions* options) -> Result<Model> {
      if (draft_.source() == DraftSource::kLayer) run_.WithDraft();
      MARLIN_ASSIGN_OR_RETURN(Model model, run_.Open(console, *path_));
      const auto open = [&](const std::string& path) {
        return run_.OpenDraft(path, model.device());
      };
      MARLIN_ASSIGN_OR_RETURN(options->speculation, draft_.Options(model, codec.get(), open));
      options->sampling = sampling_.Options(model.info().sampling);
      SaySampling(console, model.info(), options->sampling);
      return model;
    };
    request.print_json = [&](std::string_view json) -> Result<bool> {
      MARLIN_RETURN_IF_ERROR(console.PrintJsonLine(nlohmann::ordered_json::parse(json)));
      return !console.reader_gone();
    };
    return codec->Chat(request);
  }

 private:
  std::optional<std::string> path_;
  std::optional<std::string> url_;
  std::optional<std::string> api_key_;
  ChatArguments template_;
  std::optional<int64_t> max_tokens_;
  SamplingArguments sampling_;
  DraftArguments draft_;
  bool no_stream_ = false;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_chat() { return std::make_unique<ChatCommand>(); }

}  // namespace marlin::cli
