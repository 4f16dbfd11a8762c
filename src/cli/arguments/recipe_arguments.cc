#include "cli/arguments/recipe_arguments.h"

#include <fmt/core.h>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "layout/input_transform.h"

namespace marlin::cli {
namespace {

constexpr int64_t kDefaultGroupSize = 128;

/// Splits "REGEX=CHOICE" at the last '=', since only the expression may contain one.
Result<RecipeOverride> ParseOverride(const std::string& text) {
  const size_t equals = text.rfind('=');
  if (equals == std::string::npos) {
    return Invalid(fmt::format("--override: expected REGEX=FORMAT/gN, got '{}'", Printable(text)));
  }
  RecipeOverride entry;
  entry.is_regex = true;
  entry.pattern = text.substr(0, equals);
  Result<FormatChoice> choice = ParseFormatChoice(text.substr(equals + 1));
  if (!choice.ok()) return choice.status().WithContext("--override");
  entry.choice = *choice;
  return entry;
}

}  // namespace

void RecipeArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--recipe", &recipe_, "NAME|FILE",
                   "default_dense, default_moe, aggressive_moe, uniform:FORMAT/gN or a JSON file");
  arguments.Choices({"default_dense", "default_moe", "aggressive_moe"});
  arguments.Option("--format", &format_, "FORMAT",
                   "One format for every attention, MLP and expert matrix");
  arguments.Choices(AllFormats(), [](const FormatInfo& format) { return format.name; });
  arguments.Option("--group-size", &group_size_, {.least = 16}, "G",
                   "Weights per scale, a multiple of 16, for all but embedding and head");
  arguments.Option("--scale-dtype", &scale_type_, "TYPE",
                   "fp16, bf16, fp32, e8m0 or e4m3, for all but embedding and head");
  arguments.Choices(AllScaleTypes(), ScaleTypeName);
  arguments.Option(
      "--sparsity", &sparsity_, "2:4",
      "Keep two of every four weights along the inputs, except in embedding and head; or dense");
  arguments.Option(
      "--hadamard", &hadamard_, {.least = 2}, "N",
      "Rotate the inputs of matrices, except experts and head, by Hadamard blocks of N, a power "
      "of two; needs --method gptq");
  arguments.Option("--override", &overrides_, "REGEX=FORMAT/gN",
                   "Another format (or 'keep') for matching tensor names; repeatable");
}

Result<MixedPrecisionConfig> RecipeArguments::Base(const MixedPrecisionConfig& base) const {
  if (recipe_ && format_) {
    return Invalid("--recipe and --format exclude each other");
  }
  if (recipe_) return MixedPrecisionConfig::FromNameOrFile(*recipe_);
  if (format_) {
    MARLIN_ASSIGN_OR_RETURN(const Format format, ParseFormat(*format_));
    return MixedPrecisionConfig::Uniform(
        fmt::format("{}/g{}", FormatName(format), group_size_.value_or(kDefaultGroupSize)));
  }
  return base;
}

Status RecipeArguments::ChangeClasses(MixedPrecisionConfig* recipe) const {
  if (hadamard_ && !IsHadamardSize(*hadamard_)) {
    return Invalid(fmt::format("--hadamard: expected a power of two from 2 to {}, got {}",
                               kMaxHadamard, *hadamard_));
  }
  if (group_size_) MARLIN_RETURN_IF_ERROR(CheckGroupSize(*group_size_).WithContext("--group-size"));
  std::optional<ScaleType> scale_type;
  if (scale_type_) {
    MARLIN_ASSIGN_OR_RETURN(scale_type, ParseScaleType(*scale_type_));
  }
  const std::map<LayerClass, FormatChoice> classes = recipe->classes();
  for (auto [layer_class, choice] : classes) {
    if (IsModelEnd(layer_class)) continue;
    if (group_size_) choice.group_size = *group_size_;
    if (scale_type) choice.scale_type = *scale_type;
    if (hadamard_ && choice.quantized()) choice.input_hadamard = *hadamard_;
    recipe->Set(layer_class, choice);
  }
  if (!sparsity_) return {};
  const Result<Sparsity> sparsity = ParseSparsity(*sparsity_);
  if (!sparsity.ok()) return sparsity.status().WithContext("--sparsity");
  Result<MixedPrecisionConfig> changed = recipe->WithSparsity(*sparsity);
  if (!changed.ok()) return changed.status().WithContext("--sparsity");
  *recipe = *std::move(changed);
  return {};
}

Result<MixedPrecisionConfig> RecipeArguments::Build(const MixedPrecisionConfig& base) const {
  MARLIN_ASSIGN_OR_RETURN(MixedPrecisionConfig recipe, Base(base));
  MARLIN_RETURN_IF_ERROR(ChangeClasses(&recipe));
  for (const std::string& text : overrides_) {
    MARLIN_ASSIGN_OR_RETURN(RecipeOverride entry, ParseOverride(text));
    MARLIN_RETURN_IF_ERROR(recipe.AddOverride(std::move(entry)));
  }
  const bool changed = scale_type_ || sparsity_ || hadamard_ || !overrides_.empty();
  if (changed || (group_size_ && !format_)) recipe.set_name(recipe.name() + "+options");
  return recipe;
}

}  // namespace marlin::cli
