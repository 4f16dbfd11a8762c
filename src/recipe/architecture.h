// The tensors of a decoder as implied by its config.json, without any weights.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/recipe.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// One tensor of a checkpoint, named and shaped as on Hugging Face.
struct ModelTensor {
  std::string name;
  Shape shape;
  LayerClass layer_class = LayerClass::kOther;
  int64_t layer = -1;        ///< Decoder layer; -1 for embeddings, the final norm and lm_head.
  bool routed = false;       ///< One routed expert, or a stack of them: used by some tokens only.
  bool input_first = false;  ///< Matrices are stored [in, out] instead of [out, in].
};

/// A model's dimensions and tensors.
struct ModelArchitecture {
  std::string model_type;
  int64_t hidden_size = 0;
  int64_t layer_count = 0;
  int64_t vocabulary_size = 0;
  int64_t expert_count = 0;  ///< 0 for a dense model.
  int64_t experts_per_token = 0;
  bool tied_embeddings = false;   ///< lm_head shares the embedding table.
  int64_t kv_cache_elements = 0;  ///< Per token, all layers.
  int64_t state_elements = 0;     ///< MixerState::fixed per sequence, all layers.
  /// The keys and values of all heads that prefill may expand a token's state to, in one layer.
  int64_t expanded_elements = 0;
  std::vector<ModelTensor> tensors;
  /// Multi-token-prediction layers of some checkpoints (glm4_moe, deepseek_v3): unused in ordinary
  /// decoding and not part of published parameter counts.
  std::vector<ModelTensor> prediction_tensors;
};

/// Describes a model. Errors: kMalformedFile for text that is not a JSON object, kUnsupported
/// naming an unknown model_type and the known ones, kMalformedFile naming a missing or absurd
/// value.
Result<ModelArchitecture> DescribeModel(std::string_view config_json);

/// Elements of all the tensors; DescribeModel has checked that they do not overflow.
int64_t ParameterCount(const std::vector<ModelTensor>& tensors);

/// Parameters used by one token: all but the routed experts that it is not sent to.
int64_t ActiveParameterCount(const ModelArchitecture& model);

}  // namespace marlin
