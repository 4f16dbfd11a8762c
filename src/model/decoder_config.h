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

  MixerKind mixer(int64_t layer) const { return MixerOfLayer(*family, layer); }
};

/// Reads a config.json, and the files next to it that say how to generate. Errors: kUnsupported
/// naming the model_type and the supported ones, a feature, or a key that is not understood and may
/// change results; kMalformedFile naming the key.
Result<DecoderConfig> ReadDecoderConfig(std::string_view config_json,
                                        const GenerationFiles& files = {});

}  // namespace marlin
