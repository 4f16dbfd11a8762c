// The RoPE parameters of a config.json, wherever they stand.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "recipe/typed_config.h"

namespace marlin {

enum class RopeType : uint8_t {
  kDefault,
  kLinear,
  /// Changes frequencies beyond the trained context only, which such a model is limited to here.
  kDynamic,
  kLlama3,
  kYarn,
  /// Has other frequencies within the trained context than beyond it, which such a model is limited
  /// to here.
  kLongRope,
  kProportional,  ///< Rotates a part of the pairs, with the frequencies of whole heads.
};
/// The name in config.json: "yarn".
std::string_view RopeTypeName(RopeType type);

struct RopeParameters {
  RopeType type = RopeType::kDefault;
  double theta = 10000;
  double partial = 1;           ///< The part of a head that is rotated.
  double alpha = 1;             ///< Stretches theta as NTK-aware scaling does.
  double factor = 1;            ///< All types but kDefault.
  double original_context = 0;  ///< The trained context: kLlama3, kYarn, kLongRope.
  double low_freq_factor = 1;   ///< kLlama3.
  double high_freq_factor = 4;
  double beta_fast = 32;  ///< kYarn.
  double beta_slow = 1;
  bool truncate = true;
  double mscale = 0;                 ///< 0: none.
  double mscale_all_dim = 0;         ///< Any type but kDefault; 0: none.
  std::vector<double> pair_factors;  ///< kLongRope: divisors of the pairs' frequencies.
  /// kYarn, kLongRope: the factor of cos and sin, given or computed from the others.
  double attention_factor = 1;
  bool gives_attention_factor = false;  ///< The config gives it.
  double query_beta = 0;                ///< PositionScale::beta of the trained context; 0: none.
  int64_t positions = 0;                ///< The extended context.
  bool limited = false;                 ///< kLongRope: max_position_embeddings is larger.

  friend bool operator==(const RopeParameters&, const RopeParameters&) = default;
};

/// Kinds of layers that may have RoPE parameters of their own, as layer_types names them.
enum class RopeKind : uint8_t { kFullAttention, kSlidingAttention };

/// The factor by which YaRN scales attention of a context extended by `factor`.
double YarnScale(double factor, double weight);

/// Reads rope_scaling, otherwise rope_parameters, with the precedence of transformers: a
/// rope_scaling replaces rope_parameters, theta and the rotated part inside of it precede those at
/// the top level, where original_max_position_embeddings precedes the one inside. They may hold an
/// object for each kind of layers, or be for all of them; in types that know rope_local_base_freq,
/// for full attention only. Errors: kUnsupported naming another type, or a key that is not
/// understood; kMalformedFile naming the key.
Result<RopeParameters> ReadRopeParameters(TypedConfig& typed, RopeKind kind);

}  // namespace marlin
