// Mixed-precision recipes: tensor name -> layer class -> format and group size.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "marlin/format.h"
#include "marlin/quantize.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The role of a tensor in a decoder.
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

/// Whether a class is the embedding or the head, which options for a whole recipe do not change.
bool IsModelEnd(LayerClass layer_class);

/// Derives the class from a Hugging Face tensor name; kOther for an unknown name.
LayerClass ClassifyTensor(std::string_view name);

/// True if name and shape denote a weight matrix: rank 2 and "*.weight", or a rank-3 stack of
/// experts. False for biases, vectors, empty tensors and scales of already quantized formats.
bool IsWeightMatrix(std::string_view name, const Shape& shape);

/// How one tensor is stored: quantized, rounded to bf16, fp16 or fp32, or copied unchanged.
struct FormatChoice {
  bool keep = true;  ///< Copy unchanged; the other fields are ignored.
  Format format = Format::kFp4E2M1;
  int64_t group_size = 128;  ///< Weights along K per scale; 0: one group for all of K.
  ScaleType scale_type = ScaleType::kF16;
  bool symmetric = false;
  bool fractional_zeros = false;  ///< As QuantizeOptions::fractional_zeros.
  Sparsity sparsity = Sparsity::kDense;
  E8M0Rule e8m0_rule = E8M0Rule::kDefault;
  int64_t input_hadamard = 0;  ///< As QuantizeOptions::input_hadamard.
  /// "keep" or "fp4_e2m1/g128", with "/e8m0", "/ceil", "/sym", "/frac", "/2:4" and "/h128" appended
  /// if not the default.
  std::string ToString() const;
  /// True if the weights become codes and scales.
  bool quantized() const { return !keep && GetFormatInfo(format).quantized; }

  friend bool operator==(const FormatChoice&, const FormatChoice&) = default;
};
/// Parses "FORMAT/gN[/SCALE_TYPE][/floor|/ceil|/nearest][/sym|/frac][/2:4][/hN]" (gN: a multiple of
/// 16, or K for one group; hN: Hadamard blocks of a power of two), "bf16", "fp16", "fp32" or
/// "keep". Errors: kInvalidArgument naming the invalid part.
Result<FormatChoice> ParseFormatChoice(std::string_view text);
/// Validates a group size. Errors: kInvalidArgument unless it is 0 or a positive multiple of 16.
Status CheckGroupSize(int64_t group_size);

/// A tensor of a checkpoint, without its data.
struct TensorShape {
  std::string_view name;
  Shape shape;
};

/// A choice for all tensors whose name matches a pattern; the last matching override wins.
struct RecipeOverride {
  std::string pattern;
  bool is_regex = false;  ///< Regular expression, unanchored; otherwise a glob on the whole name.
  FormatChoice choice;
};

struct RoutingFrequencies;

/// A choice for some experts of every layer instead of their class's: the experts that texts select
/// most often. They must be stored one by one.
struct HotExperts {
  struct Layer {
    int64_t layer = 0;
    int64_t experts = 0;       ///< The model's.
    std::vector<int64_t> hot;  ///< In ascending order.

    friend bool operator==(const Layer&, const Layer&) = default;
  };
  FormatChoice choice;
  std::vector<Layer> layers;  ///< In ascending order.
  std::string model_type;     ///< The frequencies' type, "qwen3_moe"; empty: unknown.

  /// The most frequent experts of every layer, ties to the lower one: `fraction` of them in (0, 1],
  /// rounded, at least one.
  static HotExperts Of(const RoutingFrequencies& frequencies, double fraction,
                       const FormatChoice& choice);
  bool Contains(int64_t layer, int64_t expert) const;

  friend bool operator==(const HotExperts&, const HotExperts&) = default;
};

/// A recipe: the format of every tensor. Presets: default_dense, default_moe, aggressive_moe and
/// uniform:FORMAT/gN; or a JSON file, see docs/howto/recipes.md.
class MixedPrecisionConfig {
 public:
  /// The presets; docs/howto/recipes.md has their tables.
  static MixedPrecisionConfig DefaultDense();
  static MixedPrecisionConfig DefaultMoe();
  static MixedPrecisionConfig AggressiveMoe();
  /// The recipe where none is named: default_moe for a model with experts, otherwise default_dense.
  static MixedPrecisionConfig Default(bool has_experts) {
    return has_experts ? DefaultMoe() : DefaultDense();
  }
  /// One choice for every attention, MLP and expert matrix, e.g. "fp4_e2m1/g32".
  static Result<MixedPrecisionConfig> Uniform(std::string_view choice);
  /// Parses a recipe document; a file of frequencies that it names is relative to the working
  /// directory. Errors: kInvalidArgument naming the unknown or invalid key, class or format; and as
  /// RoutingFrequencies::FromFile.
  static Result<MixedPrecisionConfig> FromJson(std::string_view text);
  /// Reads a recipe file; files that it names are relative to it. Errors: kIo, and as
  /// FromJson, prefixed with the path.
  static Result<MixedPrecisionConfig> FromFile(const std::string& path);
  /// Accepts a preset's name, "uniform:...", or the path of a JSON file. Errors: as FromFile.
  static Result<MixedPrecisionConfig> FromNameOrFile(const std::string& name);

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  /// Sets the choice of a class.
  void Set(LayerClass layer_class, FormatChoice choice) { classes_[layer_class] = choice; }
  const std::map<LayerClass, FormatChoice>& classes() const { return classes_; }
  /// Sets the choice of one tensor by its whole name: it precedes hot experts and classes.
  void SetTensor(std::string name, FormatChoice choice) { tensors_[std::move(name)] = choice; }
  const std::map<std::string, FormatChoice, std::less<>>& tensors() const { return tensors_; }
  /// Checks that a model with these tensors has those that SetTensor named. Errors:
  /// kInvalidArgument naming the first that is missing.
  Status CheckTensors(std::span<const TensorShape> tensors) const;
  /// The recipe with another sparsity of every quantized class; the embedding, the head, overrides
  /// and hot experts keep theirs. Errors: as ParseFormatChoice, beginning with the class.
  Result<MixedPrecisionConfig> WithSparsity(Sparsity sparsity) const;
  /// Adds an override with precedence over earlier ones. Errors: kInvalidArgument for an empty
  /// pattern or a malformed regular expression.
  Status AddOverride(RecipeOverride entry);
  const std::vector<RecipeOverride>& overrides() const { return overrides_; }

  void set_hot_experts(HotExperts hot) { hot_experts_ = std::move(hot); }
  const std::optional<HotExperts>& hot_experts() const { return hot_experts_; }
  /// Checks that hot experts fit a model of this type (empty: unknown) with these tensors.
  /// Errors: kInvalidArgument naming both types, the layer that differs, or a tensor that holds
  /// several experts.
  Status CheckHotExperts(std::string_view model_type, std::span<const TensorShape> tensors) const;

  /// The choice for a tensor: the last matching override, otherwise its own, otherwise the hot
  /// experts', otherwise its class's. Tensors for which IsWeightMatrix is false, and classes
  /// without an entry, are kept.
  FormatChoice Choose(std::string_view tensor_name, const Shape& shape) const;

  /// The recipe as a JSON document that FromJson parses.
  std::string ToJson() const;

 private:
  struct Matcher;

  std::string name_;
  std::map<LayerClass, FormatChoice> classes_;
  std::map<std::string, FormatChoice, std::less<>> tensors_;
  std::vector<RecipeOverride> overrides_;
  std::vector<std::shared_ptr<const Matcher>> matchers_;  ///< One per override.
  std::optional<HotExperts> hot_experts_;
};

}  // namespace marlin
#pragma GCC visibility pop
