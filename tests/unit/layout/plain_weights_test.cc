// Weights in plainer forms: the same values, bit for bit, by another path.
#include "layout/plain_weights.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "../checkpoint/module_files.h"
#include "layout/parameters.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"

namespace marlin::plain_weights_test {
namespace {

constexpr Format kOddWidths[] = {Format::kInt6, Format::kU6, Format::kFp6E2M3, Format::kInt5,
                                 Format::kU5};

WeightsSpec SpecOf(Format format, int64_t super_group_size = 0) {
  WeightsSpec spec{.format = format,
                   .experts = 2,
                   .k = 150,
                   .n = 21,
                   .group_size = 16,
                   .super_group_size = super_group_size};
  spec.has_biases = GetFormatInfo(format).zero_point == ZeroPoint::kRequired;
  return spec;
}

QuantizedWeights Random(const WeightsSpec& spec, uint32_t seed) {
  return testing::RandomModule("w.weight", spec, seed).weights;
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i])) << i;
  }
}

TEST(PlainWeights, EveryWiderFormatHasAllValues) {
  for (const FormatInfo& info : AllFormats()) {
    const FormatInfo& wider = GetFormatInfo(WiderFormat(info.format));
    const bool odd = info.bits == 5 || info.bits == 6;
    EXPECT_EQ(odd, wider.format != info.format) << info.name;
    if (!odd) continue;
    EXPECT_EQ(wider.bits, 8);
    for (const float value : FormatValues(info.format)) {
      const std::span<const float> values = FormatValues(wider.format);
      EXPECT_TRUE(std::any_of(values.begin(), values.end(),
                              [&](float other) {
                                return std::bit_cast<uint32_t>(other) ==
                                       std::bit_cast<uint32_t>(value);
                              }))
          << info.name << " " << value;
    }
  }
}

TEST(PlainWeights, WiderCodesHaveTheSameValues) {
  uint32_t seed = 1;
  for (const Format format : kOddWidths) {
    for (const bool permuted : {false, true}) {
      WeightsSpec spec = SpecOf(format);
      spec.has_permutation = permuted;
      if (permuted && GetFormatInfo(format).zero_point != ZeroPoint::kNone) {
        spec.has_biases = false;
        spec.has_zeros = true;
      }
      const QuantizedWeights weights = Random(spec, seed++);
      const Result<QuantizedWeights> wide = WidenCodes(weights);
      ASSERT_TRUE(wide.ok()) << wide.status().message();
      spec.format = WiderFormat(format);
      EXPECT_EQ(wide->spec, spec);
      EXPECT_TRUE(Validate(*wide).ok());
      ExpectSameBits(testing::DenseOf(*wide), testing::DenseOf(weights));
    }
  }
}

/// Compares one level of scales with the products of two, made in double.
void ExpectProducts(const WeightsSpec& spec, const TensorView& flat, const TensorView& scales,
                    const TensorView& super_scales) {
  const int64_t groups = GroupCount(spec);
  for (int64_t row = 0; row < spec.experts * groups; ++row) {
    const int64_t super_row =
        row / groups * SuperGroupCount(spec) + row % groups * 16 / spec.super_group_size;
    for (int64_t n = 0; n < spec.n; ++n) {
      const double super_scale = ParameterAt(super_scales, super_row * spec.n + n);
      EXPECT_EQ(flat.As<float>()[row * spec.n + n],
                static_cast<float>(super_scale * scales.As<int8_t>()[row * spec.n + n]));
    }
  }
}

TEST(PlainWeights, FlatScalesAreRoundedProducts) {
  uint32_t seed = 30;
  for (const ScaleType type : {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32}) {
    for (const int64_t super_group_size : {16, 32, 64, 256}) {
      WeightsSpec spec = SpecOf(Format::kU4, super_group_size);
      spec.scale_type = type;
      const QuantizedWeights weights = Random(spec, seed++);
      const Result<QuantizedWeights> flat = FlattenScales(weights);
      ASSERT_TRUE(flat.ok()) << flat.status().message();
      EXPECT_EQ(flat->spec, FlatSpec(spec));
      EXPECT_EQ(flat->spec.super_group_size, 0);
      EXPECT_EQ(flat->spec.scale_type, ScaleType::kF32);
      ExpectProducts(spec, flat->scales, weights.scales, weights.super_scales);
      ExpectProducts(spec, flat->biases, weights.biases, weights.super_biases);
      ExpectSameBits(testing::DenseOf(*flat), testing::DenseOf(weights));
    }
  }
}

TEST(PlainWeights, ConvertsByAllSteps) {
  const QuantizedWeights both = Random(SpecOf(Format::kInt6, 64), 60);
  WeightsSpec spec = FlatSpec(both.spec);
  spec.format = Format::kS8;
  const Result<QuantizedWeights> plain = ConvertTo(spec, both);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  EXPECT_EQ(plain->spec, spec);
  ExpectSameBits(testing::DenseOf(*plain), testing::DenseOf(both));

  const QuantizedWeights dense = Random(SpecOf(Format::kS4), 61);
  const Result<QuantizedWeights> sparse = Prune24(dense);
  ASSERT_TRUE(sparse.ok()) << sparse.status().message();
  const Result<QuantizedWeights> expanded = ConvertTo(dense.spec, *sparse);
  ASSERT_TRUE(expanded.ok()) << expanded.status().message();
  ExpectSameBits(testing::DenseOf(*expanded), testing::DenseOf(*sparse));
}

TEST(PlainWeights, PlainWeightsAreReturnedAsTheyAre) {
  const QuantizedWeights weights = Random(SpecOf(Format::kS4), 62);
  EXPECT_EQ(WidenCodes(weights)->codes.data(), weights.codes.data());
  EXPECT_EQ(FlattenScales(weights)->codes.data(), weights.codes.data());
  EXPECT_EQ(ConvertTo(weights.spec, weights)->codes.data(), weights.codes.data());
}

TEST(PlainWeights, EmptyMatricesConvert) {
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{0, 5}, {32, 0}, {0, 0}}) {
    WeightsSpec spec = SpecOf(Format::kU5, 32);
    spec.k = k;
    spec.n = n;
    const QuantizedWeights weights = Random(spec, 63);
    WeightsSpec plain = FlatSpec(spec);
    plain.format = Format::kU8;
    const Result<QuantizedWeights> converted = ConvertTo(plain, weights);
    ASSERT_TRUE(converted.ok()) << converted.status().message();
    EXPECT_EQ(converted->spec, plain);
  }
}

TEST(PlainWeights, InvalidWeightsAreRefused) {
  QuantizedWeights weights = Random(SpecOf(Format::kInt6, 64), 64);
  weights.super_scales = TensorView();
  EXPECT_EQ(FlattenScales(weights).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(WidenCodes(weights).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace marlin::plain_weights_test
