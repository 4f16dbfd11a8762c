// Shards of weights: exactly the weights of their part, in every format, and borders that are none.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "decoded.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"

namespace marlin::shard_test {
namespace {

using testing::Decoded;

struct Case {
  Format format = Format::kFp4E2M1;
  int64_t experts = 1;
  int64_t k = 96;
  int64_t n = 6;
  int64_t group_size = 16;
  ScaleType scale_type = ScaleType::kF16;
};

/// Weights of a case, with a zero or bias for every group where the format has them.
Result<QuantizedWeights> Make(const Case& of) {
  std::vector<float> dense(static_cast<size_t>(of.experts * of.k * of.n));
  for (size_t i = 0; i < dense.size(); ++i) {
    dense[i] = 0.01f * static_cast<float>((i * 7919) % 201) - 0.7f;
  }
  QuantizeOptions how;
  how.format = of.format;
  how.group_size = of.group_size;
  how.scale_type = of.scale_type;
  return Quantize(TensorView(dense.data(), DType::kF32, {of.experts, of.k, of.n}), how);
}

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

/// Compares every shard with its part of the whole, bit by bit.
void ExpectExactShards(const QuantizedWeights& whole, ShardAxis axis, int64_t world) {
  const WeightsSpec& spec = whole.spec;
  const std::vector<float> all = Decoded(whole);
  for (int64_t rank = 0; rank < world; ++rank) {
    const Result<QuantizedWeights> shard = Shard(whole, axis, rank, world);
    ASSERT_TRUE(shard.ok()) << shard.status().message();
    const Status valid = Validate(*shard);
    ASSERT_TRUE(valid.ok()) << valid.message();
    const bool along_k = axis == ShardAxis::kK;
    const int64_t k = along_k ? spec.k / world : spec.k;
    const int64_t n = along_k ? spec.n : spec.n / world;
    ASSERT_EQ(shard->spec.k, k);
    ASSERT_EQ(shard->spec.n, n);
    const std::vector<float> part = Decoded(*shard);
    const int64_t first_k = along_k ? rank * k : 0;
    const int64_t first_n = along_k ? 0 : rank * n;
    for (int64_t e = 0; e < spec.experts; ++e) {
      for (int64_t row = 0; row < k; ++row) {
        const float* got = part.data() + (e * k + row) * n;
        const float* wanted = all.data() + (e * spec.k + first_k + row) * spec.n + first_n;
        ASSERT_TRUE(std::equal(got, got + n, wanted, SameBits))
            << "rank " << rank << ", expert " << e << ", row " << row;
      }
    }
  }
}

TEST(Shard, HasExactlyItsPartOfTheWeights) {
  for (const FormatInfo& info : AllFormats()) {
    for (const int64_t experts : {1, 3}) {
      for (const int64_t group_size : {16, 32, 48}) {
        const Result<QuantizedWeights> whole = Make({info.format, experts, 96, 6, group_size});
        ASSERT_TRUE(whole.ok()) << whole.status().message();
        SCOPED_TRACE(std::string(info.name) + "/g" + std::to_string(group_size));
        for (const int64_t world : {1, 2, 3, 6}) {
          ExpectExactShards(*whole, ShardAxis::kN, world);
          const bool between = !info.quantized || world == 1 || 96 / world % group_size == 0;
          if (between) ExpectExactShards(*whole, ShardAxis::kK, world);
        }
      }
    }
  }
}

TEST(Shard, KeepsScalesOfEveryType) {
  for (const ScaleType type :
       {ScaleType::kBf16, ScaleType::kF32, ScaleType::kE8M0, ScaleType::kE4M3}) {
    const Result<QuantizedWeights> whole = Make({Format::kFp4E2M1, 2, 64, 4, 16, type});
    ASSERT_TRUE(whole.ok()) << whole.status().message();
    ExpectExactShards(*whole, ShardAxis::kK, 4);
    ExpectExactShards(*whole, ShardAxis::kN, 4);
  }
}

TEST(Shard, CutsBiases) {
  Result<QuantizedWeights> whole = Make({Format::kU4, 2, 64, 4, 16});
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  whole->biases = whole->zeros;
  whole->zeros = TensorView();
  whole->spec.has_zeros = false;
  whole->spec.has_biases = true;
  ExpectExactShards(*whole, ShardAxis::kK, 2);
  ExpectExactShards(*whole, ShardAxis::kN, 2);
}

// Borders within a word, also of 3 bits, and code bits of the next shard in the last word.
TEST(Shard, CutsOneGroupAnywhere) {
  for (const FormatInfo& info : AllFormats()) {
    for (const int64_t k : {3, 10, 105, 134}) {
      const Result<QuantizedWeights> whole = Make({info.format, 2, k, 3, 0});
      ASSERT_TRUE(whole.ok()) << whole.status().message();
      for (int64_t world = 2; world <= k; ++world) {
        if (k % world != 0) continue;
        SCOPED_TRACE(std::string(info.name) + " k=" + std::to_string(k) + "/" +
                     std::to_string(world));
        ExpectExactShards(*whole, ShardAxis::kK, world);
      }
    }
  }
}

TEST(Shard, ClearsTheBitsPastItsLastCode) {
  const Result<QuantizedWeights> whole = Make({Format::kInt3, 1, 40, 2, 0});
  ASSERT_TRUE(whole.ok());
  const Result<QuantizedWeights> shard = Shard(*whole, ShardAxis::kK, 0, 4);
  ASSERT_TRUE(shard.ok());
  ASSERT_EQ(shard->codes.dim(1), 3);
  for (int64_t i = 0; i < 6; ++i) {
    const uint32_t word = shard->codes.As<uint32_t>()[i];
    EXPECT_EQ(i < 2 ? word >> 30 : word, 0u) << "word " << i;
  }
}

TEST(Shard, AcceptsEmptyMatrices) {
  for (const Case& of : {Case{.k = 0}, Case{.n = 0}}) {
    const Result<QuantizedWeights> whole = Make(of);
    ASSERT_TRUE(whole.ok()) << whole.status().message();
    ExpectExactShards(*whole, ShardAxis::kK, 2);
    ExpectExactShards(*whole, ShardAxis::kN, 2);
  }
}

void ExpectError(const Case& of, ShardAxis axis, int64_t rank, int64_t world,
                 const std::string& message) {
  const Result<QuantizedWeights> whole = Make(of);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  const Result<QuantizedWeights> shard = Shard(*whole, axis, rank, world);
  ASSERT_FALSE(shard.ok());
  EXPECT_EQ(shard.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(shard.status().message(), message);
}

TEST(Shard, RefusesWhatCannotBeCutWithBothNumbers) {
  const Case groups{.k = 768, .group_size = 128};
  ExpectError(groups, ShardAxis::kK, 0, 4,
              "shard: k=768 in 4 shards of 192 is no multiple of group_size=128");
  // The last group is short.
  ExpectError({.k = 40, .group_size = 16}, ShardAxis::kK, 0, 2,
              "shard: k=40 in 2 shards of 20 is no multiple of group_size=16");
  ExpectError(groups, ShardAxis::kK, 0, 5, "shard: k=768 cannot be cut into 5 equal shards");
  ExpectError({.n = 9}, ShardAxis::kN, 0, 2, "shard: n=9 cannot be cut into 2 equal shards");
  ExpectError({}, ShardAxis::kN, 2, 2, "rank: expected 0 to 1, got 2");
  ExpectError({}, ShardAxis::kN, -1, 2, "rank: expected 0 to 1, got -1");
  ExpectError({}, ShardAxis::kN, 0, 0, "world: expected at least 1, got 0");
  ExpectError({}, static_cast<ShardAxis>(7), 0, 2, "axis: 7 is no ShardAxis");
}

TEST(Shard, RefusesInvalidWeights) {
  Result<QuantizedWeights> whole = Make({});
  ASSERT_TRUE(whole.ok());
  whole->spec.k = 128;
  const Result<QuantizedWeights> shard = Shard(*whole, ShardAxis::kK, 0, 2);
  ASSERT_FALSE(shard.ok());
  EXPECT_EQ(shard.status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace marlin::shard_test
