#include "backends/cuda/layout/number_range.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "layout/parameters.h"

namespace marlin::cuda {
namespace {

/// Whether a type with `bits` significant bits, whose least subnormal is 2^lowest and whose numbers
/// are less than 2^(highest + 1), holds all numbers times 2^exponent.
bool Fits(const NumberRange& range, int exponent, int bits, int lowest, int highest) {
  if (range.largest == 0) return true;
  return range.significant_bits <= bits && range.lowest_bit + exponent >= lowest &&
         std::ilogb(range.largest) + exponent <= highest;
}

}  // namespace

void NumberRange::Add(float value) {
  constexpr int kFractionBits = 23;
  constexpr int kBias = 127;
  const float magnitude = std::fabs(value);
  if (magnitude == 0) return;
  smallest = std::min(smallest, magnitude);
  largest = std::max(largest, magnitude);
  negative = negative || value < 0;
  const auto number = std::bit_cast<uint32_t>(magnitude);
  const uint32_t fraction = number & ((1U << kFractionBits) - 1U);
  const auto exponent = static_cast<int>(number >> kFractionBits);
  const uint32_t integer = exponent == 0 ? fraction : fraction | 1U << kFractionBits;
  const int zeros = std::countr_zero(integer);
  lowest_bit = std::min(lowest_bit, std::max(exponent, 1) - kBias - kFractionBits + zeros);
  significant_bits = std::max(significant_bits, static_cast<int>(std::bit_width(integer)) - zeros);
}

void NumberRange::Add(const NumberRange& other) {
  smallest = std::min(smallest, other.smallest);
  largest = std::max(largest, other.largest);
  lowest_bit = std::min(lowest_bit, other.lowest_bit);
  significant_bits = std::max(significant_bits, other.significant_bits);
  negative = negative || other.negative;
}

void NumberRange::Add(const uint8_t* from, DType type, int64_t step, int64_t count) {
  const auto* const data = reinterpret_cast<const std::byte*>(from);
  if (DTypeBytes(type) > 1) {
    for (int64_t i = 0; i < count; ++i) Add(ParameterAt(data, type, i * step));
    return;
  }
  bool seen[256] = {};
  for (int64_t i = 0; i < count; ++i) seen[from[i * step]] = true;
  for (int code = 0; code < 256; ++code) {
    // As many bytes as the widest type has: compilers do not know that this one has one.
    const std::byte bytes[sizeof(float)] = {static_cast<std::byte>(code)};
    if (seen[code]) Add(ParameterAt(bytes, type, 0));
  }
}

NumberRange NumberRange::Scaled(int exponent) const {
  NumberRange scaled = *this;
  scaled.smallest = std::ldexp(smallest, exponent);
  scaled.largest = std::ldexp(largest, exponent);
  scaled.lowest_bit += exponent;
  return scaled;
}

bool NumberRange::FitsF16(int exponent) const { return Fits(*this, exponent, 11, -24, 15); }
bool NumberRange::FitsBf16(int exponent) const { return Fits(*this, exponent, 8, -133, 127); }

bool NumberRange::AreSmallIntegers() const {
  constexpr float kLargest = 127;
  return !negative && largest <= kLargest && lowest_bit >= 0;
}

}  // namespace marlin::cuda
