// Weights that scale and rotate the columns of A: what a spec may say, the Hadamard transform,
// dequantization, joins, slices and shards.
#include "layout/input_transform.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "decoded.h"
#include "layout/join_columns.h"
#include "layout/slice_expert.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "reference/dequantize.h"

namespace marlin::input_transform_test {
namespace {

using testing::Decoded;

WeightsSpec Spec(int64_t experts, int64_t k, int64_t n, int64_t hadamard) {
  return {.format = Format::kS4,
          .experts = experts,
          .k = k,
          .n = n,
          .group_size = 32,
          .has_input_scale = true,
          .input_hadamard = hadamard};
}

QuantizedWeights Random(const WeightsSpec& spec, uint32_t seed) {
  std::mt19937 random(seed);
  auto buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  auto* const words = static_cast<uint32_t*>(buffer->codes);
  for (int64_t i = 0; i < buffer->weights.codes.ElementCount(); ++i) {
    words[i] = static_cast<uint32_t>(random());
  }
  for (int64_t i = 0; i < buffer->weights.scales.ElementCount(); ++i) {
    static_cast<uint16_t*>(buffer->scales)[i] =
        FloatToHalf(static_cast<float>(random() % 64 + 1) / 64);
  }
  for (int64_t i = 0; spec.has_input_scale && i < spec.experts * spec.k; ++i) {
    buffer->input_scale[i] = static_cast<float>(random() % 999) / 300 - 1.5F;
  }
  return buffer->weights;
}

TEST(InputTransform, HadamardIsSylvestersAndItsOwnInverse) {
  for (int64_t size = 2; size <= 256; size *= 2) {
    const int64_t count = 2 * size;
    std::vector<double> x(static_cast<size_t>(count));
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<double>(i * i + 1));
    std::vector<double> y = x;
    HadamardInPlace(y.data(), count, size);
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int64_t j = i / size * size; j < (i / size + 1) * size; ++j) {
        const bool odd = std::popcount(static_cast<uint64_t>(i % size & j % size)) % 2 != 0;
        sum += (odd ? -1 : 1) * x[static_cast<size_t>(j)];
      }
      EXPECT_NEAR(y[static_cast<size_t>(i)], sum / std::sqrt(static_cast<double>(size)), 1e-13);
    }
    HadamardInPlace(y.data(), count, size);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], x[i], 1e-13);
  }
}

TEST(InputTransform, WrongSpecsAreNamed) {
  const auto message = [](WeightsSpec spec) { return AllocateWeights(spec).status().message(); };
  EXPECT_EQ(message(Spec(1, 64, 8, 64)), "");
  EXPECT_EQ(message(Spec(1, 64, 8, 48)),
            "input_hadamard: expected a power of two from 2 to 32768, got 48");
  EXPECT_EQ(message(Spec(1, 64, 8, -4)),
            "input_hadamard: expected a power of two from 2 to 32768, got -4");
  EXPECT_EQ(message(Spec(1, 65536, 8, 65536)),
            "input_hadamard: expected a power of two from 2 to 32768, got 65536");
  EXPECT_EQ(message(Spec(1, 96, 8, 64)), "input_hadamard: blocks of 64 do not divide k=96");
  WeightsSpec spec = Spec(1, 64, 8, 64);
  spec.has_permutation = true;
  EXPECT_EQ(message(spec), "input_hadamard: cannot be combined with a permutation");
  spec = {.format = Format::kBf16, .k = 64, .n = 8, .group_size = 64, .has_input_scale = true};
  EXPECT_EQ(message(spec), "input_scale: format bf16 has none");
  spec.has_input_scale = false;
  spec.input_hadamard = 64;
  EXPECT_EQ(message(spec), "input_hadamard: format bf16 has none");
}

TEST(InputTransform, ScalesAreValidatedAndCounted) {
  const WeightsSpec spec = Spec(2, 64, 8, 0);
  WeightsSpec plain = spec;
  plain.has_input_scale = false;
  EXPECT_EQ(StoredBytes(spec), StoredBytes(plain) + 2 * 64 * 4);
  QuantizedWeights weights = Random(spec, 3);
  EXPECT_TRUE(Validate(weights).ok());
  std::vector<float> scale(128, 1.0F);
  scale[70] = std::numeric_limits<float>::quiet_NaN();
  weights.input_scale = TensorView(scale.data(), DType::kF32, {2, 64});
  EXPECT_EQ(Validate(weights).code(), Code::kMalformedFile);
  weights.input_scale = TensorView(scale.data(), DType::kF32, {1, 128});
  EXPECT_EQ(Validate(weights).code(), Code::kInvalidArgument);
  weights.input_scale = TensorView();
  EXPECT_FALSE(Validate(weights).ok());
  weights = Random(spec, 3);
  weights.spec.has_input_scale = false;
  EXPECT_EQ(Validate(weights).message(), "input_scale: present, but the spec has none");
}

/// Compares the weights of all experts with the reference, and those that FoldInput gives.
void ExpectReference(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  const std::vector<float> decoded = Decoded(weights);
  const int64_t count = spec.k * spec.n;
  for (int64_t e = 0; e < spec.experts; ++e) {
    const auto reference = reference::Dequantize(weights, e);
    ASSERT_TRUE(reference.ok());
    for (int64_t i = 0; i < count; ++i) {
      const double expected = reference->value[static_cast<size_t>(i)];
      ASSERT_NEAR(decoded[static_cast<size_t>(e * count + i)], expected,
                  1e-7 * std::max(1.0, std::abs(expected)))
          << i;
    }
  }
  const auto folded = FoldInput(weights);
  ASSERT_TRUE(folded.ok());
  EXPECT_EQ(folded->spec.format == Format::kFp32, TransformsInput(spec));
  EXPECT_EQ(Decoded(*folded), decoded);
}

TEST(InputTransform, DequantizationIsTheReferences) {
  for (const int64_t hadamard : {0, 2, 32, 128}) {
    for (const bool scaled : {false, true}) {
      SCOPED_TRACE(std::to_string(hadamard) + (scaled ? " scaled" : ""));
      WeightsSpec spec = Spec(2, 384, 19, hadamard);
      spec.has_input_scale = scaled;
      const QuantizedWeights weights = Random(spec, 5);
      ExpectReference(weights);
      const auto pruned = Prune24(weights);
      ASSERT_TRUE(pruned.ok()) << pruned.status().message();
      EXPECT_EQ(pruned->spec.input_hadamard, hadamard);
      ExpectReference(*pruned);
    }
  }
}

TEST(InputTransform, EqualOnesAreJoined) {
  const QuantizedWeights a = Random(Spec(2, 96, 24, 32), 21);
  QuantizedWeights b = Random(Spec(2, 96, 24, 32), 21);
  EXPECT_TRUE(CanJoinColumns(a, b));
  const auto shard = Shard(a, ShardAxis::kN, 1, 2);
  ASSERT_TRUE(shard.ok()) << shard.status().message();
  EXPECT_EQ(Decoded(*shard)[0], Decoded(a)[12]);
  QuantizedWeights other = b;
  other.spec.input_hadamard = 16;
  EXPECT_FALSE(CanJoinColumns(a, other));
  std::vector<float> scale(b.input_scale.As<float>(), b.input_scale.As<float>() + 192);
  scale[100] += 1;
  b.input_scale = TensorView(scale.data(), DType::kF32, {2, 96});
  EXPECT_FALSE(CanJoinColumns(a, b));
}

TEST(InputTransform, SlicesAndShardsAlongKHaveTheirOwn) {
  const QuantizedWeights stack = Random(Spec(3, 128, 8, 32), 4);
  const std::vector<float> all = Decoded(stack);
  for (int64_t e = 0; e < 3; ++e) {
    const auto slice = SliceExpert(stack, e);
    ASSERT_TRUE(slice.ok() && Validate(*slice).ok());
    const std::vector<float> part = Decoded(*slice);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + e * 128 * 8)) << e;
    const auto shard = Shard(*slice, ShardAxis::kK, 1, 2);
    ASSERT_TRUE(shard.ok()) << shard.status().message();
    const std::vector<float> rows = Decoded(*shard);
    EXPECT_TRUE(std::equal(rows.begin(), rows.end(), part.begin() + 64 * 8)) << e;
  }
  EXPECT_EQ(Shard(stack, ShardAxis::kK, 1, 8).status().message(),
            "shard: k=128 in 8 shards of 16 cuts Hadamard blocks of 32; cut them along n, or "
            "FoldInput them first");
}

}  // namespace
}  // namespace marlin::input_transform_test
