// Weights with 2:4 sparsity: pruning, expansion, validation, slices, joins and shards, in every
// format that has them, against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "decoded.h"
#include "layout/join_columns.h"
#include "layout/slice_expert.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "reference/dequantize.h"

namespace marlin::sparse_weights_test {
namespace {

using testing::Decoded;

std::vector<float> Random(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

struct Size {
  int64_t experts = 1;
  int64_t k = 64;
  int64_t n = 6;
};

Result<QuantizedWeights> Make(const Size& size, QuantizeOptions options, uint32_t seed = 1) {
  const std::vector<float> dense = Random(size.experts * size.k * size.n, seed);
  return Quantize(TensorView(dense.data(), DType::kF32, {size.experts, size.k, size.n}), options);
}

/// Formats with 4 or 8 bits, without zeros and with a 0; the codebook of codebook4 lacks it.
std::vector<Format> SparseFormats() {
  std::vector<Format> formats;
  for (const FormatInfo& info : AllFormats()) {
    const bool wide = info.bits == 4 || info.bits == 8;
    const bool zeros = info.zero_point == ZeroPoint::kRequired;
    if (info.quantized && wide && !zeros && info.format != Format::kCodebook4) {
      formats.push_back(info.format);
    }
  }
  return formats;
}

/// Compares pruned weights [experts, k, n] with the dense ones they come from.
void ExpectLargestTwo(const std::vector<float>& all, const std::vector<float>& kept, int64_t k,
                      int64_t n) {
  for (size_t at = 0; at < all.size(); ++at) {
    const auto row = static_cast<int64_t>(at) / n % k;
    const int64_t column = static_cast<int64_t>(at) - row * n;
    int larger = 0;
    for (int64_t i = row / 4 * 4; i < std::min(row / 4 * 4 + 4, k); ++i) {
      const float other = std::fabs(all[static_cast<size_t>(column + i * n)]);
      larger += other > std::fabs(all[at]) || (other == std::fabs(all[at]) && i < row) ? 1 : 0;
    }
    ASSERT_EQ(kept[at], larger < 2 ? all[at] : 0.0f) << at;
  }
}

TEST(SparseWeights, AreTheLargestTwoOfTheDenseOnesInEveryFormat) {
  EXPECT_EQ(SparseFormats().size(), 6u);
  for (const Format format : SparseFormats()) {
    for (const int64_t k : {1, 2, 3, 4, 30, 64, 100, 144}) {
      SCOPED_TRACE(std::string(FormatName(format)) + " k " + std::to_string(k));
      QuantizeOptions options;
      options.format = format;
      options.group_size = 48;
      const Size size{2, k, 5};
      const auto dense = Make(size, options);
      options.sparsity = Sparsity::k24;
      const auto sparse = Make(size, options);
      ASSERT_TRUE(dense.ok() && sparse.ok()) << sparse.status().message();
      EXPECT_EQ(sparse->spec.sparsity, Sparsity::k24);
      ASSERT_TRUE(Validate(*sparse).ok()) << Validate(*sparse).message();
      const auto pruned = Prune24(*dense);
      ASSERT_TRUE(pruned.ok());
      EXPECT_EQ(Decoded(*pruned), Decoded(*sparse));
      ExpectLargestTwo(Decoded(*dense), Decoded(*sparse), k, size.n);
    }
  }
}

TEST(SparseWeights, TheReferenceReadsTheSameNumbers) {
  for (const Format format : SparseFormats()) {
    const Size size{2, 100, 7};
    const auto sparse = Make(size, {.format = format, .group_size = 32, .sparsity = Sparsity::k24});
    ASSERT_TRUE(sparse.ok());
    const std::vector<float> decoded = Decoded(*sparse);
    for (int64_t e = 0; e < size.experts; ++e) {
      const auto reference = reference::Dequantize(*sparse, e);
      ASSERT_TRUE(reference.ok()) << reference.status().message();
      for (size_t i = 0; i < reference->value.size(); ++i) {
        const size_t at = static_cast<size_t>(e) * reference->value.size() + i;
        ASSERT_EQ(static_cast<float>(reference->value[i]), decoded[at]) << FormatName(format);
      }
    }
  }
}

TEST(SparseWeights, ExpansionAndPruningAreInverse) {
  for (const Format format : SparseFormats()) {
    const auto sparse =
        Make({2, 100, 7}, {.format = format, .group_size = 32, .sparsity = Sparsity::k24});
    ASSERT_TRUE(sparse.ok());
    const auto dense = Expand24(*sparse);
    ASSERT_TRUE(dense.ok());
    EXPECT_EQ(dense->spec.sparsity, Sparsity::kDense);
    EXPECT_TRUE(dense->metadata.empty());
    EXPECT_EQ(Decoded(*dense), Decoded(*sparse));
    const auto again = Prune24(*dense);
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(Decoded(*again), Decoded(*sparse));
    EXPECT_EQ(Expand24(*dense)->codes.data(), dense->codes.data());
    EXPECT_EQ(Prune24(*sparse)->codes.data(), sparse->codes.data());
  }
}

TEST(SparseWeights, ExpansionLeavesCode0PastK) {
  const auto sparse =
      Make({1, 99, 2}, {.format = Format::kS4, .group_size = 32, .sparsity = Sparsity::k24});
  ASSERT_TRUE(sparse.ok());
  const auto dense = Expand24(*sparse);
  ASSERT_TRUE(dense.ok());
  // 99 codes fill 12 words and 3 codes of the last one.
  for (int64_t n = 0; n < 2; ++n) EXPECT_EQ(dense->codes.As<uint32_t>()[12 * 2 + n] >> 12, 0u);
}

TEST(SparseWeights, TakeThreeQuartersOfFourBitsAndFiveEighthsOfEight) {
  const auto bytes = [](Format format, Sparsity sparsity) {
    const WeightsSpec spec{
        .format = format, .k = 96, .n = 10, .group_size = 96, .sparsity = sparsity};
    const auto buffer = AllocateWeights(spec);
    EXPECT_TRUE(buffer.ok());
    const QuantizedWeights& w = buffer->weights;
    const int64_t metadata = w.metadata.empty() ? 0 : w.metadata.ByteCount();
    EXPECT_EQ(StoredBytes(spec), w.codes.ByteCount() + metadata + w.scales.ByteCount());
    return w.codes.ByteCount() + metadata;
  };
  EXPECT_EQ(bytes(Format::kS4, Sparsity::kDense), 480);
  EXPECT_EQ(bytes(Format::kS4, Sparsity::k24), 360);
  EXPECT_EQ(bytes(Format::kFp8E4M3, Sparsity::kDense), 960);
  EXPECT_EQ(bytes(Format::kFp8E4M3, Sparsity::k24), 600);
}

TEST(SparseWeights, ImportanceDecides) {
  // s4, one column, one group: values 7, -6, 1, 2 in both blocks.
  const std::vector<float> dense = {7, -6, 1, 2, 7, -6, 1, 2};
  const auto weights = Quantize(TensorView(dense.data(), DType::kF32, {8, 1}),
                                {.format = Format::kS4, .group_size = 0});
  ASSERT_TRUE(weights.ok());
  const std::vector<float> importance = {1, 1, 100, 100, 1, 1, 36, 9};
  const auto pruned = Prune24(*weights, importance);
  ASSERT_TRUE(pruned.ok()) << pruned.status().message();
  // The second block ties: 49, 36, 36, 36.
  EXPECT_EQ(Decoded(*pruned), (std::vector<float>{0, 0, 1, 2, 7, -6, 0, 0}));
  const auto message = [&](std::vector<float> wrong) {
    const auto result = Prune24(*weights, wrong);
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
    return result.status().message();
  };
  EXPECT_EQ(message({1, 2}), "importance: expected 8 values, one per k, got 2");
  EXPECT_EQ(message({1, 1, -1, 1, 1, 1, 1, 1}),
            "importance: value 2 is -1; expected finite numbers of at least 0");
  EXPECT_EQ(message({1, 1, 1, std::numeric_limits<float>::quiet_NaN(), 1, 1, 1, 1}),
            "importance: value 3 is nan; expected finite numbers of at least 0");
}

TEST(SparseWeights, EveryInvalidNibbleIsNamed) {
  auto buffer = AllocateWeights({.format = Format::kFp4E2M1,
                                 .experts = 2,
                                 .k = 64,
                                 .n = 3,
                                 .group_size = 64,
                                 .sparsity = Sparsity::k24});
  ASSERT_TRUE(buffer.ok());
  const QuantizedWeights& weights = buffer->weights;
  std::memset(buffer->codes, 0, static_cast<size_t>(weights.codes.ByteCount()));
  std::memset(buffer->scales, 0, static_cast<size_t>(weights.scales.ByteCount()));
  auto* const metadata = static_cast<uint32_t*>(buffer->metadata);
  for (uint32_t nibble = 0; nibble < 16; ++nibble) {
    std::fill_n(metadata, weights.metadata.ElementCount(), 0x44444444u);
    metadata[6 + 3 + 1] = 0x44444044u | nibble << 8;  // Expert 1, block 10, column 1.
    const bool valid = nibble == 4 || nibble == 8 || nibble == 9 || (nibble >= 12 && nibble < 15);
    const Status status = Validate(weights);
    EXPECT_EQ(status.ok(), valid) << nibble;
    EXPECT_EQ(Expand24(weights).ok(), valid);
    if (valid) continue;
    EXPECT_EQ(status.code(), Code::kMalformedFile);
    EXPECT_EQ(status.message(),
              "metadata: nibble " + std::to_string(nibble) +
                  " of expert 1, block 10, column 1 is not one of 4, 8, 9, 12, 13, 14");
  }
}

TEST(SparseWeights, FormatsWithoutThemAreRefused) {
  const auto status = [](QuantizeOptions options) {
    options.sparsity = Sparsity::k24;
    options.group_size = 32;
    options.tensor_name = "w";
    return Make({}, options).status();
  };
  EXPECT_EQ(status({.format = Format::kNf3}).message(),
            "tensor 'w': sparsity: 2:4 needs 4 or 8 bits, nf3 has 3");
  EXPECT_EQ(status({.format = Format::kBf16}).message(),
            "tensor 'w': sparsity: 2:4 needs 4 or 8 bits, bf16 has 16");
  EXPECT_EQ(status({.format = Format::kU4}).code(), Code::kUnsupported);
  EXPECT_EQ(status({.format = Format::kU4}).message(),
            "tensor 'w': format: in u4 the code of weight 0 depends on the group's zero point; use "
            "a format without zeros");
  EXPECT_EQ(status({.format = Format::kCodebook4}).message(),
            "tensor 'w': format: codebook4 has no code of value 0");
  std::vector<float> book(16);
  for (size_t i = 0; i < book.size(); ++i) book[i] = static_cast<float>(i) / 8.0f - 1.0f;
  EXPECT_TRUE(status({.format = Format::kCodebook4, .codebook = book}).ok());
  EXPECT_EQ(
      CheckSpec({.k = 4, .n = 4, .group_size = 4, .sparsity = static_cast<Sparsity>(7)}).message(),
      "sparsity: unknown number 7");
  EXPECT_EQ(ParseSparsity("2:5").status().message(),
            "sparsity: unknown name '2:5'; known: dense, 2:4");
  auto u8 = Make({}, {.format = Format::kU8, .group_size = 32});
  ASSERT_TRUE(u8.ok());
  EXPECT_EQ(Prune24(*u8).status().code(), Code::kUnsupported);
}

TEST(SparseWeights, PresentMetadataOfDenseWeightsIsRefused) {
  auto weights = *Make({}, {.format = Format::kS4, .group_size = 32});
  weights.metadata = weights.codes;
  EXPECT_EQ(Validate(weights).message(), "metadata: present, but the spec has none");
}

TEST(SparseWeights, AreSlicedJoinedAndSharded) {
  for (const Format format : {Format::kS4, Format::kFp8E4M3}) {
    const Size size{3, 128, 8};
    const auto whole = *Make(size, {.format = format, .group_size = 32, .sparsity = Sparsity::k24});
    const std::vector<float> all = Decoded(whole);
    const auto part = [&](int64_t e, int64_t k0, int64_t k, int64_t n0, int64_t n) {
      std::vector<float> values;
      for (int64_t i = k0; i < k0 + k; ++i) {
        for (int64_t j = n0; j < n0 + n; ++j) {
          values.push_back(all[static_cast<size_t>((e * size.k + i) * size.n + j)]);
        }
      }
      return values;
    };
    const auto slice = SliceExpert(whole, 1);
    ASSERT_TRUE(slice.ok());
    EXPECT_EQ(Decoded(*slice), part(1, 0, 128, 0, 8));
    const WeightColumns columns[] = {{&*slice, 6, 1, 2}, {&*slice, 0, 1, 6}};
    const auto joined = JoinColumns(columns);
    ASSERT_TRUE(joined.ok());
    EXPECT_TRUE(Validate(*joined).ok());
    EXPECT_EQ(Decoded(*Shard(*joined, ShardAxis::kN, 0, 4)), part(1, 0, 128, 6, 2));
    for (int64_t rank = 0; rank < 2; ++rank) {
      const auto rows = Shard(*slice, ShardAxis::kK, rank, 2);
      ASSERT_TRUE(rows.ok()) << rows.status().message();
      EXPECT_TRUE(Validate(*rows).ok());
      EXPECT_EQ(Decoded(*rows), part(1, rank * 64, 64, 0, 8));
    }
    EXPECT_FALSE(CanJoinColumns(*slice, *Expand24(*slice)));
  }
  const auto narrow =
      *Make({1, 96, 4}, {.format = Format::kS4, .group_size = 16, .sparsity = Sparsity::k24});
  EXPECT_EQ(Shard(narrow, ShardAxis::kK, 0, 2).status().message(),
            "shard: k=96 in 2 shards of 48 is no multiple of 32 as 2:4 needs");
}

TEST(SparseWeights, HugeEmptyMatricesTakeNoTime) {
  const TensorView none(nullptr, DType::kF32, {int64_t{1} << 40, 0});
  const auto weights =
      Quantize(none, {.format = Format::kS4, .group_size = 0, .sparsity = Sparsity::k24});
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_TRUE(Expand24(*weights).ok());
}

}  // namespace
}  // namespace marlin::sparse_weights_test
