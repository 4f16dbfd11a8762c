// generate: continues a prompt, token by token.
#include <fmt/format.h>

#include <atomic>
#include <csignal>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "marlin/generate.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Set by Ctrl-C while text is generated: what there is, is kept.
volatile std::sig_atomic_t interrupted = 0;

class InterruptGuard {
 public:
  InterruptGuard() : before_(std::signal(SIGINT, [](int) { interrupted = 1; })) { interrupted = 0; }
  ~InterruptGuard() { std::signal(SIGINT, before_); }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  void (*before_)(int);
};

class GenerateCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory");
    arguments.Option("--prompt", &prompt_, "TEXT", "The text to go on from");
    arguments.Option("--tokens", &tokens_, "FILE", "Token ids instead; - is the standard input");
    arguments.Option("--max-tokens", &max_tokens_, "N", "Default 128");
    arguments.Option("--temperature", &temperature_, "T", "Default 0: the most likely token");
    arguments.Option("--top-k", &top_k_, "K", "Draw from the K most likely tokens");
    arguments.Option("--top-p", &top_p_, "P", "Draw from the most likely tokens that sum up to P");
    arguments.Option("--seed", &seed_, "S", "Same seed, same text; default 0");
    arguments.Option("--stop", &stops_, "TEXT", "End where this text appears; may be repeated");
    arguments.Flag("--ignore-eos", &ignore_eos_, "Go on past the end token");
    run_.Declare(arguments);
  }

  Status Run(Console& console) override {
    if (prompt_.has_value() == tokens_.has_value()) {
      return Status(Code::kInvalidArgument, prompt_ ? "--prompt and --tokens exclude each other"
                                                    : "--prompt or --tokens is needed");
    }
    MARLIN_ASSIGN_OR_RETURN(const Model model, run_.Open(path_));
    std::vector<int32_t> prompt;
    if (tokens_) {
      MARLIN_ASSIGN_OR_RETURN(prompt, ReadTokens(*tokens_));
    }
    if (prompt_ || (console.text_codecs() && !stops_.empty())) {
      MARLIN_ASSIGN_OR_RETURN(codec_, OpenCodec(console, path_, model));
    }
    if (!stops_.empty() && codec_ == nullptr) {
      return Status(Code::kUnsupported, "--stop needs a tokenizer: the Python package's command");
    }
    if (prompt_) {
      MARLIN_ASSIGN_OR_RETURN(prompt, codec_->Encode(*prompt_));
    }
    return Continue(console, model, prompt);
  }

 private:
  GenerateOptions Options() const {
    GenerateOptions options;
    options.max_tokens = max_tokens_.value_or(options.max_tokens);
    options.sampling.temperature = static_cast<float>(temperature_.value_or(0));
    options.sampling.top_k = top_k_.value_or(0);
    options.sampling.top_p = static_cast<float>(top_p_.value_or(1));
    options.sampling.seed = static_cast<uint64_t>(seed_.value_or(0));
    options.ignore_eos = ignore_eos_;
    return options;
  }

  Status Continue(Console& console, const Model& model, const std::vector<int32_t>& prompt) {
    const InterruptGuard guard;
    Status failure;
    std::optional<TextStream> stream;
    if (codec_ != nullptr) stream.emplace(*codec_);
    const auto show = [&](int32_t token) {
      failure = Show(console, stream ? &*stream : nullptr, token);
      return failure.ok() && interrupted == 0 && !Stopped(stream ? stream->text() : "");
    };
    MARLIN_ASSIGN_OR_RETURN(const Generated generated, Generate(model, prompt, Options(), show));
    MARLIN_RETURN_IF_ERROR(failure);
    std::string text;
    if (stream) {
      MARLIN_ASSIGN_OR_RETURN(const std::string rest, stream->Finish());
      if (!console.json()) MARLIN_RETURN_IF_ERROR(console.Print(rest));
      text = stream->text();
    }
    if (console.json()) return console.PrintJson(Document(generated, text));
    MARLIN_RETURN_IF_ERROR(console.Print("\n"));
    console.Message(fmt::format("{} tokens, {:.1f} per second, prompt of {} in {:.2f} s ({})",
                                generated.token_ids.size(), Rate(generated), prompt.size(),
                                generated.prefill_seconds, StopReasonName(generated.stop_reason)));
    return {};
  }

  static Status Show(Console& console, TextStream* stream, int32_t token) {
    if (stream == nullptr) {
      return console.json() ? Status() : console.Print(fmt::format("{} ", token));
    }
    MARLIN_ASSIGN_OR_RETURN(const std::string added, stream->Add(token));
    return console.json() ? Status() : console.Print(added);
  }

  bool Stopped(const std::string& text) const {
    for (const std::string& stop : stops_) {
      if (text.find(stop) != std::string::npos) return true;
    }
    return false;
  }

  /// Tokens per second after the first.
  static double Rate(const Generated& generated) {
    const auto decoded = static_cast<double>(generated.token_ids.size()) - 1;
    return generated.decode_seconds > 0 ? decoded / generated.decode_seconds : 0.0;
  }

  Json Document(const Generated& generated, std::string text) const {
    for (const std::string& stop : stops_) text.resize(std::min(text.find(stop), text.size()));
    return {{"text", codec_ != nullptr ? Json(text) : Json()},
            {"token_ids", generated.token_ids},
            {"tokens_per_second", Rate(generated)},
            {"prefill_seconds", generated.prefill_seconds},
            {"decode_seconds", generated.decode_seconds},
            {"stop_reason", StopReasonName(generated.stop_reason)}};
  }

  std::string path_;
  std::optional<std::string> prompt_;
  std::optional<std::string> tokens_;
  std::optional<int64_t> max_tokens_;
  std::optional<double> temperature_;
  std::optional<int64_t> top_k_;
  std::optional<double> top_p_;
  std::optional<int64_t> seed_;
  std::vector<std::string> stops_;
  bool ignore_eos_ = false;
  RunArguments run_;
  std::unique_ptr<TextCodec> codec_;
};

}  // namespace

std::unique_ptr<Command> Make_generate() { return std::make_unique<GenerateCommand>(); }

}  // namespace marlin::cli
