// Nearest-code search over runs of weights, for one format and one value table.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "marlin/format.h"

namespace marlin {

/// Finds the nearest code of fp32 numbers. Immutable after construction; thread-safe.
class Encoder {
 public:
  /// `codebook` replaces the built-in table of a codebook format; empty keeps it.
  /// Precondition: the format is quantized, and codebook is empty or [2^bits] finite values.
  Encoder(Format format, std::span<const float> codebook);

  /// codes[i] = nearest code of w[i] / scale + zero. Precondition: scale is finite and not 0.
  void Encode(const float* w, int64_t count, float scale, float zero, uint8_t* codes) const {
    encode_(*this, w, count, scale, zero, codes);
  }

  /// Sum of the squared errors of encoding and decoding, to about fp32's precision, for comparing
  /// candidates; each times its weight's importance, if that is not null. Infinity if some
  /// of them reach `limit` before the last. The same on every machine. Precondition: as Encode.
  double SquaredError(const float* w, const float* importance, int64_t count, float scale,
                      float zero, double limit = std::numeric_limits<double>::infinity()) const {
    return squared_error_(*this, w, importance, count, scale, zero, limit);
  }

  /// The code of the value nearest to 0.
  uint8_t zero_code() const { return zero_code_; }
  /// value(code) of every code.
  std::span<const float> values() const { return values_; }
  /// The largest |value|; for integer formats the largest positive one, so that a group's extreme
  /// never saturates, whatever its sign.
  float levels() const { return levels_; }
  /// Whether a negative scale reaches other values than a positive one: of s4, -8 becomes 8. False
  /// with 8 bits, where it would not matter.
  bool mirrors() const { return mirrors_; }
  float min_value() const { return min_value_; }
  float max_value() const { return max_value_; }

 private:
  using EncodeFunction = void (*)(const Encoder&, const float*, int64_t, float, float, uint8_t*);
  using ErrorFunction = double (*)(const Encoder&, const float*, const float*, int64_t, float,
                                   float, double);
  template <typename Codec>
  static void EncodeWithCodec(const Encoder& encoder, const float* w, int64_t count, float scale,
                              float zero, uint8_t* codes);
  template <int kBits>
  static void EncodeWithTable(const Encoder& encoder, const float* w, int64_t count, float scale,
                              float zero, uint8_t* codes);
  template <typename Codec>
  static double ErrorWithCodec(const Encoder& encoder, const float* w, const float* importance,
                               int64_t count, float scale, float zero, double limit);
  template <int kBits>
  static double ErrorWithTable(const Encoder& encoder, const float* w, const float* importance,
                               int64_t count, float scale, float zero, double limit);
  template <typename Codec>
  void Use();
  void MakeThresholds();

  EncodeFunction encode_ = nullptr;
  ErrorFunction squared_error_ = nullptr;
  std::span<const float> values_;
  std::array<float, 16> own_values_{};
  float levels_ = 0;
  float min_value_ = 0;
  float max_value_ = 0;
  uint8_t zero_code_ = 0;
  bool mirrors_ = false;
  // Tables of codebook formats: rank_to_code_[r] is the code of the r-th smallest value; the
  // nearest value's rank is the number of thresholds <= x.
  std::array<uint8_t, 16> rank_to_code_{};
  std::array<float, 15> thresholds_{};
};

}  // namespace marlin
