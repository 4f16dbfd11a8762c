// Reads back the weights that Prepare puts on a GPU: every format with every group size and scale
// type that it supports, as tiles and as canonical arrays.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "base/checked.h"
#include "base/scalars.h"
#include "gpu_fixture.h"
#include "reference/dequantize.h"

namespace marlin::dequantize_gpu_test {
namespace {

constexpr int64_t kK = 300;  // Neither whole tiles nor whole groups.
constexpr int64_t kN = 136;  // Nor whole blocks of outputs.

class PreparedOnGpu : public GpuTest<::testing::TestWithParam<std::tuple<Format, ScaleType>>> {
 protected:
  static Format format() { return std::get<0>(GetParam()); }
  static ScaleType scale_type() { return std::get<1>(GetParam()); }

  /// Weights dequantized by the device to f32, bf16 or f16.
  template <typename E>
  std::vector<E> Read(const PreparedWeights& weights, DType type) const {
    const DeviceBuffer out = Make(kK * kN * static_cast<int64_t>(sizeof(E)));
    const Status status = Dequantize(device(), weights, {out.data(), type, {kK, kN}});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(device().Synchronize().ok());
    return Download<E>(out);
  }

  void Check(const QuantizedWeights& weights, const PrepareOptions& options = {}) const {
    const Result<PreparedWeights> prepared = Prepare(weights, device(), options);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    const Result<reference::DenseWeights> expected = reference::Dequantize(weights);
    ASSERT_TRUE(expected.ok()) << expected.status().message();
    const std::vector<float> floats = Read<float>(*prepared, DType::kF32);
    const std::vector<uint16_t> bf16 = Read<uint16_t>(*prepared, DType::kBf16);
    const std::vector<uint16_t> f16 = Read<uint16_t>(*prepared, DType::kF16);
    for (size_t i = 0; i < floats.size(); ++i) {
      // Three fp32 roundings: the global scale, a difference or sum, a product.
      const double bound = 3 * 0x1p-24 * expected->magnitude[i] + 0x1p-149;
      ASSERT_NEAR(floats[i], expected->value[i], bound)
          << "k " << i / kN << ", n " << i % kN << ", group " << weights.spec.group_size;
      ASSERT_EQ(bf16[i], FloatToBf16(floats[i])) << "k " << i / kN << ", n " << i % kN;
      ASSERT_EQ(f16[i], FloatToHalf(floats[i])) << "k " << i / kN << ", n " << i % kN;
    }
  }
};

TEST_P(PreparedOnGpu, AreTheWeights) {
  std::vector<float> dense = GaussianFloats(kK * kN, 7);
  // Rows of very different magnitude: a neighbour's scale is far from the right one.
  for (size_t i = 0; i < dense.size(); ++i) {
    dense[i] = std::ldexp(dense[i], static_cast<int>(i * 5 % kN % 7) - 3);
  }
  const TensorView view(dense.data(), DType::kF32, {kK, kN});
  // 48 and 80 are multiples of 16 and of no larger power of two; 0 is one group. fp32 scales that
  // no 16-bit type holds, as here, prevent tiling.
  for (const int64_t group : {16, 32, 48, 64, 80, 128, 256, 0}) {
    for (const bool symmetric : {false, true}) {
      if (symmetric && GetFormatInfo(format()).zero_point != ZeroPoint::kOptional) continue;
      const Result<QuantizedWeights> weights = Quantize(view, {.format = format(),
                                                               .group_size = group,
                                                               .scale_type = scale_type(),
                                                               .symmetric = symmetric});
      ASSERT_TRUE(weights.ok()) << weights.status().message();
      Check(*weights);
      const FormatInfo& info = GetFormatInfo(format());
      if (info.quantized && info.bits == 4 && scale_type() != ScaleType::kF32) {
        Check(*weights, {.marlin_w4 = true});
      } else {
        const Result<PreparedWeights> refused = Prepare(*weights, device(), {.marlin_w4 = true});
        ASSERT_EQ(refused.status().code(), Code::kUnsupported);
      }
      if (HasFatalFailure() || !GetFormatInfo(format()).quantized) return;
    }
  }
}

class DenseOnGpu : public GpuTest<::testing::Test> {
 protected:
  /// Destination of [kK, n] weights: element (k, n) at first + k * rows + n * columns.
  struct Places {
    int64_t n;
    int64_t first;
    int64_t rows;
    int64_t columns;
  };

  /// Every element holds its weight, and all memory between keeps its contents.
  template <typename E>
  void Check(const PreparedWeights& weights, const Places& places, DType type, E untouched) const {
    const DeviceBuffer compact = Make(kK * places.n * static_cast<int64_t>(sizeof(E)));
    ASSERT_TRUE(Dequantize(device(), weights, {compact.data(), type, {kK, places.n}}).ok());
    ASSERT_TRUE(device().Synchronize().ok());
    const std::vector<E> dense = Download<E>(compact);
    std::vector<E> expected(
        static_cast<size_t>(places.first + kK * places.rows + places.n * places.columns),
        untouched);
    const DeviceBuffer apart = Upload(expected);
    const MutableTensorView view(static_cast<E*>(apart.data()) + places.first, type, {kK, places.n},
                                 {places.rows, places.columns});
    const Status status = Dequantize(device(), weights, view);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(device().Synchronize().ok());
    for (int64_t i = 0; i < kK * places.n; ++i) {
      const int64_t at = places.first + i / places.n * places.rows + i % places.n * places.columns;
      expected[static_cast<size_t>(at)] = dense[static_cast<size_t>(i)];
    }
    ASSERT_EQ(Download<E>(apart), expected)
        << "n " << places.n << ", first " << places.first << ", strides " << places.rows << ", "
        << places.columns;
  }

  void CheckTypes(const PreparedWeights& weights, const Places& places) const {
    Check<float>(weights, places, DType::kF32, -12345.0F);
    Check<uint16_t>(weights, places, DType::kBf16, uint16_t{0x1234});
    Check<uint16_t>(weights, places, DType::kF16, uint16_t{0x1234});
  }
};

TEST_F(DenseOnGpu, LieApartAndAnywhere) {
  for (const int64_t n : {1, 7, 33, 136, 260}) {
    const std::vector<float> dense = GaussianFloats(kK * n, 11);
    // Tiled, and canonical.
    for (const ScaleType scales : {ScaleType::kF16, ScaleType::kF32}) {
      const Result<QuantizedWeights> weights =
          Quantize({dense.data(), DType::kF32, {kK, n}}, {.scale_type = scales});
      ASSERT_TRUE(weights.ok()) << weights.status().message();
      const Result<PreparedWeights> prepared = Prepare(*weights, device());
      ASSERT_TRUE(prepared.ok()) << prepared.status().message();
      for (const int64_t first : {0, 1, 2, 8}) {
        for (const int64_t rows : {n, n + 1, RoundUp(n, int64_t{8}) + 8}) {
          CheckTypes(*prepared, {n, first, rows, 1});
        }
        CheckTypes(*prepared, {n, first, 1, kK});
        if (HasFatalFailure()) return;
      }
    }
  }
}

std::vector<Format> EveryFormat() {
  std::vector<Format> formats;
  for (const FormatInfo& info : AllFormats()) formats.push_back(info.format);
  return formats;
}

INSTANTIATE_TEST_SUITE_P(Formats, PreparedOnGpu,
                         ::testing::Combine(::testing::ValuesIn(EveryFormat()),
                                            ::testing::Values(ScaleType::kF16, ScaleType::kBf16,
                                                              ScaleType::kF32, ScaleType::kE8M0,
                                                              ScaleType::kE4M3)),
                         [](const auto& test) {
                           return std::string(FormatName(std::get<0>(test.param))) + "_" +
                                  std::string(ScaleTypeName(std::get<1>(test.param)));
                         });

}  // namespace
}  // namespace marlin::dequantize_gpu_test
