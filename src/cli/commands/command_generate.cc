// generate: continues one prompt token by token, or the prompts of a file as a batch.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/chat_arguments.h"
#include "cli/arguments/draft_arguments.h"
#include "cli/arguments/model_arguments.h"
#include "cli/arguments/prompt_lines.h"
#include "cli/arguments/sampling_arguments.h"
#include "cli/command.h"
#include "cli/commands/generated_text.h"
#include "cli/commands/prompt_batch.h"
#include "marlin/generate.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

/// Prints tokens as they are generated: as text if the prompt was text, otherwise as ids. With
/// --json it only collects them.
class Output {
 public:
  /// `codec` may be null.
  Output(Console& console, TextCodec* codec, std::span<const int32_t> prompt, bool as_text,
         const std::vector<std::string>& stops)
      : console_(console), as_text_(as_text), text_(codec, prompt, stops) {}

  /// False when generation should end: at a stop text, an error, Ctrl-C or a closed output.
  bool Add(int32_t token) {
    status_ = Show(token);
    return status_.ok() && !Interrupted() && !text_.stopped() && !console_.reader_gone();
  }

  Status Finish() {
    MARLIN_RETURN_IF_ERROR(status_);
    MARLIN_ASSIGN_OR_RETURN(const std::string rest, text_.Finish());
    MARLIN_RETURN_IF_ERROR(ShowText(rest));
    return console_.json() ? Status() : console_.Print("\n");
  }

  const GeneratedText& text() const { return text_; }

 private:
  Status Show(int32_t token) {
    if (!as_text_ && !console_.json()) {
      MARLIN_RETURN_IF_ERROR(console_.Print(fmt::format("{}{}", first_ ? "" : " ", token)));
      first_ = false;
    }
    MARLIN_ASSIGN_OR_RETURN(const std::string added, text_.Add(token));
    return ShowText(added);
  }

  Status ShowText(const std::string& text) {
    return as_text_ && !console_.json() ? console_.Print(text) : Status();
  }

  Console& console_;
  bool as_text_;
  GeneratedText text_;
  bool first_ = true;
  Status status_;
};

class GenerateCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory, or a GGUF file");
    arguments.Model(&path_);
    arguments.Group("Prompt");
    arguments.Option("--prompt", &prompt_, "TEXT", "The text to continue; prints text");
    arguments.Option("--tokens", &tokens_, "FILE",
                     "Token ids instead; prints token ids; - is stdin");
    arguments.Option("--prompts", &prompts_, "FILE",
                     "A prompt per line, together: texts, or JSON {\"prompt\"|\"tokens\": ..., "
                     "\"max_tokens\": N, \"seed\": S}; - is stdin");
    arguments.Option("--batch", &batch_, {.least = 1}, "N",
                     "With --prompts: texts at a time; default: as many as fit, 256 at most, on "
                     "the CPU 32");
    special_.Declare(arguments);
    arguments.Group("Length");
    arguments.Option("--max-tokens", &max_tokens_, WholeRange(), "N",
                     "Tokens to generate at most; default 128");
    arguments.Option("--stop", &stops_, "TEXT", "Stop at this text; may be repeated");
    arguments.Flag("--ignore-eos", &ignore_eos_, "Continue past the end token");
    arguments.Group("Sampling");
    sampling_.Declare(arguments);
    arguments.Group("Chat");
    arguments.Flag("--chat", &chat_, "The prompt is a message: put it into the chat template");
    template_.Declare(arguments);
    arguments.Group("Speculation");
    draft_.Declare(arguments);
    arguments.Group(RunArguments::kGroup);
    run_.Declare(arguments);
  }

  Status Check(const Console& console) const override {
    const int given =
        int{prompt_.has_value()} + int{tokens_.has_value()} + int{prompts_.has_value()};
    if (given != 1) {
      return Invalid(given > 1 ? "--prompt, --tokens and --prompts exclude each other"
                               : "--prompt, --tokens or --prompts is needed");
    }
    if (batch_ && !prompts_) {
      return Invalid("--batch: only with --prompts");
    }
    MARLIN_RETURN_IF_ERROR(CheckChat());
    MARLIN_RETURN_IF_ERROR(draft_.Check());
    for (const std::string& stop : stops_) {
      if (stop.empty()) return Invalid("--stop: expected text, got ''");
    }
    if (prompt_) MARLIN_RETURN_IF_ERROR(CheckHasCodec(console, "--prompt", "--tokens"));
    return stops_.empty() ? Status() : CheckHasCodec(console, "--stop", "");
  }

  Status Run(Console& console) override {
    PromptBatch batch;
    if (prompts_) {
      MARLIN_ASSIGN_OR_RETURN(batch, ReadBatch(console));
    }
    if (draft_.source() == DraftSource::kLayer) run_.WithDraft();
    MARLIN_ASSIGN_OR_RETURN(const Model model, run_.Open(console, path_));
    std::unique_ptr<TextCodec> codec;
    GenerateOptions options = Options(model.info().sampling);
    if (const char* const option = TextOption(batch.prompts)) {
      MARLIN_ASSIGN_OR_RETURN(codec, OpenCodec(console, option, path_));
      MARLIN_RETURN_IF_ERROR(AddStopTokens(*codec, stops_, model.info(), &options));
    }
    MARLIN_ASSIGN_OR_RETURN(options.speculation, OpenDraft(console, model, codec.get()));
    SaySampling(console, model.info(), options.sampling);
    batch.options = options;
    if (prompts_) {
      Status status = GeneratePromptBatch(console, model, path_, codec.get(), batch);
      SayHostOperations(console, model);
      return status;
    }
    std::vector<int32_t> prompt;
    if (prompt_) {
      Result<std::vector<int32_t>> encoded =
          EncodePrompt(*codec, *prompt_, special_, Chat(), path_, model);
      if (!encoded.ok()) return encoded.status().WithContext("--prompt");
      prompt = *std::move(encoded);
    } else {
      MARLIN_ASSIGN_OR_RETURN(prompt, ReadTokens(*tokens_));
    }
    return Continue(console, model, codec.get(), prompt, options);
  }

 private:
  /// `codec`: the model's, or null where no text is read; a draft model is compared with it.
  Result<SpeculationOptions> OpenDraft(const Console& console, const Model& model,
                                       TextCodec* codec) const {
    std::unique_ptr<TextCodec> own;
    if (codec == nullptr && draft_.source() == DraftSource::kModel &&
        CheckHasCodec(console, "--draft", "").ok()) {
      Result<std::unique_ptr<TextCodec>> opened = OpenCodec(console, "--draft", path_);
      // Token ids may go without a tokenizer.
      if (opened.ok()) own = *std::move(opened);
    }
    return draft_.Options(
        model, codec != nullptr ? codec : own.get(),
        [&](const std::string& path) { return run_.OpenDraft(path, model.device()); });
  }

  Status CheckChat() const {
    if (const char* const option = template_.FirstGiven(); option != nullptr && !chat_) {
      return Invalid(fmt::format("{}: only with --chat", option));
    }
    if (!chat_) return {};
    if (tokens_) return Invalid("--chat: only with --prompt or --prompts");
    if (special_.added()) return {};
    return Invalid(
        "--no-special-tokens and --chat exclude each other: the chat template says which "
        "special tokens there are");
  }

  /// How prompts become messages; null where they are continued as they are.
  const ChatPrompt* Chat() const { return chat_ ? &template_.prompt() : nullptr; }

  /// Reads --prompts before the model is loaded.
  Result<PromptBatch> ReadBatch(const Console& console) const {
    MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadText(*prompts_));
    PromptBatch batch;
    batch.file = *prompts_;
    MARLIN_ASSIGN_OR_RETURN(batch.prompts, ParsePromptLines(*prompts_, text));
    batch.stops = stops_;
    batch.special = special_;
    batch.chat = Chat();
    batch.max_batch = batch_.value_or(0);
    if (TextOption(batch.prompts) != nullptr) {
      MARLIN_RETURN_IF_ERROR(CheckHasCodec(console, "--prompts", "--tokens"));
    }
    return batch;
  }

  /// The option that needs a tokenizer, or null.
  const char* TextOption(std::span<const PromptLine> prompts) const {
    const bool texts = std::any_of(prompts.begin(), prompts.end(),
                                   [](const PromptLine& line) { return line.text.has_value(); });
    if (prompt_) return "--prompt";
    if (texts) return "--prompts";
    return stops_.empty() ? nullptr : "--stop";
  }

  /// `sampling`: of the model, for what no option says.
  GenerateOptions Options(const SamplingOptions& sampling) const {
    GenerateOptions options;
    options.sampling = sampling_.Options(sampling);
    options.max_tokens = max_tokens_.value_or(options.max_tokens);
    options.ignore_eos = ignore_eos_;
    return options;
  }

  Status Continue(Console& console, const Model& model, TextCodec* codec,
                  const std::vector<int32_t>& prompt, const GenerateOptions& options) const {
    const InterruptGuard guard;
    Output output(console, codec, prompt, prompt_.has_value(), stops_);
    MARLIN_ASSIGN_OR_RETURN(
        const Generated generated,
        Generate(model, prompt, options, [&](int32_t token) { return output.Add(token); }));
    MARLIN_RETURN_IF_ERROR(output.Finish());
    SayHostOperations(console, model);
    if (console.json()) {
      return console.PrintJson(
          GeneratedJson(console, output.text(), generated, prompt.size(), options.sampling));
    }
    const std::string drafts = DescribeDrafts(generated.drafts);
    console.Message(fmt::format(
        "{} at {} tokens/s after a prompt of {} in {:.3f} s; ended by {}{}",
        FormatCounted(std::ssize(generated.token_ids), "token"), FormatRate(DecodeRate(generated)),
        FormatCounted(std::ssize(prompt), "token"), generated.prefill_seconds,
        output.text().ReasonName(console, generated.stop_reason),
        drafts.empty() ? "" : "; " + drafts));
    return {};
  }

  std::string path_;
  std::optional<std::string> prompt_;
  std::optional<std::string> tokens_;
  std::optional<std::string> prompts_;
  std::optional<int64_t> batch_;
  std::optional<int64_t> max_tokens_;
  SamplingArguments sampling_;
  std::vector<std::string> stops_;
  SpecialTokensArgument special_;
  bool chat_ = false;
  ChatArguments template_;
  DraftArguments draft_;
  bool ignore_eos_ = false;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_generate() { return std::make_unique<GenerateCommand>(); }

}  // namespace marlin::cli
