// demo: quantizes, verifies, runs and multiplies with the sample model.
#include <fmt/core.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/text_table.h"
#include "bench/product_timing.h"
#include "cli/command.h"
#include "cli/commands/demo_model.h"
#include "cli/commands/verification.h"
#include "cli/progress_bar.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kRecipes[] = {"default_moe", "aggressive_moe", "uniform:fp4_e2m1/g32"};
// The layer width of a model of 7-8 B parameters: the sample's 128 x 128 would measure overheads.
constexpr int64_t kWidth = 4096;
constexpr int64_t kRowCounts[] = {1, 16, 256};
constexpr FormatChoice kBf16Choice = {.keep = false, .format = Format::kBf16};

/// A directory in the system's temporary directory, removed on destruction.
class TemporaryDirectory {
 public:
  TemporaryDirectory() = default;
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  Status Make() {
    std::error_code error;
    const auto parent = std::filesystem::temp_directory_path(error);
    if (error) return Status(Code::kIo, "temporary directory: " + error.message());
    std::string pattern = (parent / "metal-marlin-demo-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      return Status(Code::kIo, fmt::format("{}: {}", pattern, std::strerror(errno)));
    }
    path_ = pattern;
    return Status();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct RecipeResult {
  std::string recipe;
  ModelResult model;
  FormatChoice expert_choice;
  QuantizeCheckpointReport report;
  Comparison comparison;
};

struct ProductRow {
  std::string recipe;  ///< Empty for the GEMM with bf16 weights.
  FormatChoice choice;
  int64_t m = 0;
  bench::ProductTiming timing;
  double speedup = 1;  ///< Over the GEMM with bf16 weights.
};

class DemoCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Option("--model", &model_, "DIR", "The checkpoint to work on");
    arguments.Model(&model_);
  }

  Status Run(Console& console) override {
    Result<Checkpoint> source = Checkpoint::Open(model_);
    if (!source.ok()) {
      return source.status().WithContext("demo: run from the project's folder or give --model");
    }
    MARLIN_RETURN_IF_ERROR(directory_.Make());
    for (const TensorInfo& tensor : source->tensors()) source_bytes_ += tensor.bytes;
    MARLIN_ASSIGN_OR_RETURN(const Device device, Device::Open("cpu"));
    MARLIN_ASSIGN_OR_RETURN(tokens_, ReadSampleTokens(model_));
    if (!tokens_.empty()) {
      MARLIN_ASSIGN_OR_RETURN(before_, RunDemoModel(console, device, model_, tokens_));
    }
    ProgressBar bar(console, "demo");
    const int64_t steps = std::ssize(kRecipes) + std::ssize(kRowCounts);
    int64_t step = 0;
    for (const char* name : kRecipes) {
      bar.Update(step++, steps);
      MARLIN_RETURN_IF_ERROR(RunRecipe(console, device, name, *source));
    }
    device_ = device.info();
    MARLIN_ASSIGN_OR_RETURN(const std::vector<PreparedWeights> weights, PrepareProducts(device));
    for (int64_t m : kRowCounts) {
      bar.Update(step++, steps);
      MARLIN_RETURN_IF_ERROR(TimeRows(device, weights, m));
    }
    bar.Clear();
    return console.json() ? PrintDocument(console) : PrintTables(console);
  }

 private:
  Status RunRecipe(const Console& console, const Device& device, const std::string& name,
                   const Checkpoint& source) {
    RecipeResult result;
    result.recipe = name;
    QuantizeCheckpointOptions options;
    MARLIN_ASSIGN_OR_RETURN(options.recipe, MixedPrecisionConfig::FromNameOrFile(name));
    result.expert_choice = options.recipe.classes().at(LayerClass::kMoeExpert);
    const std::string output = fmt::format("{}/{}", directory_.path(), results_.size());
    MARLIN_ASSIGN_OR_RETURN(result.report, QuantizeCheckpoint(model_, output, options));
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint quantized, Checkpoint::Open(output));
    MARLIN_RETURN_IF_ERROR(quantized.VerifyChecksums());
    MARLIN_ASSIGN_OR_RETURN(result.comparison, CompareCheckpoints(quantized, source));
    if (!tokens_.empty()) {
      MARLIN_ASSIGN_OR_RETURN(result.model, RunDemoModel(console, device, output, tokens_));
    }
    results_.push_back(std::move(result));
    return Status();
  }

  /// Matrices in bf16, then in each recipe's expert format.
  Result<std::vector<PreparedWeights>> PrepareProducts(const Device& device) const {
    std::vector<PreparedWeights> weights;
    FormatChoice choice = kBf16Choice;
    for (size_t i = 0; i <= results_.size(); ++i) {
      if (i > 0) choice = results_[i - 1].expert_choice;
      MARLIN_ASSIGN_OR_RETURN(PreparedWeights prepared,
                              bench::PrepareRandomWeights(device, choice, kWidth, kWidth));
      weights.push_back(std::move(prepared));
    }
    return weights;
  }

  Status TimeRows(const Device& device, const std::vector<PreparedWeights>& weights, int64_t m) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<bench::ProductTiming> timings,
                            bench::TimeProducts(device, weights, m));
    products_.push_back({"", kBf16Choice, m, timings[0], 1.0});
    for (size_t i = 0; i < results_.size(); ++i) {
      products_.push_back({results_[i].recipe, results_[i].expert_choice, m, timings[i + 1],
                           timings[0].seconds / timings[i + 1].seconds});
    }
    return Status();
  }

  Status PrintDocument(Console& console) const {
    Json document = {{"model", model_},
                     {"before", ModelJson(before_)},
                     {"recipes", Json::array()},
                     {"products", Json::array()}};
    for (const RecipeResult& result : results_) {
      Json classes = Json::object();
      ForEachQuantizedClass([&](LayerClass layer_class) {
        classes[std::string(LayerClassName(layer_class))] =
            result.comparison.classes[static_cast<size_t>(layer_class)].RelativeError();
      });
      document["recipes"].push_back({{"recipe", result.recipe},
                                     {"bits_per_weight", result.report.bits_per_weight},
                                     {"bytes", result.report.bytes},
                                     {"coverage", result.report.coverage},
                                     {"after", ModelJson(result.model)},
                                     {"relative_error", std::move(classes)}});
    }
    for (const ProductRow& row : products_) {
      document["products"].push_back({{"recipe", row.recipe.empty() ? Json() : Json(row.recipe)},
                                      {"format", row.choice.ToString()},
                                      {"m", row.m},
                                      {"n", kWidth},
                                      {"k", kWidth},
                                      {"kernel", row.timing.kernel},
                                      {"seconds", row.timing.seconds},
                                      {"speedup_over_bf16", row.speedup}});
    }
    return console.PrintJson(document);
  }

  Json ModelJson(const ModelResult& result) const {
    if (tokens_.empty()) return {};
    return {{"perplexity", result.perplexity.perplexity},
            {"standard_error", result.perplexity.standard_error},
            {"tokens_per_second", result.tokens_per_second},
            {"sentence", result.sentence.empty() ? Json() : Json(result.sentence)}};
  }

  Status PrintTables(Console& console) const {
    return console.Print(fmt::format(
        "relative error of the weights, by layer class\n\n{}\n"
        "GEMM of m rows with a {} x {} matrix, weights from memory; {}, {} threads\n\n{}\n{}",
        ErrorTable(), kWidth, kWidth, device_.model, device_.threads, ProductTable(),
        tokens_.empty() ? SizeTable() : ResultTable() + Sentences()));
  }

  /// The output for a model without sample tokens.
  std::string SizeTable() const {
    Table table({"recipe", "bits/weight", "size"});
    table.AddRow({"16 bits", "16.000", FormatBytes(source_bytes_)});
    for (const RecipeResult& result : results_) {
      table.AddRow({result.recipe, fmt::format("{:.3f}", result.report.bits_per_weight),
                    FormatBytes(result.report.bytes)});
    }
    return fmt::format("{}: has no validation_tokens.txt, so no model was run\n\n{}", model_,
                       table.ToString());
  }

  std::string ResultTable() const {
    Table table(
        {"recipe", "bits/weight", "size", "perplexity before", "after", "change", "tokens/s"});
    table.AddRow({"16 bits", "16.000", FormatBytes(source_bytes_),
                  fmt::format("{:.3f}", before_.perplexity.perplexity), "", "",
                  FormatRate(before_.tokens_per_second)});
    for (const RecipeResult& result : results_) {
      const double change = result.model.perplexity.perplexity / before_.perplexity.perplexity - 1;
      table.AddRow({result.recipe, fmt::format("{:.3f}", result.report.bits_per_weight),
                    FormatBytes(result.report.bytes),
                    fmt::format("{:.3f}", before_.perplexity.perplexity),
                    fmt::format("{:.3f}", result.model.perplexity.perplexity), FormatChange(change),
                    FormatRate(result.model.tokens_per_second)});
    }
    return fmt::format(
        "{}; perplexity over {} held-out tokens, +- {:.2f}; decoding tokens/s, the fastest of five "
        "runs\n\n{}\n",
        model_, FormatInteger(before_.perplexity.tokens), before_.perplexity.standard_error,
        table.ToString());
  }

  std::string Sentences() const {
    if (before_.sentence.empty()) {
      return "The generated sentences need a tokenizer: ./dev demo, or the Python package's "
             "command.\n";
    }
    Table table({"recipe", "continuation of the first words"}, 2);
    table.AddRow({"16 bits", before_.sentence});
    for (const RecipeResult& result : results_) {
      table.AddRow({result.recipe, result.model.sentence});
    }
    return table.ToString();
  }

  /// Calls body for each class that any recipe quantized.
  template <typename Body>
  void ForEachQuantizedClass(Body body) const {
    for (int i = 0; i < kLayerClassCount; ++i) {
      bool changed = false;
      for (const RecipeResult& result : results_) {
        changed = changed || result.comparison.classes[static_cast<size_t>(i)].error_squares != 0;
      }
      if (changed) body(static_cast<LayerClass>(i));
    }
  }

  std::string ErrorTable() const {
    std::vector<std::string> header = {"layer class"};
    for (const RecipeResult& result : results_) header.push_back(result.recipe);
    Table table(std::move(header));
    ForEachQuantizedClass([&](LayerClass layer_class) {
      std::vector<std::string> cells = {std::string(LayerClassName(layer_class))};
      for (const RecipeResult& result : results_) {
        const ErrorSums& errors = result.comparison.classes[static_cast<size_t>(layer_class)];
        cells.push_back(fmt::format("{:.4f}", errors.RelativeError()));
      }
      table.AddRow(std::move(cells));
    });
    return table.ToString();
  }

  std::string ProductTable() const {
    Table table({"weights", "expert format of", "kernel", "m", "time", "GFLOP/s", "against bf16"},
                3);
    for (const ProductRow& row : products_) {
      table.AddRow({row.choice.ToString(), row.recipe, row.timing.kernel, std::to_string(row.m),
                    fmt::format("{:.3f} ms", 1e3 * row.timing.seconds), FormatRate(Gflops(row)),
                    row.recipe.empty() ? "" : fmt::format("{:.2f}x", row.speedup)});
    }
    return table.ToString();
  }

  static double Gflops(const ProductRow& row) {
    return 2e-9 * static_cast<double>(row.m * kWidth * kWidth) / row.timing.seconds;
  }

  std::string model_ = "examples/tiny-qwen3-moe";
  TemporaryDirectory directory_;
  std::vector<int32_t> tokens_;  ///< The text to evaluate on; empty: none.
  ModelResult before_;
  int64_t source_bytes_ = 0;
  DeviceInfo device_;
  std::vector<RecipeResult> results_;
  std::vector<ProductRow> products_;
};

}  // namespace

std::unique_ptr<Command> Make_demo() { return std::make_unique<DemoCommand>(); }

}  // namespace marlin::cli
