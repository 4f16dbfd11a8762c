// The operations of kernels.h against sums in double, and the errors that are their own.
#include "marlin/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "marlin/layout.h"
#include "marlin/quantize.h"

namespace marlin::kernels_test {
namespace {

constexpr int64_t kExperts = 4;
constexpr int64_t kTokens = 6;
constexpr int64_t kK = 96;
constexpr int64_t kN = 48;

std::vector<float> Ramp(int64_t count, int modulus) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<float>(static_cast<int>(i * 37 % static_cast<size_t>(modulus)) - modulus / 2) /
        16;
  }
  return values;
}

QuantizedWeights Packed(int64_t experts, int64_t k, int64_t n, Format format, int64_t group) {
  const std::vector<float> dense = Ramp(experts * k * n, 61);
  const Shape shape = experts == 1 ? Shape{k, n} : Shape{experts, k, n};
  return *Quantize({dense.data(), DType::kF32, shape}, {.format = format, .group_size = group});
}

std::vector<float> Values(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  std::vector<float> values(static_cast<size_t>(spec.experts * spec.k * spec.n));
  const Shape shape =
      spec.experts == 1 ? Shape{spec.k, spec.n} : Shape{spec.experts, spec.k, spec.n};
  EXPECT_TRUE(Dequantize(weights, MutableTensorView(values.data(), DType::kF32, shape)).ok());
  return values;
}

/// [rows, n] of one matrix.
TensorView Plain(const TensorView& view) {
  return {view.data(), view.dtype(), {view.dim(1), view.dim(2)}};
}

/// Row t of x [.., k] times column n of w [k, n], in double.
double Dot(const std::vector<float>& x, int64_t t, const float* w, int64_t k, int64_t n,
           int64_t columns) {
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    sum += static_cast<double>(x[static_cast<size_t>(t * k + i)]) *
           static_cast<double>(w[i * columns + n]);
  }
  return sum;
}

class KernelsTest : public ::testing::Test {
 protected:
  Device device_ = *Device::Open("cpu", {.threads = 2});
};

TEST_F(KernelsTest, Dequant) {
  struct Row {
    Format format;
    Status (*run)(const TensorView&, const TensorView&, int64_t, const MutableTensorView&);
  };
  const Row rows[] = {
      {Format::kFp4E2M1, kernels::dequant_fp4}, {Format::kS4, kernels::dequant_s4},
      {Format::kFp8E4M3, kernels::dequant_fp8}, {Format::kNf2, kernels::dequant_nf2},
      {Format::kNf3, kernels::dequant_nf3},     {Format::kNf4, kernels::dequant_nf4},
  };
  for (const Row& row : rows) {
    const QuantizedWeights weights = Packed(1, kK, kN, row.format, 32);
    std::vector<float> out(static_cast<size_t>(kK * kN));
    const MutableTensorView view(out.data(), DType::kF32, {kK, kN});
    const Status status = row.run(Plain(weights.codes), Plain(weights.scales), 32, view);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(out, Values(weights));
    EXPECT_EQ(row.run(Plain(weights.codes), Plain(weights.scales), 16, view).code(),
              Code::kInvalidArgument);
  }
  const QuantizedWeights weights = Packed(1, kK, kN, Format::kU4, 32);
  std::vector<float> out(static_cast<size_t>(kK * kN));
  const MutableTensorView view(out.data(), DType::kF32, {kK, kN});
  ASSERT_TRUE(kernels::dequant_u4(Plain(weights.codes), Plain(weights.scales), Plain(weights.zeros),
                                  32, view)
                  .ok());
  EXPECT_EQ(out, Values(weights));
}

class ExpertGemmTest : public KernelsTest, public ::testing::WithParamInterface<int64_t> {};

TEST_P(ExpertGemmTest, AddsTheSelectionsInTheirOrder) {
  const int64_t top_k = GetParam();
  const QuantizedWeights weights = Packed(kExperts, kK, kN, Format::kFp4E2M1, 32);
  const PreparedWeights ready = *Prepare(weights, device_);
  const std::vector<float> dense = Values(weights);
  const std::vector<float> x = Ramp(kTokens * kK, 29);
  const TensorView input(x.data(), DType::kF32, {kTokens, kK});
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kTokens * top_k; ++i) {
    ids.push_back(static_cast<int32_t>(i * i % kExperts));
  }
  const std::vector<float> probs = Ramp(kTokens * top_k, 13);
  std::vector<float> out(static_cast<size_t>(kTokens * kN), -1.0F);
  const TensorView chosen(ids.data(), DType::kI32, {kTokens, top_k});
  const TensorView factors(probs.data(), DType::kF32, {kTokens, top_k});
  const MutableTensorView to(out.data(), DType::kF32, {kTokens, kN});
  const Status status = kernels::moe_expert_gemm_fp4(device_, input, ready, chosen, factors, to,
                                                     {.accuracy = Accuracy::kExact});
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t i = 0; i < kTokens * kN; ++i) {
    const int64_t t = i / kN;
    double sum = 0;
    for (int64_t s = 0; s < top_k; ++s) {
      const auto at = static_cast<size_t>(t * top_k + s);
      const float* const matrix = dense.data() + ids[at] * kK * kN;
      sum += static_cast<double>(probs[at]) * Dot(x, t, matrix, kK, i % kN, kN);
    }
    EXPECT_NEAR(out[static_cast<size_t>(i)], sum, 1e-3);
  }
  ids[2] = -1;
  EXPECT_EQ(ExpertGemm(device_, input, ready, chosen, factors, to).message(),
            "ids: expected 0..3 (experts), got -1 at [" + std::to_string(2 / top_k) + ", " +
                std::to_string(2 % top_k) + "]");
}

INSTANTIATE_TEST_SUITE_P(Selections, ExpertGemmTest, ::testing::Values(1, 3));

/// The format, the group size and the number of stripes.
using Striping = std::tuple<Format, int64_t, int64_t>;

class StripesTest : public KernelsTest, public ::testing::WithParamInterface<Striping> {};

TEST_P(StripesTest, AddUpToTheProduct) {
  const auto [format, group, parallel] = GetParam();
  const int64_t k = 300;
  const QuantizedWeights weights = Packed(1, k, kN, format, group);
  const std::vector<float> dense = Values(weights);
  const std::vector<float> x = Ramp(kTokens * k, 29);
  const std::vector<float> bias = Ramp(kN, 7);
  const auto stripes = kernels::PrepareStripes(weights, device_, parallel);
  ASSERT_TRUE(stripes.ok()) << stripes.status().message();
  EXPECT_LE(stripes->stripes.size(), static_cast<size_t>(parallel));
  EXPECT_EQ(stripes->stripes.size() > 1, parallel > 1);
  std::vector<float> out(static_cast<size_t>(kTokens * kN));
  GemmOptions options;
  options.accuracy = Accuracy::kExact;
  options.bias = {bias.data(), DType::kF32, {kN}};
  const Status status =
      kernels::quantized_linear_striped(device_, {x.data(), DType::kF32, {kTokens, k}}, *stripes,
                                        {out.data(), DType::kF32, {kTokens, kN}}, options);
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t i = 0; i < kTokens * kN; ++i) {
    const double wanted = static_cast<double>(bias[static_cast<size_t>(i % kN)]) +
                          Dot(x, i / kN, dense.data(), k, i % kN, kN);
    EXPECT_NEAR(out[static_cast<size_t>(i)], wanted, 1e-2);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, StripesTest,
    ::testing::Combine(::testing::Values(Format::kFp4E2M1, Format::kInt3, Format::kS8),
                       ::testing::Values(0, 48), ::testing::Values(1, 2, 3, 50)));

TEST_F(KernelsTest, StripesAreAtLeastOne) {
  EXPECT_EQ(
      kernels::PrepareStripes(Packed(1, kK, kN, Format::kS4, 32), device_, 0).status().message(),
      "parallel: expected 1 or more, got 0");
}

TEST_F(KernelsTest, SharedExpert) {
  const QuantizedWeights gate = Packed(1, kK, kN, Format::kFp4E2M1, 32);
  const QuantizedWeights down = Packed(1, kN, kK, Format::kFp4E2M1, 0);
  const PreparedWeights first = *Prepare(gate, device_);
  SharedExpert shared;
  shared.expert = {{first, 0, {}}, {first, 0, {}}, {*Prepare(down, device_), 0, {}}};
  std::vector<float> x = Ramp(kTokens * kK, 29);
  for (float& value : x) value /= 8;
  std::vector<float> out(static_cast<size_t>(kTokens * kK));
  MoeOptions options;
  options.accuracy = Accuracy::kExact;
  const Status status =
      kernels::moe_shared_expert(device_, {x.data(), DType::kF32, {kTokens, kK}}, shared,
                                 {out.data(), DType::kF32, {kTokens, kK}}, options);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::vector<float> up = Values(gate);
  const std::vector<float> back = Values(down);
  for (int64_t t = 0; t < kTokens; ++t) {
    std::vector<double> inner;
    for (int64_t n = 0; n < kN; ++n) {
      const double dot = Dot(x, t, up.data(), kK, n, kN);
      inner.push_back(dot / (1 + std::exp(-dot)) * dot);
    }
    for (int64_t k = 0; k < kK; ++k) {
      double sum = 0;
      for (int64_t n = 0; n < kN; ++n) {
        sum += inner[static_cast<size_t>(n)] *
               static_cast<double>(back[static_cast<size_t>(n * kK + k)]);
      }
      EXPECT_NEAR(out[static_cast<size_t>(t * kK + k)], sum, 1e-3 * (1 + std::fabs(sum)));
    }
  }
}

TEST_F(KernelsTest, KernelsOfOtherDevicesAndFormatsAreRefused) {
  const QuantizedWeights weights = Packed(1, kK, kN, Format::kS4, 32);
  const PreparedWeights ready = *Prepare(weights, device_);
  const std::vector<float> x = Ramp(kTokens * kK, 29);
  std::vector<float> out(static_cast<size_t>(kTokens * kN));
  const TensorView a(x.data(), DType::kF32, {kTokens, kK});
  const MutableTensorView to(out.data(), DType::kF32, {kTokens, kN});
  EXPECT_EQ(kernels::marlin_gemm_fp4(device_, a, ready, to).message(),
            "kernel: unknown name 'marlin_gemm_fp4'");
  const std::vector<int32_t> ids(kTokens);
  const std::vector<float> probs(kTokens);
  EXPECT_EQ(kernels::moe_expert_gemm_fp4(device_, a, ready, {ids.data(), DType::kI32, {kTokens, 1}},
                                         {probs.data(), DType::kF32, {kTokens, 1}}, to)
                .message(),
            "expert_weights: expected fp4_e2m1, got s4");
}

}  // namespace
}  // namespace marlin::kernels_test
