// One expert of a stack: views if they can be aligned, otherwise copies.
#include "layout/slice_expert.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "marlin/quantize.h"

namespace marlin::slice_expert_test {
namespace {

// A stack of one matrix shifted by an amount per expert.
Result<QuantizedWeights> Stack(int64_t experts, int64_t k, int64_t n, const QuantizeOptions& how) {
  std::vector<float> dense(static_cast<size_t>(experts * k * n));
  for (size_t i = 0; i < dense.size(); ++i) {
    dense[i] = 0.01f * static_cast<float>((i * 7919) % 201) - 1.0f;
  }
  return Quantize(TensorView(dense.data(), DType::kF32, {experts, k, n}), how);
}

std::vector<float> Dense(const QuantizedWeights& weights, const Shape& shape) {
  std::vector<float> out(static_cast<size_t>(shape.ElementCount()));
  const Status status = Dequantize(weights, MutableTensorView(out.data(), DType::kF32, shape));
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST(SliceExpert, GivesTheSameWeightsWhateverTheAlignment) {
  for (const ScaleType scale : {ScaleType::kF16, ScaleType::kE8M0, ScaleType::kE4M3}) {
    for (const int64_t n : {1, 2, 3, 4, 33}) {
      for (const Format format : {Format::kFp4E2M1, Format::kU4}) {
        QuantizeOptions how;
        how.format = format;
        how.group_size = 16;
        how.scale_type = scale;
        const Result<QuantizedWeights> stack = Stack(3, 48, n, how);
        if (!stack.ok()) continue;  // Not every format supports every scale type.
        SCOPED_TRACE(std::string(FormatName(format)) + " n=" + std::to_string(n));
        const std::vector<float> all = Dense(*stack, {3, 48, n});
        for (int64_t e = 0; e < 3; ++e) {
          const Result<QuantizedWeights> one = SliceExpert(*stack, e);
          ASSERT_TRUE(one.ok());
          const Status valid = Validate(*one);
          ASSERT_TRUE(valid.ok()) << valid.message();
          const std::vector<float> dense = Dense(*one, {48, n});
          EXPECT_EQ(std::memcmp(dense.data(), all.data() + e * 48 * n, dense.size() * 4), 0);
        }
      }
    }
  }
}

TEST(SliceExpert, CopiesOnlyWhatIsNotAligned) {
  QuantizeOptions how;
  how.format = Format::kFp4E2M1;
  how.group_size = 16;
  const Result<QuantizedWeights> odd = Stack(2, 16, 3, how);
  ASSERT_TRUE(odd.ok());
  const Result<QuantizedWeights> one = SliceExpert(*odd, 1);
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->codes.As<uint32_t>(), odd->codes.As<uint32_t>() + 2 * 3);
  EXPECT_NE(one->scales.As<uint16_t>(), odd->scales.As<uint16_t>() + 3);
  const Result<QuantizedWeights> first = SliceExpert(*odd, 0);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->scales.data(), odd->scales.data());
  EXPECT_EQ(first->owner, odd->owner);
}

TEST(SliceExpert, OutlivesTheStack) {
  QuantizeOptions how;
  how.format = Format::kFp4E2M1;
  how.group_size = 16;
  Result<QuantizedWeights> stack = Stack(2, 16, 3, how);
  ASSERT_TRUE(stack.ok());
  const std::vector<float> all = Dense(*stack, {2, 16, 3});
  const Result<QuantizedWeights> one = SliceExpert(*stack, 1);
  ASSERT_TRUE(one.ok());
  *stack = QuantizedWeights();
  const std::vector<float> dense = Dense(*one, {16, 3});
  EXPECT_EQ(std::memcmp(dense.data(), all.data() + 16 * 3, dense.size() * 4), 0);
}

}  // namespace
}  // namespace marlin::slice_expert_test
