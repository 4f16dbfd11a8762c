#include "quantize/scales.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/scalars.h"

namespace marlin {
namespace {

/// The byte of 2^exponent, clamped to the type's range.
StoredScale PowerOfTwo(int exponent) {
  const int byte = std::clamp(exponent + 127, 0, 254);
  return {static_cast<uint32_t>(byte), E8M0ToFloat(static_cast<uint8_t>(byte)), false};
}

int FloorLog2(double x) {
  int exponent = 0;
  std::frexp(x, &exponent);  // x = fraction * 2^exponent, fraction in [0.5, 1)
  return exponent - 1;
}

int CeilLog2(double x) {
  int exponent = 0;
  return std::frexp(x, &exponent) == 0.5 ? exponent - 1 : exponent;
}

}  // namespace

StoredScale ScaleCoder::Round(float wanted) const {
  switch (type_) {
    case ScaleType::kF16:
      return Decode(FloatToHalf(wanted));
    case ScaleType::kBf16:
      return Decode(FloatToBf16(wanted));
    case ScaleType::kF32:
      return Decode(std::bit_cast<uint32_t>(wanted));
    case ScaleType::kE8M0:
      return wanted > 0 ? PowerOfTwo(FloorLog2(wanted)) : PowerOfTwo(-127);
    case ScaleType::kE4M3:
      return Decode(FloatToFp8E4M3(global_scale_ > 0 ? wanted / global_scale_ : 0.0f));
  }
  return {};
}

StoredScale ScaleCoder::Decode(uint32_t bits) const {
  StoredScale scale;
  scale.bits = bits;
  switch (type_) {
    case ScaleType::kF16:
      scale.value = HalfToFloat(static_cast<uint16_t>(bits));
      break;
    case ScaleType::kBf16:
      scale.value = Bf16ToFloat(static_cast<uint16_t>(bits));
      break;
    case ScaleType::kF32:
      scale.value = std::bit_cast<float>(bits);
      break;
    case ScaleType::kE8M0:
      scale.value = E8M0ToFloat(static_cast<uint8_t>(bits));
      break;
    case ScaleType::kE4M3:
      scale.value = Fp8E4M3ToFloat(static_cast<uint8_t>(bits)) * global_scale_;
      break;
  }
  scale.overflow = !std::isfinite(scale.value);
  return scale;
}

ScaleRule::ScaleRule(const Encoder& encoder, bool affine, bool fractional, E8M0Rule e8m0_rule)
    : affine_(affine),
      fractional_(fractional),
      e8m0_rule_(e8m0_rule),
      levels_(affine ? static_cast<double>(encoder.max_value()) - encoder.min_value()
                     : static_cast<double>(encoder.levels())),
      min_value_(encoder.min_value()),
      max_value_(encoder.max_value()) {
  if (e8m0_rule_ != E8M0Rule::kDefault) return;
  int exponent = 0;
  const bool power_of_two = std::frexp(levels_, &exponent) == 0.5;
  e8m0_rule_ = power_of_two ? E8M0Rule::kCeil : E8M0Rule::kFloor;
}

int ScaleRule::ScaleExponent(double span) const {
  switch (e8m0_rule_) {
    case E8M0Rule::kCeil:
      return CeilLog2(span / levels_);
    case E8M0Rule::kNearest:
      return static_cast<int>(std::lround(std::log2(span / levels_)));
    default:
      return FloorLog2(span) - FloorLog2(levels_);
  }
}

GroupParameters ScaleRule::Choose(const GroupRange& range, const ScaleCoder& coder) const {
  GroupParameters parameters;
  const double span = Span(range);
  if (coder.type() == ScaleType::kE8M0 && span > 0 && levels_ > 0) {
    parameters.scale = PowerOfTwo(ScaleExponent(span));
  } else {
    parameters.scale = coder.Round(levels_ > 0 ? static_cast<float>(span / levels_) : 0.0f);
  }
  if (!affine_) return parameters;
  const float scale = parameters.scale.value;
  const float exact = scale > 0 ? min_value_ - range.low / scale : 0.0f;
  parameters.zero = RoundZero(exact);
  return parameters;
}

float ScaleRule::GlobalScale(double span, bool searched) const {
  const double levels = levels_ * (searched ? 256.0 : 448.0);
  return levels > 0 ? static_cast<float>(span / levels) : 0.0f;
}

float ScaleRule::RoundZero(float exact) const {
  const float inside = std::clamp(exact, min_value_, max_value_);
  return fractional_ ? HalfToFloat(FloatToHalf(inside)) : std::nearbyint(inside);
}

}  // namespace marlin
