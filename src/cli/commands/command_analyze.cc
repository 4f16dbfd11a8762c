// analyze: which experts of a model the tokens of some texts select, what quantizing each matrix
// costs, how large its inputs are, or what 2:4 sparsity would take from it.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <system_error>

#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "cli/arguments/calibration_arguments.h"
#include "cli/arguments/model_arguments.h"
#include "cli/arguments/target_arguments.h"
#include "cli/command.h"
#include "cli/commands/sensitivity_report.h"
#include "cli/commands/sparsity_analysis.h"
#include "cli/progress_bar.h"
#include "marlin/importance.h"
#include "marlin/routing.h"
#include "marlin/sensitivity.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;
using Texts = std::vector<std::vector<int32_t>>;

constexpr int64_t kDefaultTextWindow = 256;

/// Cuts a text into parts of up to `most` tokens.
void AddParts(const std::vector<int32_t>& tokens, int64_t most, Texts* texts) {
  const auto size = static_cast<size_t>(most);
  for (size_t first = 0; first < tokens.size(); first += size) {
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(first);
    const size_t count = std::min(size, tokens.size() - first);
    texts->emplace_back(begin, begin + static_cast<std::ptrdiff_t>(count));
  }
}

/// How unevenly the tokens use the experts of a layer.
struct LayerUse {
  int64_t used = 0;      ///< Experts with a selection.
  double largest = 0;    ///< Fraction of the selections that are the favourite expert.
  int64_t for_half = 0;  ///< The fewest experts that half of the selections are.
  int64_t for_most = 0;  ///< The same for 90 %.
};

LayerUse UseOf(std::vector<int64_t> counts) {
  std::sort(counts.rbegin(), counts.rend());
  const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  LayerUse use;
  use.largest = static_cast<double>(counts.front()) / total;
  double sum = 0;
  for (const int64_t count : counts) {
    use.used += count > 0 ? 1 : 0;
    use.for_half += sum < 0.5 * total ? 1 : 0;
    use.for_most += sum < 0.9 * total ? 1 : 0;
    sum += static_cast<double>(count);
  }
  return use;
}

std::string RoutingText(const RoutingFrequencies& frequencies) {
  Table table({"layer", "experts", "used", "favourite", "50 % in", "90 % in"});
  for (const RoutingFrequencies::Layer& layer : frequencies.layers) {
    const LayerUse use = UseOf(layer.counts);
    const auto favourite =
        std::max_element(layer.counts.begin(), layer.counts.end()) - layer.counts.begin();
    table.AddRow({std::to_string(layer.layer), std::to_string(layer.counts.size()),
                  std::to_string(use.used),
                  fmt::format("{} ({})", favourite, FormatPercent(use.largest)),
                  std::to_string(use.for_half), std::to_string(use.for_most)});
  }
  return fmt::format("{}, {} experts each\n\n{}", FormatCounted(frequencies.tokens, "token"),
                     frequencies.top_k, table.ToString());
}

std::string ImportanceText(const Json& summary) {
  Table table({"matrix", "inputs", "experts", "unseen", "tokens", "mean square"});
  for (const Json& row : summary["inputs"]) {
    const auto counts = row["counts"].get<std::vector<float>>();
    const auto unseen = std::count(counts.begin(), counts.end(), 0.0F);
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    table.AddRow({row["name"].get<std::string>(), row["k"].dump(), row["experts"].dump(),
                  FormatInteger(unseen),
                  *least == *most ? FormatInteger(std::llround(*most))
                                  : fmt::format("{}-{}", FormatInteger(std::llround(*least)),
                                                FormatInteger(std::llround(*most))),
                  fmt::format("{:.4g}", row["mean_square"].get<double>())});
  }
  return table.ToString();
}

std::string SparsityText(const std::vector<AnalyzedMatrix>& matrices) {
  Table table({"layer class", "matrices", "2:4 already", "zeros", "error", "largest error"});
  for (int i = 0; i < kLayerClassCount; ++i) {
    PruneLoss all;
    int64_t count = 0;
    int64_t sparse = 0;
    double largest = 0;
    for (const AnalyzedMatrix& matrix : matrices) {
      if (matrix.layer_class != static_cast<LayerClass>(i)) continue;
      ++count;
      sparse += matrix.loss.pruned_squares == 0.0 ? 1 : 0;
      largest = std::max(largest, matrix.loss.RelativeError());
      all.Add(matrix.loss);
    }
    if (count == 0) continue;
    const double zeros = static_cast<double>(all.zeros) / static_cast<double>(all.weights);
    table.AddRow({std::string(LayerClassName(static_cast<LayerClass>(i))), FormatInteger(count),
                  FormatInteger(sparse), FormatPercent(zeros),
                  fmt::format("{:.4f}", all.RelativeError()), fmt::format("{:.4f}", largest)});
  }
  return table.ToString() +
         "\nerror: |W - W'| / |W| of keeping the two largest of every four weights along the "
         "inputs;\n0.364 for Gaussian weights, 0 for 2:4 already\n";
}

/// Found before the model runs. Leaves a file that is there as it is.
Status CheckWritable(const std::string& path) {
  std::error_code ignored;
  const bool existed = std::filesystem::exists(path, ignored);
  const bool writable = std::ofstream(path, std::ios::app).is_open();
  if (!existed) std::filesystem::remove(path, ignored);
  return writable ? Status() : CannotWrite(path);
}

class AnalyzeCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized directory");
    arguments.Model(&path_);
    arguments.Group("What to measure, one of");
    arguments.Flag("--routing", &routing_, "Counts the selections of every expert of every layer");
    arguments.Flag("--sensitivity", &sensitivity_,
                   "Measures what quantizing each matrix alone does to the predictions");
    arguments.Flag("--importance", &importance_,
                   "Measures the inputs of every matrix: llama.cpp's importance matrix");
    arguments.Flag("--sparsity", &sparsity_,
                   "Measures what keeping two of every four weights would take from every matrix");
    arguments.Group("Output");
    arguments.Option("-o,--output", &output_, "FILE",
                     "Writes the frequencies, which recipes read, or the sensitivity or the "
                     "importance matrix, GGUF, which quantize reads, to FILE");
    arguments.Group("Text for --routing");
    arguments.Option("--prompts", &prompts_, "FILE", "A text file; every line is a sequence");
    arguments.Option("--tokens", &tokens_, "FILE",
                     "Token ids instead, separated by spaces or commas");
    arguments.Option("--window", &window_, {.least = 1}, "N",
                     "Longer texts are cut into sequences of N tokens; default 256, for --prompts "
                     "the context");
    arguments.Option("--trace", &trace_, "FILE",
                     "Writes the experts of every token, which `bench moe --trace` replays");
    arguments.Group("Text for --sensitivity and --importance");
    calibration_.Declare(arguments, "", "default 2048, for --importance 16384");
    arguments.Group("Options of --sensitivity");
    arguments.Option("--formats", &formats_, "LIST",
                     "Formats; default int2/g64/frac,nf3/g64,nf4/g64,s8/g64");
    arguments.Option("--plot", &plot_, "FILE", "Writes a picture, SVG, to FILE");
    arguments.Flag("--resume", &resume_, "Continues an interrupted run of -o FILE");
    arguments.Group(RunArguments::kGroup);
    run_.Declare(arguments);
  }

  Status Check(const Console& console) const override {
    const auto wrong = [](const char* message) { return Invalid(message); };
    if (int{routing_} + int{sensitivity_} + int{importance_} + int{sparsity_} != 1) {
      return wrong(
          "analyze: expected one of --routing, --sensitivity, --importance and --sparsity");
    }
    if (importance_ && (formats_ || plot_ || resume_)) {
      return wrong("--formats, --plot and --resume are for --sensitivity");
    }
    if (sensitivity_ || importance_) return CheckCalibrated(console);
    if (formats_ || plot_ || resume_ || calibration_.given()) {
      return wrong(
          "--formats, --plot, --resume, --seed and --calibration are for --sensitivity, the last "
          "two also for --importance");
    }
    if (sparsity_) {
      const bool run = prompts_ || tokens_ || window_ || output_ || trace_ || RunsOtherwise();
      return run ? wrong("--sparsity: runs no tokens and writes no file") : Status();
    }
    if (prompts_.has_value() == tokens_.has_value()) {
      return wrong(prompts_ ? "--prompts and --tokens exclude each other"
                            : "--prompts or --tokens is needed");
    }
    return prompts_ ? CheckHasCodec(console, "--prompts", "--tokens") : Status();
  }

  Status Run(Console& console) override {
    if (sparsity_) return RunSparsity(console);
    if (importance_) return RunImportance(console);
    return sensitivity_ ? RunSensitivity(console) : RunRouting(console);
  }

 private:
  Status RunRouting(Console& console) {
    MARLIN_ASSIGN_OR_RETURN(const Model model, run_.Open(console, path_));
    MARLIN_ASSIGN_OR_RETURN(const Texts texts, Read(console, model));
    RoutingOptions options;
    ProgressBar bar(console, "analyze");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    // Files that cannot be written are found before the model runs.
    std::ofstream output;
    if (output_) output.open(*output_, std::ios::trunc);
    if (!output) return CannotWrite(*output_);
    std::ofstream trace;
    if (trace_) {
      trace.open(*trace_, std::ios::trunc);
      options.trace = [&](const TokenRouting& token) -> Status {
        trace << RoutingTraceLine(token) << '\n';
        return trace ? Status() : CannotWrite(*trace_);
      };
    }
    MARLIN_ASSIGN_OR_RETURN(const RoutingFrequencies frequencies,
                            CountRouting(model, texts, options));
    bar.Clear();
    trace.close();
    if (trace_ && !trace) return CannotWrite(*trace_);
    if (output_) output << frequencies.ToJson() << "\n";
    output.close();
    if (output_ && !output) return CannotWrite(*output_);
    if (console.json()) return console.PrintJson(Json::parse(frequencies.ToJson()));
    return console.Print(RoutingText(frequencies));
  }

  /// Measurements of an interrupted run, none if there are none.
  Result<Sensitivity> Interrupted() const {
    std::error_code ignored;
    if (!resume_ || !std::filesystem::exists(PartialPath(), ignored)) return Sensitivity();
    return Sensitivity::FromFile(PartialPath());
  }
  std::string PartialPath() const { return *output_ + ".partial"; }

  Status RunSensitivity(Console& console) {
    SensitivityOptions options;
    if (formats_) {
      MARLIN_ASSIGN_OR_RETURN(options.formats, ParseFormatList("--formats", *formats_));
    }
    MARLIN_ASSIGN_OR_RETURN(options.text, calibration_.Read(console, path_));
    if (output_) {
      MARLIN_ASSIGN_OR_RETURN(options.measured, Interrupted());
      MARLIN_RETURN_IF_ERROR(CheckWritable(PartialPath()));
      options.save = [this](const Sensitivity& sensitivity) {
        return WriteText(PartialPath(), sensitivity.ToJson() + "\n");
      };
    }
    // A picture that cannot be written is found before the model runs.
    if (plot_) MARLIN_RETURN_IF_ERROR(WriteText(*plot_, ""));
    MARLIN_ASSIGN_OR_RETURN(const Device device, run_.OpenDevice());
    ProgressBar bar(console, "analyze");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    MARLIN_ASSIGN_OR_RETURN(const Sensitivity sensitivity,
                            MeasureSensitivity(path_, device, options));
    bar.Clear();
    if (plot_) MARLIN_RETURN_IF_ERROR(WriteText(*plot_, SensitivityPlot(sensitivity)));
    if (output_) {
      std::error_code error;
      std::filesystem::rename(PartialPath(), *output_, error);
      if (error) return CannotWrite(*output_);
    }
    if (console.json()) return console.PrintJson(Json::parse(sensitivity.ToJson()));
    return console.Print(SensitivityTable(sensitivity));
  }

  Status RunImportance(Console& console) {
    ImportanceOptions options;
    MARLIN_ASSIGN_OR_RETURN(options.text, calibration_.Read(console, path_));
    if (output_) MARLIN_RETURN_IF_ERROR(CheckWritable(*output_));
    MARLIN_ASSIGN_OR_RETURN(const Device device, run_.OpenDevice());
    ProgressBar bar(console, "analyze");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    MARLIN_ASSIGN_OR_RETURN(const ImportanceMatrix matrix,
                            MeasureImportance(path_, device, options));
    bar.Clear();
    if (output_) {
      MARLIN_RETURN_IF_ERROR(WriteText(*output_, matrix.ToGguf(calibration_.TextName())));
    }
    const Json summary = Json::parse(matrix.SummaryJson());
    return console.json() ? console.PrintJson(summary) : console.Print(ImportanceText(summary));
  }

  Status RunSparsity(Console& console) const {
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(path_));
    ProgressBar bar(console, "analyze");
    MARLIN_ASSIGN_OR_RETURN(const std::vector<AnalyzedMatrix> matrices,
                            AnalyzeSparsity(checkpoint, [&bar](int64_t done, int64_t total) {
                              bar.Update(done, total);
                            }));
    bar.Clear();
    if (!console.json()) return console.Print(SparsityText(matrices));
    Json document = {{"path", checkpoint.path()}, {"matrices", Json::array()}};
    for (const AnalyzedMatrix& matrix : matrices) {
      document["matrices"].push_back({{"name", matrix.name},
                                      {"layer_class", LayerClassName(matrix.layer_class)},
                                      {"parameters", matrix.loss.weights},
                                      {"zeros", matrix.loss.zeros},
                                      {"relative_error", matrix.loss.RelativeError()},
                                      {"sparse", matrix.loss.pruned_squares == 0.0}});
    }
    return console.PrintJson(document);
  }

  /// Whether an option says how the runner holds a model, which only --routing asks for.
  bool RunsOtherwise() const {
    return run_.prepared() || run_.places_experts() || run_.chooses_cache();
  }

  Status CheckCalibrated(const Console& console) const {
    if (prompts_ || tokens_ || window_ || trace_ || RunsOtherwise()) {
      return Invalid(
          fmt::format("{}: --prompts, --tokens, --window, --trace, --prepared, "
                      "--kv-cache and --host-experts are for --routing",
                      sensitivity_ ? "--sensitivity" : "--importance"));
    }
    if (resume_ && !output_) return Invalid("--resume: needs -o FILE");
    return calibration_.Check(console);
  }

  Result<Texts> Read(const Console& console, const Model& model) const {
    const int64_t context = model.info().max_positions;
    Texts texts;
    if (tokens_) {
      MARLIN_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, ReadTokens(*tokens_));
      AddParts(tokens, window_.value_or(std::min(kDefaultTextWindow, context)), &texts);
      return texts;
    }
    MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, "--prompts", path_));
    MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadText(*prompts_));
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      Result<std::vector<int32_t>> tokens =
          EncodeText(*codec, line, calibration_.special(), path_, model);
      if (!tokens.ok()) return tokens.status().WithContext(*prompts_);
      AddParts(*tokens, window_.value_or(context), &texts);
    }
    return texts;
  }

  std::string path_;
  bool routing_ = false;
  bool sensitivity_ = false;
  bool importance_ = false;
  bool resume_ = false;
  std::optional<std::string> formats_;
  std::optional<std::string> plot_;
  CalibrationArguments calibration_;
  bool sparsity_ = false;
  std::optional<std::string> prompts_;
  std::optional<std::string> tokens_;
  std::optional<int64_t> window_;
  std::optional<std::string> output_;
  std::optional<std::string> trace_;
  RunArguments run_;
};

}  // namespace

std::unique_ptr<Command> Make_analyze() { return std::make_unique<AnalyzeCommand>(); }

}  // namespace marlin::cli
