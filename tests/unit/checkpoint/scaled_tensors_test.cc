#include "checkpoint/codes/scaled_tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "layout/parameters.h"
#include "test_files.h"

namespace marlin::scaled_tensors_test {
namespace {

using testing::BuildSafetensors;
using testing::RandomBf16;
using testing::TestTensor;

/// Values in the type of a tensor.
TestTensor In(DType dtype, TestTensor tensor) {
  std::string data;
  for (int64_t i = 0; i < tensor.shape.ElementCount(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, tensor.data.data() + i * 2, sizeof(bits));
    const float value = Bf16ToFloat(bits);
    const uint16_t half = FloatToHalf(value);
    if (dtype == DType::kF32) {
      data.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else {
      const uint16_t stored = dtype == DType::kF16 ? half : bits;
      data.append(reinterpret_cast<const char*>(&stored), sizeof(stored));
    }
  }
  return {tensor.name, dtype, tensor.shape, data};
}

std::vector<int8_t> Exponents(int64_t count, int step) {
  std::vector<int8_t> exponents;
  for (int64_t i = 0; i < count; ++i) exponents.push_back(static_cast<int8_t>(i * step % 7 - 3));
  return exponents;
}

class ScaledTensors : public ::testing::Test {
 protected:
  void Write(const TestTensor& tensor, const std::string& config) {
    std::filesystem::create_directories(path_);
    testing::WriteFile(path_ + "/model.safetensors", BuildSafetensors({tensor}));
    testing::WriteFile(path_ + "/config.json", config);
  }
  /// exponent(index) of every element of the one tensor, stored as [matrices, rows, columns].
  void Expect(const TestTensor& tensor, const std::string& config, const TensorExponents& exponents,
              const std::function<int(int64_t)>& exponent) {
    Write(tensor, config);
    const Checkpoint before = *Checkpoint::Open(path_);
    Checkpoint after = *Checkpoint::Open(path_);
    const auto scaled = ScaledTensor(CheckpointAccess::Get(before), 0, exponents);
    ASSERT_TRUE(scaled.ok());
    ScaleTensors({{tensor.name, exponents}}, &after);
    const TensorView old = *before.Tensor(tensor.name);
    const TensorView view = *after.Tensor(tensor.name);
    ASSERT_EQ(view.dtype(), tensor.dtype);
    EXPECT_EQ(std::memcmp(scaled->data(), view.data(), tensor.data.size()), 0);
    for (int64_t i = 0; i < tensor.shape.ElementCount(); ++i) {
      ASSERT_EQ(ParameterAt(view, i), std::ldexp(ParameterAt(old, i), exponent(i))) << i;
    }
  }

  testing::TemporaryDirectory directory_;
  std::string path_ = directory_ / "model";
};

TEST_F(ScaledTensors, MatricesOfEveryType) {
  const TensorExponents exponents{Exponents(5, 2), Exponents(12, 3)};
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    SCOPED_TRACE(std::string(DTypeName(dtype)));
    Expect(In(dtype, RandomBf16("a.weight", {5, 12}, 1)), "{}", exponents, [&](int64_t i) {
      return exponents.out[static_cast<size_t>(i / 12)] + exponents.in[static_cast<size_t>(i % 12)];
    });
  }
}

TEST_F(ScaledTensors, OneSideOfAMatrix) {
  const TestTensor tensor = RandomBf16("a.weight", {5, 12}, 2);
  const std::vector<int8_t> out = Exponents(5, 2);
  const std::vector<int8_t> in = Exponents(12, 3);
  Expect(tensor, "{}", {out, {}}, [&](int64_t i) { return out[static_cast<size_t>(i / 12)]; });
  Expect(tensor, "{}", {{}, in}, [&](int64_t i) { return in[static_cast<size_t>(i % 12)]; });
}

TEST_F(ScaledTensors, VectorsAndBiasesOfStacks) {
  const std::vector<int8_t> out = Exponents(12, 2);
  const auto own = [&](int64_t i) { return static_cast<int>(out[static_cast<size_t>(i)]); };
  Expect(RandomBf16("norm.weight", {12}, 3), "{}", {out, {}}, own);
  Expect(RandomBf16("experts.gate_up_proj_bias", {3, 4}, 4), "{}", {out, {}}, own);
}

TEST_F(ScaledTensors, StacksInBothLayouts) {
  const TensorExponents exponents{Exponents(3 * 4, 2), Exponents(3 * 6, 3)};
  const auto sum = [&](int64_t expert, int64_t out, int64_t in) {
    return exponents.out[static_cast<size_t>(expert * 4 + out)] +
           exponents.in[static_cast<size_t>(expert * 6 + in)];
  };
  const std::string name = "model.layers.0.mlp.experts.down_proj";
  Expect(RandomBf16(name, {3, 4, 6}, 5), R"({"model_type": "qwen3_moe"})", exponents,
         [&](int64_t i) { return sum(i / 24, i / 6 % 4, i % 6); });
  Expect(RandomBf16(name, {3, 6, 4}, 6), R"({"model_type": "gpt_oss"})", exponents,
         [&](int64_t i) { return sum(i / 24, i % 4, i / 4 % 6); });
}

/// 16 bits that hold a factor minus 1 do not hold the scaled factor minus 1.
TEST_F(ScaledTensors, NormsStoredMinusOneAreWidened) {
  const std::vector<int8_t> out = Exponents(12, 2);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    SCOPED_TRACE(std::string(DTypeName(dtype)));
    Write(In(dtype, RandomBf16("norm.weight", {12}, 3)), "{}");
    const Checkpoint before = *Checkpoint::Open(path_);
    Checkpoint after = *Checkpoint::Open(path_);
    const TensorExponents exponents{out, {}, true};
    EXPECT_EQ(ScaledDType(dtype, exponents), DType::kF32);
    const auto scaled = ScaledTensor(CheckpointAccess::Get(before), 0, exponents);
    ASSERT_TRUE(scaled.ok());
    ScaleTensors({{"norm.weight", exponents}}, &after);
    const TensorView old = *before.Tensor("norm.weight");
    const TensorView view = *after.Tensor("norm.weight");
    ASSERT_EQ(view.dtype(), DType::kF32);
    EXPECT_EQ(std::memcmp(scaled->data(), view.data(), 12 * sizeof(float)), 0);
    for (int64_t i = 0; i < 12; ++i) {
      const float factor = std::ldexp(1.0F + ParameterAt(old, i), out[static_cast<size_t>(i)]);
      EXPECT_EQ(1.0F + ParameterAt(view, i), factor) << i;
    }
  }
}

TEST_F(ScaledTensors, NormsWithoutExponentsAreWidenedAsWell) {
  Write(RandomBf16("norm.weight", {12}, 3), "{}");
  const Checkpoint before = *Checkpoint::Open(path_);
  Checkpoint after = *Checkpoint::Open(path_);
  ScaleTensors({{"norm.weight", {{}, {}, true}}}, &after);
  const TensorView old = *before.Tensor("norm.weight");
  const TensorView view = *after.Tensor("norm.weight");
  ASSERT_EQ(view.dtype(), DType::kF32);
  for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(ParameterAt(view, i), ParameterAt(old, i)) << i;
}

TEST_F(ScaledTensors, WhatWasComputedIsScaledAsWell) {
  const TestTensor tensor = RandomBf16("a.weight", {5, 12}, 7);
  Write(tensor, "{}");
  const Checkpoint before = *Checkpoint::Open(path_);
  Checkpoint checkpoint = *Checkpoint::Open(path_);
  const std::vector<int8_t> in = Exponents(12, 3);
  ScaleTensors({{"a.weight", {{}, in}}}, &checkpoint);
  ScaleTensors({{"a.weight", {{}, in}}}, &checkpoint);
  const TensorView old = *before.Tensor("a.weight");
  for (int round = 0; round < 2; ++round) {
    const TensorView view = *checkpoint.Tensor("a.weight");
    for (int64_t i = 0; i < 60; ++i) {
      EXPECT_EQ(ParameterAt(view, i),
                std::ldexp(ParameterAt(old, i), 2 * in[static_cast<size_t>(i % 12)]));
    }
    // Computed again when asked for again.
    CheckpointAccess::Get(checkpoint).ForgetComputed();
  }
}

TEST_F(ScaledTensors, BeyondTheRangeIsInf) {
  const float large = 60000.0F;
  const uint16_t half = FloatToHalf(large);
  const TestTensor tensor{
      "a.weight", DType::kF16, {1, 1}, {reinterpret_cast<const char*>(&half), sizeof(half)}};
  Write(tensor, "{}");
  const Checkpoint checkpoint = *Checkpoint::Open(path_);
  const auto scaled = ScaledTensor(CheckpointAccess::Get(checkpoint), 0, {{}, {1}});
  ASSERT_TRUE(scaled.ok());
  uint16_t bits = 0;
  std::memcpy(&bits, scaled->data(), sizeof(bits));
  EXPECT_TRUE(std::isinf(HalfToFloat(bits)));
}

}  // namespace
}  // namespace marlin::scaled_tensors_test
