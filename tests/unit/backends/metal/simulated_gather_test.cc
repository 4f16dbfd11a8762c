// marlin_gather_gemv in the simulator: each row has the bits of a GEMV with its own matrix.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "backends/metal/gemm/foreign_product.h"
#include "backends/metal/metal_backend.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "ops/device/device.h"

namespace marlin::metal::simulated_gather_test {
namespace {

class SimulatedGather : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver();
    opened_ = driver.status();
    if (!opened_.ok()) return;
    driver_ = driver->get();  // The device's.
    device_ = Internals::Make<Device>(
        std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver))));
  }
  static void TearDownTestSuite() { device_.reset(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
  }

  std::vector<float> Random(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(random_() % 512) / 256.0F - 1.0F;
    return values;
  }

  QuantizedWeights Stack(int64_t k, int64_t n, Format format, ScaleType scales = ScaleType::kF16) {
    std::vector<float> values = Random(kMatrices * k * n);
    // Matrices of different sizes, so that their global scales differ.
    for (int64_t i = k * n; i < kMatrices * k * n; ++i) {
      values[static_cast<size_t>(i)] *= static_cast<float>(1 + i / (k * n));
    }
    QuantizeOptions options;
    options.scale_type = scales;
    options.format = format;
    options.group_size = scales == ScaleType::kE4M3 ? 16 : 32;
    return *Quantize({values.data(), DType::kF32, {kMatrices, k, n}}, options);
  }

  /// The results of ids, `ids_of_row` for each row of x.
  static std::vector<float> Gather(const QuantizedWeights& weights, const std::vector<float>& x,
                                   const std::vector<int32_t>& ids, int64_t ids_of_row) {
    const auto strips = *PrepareForeign(weights);
    const int64_t rows = static_cast<int64_t>(ids.size()) / ids_of_row;
    KernelLaunch launch = ForeignGatherLaunch(*strips, {rows, ids_of_row, DType::kF32});
    std::vector<float> global_scales;
    for (int64_t i = 0; i < kMatrices; ++i) global_scales.push_back(strips->global_scale(i));
    std::vector<float> out(ids.size() * static_cast<size_t>(weights.spec.n), -7.0F);
    for (KernelBuffer& buffer : launch.buffers) {
      switch (buffer.index) {
        case MARLIN_BUFFER_INPUT:
          buffer.data = x.data();
          break;
        case MARLIN_BUFFER_MATRIX_IDS:
          buffer.data = ids.data();
          break;
        case MARLIN_BUFFER_GLOBAL_SCALES:
          buffer.data = global_scales.data();
          break;
        case MARLIN_BUFFER_OUTPUT:
          buffer.data = out.data();
          break;
        default:
          buffer.data = PartOf(*strips, buffer.index).data;
      }
    }
    const Status status = driver_->Run({&launch, 1}, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  static StripPart PartOf(const PreparedStrips& strips, int index) {
    if (index == MARLIN_BUFFER_SCALES) return strips.scales(0);
    if (index == MARLIN_BUFFER_EXTRAS) return strips.extras(0);
    return index == MARLIN_BUFFER_TABLE ? strips.table() : strips.codes(0);
  }

  static std::vector<float> OfMatrix(const PreparedWeights& weights, const float* row,
                                     int32_t matrix) {
    const WeightsSpec& spec = weights.spec();
    std::vector<float> out(static_cast<size_t>(spec.n));
    GemmOptions options;
    options.expert = matrix;
    const Status status = Gemm(*device_, {row, DType::kF32, {1, spec.k}}, weights,
                               {out.data(), DType::kF32, {1, spec.n}}, options);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  static constexpr int64_t kMatrices = 4;
  std::mt19937 random_{5};
  inline static Status opened_;
  inline static Driver* driver_ = nullptr;
  inline static std::optional<Device> device_;
};

TEST_F(SimulatedGather, HasTheBitsOfEachMatrix) {
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kNf3, Format::kBf16}) {
    const QuantizedWeights weights = Stack(288, 44, format);
    const PreparedWeights ready = *Prepare(weights, *device_);
    const std::vector<float> x = Random(3 * 288);
    const std::vector<int32_t> ids = {3, 0, 1, 1, 2, 3};
    const std::vector<float> out = Gather(weights, x, ids, 2);
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto* const result = out.data() + i * 44;
      EXPECT_EQ(std::vector<float>(result, result + 44),
                OfMatrix(ready, x.data() + i / 2 * 288, ids[i]))
          << FormatName(format) << " " << i;
    }
  }
}

TEST_F(SimulatedGather, HasTheGlobalScaleOfEachMatrix) {
  const QuantizedWeights weights = Stack(64, 20, Format::kFp4E2M1, ScaleType::kE4M3);
  ASSERT_TRUE(weights.spec.has_global_scale);
  const PreparedWeights ready = *Prepare(weights, *device_);
  const std::vector<float> x = Random(64);
  const std::vector<float> out = Gather(weights, x, {2, 1}, 2);
  EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 20), OfMatrix(ready, x.data(), 2));
  EXPECT_EQ(std::vector<float>(out.begin() + 20, out.end()), OfMatrix(ready, x.data(), 1));
}

TEST_F(SimulatedGather, GivesNaNsForAnIdThatIsNone) {
  const QuantizedWeights weights = Stack(64, 20, Format::kU4);
  const std::vector<float> x = Random(64);
  const std::vector<float> out = Gather(weights, x, {kMatrices, -1, 2}, 3);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i < 40) << i;
}

}  // namespace
}  // namespace marlin::metal::simulated_gather_test
