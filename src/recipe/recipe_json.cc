// Recipes as JSON documents, and the recipe names of the command line. docs/howto/recipes.md
// documents the schema: {"name", "base", "classes": {CLASS: CHOICE}, "overrides": [...]}.
#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "base/json.h"
#include "base/macros.h"
#include "base/path_check.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "marlin/recipe.h"

namespace marlin {
namespace {

constexpr std::string_view kPresetNames =
    "default_dense, default_moe, aggressive_moe, uniform:FORMAT/gN";

Status Invalid(const std::string& reason) {
  return Status(Code::kInvalidArgument, fmt::format("recipe: {}", reason));
}

Result<Json> ParseDocument(std::string_view text) {
  Result<Json> document = ParseJsonObject(text, "malformed JSON", kRecipeJson);
  // Recipes are user input: a malformed one is an invalid argument.
  if (!document.ok() && document.status().code() == Code::kMalformedFile) {
    return Invalid(document.status().message());
  }
  return document;
}

Result<std::string> StringOf(const Json& value, const std::string& where) {
  if (!value.is_string()) {
    return Invalid(fmt::format("{}: expected a string, got {}", where, value.type_name()));
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
  return Invalid(fmt::format("'{}' is not a preset; presets: {}", Printable(name), kPresetNames));
}

Status ReadClasses(const Json& classes, MixedPrecisionConfig* recipe) {
  if (!classes.is_object()) return Invalid("classes: expected an object");
  for (const auto& [key, value] : classes.items()) {
    Result<LayerClass> layer_class = ParseLayerClass(key);
    if (!layer_class.ok()) return layer_class.status().WithContext("recipe: classes");
    MARLIN_ASSIGN_OR_RETURN(const FormatChoice choice,
                            ChoiceOf(value, fmt::format("classes.{}", Printable(key))));
    recipe->Set(*layer_class, choice);
  }
  return Status();
}

Status ReadOverride(const Json& entry, const std::string& where, MixedPrecisionConfig* recipe) {
  if (!entry.is_object()) return Invalid(where + ": expected an object");
  for (const auto& [key, value] : entry.items()) {
    if (key != "glob" && key != "regex" && key != "choice") {
      return Invalid(
          fmt::format("{}: unknown key '{}'; known: glob, regex, choice", where, Printable(key)));
    }
  }
  if (entry.contains("glob") == entry.contains("regex")) {
    return Invalid(where + ": expected exactly one of 'glob' and 'regex'");
  }
  if (!entry.contains("choice")) return Invalid(where + ": the key 'choice' is missing");
  RecipeOverride parsed;
  parsed.is_regex = entry.contains("regex");
  MARLIN_ASSIGN_OR_RETURN(parsed.pattern,
                          StringOf(entry[parsed.is_regex ? "regex" : "glob"], where));
  MARLIN_ASSIGN_OR_RETURN(parsed.choice, ChoiceOf(entry["choice"], where + ".choice"));
  return recipe->AddOverride(std::move(parsed)).WithContext(fmt::format("recipe: {}", where));
}

Status ReadOverrides(const Json& overrides, MixedPrecisionConfig* recipe) {
  if (!overrides.is_array()) return Invalid("overrides: expected an array");
  for (size_t i = 0; i < overrides.size(); ++i) {
    const std::string where = fmt::format("overrides[{}]", i);
    MARLIN_RETURN_IF_ERROR(ReadOverride(overrides[i], where, recipe));
  }
  return Status();
}

}  // namespace

Result<MixedPrecisionConfig> MixedPrecisionConfig::FromJson(std::string_view text) {
  MARLIN_ASSIGN_OR_RETURN(const Json document, ParseDocument(text));
  for (const auto& [key, value] : document.items()) {
    if (key != "name" && key != "base" && key != "classes" && key != "overrides") {
      return Invalid(
          fmt::format("unknown key '{}'; known: name, base, classes, overrides", Printable(key)));
    }
  }
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
  if (document.contains("overrides")) {
    MARLIN_RETURN_IF_ERROR(ReadOverrides(document["overrides"], &recipe));
  }
  return recipe;
}

Result<MixedPrecisionConfig> MixedPrecisionConfig::FromFile(const std::string& path) {
  const Result<std::string> text = ReadFile(path, kRecipeJson.bytes);
  if (!text.ok() && text.status().code() == Code::kMalformedFile) {
    return Invalid(text.status().message());
  }
  if (!text.ok()) return text.status();
  Result<MixedPrecisionConfig> recipe = FromJson(*text);
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
