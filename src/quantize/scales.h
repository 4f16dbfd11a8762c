// Scales and zero points: chosen from a group's range, rounded to their stored types.
#pragma once

#include <cstdint>

#include "marlin/format.h"
#include "marlin/quantize.h"
#include "quantize/encoder.h"

namespace marlin {

/// A stored scale and its value.
struct StoredScale {
  uint32_t bits = 0;      ///< In the stored type.
  float value = 0;        ///< Effective: times the global scale where there is one.
  bool overflow = false;  ///< The wanted scale is above the type's range.
};

/// The scale type and, for E4M3, the expert's global scale.
class ScaleCoder {
 public:
  explicit ScaleCoder(ScaleType type, float global_scale = 1.0f)
      : type_(type), global_scale_(global_scale) {}

  /// The nearest stored scale, ties to even; E8M0 takes the nearest power of two in the logarithm's
  /// floor (see ScaleRule). `wanted` is finite; of E8M0, which has no sign, a negative one becomes
  /// the smallest scale.
  StoredScale Round(float wanted) const;
  /// The scale that is stored as `bits`.
  StoredScale Decode(uint32_t bits) const;
  ScaleType type() const { return type_; }

 private:
  ScaleType type_;
  float global_scale_;
};

/// Scale and zero point of one group.
struct GroupParameters {
  StoredScale scale;
  float zero = 0;  ///< A value of f16; 0 for formats without zeros.
};

/// Extremes of a group: max |w| for symmetric formats; for affine ones the range including 0.
struct GroupRange {
  float amax = 0;
  float low = 0;   ///< <= 0
  float high = 0;  ///< >= 0
};

/// How round-to-nearest chooses a group's parameters:
///   symmetric  scale = amax / levels, levels = the format's largest value (7 for s4, so that both
///              signs reach the extreme and quantizing twice changes nothing; max |v| for tables)
///   affine     scale = (high - low) / (max - min), zero = round(min - low / scale) in [min, max],
///              rounded to an integer, or to f16 with `fractional`
///   E8M0       an E8M0Rule of (amax, levels). By default kFloor, the OCP MX rule; under it,
///   formats
///              whose largest value is itself a power of two (nf4, int2) would saturate by up to a
///              factor 2, so they take kCeil
class ScaleRule {
 public:
  ScaleRule(const Encoder& encoder, bool affine, bool fractional = false,
            E8M0Rule e8m0_rule = E8M0Rule::kDefault);

  /// The span that levels() divides: amax or high - low. Infinite only when high - low overflows.
  double Span(const GroupRange& range) const {
    return affine_ ? static_cast<double>(range.high) - static_cast<double>(range.low)
                   : static_cast<double>(range.amax);
  }
  double levels() const { return levels_; }

  GroupParameters Choose(const GroupRange& range, const ScaleCoder& coder) const;
  /// The global scale of E4M3 for the largest span of all groups. The group with that span gets the
  /// largest scale, 448, or 256 where scales are searched: larger ones are then left to choose
  /// from.
  float GlobalScale(double span, bool searched) const;
  /// The nearest zero point that may be stored.
  float RoundZero(float exact) const;

 private:
  int ScaleExponent(double span) const;

  bool affine_;
  bool fractional_;
  E8M0Rule e8m0_rule_;
  double levels_;
  float min_value_;
  float max_value_;
};

}  // namespace marlin
