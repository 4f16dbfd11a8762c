#include "quantize/encoder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "formats/codecs.h"

namespace marlin {
namespace {

/// Whether b is nearer to x than a, where a < b are adjacent values; a tie goes to the even code.
/// Exact: near the midpoint both differences are exact in double.
bool IsNearerToUpper(float x, float a, float b, uint8_t code_a, uint8_t code_b) {
  const double down = static_cast<double>(x) - static_cast<double>(a);
  const double up = static_cast<double>(b) - static_cast<double>(x);
  if (up != down) return up < down;
  return code_b % 2 == 0 && code_a % 2 != 0;
}

/// Whether to use code a rather than b, of the same value.
bool Preferred(uint8_t a, uint8_t b) { return a % 2 != b % 2 ? a % 2 == 0 : a < b; }

/// Whether the values are consecutive integers, in order.
bool IsConsecutive(std::span<const float> values) {
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] != values[i - 1] + 1.0f) return false;
  }
  return true;
}

/// Whether some value is there with one sign only.
bool IsUneven(std::span<const float> values) {
  return std::any_of(values.begin(), values.end(), [&](float value) {
    return std::isfinite(value) && std::find(values.begin(), values.end(), -value) == values.end();
  });
}

template <size_t kCount>
double Total(const float (&lanes)[kCount]) {
  double sum = 0;
  for (const float lane : lanes) sum += static_cast<double>(lane);
  return sum;
}

/// Adds error(i) for i in [0, count) in fp32 over kLanes interleaved sums, so that the loop
/// vectorizes and the result does not depend on the vector width. Errors are not negative:
/// infinity as soon as some of them reach `limit`.
template <typename Error>
double SumInLanes(int64_t count, double limit, Error error) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    if (i > 0 && Total(lanes) >= limit) {
      return std::numeric_limits<double>::infinity();
    }
    float errors[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) errors[lane] = error(i + lane);
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += errors[lane];
  }
  for (; i < count; ++i) lanes[i % kLanes] += error(i);
  return Total(lanes);
}

/// SumInLanes of error(i), times importance[i] unless that is null, times the square of the scale.
template <typename Error>
double SumWeighted(int64_t count, const float* importance, double limit, float scale, Error error) {
  const double square = static_cast<double>(scale) * static_cast<double>(scale);
  // In units of the scale, so that squares of tiny weights do not underflow.
  const double most = limit / square;
  if (importance == nullptr) return SumInLanes(count, most, error) * square;
  const auto weighted = [&](int64_t i) { return error(i) * importance[i]; };
  return SumInLanes(count, most, weighted) * square;
}

}  // namespace

template <typename Codec>
void Encoder::EncodeWithCodec(const Encoder&, const float* w, int64_t count, float scale,
                              float zero, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(Codec::Encode(w[i] / scale + zero));
  }
}

template <int kBits>
void Encoder::EncodeWithTable(const Encoder& encoder, const float* w, int64_t count, float scale,
                              float zero, uint8_t* codes) {
  constexpr int kThresholds = (1 << kBits) - 1;
  float thresholds[kThresholds];
  std::copy_n(encoder.thresholds_.begin(), kThresholds, thresholds);
  constexpr int64_t kRun = 64;
  for (int64_t base = 0; base < count; base += kRun) {
    const int64_t run = std::min(kRun, count - base);
    int32_t ranks[kRun];
    for (int64_t i = 0; i < run; ++i) {
      const float x = w[base + i] / scale + zero;
      int32_t rank = 0;
      for (int t = 0; t < kThresholds; ++t) rank += x >= thresholds[t] ? 1 : 0;
      ranks[i] = rank;
    }
    for (int64_t i = 0; i < run; ++i) {
      codes[base + i] = encoder.rank_to_code_[static_cast<size_t>(ranks[i])];
    }
  }
}

template <typename Codec>
double Encoder::ErrorWithCodec(const Encoder&, const float* w, const float* importance,
                               int64_t count, float scale, float zero, double limit) {
  return SumWeighted(count, importance, limit, scale, [=](int64_t i) {
    const float x = w[i] / scale + zero;
    const float error = x - Codec::Value(Codec::Encode(x));
    return error * error;
  });
}

template <int kBits>
double Encoder::ErrorWithTable(const Encoder& encoder, const float* w, const float* importance,
                               int64_t count, float scale, float zero, double limit) {
  constexpr int kValues = 1 << kBits;
  float values[kValues];
  std::copy_n(encoder.values_.begin(), kValues, values);
  return SumWeighted(count, importance, limit, scale, [&](int64_t i) {
    const float x = w[i] / scale + zero;
    float nearest = std::numeric_limits<float>::max();
    for (int v = 0; v < kValues; ++v) {
      const float error = (x - values[v]) * (x - values[v]);
      nearest = error < nearest ? error : nearest;
    }
    return nearest;
  });
}

template <typename Codec>
void Encoder::Use() {
  if constexpr (Codec::kHasCodebook != 0) {
    encode_ = &Encoder::EncodeWithTable<Codec::kBits>;
    squared_error_ = &Encoder::ErrorWithTable<Codec::kBits>;
  } else {
    encode_ = &Encoder::EncodeWithCodec<Codec>;
    squared_error_ = &Encoder::ErrorWithCodec<Codec>;
  }
  // Small uneven tables: trying all values is faster than the codec's bit arithmetic.
  if constexpr (Codec::kBits <= 4) {
    if (!IsConsecutive(values_)) squared_error_ = &Encoder::ErrorWithTable<Codec::kBits>;
  }
}

Encoder::Encoder(Format format, std::span<const float> codebook) {
  const FormatInfo& info = GetFormatInfo(format);
  values_ = FormatValues(format);
  if (!codebook.empty()) {
    std::copy(codebook.begin(), codebook.end(), own_values_.begin());
    values_ = std::span<const float>(own_values_).first(codebook.size());
  }
  float nearest = std::numeric_limits<float>::infinity();
  for (size_t code = 0; code < values_.size(); ++code) {
    const float value = values_[code];
    if (!std::isfinite(value)) continue;  // NaN and Inf codes of fp8.
    min_value_ = std::min(min_value_, value);
    max_value_ = std::max(max_value_, value);
    if (std::fabs(value) < nearest) {
      nearest = std::fabs(value);
      zero_code_ = static_cast<uint8_t>(code);
    }
  }
  mirrors_ = values_.size() <= 64 && IsUneven(values_);
  levels_ = info.has_codebook ? std::max(-min_value_, max_value_) : max_value_;
  switch (format) {
#define MARLIN_FORMAT(enumerator, name, codec) \
  case Format::enumerator:                     \
    Use<formats::codec>();                     \
    break;
#include "marlin/formats.def"
#undef MARLIN_FORMAT
  }
  if (info.has_codebook) MakeThresholds();
}

void Encoder::MakeThresholds() {
  const auto count = values_.size();
  std::iota(rank_to_code_.begin(), rank_to_code_.end(), uint8_t{0});
  std::stable_sort(rank_to_code_.begin(), rank_to_code_.begin() + static_cast<ptrdiff_t>(count),
                   [this](uint8_t a, uint8_t b) { return values_[a] < values_[b]; });
  for (size_t r = 0; r + 1 < count; ++r) {
    const uint8_t code_a = rank_to_code_[r];
    const uint8_t code_b = rank_to_code_[r + 1];
    const float a = values_[code_a];
    const float b = values_[code_b];
    float low = a;
    float high = b;
    while (std::nextafter(low, high) < high) {
      const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
      const float probe = middle <= low || middle >= high ? std::nextafter(low, high) : middle;
      (IsNearerToUpper(probe, a, b, code_a, code_b) ? high : low) = probe;
    }
    thresholds_[r] = high;
  }
  // Among codes of equal value (0 and -0 of some fp4 tables) the first even one is used.
  for (size_t r = 0; r < count; ++r) {
    for (size_t s = 0; s < count; ++s) {
      const bool equal = values_[rank_to_code_[r]] == values_[rank_to_code_[s]];
      if (equal && Preferred(rank_to_code_[s], rank_to_code_[r]))
        rank_to_code_[r] = rank_to_code_[s];
    }
  }
}

}  // namespace marlin
