// Properties of every format for any data: exact consequences of the definitions.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "base/thread_pool.h"
#include "marlin/quantize.h"
#include "quantize/quantizer.h"

namespace marlin::quantize_properties_test {
namespace {

constexpr int64_t kK = 210;  // Odd multiples, partial last groups and runs.
constexpr int64_t kN = 37;

std::vector<float> Weights(unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<float> data(static_cast<size_t>(kK * kN));
  for (float& x : data) {
    const double u = (static_cast<double>(rng()) + 0.5) * 0x1p-32 - 0.5;
    x = static_cast<float>(0.2 * u * u * u);
  }
  return data;
}

struct Setting {
  Format format;
  ScaleType scale_type;
  QuantizeMethod method;
  bool symmetric;
};

std::vector<Setting> AllSettings() {
  std::vector<Setting> settings;
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    for (int i = 0; i < 10; ++i) {
      const auto type = static_cast<ScaleType>(i / 2);
      const auto method = i % 2 == 0 ? QuantizeMethod::kRtn : QuantizeMethod::kMse;
      settings.push_back({info.format, type, method, false});
      if (info.zero_point == ZeroPoint::kOptional) {
        settings.push_back({info.format, type, method, true});
      }
    }
  }
  return settings;
}

std::string Describe(const Setting& setting) {
  return std::string(FormatName(setting.format)) + " " +
         std::string(ScaleTypeName(setting.scale_type)) + " " +
         std::string(QuantizeMethodName(setting.method)) + (setting.symmetric ? " symmetric" : "");
}

QuantizeOptions OptionsOf(const Setting& setting) {
  QuantizeOptions options;
  options.format = setting.format;
  options.scale_type = setting.scale_type;
  options.method = setting.method;
  options.symmetric = setting.symmetric;
  options.group_size = 48;
  return options;
}

QuantizedWeights Quantized(const TensorView& dense, const Setting& setting, int threads = 1) {
  ThreadPool pool(threads);
  auto weights = QuantizeOn(pool, dense, OptionsOf(setting), nullptr);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  return *std::move(weights);
}

TensorView View(const std::vector<float>& data) { return {data.data(), DType::kF32, {kK, kN}}; }

bool SameBytes(const TensorView& a, const TensorView& b) {
  if (a.empty() || b.empty()) return a.empty() == b.empty();
  return a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), static_cast<size_t>(a.ByteCount())) == 0;
}

bool Same(const QuantizedWeights& a, const QuantizedWeights& b) {
  return a.spec == b.spec && SameBytes(a.codes, b.codes) && SameBytes(a.scales, b.scales) &&
         SameBytes(a.zeros, b.zeros) && SameBytes(a.global_scale, b.global_scale);
}

std::vector<float> Decoded(const QuantizedWeights& weights) {
  std::vector<float> out(static_cast<size_t>(kK * kN));
  EXPECT_TRUE(Dequantize(weights, MutableTensorView(out.data(), DType::kF32, {kK, kN})).ok());
  return out;
}

TEST(QuantizeProperties, ResultsDoNotDependOnTheNumberOfThreads) {
  const auto data = Weights(1);
  for (const Setting& setting : AllSettings()) {
    EXPECT_TRUE(Same(Quantized(View(data), setting, 1), Quantized(View(data), setting, 5)))
        << Describe(setting);
  }
}

TEST(QuantizeProperties, StridesAndElementTypesDoNotMatter) {
  auto data = Weights(2);
  std::vector<uint16_t> bf16(data.size());  // [n, k], with a gap after every row.
  const int64_t row = kK + 5;
  bf16.resize(static_cast<size_t>(kN * row), 0x7fc0);
  for (int64_t i = 0; i < kK * kN; ++i) {
    const uint16_t bits = FloatToBf16(data[static_cast<size_t>(i)]);
    data[static_cast<size_t>(i)] = Bf16ToFloat(bits);
    bf16[static_cast<size_t>(i % kN * row + i / kN)] = bits;
  }
  const TensorView strided(bf16.data(), DType::kBf16, {kK, kN}, {1, row});
  for (const Setting& setting : AllSettings()) {
    EXPECT_TRUE(Same(Quantized(View(data), setting), Quantized(strided, setting)))
        << Describe(setting);
  }
}

/// Powers of two scale every step exactly unless something under- or overflows.
TEST(QuantizeProperties, DoublingTheWeightsDoublesTheScales) {
  const auto data = Weights(3);
  std::vector<float> doubled(data);
  for (float& x : doubled) x *= 2.0f;
  for (const Setting& setting : AllSettings()) {
    const QuantizedWeights one = Quantized(View(data), setting);
    const QuantizedWeights two = Quantized(View(doubled), setting);
    // Subnormal fp16 scales lose bits, so such formats (large levels) are compared by fp32 scales.
    const bool exact =
        setting.scale_type != ScaleType::kF16 || GetFormatInfo(setting.format).max_value <= 127.0f;
    if (!exact) continue;
    EXPECT_TRUE(SameBytes(one.codes, two.codes)) << Describe(setting);
    auto expected = Decoded(one);
    for (float& x : expected) x *= 2.0f;
    EXPECT_EQ(Decoded(two), expected) << Describe(setting);
  }
}

/// Symmetric round-to-nearest formats: decoded values quantize to the same codes.
TEST(QuantizeProperties, QuantizingTwiceChangesNothing) {
  const auto data = Weights(4);
  for (const Setting& setting : AllSettings()) {
    const FormatInfo& info = GetFormatInfo(setting.format);
    const bool affine = info.zero_point == ZeroPoint::kRequired ||
                        (info.zero_point == ZeroPoint::kOptional && !setting.symmetric);
    const bool plain = setting.scale_type <= ScaleType::kF32;
    if (affine || !plain || setting.method != QuantizeMethod::kRtn) continue;
    if (setting.format == Format::kCodebook4) continue;  // Its extremes differ: 113 and -127.
    // absmax / 57344 is a subnormal fp16 here, a few percent off.
    if (setting.format == Format::kFp8E5M2 && setting.scale_type == ScaleType::kF16) continue;
    const QuantizedWeights once = Quantized(View(data), setting);
    const auto decoded = Decoded(once);
    const QuantizedWeights twice = Quantized(View(decoded), setting);
    EXPECT_TRUE(SameBytes(once.codes, twice.codes)) << Describe(setting);
    EXPECT_EQ(Decoded(twice), decoded) << Describe(setting);
  }
}

float ScaleAt(const QuantizedWeights& weights, int64_t index) {
  switch (weights.spec.scale_type) {
    case ScaleType::kF16:
      return HalfToFloat(weights.scales.As<uint16_t>()[index]);
    case ScaleType::kBf16:
      return Bf16ToFloat(weights.scales.As<uint16_t>()[index]);
    case ScaleType::kF32:
      return weights.scales.As<float>()[index];
    case ScaleType::kE8M0:
      return E8M0ToFloat(weights.scales.As<uint8_t>()[index]);
    case ScaleType::kE4M3:
      return Fp8E4M3ToFloat(weights.scales.As<uint8_t>()[index]) *
             weights.global_scale.As<float>()[0];
  }
  return 0;
}

/// Returns the smallest error over all codes.
double SmallestError(const QuantizedWeights& weights, int64_t index, double w) {
  const double scale = static_cast<double>(ScaleAt(weights, index));
  const double zero = weights.spec.has_zeros
                          ? static_cast<double>(HalfToFloat(weights.zeros.As<uint16_t>()[index]))
                          : 0.0;
  double smallest = INFINITY;
  for (float value : FormatValues(weights.spec.format)) {
    if (!std::isfinite(value)) continue;
    smallest = std::min(smallest, std::fabs(scale * (static_cast<double>(value) - zero) - w));
  }
  return smallest;
}

TEST(QuantizeProperties, EveryCodeIsANearestOne) {
  const auto data = Weights(5);
  for (const Setting& setting : AllSettings()) {
    const QuantizedWeights weights = Quantized(View(data), setting);
    const auto out = Decoded(weights);
    int64_t worse = 0;
    for (int64_t i = 0; i < kK * kN; ++i) {
      const double w = static_cast<double>(data[static_cast<size_t>(i)]);
      const double error = std::fabs(static_cast<double>(out[static_cast<size_t>(i)]) - w);
      const int64_t index = i / kN / weights.spec.group_size * kN + i % kN;
      const double scale = std::fabs(static_cast<double>(ScaleAt(weights, index)));
      // Slack: w / scale and the output are fp32 numbers.
      worse += error > SmallestError(weights, index, w) + 1e-6 * (std::fabs(w) + scale) ? 1 : 0;
    }
    EXPECT_EQ(worse, 0) << Describe(setting);
  }
}

}  // namespace
}  // namespace marlin::quantize_properties_test
