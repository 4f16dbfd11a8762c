#include "model/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace marlin {
namespace {

/// Llama 3.1: scales low frequencies, keeps high ones and interpolates between.
void ScaleLikeLlama3(const RopeParameters& rope, std::vector<double>* frequencies) {
  for (double& frequency : *frequencies) {
    const double turns = rope.original_context * frequency / (2 * std::numbers::pi);
    const double range = rope.high_freq_factor - rope.low_freq_factor;
    const double above = turns - rope.low_freq_factor;
    // Equal factors leave no range to interpolate in.
    const double smooth = range > 0 ? std::clamp(above / range, 0.0, 1.0) : (above > 0 ? 1.0 : 0.0);
    frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency;
  }
}

/// YaRN: keeps high frequencies, scales low ones, with a linear ramp between.
void ScaleLikeYarn(const RopeParameters& rope, int64_t rotary_dim,
                   std::vector<double>* frequencies) {
  const auto dim = static_cast<double>(rotary_dim);
  const auto pair_of = [&](double turns) {
    return dim * std::log(rope.original_context / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = pair_of(rope.beta_fast);
  double high = pair_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies->size(); ++i) {
    double& frequency = (*frequencies)[i];
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequency = frequency / rope.factor * ramp + frequency * (1 - ramp);
  }
}

int64_t RotatedFeatures(const RopeParameters& rope, int64_t head_dim) {
  return static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial);
}

}  // namespace

int64_t RotatedPairs(const RopeParameters& rope, int64_t head_dim) {
  return (RotatedFeatures(rope, head_dim) + 1) / 2;
}

Rotary MakeRotary(const RopeParameters& rope, int64_t head_dim) {
  const bool proportional = rope.type == RopeType::kProportional;
  const int64_t rotary_dim = proportional ? head_dim : RotatedFeatures(rope, head_dim);
  double theta = rope.theta;
  if (rope.alpha != 1) {
    const auto features = static_cast<double>(head_dim);
    theta *= std::pow(rope.alpha, features / (features - 2));
  }
  std::vector<double> frequencies;
  for (int64_t i = 0; i < rotary_dim; i += 2) {
    frequencies.push_back(
        std::pow(theta, -static_cast<double>(i) / static_cast<double>(rotary_dim)));
  }
  if (rope.type == RopeType::kLinear) {
    for (double& frequency : frequencies) frequency /= rope.factor;
  } else if (proportional) {
    // Pairs beyond the rotated part have a frequency of 0, which turns nothing.
    for (size_t i = 0; i < frequencies.size(); ++i) {
      frequencies[i] = static_cast<int64_t>(i) < RotatedFeatures(rope, head_dim) / 2
                           ? frequencies[i] / rope.factor
                           : 0;
    }
  } else if (rope.type == RopeType::kLlama3) {
    ScaleLikeLlama3(rope, &frequencies);
  } else if (rope.type == RopeType::kYarn) {
    ScaleLikeYarn(rope, rotary_dim, &frequencies);
  } else if (rope.type == RopeType::kLongRope) {
    for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= rope.pair_factors[i];
  }
  Rotary rotary;
  rotary.attention_factor = static_cast<float>(rope.attention_factor);
  // DeepSeek scales the scores for every type but the default.
  if (rope.mscale_all_dim != 0) {
    const double scale = YarnScale(rope.factor, rope.mscale_all_dim);
    rotary.score_factor = static_cast<float>(scale * scale);
  }
  for (const double frequency : frequencies) {
    rotary.inverse_frequencies.push_back(static_cast<float>(frequency));
  }
  return rotary;
}

}  // namespace marlin
