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

/// Divisors of the frequencies of a head's pairs, from tensors of a file; empty without them.
struct GgufRopeFactors {
  std::span<const float> all;          ///< rope_freqs.weight.
  std::span<const float> short_texts;  ///< rope_factors_short.weight: within the trained context.
  std::span<const float> long_texts;   ///< rope_factors_long.weight.
};

class GgufRope {
 public:
  GgufRope(const GgufArchitecture& architecture, const GgufMetadata& metadata,
           const GgufRopeFactors& factors)
      : architecture_(architecture),
        metadata_(metadata),
        factors_(factors.all),
        short_factors_(factors.short_texts),
        long_factors_(factors.long_texts) {}

  /// The object rope_scaling; empty without scaling. What config.json cannot say becomes a
  /// rope_type that names it, which running the model refuses.
  Json Scaling() const;

 private:
  std::string Key(std::string_view key) const;
  double Real(std::string_view key, double fallback) const;
  Json Yarn(double factor) const;
  Json LongRope() const;
  Json FromFactors() const;

  const GgufArchitecture& architecture_;
  const GgufMetadata& metadata_;
  std::span<const float> factors_;
  std::span<const float> short_factors_;
  std::span<const float> long_factors_;
};

}  // namespace marlin
