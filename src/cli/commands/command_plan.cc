// plan: predicts a recipe's effect on a model from its config.json alone.
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "bench/read_probe.h"
#include "cli/arguments/model_arguments.h"
#include "cli/arguments/recipe_arguments.h"
#include "cli/checkpoint_architecture.h"
#include "cli/checkpoint_listing.h"
#include "cli/command.h"
#include "cli/commands/model_plan.h"
#include "recipe/architecture.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

Json TotalsJson(const PlanTotals& totals) {
  return {{"tensors", totals.tensors},
          {"parameters", totals.parameters},
          {"quantized_parameters", totals.quantized_parameters},
          {"bits_per_weight", totals.BitsPerWeight()},
          {"bytes", totals.bytes}};
}

class PlanCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("SRC", &source_,
                         "A config.json, a model's directory or a .safetensors file");
    arguments.Model(&source_, ModelPart::kConfig);
    arguments.Group("Formats");
    recipe_arguments_.Declare(arguments);
    arguments.Group("Device");
    arguments.Option("--bandwidth", &bandwidth_gbps_, {.without_least = true}, "GB/s",
                     "Memory bandwidth for the speed ceiling; measured here when not given");
    arguments.Option("--memory", &memory_text_, "SIZE",
                     "Memory of a device, \"24GB\": what fits, and which experts stay on the host");
    arguments.Option("--context", &context_, {.least = 0}, "N",
                     "--memory: tokens in the KV cache; default 4096");
    kv_cache_argument_.Declare(arguments, "Keys and values: f32, bf16 (default) or fp8_e4m3");
    arguments.Option("--device", &device_, "DEVICE", "cpu; auto is the same");
    arguments.Choices({"auto", "cpu"});
  }

  Status Run(Console& console) override {
    if (device_ != "cpu" && device_ != "auto") {
      return Status(Code::kUnsupported,
                    fmt::format("--device {}: this build has only the device cpu", device_));
    }
    if (context_ && !memory_text_) {
      return Invalid("--context: needs --memory");
    }
    int64_t memory = 0;
    if (memory_text_) {
      MARLIN_ASSIGN_OR_RETURN(memory, ParseByteSize("--memory", *memory_text_));
    }
    MARLIN_ASSIGN_OR_RETURN(const std::optional<DType> kv_cache, kv_cache_argument_.Type());
    kv_cache_ = kv_cache.value_or(kv_cache_);
    MARLIN_ASSIGN_OR_RETURN(model_, DescribeSource(source_));
    MARLIN_ASSIGN_OR_RETURN(recipe_, recipe_arguments_.Build(model_.expert_count > 0));
    MARLIN_ASSIGN_OR_RETURN(plan_, MakeModelPlan(model_, recipe_));
    if (memory_text_) placement_ = PlaceModel(model_, plan_, memory, Context(), kv_cache_);
    bandwidth_ = bandwidth_gbps_.value_or(0) * 1e9;
    if (!bandwidth_gbps_) {
      MARLIN_ASSIGN_OR_RETURN(bandwidth_, bench::MeasureReadBandwidth());
    }
    return console.json() ? PrintDocument(console) : PrintTables(console);
  }

 private:
  int64_t Context() const { return context_.value_or(4096); }
  int64_t CacheTokenBytes() const {
    return SaturatingProduct(DTypeBytes(kv_cache_), model_.kv_cache_elements);
  }

  int64_t StateBytes() const {
    return SaturatingProduct(DTypeBytes(DType::kF32), model_.state_elements);
  }

  Json PlacementJson() const {
    const Placement& placement = *placement_;
    return {{"memory_bytes", placement.memory},
            {"context_tokens", Context()},
            {"fits", placement.fits()},
            {"resident_bytes", placement.resident_bytes},
            {"kv_cache_bytes", placement.cache_bytes},
            {"state_bytes", placement.state_bytes},
            {"expanded_bytes", placement.expanded_bytes},
            {"experts", placement.experts},
            {"device_experts", placement.device_experts},
            {"host_bytes", placement.host_bytes},
            {"host_bytes_per_token", placement.host_token_bytes}};
  }

  std::string PlacementText() const {
    const Placement& placement = *placement_;
    const std::string memory = FormatBytes(placement.memory);
    std::string rest = fmt::format("{}, with the KV cache of {} tokens ({})",
                                   FormatBytes(placement.resident_bytes), FormatInteger(Context()),
                                   FormatBytes(placement.cache_bytes));
    if (placement.state_bytes > 0) {
      rest += fmt::format(" and two recurrent states ({})", FormatBytes(placement.state_bytes));
    }
    if (placement.expanded_bytes > 0) {
      rest += fmt::format(" and the heads that prefill expands latents to ({})",
                          FormatBytes(placement.expanded_bytes));
    }
    const char* what = placement.experts > 0 ? "everything but the experts" : "the model";
    if (!placement.fits()) {
      return fmt::format("does not fit {}: {} takes {}\n", memory, what, rest);
    }
    const std::string fits = fmt::format("in {}: {} takes {}", memory, what, rest);
    if (placement.experts == 0) return fits + "\n";
    if (placement.device_experts == placement.experts) {
      return fmt::format("{}; all experts fit next to it\n", fits);
    }
    return fmt::format(
        "{}; {} of {} experts of every layer fit next to it; {} stay on the host ({}), where a "
        "token reads {} if all are equally frequent\n",
        fits, placement.device_experts, placement.experts,
        placement.experts - placement.device_experts, FormatBytes(placement.host_bytes),
        FormatBytes(placement.host_token_bytes));
  }

  double TokensPerSecond(int64_t bytes) const {
    return bytes == 0 ? 0.0 : bandwidth_ / static_cast<double>(bytes);
  }

  Status PrintDocument(Console& console) const {
    Json document = {{"model_type", model_.model_type},
                     {"recipe", recipe_.name()},
                     {"parameters", plan_.total.parameters},
                     {"active_parameters", plan_.active_parameters},
                     {"embedding_parameters", plan_.embedding_parameters},
                     {"prediction_parameters", plan_.prediction.parameters},
                     {"quantized_parameters", plan_.total.quantized_parameters},
                     {"bits_per_weight", plan_.total.BitsPerWeight()},
                     {"ends", EndsDocument(plan_.ends)},
                     {"bytes", plan_.total.bytes},
                     {"bf16_bytes", 2 * plan_.total.parameters},
                     {"kv_cache", KvCacheTypeName(kv_cache_)},
                     {"kv_cache_bytes_per_token",
                      model_.kv_cache_elements == 0 ? Json() : Json(CacheTokenBytes())},
                     {"state_bytes_per_sequence", StateBytes()}};
    document["decode"] = {{"bytes_per_token", plan_.decode_bytes},
                          {"bandwidth_gbps", bandwidth_ * 1e-9},
                          {"bandwidth_source", bandwidth_gbps_ ? "given" : "measured"},
                          {"tokens_per_second", TokensPerSecond(plan_.decode_bytes)},
                          {"bf16_tokens_per_second", TokensPerSecond(plan_.bf16_decode_bytes)}};
    if (placement_) document["placement"] = PlacementJson();
    document["layers"] = Json::array();
    for (size_t i = 0; i < plan_.layers.size(); ++i) {
      Json row = {{"name", fmt::format("model.layers.{}", i)}};
      row.update(TotalsJson(plan_.layers[i]));
      document["layers"].push_back(std::move(row));
    }
    document["outside_layers"] = TotalsJson(plan_.outside_layers);
    document["classes"] = Json::array();
    for (size_t i = 0; i < plan_.classes.size(); ++i) {
      if (plan_.classes[i].tensors == 0) continue;
      Json row = {{"layer_class", LayerClassName(static_cast<LayerClass>(i))},
                  {"formats", plan_.choices[i]}};
      row.update(TotalsJson(plan_.classes[i]));
      document["classes"].push_back(std::move(row));
    }
    return console.PrintJson(document);
  }

  Status PrintTables(Console& console) const {
    Table table({"layer class", "format", "tensors", "parameters", "bits/weight", "size"}, 2);
    for (size_t i = 0; i < plan_.classes.size(); ++i) {
      const PlanTotals& totals = plan_.classes[i];
      if (totals.tensors == 0) continue;
      table.AddRow({std::string(LayerClassName(static_cast<LayerClass>(i))),
                    FormatsText(plan_.choices[i]), FormatInteger(totals.tensors),
                    FormatCount(totals.parameters), fmt::format("{:.3f}", totals.BitsPerWeight()),
                    FormatBytes(totals.bytes)});
    }
    table.AddRow(
        {"total", "", FormatInteger(plan_.total.tensors), FormatCount(plan_.total.parameters),
         fmt::format("{:.3f}", plan_.total.BitsPerWeight()), FormatBytes(plan_.total.bytes)});
    std::string text = fmt::format("{} ({} layers), recipe {}\n\n{}\n", model_.model_type,
                                   model_.layer_count, recipe_.name(), table.ToString());
    if (plan_.ends.tied) text += EndsLine(plan_.ends);
    text +=
        fmt::format("active per token: {} parameters, of which {} are the embedding table\n",
                    FormatCount(plan_.active_parameters), FormatCount(plan_.embedding_parameters));
    if (plan_.prediction.tensors > 0) {
      text += fmt::format(
          "not counted: {} parameters ({}) of multi-token-prediction layers, where the checkpoint "
          "has them\n",
          FormatCount(plan_.prediction.parameters), FormatBytes(plan_.prediction.bytes));
    }
    if (model_.kv_cache_elements > 0) {
      text += fmt::format("KV cache in {}: {} per token\n", KvCacheTypeName(kv_cache_),
                          FormatBytes(CacheTokenBytes()));
    }
    if (model_.state_elements > 0) {
      text += fmt::format("recurrent state in f32: {} per sequence\n", FormatBytes(StateBytes()));
    }
    text += fmt::format(
        "decoding reads {} per token: at most {} tokens/s at {} GB/s ({}); in 16 bits {} "
        "tokens/s\n",
        FormatBytes(plan_.decode_bytes), FormatRate(TokensPerSecond(plan_.decode_bytes)),
        FormatRate(bandwidth_ * 1e-9), bandwidth_gbps_ ? "given" : "measured on this machine",
        FormatRate(TokensPerSecond(plan_.bf16_decode_bytes)));
    if (placement_) text += PlacementText();
    return console.Print(text);
  }

  std::string source_;
  RecipeArguments recipe_arguments_;
  std::optional<double> bandwidth_gbps_;
  std::optional<std::string> memory_text_;
  std::optional<int64_t> context_;
  KvCacheArgument kv_cache_argument_;
  DType kv_cache_ = DType::kBf16;
  std::string device_ = "auto";
  ModelArchitecture model_;
  MixedPrecisionConfig recipe_;
  ModelPlan plan_;
  std::optional<Placement> placement_;
  double bandwidth_ = 0;
};

}  // namespace

std::unique_ptr<Command> Make_plan() { return std::make_unique<PlanCommand>(); }

}  // namespace marlin::cli
