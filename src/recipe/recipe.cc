// Presets and the choice for one tensor.
#include "marlin/recipe.h"

#include <fmt/format.h>

#include <regex>

#include "base/macros.h"
#include "recipe/glob.h"

namespace marlin {

struct MixedPrecisionConfig::Matcher {
  std::string glob;
  std::regex regex;
  bool is_regex = false;

  bool Matches(std::string_view name) const {
    if (!is_regex) return GlobMatch(glob, name);
    try {
      return std::regex_search(name.begin(), name.end(), regex);
    } catch (const std::regex_error&) {
      return false;  // error_complexity or error_stack: the pattern gave up on this name.
    }
  }
};

namespace {

struct PresetRow {
  LayerClass layer_class;
  Format format;
  int64_t group_size;
};

constexpr LayerClass kDenseClasses[] = {
    LayerClass::kAttentionQkv, LayerClass::kAttentionOut, LayerClass::kMlpGate,
    LayerClass::kMlpUp,        LayerClass::kMlpDown,      LayerClass::kMoeSharedExpert,
    LayerClass::kMoeExpert,
};

// What every token passes through (attention, shared experts, dense layers) is a small part of a
// mixture-of-experts model and gets the finer groups; the many routed experts get the coarser.
constexpr PresetRow kDefaultMoe[] = {
    {LayerClass::kAttentionQkv, Format::kFp4E2M1, 64},
    {LayerClass::kAttentionOut, Format::kFp4E2M1, 64},
    {LayerClass::kMlpGate, Format::kFp4E2M1, 64},
    {LayerClass::kMlpUp, Format::kFp4E2M1, 64},
    {LayerClass::kMlpDown, Format::kFp4E2M1, 64},
    {LayerClass::kMoeSharedExpert, Format::kFp4E2M1, 64},
    {LayerClass::kMoeExpert, Format::kFp4E2M1, 128},
};
constexpr PresetRow kAggressiveMoe[] = {
    {LayerClass::kAttentionQkv, Format::kFp4E2M1, 64},
    {LayerClass::kAttentionOut, Format::kFp4E2M1, 64},
    {LayerClass::kMlpGate, Format::kS4, 64},
    {LayerClass::kMlpUp, Format::kS4, 64},
    {LayerClass::kMlpDown, Format::kS4, 64},
    {LayerClass::kMoeSharedExpert, Format::kS4, 64},
    {LayerClass::kMoeExpert, Format::kNf3, 64},
};

FormatChoice Quantized(Format format, int64_t group_size) {
  FormatChoice choice;
  choice.keep = false;
  choice.format = format;
  choice.group_size = group_size;
  return choice;
}

template <size_t kRows>
MixedPrecisionConfig MakePreset(std::string name, const PresetRow (&rows)[kRows]) {
  MixedPrecisionConfig recipe;
  recipe.set_name(std::move(name));
  for (const PresetRow& row : rows) {
    recipe.Set(row.layer_class, Quantized(row.format, row.group_size));
  }
  return recipe;
}

MixedPrecisionConfig MakeUniform(std::string name, const FormatChoice& choice) {
  MixedPrecisionConfig recipe;
  recipe.set_name(std::move(name));
  for (LayerClass layer_class : kDenseClasses) recipe.Set(layer_class, choice);
  return recipe;
}

}  // namespace

MixedPrecisionConfig MixedPrecisionConfig::DefaultDense() {
  return MakeUniform("default_dense", Quantized(Format::kFp4E2M1, 128));
}

MixedPrecisionConfig MixedPrecisionConfig::DefaultMoe() {
  return MakePreset("default_moe", kDefaultMoe);
}

MixedPrecisionConfig MixedPrecisionConfig::AggressiveMoe() {
  return MakePreset("aggressive_moe", kAggressiveMoe);
}

Result<MixedPrecisionConfig> MixedPrecisionConfig::Uniform(std::string_view choice) {
  MARLIN_ASSIGN_OR_RETURN(const FormatChoice parsed, ParseFormatChoice(choice));
  return MakeUniform(fmt::format("uniform:{}", parsed.ToString()), parsed);
}

Status MixedPrecisionConfig::AddOverride(RecipeOverride entry) {
  if (entry.pattern.empty()) {
    return Status(Code::kInvalidArgument, "override: the pattern is empty");
  }
  auto matcher = std::make_shared<Matcher>();
  matcher->is_regex = entry.is_regex;
  matcher->glob = entry.pattern;
  if (entry.is_regex) {
    try {
      matcher->regex.assign(entry.pattern, std::regex::ECMAScript | std::regex::optimize);
    } catch (const std::regex_error& error) {
      return Status(
          Code::kInvalidArgument,
          fmt::format("override: '{}' is no regular expression: {}", entry.pattern, error.what()));
    }
  }
  overrides_.push_back(std::move(entry));
  matchers_.push_back(std::move(matcher));
  return Status();
}

FormatChoice MixedPrecisionConfig::Choose(std::string_view tensor_name, const Shape& shape) const {
  if (!IsWeightMatrix(tensor_name, shape)) return FormatChoice();
  for (size_t i = matchers_.size(); i-- > 0;) {
    if (matchers_[i]->Matches(tensor_name)) return overrides_[i].choice;
  }
  const auto entry = classes_.find(ClassifyTensor(tensor_name));
  return entry == classes_.end() ? FormatChoice() : entry->second;
}

}  // namespace marlin
