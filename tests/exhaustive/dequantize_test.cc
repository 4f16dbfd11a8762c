// Host Dequantize of all codes under all fp16 scales; for formats with zero points also all scales
// under all integer zeros, and all zeros under a spread of scales: exact against double. Without
// MARLIN_EXHAUSTIVE=full, "all" of the fp16 numbers is the integers that codes can be and a sample
// of the others with every exponent.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "value_grid.h"

namespace marlin::dequantize_test {
namespace {

/// A finite fp16 and its value by definition.
struct Half {
  uint16_t bits;
  double value;
};

/// Whether the sample has a number: all edges of its fraction, a few in between, and the integers
/// that zero points are.
bool IsSampled(uint32_t bits, double value) {
  const uint32_t fraction = bits & 0x3ffu;
  if (std::fabs(value) <= 256 && value == std::nearbyint(value)) return true;
  return fraction < 4 || fraction > 0x3fcu || std::popcount(fraction) == 1 ||
         std::popcount(~fraction & 0x3ffu) == 1 || fraction % 61 == 0;
}

std::vector<Half> FiniteHalves() {
  const auto values = test::SixteenBitValues(5);
  std::vector<Half> halves;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    if ((bits & 0x7c00u) == 0x7c00u) continue;
    if (!test::AllFloats() && !IsSampled(bits, values[bits])) continue;
    halves.push_back({static_cast<uint16_t>(bits), values[bits]});
  }
  return halves;
}

/// Rounds x once to a float of `precision` bits whose smallest normal is 2^min_exponent.
double RoundTo(double x, int precision, int min_exponent, double largest) {
  if (x == 0) return x;
  int exponent = 0;
  (void)std::frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
  const double unit = std::ldexp(1.0, std::max(exponent - 1, min_exponent) - (precision - 1));
  const double rounded = std::nearbyint(x / unit) * unit;
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}

double Rounded(DType dtype, double x) {
  switch (dtype) {
    case DType::kF16:
      return RoundTo(x, 11, -14, 65504.0);
    case DType::kBf16:
      return RoundTo(x, 8, -126, std::ldexp(255.0, 120));
    default:
      return RoundTo(x, 24, -126, static_cast<double>(std::numeric_limits<float>::max()));
  }
}

/// Columns of all codes, each with one scale and zero.
struct Columns {
  Format format;
  std::vector<Half> scales;
  std::vector<Half> zeros;  ///< Empty, or one per scale.
};

QuantizedWeights MakeWeights(const Columns& columns, const std::vector<uint32_t>& words,
                             const std::vector<uint16_t>& scales,
                             const std::vector<uint16_t>& zeros) {
  QuantizedWeights weights;
  WeightsSpec& spec = weights.spec;
  spec.format = columns.format;
  spec.k = 1 << GetFormatInfo(columns.format).bits;
  spec.n = static_cast<int64_t>(scales.size());
  spec.group_size = spec.k;
  spec.has_zeros = !zeros.empty();
  weights.codes =
      TensorView(words.data(), DType::kU32, {1, WordsAlongK(spec.format, spec.k), spec.n});
  weights.scales = TensorView(scales.data(), DType::kF16, {1, 1, spec.n});
  if (spec.has_zeros) weights.zeros = TensorView(zeros.data(), DType::kF16, {1, 1, spec.n});
  return weights;
}

/// Counts mismatches of one output type; `storage` holds k * n elements.
int64_t CountMismatches(const Columns& columns, const QuantizedWeights& weights, DType dtype) {
  const int64_t k = weights.spec.k;
  const int64_t n = weights.spec.n;
  std::vector<uint32_t> storage(static_cast<size_t>(k * n));
  const MutableTensorView out(storage.data(), dtype, {k, n});
  const Status status = Dequantize(weights, out);
  EXPECT_TRUE(status.ok()) << status.message();
  const auto values = test::GoldenValues()[std::string(FormatName(columns.format))];
  const auto half = test::SixteenBitValues(5);
  const auto bf16 = test::SixteenBitValues(8);
  int64_t mismatches = 0;
  for (int64_t i = 0; i < k * n; ++i) {
    const auto c = static_cast<size_t>(i % n);
    const auto code = static_cast<size_t>(i / n);
    // The fp8 columns use code 0 in place of NaN and Inf codes.
    const double value = std::isfinite(values[code]) ? values[code] : 0.0;
    const double zero = columns.zeros.empty() ? 0.0 : columns.zeros[c].value;
    const double expected = Rounded(dtype, columns.scales[c].value * (value - zero));
    double got = 0;
    if (dtype == DType::kF32) {
      got = static_cast<double>(out.As<float>()[i]);
    } else {
      const uint16_t bits = out.As<uint16_t>()[i];
      const uint32_t infinity = dtype == DType::kF16 ? 0x7c00u : 0x7f80u;
      got = dtype == DType::kF16 ? half[bits] : bf16[bits];
      if ((bits & 0x7fffu) == infinity) got = std::copysign(INFINITY, got);
    }
    mismatches += got == expected ? 0 : 1;
  }
  return mismatches;
}

void CheckColumns(const Columns& columns) {
  const auto values = test::GoldenValues()[std::string(FormatName(columns.format))];
  const int64_t k = 1 << GetFormatInfo(columns.format).bits;
  const auto n = static_cast<int64_t>(columns.scales.size());
  std::vector<uint8_t> codes(static_cast<size_t>(k * n));
  for (int64_t i = 0; i < k * n; ++i) {
    const auto code = static_cast<size_t>(i / n);
    codes[static_cast<size_t>(i)] = std::isfinite(values[code]) ? static_cast<uint8_t>(code) : 0;
  }
  std::vector<uint32_t> words(static_cast<size_t>(WordsAlongK(columns.format, k) * n));
  ASSERT_TRUE(PackCodes(columns.format, k, n, codes, words).ok());
  std::vector<uint16_t> scales;
  std::vector<uint16_t> zeros;
  for (const Half& scale : columns.scales) scales.push_back(scale.bits);
  for (const Half& zero : columns.zeros) zeros.push_back(zero.bits);
  const QuantizedWeights weights = MakeWeights(columns, words, scales, zeros);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    EXPECT_EQ(CountMismatches(columns, weights, dtype), 0)
        << FormatName(columns.format) << " to " << DTypeName(dtype);
  }
}

TEST(Dequantize, AllCodesUnderAllScalesAreExact) {
  const auto halves = FiniteHalves();
  ASSERT_EQ(halves.size(), test::AllFloats() ? 63488u : 2850u);
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized || info.zero_point == ZeroPoint::kRequired) continue;
    CheckColumns({info.format, halves, {}});
  }
}

TEST(Dequantize, AllCodesUnderAllScalesAndIntegerZerosAreExact) {
  const auto halves = FiniteHalves();
  for (const Format format :
       {Format::kU4, Format::kInt3, Format::kInt2, Format::kS8, Format::kU8}) {
    for (const auto zero : {0x0000, 0x3c00, 0x4200, 0x4700, 0x4800, 0x4b80, 0xbc00, 0xc200}) {
      Columns columns{format, halves, {}};
      const double value = test::SixteenBitValues(5)[static_cast<size_t>(zero)];
      columns.zeros.assign(halves.size(), {static_cast<uint16_t>(zero), value});
      CheckColumns(columns);
    }
  }
}

TEST(Dequantize, AllCodesUnderAllZerosAreExact) {
  const auto halves = FiniteHalves();
  for (const Format format : {Format::kU4, Format::kInt3, Format::kS8, Format::kU8}) {
    for (const size_t scale : {0x0001, 0x03ff, 0x0401, 0x3039, 0x4fff, 0x7bff, 0xa041}) {
      Columns columns{format, {}, halves};
      const double value = test::SixteenBitValues(5)[scale];
      columns.scales.assign(halves.size(), {static_cast<uint16_t>(scale), value});
      CheckColumns(columns);
    }
  }
}

}  // namespace
}  // namespace marlin::dequantize_test
