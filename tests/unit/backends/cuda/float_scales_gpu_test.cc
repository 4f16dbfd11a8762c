// fp32 scales: where a 16-bit type holds all of them exactly the weights are tiled, with the bits
// of 16-bit scales; else the exact kernel runs.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "gpu_fixture.h"

namespace marlin::float_scales_gpu_test {
namespace {

constexpr int64_t kM = 3;
constexpr int64_t kK = 512;
constexpr int64_t kN = 96;

class FloatScalesOnGpu : public GpuTest<::testing::Test> {
 protected:
  static QuantizedWeights Weights(ScaleType scale) {
    const std::vector<float> dense = GaussianFloats(kK * kN, 5);
    Result<QuantizedWeights> weights =
        Quantize({dense.data(), DType::kF32, {kK, kN}},
                 {.format = Format::kS4, .group_size = 32, .scale_type = scale});
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    return *weights;
  }

  /// The same weights with scales x `factor` in fp32.
  static QuantizedWeights WithFloatScales(const QuantizedWeights& from, float factor) {
    struct Owner {
      std::shared_ptr<const void> rest;
      std::vector<float> scales;
    };
    auto owner = std::make_shared<Owner>();
    owner->rest = from.owner;
    const bool bf16 = from.spec.scale_type == ScaleType::kBf16;
    for (int64_t i = 0; i < from.scales.ElementCount(); ++i) {
      const uint16_t bits = from.scales.As<uint16_t>()[i];
      owner->scales.push_back((bf16 ? Bf16ToFloat(bits) : HalfToFloat(bits)) * factor);
    }
    QuantizedWeights weights = from;
    weights.spec.scale_type = ScaleType::kF32;
    weights.scales = {owner->scales.data(), DType::kF32, {1, kK / 32, kN}};
    weights.owner = owner;
    return weights;
  }

  struct Run {
    std::string kernel;
    std::vector<float> out;
  };
  Run Multiply(const QuantizedWeights& weights) const {
    const Result<PreparedWeights> prepared = Prepare(weights, device());
    EXPECT_TRUE(prepared.ok()) << prepared.status().message();
    std::vector<uint16_t> input;
    for (const float value : GaussianFloats(kM * kK, 6)) input.push_back(FloatToBf16(value));
    const DeviceBuffer a = Upload(input);
    const DeviceBuffer c = Make(kM * kN * 4);
    const TensorView a_view(a.data(), DType::kBf16, {kM, kK});
    const MutableTensorView c_view(c.data(), DType::kF32, {kM, kN});
    const Result<GemmPlan> plan = PlanGemm(device(), a_view, *prepared, c_view);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    const Status status = Gemm(device(), a_view, *prepared, c_view);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(device().Synchronize().ok());
    return {std::string(plan->kernel()), Download<float>(c)};
  }
};

TEST_F(FloatScalesOnGpu, OfSixteenBitsGiveTiles) {
  for (const ScaleType scale : {ScaleType::kF16, ScaleType::kBf16}) {
    const QuantizedWeights weights = Weights(scale);
    const Run expected = Multiply(weights);
    const Run got = Multiply(WithFloatScales(weights, 1.0F));
    EXPECT_NE(got.kernel, "marlin_gemm_cuda_exact");
    EXPECT_EQ(got.kernel, expected.kernel);
    EXPECT_EQ(got.out, expected.out);
    // A power of two only shifts the exponents, here beyond the range of fp16.
    const Run small = Multiply(WithFloatScales(weights, 0x1p-60F));
    EXPECT_EQ(small.kernel, expected.kernel);
    for (size_t i = 0; i < small.out.size(); ++i) {
      ASSERT_EQ(small.out[i], expected.out[i] * 0x1p-60F) << i;
    }
  }
}

TEST_F(FloatScalesOnGpu, OfMoreBitsAreNotRounded) {
  const Run got = Multiply(WithFloatScales(Weights(ScaleType::kF16), 1.1F));
  EXPECT_EQ(got.kernel, "marlin_gemm_cuda_exact");
}

TEST_F(FloatScalesOnGpu, FarApartAreNotRounded) {
  // One needs more mantissa bits than bf16 has, another exceeds the range of fp16.
  QuantizedWeights weights = WithFloatScales(Weights(ScaleType::kF16), 1.0F);
  std::vector<float> scales(static_cast<size_t>(weights.scales.ElementCount()), 0x1p60F);
  scales[1] = 0x1.04p-120F;
  scales[2] = 0x1.004p60F;
  weights.scales = {scales.data(), DType::kF32, {1, kK / 32, kN}};
  EXPECT_EQ(Multiply(weights).kernel, "marlin_gemm_cuda_exact");
}

}  // namespace
}  // namespace marlin::float_scales_gpu_test
