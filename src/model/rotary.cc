#include "model/rotary.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/macros.h"
#include "base/printable.h"

namespace marlin {
namespace {

constexpr double kHuge = 1e12;

/// The RoPE parameters. transformers 5 stores them in rope_parameters; earlier versions in
/// rope_scaling and at the top level.
struct Parameters {
  ModelConfig scaling;
  std::string type;
  double theta = 10000;
  double partial = 1;
};

Result<Parameters> ReadParameters(ModelConfig& config) {
  const bool together = config.Has("rope_parameters");
  Parameters p{config.Nested(together ? "rope_parameters" : "rope_scaling"), "", 10000, 1};
  ModelConfig& scaling = p.scaling;
  p.type = scaling.StringOr("rope_type", scaling.StringOr("type", "default"));
  const double outside = config.RealOr("rope_theta", 1, kHuge, 10000);
  p.theta = scaling.RealOr("rope_theta", 1, kHuge, outside);
  p.partial = scaling.RealOr("partial_rotary_factor", 1e-3, 1,
                             config.RealOr("partial_rotary_factor", 1e-3, 1, 1));
  MARLIN_RETURN_IF_ERROR(config.status());
  MARLIN_RETURN_IF_ERROR(scaling.status());
  return p;
}

/// Llama 3.1: scales low frequencies, keeps high ones and interpolates between.
void ScaleLikeLlama3(ModelConfig& scaling, double context, std::vector<double>* frequencies) {
  const double factor = scaling.RealOr("factor", 1, 1e6, 8);
  const double low = scaling.RealOr("low_freq_factor", 1e-3, 1e6, 1);
  const double high = scaling.RealOr("high_freq_factor", 1e-3, 1e6, 4);
  for (double& frequency : *frequencies) {
    const double wave = 2 * std::numbers::pi / frequency;
    const double smooth = std::clamp((context / wave - low) / (high - low), 0.0, 1.0);
    frequency = (1 - smooth) * frequency / factor + smooth * frequency;
  }
}

double YarnScale(double factor, double weight) {
  return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

/// YaRN: keeps high frequencies, scales low ones, with a linear ramp between.
void ScaleLikeYarn(ModelConfig& scaling, double theta, double context, double factor,
                   std::vector<double>* frequencies) {
  const auto pairs = static_cast<double>(frequencies->size());
  const auto pair_of = [&](double turns) {
    return 2 * pairs * std::log(context / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = pair_of(scaling.RealOr("beta_fast", 1e-6, 1e6, 32));
  double high = pair_of(scaling.RealOr("beta_slow", 1e-6, 1e6, 1));
  if (scaling.Bool("truncate", true)) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, 2 * pairs - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies->size(); ++i) {
    double& frequency = (*frequencies)[i];
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequency = frequency / factor * ramp + frequency * (1 - ramp);
  }
}

void ApplyYarn(Parameters& p, double max_positions, std::vector<double>* frequencies,
               Rotary* rotary) {
  ModelConfig& scaling = p.scaling;
  const double context =
      scaling.RealOr("original_max_position_embeddings", 1, kHuge, max_positions);
  const double factor = scaling.RealOr("factor", 1e-3, 1e6, max_positions / context);
  const double scale = scaling.RealOr("mscale", 0, 1e6, 0);
  const double scale_all = scaling.RealOr("mscale_all_dim", 0, 1e6, 0);
  const double inferred = scale != 0 && scale_all != 0
                              ? YarnScale(factor, scale) / YarnScale(factor, scale_all)
                              : YarnScale(factor, 1);
  rotary->attention_factor =
      static_cast<float>(scaling.RealOr("attention_factor", 0, 1e6, inferred));
  ScaleLikeYarn(scaling, p.theta, context, factor, frequencies);
}

}  // namespace

Result<Rotary> ReadRotary(ModelConfig& config, int64_t head_dim, int64_t max_positions) {
  MARLIN_ASSIGN_OR_RETURN(Parameters p, ReadParameters(config));
  const auto rotary_dim = static_cast<int64_t>(static_cast<double>(head_dim) * p.partial);
  std::vector<double> frequencies;
  for (int64_t i = 0; i < rotary_dim; i += 2) {
    frequencies.push_back(
        std::pow(p.theta, -static_cast<double>(i) / static_cast<double>(rotary_dim)));
  }
  Rotary rotary;
  const auto context = static_cast<double>(max_positions);
  if (p.type == "linear") {
    const double factor = p.scaling.RealOr("factor", 1e-3, 1e6, 1);
    for (double& frequency : frequencies) frequency /= factor;
  } else if (p.type == "llama3") {
    const double original = p.scaling.RealOr("original_max_position_embeddings", 1, kHuge, context);
    ScaleLikeLlama3(p.scaling, original, &frequencies);
  } else if (p.type == "yarn") {
    ApplyYarn(p, context, &frequencies, &rotary);
  } else if (p.type != "default") {
    return Status(Code::kUnsupported,
                  fmt::format("config.json: rope_type '{}' is not supported; supported: default, "
                              "linear, llama3, yarn",
                              Printable(p.type)));
  }
  // DeepSeek scales the scores for every rope_type but the default.
  const double scale_all = p.scaling.RealOr("mscale_all_dim", 0, 1e6, 0);
  if (p.type != "default" && scale_all != 0) {
    const double scale = YarnScale(p.scaling.RealOr("factor", 1e-3, 1e6, 1), scale_all);
    rotary.score_factor = static_cast<float>(scale * scale);
  }
  MARLIN_RETURN_IF_ERROR(p.scaling.status());
  for (const double frequency : frequencies) {
    rotary.inverse_frequencies.push_back(static_cast<float>(frequency));
  }
  return rotary;
}

}  // namespace marlin
