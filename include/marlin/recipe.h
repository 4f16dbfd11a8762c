// Mixed-precision recipes: tensor name -> layer class -> format and group size.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/format.h"
#include "marlin/quantize.h"
#include "marlin/status.h"

namespace marlin {

/// The part that a tensor plays in a decoder.
enum class LayerClass : uint8_t {
  kEmbedding,
  kLmHead,
  kNorm,
  kAttentionQkv,
  kAttentionOut,
  kMlpGate,
  kMlpUp,
  kMlpDown,
  kMoeRouter,
  kMoeSharedExpert,
  kMoeExpert,
  kOther,
};
inline constexpr int kLayerClassCount = 12;
/// "embedding", "lm_head", "norm", "attention_qkv", ...
std::string_view LayerClassName(LayerClass layer_class);
Result<LayerClass> ParseLayerClass(std::string_view name);

/// Derives the class from a Hugging Face tensor name; what is unknown is kOther.
LayerClass ClassifyTensor(std::string_view name);

/// How one tensor is stored: a quantized format with its parameters, or kept in 16 bits.
struct FormatChoice {
  bool keep = true;  ///< Copied unchanged; the other fields mean nothing then.
  Format format = Format::kFp4E2M1;
  int64_t group_size = 128;
  ScaleType scale_type = ScaleType::kF16;
  bool symmetric = false;
  /// "keep" or "fp4_e2m1/g128", with "/sym" and "/e8m0" appended where they differ from default.
  std::string ToString() const;
};
/// Parses "FORMAT/gN[/SCALE_TYPE][/sym]" or "keep". Errors: kInvalidArgument naming the part.
Result<FormatChoice> ParseFormatChoice(std::string_view text);

/// A choice for all tensors whose name matches a pattern; later ones win.
struct RecipeOverride {
  std::string pattern;
  bool is_regex = false;  ///< Regular expression (found anywhere in the name), else a glob.
  FormatChoice choice;
};

/// Which format every tensor gets. Presets: default_dense, default_moe, aggressive_moe and
/// uniform:FORMAT/gN; or a JSON file, see docs/howto/recipes.md.
class MixedPrecisionConfig {
 public:
  static MixedPrecisionConfig DefaultDense();
  static MixedPrecisionConfig DefaultMoe();
  static MixedPrecisionConfig AggressiveMoe();
  static Result<MixedPrecisionConfig> Uniform(std::string_view choice);
  static Result<MixedPrecisionConfig> FromJson(std::string_view text);
  static Result<MixedPrecisionConfig> FromFile(const std::string& path);
  /// A preset's name, "uniform:...", or the path of a JSON file.
  static Result<MixedPrecisionConfig> FromNameOrFile(const std::string& name);

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  void Set(LayerClass layer_class, FormatChoice choice) { classes_[layer_class] = choice; }
  void AddOverride(RecipeOverride entry) { overrides_.push_back(std::move(entry)); }
  const std::vector<RecipeOverride>& overrides() const { return overrides_; }

  /// The choice for a tensor: the last matching override, else that of its class. Biases, vectors
  /// and tensors of a class without an entry are kept.
  FormatChoice Choose(std::string_view tensor_name, const Shape& shape) const;

  /// The recipe as a JSON document that FromJson reads back.
  std::string ToJson() const;

 private:
  std::string name_;
  std::map<LayerClass, FormatChoice> classes_;
  std::vector<RecipeOverride> overrides_;
};

}  // namespace marlin
