// Weights whose groups lie across k, stored sorted by group: sorting, validation, joins, slices,
// shards, and the order that dequantization restores.
#include "layout/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "decoded.h"
#include "layout/join_columns.h"
#include "layout/slice_expert.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "reference/dequantize.h"

namespace marlin::permutation_test {
namespace {

using testing::Decoded;

std::vector<int32_t> Shuffled(int64_t k, uint32_t seed) {
  std::vector<int32_t> order(static_cast<size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

/// Every format of codes, and parameters that it may have.
std::vector<WeightsSpec> Specs(int64_t experts, int64_t k, int64_t n) {
  std::vector<WeightsSpec> specs;
  for (const FormatInfo& info : AllFormats()) {
    if (!info.quantized) continue;
    WeightsSpec spec{.format = info.format, .experts = experts, .k = k, .n = n, .group_size = 32};
    spec.has_zeros = info.zero_point != ZeroPoint::kNone;
    spec.has_permutation = true;
    specs.push_back(spec);
    if (info.zero_point != ZeroPoint::kRequired) {
      spec.has_zeros = false;
      spec.scale_type = ScaleType::kE4M3;
      spec.has_global_scale = true;
      specs.push_back(spec);
    }
  }
  return specs;
}

QuantizedWeights Random(const WeightsSpec& spec, uint32_t seed) {
  std::mt19937 random(seed);
  auto buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  const QuantizedWeights& weights = buffer->weights;
  const uint32_t mask = spec.format == Format::kFp8E4M3 || spec.format == Format::kFp8E5M2
                            ? 0xbbbbbbbbU  // No NaN and no infinity.
                            : 0xffffffffU;
  auto* const words = static_cast<uint32_t*>(buffer->codes);
  for (int64_t i = 0; i < weights.codes.ElementCount(); ++i)
    words[i] = static_cast<uint32_t>(random()) & mask;
  const auto fill = [&](const TensorView& view, void* to) {
    for (int64_t i = 0; i < view.ElementCount(); ++i) {
      const auto value = static_cast<float>(random() % 64 + 1) / 8;
      if (view.dtype() == DType::kF16) static_cast<uint16_t*>(to)[i] = FloatToHalf(value);
      if (view.dtype() == DType::kF8E4M3) {
        static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(random() % 0x70);
      }
    }
  };
  fill(weights.scales, buffer->scales);
  if (spec.has_zeros) fill(weights.zeros, buffer->zeros);
  for (int64_t e = 0; e < spec.experts; ++e) {
    if (spec.has_global_scale) buffer->global_scale[e] = 0.5F + static_cast<float>(e);
    if (!spec.has_permutation) continue;
    const std::vector<int32_t> order = Shuffled(spec.k, seed + static_cast<uint32_t>(e));
    std::copy(order.begin(), order.end(), buffer->permutation + e * spec.k);
  }
  const Status valid = Validate(weights);
  EXPECT_TRUE(valid.ok()) << valid.message();
  return weights;
}

/// The same stored rows without their permutation.
QuantizedWeights Stored(QuantizedWeights weights) {
  weights.spec.has_permutation = false;
  weights.permutation = TensorView();
  return weights;
}

TEST(Permutation, GroupsAreSortedAndStable) {
  std::vector<int32_t> groups(48);
  for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<int32_t>((i + 1) % 3);
  const std::vector<int32_t> order = SortByGroup(groups, 16);
  ASSERT_EQ(order.size(), 48U);
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(groups[static_cast<size_t>(order[i])], static_cast<int32_t>(i / 16)) << i;
    if (i % 16 != 0) {
      EXPECT_LT(order[i - 1], order[i]);
    }
  }
  const std::vector<int32_t> inverse = InverseOf(order);
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(inverse[static_cast<size_t>(order[i])], static_cast<int32_t>(i));
  }
}

TEST(Permutation, OnlyTheLastGroupMayBeShort) {
  std::vector<int32_t> groups(40, 0);  // 16, 16 and 8 k.
  for (size_t i = 0; i < 40; ++i) groups[i] = i < 8 ? 2 : static_cast<int32_t>(i % 2);
  EXPECT_EQ(SortByGroup(groups, 16).size(), 40U);
  groups[0] = 1;
  EXPECT_TRUE(SortByGroup(groups, 16).empty());
  groups[0] = 0;
  EXPECT_TRUE(SortByGroup(groups, 16).empty());
  // A spec has no groups of 8.
  EXPECT_TRUE(SortByGroup(std::vector<int32_t>{1, 0, 1, 0, 1, 0, 1, 0}, 4).empty());
}

TEST(Permutation, RowsOfEveryWidthMove) {
  for (const int64_t k : {1, 31, 32, 33, 100}) {
    for (const Format format : {Format::kInt2, Format::kInt3, Format::kS4, Format::kS8}) {
      const int bits = GetFormatInfo(format).bits;
      constexpr int64_t kN = 5;
      std::mt19937 random(3);
      std::vector<uint8_t> codes(static_cast<size_t>(k * kN));
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random() & ((1U << bits) - 1));
      std::vector<uint32_t> words(static_cast<size_t>(WordsAlongK(format, k) * kN));
      ASSERT_TRUE(PackCodes(format, k, kN, codes, words).ok());
      const std::vector<int32_t> order = Shuffled(k, 7);
      std::vector<uint32_t> moved(words.size(), 0xffffffffU);
      ReorderRows({bits, k, kN}, words.data(), order, moved.data());
      std::vector<uint8_t> expected(codes.size());
      for (int64_t i = 0; i < k; ++i) {
        std::copy_n(codes.data() + order[static_cast<size_t>(i)] * kN, kN,
                    expected.data() + i * kN);
      }
      std::vector<uint32_t> packed(words.size());
      ASSERT_TRUE(PackCodes(format, k, kN, expected, packed).ok());
      EXPECT_EQ(moved, packed) << FormatName(format) << " k " << k;
      std::vector<uint32_t> back(words.size());
      ReorderRows({bits, k, kN}, moved.data(), InverseOf(order), back.data());
      EXPECT_EQ(back, words);
    }
  }
}

/// Compares the weights of all experts with the reference.
void ExpectReference(const QuantizedWeights& weights, const std::vector<float>& decoded) {
  const int64_t count = weights.spec.k * weights.spec.n;
  for (int64_t e = 0; e < weights.spec.experts; ++e) {
    const auto reference = reference::Dequantize(weights, e);
    ASSERT_TRUE(reference.ok()) << reference.status().message();
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(static_cast<float>(reference->value[static_cast<size_t>(i)]),
                decoded[static_cast<size_t>(e * count + i)]);
    }
  }
}

TEST(Permutation, DequantizationRestoresTheOrderOfK) {
  for (const int64_t k : {64, 100, 1100}) {
    for (const WeightsSpec& spec : Specs(2, k, 19)) {
      SCOPED_TRACE(std::string(FormatName(spec.format)) + " k " + std::to_string(k));
      const QuantizedWeights weights = Random(spec, 11);
      const std::vector<float> stored = Decoded(Stored(weights));
      const std::vector<float> decoded = Decoded(weights);
      const auto* const order = weights.permutation.As<int32_t>();
      for (int64_t row = 0; row < 2 * k; ++row) {
        const int64_t to = row / k * k + order[row];
        ASSERT_EQ(std::memcmp(decoded.data() + to * spec.n, stored.data() + row * spec.n,
                              static_cast<size_t>(spec.n) * 4),
                  0)
            << row;
      }
      ExpectReference(weights, decoded);
      const auto plain = FoldInput(weights);
      ASSERT_TRUE(plain.ok()) << plain.status().message();
      EXPECT_EQ(plain->spec.format, Format::kFp32);
      EXPECT_EQ(Decoded(*plain), decoded);
    }
  }
  const QuantizedWeights plain = Stored(Random(Specs(1, 64, 8).front(), 1));
  EXPECT_EQ(FoldInput(plain)->codes.data(), plain.codes.data());
}

TEST(Permutation, DequantizationTakesStridedOutputs) {
  const QuantizedWeights weights = Random(Specs(1, 96, 24).front(), 2);
  const std::vector<float> expected = Decoded(weights);
  std::vector<float> transposed(24 * 100, -1.0F);
  const MutableTensorView view(transposed.data(), DType::kF32, {96, 24}, {1, 100});
  ASSERT_TRUE(Dequantize(weights, view).ok());
  for (size_t k = 0; k < 96; ++k) {
    for (size_t n = 0; n < 24; ++n) {
      ASSERT_EQ(transposed[n * 100 + k], expected[k * 24 + n]) << k << " " << n;
    }
  }
}

TEST(Permutation, WrongOnesAreNamed) {
  WeightsSpec spec = Specs(2, 64, 8).front();
  QuantizedWeights weights = Random(spec, 5);
  std::vector<int32_t> order(weights.permutation.As<int32_t>(),
                             weights.permutation.As<int32_t>() + 128);
  const auto check = [&](const std::vector<int32_t>& given, Shape shape) {
    weights.permutation = TensorView(given.data(), DType::kI32, shape);
    return Validate(weights);
  };
  EXPECT_TRUE(check(order, {2, 64}).ok());
  std::vector<int32_t> wrong = order;
  wrong[64 + 9] = wrong[64 + 3];
  EXPECT_EQ(check(wrong, {2, 64}).code(), Code::kMalformedFile);
  EXPECT_EQ(check(wrong, {2, 64}).message(),
            "permutation: " + std::to_string(wrong[67]) + " at [1, 9] is there twice");
  for (const int32_t outside : {-1, 64, std::numeric_limits<int32_t>::min()}) {
    wrong = order;
    wrong[2] = outside;
    EXPECT_EQ(check(wrong, {2, 64}).message(),
              "permutation: " + std::to_string(outside) + " at [0, 2] is no row of 64");
  }
  EXPECT_EQ(check(order, {1, 128}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check(order, {2, 32}).code(), Code::kInvalidArgument);
  weights.permutation = TensorView();
  EXPECT_FALSE(Validate(weights).ok());
  weights = Random(spec, 5);
  weights.spec.has_permutation = false;
  EXPECT_EQ(Validate(weights).message(), "permutation: present, but the spec has none");
}

TEST(Permutation, OnlyDenseCodesHaveOne) {
  const WeightsSpec plain{
      .format = Format::kBf16, .k = 64, .n = 8, .group_size = 64, .has_permutation = true};
  EXPECT_EQ(AllocateWeights(plain).status().message(),
            "permutation: format bf16 has no groups that one could sort");
  const WeightsSpec sparse{.format = Format::kS4,
                           .k = 64,
                           .n = 8,
                           .group_size = 32,
                           .sparsity = Sparsity::k24,
                           .has_permutation = true};
  EXPECT_EQ(AllocateWeights(sparse).status().message(), "permutation: 2:4 weights have none");
  WeightsSpec dense = sparse;
  dense.sparsity = Sparsity::kDense;
  const auto pruned = Prune24(Random(dense, 1));
  EXPECT_EQ(pruned.status().code(), Code::kInvalidArgument) << pruned.status().message();
}

TEST(Permutation, IsPartOfTheStoredBytes) {
  WeightsSpec spec = Specs(3, 64, 8).front();
  const int64_t with = StoredBytes(spec);
  spec.has_permutation = false;
  EXPECT_EQ(with, StoredBytes(spec) + 3 * 64 * 4);
}

TEST(Permutation, EqualOnesAreJoinedAndCutAlongN) {
  for (const WeightsSpec& spec : Specs(2, 96, 24)) {
    const QuantizedWeights a = Random(spec, 21);
    QuantizedWeights b = Random(spec, 21);
    EXPECT_TRUE(CanJoinColumns(a, b));
    EXPECT_FALSE(CanJoinColumns(a, Stored(b)));
    std::vector<int32_t> other(b.permutation.As<int32_t>(), b.permutation.As<int32_t>() + 192);
    std::swap(other[100], other[101]);
    b.permutation = TensorView(other.data(), DType::kI32, {2, 96});
    EXPECT_FALSE(CanJoinColumns(a, b));

    const std::vector<float> whole = Decoded(a);
    std::vector<QuantizedWeights> halves;
    for (const int64_t rank : {0, 1}) {
      const auto shard = Shard(a, ShardAxis::kN, rank, 2);
      ASSERT_TRUE(shard.ok()) << shard.status().message();
      halves.push_back(*shard);
      const std::vector<float> part = Decoded(*shard);
      for (int64_t row = 0; row < 2 * 96; ++row) {
        ASSERT_TRUE(std::equal(part.begin() + row * 12, part.begin() + row * 12 + 12,
                               whole.begin() + row * 24 + rank * 12));
      }
    }
    const WeightColumns columns[] = {{halves.data(), 0, 1, 12}, {&halves[1], 0, 1, 12}};
    const auto joined = JoinColumns(columns);
    ASSERT_TRUE(joined.ok());
    EXPECT_EQ(Decoded(*joined), whole);
    const auto along_k = Shard(a, ShardAxis::kK, 0, 3);
    EXPECT_EQ(along_k.status().code(), Code::kUnsupported);
    EXPECT_EQ(Shard(a, ShardAxis::kK, 0, 1)->codes.data(), a.codes.data());
  }
}

TEST(Permutation, ASliceHasItsExpertsOwn) {
  const QuantizedWeights stack = Random(Specs(3, 64, 8).front(), 4);
  const std::vector<float> all = Decoded(stack);
  for (int64_t e = 0; e < 3; ++e) {
    const auto slice = SliceExpert(stack, e);
    ASSERT_TRUE(slice.ok() && Validate(*slice).ok());
    const std::vector<float> part = Decoded(*slice);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + e * 64 * 8)) << e;
  }
}

}  // namespace
}  // namespace marlin::permutation_test
