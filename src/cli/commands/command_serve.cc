// serve: an HTTP server for a model. The command declares the options and opens the model; the
// program that embeds it, which has the tokenizer and the chat template, serves.
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "cli/arguments/draft_arguments.h"
#include "cli/arguments/model_arguments.h"
#include "cli/command.h"
#include "marlin/scheduler.h"
#include "text/serve_request.h"

namespace marlin::cli {
namespace {

constexpr int64_t kDefaultPort = 8000;
constexpr double kDefaultTimeout = 600;
constexpr double kMostTimeout = 1e6;
constexpr int64_t kMostWaiting = 1 << 16;

class ServeCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory, or a GGUF file");
    arguments.Model(&path_);
    arguments.Option("--compare", &compare_, "MODEL",
                     "Load a second model with the same tokenizer, such as the unquantized "
                     "one: the page shows what it thinks of each answer");
    arguments.Model(&compare_);
    DeclareAddress(arguments);
    DeclareRequests(arguments);
    arguments.Group("Speculation");
    draft_.Declare(arguments);
    arguments.Group(RunArguments::kGroup);
    run_.Declare(arguments);
    arguments.Option("--quantize", &recipe_, "RECIPE",
                     "Quantize MODEL first, once: u4/g128, or as --recipe of quantize; kept in "
                     "$XDG_CACHE_HOME/metal-marlin");
  }

  Status Check(const Console& console) const override {
    MARLIN_RETURN_IF_ERROR(draft_.Check());
    if (compare_ && draft_.source() != DraftSource::kLookup) {
      return Invalid("--draft: not with --compare");
    }
    return CheckHasCodec(console, "serve", "");
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, "serve", path_));
    ServeRequest request;
    request.directory = path_;
    request.compare = compare_;
    request.host = host_.value_or("127.0.0.1");
    request.port = port_.value_or(kDefaultPort);
    request.api_key = api_key_;
    request.no_api_key = no_api_key_;
    request.cors_origins = cors_origins_;
    request.model_name = model_name_;
    request.max_running = max_running_.value_or(0);
    request.max_waiting = max_waiting_.value_or(SchedulerOptions{}.max_waiting);
    request.prefill_tokens = prefill_tokens_.value_or(0);
    request.prefix_cache = !no_prefix_cache_;
    request.timeout_seconds = timeout_.value_or(kDefaultTimeout);
    request.template_file = template_file_;
    request.recipe = recipe_;
    request.json = console.json();
    request.quiet = console.quiet();
    std::optional<Device> device;
    request.open = [&](const std::string& directory) -> Result<Model> {
      if (device) return run_.OpenReference(directory, *device);
      if (draft_.source() == DraftSource::kLayer) run_.WithDraft();
      MARLIN_ASSIGN_OR_RETURN(device, run_.OpenDevice());
      return run_.Open(console, directory, *device);
    };
    request.speculation = [&](const Model& model) {
      return draft_.Options(model, codec.get(), [&](const std::string& path) {
        return run_.OpenDraft(path, model.device());
      });
    };
    request.print_json = [&](std::string_view json) -> Result<bool> {
      MARLIN_RETURN_IF_ERROR(console.PrintJsonLine(nlohmann::ordered_json::parse(json)));
      return !console.reader_gone();
    };
    return codec->Serve(request);
  }

 private:
  void DeclareAddress(ArgumentList& arguments) {
    arguments.Group("Address");
    arguments.Option("--host", &host_, "ADDRESS",
                     "The address to listen at; default 127.0.0.1, which only this machine "
                     "reaches; others need --api-key or --no-api-key");
    arguments.Option("--port", &port_, WholeRange{0, 65535}, "N",
                     "The port to listen at; default 8000; 0: any that is free");
    arguments.Option("--api-key", &api_key_, "KEY",
                     "The key that clients must send; also as METAL_MARLIN_API_KEY, which other "
                     "users of this machine cannot see");
    arguments.Flag("--no-api-key", &no_api_key_,
                   "Let everybody who reaches ADDRESS use the server");
    arguments.Option("--cors-origin", &cors_origins_, "ORIGIN",
                     "Let pages of this origin use the server; may be repeated; *: any");
    arguments.Option("--served-model-name", &model_name_, "NAME",
                     "The model's name for clients; default: its directory's");
  }

  void DeclareRequests(ArgumentList& arguments) {
    arguments.Group("Requests");
    arguments.Option("--max-running", &max_running_, {.least = 1}, "N",
                     "Texts at a time; default: as many as fit, 256 at most, on the CPU 32");
    arguments.Option("--max-waiting", &max_waiting_, {.most = kMostWaiting}, "N",
                     "Texts that wait; more are answered with 429; default 256");
    arguments.Option("--prefill-tokens", &prefill_tokens_, {.least = 1}, "N",
                     "Tokens of prompts per pass while others generate; default 128, on a GPU "
                     "1024");
    arguments.Flag("--no-prefix-cache", &no_prefix_cache_,
                   "Do not keep the KV cache of prompts for others that begin alike");
    arguments.Option("--timeout", &timeout_, {.most = kMostTimeout}, "S",
                     "Seconds that a request may take; default 600; 0: any");
    arguments.Option("--chat-template", &template_file_, "FILE",
                     "A Jinja chat template, or the name of one of the model's; default: the "
                     "model's");
  }

  std::string path_;
  std::optional<std::string> compare_;
  std::optional<std::string> host_;
  std::optional<int64_t> port_;
  std::optional<std::string> api_key_;
  bool no_api_key_ = false;
  std::vector<std::string> cors_origins_;
  std::optional<std::string> model_name_;
  std::optional<int64_t> max_running_;
  std::optional<int64_t> max_waiting_;
  std::optional<int64_t> prefill_tokens_;
  DraftArguments draft_;
  bool no_prefix_cache_ = false;
  std::optional<double> timeout_;
  std::optional<std::string> template_file_;
  std::optional<std::string> recipe_;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_serve() { return std::make_unique<ServeCommand>(); }

}  // namespace marlin::cli
