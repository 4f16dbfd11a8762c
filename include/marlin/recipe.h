// Mixed-precision recipes: tensor name -> layer class -> format and group size.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/format.h"
#include "marlin/quantize.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The part that a tensor plays in a decoder.
enum class LayerClass : uint8_t {
  kEmbedding,
  kLmHead,
  kNorm,
  kAttentionQkv,
  kAttentionOut,
  kMlpGate,  ///< Also a dense layer's fused gate and up projection.
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
/// Finds a class by name. Errors: kInvalidArgument listing the known names.
Result<LayerClass> ParseLayerClass(std::string_view name);

/// Derives the class from a Hugging Face tensor name; what is unknown is kOther.
LayerClass ClassifyTensor(std::string_view name);

/// True when a tensor is a weight matrix by its name and shape: rank 2 and called "*.weight", or a
/// rank-3 stack of experts. Biases, vectors, empty tensors and the scales of other formats are not.
bool IsWeightMatrix(std::string_view name, const Shape& shape);

/// How one tensor is stored: a quantized format with its parameters, rounded to bf16, fp16 or fp32,
/// or kept as it is.
struct FormatChoice {
  bool keep = true;  ///< Copied unchanged; the other fields mean nothing then.
  Format format = Format::kFp4E2M1;
  int64_t group_size = 128;  ///< Weights along K per scale; 0: one group for all of K.
  ScaleType scale_type = ScaleType::kF16;
  bool symmetric = false;
  /// "keep" or "fp4_e2m1/g128", with "/e8m0" and "/sym" appended where they differ from default.
  std::string ToString() const;
  /// True when the weights get codes and scales.
  bool quantized() const { return !keep && GetFormatInfo(format).quantized; }

  friend bool operator==(const FormatChoice&, const FormatChoice&) = default;
};
/// Parses "FORMAT/gN[/SCALE_TYPE][/sym]" (N: a multiple of 16, or K for one group), "bf16", "fp16",
/// "fp32" or "keep". Errors: kInvalidArgument naming the part.
Result<FormatChoice> ParseFormatChoice(std::string_view text);
/// Checks a group size given by a user. Errors: kInvalidArgument unless it is 0 or a multiple
/// of 16.
Status CheckGroupSize(int64_t group_size);

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
  /// Every attention, MLP and expert matrix in one choice, e.g. "fp4_e2m1/g32".
  static Result<MixedPrecisionConfig> Uniform(std::string_view choice);
  /// Errors: kInvalidArgument naming the unknown or wrong key, class or format.
  static Result<MixedPrecisionConfig> FromJson(std::string_view text);
  /// Errors: kIo, and those of FromJson with the path in front.
  static Result<MixedPrecisionConfig> FromFile(const std::string& path);
  /// A preset's name, "uniform:...", or the path of a JSON file.
  static Result<MixedPrecisionConfig> FromNameOrFile(const std::string& name);

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  void Set(LayerClass layer_class, FormatChoice choice) { classes_[layer_class] = choice; }
  const std::map<LayerClass, FormatChoice>& classes() const { return classes_; }
  /// Adds an override that wins over those before it. Errors: kInvalidArgument for an empty pattern
  /// or a malformed regular expression.
  Status AddOverride(RecipeOverride entry);
  const std::vector<RecipeOverride>& overrides() const { return overrides_; }

  /// The choice for a tensor: the last matching override, else that of its class. What is not
  /// IsWeightMatrix and classes without an entry are kept.
  FormatChoice Choose(std::string_view tensor_name, const Shape& shape) const;

  /// The recipe as a JSON document that FromJson reads back.
  std::string ToJson() const;

 private:
  struct Matcher;

  std::string name_;
  std::map<LayerClass, FormatChoice> classes_;
  std::vector<RecipeOverride> overrides_;
  std::vector<std::shared_ptr<const Matcher>> matchers_;  ///< One for each override.
};

}  // namespace marlin
#pragma GCC visibility pop
