// RoPE in the metadata of a GGUF file, and the tensors of its factors.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "base/macros.h"
#include "checkpoint/readers/gguf/gguf_keys.h"
#include "checkpoint/writers/gguf_forms.h"
#include "recipe/mixer.h"
#include "recipe/name_list.h"
#include "recipe/rope_parameters.h"

namespace marlin {
namespace {

/// Architectures whose pairs are in sections, which the runtime of these files requires.
constexpr std::string_view kSectioned[] = {"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35",
                                           "qwen35moe"};
constexpr size_t kSections = 4;

class RotaryDescriber {
 public:
  RotaryDescriber(TypedConfig& typed, RopeParameters rope, GgufModelFacts* facts,
                  GgufMetadataBuilder* metadata)
      : typed_(typed),
        config_(typed.config),
        rope_(std::move(rope)),
        facts_(*facts),
        metadata_(*metadata) {}

  void Run() {
    // Latent attention rotates a head of its own.
    if (facts_.head_dim > 0) {
      rotated_ = static_cast<int64_t>(static_cast<double>(facts_.head_dim) * rope_.partial);
      metadata_.Count(Key("rope.dimension_count"), rotated_);
    }
    const bool stretched = typed_.family->rotary_alpha && rope_.type == RopeType::kDynamic;
    const auto features = static_cast<double>(facts_.head_dim);
    const double stretch = stretched ? std::pow(rope_.alpha, features / (features - 2)) : 1;
    metadata_.Real(Key("rope.freq_base"), rope_.theta * stretch);
    if (stretched) return;
    if (Contains(kSectioned, facts_.naming.architecture->name)) AddSections();
    const std::string_view type = RopeTypeName(rope_.type);
    switch (rope_.type) {
      case RopeType::kDefault:
        return;
      case RopeType::kLlama3:
        return AddLlama3();
      case RopeType::kLinear:
        metadata_.Text(Key("rope.scaling.type"), type);
        metadata_.Real(Key("rope.scaling.factor"), rope_.factor);
        return;
      case RopeType::kYarn:
        metadata_.Text(Key("rope.scaling.type"), type);
        return AddYarn();
      case RopeType::kLongRope:
        if (facts_.naming.architecture->name == "phi3") return AddLongRope();
        [[fallthrough]];
      case RopeType::kDynamic:
      case RopeType::kProportional:
        config_.Fail("rope_scaling", fmt::format("gguf has no form for the type \"{}\"", type));
    }
  }

 private:
  std::string Key(std::string_view key) const {
    return fmt::format("{}.{}", facts_.naming.architecture->name, key);
  }

  /// Text has equal positions in all sections. Without sizes the pairs are in turn of the first
  /// three, as in Qwen's models: others have the position 0.
  void AddSections() {
    std::vector<int32_t> sections;
    for (const char* const object : {"rope_parameters", "rope_scaling"}) {
      ModelConfig scaling = typed_.source.Nested(object);
      for (const int64_t size : scaling.IntegersOrEmpty("mrope_section")) {
        if (sections.size() < kSections) sections.push_back(static_cast<int32_t>(size));
      }
    }
    const auto pairs = static_cast<int32_t>(rotated_ / 2);
    if (sections.empty()) sections = {(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3};
    sections.resize(kSections);
    metadata_.Integers(Key("rope.dimension_sections"), sections);
  }

  void AddYarn() {
    metadata_.Real(Key("rope.scaling.factor"), rope_.factor);
    metadata_.Real(Key("rope.scaling.yarn_beta_fast"), rope_.beta_fast);
    metadata_.Real(Key("rope.scaling.yarn_beta_slow"), rope_.beta_slow);
    metadata_.Count(Key("rope.scaling.original_context_length"),
                    static_cast<int64_t>(rope_.original_context));
    // Whether the bounds of the interpolation are rounded is a fact of the architecture.
    const bool rounded = facts_.naming.architecture->name != "gpt-oss";
    if (rope_.truncate != rounded) {
      config_.Fail("truncate", fmt::format("gguf has no form for another value than {} in a model "
                                           "of the architecture {}",
                                           rounded, facts_.naming.architecture->name));
    }
    double inferred = YarnScale(rope_.factor, 1);
    if (facts_.naming.architecture->name == "deepseek2" && rope_.mscale_all_dim != 0) {
      // DeepSeek's files hold a tenth of one number for both of these.
      if (rope_.mscale != rope_.mscale_all_dim) {
        config_.Fail("mscale", "gguf can hold only the value of mscale_all_dim");
      }
      metadata_.Real(Key("rope.scaling.yarn_log_multiplier"), rope_.mscale_all_dim / 10);
      inferred = 1;
    }
    // Multiplies the factor that follows from the others, unlike attention_factor.
    const double quotient = rope_.attention_factor / inferred;
    if (std::abs(quotient - 1) > 1e-12) {
      metadata_.Real(Key("rope.scaling.attn_factor"), quotient);
    }
  }

  /// Factors for texts within the trained context and beyond, one of each for a pair.
  void AddLongRope() {
    const bool old = !config_.Nested("rope_scaling").values().empty();
    ModelConfig scaling = config_.Nested(old ? "rope_scaling" : "rope_parameters");
    const auto add = [&](std::string_view key, const char* tensor) {
      std::vector<float> factors;
      for (const double factor : scaling.RealsOrEmpty(key, 0, kMostGgufReal)) {
        factors.push_back(static_cast<float>(factor));
      }
      facts_.rope_factors.emplace_back(tensor, std::move(factors));
    };
    add("long_factor", "rope_factors_long.weight");
    add("short_factor", "rope_factors_short.weight");
    if (facts_.rope_factors[0].second.size() != facts_.rope_factors[1].second.size()) {
      config_.Fail("long_factor", "gguf needs one for every short_factor");
    }
    metadata_.Count(Key("rope.scaling.original_context_length"),
                    static_cast<int64_t>(rope_.original_context));
    metadata_.Real(Key("rope.scaling.attn_factor"), rope_.attention_factor);
  }

  /// Llama 3.1: a factor for every frequency, interpolated between those that are divided and those
  /// that stay.
  void AddLlama3() {
    std::vector<float> factors;
    for (int64_t i = 0; i < facts_.head_dim / 2; ++i) {
      const double frequency = std::pow(
          rope_.theta, -2.0 * static_cast<double>(i) / static_cast<double>(facts_.head_dim));
      const double turns = rope_.original_context * frequency / (2 * std::numbers::pi);
      const double smooth = std::clamp(
          (turns - rope_.low_freq_factor) / (rope_.high_freq_factor - rope_.low_freq_factor), 0.0,
          1.0);
      factors.push_back(static_cast<float>(1 / ((1 - smooth) / rope_.factor + smooth)));
    }
    facts_.rope_factors.emplace_back("rope_freqs.weight", std::move(factors));
  }

  TypedConfig& typed_;
  ModelConfig& config_;
  RopeParameters rope_;
  GgufModelFacts& facts_;
  GgufMetadataBuilder& metadata_;
  int64_t rotated_ = 0;
};

}  // namespace

Status DescribeGgufRotary(TypedConfig& typed, GgufModelFacts* facts,
                          GgufMetadataBuilder* metadata) {
  MARLIN_ASSIGN_OR_RETURN(RopeParameters rope, ReadRopeParameters(typed, RopeKind::kFullAttention));
  MARLIN_ASSIGN_OR_RETURN(const RopeParameters sliding,
                          ReadRopeParameters(typed, RopeKind::kSlidingAttention));
  // The layers with a window of Gemma 3 have a base of their own, and no scaling.
  const bool own_base = typed.config.Knows("rope_local_base_freq") &&
                        sliding.type == RopeType::kDefault && sliding.partial == rope.partial;
  if (own_base) {
    metadata->Real(fmt::format("{}.{}", facts->naming.architecture->name, kGgufWindowBase),
                   sliding.theta);
  }
  if (typed.config.Knows("layer_types") && !own_base && !(sliding == rope)) {
    return Status(Code::kUnsupported, fmt::format("{}: rope_parameters: GGUF has one RoPE for "
                                                  "all layers of a {}",
                                                  typed.config.file(), typed.family->model_type));
  }
  RotaryDescriber(typed, std::move(rope), facts, metadata).Run();
  return {};
}

}  // namespace marlin
