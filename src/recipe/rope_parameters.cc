#include "recipe/rope_parameters.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/macros.h"
#include "base/printable.h"
#include "recipe/name_list.h"

namespace marlin {
namespace {

constexpr double kHuge = 1e12;
constexpr double kMostFactor = 1e6;
constexpr double kLeastFactor = 1e-6;
constexpr int64_t kMaxPositions = int64_t{1} << 30;

constexpr std::pair<std::string_view, RopeType> kRopeTypes[] = {
    {"default", RopeType::kDefault},
    {"linear", RopeType::kLinear},
    {"dynamic", RopeType::kDynamic},
    {"llama3", RopeType::kLlama3},
    {"yarn", RopeType::kYarn},
    {"longrope", RopeType::kLongRope},
    {"proportional", RopeType::kProportional},
};

/// Other names of a type, in configurations of one model type.
struct RopeSynonym {
  std::string_view model_type;
  std::string_view name;
  RopeType type;
};
constexpr RopeSynonym kRopeSynonyms[] = {
    {"phi3", "su", RopeType::kLongRope},
    {"phi3", "yarn", RopeType::kLongRope},
    // Text has equal positions in all sections.
    {"qwen2_vl_text", "mrope", RopeType::kDefault},
    {"qwen2_5_vl_text", "mrope", RopeType::kDefault},
};

/// Keys of the parameters. Keys of another type than the given one are ignored, as everywhere.
constexpr std::string_view kRopeValues[] = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "attention_factor", "truncate",
    "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "alpha",
    // Factors of longrope.
    "short_factor", "long_factor",
    // Text has equal positions in all sections of multimodal RoPE.
    "mrope_section", "mrope_interleaved",
    // Repeats the one outside.
    "max_position_embeddings",
    // Says how the model was trained.
    "finetuned"};
constexpr std::string_view kQueryBeta = "llama_4_scaling_beta";
/// Factors of programs before transformers had YaRN; 1 changes nothing.
constexpr std::string_view kFactorsOfOne[] = {"attn_factor", "extrapolation_factor"};
constexpr std::string_view kLayerKinds[] = {"full_attention", "sliding_attention"};

class RopeReader {
 public:
  RopeReader(TypedConfig& typed, RopeKind kind)
      : typed_(typed), config_(typed.config), kind_(kLayerKinds[static_cast<size_t>(kind)]) {
    slides_ = kind == RopeKind::kSlidingAttention;
    if (slides_ && config_.Knows(kLocalTheta)) theta_key_ = kLocalTheta;
  }

  Result<RopeParameters> Read() {
    MARLIN_RETURN_IF_ERROR(FindParameters());
    MARLIN_RETURN_IF_ERROR(ReadType());
    max_positions_ = static_cast<double>(config_.Size("max_position_embeddings", kMaxPositions));
    const double outside = config_.RealOr(theta_key_, 1, kHuge, kDefaultTheta);
    p_.theta = scaling_.RealOr("rope_theta", 1, kHuge, outside);
    MARLIN_RETURN_IF_ERROR(CheckSlidingTheta());
    MARLIN_RETURN_IF_ERROR(ReadPartial());
    MARLIN_RETURN_IF_ERROR(ReadAlpha());
    if (p_.type != RopeType::kDefault) ReadScaling();
    ReadQueryScale();
    MARLIN_RETURN_IF_ERROR(config_.status());
    MARLIN_RETURN_IF_ERROR(scaling_.status());
    if (p_.type == RopeType::kYarn && !(p_.theta > 1)) {
      scaling_.Fail("rope_theta", "yarn needs one above 1");
      return scaling_.status();
    }
    Extend();
    return p_;
  }

 private:
  static constexpr double kDefaultTheta = 10000;
  static constexpr std::string_view kLocalTheta = "rope_local_base_freq";

  /// Errors: kUnsupported for unknown keys, and parameters that are for no kind of layers.
  Status FindParameters() {
    // An empty rope_scaling counts as none, unlike empty rope_parameters.
    where_ = config_.Nested("rope_scaling").values().empty() ? "rope_parameters" : "rope_scaling";
    // Errors name the object, too.
    scaling_ = ModelConfig::Of(config_.Nested(where_).values(),
                               fmt::format("{}: {}", config_.file(), where_));
    MARLIN_RETURN_IF_ERROR(config_.status());
    MARLIN_RETURN_IF_ERROR(TakeLayerTypes());
    for (const auto& [key, value] : scaling_.values().items()) {
      if (value.is_null() || Contains(kRopeValues, key)) continue;
      if (typed_.family->scales_queries && key == kQueryBeta) continue;
      if (Contains(kFactorsOfOne, key) && value.is_number() && value.get<double>() == 1) continue;
      return Status(Code::kUnsupported, fmt::format("{}: {}: {} is not understood", scaling_.file(),
                                                    Printable(key), DescribeJson(value)));
    }
    return {};
  }

  /// Takes the parameters of the kind: its own, parameters of all kinds, or none.
  Status TakeLayerTypes() {
    std::string_view first;
    for (const std::string_view type : kLayerKinds) {
      if (!scaling_.IsObject(type)) continue;
      // All layers of a model with an indexer are of one kind.
      if (!config_.Knows("layer_types") || config_.Knows("index_topk")) {
        return Status(Code::kUnsupported,
                      fmt::format("{}: {}: a {} has no kinds of layers", scaling_.file(), type,
                                  typed_.family->model_type));
      }
      if (first.empty()) first = type;
    }
    if (first.empty()) return TakeForAll();
    for (const auto& [key, value] : scaling_.values().items()) {
      if (!Contains(kLayerKinds, key)) {
        return Status(Code::kUnsupported, fmt::format("{}: {}: stands beside {}", scaling_.file(),
                                                      Printable(key), first));
      }
    }
    scaling_ = scaling_.Nested(kind_);
    return {};
  }

  /// Versions of transformers differ in whether a theta outside of the objects for kinds of layers
  /// is the sliding ones'.
  Status CheckSlidingTheta() const {
    const double theta = typed_.family->sliding_theta;
    if (!slides_ || theta == 0 || scaling_.Has("rope_theta") || p_.theta == theta) return {};
    return Status(Code::kUnsupported,
                  fmt::format("{}: rope_theta: {} is not {}, and no rope_parameters say whether "
                              "it is for layers of sliding_attention, too",
                              config_.file(), p_.theta, theta));
  }

  /// Without an object for a kind. Where sliding layers have a theta of their own, rope_scaling is
  /// for the others.
  Status TakeForAll() {
    const bool apart = config_.Knows(kLocalTheta) || typed_.family->sliding_theta != 0;
    if (!apart || scaling_.values().empty()) return {};
    if (where_ != "rope_scaling") {
      return Status(Code::kUnsupported,
                    fmt::format("{}: expected an object for each kind of layers", scaling_.file()));
    }
    if (slides_) scaling_ = ModelConfig::Of(Json::object(), scaling_.file());
    return {};
  }

  Status ReadType() {
    const std::string name = scaling_.StringOr("rope_type", scaling_.StringOr("type", "default"));
    MARLIN_RETURN_IF_ERROR(scaling_.status());
    for (const RopeSynonym& synonym : kRopeSynonyms) {
      if (synonym.model_type != typed_.family->model_type || synonym.name != name) continue;
      p_.type = synonym.type;
      return {};
    }
    std::string known;
    for (const auto& [type_name, type] : kRopeTypes) {
      if (type_name == name) {
        p_.type = type;
        return {};
      }
      known += (known.empty() ? "" : ", ") + std::string(type_name);
    }
    return Status(Code::kUnsupported,
                  fmt::format("{}: rope_type '{}' is not supported; supported: {}", scaling_.file(),
                              Printable(name), known));
  }

  /// Other types rotate whole heads, whatever the key says.
  Status ReadPartial() {
    constexpr std::string_view kKey = "partial_rotary_factor";
    double whole = 1;
    if (typed_.family->rotates_a_part && config_.Has("rotary_dim") && config_.Has("head_dim")) {
      whole = static_cast<double>(config_.Size("rotary_dim", kMaxPositions)) /
              static_cast<double>(config_.Size("head_dim", kMaxPositions));
    }
    p_.partial = scaling_.RealOr(kKey, 1e-3, 1, config_.RealOr(kKey, 1e-3, 1, whole));
    if (p_.partial > 1) config_.Fail("rotary_dim", "is more than head_dim");
    if (typed_.family->whole_head_dim) {
      const auto rope = static_cast<double>(config_.Size("qk_rope_head_dim", kMaxPositions));
      const auto nope = static_cast<double>(config_.Size("qk_nope_head_dim", kMaxPositions));
      if (p_.partial == rope / (rope + nope)) p_.partial = 1;
    }
    const bool partial = typed_.family->rotates_a_part || p_.type == RopeType::kProportional;
    if (p_.partial == 1 || partial) return {};
    return Status(Code::kUnsupported,
                  fmt::format("{}: {}: {}, but a {} rotates whole heads", config_.file(), kKey,
                              p_.partial, typed_.family->model_type));
  }

  /// Hunyuan's fixed form of the type "dynamic". 0 counts as none.
  Status ReadAlpha() {
    if (!scaling_.Has("alpha")) return {};
    if (!typed_.family->rotary_alpha || p_.type != RopeType::kDynamic) {
      return Status(Code::kUnsupported,
                    fmt::format("{}: alpha: {} is not understood", scaling_.file(),
                                DescribeJson(scaling_.values().at("alpha"))));
    }
    const double alpha = scaling_.Real("alpha", 0, kMostFactor);
    if (alpha != 0) p_.alpha = alpha;
    return {};
  }

  void ReadQueryScale() {
    if (!typed_.family->scales_queries || !scaling_.Has(kQueryBeta)) return;
    p_.query_beta = scaling_.Real(kQueryBeta, 0, kMostFactor);
    p_.original_context = Context();
  }

  double Context() {
    constexpr std::string_view kKey = "original_max_position_embeddings";
    const double inside = scaling_.RealOr(kKey, 1, kHuge, max_positions_);
    return config_.RealOr(kKey, 1, kHuge, inside);
  }

  void ReadScaling() {
    const auto need = [&](std::string_view key, double min) {
      return scaling_.Real(key, min, kMostFactor);
    };
    const bool yarn = p_.type == RopeType::kYarn;
    const bool long_rope = p_.type == RopeType::kLongRope;
    if (yarn || long_rope || p_.type == RopeType::kLlama3) p_.original_context = Context();
    if (long_rope) return ReadLongRope();
    // A null asks for the quotient of the contexts; a missing factor is an error.
    if (p_.type == RopeType::kProportional) {
      p_.factor = scaling_.RealOr("factor", 1e-3, kMostFactor, 1);
      return;
    }
    p_.factor = yarn && scaling_.IsNull("factor") ? max_positions_ / p_.original_context
                                                  : need("factor", 1e-3);
    p_.mscale_all_dim = scaling_.RealOr("mscale_all_dim", 0, kMostFactor, 0);
    if (p_.type == RopeType::kLlama3) {
      p_.low_freq_factor = need("low_freq_factor", 1e-3);
      p_.high_freq_factor = need("high_freq_factor", 1e-3);
      if (scaling_.status().ok() && p_.high_freq_factor < p_.low_freq_factor) {
        scaling_.Fail("high_freq_factor", fmt::format("{} is below low_freq_factor {}",
                                                      p_.high_freq_factor, p_.low_freq_factor));
      }
    }
    if (yarn) ReadYarn();
  }

  /// The quotient of the contexts stands for a missing factor.
  void ReadLongRope() {
    p_.pair_factors = scaling_.RealsOrEmpty("short_factor", kLeastFactor, kMostFactor);
    if (p_.pair_factors.empty()) scaling_.Fail("short_factor", "longrope needs one for every pair");
    p_.factor = scaling_.RealOr("factor", 1e-3, kMostFactor, max_positions_ / p_.original_context);
    const double inferred = p_.factor > 1 && p_.original_context > 1
                                ? std::sqrt(1 + std::log(p_.factor) / std::log(p_.original_context))
                                : 1.0;
    ReadAttentionFactor(inferred);
  }

  void ReadAttentionFactor(double inferred) {
    p_.gives_attention_factor = scaling_.Has("attention_factor");
    p_.attention_factor = scaling_.RealOr("attention_factor", 0, kMostFactor, inferred);
  }

  void ReadYarn() {
    // 0 counts as none.
    const auto or_default = [&](std::string_view key, double fallback) {
      const double value = scaling_.RealOr(key, 0, kMostFactor, fallback);
      if (value == 0) return fallback;
      if (value < kLeastFactor) scaling_.Fail(key, fmt::format("{} is too small", value));
      return value;
    };
    p_.beta_fast = or_default("beta_fast", 32);
    p_.beta_slow = or_default("beta_slow", 1);
    p_.truncate = scaling_.Bool("truncate", true);
    p_.mscale = scaling_.RealOr("mscale", 0, kMostFactor, 0);
    const double inferred =
        p_.mscale != 0 && p_.mscale_all_dim != 0
            ? YarnScale(p_.factor, p_.mscale) / YarnScale(p_.factor, p_.mscale_all_dim)
            : YarnScale(p_.factor, 1);
    ReadAttentionFactor(inferred);
  }

  /// Many configs keep the trained context in max_position_embeddings, and some the extended one.
  void Extend() {
    double context = max_positions_;
    if (p_.type == RopeType::kLinear) {
      context = std::max(context, p_.factor * max_positions_);
    } else if (p_.type == RopeType::kYarn || p_.type == RopeType::kLlama3) {
      context = std::max(context, p_.factor * p_.original_context);
    } else if (p_.type == RopeType::kLongRope) {
      p_.limited = p_.original_context < context;
      context = std::min(context, p_.original_context);
    }
    p_.positions = static_cast<int64_t>(std::min(context, static_cast<double>(kMaxPositions)));
  }

  TypedConfig& typed_;
  ModelConfig& config_;
  std::string_view kind_;
  bool slides_ = false;
  std::string_view theta_key_ = "rope_theta";
  std::string_view where_;
  ModelConfig scaling_;
  double max_positions_ = 0;
  RopeParameters p_;
};

}  // namespace

std::string_view RopeTypeName(RopeType type) {
  for (const auto& [name, named] : kRopeTypes) {
    if (named == type) return name;
  }
  return "unknown";
}

double YarnScale(double factor, double weight) {
  return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

Result<RopeParameters> ReadRopeParameters(TypedConfig& typed, RopeKind kind) {
  return RopeReader(typed, kind).Read();
}

}  // namespace marlin
