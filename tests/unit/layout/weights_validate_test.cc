#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "layout/weights_buffer.h"
#include "layout/weights_shapes.h"
#include "marlin/weights.h"

namespace marlin::weights_validate_test {
namespace {

WeightsSpec SpecOf(Format format, int64_t k = 64, int64_t n = 3, int64_t group_size = 32) {
  WeightsSpec spec;
  spec.format = format;
  spec.experts = 2;
  spec.k = k;
  spec.n = n;
  spec.group_size = group_size;
  spec.has_zeros = GetFormatInfo(format).zero_point == ZeroPoint::kRequired;
  return spec;
}

/// All-zero weights, which are valid in every format.
WeightsBuffer Zeroed(const WeightsSpec& spec) {
  auto buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  const QuantizedWeights& w = buffer->weights;
  std::memset(buffer->codes, 0, static_cast<size_t>(w.codes.ByteCount()));
  if (buffer->scales != nullptr) {
    std::memset(buffer->scales, 0, static_cast<size_t>(w.scales.ByteCount()));
  }
  if (buffer->zeros != nullptr) {
    std::memset(buffer->zeros, 0, static_cast<size_t>(w.zeros.ByteCount()));
  }
  if (buffer->biases != nullptr) {
    std::memset(buffer->biases, 0, static_cast<size_t>(w.biases.ByteCount()));
  }
  if (buffer->super_scales != nullptr) {
    std::memset(buffer->super_scales, 0, static_cast<size_t>(w.super_scales.ByteCount()));
  }
  if (buffer->super_biases != nullptr) {
    std::memset(buffer->super_biases, 0, static_cast<size_t>(w.super_biases.ByteCount()));
  }
  if (buffer->global_scale != nullptr) {
    std::memset(buffer->global_scale, 0, static_cast<size_t>(w.global_scale.ByteCount()));
  }
  return *std::move(buffer);
}

void ExpectError(const QuantizedWeights& weights, Code code, const std::string& message) {
  const Status status = Validate(weights);
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_EQ(status.message(), message);
}

TEST(Validate, AcceptsWhatIsAllocated) {
  for (const FormatInfo& info : AllFormats()) {
    const WeightsBuffer buffer = Zeroed(SpecOf(info.format));
    EXPECT_TRUE(Validate(buffer.weights).ok()) << info.name;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.codes) % 64, 0u);
  }
}

TEST(Validate, StoredBytesIsTheSumOfTheViews) {
  for (const FormatInfo& info : AllFormats()) {
    WeightsSpec spec = SpecOf(info.format, 100, 7, 48);
    const QuantizedWeights w = Zeroed(spec).weights;
    int64_t bytes = w.codes.ByteCount() + (info.has_codebook ? 4 << info.bits : 0);
    for (const TensorView* view : {&w.scales, &w.zeros, &w.biases, &w.global_scale}) {
      if (!view->empty()) bytes += view->ByteCount();
    }
    EXPECT_EQ(StoredBytes(spec), bytes) << info.name;
    EXPECT_DOUBLE_EQ(BitsPerWeight(spec), 8.0 * static_cast<double>(bytes) / 1400) << info.name;
  }
}

TEST(Validate, ZerosHaveTheTypeOfTheSpec) {
  for (const ScaleType type : {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32}) {
    WeightsSpec spec = SpecOf(Format::kU8);
    spec.zero_type = type;
    QuantizedWeights weights = Zeroed(spec).weights;
    EXPECT_EQ(weights.zeros.dtype(), ScaleDType(type));
    EXPECT_TRUE(Validate(weights).ok());
    WeightsSpec without = spec;
    without.has_zeros = false;
    without.has_biases = true;
    without.zero_type = ScaleType::kF16;
    EXPECT_EQ(StoredBytes(spec) - StoredBytes(without),
              12 * (DTypeBytes(ScaleDType(type)) - DTypeBytes(DType::kF16)));
  }
  WeightsSpec spec = SpecOf(Format::kU8);
  spec.zero_type = ScaleType::kE8M0;
  EXPECT_EQ(CheckSpec(spec).message(), "zero_type: expected fp16, bf16 or fp32, got e8m0");
  spec.zero_type = static_cast<ScaleType>(9);
  EXPECT_EQ(CheckSpec(spec).message(), "scale type: unknown number 9");
  spec.zero_type = ScaleType::kF32;
  QuantizedWeights weights = Zeroed(spec).weights;
  weights.spec.zero_type = ScaleType::kF16;
  ExpectError(weights, Code::kInvalidArgument,
              "zeros: expected f16 [2, 2, 3], got f32 [2, 2, 3] (u8, k=64, n=3, group_size=32)");
  spec.has_zeros = false;
  spec.has_biases = true;
  EXPECT_EQ(CheckSpec(spec).message(), "zero_type: fp32, but there are no zeros");
  EXPECT_EQ(CheckSpec(SpecOf(Format::kS8)).message(), "");
  WeightsSpec unsigned_codes = SpecOf(Format::kU8);
  unsigned_codes.has_zeros = false;
  EXPECT_EQ(CheckSpec(unsigned_codes).message(), "zeros: format u8 needs zeros or biases");
}

TEST(Validate, SuperScalesHaveTheTypeAndShapeOfTheSpec) {
  WeightsSpec spec = SpecOf(Format::kU4, 80, 3, 16);
  spec.has_zeros = false;
  spec.has_biases = true;
  spec.super_group_size = 32;
  for (const ScaleType type : {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32}) {
    spec.scale_type = type;
    const QuantizedWeights weights = Zeroed(spec).weights;
    EXPECT_EQ(weights.scales.dtype(), DType::kI8);
    EXPECT_EQ(weights.biases.dtype(), DType::kI8);
    EXPECT_EQ(weights.super_scales.dtype(), ScaleDType(type));
    EXPECT_EQ(weights.super_scales.shape(), (Shape{2, 3, 3}));
    EXPECT_EQ(weights.super_biases.shape(), (Shape{2, 3, 3}));
    EXPECT_TRUE(Validate(weights).ok()) << Validate(weights).message();
    int64_t bytes = 0;
    for (const TensorView* view : {&weights.codes, &weights.scales, &weights.biases,
                                   &weights.super_scales, &weights.super_biases}) {
      bytes += view->ByteCount();
    }
    EXPECT_EQ(StoredBytes(spec), bytes);
  }
  QuantizedWeights weights = Zeroed(spec).weights;
  weights.super_biases = TensorView();
  ExpectError(weights, Code::kInvalidArgument,
              "super_biases: expected f32 [2, 3, 3], got f32 [] (u4, k=80, n=3, group_size=16)");
}

TEST(Validate, SuperScalesAndTheirProductsAreFinite) {
  WeightsSpec spec = SpecOf(Format::kInt6, 64, 3, 16);
  spec.super_group_size = 64;
  spec.scale_type = ScaleType::kF32;
  const WeightsBuffer buffer = Zeroed(spec);
  auto* const super_scales = static_cast<float*>(buffer.super_scales);
  super_scales[4] = std::numeric_limits<float>::infinity();
  ExpectError(buffer.weights, Code::kMalformedFile,
              "super_scales: value at [1, 0, 1] is NaN or Inf");
  super_scales[4] = -3e36f;
  ExpectError(buffer.weights, Code::kMalformedFile,
              "super_scales: value at [1, 0, 1] is too large: its product with a scale may be "
              "infinite");
  super_scales[4] = -2e36f;
  EXPECT_TRUE(Validate(buffer.weights).ok());
}

TEST(Validate, TwoLevelsNeedScalesOfOneKind) {
  const auto message = [](WeightsSpec spec) { return std::string(CheckSpec(spec).message()); };
  WeightsSpec spec = SpecOf(Format::kInt6, 64, 3, 16);
  for (const int64_t size : {int64_t{24}, int64_t{-16}}) {
    spec.super_group_size = size;
    EXPECT_EQ(message(spec), "super_group_size: expected a multiple of group_size=16, got " +
                                 std::to_string(size));
  }
  spec.super_group_size = 64;
  EXPECT_EQ(message(spec), "");
  spec.scale_type = ScaleType::kE8M0;
  EXPECT_EQ(message(spec), "super_group_size: super scales are fp16, bf16 or fp32, got e8m0");
  spec.scale_type = ScaleType::kF16;
  spec.format = Format::kBf16;
  EXPECT_EQ(message(spec), "super_group_size: format bf16 has no scales");
  spec.format = Format::kS4;
  spec.sparsity = Sparsity::k24;
  EXPECT_EQ(message(spec), "super_group_size: 2:4 weights have one level of scales");
}

TEST(Validate, AGlobalScaleThatDividesLeavesScalesFinite) {
  WeightsSpec spec = SpecOf(Format::kFp4E2M1);
  spec.global_scale_divides = true;
  EXPECT_EQ(CheckSpec(spec).message(), "global_scale_divides: there is no global scale");
  spec.scale_type = ScaleType::kE4M3;
  spec.has_global_scale = true;
  const WeightsBuffer buffer = Zeroed(spec);
  for (const float bad : {0.0f, -0.0f, 1e-37f}) {
    buffer.global_scale[0] = 2.0f;
    buffer.global_scale[1] = bad;
    ExpectError(
        buffer.weights, Code::kMalformedFile,
        "global_scale: value at [1] divides scales and is too small: " + std::to_string(bad));
  }
  buffer.global_scale[1] = -1e-30f;
  EXPECT_TRUE(Validate(buffer.weights).ok());
}

TEST(Validate, NamesBothShapesOfAWrongView) {
  QuantizedWeights weights = Zeroed(SpecOf(Format::kU4)).weights;
  const QuantizedWeights good = weights;
  weights.scales = TensorView(good.scales.data(), DType::kF16, {2, 1, 3});
  ExpectError(weights, Code::kInvalidArgument,
              "scales: expected f16 [2, 2, 3], got f16 [2, 1, 3] (u4, k=64, n=3, group_size=32)");
  weights = good;
  weights.codes = TensorView(good.codes.data(), DType::kI32, good.codes.shape());
  ExpectError(weights, Code::kInvalidArgument,
              "codes: expected u32 [2, 8, 3], got i32 [2, 8, 3] (u4, k=64, n=3, group_size=32)");
  weights = good;
  weights.zeros = TensorView();
  ExpectError(weights, Code::kInvalidArgument,
              "zeros: expected f16 [2, 2, 3], got f32 [] (u4, k=64, n=3, group_size=32)");
  weights = good;
  weights.biases = good.scales;
  ExpectError(weights, Code::kInvalidArgument, "biases: present, but the spec has none");
  weights = good;
  weights.codes = TensorView(nullptr, DType::kU32, good.codes.shape());
  ExpectError(weights, Code::kInvalidArgument, "codes: no data");
  weights = good;
  weights.codes =
      TensorView(static_cast<const char*>(good.codes.data()) + 2, DType::kU32, good.codes.shape());
  ExpectError(weights, Code::kInvalidArgument, "codes: is not 4-byte aligned");
  weights = good;
  weights.scales.set_stride(2, 2);
  ExpectError(weights, Code::kInvalidArgument, "scales: is not contiguous");
}

TEST(Validate, RefusesNonFiniteContentWithItsPosition) {
  struct Case {
    ScaleType type;
    uint32_t bits;
  };
  for (const Case& bad : {Case{ScaleType::kF16, 0x7e00u}, Case{ScaleType::kF16, 0xfc00u},
                          Case{ScaleType::kBf16, 0x7f80u}, Case{ScaleType::kF32, 0x7fc00000u},
                          Case{ScaleType::kE8M0, 0xffu}, Case{ScaleType::kE4M3, 0xffu}}) {
    WeightsSpec spec = SpecOf(Format::kFp4E2M1);
    spec.scale_type = bad.type;
    spec.has_global_scale = bad.type == ScaleType::kE4M3;
    const WeightsBuffer buffer = Zeroed(spec);
    const int64_t bytes = DTypeBytes(ScaleDType(bad.type));
    std::memcpy(static_cast<char*>(buffer.scales) + 10 * bytes, &bad.bits,
                static_cast<size_t>(bytes));
    ExpectError(buffer.weights, Code::kMalformedFile, "scales: value at [1, 1, 1] is NaN or Inf");
  }
  WeightsBuffer buffer = Zeroed(SpecOf(Format::kU4));
  static_cast<uint16_t*>(buffer.zeros)[4] = 0x7c00;
  ExpectError(buffer.weights, Code::kMalformedFile, "zeros: value at [0, 1, 1] is NaN or Inf");
}

TEST(Validate, RefusesCodesThatMeanNanOrInfinity) {
  for (const auto& [format, code] : {std::pair{Format::kFp8E4M3, 0x7f},
                                     {Format::kFp8E4M3, 0xff},
                                     {Format::kFp8E5M2, 0x7c},
                                     {Format::kFp8E5M2, 0xfe}}) {
    const WeightsBuffer buffer = Zeroed(SpecOf(format));
    // Expert 1, word row 5, column 2, byte 3: k = 23.
    static_cast<uint8_t*>(buffer.codes)[((16 + 5) * 3 + 2) * 4 + 3] = static_cast<uint8_t>(code);
    ExpectError(buffer.weights, Code::kMalformedFile,
                "codes: code " + std::to_string(code) + " of " + std::string(FormatName(format)) +
                    " at [1, 23, 2] means NaN or Inf");
  }
}

// A tensor of a file may begin at any byte. UBSan sees loads that need alignment.
TEST(FindNonFinite, ReadsMisalignedTensors) {
  for (const auto& [dtype, inf] :
       {std::pair{DType::kF16, 0x7c00U}, {DType::kBf16, 0x7f80U}, {DType::kF32, 0x7f800000U}}) {
    std::vector<unsigned char> bytes(1 + 40 * 4);
    const TensorView view(bytes.data() + 1, dtype, {40});
    EXPECT_EQ(FindNonFinite(view), -1) << DTypeName(dtype);
    const auto size = static_cast<size_t>(DTypeBytes(dtype));
    std::memcpy(bytes.data() + 1 + 33 * size, &inf, size);
    EXPECT_EQ(FindNonFinite(view), 33) << DTypeName(dtype);
  }
}

TEST(Validate, ChecksCodebooks) {
  QuantizedWeights weights = Zeroed(SpecOf(Format::kNf3)).weights;
  weights.codebook.assign(8, 0.5f);
  EXPECT_TRUE(Validate(weights).ok());
  weights.codebook[3] = INFINITY;
  ExpectError(weights, Code::kMalformedFile, "codebook: value 3 is NaN or Inf");
  weights.codebook.assign(7, 0.5f);
  ExpectError(weights, Code::kInvalidArgument, "codebook: expected 8 values, got 7");
  weights = Zeroed(SpecOf(Format::kS4)).weights;
  weights.codebook.assign(16, 0.5f);
  ExpectError(weights, Code::kInvalidArgument, "codebook: present, but the values of s4 are fixed");
}

TEST(CheckSpec, NamesTheField) {
  const auto message = [](const WeightsSpec& spec) {
    const Status status = CheckSpec(spec);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  WeightsSpec spec = SpecOf(Format::kS4);
  spec.k = -1;
  EXPECT_EQ(message(spec), "weights: negative shape [2, -1, 3]");
  spec.k = int64_t{1} << 61;
  EXPECT_EQ(message(spec), "weights: size overflows for [2, 2305843009213693952, 3]");
  spec = SpecOf(Format::kS4, 64, 3, 24);
  EXPECT_EQ(message(spec),
            "group_size: expected a multiple of 16, or 0 for one group of all k = 64, got 24");
  spec = SpecOf(Format::kS4, 64, 3, 0);
  EXPECT_EQ(message(spec), "group_size: expected at least 1, got 0");
  spec = SpecOf(Format::kS4);
  spec.has_zeros = true;
  EXPECT_EQ(message(spec), "zeros: format s4 has none");
  spec = SpecOf(Format::kU4);
  spec.has_zeros = false;
  EXPECT_EQ(message(spec), "zeros: format u4 needs zeros or biases");
  spec.has_biases = true;
  EXPECT_TRUE(CheckSpec(spec).ok());
  spec.has_zeros = true;
  EXPECT_EQ(message(spec), "zeros: cannot be combined with biases");
  spec = SpecOf(Format::kFp4E2M1);
  spec.scale_type = ScaleType::kE4M3;
  EXPECT_EQ(message(spec), "global_scale: scales of type e4m3 need one");
  spec = SpecOf(Format::kBf16);
  spec.has_biases = true;
  EXPECT_EQ(message(spec), "format: bf16 has no scales, so no zeros, biases or global scale");
  spec = SpecOf(static_cast<Format>(200));
  spec.has_zeros = false;
  EXPECT_EQ(message(spec), "format: unknown number 200");
}

}  // namespace
}  // namespace marlin::weights_validate_test
