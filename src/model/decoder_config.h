// The decoder's arithmetic as described by config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/decoder.h"
#include "marlin/gemm.h"
#include "marlin/moe.h"
#include "marlin/status.h"
#include "model/generation_config.h"
#include "model/rotary.h"
#include "recipe/decoder_shape.h"

namespace marlin {

/// LayerConfig::rotary of a layer that does not rotate queries and keys.
inline constexpr size_t kNoRotary = SIZE_MAX;

/// The facts in which layers of a decoder may differ.
struct LayerConfig {
  bool mixes = true;  ///< HasMixer.
  MixerKind mixer = MixerKind::kAttention;
  Dimensions sizes;          ///< DimensionsOfLayer.
  int64_t window = 0;        ///< Tokens that attention sees; 0: all.
  bool chunked = false;      ///< AttentionOptions::chunked.
  size_t rotary = 0;         ///< Index of DecoderConfig::rotaries, or kNoRotary.
  float score_scale = 0.0F;  ///< Factor of query-key scores.
  PositionScale query_scale;
};

struct DecoderConfig {
  const Family* family = nullptr;
  Dimensions shape;
  int64_t max_positions = 0;
  float epsilon = 1e-6F;
  float embedding_scale = 1.0F;        ///< Factor of embeddings.
  float layer_embedding_scale = 1.0F;  ///< Factor of what a table has for a layer.
  float residual_scale = 1.0F;         ///< Factor of what a block adds to hidden states.
  float logit_scale = 1.0F;
  Activation activation = Activation::kSilu;
  float gate_limit = 0.0F;  ///< The clamp of gpt-oss's GLU; 0: none.
  float gate_alpha = 1.702F;
  std::vector<Rotary> rotaries;  ///< The layers' RoPE, each once.
  bool interleaved_rotary = false;
  float score_softcap = 0.0F;  ///< AttentionOptions::softcap.
  float logit_softcap = 0.0F;  ///< The logits' cap, as in ScaleAndCap; 0: none.
  RouterOptions router;        ///< Without choice_bias.
  std::vector<LayerConfig> layers;
  GenerationDefaults generation;
  bool multimodal = false;         ///< The text model of a checkpoint with other parts.
  std::vector<std::string> notes;  ///< Lines about what was read otherwise than written.

  /// Hidden states are kept divided by residual_scale, so that blocks add what they compute: the
  /// factor of the embeddings, and the epsilon with which norms give what they give undivided.
  float hidden_scale() const { return embedding_scale / residual_scale; }
  float hidden_epsilon() const { return epsilon / (residual_scale * residual_scale); }

  const LayerConfig& layer(int64_t index) const { return layers[static_cast<size_t>(index)]; }
  MixerKind mixer(int64_t index) const { return layer(index).mixer; }
  /// Null: the layer does not rotate queries and keys.
  const Rotary* rotary(int64_t index) const {
    const size_t rotary = layer(index).rotary;
    return rotary == kNoRotary ? nullptr : &rotaries[rotary];
  }
  /// The dimensions of layers that see all tokens.
  Dimensions GlobalSizes() const {
    return shape.global_layers.empty() ? shape
                                       : DimensionsOfLayer(shape, shape.global_layers.front());
  }
};

/// The decoder that is the model's first layer which predicts further tokens (MTP), alone.
DecoderConfig PredictionConfig(const DecoderConfig& model);

/// Reads a config.json, and the files next to it that say how to generate. Errors: kUnsupported
/// naming the model_type and the supported ones, a feature, or a key that is not understood and may
/// change results; kMalformedFile naming the key.
Result<DecoderConfig> ReadDecoderConfig(std::string_view config_json,
                                        const GenerationFiles& files = {});

}  // namespace marlin
