// Presets and the format choice of one tensor.
#include "marlin/recipe.h"

#include <fmt/core.h>

#include <optional>
#include <set>

#include "base/macros.h"
#include "base/printable.h"
#include "recipe/expert_name.h"
#include "recipe/glob.h"
#include "recipe/regex.h"

namespace marlin {

struct MixedPrecisionConfig::Matcher {
  std::string glob;
  std::optional<Regex> regex;  // Replaces the glob.

  bool Matches(std::string_view name) const {
    return regex ? regex->Search(name) : GlobMatch(glob, name);
  }
};

namespace {

struct PresetRow {
  LayerClass layer_class;
  Format format;
  int64_t group_size;
};

constexpr LayerClass kUniformClasses[] = {
    LayerClass::kAttentionQkv, LayerClass::kAttentionOut, LayerClass::kMlpGate,
    LayerClass::kMlpUp,        LayerClass::kMlpDown,      LayerClass::kMoeSharedExpert,
    LayerClass::kMoeExpert,
};

// The ends of the presets. In these formats they cost less than a tenth of what the rest of each
// preset costs, by docs/quality.md. A table that is the head, too, has the embedding's.
constexpr PresetRow kEnds[] = {
    {LayerClass::kEmbedding, Format::kS8, 64},
    {LayerClass::kLmHead, Format::kInt6, 64},
};

// Tensors that every token uses (attention, shared experts, dense layers) are a small part of a
// mixture-of-experts model and get the finer groups; the many routed experts get the coarser ones.
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

void SetRows(std::span<const PresetRow> rows, MixedPrecisionConfig* recipe) {
  for (const PresetRow& row : rows) {
    recipe->Set(row.layer_class, Quantized(row.format, row.group_size));
  }
}

MixedPrecisionConfig MakePreset(std::string name, std::span<const PresetRow> rows) {
  MixedPrecisionConfig recipe;
  recipe.set_name(std::move(name));
  SetRows(rows, &recipe);
  SetRows(kEnds, &recipe);
  return recipe;
}

MixedPrecisionConfig MakeUniform(std::string name, const FormatChoice& choice) {
  MixedPrecisionConfig recipe;
  recipe.set_name(std::move(name));
  for (LayerClass layer_class : kUniformClasses) recipe.Set(layer_class, choice);
  return recipe;
}

}  // namespace

MixedPrecisionConfig MixedPrecisionConfig::DefaultDense() {
  MixedPrecisionConfig recipe = MakeUniform("default_dense", Quantized(Format::kFp4E2M1, 128));
  SetRows(kEnds, &recipe);
  return recipe;
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

Result<MixedPrecisionConfig> MixedPrecisionConfig::WithSparsity(Sparsity sparsity) const {
  MixedPrecisionConfig changed = *this;
  for (auto& [layer_class, choice] : changed.classes_) {
    if (!choice.quantized() || IsModelEnd(layer_class)) continue;
    choice.sparsity = sparsity;
    const Result<FormatChoice> possible = ParseFormatChoice(choice.ToString());
    if (!possible.ok()) {
      return possible.status().WithContext(std::string(LayerClassName(layer_class)));
    }
  }
  return changed;
}

Status MixedPrecisionConfig::AddOverride(RecipeOverride entry) {
  if (entry.pattern.empty()) {
    return Status(Code::kInvalidArgument, "override: the pattern is empty");
  }
  if (entry.pattern.size() > kMaxPatternBytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("override: a pattern of {} bytes, at most {} are accepted",
                              entry.pattern.size(), kMaxPatternBytes));
  }
  auto matcher = std::make_shared<Matcher>();
  if (entry.is_regex) {
    Result<Regex> regex = Regex::Compile(entry.pattern);
    if (!regex.ok()) {
      return Status(regex.status().code(),
                    fmt::format("override: '{}' is not a regular expression: {}",
                                Printable(entry.pattern), regex.status().message()));
    }
    matcher->regex = *std::move(regex);
  } else {
    matcher->glob = entry.pattern;
  }
  overrides_.push_back(std::move(entry));
  matchers_.push_back(std::move(matcher));
  return Status();
}

Status MixedPrecisionConfig::CheckTensors(std::span<const TensorShape> tensors) const {
  if (tensors_.empty()) return {};
  std::set<std::string_view> present;
  for (const TensorShape& tensor : tensors) present.insert(tensor.name);
  for (const auto& [name, choice] : tensors_) {
    if (present.contains(name)) continue;
    return Status(Code::kInvalidArgument,
                  fmt::format("recipe of another model: it has no tensor \"{}\"", Printable(name)));
  }
  return {};
}

FormatChoice MixedPrecisionConfig::Choose(std::string_view tensor_name, const Shape& shape) const {
  if (!IsWeightMatrix(tensor_name, shape)) return FormatChoice();
  for (size_t i = matchers_.size(); i-- > 0;) {
    if (matchers_[i]->Matches(tensor_name)) return overrides_[i].choice;
  }
  if (const auto own = tensors_.find(tensor_name); own != tensors_.end()) return own->second;
  const LayerClass layer_class = ClassifyTensor(tensor_name);
  if (hot_experts_ && layer_class == LayerClass::kMoeExpert) {
    const auto place = ParseExpertPlace(tensor_name);
    if (place && hot_experts_->Contains(place->layer, place->expert)) return hot_experts_->choice;
  }
  const auto entry = classes_.find(layer_class);
  return entry == classes_.end() ? FormatChoice() : entry->second;
}

}  // namespace marlin
