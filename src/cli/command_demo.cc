// demo: the main job on the sample model: quantize, verify, multiply.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/product_timing.h"
#include "cli/progress_bar.h"
#include "cli/table.h"
#include "cli/verification.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kRecipes[] = {"default_moe", "aggressive_moe", "uniform:fp4_e2m1/g32"};
// A layer's width in a model of 7-8 B parameters: the sample's own 128 x 128 would time overheads.
constexpr int64_t kWidth = 4096;
constexpr int64_t kRowCounts[] = {1, 16, 256};
constexpr size_t kPromptTokens = 8;
constexpr int64_t kSentenceTokens = 32;
constexpr FormatChoice kBf16Choice = {.keep = false, .format = Format::kBf16};

/// A directory under the system's temporary one that goes with its contents.
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

/// How a model reads and writes.
struct ModelResult {
  PerplexityResult perplexity;
  double tokens_per_second = 0;
  std::string sentence;  ///< Empty without a tokenizer.
};

struct RecipeResult {
  std::string recipe;
  ModelResult model;
  FormatChoice expert_choice;
  QuantizeCheckpointReport report;
  Comparison comparison;
};

struct ProductRow {
  std::string recipe;  ///< Empty for the product with bf16 weights.
  FormatChoice choice;
  int64_t m = 0;
  ProductTiming timing;
  double speedup = 1;  ///< Over the product with bf16 weights.
};

class DemoCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Option("--model", &model_, "DIR", "The checkpoint to work on");
  }

  Status Run(Console& console) override {
    Result<Checkpoint> source = Checkpoint::Open(model_);
    if (!source.ok()) {
      return source.status().WithContext("demo: run from the project's folder or give --model");
    }
    MARLIN_RETURN_IF_ERROR(directory_.Make());
    for (const TensorInfo& tensor : source->tensors()) source_bytes_ += tensor.bytes;
    MARLIN_ASSIGN_OR_RETURN(const Device device, Device::Open("cpu"));
    MARLIN_RETURN_IF_ERROR(ReadPrompts());
    MARLIN_ASSIGN_OR_RETURN(before_, RunModel(console, device, model_));
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
  /// The sample's tokens lie beside it; another model is only quantized and multiplied with.
  Status ReadPrompts() {
    const std::string path = model_ + "/validation_tokens.txt";
    if (!std::filesystem::exists(path)) return {};
    MARLIN_ASSIGN_OR_RETURN(tokens_, ReadTokens(path));
    return {};
  }

  Result<ModelResult> RunModel(const Console& console, const Device& device,
                               const std::string& path) const {
    ModelResult result;
    if (tokens_.empty()) return result;
    MARLIN_ASSIGN_OR_RETURN(const Model model, Model::Open(path, device));
    MARLIN_ASSIGN_OR_RETURN(result.perplexity, Perplexity(model, tokens_));
    GenerateOptions options;
    options.max_tokens = kSentenceTokens;
    options.ignore_eos = true;
    const std::span<const int32_t> prompt = std::span(tokens_).first(kPromptTokens);
    MARLIN_ASSIGN_OR_RETURN(const Generated generated, Generate(model, prompt, options));
    result.tokens_per_second = (kSentenceTokens - 1) / generated.decode_seconds;
    if (!console.text_codecs()) return result;
    MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, "demo", path, model));
    std::vector<int32_t> all(prompt.begin(), prompt.end());
    all.insert(all.end(), generated.token_ids.begin(), generated.token_ids.end());
    MARLIN_ASSIGN_OR_RETURN(result.sentence, codec->Decode(all));
    std::replace(result.sentence.begin(), result.sentence.end(), '\n', ' ');
    return result;
  }

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
    MARLIN_ASSIGN_OR_RETURN(result.model, RunModel(console, device, output));
    results_.push_back(std::move(result));
    return Status();
  }

  /// Matrices in bf16, then in the experts' format of every recipe.
  Result<std::vector<PreparedWeights>> PrepareProducts(const Device& device) const {
    std::vector<PreparedWeights> weights;
    FormatChoice choice = kBf16Choice;
    for (size_t i = 0; i <= results_.size(); ++i) {
      if (i > 0) choice = results_[i - 1].expert_choice;
      MARLIN_ASSIGN_OR_RETURN(PreparedWeights prepared,
                              PrepareRandomWeights(device, choice, kWidth, kWidth));
      weights.push_back(std::move(prepared));
    }
    return weights;
  }

  Status TimeRows(const Device& device, const std::vector<PreparedWeights>& weights, int64_t m) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<ProductTiming> timings,
                            TimeProducts(device, weights, m));
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

  std::string ModelTable() const {
    if (tokens_.empty()) return "";
    Table table({"recipe", "perplexity", "+-", "against 16 bits", "tokens/s"});
    const auto add = [&](const std::string& name, const ModelResult& result) {
      const double change = result.perplexity.perplexity / before_.perplexity.perplexity - 1;
      table.AddRow({name, fmt::format("{:.3f}", result.perplexity.perplexity),
                    fmt::format("{:.3f}", result.perplexity.standard_error),
                    fmt::format("{:+.1f} %", 100 * change),
                    fmt::format("{:.0f}", result.tokens_per_second)});
    };
    add("16 bits", before_);
    for (const RecipeResult& result : results_) add(result.recipe, result.model);
    std::string text = fmt::format("perplexity over {} tokens that the training never saw\n\n{}\n",
                                   before_.perplexity.tokens, table.ToString());
    if (!results_.empty() && !results_.front().model.sentence.empty()) {
      text += fmt::format("{} goes on: {}\n\n", results_.front().recipe,
                          results_.front().model.sentence);
    }
    return text;
  }

  Status PrintTables(Console& console) const {
    return console.Print(fmt::format(
        "{}: {} in 16 bits\n\n{}\n{}relative error of the weights, by layer class\n\n{}\n"
        "product of m rows with a {} x {} matrix, weights from memory; {}, {} threads\n\n{}",
        model_, FormatBytes(source_bytes_), SizeTable(), ModelTable(), ErrorTable(), kWidth, kWidth,
        device_.model, device_.threads, ProductTable()));
  }

  std::string SizeTable() const {
    Table table({"recipe", "bits/weight", "size", "smaller by", "quantized", "seconds"});
    for (const RecipeResult& result : results_) {
      const QuantizeCheckpointReport& report = result.report;
      table.AddRow(
          {result.recipe, fmt::format("{:.3f}", report.bits_per_weight), FormatBytes(report.bytes),
           fmt::format("{:.2f}x",
                       static_cast<double>(source_bytes_) / static_cast<double>(report.bytes)),
           fmt::format("{:.1f} %", 100 * report.coverage), fmt::format("{:.2f}", report.seconds)});
    }
    return table.ToString();
  }

  /// Calls body for the classes that some recipe changed.
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
                    fmt::format("{:.3f} ms", 1e3 * row.timing.seconds),
                    fmt::format("{:.1f}", Gflops(row)),
                    row.recipe.empty() ? "" : fmt::format("{:.2f}x", row.speedup)});
    }
    return table.ToString();
  }

  static double Gflops(const ProductRow& row) {
    return 2e-9 * static_cast<double>(row.m * kWidth * kWidth) / row.timing.seconds;
  }

  std::string model_ = "examples/tiny-qwen3-moe";
  TemporaryDirectory directory_;
  std::vector<int32_t> tokens_;  ///< Of the text to evaluate on; empty: there is none.
  ModelResult before_;
  int64_t source_bytes_ = 0;
  DeviceInfo device_;
  std::vector<RecipeResult> results_;
  std::vector<ProductRow> products_;
};

}  // namespace

std::unique_ptr<Command> Make_demo() { return std::make_unique<DemoCommand>(); }

}  // namespace marlin::cli
