// generate: continues a prompt token by token.
#include <fmt/format.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/macros.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "marlin/generate.h"
#include "ops/sampling.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Set by Ctrl-C during generation, which then ends with its output kept. A second Ctrl-C kills the
/// process.
volatile std::sig_atomic_t interrupted = 0;

class InterruptGuard {
 public:
  InterruptGuard() {
    interrupted = 0;
    before_ = std::signal(SIGINT, [](int) {
      interrupted = 1;
      std::signal(SIGINT, SIG_DFL);
    });
  }
  ~InterruptGuard() { std::signal(SIGINT, before_); }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  void (*before_)(int);
};

/// The stop reason, including those that only the command knows.
std::string_view ReasonName(StopReason reason, bool at_stop_text) {
  if (reason != StopReason::kCallback) return StopReasonName(reason);
  if (at_stop_text) return "stop_text";
  return interrupted != 0 ? "interrupted" : "output_closed";
}

/// Prints tokens as they are generated: as text if the prompt was text, else as ids. With --json it
/// only collects them.
class Output {
 public:
  /// `codec` may be null.
  Output(Console& console, TextCodec* codec, std::span<const int32_t> prompt, bool as_text,
         const std::vector<std::string>& stops)
      : console_(console), as_text_(as_text), stop_(stops) {
    if (codec != nullptr) stream_.emplace(*codec, prompt);
  }

  /// False when generation should end: at a stop text, an error, Ctrl-C or a closed output.
  bool Add(int32_t token) {
    status_ = Show(token);
    return status_.ok() && interrupted == 0 && !stop_.stopped() && !console_.reader_gone();
  }

  Status Finish() {
    MARLIN_RETURN_IF_ERROR(status_);
    if (stream_ && !stop_.stopped()) {
      MARLIN_ASSIGN_OR_RETURN(const std::string held, stream_->Finish());
      MARLIN_RETURN_IF_ERROR(ShowText(stop_.Add(held)));
      MARLIN_RETURN_IF_ERROR(ShowText(stop_.Finish()));
    }
    return console_.json() ? Status() : console_.Print("\n");
  }

  bool stopped() const { return stop_.stopped(); }
  /// Null without a tokenizer.
  Json Text() const { return stream_ ? Json(text_) : Json(); }

 private:
  Status Show(int32_t token) {
    if (!as_text_ && !console_.json()) {
      MARLIN_RETURN_IF_ERROR(console_.Print(fmt::format("{}{}", first_ ? "" : " ", token)));
      first_ = false;
    }
    if (!stream_) return {};
    MARLIN_ASSIGN_OR_RETURN(const std::string added, stream_->Add(token));
    return ShowText(stop_.Add(added));
  }

  Status ShowText(const std::string& text) {
    text_ += text;
    return as_text_ && !console_.json() ? console_.Print(text) : Status();
  }

  Console& console_;
  bool as_text_;
  std::optional<TextStream> stream_;
  StopText stop_;
  std::string text_;
  bool first_ = true;
  Status status_;
};

class GenerateCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory");
    arguments.Option("--prompt", &prompt_, "TEXT", "The text to continue; prints text");
    arguments.Option("--tokens", &tokens_, "FILE",
                     "Token ids instead; prints token ids; - is stdin");
    arguments.Option("--max-tokens", &max_tokens_, WholeRange(), "N", "Default 128");
    arguments.Option("--temperature", &temperature_, {.most = 1e6}, "T",
                     "Default 0: the most likely token");
    arguments.Option("--top-k", &top_k_, WholeRange(), "K", "Sample from the K most likely tokens");
    arguments.Option("--top-p", &top_p_, {.most = 1, .without_least = true}, "P",
                     "Sample from the most likely tokens whose probabilities add up to P");
    arguments.Option("--min-p", &min_p_, {.most = 1}, "P",
                     "Drop tokens less likely than P times the most likely one");
    arguments.Option("--repetition-penalty", &repetition_penalty_,
                     {kLeastRepetitionPenalty, kMostRepetitionPenalty}, "F",
                     "Divide positive logits of tokens so far, the prompt's too, by F; multiply "
                     "others; default 1");
    arguments.Option("--presence-penalty", &presence_penalty_, {-kMostPenalty, kMostPenalty}, "X",
                     "Subtract X from the logits of generated tokens; default 0");
    arguments.Option("--frequency-penalty", &frequency_penalty_, {-kMostPenalty, kMostPenalty}, "X",
                     "Subtract X once per occurrence in the generated text; default 0");
    arguments.Option("--seed", &seed_, WholeRange(), "S", "Same seed, same text; default 0");
    arguments.Option("--stop", &stops_, "TEXT", "Stop at this text; may be repeated");
    arguments.Flag("--ignore-eos", &ignore_eos_, "Continue past the end token");
    run_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(Check(console));
    MARLIN_ASSIGN_OR_RETURN(const Model model, run_.Open(console, path_));
    std::unique_ptr<TextCodec> codec;
    if (prompt_ || !stops_.empty()) {
      MARLIN_ASSIGN_OR_RETURN(codec,
                              OpenCodec(console, prompt_ ? "--prompt" : "--stop", path_, model));
    }
    std::vector<int32_t> prompt;
    if (prompt_) {
      Result<std::vector<int32_t>> encoded = EncodeText(*codec, *prompt_, path_, model);
      if (!encoded.ok()) return encoded.status().WithContext("--prompt");
      prompt = *std::move(encoded);
    } else {
      MARLIN_ASSIGN_OR_RETURN(prompt, ReadTokens(*tokens_));
    }
    return Continue(console, model, codec.get(), prompt);
  }

 private:
  Status Check(const Console& console) const {
    if (prompt_.has_value() == tokens_.has_value()) {
      return Status(Code::kInvalidArgument, prompt_ ? "--prompt and --tokens exclude each other"
                                                    : "--prompt or --tokens is needed");
    }
    for (const std::string& stop : stops_) {
      if (stop.empty()) return Status(Code::kInvalidArgument, "--stop: expected text, got ''");
    }
    if (prompt_) MARLIN_RETURN_IF_ERROR(CheckHasCodec(console, "--prompt"));
    return stops_.empty() ? Status() : CheckHasCodec(console, "--stop");
  }

  GenerateOptions Options() const {
    GenerateOptions options;
    options.max_tokens = max_tokens_.value_or(options.max_tokens);
    options.sampling.temperature = static_cast<float>(temperature_.value_or(0));
    options.sampling.top_k = top_k_.value_or(0);
    options.sampling.top_p = static_cast<float>(top_p_.value_or(1));
    options.sampling.min_p = static_cast<float>(min_p_.value_or(0));
    options.sampling.repetition_penalty = static_cast<float>(repetition_penalty_.value_or(1));
    options.sampling.presence_penalty = static_cast<float>(presence_penalty_.value_or(0));
    options.sampling.frequency_penalty = static_cast<float>(frequency_penalty_.value_or(0));
    options.sampling.seed = static_cast<uint64_t>(seed_.value_or(0));
    options.ignore_eos = ignore_eos_;
    return options;
  }

  Status Continue(Console& console, const Model& model, TextCodec* codec,
                  const std::vector<int32_t>& prompt) const {
    const InterruptGuard guard;
    Output output(console, codec, prompt, prompt_.has_value(), stops_);
    MARLIN_ASSIGN_OR_RETURN(
        const Generated generated,
        Generate(model, prompt, Options(), [&](int32_t token) { return output.Add(token); }));
    MARLIN_RETURN_IF_ERROR(output.Finish());
    const std::string_view reason = ReasonName(generated.stop_reason, output.stopped());
    if (console.json()) {
      return console.PrintJson({{"text", output.Text()},
                                {"token_ids", generated.token_ids},
                                {"stop_reason", reason},
                                {"tokens_per_second", DecodeRate(generated)},
                                {"prompt_tokens", prompt.size()},
                                {"prefill_seconds", generated.prefill_seconds},
                                {"decode_seconds", generated.decode_seconds}});
    }
    console.Message(
        fmt::format("{} tokens at {:.1f} per second after a prompt of {} in {:.3f} s; "
                    "ended by {}",
                    generated.token_ids.size(), DecodeRate(generated), prompt.size(),
                    generated.prefill_seconds, reason));
    return {};
  }

  /// Tokens per second after the first.
  static double DecodeRate(const Generated& generated) {
    const auto decoded = static_cast<double>(generated.token_ids.size()) - 1;
    return generated.decode_seconds > 0 ? decoded / generated.decode_seconds : 0.0;
  }

  std::string path_;
  std::optional<std::string> prompt_;
  std::optional<std::string> tokens_;
  std::optional<int64_t> max_tokens_;
  std::optional<double> temperature_;
  std::optional<int64_t> top_k_;
  std::optional<double> top_p_;
  std::optional<double> min_p_;
  std::optional<double> repetition_penalty_;
  std::optional<double> presence_penalty_;
  std::optional<double> frequency_penalty_;
  std::optional<int64_t> seed_;
  std::vector<std::string> stops_;
  bool ignore_eos_ = false;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_generate() { return std::make_unique<GenerateCommand>(); }

}  // namespace marlin::cli
