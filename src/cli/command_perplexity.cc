// perplexity: measures how well a model predicts a text.
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "cli/command.h"
#include "cli/documents.h"
#include "cli/model_arguments.h"
#include "cli/progress_bar.h"
#include "marlin/evaluate.h"

namespace marlin::cli {
namespace {

class PerplexityCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory");
    corpus_.Declare(arguments);
    run_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(corpus_.Check(console));
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
        "perplexity {:.4f} +- {:.4f} ({:.5f} nats per token) over {} tokens in {} windows\n",
        result.perplexity, result.standard_error, result.nll, result.tokens, result.windows));
  }

 private:
  std::string path_;
  CorpusArguments corpus_;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_perplexity() { return std::make_unique<PerplexityCommand>(); }

}  // namespace marlin::cli
