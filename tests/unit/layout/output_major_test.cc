// Stacked words that are stored by output feature.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "marlin/layout.h"
#include "marlin/quantize.h"

namespace marlin::output_major_test {
namespace {

class OutputMajorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<float> dense(2 * 64 * 24);
    for (size_t i = 0; i < dense.size(); ++i) dense[i] = static_cast<float>(i * 37 % 101) - 50.0F;
    QuantizeOptions options;
    options.format = Format::kU4;
    options.group_size = 32;
    const auto made = Quantize(TensorView(dense.data(), DType::kF32, {2, 64, 24}), options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    weights_ = *made;
    // [experts, n, words]
    words_.resize(static_cast<size_t>(weights_.codes.ElementCount()));
    const auto* codes = weights_.codes.As<uint32_t>();
    for (size_t e = 0; e < 2; ++e) {
      for (size_t row = 0; row < 8; ++row) {
        for (size_t n = 0; n < 24; ++n) {
          words_[(e * 24 + n) * 8 + row] = codes[(e * 8 + row) * 24 + n];
        }
      }
    }
  }

  TensorView Words(const Shape& shape) const { return {words_.data(), DType::kU32, shape}; }

  QuantizedWeights weights_;
  std::vector<uint32_t> words_;
};

TEST_F(OutputMajorTest, HasTheSameValues) {
  const auto made =
      FromOutputMajor(weights_.spec, Words({2, 24, 8}), weights_.scales, weights_.zeros);
  ASSERT_TRUE(made.ok()) << made.status().message();
  EXPECT_EQ(made->spec, weights_.spec);
  std::vector<float> values[2];
  for (int i = 0; i < 2; ++i) {
    values[i].resize(2 * 64 * 24);
    const MutableTensorView out(values[i].data(), DType::kF32, {2, 64, 24});
    ASSERT_TRUE(Dequantize(i == 0 ? weights_ : *made, out).ok());
  }
  EXPECT_EQ(values[0], values[1]);
}

TEST_F(OutputMajorTest, RefusesOtherShapes) {
  const auto wrong =
      FromOutputMajor(weights_.spec, Words({2, 8, 24}), weights_.scales, weights_.zeros);
  EXPECT_EQ(wrong.status().message(),
            "words: expected contiguous u32 [2, 24, 8], got u32 [2, 8, 24]");
  const TensorView scales(weights_.scales.data(), DType::kF16, {2, 24, 2});
  EXPECT_EQ(
      FromOutputMajor(weights_.spec, Words({2, 24, 8}), scales, weights_.zeros).status().message(),
      "scales: expected contiguous f16 [2, 2, 24], got f16 [2, 24, 2]");
  WeightsSpec spec = weights_.spec;
  spec.has_biases = true;
  spec.has_zeros = false;
  EXPECT_EQ(FromOutputMajor(spec, Words({2, 24, 8}), weights_.scales).status().code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace marlin::output_major_test
