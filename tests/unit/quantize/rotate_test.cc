// Quantization of rotated matrices: codes of H * W, and the Gram matrix of rotated inputs.
#include "quantize/rotate.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "layout/input_transform.h"
#include "marlin/quantize.h"

namespace marlin::rotate_test {
namespace {

std::vector<double> Random(int64_t count) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = normal(random);
  return values;
}

TEST(Rotate, SizesAreLoweredToWhatDividesK) {
  EXPECT_EQ(HadamardSizeFor(4096, 128), 128);
  EXPECT_EQ(HadamardSizeFor(96, 128), 32);
  EXPECT_EQ(HadamardSizeFor(14336, 32768), 2048);
  EXPECT_EQ(HadamardSizeFor(33, 128), 0);
  EXPECT_EQ(HadamardSizeFor(0, 128), 0);
  EXPECT_EQ(HadamardSizeFor(64, 0), 0);
}

TEST(Rotate, AGramMatrixBecomesThatOfRotatedInputs) {
  constexpr int64_t kK = 48;
  constexpr int64_t kTokens = 5;
  constexpr int64_t kSize = 16;
  std::vector<double> inputs = Random(kTokens * kK);
  const auto gram_of = [&] {
    std::vector<double> gram(kK * kK);
    for (size_t i = 0; i < gram.size(); ++i) {
      for (size_t t = 0; t < kTokens; ++t) {
        gram[i] += inputs[t * kK + i / kK] * inputs[t * kK + i % kK];
      }
    }
    return gram;
  };
  std::vector<double> rotated = gram_of();
  ThreadPool pool(2);
  RotateGram(pool, kK, kSize, &rotated);
  HadamardInPlace(inputs.data(), kTokens * kK, kSize);
  const std::vector<double> expected = gram_of();
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(rotated[i], expected[i], 1e-12) << i;
}

/// W [k, n], and H * W for blocks of `size`.
struct Matrices {
  Matrices(int64_t k, int64_t n, int64_t size) {
    std::vector<float> columns;
    for (const double value : Random(k * n)) columns.push_back(static_cast<float>(value));
    plain = columns;
    HadamardInPlace(columns.data(), k * n, size);
    rotated = columns;
  }
  std::vector<float> plain;  ///< [n, k]
  std::vector<float> rotated;
};

TEST(Rotate, CodesAreThoseOfTheRotatedMatrix) {
  constexpr int64_t kK = 96;
  constexpr int64_t kN = 20;
  const Matrices matrices(kK, kN, 32);
  const auto quantized = [](const std::vector<float>& values, QuantizeMethod method, int64_t size) {
    QuantizeOptions options;
    options.format = Format::kS4;
    options.group_size = 32;
    options.method = method;
    options.input_hadamard = size;
    const auto weights =
        Quantize(TensorView(values.data(), DType::kF32, {kN, kK}).Transposed(), options);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    return *weights;
  };
  for (const QuantizeMethod method : {QuantizeMethod::kRtn, QuantizeMethod::kMse}) {
    const QuantizedWeights stored = quantized(matrices.rotated, method, 0);
    const QuantizedWeights made = quantized(matrices.plain, method, 64);
    EXPECT_EQ(made.spec.input_hadamard, 32);  // 64 does not divide 96.
    ASSERT_EQ(made.codes.ByteCount(), stored.codes.ByteCount());
    EXPECT_EQ(std::memcmp(made.codes.data(), stored.codes.data(),
                          static_cast<size_t>(stored.codes.ByteCount())),
              0);
    std::vector<float> decoded(kK * kN);
    const Status status =
        Dequantize(made, MutableTensorView(decoded.data(), DType::kF32, {kN, kK}).Transposed());
    ASSERT_TRUE(status.ok());
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < decoded.size(); ++i) {
      const double difference = decoded[i] - matrices.plain[i];
      error += difference * difference;
      norm += static_cast<double>(matrices.plain[i]) * matrices.plain[i];
    }
    EXPECT_LT(error, 0.03 * norm);
  }
}

TEST(Rotate, StacksHaveNoneAndWrongSizesAreNamed) {
  const std::vector<float> values(2 * 64 * 8, 1.0F);
  QuantizeOptions options;
  options.group_size = 32;
  options.input_hadamard = 32;
  const auto stack = Quantize(TensorView(values.data(), DType::kF32, {2, 64, 8}), options);
  ASSERT_TRUE(stack.ok()) << stack.status().message();
  EXPECT_EQ(stack->spec.input_hadamard, 0);
  options.input_hadamard = 24;
  EXPECT_EQ(Quantize(TensorView(values.data(), DType::kF32, {64, 8}), options).status().message(),
            "input_hadamard: expected a power of two from 2 to 32768, got 24");
  options.input_hadamard = 0;
  options.e8m0_rule = E8M0Rule::kCeil;
  EXPECT_EQ(Quantize(TensorView(values.data(), DType::kF32, {64, 8}), options).status().message(),
            "e8m0_rule: scales are fp16");
}

}  // namespace
}  // namespace marlin::rotate_test
