// Recipes as JSON documents, and the recipe names of the command line. docs/howto/recipes.md
// documents the schema: {"name", "base", "classes": {CLASS: CHOICE}, "hot_experts",
// "tensors": {NAME: CHOICE}, "overrides"}.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "base/json.h"
#include "base/macros.h"
#include "base/path_check.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "marlin/recipe.h"
#include "marlin/routing.h"

namespace marlin {
namespace {

constexpr std::string_view kPresetNames =
    "default_dense, default_moe, aggressive_moe, uniform:FORMAT/gN";

Status InvalidRecipe(const std::string& reason) {
  return Status(Code::kInvalidArgument, fmt::format("recipe: {}", reason));
}

Result<Json> ParseDocument(std::string_view text) {
  Result<Json> document = ParseJsonObject(text, "malformed JSON", kRecipeJson);
  // Recipes are user input: a malformed one is an invalid argument.
  if (!document.ok() && document.status().code() == Code::kMalformedFile) {
    return InvalidRecipe(document.status().message());
  }
  return document;
}

Status CheckKeys(const Json& object, std::span<const std::string_view> known,
                 const std::string& where) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    return InvalidRecipe(fmt::format("{}unknown key '{}'; known: {}", where, Printable(key),
                                     fmt::join(known, ", ")));
  }
  return Status();
}

Result<std::string> StringOf(const Json& value, const std::string& where) {
  if (!value.is_string()) {
    return InvalidRecipe(fmt::format("{}: expected a string, got {}", where, value.type_name()));
  }
  return value.get<std::string>();
}

Result<FormatChoice> ChoiceOf(const Json& value, const std::string& where) {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, StringOf(value, where));
  Result<FormatChoice> choice = ParseFormatChoice(text);
  if (!choice.ok()) return choice.status().WithContext(fmt::format("recipe: {}", where));
  return choice;
}

Result<MixedPrecisionConfig> FromPreset(const std::string& name) {
  if (name == "default_dense") return MixedPrecisionConfig::DefaultDense();
  if (name == "default_moe") return MixedPrecisionConfig::DefaultMoe();
  if (name == "aggressive_moe") return MixedPrecisionConfig::AggressiveMoe();
  constexpr std::string_view kUniform = "uniform:";
  if (name.starts_with(kUniform)) {
    return MixedPrecisionConfig::Uniform(std::string_view(name).substr(kUniform.size()));
  }
  return InvalidRecipe(
      fmt::format("'{}' is not a preset; presets: {}", Printable(name), kPresetNames));
}

Status ReadClasses(const Json& classes, MixedPrecisionConfig* recipe) {
  if (!classes.is_object()) return InvalidRecipe("classes: expected an object");
  for (const auto& [key, value] : classes.items()) {
    Result<LayerClass> layer_class = ParseLayerClass(key);
    if (!layer_class.ok()) return layer_class.status().WithContext("recipe: classes");
    MARLIN_ASSIGN_OR_RETURN(const FormatChoice choice,
                            ChoiceOf(value, fmt::format("classes.{}", Printable(key))));
    recipe->Set(*layer_class, choice);
  }
  return Status();
}

Status ReadTensors(const Json& tensors, MixedPrecisionConfig* recipe) {
  if (!tensors.is_object()) return InvalidRecipe("tensors: expected an object");
  for (const auto& [name, value] : tensors.items()) {
    MARLIN_ASSIGN_OR_RETURN(const FormatChoice choice,
                            ChoiceOf(value, fmt::format("tensors.{}", Printable(name))));
    recipe->SetTensor(name, choice);
  }
  return Status();
}

Status ReadOverride(const Json& entry, const std::string& where, MixedPrecisionConfig* recipe) {
  if (!entry.is_object()) return InvalidRecipe(where + ": expected an object");
  constexpr std::string_view kKeys[] = {"glob", "regex", "choice"};
  MARLIN_RETURN_IF_ERROR(CheckKeys(entry, kKeys, where + ": "));
  if (entry.contains("glob") == entry.contains("regex")) {
    return InvalidRecipe(where + ": expected exactly one of 'glob' and 'regex'");
  }
  if (!entry.contains("choice")) return InvalidRecipe(where + ": the key 'choice' is missing");
  RecipeOverride parsed;
  parsed.is_regex = entry.contains("regex");
  MARLIN_ASSIGN_OR_RETURN(parsed.pattern,
                          StringOf(entry[parsed.is_regex ? "regex" : "glob"], where));
  MARLIN_ASSIGN_OR_RETURN(parsed.choice, ChoiceOf(entry["choice"], where + ".choice"));
  return recipe->AddOverride(std::move(parsed)).WithContext(fmt::format("recipe: {}", where));
}

Status ReadOverrides(const Json& overrides, MixedPrecisionConfig* recipe) {
  if (!overrides.is_array()) return InvalidRecipe("overrides: expected an array");
  for (size_t i = 0; i < overrides.size(); ++i) {
    const std::string where = fmt::format("overrides[{}]", i);
    MARLIN_RETURN_IF_ERROR(ReadOverride(overrides[i], where, recipe));
  }
  return Status();
}

/// {"frequencies": FILE, "fraction": NUMBER, "choice": CHOICE}. `directory` is what FILE is
/// relative to.
Result<HotExperts> HotExpertsFromFile(const Json& rule, const FormatChoice& choice,
                                      const std::filesystem::path& directory) {
  constexpr std::string_view kKeys[] = {"frequencies", "fraction", "choice"};
  MARLIN_RETURN_IF_ERROR(CheckKeys(rule, kKeys, "hot_experts: "));
  MARLIN_ASSIGN_OR_RETURN(const std::string file,
                          StringOf(rule["frequencies"], "hot_experts.frequencies"));
  MARLIN_RETURN_IF_ERROR(CheckPath(file).WithContext("recipe: hot_experts.frequencies"));
  const auto fraction = rule.find("fraction");
  const bool number = fraction != rule.end() && fraction->is_number();
  const double value = number ? fraction->get<double>() : 0.0;
  if (!(value > 0 && value <= 1)) {
    return InvalidRecipe("hot_experts.fraction: expected a number above 0, at most 1");
  }
  MARLIN_ASSIGN_OR_RETURN(const RoutingFrequencies frequencies,
                          RoutingFrequencies::FromFile((directory / file).string()));
  return HotExperts::Of(frequencies, value, choice);
}

/// Whole numbers below `limit` in ascending order, or nothing.
std::optional<std::vector<int64_t>> AscendingNumbers(const Json& list, int64_t limit) {
  if (!list.is_array()) return std::nullopt;
  std::vector<int64_t> numbers;
  for (const Json& value : list) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() >= static_cast<uint64_t>(limit)) {
      return std::nullopt;
    }
    const auto number = value.get<int64_t>();
    if (!numbers.empty() && number <= numbers.back()) return std::nullopt;
    numbers.push_back(number);
  }
  return numbers;
}

/// {"layer", "experts", "hot": [...]}
Result<HotExperts::Layer> HotLayerOf(const Json& entry) {
  constexpr std::string_view kKeys[] = {"layer", "experts", "hot"};
  constexpr int64_t kMost = int64_t{1} << 20;
  if (!entry.is_object()) return InvalidRecipe("hot_experts.layers: expected objects");
  MARLIN_RETURN_IF_ERROR(CheckKeys(entry, kKeys, "hot_experts.layers: "));
  const auto layer = AscendingNumbers(Json::array({entry.value("layer", Json())}), kMost);
  const auto experts = AscendingNumbers(Json::array({entry.value("experts", Json())}), kMost);
  if (!layer || !experts) {
    return InvalidRecipe("hot_experts.layers: 'layer' and 'experts': expected whole numbers");
  }
  auto hot = AscendingNumbers(entry.value("hot", Json()), experts->front());
  if (!hot) {
    return InvalidRecipe(fmt::format("hot_experts.layers: hot: expected ascending numbers below {}",
                                     experts->front()));
  }
  return HotExperts::Layer{layer->front(), experts->front(), *std::move(hot)};
}

/// {"choice": CHOICE, "model_type": TYPE, "layers": [...]}, which ToJson writes; without a type, it
/// is unknown.
Result<HotExperts> HotExpertsFromLayers(const Json& rule, const FormatChoice& choice) {
  constexpr std::string_view kKeys[] = {"choice", "model_type", "layers"};
  MARLIN_RETURN_IF_ERROR(CheckKeys(rule, kKeys, "hot_experts: "));
  const auto layers = rule.find("layers");
  if (layers == rule.end() || !layers->is_array()) {
    return InvalidRecipe("hot_experts: expected 'frequencies' and 'fraction', or 'layers'");
  }
  HotExperts hot;
  hot.choice = choice;
  if (const auto type = rule.find("model_type"); type != rule.end()) {
    MARLIN_ASSIGN_OR_RETURN(hot.model_type, StringOf(*type, "hot_experts.model_type"));
  }
  for (const Json& entry : *layers) {
    MARLIN_ASSIGN_OR_RETURN(HotExperts::Layer layer, HotLayerOf(entry));
    if (!hot.layers.empty() && layer.layer <= hot.layers.back().layer) {
      return InvalidRecipe("hot_experts.layers: expected layers in ascending order");
    }
    hot.layers.push_back(std::move(layer));
  }
  return hot;
}

Status ReadHotExperts(const Json& rule, const std::filesystem::path& directory,
                      MixedPrecisionConfig* recipe) {
  if (!rule.is_object()) return InvalidRecipe("hot_experts: expected an object");
  if (!rule.contains("choice")) return InvalidRecipe("hot_experts: the key 'choice' is missing");
  MARLIN_ASSIGN_OR_RETURN(const FormatChoice choice,
                          ChoiceOf(rule["choice"], "hot_experts.choice"));
  Result<HotExperts> hot = rule.contains("frequencies")
                               ? HotExpertsFromFile(rule, choice, directory)
                               : HotExpertsFromLayers(rule, choice);
  if (!hot.ok()) return hot.status();
  recipe->set_hot_experts(*std::move(hot));
  return Status();
}

Result<MixedPrecisionConfig> Parse(std::string_view text, const std::filesystem::path& directory) {
  MARLIN_ASSIGN_OR_RETURN(const Json document, ParseDocument(text));
  constexpr std::string_view kKeys[] = {"name",        "base",    "classes",
                                        "hot_experts", "tensors", "overrides"};
  MARLIN_RETURN_IF_ERROR(CheckKeys(document, kKeys, ""));
  MixedPrecisionConfig recipe;
  recipe.set_name("custom");
  if (document.contains("base")) {
    MARLIN_ASSIGN_OR_RETURN(const std::string base, StringOf(document["base"], "base"));
    MARLIN_ASSIGN_OR_RETURN(recipe, FromPreset(base));
    recipe.set_name(fmt::format("custom:{}", base));
  }
  if (document.contains("name")) {
    MARLIN_ASSIGN_OR_RETURN(std::string name, StringOf(document["name"], "name"));
    recipe.set_name(std::move(name));
  }
  if (document.contains("classes")) {
    MARLIN_RETURN_IF_ERROR(ReadClasses(document["classes"], &recipe));
  }
  if (document.contains("hot_experts")) {
    MARLIN_RETURN_IF_ERROR(ReadHotExperts(document["hot_experts"], directory, &recipe));
  }
  if (document.contains("tensors")) {
    MARLIN_RETURN_IF_ERROR(ReadTensors(document["tensors"], &recipe));
  }
  if (document.contains("overrides")) {
    MARLIN_RETURN_IF_ERROR(ReadOverrides(document["overrides"], &recipe));
  }
  return recipe;
}

}  // namespace

Result<MixedPrecisionConfig> MixedPrecisionConfig::FromJson(std::string_view text) {
  return Parse(text, {});
}

Result<MixedPrecisionConfig> MixedPrecisionConfig::FromFile(const std::string& path) {
  const Result<std::string> text = ReadFile(path, kRecipeJson.bytes);
  if (!text.ok() && text.status().code() == Code::kMalformedFile) {
    return InvalidRecipe(text.status().message());
  }
  if (!text.ok()) return text.status();
  Result<MixedPrecisionConfig> recipe = Parse(*text, std::filesystem::path(path).parent_path());
  if (!recipe.ok()) return recipe.status().WithContext(Printable(path));
  return recipe;
}

Result<MixedPrecisionConfig> MixedPrecisionConfig::FromNameOrFile(const std::string& name) {
  MARLIN_RETURN_IF_ERROR(CheckPath(name).WithContext("recipe"));
  Result<MixedPrecisionConfig> preset = FromPreset(name);
  if (preset.ok() || name.starts_with("uniform:")) return preset;
  const bool looks_like_path = name.ends_with(".json") || name.find('/') != std::string::npos;
  std::error_code ignored;
  if (looks_like_path || std::filesystem::exists(name, ignored)) return FromFile(name);
  return Status(Code::kInvalidArgument,
                fmt::format("recipe: no preset and no file is called '{}'; presets: {}",
                            Printable(name), kPresetNames));
}

std::string MixedPrecisionConfig::ToJson() const {
  // In the order in which people write recipes.
  using OrderedJson = nlohmann::ordered_json;
  OrderedJson document;
  document["name"] = name_;
  document["classes"] = OrderedJson::object();
  for (const auto& [layer_class, choice] : classes_) {
    document["classes"][std::string(LayerClassName(layer_class))] = choice.ToString();
  }
  if (hot_experts_) {
    OrderedJson& rule = document["hot_experts"];
    rule["choice"] = hot_experts_->choice.ToString();
    if (!hot_experts_->model_type.empty()) rule["model_type"] = hot_experts_->model_type;
    rule["layers"] = OrderedJson::array();
    for (const HotExperts::Layer& layer : hot_experts_->layers) {
      rule["layers"].push_back(
          {{"layer", layer.layer}, {"experts", layer.experts}, {"hot", layer.hot}});
    }
  }
  for (const auto& [name, choice] : tensors_) document["tensors"][name] = choice.ToString();
  document["overrides"] = OrderedJson::array();
  for (const RecipeOverride& entry : overrides_) {
    OrderedJson row;
    row[entry.is_regex ? "regex" : "glob"] = entry.pattern;
    row["choice"] = entry.choice.ToString();
    document["overrides"].push_back(std::move(row));
  }
  return document.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace marlin
