// compare: measures how far a quantized model diverges from its source on a text.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/json.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/model_arguments.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/draft.h"
#include "marlin/evaluate.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

class CompareCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("QUANT", &path_, "A quantized directory, or any model");
    arguments.RequiredOption("--against", &against_, "SRC", "The model that it was made from");
    arguments.Model(&path_);
    arguments.Model(&against_);
    arguments.Option("--draft", &draft_, WholeRange{1, kMostDraftDepth}, "N",
                     "Also how often N guesses in a row of QUANT's MTP layer are its own tokens");
    arguments.Group(CorpusArguments::kGroup);
    corpus_.Declare(arguments);
    arguments.Group(RunArguments::kGroup);
    run_.Declare(arguments);
  }

  Status Check(const Console& console) const override { return corpus_.Check(console); }

  Status Run(Console& console) override {
    if (draft_) run_.WithDraft();
    MARLIN_ASSIGN_OR_RETURN(const Device device, run_.OpenDevice());
    MARLIN_ASSIGN_OR_RETURN(const Model model, run_.Open(console, path_, device));
    MARLIN_ASSIGN_OR_RETURN(const Model reference, run_.OpenReference(against_, device));
    MARLIN_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                            corpus_.Read(console, against_, reference));
    EvaluateOptions options = corpus_.Windows();
    ProgressBar bar(console, "compare");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    MARLIN_ASSIGN_OR_RETURN(const CompareResult result,
                            CompareModels(model, reference, tokens, options));
    std::optional<AcceptanceResult> acceptance;
    if (draft_) {
      MARLIN_ASSIGN_OR_RETURN(acceptance, MeasureAcceptance(model, tokens, *draft_, options));
    }
    bar.Clear();
    if (!console.json()) {
      return console.Print(Text(result) + (acceptance ? Text(*acceptance) : std::string()));
    }
    Json document = ComparisonDocument(result);
    if (acceptance) document["draft_acceptance"] = AcceptanceDocument(*acceptance);
    return console.PrintJson(document);
  }

 private:
  std::string Text(const CompareResult& result) const {
    Table table({"model", "perplexity", "+-", "nats per token"});
    const auto add = [&table](const std::string& name, const PerplexityResult& r) {
      table.AddRow({name, fmt::format("{:.4f}", r.perplexity),
                    fmt::format("{:.4f}", r.standard_error), fmt::format("{:.5f}", r.nll)});
    };
    add(against_, result.reference);
    add(path_, result.model);
    return fmt::format(
        "{}\nperplexity        {} +- {}\n"
        "KL divergence     mean {:.5f} nats, median {:.5f}, 99th percentile {:.5f}, largest "
        "{:.5f}\n"
        "top-1 agreement   {} of {} positions\n",
        table.ToString(), FormatChange(result.perplexity_ratio - 1),
        FormatPercent(result.perplexity_ratio_error), result.kl_mean, result.kl_median,
        result.kl_p99, result.kl_max, FormatPercent(result.top1_agreement),
        FormatInteger(result.model.tokens));
  }

  static std::string Text(const AcceptanceResult& acceptance) {
    std::string text;
    int64_t depth = 0;
    for (const DepthAcceptance& guesses : acceptance.depths) {
      text += fmt::format("draft {:<11} accepted at {} of {} positions\n", ++depth,
                          FormatPercent(guesses.accepted), FormatInteger(guesses.positions));
    }
    return text;
  }

  std::string path_;
  std::string against_;
  std::optional<int64_t> draft_;
  CorpusArguments corpus_;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_compare() { return std::make_unique<CompareCommand>(); }

}  // namespace marlin::cli
