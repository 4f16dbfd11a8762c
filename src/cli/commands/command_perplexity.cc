// perplexity: measures how well a model predicts a text.
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/model_arguments.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/evaluate.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

class PerplexityCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory, or a GGUF file");
    arguments.Model(&path_);
    arguments.Group(CorpusArguments::kGroup);
    corpus_.Declare(arguments);
    arguments.Group(RunArguments::kGroup);
    run_.Declare(arguments);
  }

  Status Check(const Console& console) const override { return corpus_.Check(console); }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const Model model, run_.Open(console, path_));
    MARLIN_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, corpus_.Read(console, path_, model));
    EvaluateOptions options = corpus_.Windows();
    ProgressBar bar(console, "perplexity");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    MARLIN_ASSIGN_OR_RETURN(const PerplexityResult result, Perplexity(model, tokens, options));
    bar.Clear();
    if (console.json()) {
      return console.PrintJson(PerplexityDocument(result));
    }
    return console.Print(fmt::format(
        "perplexity {:.4f} +- {:.4f} ({:.5f} nats per token) over {} in {}\n", result.perplexity,
        result.standard_error, result.nll, FormatCounted(result.tokens, "token"),
        FormatCounted(result.windows, "window")));
  }

 private:
  std::string path_;
  CorpusArguments corpus_;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_perplexity() { return std::make_unique<PerplexityCommand>(); }

}  // namespace marlin::cli
