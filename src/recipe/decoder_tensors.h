// The tensor names of decoders on Hugging Face, defined only here. Listing a model (architecture.h)
// and loading one (model/load.cc) both walk these descriptions.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/function_ref.h"
#include "marlin/tensor.h"
#include "recipe/decoder_shape.h"

namespace marlin {

inline constexpr std::string_view kEmbeddingTensor = "model.embed_tokens.weight";
inline constexpr std::string_view kHeadTensor = "lm_head.weight";
/// The embeddings of all layers, side by side.
inline constexpr std::string_view kLayerTableTensor = "model.embed_tokens_per_layer.weight";

/// "model.layers.<layer>."
std::string LayerPrefix(int64_t layer);

/// The module of types that keep layers which predict further tokens (MTP) apart from the others.
inline constexpr std::string_view kPredictionPrefix = kOwnModule.module;
/// The same where the layers from Dimensions::layers on predict further tokens (MTP).
std::string LayerPrefix(const Family& family, const Dimensions& dimensions, int64_t layer);

/// Whether a tensor or module predicts further tokens: in layers beyond the model's own, or in that
/// module.
bool IsPredictionTensor(const Dimensions& dimensions, std::string_view name);

/// Names of an expert's gate, up and down projections, in files that store experts one by one.
using ExpertProjections = std::array<std::string_view, 3>;
inline constexpr ExpertProjections kUsualProjections = {"gate_proj", "up_proj", "down_proj"};
inline constexpr ExpertProjections kShortProjections = {"w1", "w3", "w2"};

/// A linear layer: "<name>.weight" [out, in] and, with a bias, "<name>.bias" [out]. Absent if
/// unnamed.
struct LinearTensors {
  std::string name;
  int64_t in = 0;
  int64_t out = 0;
  bool bias = false;

  bool present() const { return !name.empty(); }
  std::string weight() const { return name + ".weight"; }
  std::string bias_name() const { return name + ".bias"; }
};

/// A norm's weights, or another vector, by its full name. Absent if unnamed.
struct VectorTensor {
  std::string name;
  int64_t count = 0;
  bool one_plus = false;  ///< As Family::one_plus_norms.
  /// The taps of a depthwise convolution; 0: any other vector.
  int64_t conv_width = 0;
  bool as_row = false;  ///< Stored as [1, count].
  float scale = 1.0F;   ///< Factor of what is stored.

  bool present() const { return !name.empty(); }
  /// As stored: [count], [1, count] or [channels, 1, conv_width].
  Shape shape() const {
    if (as_row) return {1, count};
    return conv_width == 0 ? Shape{count} : Shape{count / conv_width, 1, conv_width};
  }
};

/// Names the tensors of a layer.
class LayerNames {
 public:
  explicit LayerNames(int64_t layer) : prefix_(LayerPrefix(layer)) {}
  /// Names that begin with `prefix`.
  explicit LayerNames(std::string prefix) : prefix_(std::move(prefix)) {}

  /// `name` without LayerPrefix and ".weight".
  LinearTensors Linear(std::string_view name, int64_t in, int64_t out, bool bias = false) const {
    return {prefix_ + std::string(name), in, out, bias};
  }
  /// `name` without LayerPrefix.
  VectorTensor Vector(std::string_view name, int64_t count) const {
    return {prefix_ + std::string(name), count};
  }
  /// A norm as the family stores it; `name` without LayerPrefix and ".weight". Absent if empty.
  VectorTensor Norm(const Family& family, std::string_view name, int64_t count) const;
  const std::string& prefix() const { return prefix_; }

 private:
  std::string prefix_;
};

/// Origin of an input's features, to which a factor of a feature can move: a norm with a weight per
/// feature, or output `outputs[i]` of a linear layer for feature i, which several features may
/// share. Neither: factors cannot move.
struct InputSource {
  VectorTensor norm;
  LinearTensors linear;
  std::vector<int64_t> outputs;
};

/// The norm before the head.
VectorTensor FinalNorm(const Family& family, const Dimensions& dimensions);

/// The factor of a layer's embedding, which is a sum of two: 1 / sqrt(2).
inline constexpr float kLayerEmbeddingFactor = 0.70710678F;

/// The part of the layers' own embeddings that follows from the model's:
/// norm(projection(embedding)) of each layer's features. Absent without such embeddings.
struct LayerEmbeddingTensors {
  LinearTensors projection;
  VectorTensor norm;  ///< Times the factor of the sum.
};
LayerEmbeddingTensors LayerEmbeddingsOf(const Family& family, const Dimensions& dimensions);

/// Linear layers of one input, which are loaded as one projection; absent if empty.
struct ProjectionTensors {
  std::vector<LinearTensors> layers;
  size_t input = 0;  ///< 0: norm(hidden); from 1 on: an input that the mixer computes for it.
};

/// The parameters of a layer's mixer, in the mixer's own order.
struct MixerTensors {
  std::vector<ProjectionTensors> projections;
  LinearTensors out;  ///< From what the mixer mixes to what it adds to the hidden states.
  std::vector<VectorTensor> vectors;
  /// Parameters that a checkpoint has and that nothing reads.
  std::vector<LinearTensors> unused_linears;
  std::vector<VectorTensor> unused_vectors;
  std::vector<std::string> ignored;  ///< The same that it need not have.

  /// All linear layers that are present, `out` last.
  std::vector<LinearTensors> Linears() const;
};

struct MlpTensors {
  std::vector<LinearTensors> gate_up;  ///< Gate and up, or one fused layer.
  LinearTensors down;
};

/// A stacked tensor of all experts' matrices, by its full name: [experts, in, out] if
/// IsStoredInOut, otherwise [experts, out, in]; and its biases [experts, out], if any.
struct ExpertStack {
  std::string name;
  int64_t in = 0;
  int64_t out = 0;
  std::string bias_name;
};

/// The experts of a layer: either `each` or the two stacks.
struct ExpertsTensors {
  LinearTensors router;
  VectorTensor router_norm;  ///< ExpertStyle::router_norm.
  VectorTensor norm;         ///< NormNames::experts.
  VectorTensor out_norm;     ///< NormNames::experts_out.
  VectorTensor correction_bias;
  VectorTensor scales;  ///< ExpertStyle::scales.
  std::vector<MlpTensors> each;
  ExpertStack gate_up;
  ExpertStack down;
  MlpTensors shared;
  LinearTensors shared_gate;
};

struct LayerTensors {
  VectorTensor input_norm;
  VectorTensor scalar;  ///< Family::layer_scalars.
  MixerTensors mixer;
  VectorTensor mlp_norm;
  VectorTensor attention_out_norm;
  VectorTensor mlp_out_norm;
  VectorTensor beside_out_norm;  ///< NormNames::beside_out, if it has both.
  MlpTensors mlp;                ///< Unless IsSparse, or if Family::mlp_beside.
  ExpertsTensors experts;
  // After the rest of a layer: hidden += norm(projection(activation(gate(hidden)) * the layer's
  // embedding)). Absent without such embeddings.
  LinearTensors embedding_gate;
  LinearTensors embedding_projection;
  VectorTensor embedding_norm;
};

/// A layer's tensors, with experts in the given style.
LayerTensors DescribeLayer(const Family& family, const Dimensions& dimensions, int64_t layer,
                           const ExpertStyle& style);

/// The tensors that a layer which predicts further tokens has in addition.
struct PredictionTensors {
  VectorTensor embedding_norm;
  VectorTensor hidden_norm;
  LinearTensors join;  ///< From [the token's embedding, hidden state], both normalized.
  VectorTensor norm;   ///< Before the head.
  /// Copies of the model's embedding and head that some checkpoints store; empty: there are none.
  std::string embedding;
  std::string head;
};

/// `layer` is at least Dimensions::layers.
PredictionTensors DescribePrediction(const Family& family, const Dimensions& dimensions,
                                     int64_t layer);

/// The style in which a checkpoint stores the experts of a layer: the family's, or another in use
/// for it. `has` tells whether a weight of that name exists.
ExpertStyle FindExpertStyle(const Family& family, const Dimensions& dimensions, int64_t layer,
                            FunctionRef<bool(const std::string&)> has);

}  // namespace marlin
