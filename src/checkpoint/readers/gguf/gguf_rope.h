// The RoPE scaling of a GGUF file as config.json describes it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "checkpoint/readers/gguf/gguf_file.h"
#include "checkpoint/readers/gguf/gguf_names.h"

namespace marlin {

/// Keys of RoPE after the architecture that are read.
inline constexpr std::string_view kGgufRopeKeys[] = {
    "rope.dimension_count",
    // Text has equal positions in all sections.
    "rope.dimension_sections",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
};

class GgufRope {
 public:
  /// `factors`: the values of rope_freqs.weight.
  GgufRope(const GgufArchitecture& architecture, const GgufMetadata& metadata,
           std::span<const float> factors)
      : architecture_(architecture), metadata_(metadata), factors_(factors) {}

  /// The object rope_scaling; empty without scaling. What config.json cannot say becomes a
  /// rope_type that names it, which running the model refuses.
  Json Scaling() const;

 private:
  std::string Key(std::string_view key) const;
  double Real(std::string_view key, double fallback) const;
  Json Yarn(double factor) const;
  Json FromFactors() const;

  const GgufArchitecture& architecture_;
  const GgufMetadata& metadata_;
  std::span<const float> factors_;
};

}  // namespace marlin
