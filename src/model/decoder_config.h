// The decoder's arithmetic as described by config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/gemm.h"
#include "marlin/moe.h"
#include "marlin/status.h"
#include "model/generation_config.h"
#include "model/rotary.h"
#include "recipe/decoder_shape.h"

namespace marlin {

/// Epsilon of the norms inside MLA, which the config does not set.
inline constexpr float kLatentEpsilon = 1e-6F;

struct DecoderConfig {
  const Family* family = nullptr;
  Dimensions shape;
  int64_t max_positions = 0;
  float epsilon = 1e-6F;
  Activation activation = Activation::kSilu;
  float gate_limit = 0.0F;  ///< The clamp of gpt-oss's GLU; 0: none.
  float gate_alpha = 1.702F;
  Rotary rotary;
  bool interleaved_rotary = false;
  float score_scale = 0.0F;      ///< Factor of query-key scores.
  std::vector<int64_t> windows;  ///< One per layer; 0: full attention.
  RouterOptions router;          ///< Without choice_bias.
  GenerationDefaults generation;
  std::vector<std::string> notes;  ///< Lines about what was read otherwise than written.

  bool latent() const { return family->attention == AttentionKind::kLatent; }
  /// Dimension of a query or key head, and of a value head.
  int64_t key_dim() const { return latent() ? shape.nope_dim + shape.rope_dim : shape.head_dim; }
  int64_t value_dim() const { return latent() ? shape.v_dim : shape.head_dim; }
  /// The KV heads in the cache, and their dimensions. MLA caches the latent and the RoPE part that
  /// all heads share as the key of one head, whose first features are its value.
  int64_t cache_heads() const { return latent() ? 1 : shape.kv_heads; }
  int64_t cache_key_dim() const {
    return latent() ? shape.kv_rank + shape.rope_dim : shape.head_dim;
  }
  int64_t cache_value_dim() const { return latent() ? shape.kv_rank : shape.head_dim; }
};

/// Reads a config.json, and the files beside it that say how to generate. Errors: kUnsupported
/// naming the model_type and the supported ones, a feature, or a key that is not understood and may
/// change results; kMalformedFile naming the key.
Result<DecoderConfig> ReadDecoderConfig(std::string_view config_json,
                                        const GenerationFiles& files = {});

}  // namespace marlin
