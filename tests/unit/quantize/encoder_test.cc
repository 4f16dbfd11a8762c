#include "quantize/encoder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "formats/codecs.h"

namespace marlin::encoder_test {
namespace {

std::vector<float> Numbers(float limit) {
  std::mt19937 rng(7);
  std::vector<float> x;
  for (int i = 0; i < 20000; ++i) {
    x.push_back((static_cast<float>(rng() % 2000001u) / 1e6f - 1.0f) * limit);
  }
  for (const float special : {0.0f, -0.0f, 1e30f, -1e30f, 1e-30f}) x.push_back(special);
  return x;
}

uint32_t CodecEncode(Format format, float x) {
  switch (format) {
#define MARLIN_FORMAT(enumerator, name, codec) \
  case Format::enumerator:                     \
    return formats::codec::Encode(x);
#include "marlin/formats.def"
#undef MARLIN_FORMAT
  }
  return 0;
}

TEST(Encoder, IsTheCodecForBuiltInTables) {
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    const Encoder encoder(info.format, {});
    std::vector<float> x = Numbers(info.max_value * 1.3f);
    // Midpoints, which are rounded by the tie rule, and their neighbours.
    for (float a : FormatValues(info.format)) {
      for (float b : FormatValues(info.format)) x.push_back((a + b) / 2);
    }
    std::erase_if(x, [](float value) { return !std::isfinite(value); });
    std::vector<uint8_t> codes(x.size());
    encoder.Encode(x.data(), static_cast<int64_t>(x.size()), 1.0f, 0.0f, codes.data());
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(codes[i], CodecEncode(info.format, x[i])) << info.name << " " << x[i];
    }
  }
}

TEST(Encoder, FindsTheNearestValueOfUnsortedTables) {
  // bitsandbytes' fp4: sign and magnitude, unsorted, with 0 twice.
  std::vector<float> table = {0.0f,        0.0052083333f, 0.66666667f, 1.0f,
                              0.33333333f, 0.5f,          0.16666667f, 0.25f};
  for (size_t i = 0; i < 8; ++i) table.push_back(-table[i]);
  const Encoder encoder(Format::kCodebook4, table);
  const std::vector<float> x = Numbers(1.2f);
  std::vector<uint8_t> codes(x.size());
  encoder.Encode(x.data(), static_cast<int64_t>(x.size()), 1.0f, 0.0f, codes.data());
  for (size_t i = 0; i < x.size(); ++i) {
    double nearest = INFINITY;
    for (float value : table) {
      nearest =
          std::min(nearest, std::fabs(static_cast<double>(x[i]) - static_cast<double>(value)));
    }
    ASSERT_LT(codes[i], 16);
    ASSERT_EQ(std::fabs(static_cast<double>(x[i]) - static_cast<double>(table[codes[i]])), nearest)
        << x[i];
  }
  uint8_t zero = 99;
  const float minus_zero = -0.0f;
  encoder.Encode(&minus_zero, 1, 1.0f, 0.0f, &zero);
  EXPECT_EQ(zero, 0);
  EXPECT_EQ(encoder.zero_code(), 0);
  EXPECT_EQ(encoder.levels(), 1.0f);
}

TEST(Encoder, TiesGoToTheEvenCode) {
  std::vector<float> table(16);
  for (size_t i = 0; i < 16; ++i) table[i] = static_cast<float>(i) - 8.0f;
  const Encoder encoder(Format::kCodebook4, table);
  const std::vector<float> x = {-7.5f, -6.5f, -0.5f, 0.5f, 1.5f, 6.5f};
  std::vector<uint8_t> codes(x.size());
  encoder.Encode(x.data(), static_cast<int64_t>(x.size()), 1.0f, 0.0f, codes.data());
  EXPECT_EQ(codes, (std::vector<uint8_t>{0, 2, 8, 8, 10, 14}));
}

TEST(Encoder, SquaredErrorIsThatOfItsCodes) {
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    const bool affine = info.zero_point != ZeroPoint::kNone;
    const Encoder encoder(info.format, {});
    std::vector<float> w = Numbers(info.max_value);
    w.resize(333);
    const float scale = 0.75f;
    const float zero = affine ? 1.0f : 0.0f;
    std::vector<uint8_t> codes(w.size());
    encoder.Encode(w.data(), static_cast<int64_t>(w.size()), scale, zero, codes.data());
    double expected = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      const float value = FormatValues(info.format)[codes[i]];
      expected += std::pow(static_cast<double>(w[i] - scale * (value - zero)), 2.0);
    }
    EXPECT_NEAR(
        encoder.SquaredError(w.data(), nullptr, static_cast<int64_t>(w.size()), scale, zero),
        expected, expected * 1e-4)
        << info.name;
  }
}

}  // namespace
}  // namespace marlin::encoder_test
