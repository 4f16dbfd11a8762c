#include "marlin/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/scalars.h"
#include "marlin/layout.h"
#include "marlin/weights.h"

namespace marlin::quantize_test {
namespace {

struct Dense {
  int64_t k;
  int64_t n;
  std::vector<float> data;
  TensorView view() const { return TensorView(data.data(), DType::kF32, {k, n}); }
  float at(int64_t i, int64_t j) const { return data[static_cast<size_t>(i * n + j)]; }
};

Dense Gaussian(int64_t k, int64_t n, unsigned seed = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  Dense dense{k, n, std::vector<float>(static_cast<size_t>(k * n))};
  for (float& x : dense.data) x = normal(rng);
  return dense;
}

std::vector<float> Decoded(const QuantizedWeights& weights) {
  std::vector<float> out(
      static_cast<size_t>(weights.spec.experts * weights.spec.k * weights.spec.n));
  const MutableTensorView view(out.data(), DType::kF32,
                               {weights.spec.experts, weights.spec.k, weights.spec.n});
  const Status status = Dequantize(weights, view);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

bool SameBytes(const TensorView& a, const TensorView& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         (a.empty() || b.empty() || a.ByteCount() == 0 ||
          std::memcmp(a.data(), b.data(), static_cast<size_t>(a.ByteCount())) == 0);
}

/// Quantizes, validates and decodes; bounds the relative squared error.
void CheckClose(const Dense& dense, const QuantizeOptions& options) {
  const FormatInfo& info = GetFormatInfo(options.format);
  SCOPED_TRACE(std::string(info.name) + " " + std::string(ScaleTypeName(options.scale_type)) +
               " g" + std::to_string(options.group_size) + " " +
               std::string(QuantizeMethodName(options.method)));
  const auto weights = Quantize(dense.view(), options);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  ASSERT_TRUE(Validate(*weights).ok()) << Validate(*weights).message();
  const auto out = Decoded(*weights);
  double error = 0;
  double power = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    error += std::pow(out[i] - dense.data[i], 2.0);
    power += std::pow(dense.data[i], 2.0);
  }
  EXPECT_LT(error, power * (info.bits == 2 ? 1.0 : info.bits == 3 ? 0.2 : 0.06));
}

TEST(Quantize, EveryFormatScaleTypeGroupSizeAndMethodIsValidAndClose) {
  const Dense shapes[] = {Gaussian(300, 21), Gaussian(64, 16), Gaussian(17, 1)};
  const int64_t groups[] = {16, 32, 48, 128, 0};
  // Every combination, enumerated in mixed radix: shape, method, group size, scale type, format.
  const size_t combinations = 3 * 2 * 5 * 5 * AllFormats().size();
  for (size_t i = 0; i < combinations; ++i) {
    QuantizeOptions options;
    options.method = i / 3 % 2 == 0 ? QuantizeMethod::kRtn : QuantizeMethod::kMse;
    options.group_size = groups[i / 6 % 5];
    options.scale_type = static_cast<ScaleType>(i / 30 % 5);
    options.format = AllFormats()[i / 150].format;
    CheckClose(shapes[i % 3], options);
  }
}

TEST(Quantize, Fp4UsesAbsmaxOverSixAndPacksAlongK) {
  Dense dense{16, 1, std::vector<float>(16, 0.0f)};
  const float values[] = {12, -12, 8, 6, 4, 3, 2, 1, -1, -0.5f, 0.49f, -0.0f, 5, 7, 9, 11};
  std::copy(std::begin(values), std::end(values), dense.data.begin());
  QuantizeOptions options;
  options.group_size = 16;
  const auto weights = Quantize(dense.view(), options);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(HalfToFloat(weights->scales.As<uint16_t>()[0]), 2.0f);
  std::vector<uint8_t> codes(16);
  ASSERT_TRUE(UnpackCodes(Format::kFp4E2M1, 16, 1,
                          {weights->codes.As<uint32_t>(), static_cast<size_t>(2)}, codes)
                  .ok());
  // x / 2: 6 -6 4 3 2 1.5 1 .5 -.5 -.25 .245 -0 2.5 3.5 4.5 5.5; ties to the even code.
  EXPECT_EQ(codes, (std::vector<uint8_t>{7, 15, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 4, 6, 6, 7}));
}

// The far end of these tables has one sign, and the largest weight the other.
TEST(Quantize, SearchesNegativeScales) {
  for (const Format format : {Format::kInt2, Format::kInt3, Format::kS4, Format::kNf4,
                              Format::kCodebook4, Format::kInt5, Format::kInt6}) {
    SCOPED_TRACE(std::string(GetFormatInfo(format).name));
    const std::span<const float> values = FormatValues(format);
    Dense dense{64, 1, {}};
    for (size_t i = 0; i < 64; ++i) dense.data.push_back(-0.5f * values[i % values.size()]);
    QuantizeOptions options;
    options.format = format;
    options.group_size = 64;
    options.symmetric = GetFormatInfo(format).zero_point == ZeroPoint::kOptional;
    options.method = QuantizeMethod::kMse;
    const auto weights = Quantize(dense.view(), options);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(Decoded(*weights), dense.data);
    EXPECT_EQ(HalfToFloat(*static_cast<const uint16_t*>(weights->scales.data())), -0.5f);
    options.method = QuantizeMethod::kRtn;
    EXPECT_NE(Decoded(*Quantize(dense.view(), options)), dense.data);
  }
}

TEST(Quantize, GroupSizesAreNormalisedOrRefused) {
  const Dense dense = Gaussian(100, 2);
  QuantizeOptions options;
  for (const int64_t group : {0, 100, 101, 112, 4096}) {
    options.group_size = group;
    const auto weights = Quantize(dense.view(), options);
    ASSERT_TRUE(weights.ok()) << group;
    EXPECT_EQ(weights->spec.group_size, 100) << group;
  }
  for (const int64_t group : {-1, -16, 1, 7, 8, 24, 40, 99}) {
    options.group_size = group;
    const auto weights = Quantize(dense.view(), options);
    ASSERT_FALSE(weights.ok()) << group;
    EXPECT_EQ(weights.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(weights.status().message(),
              "group_size: expected a multiple of 16, or 0 for one group of all k = 100, got " +
                  std::to_string(group));
  }
}

TEST(Quantize, NamesTheTensorAndPositionOfNonFiniteWeights) {
  const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(),
                              -std::numeric_limits<float>::infinity()};
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kNf3, Format::kBf16}) {
    for (size_t i = 0; i < 4; ++i) {
      Dense dense = Gaussian(200, 40);
      dense.data[133 * 40 + 37] = bad_values[i % 2];
      QuantizeOptions options;
      options.format = format;
      options.scale_type = i < 2 ? ScaleType::kF16 : ScaleType::kE4M3;
      options.tensor_name = "layer.weight";
      const auto weights = Quantize(dense.view(), options);
      ASSERT_FALSE(weights.ok());
      EXPECT_EQ(weights.status().code(), Code::kNonFiniteInput);
      EXPECT_EQ(weights.status().message(), std::string("tensor 'layer.weight': ") +
                                                (i % 2 == 0 ? "NaN" : "Inf") +
                                                " at [133, 37] of [k, n]");
    }
  }
}

TEST(Quantize, ScaleOverflowProposesAnotherTypeAndUnderflowIsCounted) {
  Dense dense = Gaussian(32, 3);
  dense.data[16 * 3 + 1] = 6e5f;  // 1e5 overflows fp16.
  QuantizeOptions options;
  options.group_size = 16;
  options.tensor_name = "w";
  const auto overflow = Quantize(dense.view(), options);
  ASSERT_FALSE(overflow.ok());
  EXPECT_EQ(overflow.status().code(), Code::kUnsupported);
  EXPECT_EQ(overflow.status().message(),
            "tensor 'w': the scale 100000.000000 of the group at [16, 1] overflows fp16; use scale "
            "type bf16 or fp32");
  options.scale_type = ScaleType::kBf16;
  EXPECT_TRUE(Quantize(dense.view(), options).ok());

  Dense tiny = Gaussian(32, 3);
  for (int64_t i = 0; i < 16; ++i) tiny.data[static_cast<size_t>(i * 3 + 2)] = 1e-9f;
  options.scale_type = ScaleType::kF16;
  QuantizeReport report;
  const auto weights = Quantize(tiny.view(), options, &report);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(report.zeroed_groups, 1);
  const auto out = Decoded(*weights);
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(out[static_cast<size_t>(i * 3 + 2)], 0.0f);
}

TEST(Quantize, ZeroGroupsHaveScaleZeroAndDecodeToZero) {
  const Dense dense{48, 2, std::vector<float>(96, 0.0f)};
  for (const FormatInfo& info : AllFormats()) {
    QuantizeOptions options;
    options.format = info.format;
    options.group_size = 16;
    QuantizeReport report;
    const auto weights = Quantize(dense.view(), options, &report);
    ASSERT_TRUE(weights.ok());
    EXPECT_EQ(report.zeroed_groups, 0);
    for (float x : Decoded(*weights)) EXPECT_EQ(x, 0.0f) << info.name;
    if (info.quantized) {
      EXPECT_EQ(weights->scales.As<uint16_t>()[0], 0) << info.name;
    }
  }
}

TEST(Quantize, ZeroGroupsHoldTheCodeOfValueZero) {
  const Dense dense{16, 1, std::vector<float>(16, 0.0f)};
  const std::pair<Format, uint32_t> expected[] = {
      {Format::kFp4E2M1, 0x00000000u},   {Format::kU4, 0x00000000u},
      {Format::kS4, 0x88888888u},        {Format::kNf4, 0x77777777u},
      {Format::kCodebook4, 0x88888888u}, {Format::kInt2, 0xaaaaaaaau},
      {Format::kS8, 0x00000000u}};
  for (const auto& [format, word] : expected) {
    QuantizeOptions options;
    options.format = format;
    const auto weights = Quantize(dense.view(), options);
    ASSERT_TRUE(weights.ok());
    EXPECT_EQ(weights->codes.As<uint32_t>()[0], word) << FormatName(format);
  }
}

TEST(Quantize, ZeroSizedMatricesWork) {
  for (const FormatInfo& info : AllFormats()) {
    for (const auto& [k, n] : {std::pair<int64_t, int64_t>{0, 5}, {64, 0}, {0, 0}}) {
      QuantizeOptions options;
      options.format = info.format;
      const auto weights = Quantize(TensorView(nullptr, DType::kBf16, {k, n}), options);
      ASSERT_TRUE(weights.ok()) << weights.status().message();
      EXPECT_TRUE(Validate(*weights).ok()) << info.name << Validate(*weights).message();
      EXPECT_TRUE(Decoded(*weights).empty());
    }
  }
}

TEST(Quantize, StridedInputAndStackedExpertsGiveTheSameBits) {
  const int64_t k = 80;
  const int64_t n = 35;
  const Dense a = Gaussian(k, n, 1);
  const Dense b = Gaussian(k, n, 2);
  std::vector<float> transposed(static_cast<size_t>(2 * n * k));  // [e, n, k]
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      transposed[static_cast<size_t>(j * k + i)] = a.at(i, j);
      transposed[static_cast<size_t>((n + j) * k + i)] = b.at(i, j);
    }
  }
  const TensorView stack(transposed.data(), DType::kF32, {2, k, n}, {n * k, 1, k});
  for (const FormatInfo& info : AllFormats()) {
    for (const auto type : {ScaleType::kF16, ScaleType::kE4M3}) {
      QuantizeOptions options;
      options.format = info.format;
      options.scale_type = type;
      options.group_size = 32;
      const auto both = Quantize(stack, options);
      const auto one = Quantize(a.view(), options);
      const auto two = Quantize(b.view(), options);
      ASSERT_TRUE(both.ok() && one.ok() && two.ok());
      EXPECT_EQ(both->spec.experts, 2);
      auto decoded = Decoded(*one);
      const auto second = Decoded(*two);
      decoded.insert(decoded.end(), second.begin(), second.end());
      EXPECT_EQ(Decoded(*both), decoded) << info.name;
      const auto single =
          Quantize(TensorView(transposed.data(), DType::kF32, {n, k}).Transposed(), options);
      ASSERT_TRUE(single.ok());
      EXPECT_TRUE(SameBytes(single->codes, one->codes)) << info.name;
      EXPECT_TRUE(SameBytes(single->scales, one->scales)) << info.name;
    }
  }
}

TEST(Quantize, RefusesWhatIsNotAMatrixOfFloats) {
  std::vector<float> data(64);
  const auto message = [&](const TensorView& view, const QuantizeOptions& options = {}) {
    const auto weights = Quantize(view, options);
    EXPECT_FALSE(weights.ok());
    EXPECT_EQ(weights.status().code(), Code::kInvalidArgument);
    return weights.status().message();
  };
  EXPECT_EQ(message(TensorView(data.data(), DType::kF32, {64})),
            "tensor: expected [k, n] or [experts, k, n], got [64]");
  EXPECT_EQ(message(TensorView(data.data(), DType::kI8, {8, 8})),
            "tensor: expected f32, bf16 or f16, got i8");
  EXPECT_EQ(message(TensorView(nullptr, DType::kF32, {8, 8})), "tensor: null data");
  EXPECT_EQ(message(TensorView(data.data(), DType::kF32, {-8, 8})),
            "tensor: negative shape [-8, 8]");
  const TensorView good(data.data(), DType::kF32, {8, 8});
  QuantizeOptions options;
  options.codebook = {1.0f};
  EXPECT_EQ(message(good, options), "codebook: the values of fp4_e2m1 are fixed");
  options.format = Format::kCodebook4;
  EXPECT_EQ(message(good, options), "codebook: expected 16 values, got 1");
  options = {};
  options.format = Format::kU4;
  options.symmetric = true;
  EXPECT_EQ(message(good, options), "symmetric: format u4 needs zero points; use s4");
}

TEST(Quantize, UnquantizedFormatsRoundOnceAndRefuseOverflow) {
  Dense dense = Gaussian(40, 18);
  dense.data[3] = -0.0f;
  dense.data[39 * 18 + 17] = 70000.0f;
  QuantizeOptions options;
  options.format = Format::kBf16;
  const auto bf16 = Quantize(dense.view(), options);
  ASSERT_TRUE(bf16.ok());
  EXPECT_EQ(bf16->codes.shape(), (Shape{1, 40, 18}));
  for (size_t i = 0; i < dense.data.size(); ++i) {
    EXPECT_EQ(bf16->codes.As<uint16_t>()[i], FloatToBf16(dense.data[i]));
  }
  options.format = Format::kFp16;
  options.tensor_name = "w";
  const auto fp16 = Quantize(dense.view(), options);
  ASSERT_FALSE(fp16.ok());
  EXPECT_EQ(fp16.status().code(), Code::kUnsupported);
  EXPECT_EQ(fp16.status().message(),
            "tensor 'w': 70000.000000 at [39, 17] overflows fp16; use bf16");
}

TEST(Quantize, UserCodebooksReplaceTheTable) {
  const Dense dense = Gaussian(64, 5);
  QuantizeOptions options;
  options.format = Format::kNf2;
  options.codebook = {1.0f, -1.0f, 0.25f, -0.25f};
  options.group_size = 16;
  const auto weights = Quantize(dense.view(), options);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->codebook, options.codebook);
  const auto out = Decoded(*weights);
  for (size_t i = 0; i < out.size(); ++i) {
    const float scale = HalfToFloat(weights->scales.As<uint16_t>()[i / 5 / 16 * 5 + i % 5]);
    const float wanted = std::fabs(dense.data[i]) > 0.625f * scale ? scale : 0.25f * scale;
    EXPECT_EQ(out[i], std::copysign(wanted, dense.data[i])) << i;
  }
}

}  // namespace
}  // namespace marlin::quantize_test
