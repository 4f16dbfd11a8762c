// The magnitudes and bits of a set of numbers, found in one pass over scales, zeros or biases: they
// tell which 16-bit type holds all of them.
#pragma once

#include <cstdint>
#include <limits>

#include "marlin/tensor.h"

namespace marlin::cuda {

struct NumberRange {
  float smallest = std::numeric_limits<float>::infinity();  ///< Least magnitude other than 0.
  float largest = 0;                                        ///< Greatest magnitude.
  /// The exponent of the least bit that is set in any number; large if all are 0.
  int lowest_bit = std::numeric_limits<int16_t>::max();
  /// Most bits from a number's highest set bit to its lowest.
  int significant_bits = 0;
  bool negative = false;  ///< Whether a number is less than 0.

  void Add(float value);
  void Add(const NumberRange& other);
  /// Adds finite numbers of a floating-point type, `step` elements apart, at any address.
  void Add(const uint8_t* from, DType type, int64_t step, int64_t count);

  /// The range of every number times 2^exponent.
  NumberRange Scaled(int exponent) const;
  /// Whether fp16 or bf16 holds every number times 2^exponent exactly.
  bool FitsF16(int exponent) const;
  bool FitsBf16(int exponent) const;
  /// Whether all numbers are integers in [0, 127].
  bool AreSmallIntegers() const;
};

}  // namespace marlin::cuda
