#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "marlin/layout.h"

namespace marlin::sparse_24_test {
namespace {

std::vector<uint32_t> Canonical(int64_t k, int64_t n, const std::vector<uint8_t>& codes) {
  std::vector<uint32_t> words(static_cast<size_t>((k + 7) / 8 * n));
  EXPECT_TRUE(PackCodes(Format::kS4, k, n, codes, words).ok());
  return words;
}

std::vector<uint8_t> Dense(Format format, const Sparse24& sparse) {
  std::vector<uint32_t> words(static_cast<size_t>((sparse.k + 7) / 8 * sparse.n), ~0u);
  const Status status = UnpackSparse24(format, sparse, words);
  EXPECT_TRUE(status.ok()) << status.message();
  std::vector<uint8_t> codes(static_cast<size_t>(sparse.k * sparse.n));
  EXPECT_TRUE(UnpackCodes(format, sparse.k, sparse.n, words, codes).ok());
  return codes;
}

/// The expected nibble: sort by magnitude descending, stable, keep two.
uint32_t ExpectedNibble(const std::vector<float>& magnitude) {
  std::vector<uint32_t> order = {0, 1, 2, 3};
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return magnitude[a] > magnitude[b]; });
  return std::max(order[0], order[1]) << 2 | std::min(order[0], order[1]);
}

/// All 65,536 blocks of four codes, eight blocks per column.
TEST(Sparse24, KeepsTheTwoLargestOfEveryPossibleBlock) {
  const int64_t k = 32;
  const int64_t n = 8192;
  std::vector<uint8_t> codes(static_cast<size_t>(k * n));
  const auto block_of = [](int64_t column, int64_t block) { return column * 8 + block; };
  for (int64_t i = 0; i < k * n; ++i) {
    const int64_t all = block_of(i % n, i / n / 4);
    codes[static_cast<size_t>(i)] = static_cast<uint8_t>(all >> (4 * (i / n % 4)) & 15);
  }
  for (const Format format : {Format::kFp4E2M1, Format::kS4, Format::kNf4}) {
    const auto values = FormatValues(format);
    const auto zero =
        static_cast<uint8_t>(std::find(values.begin(), values.end(), 0.0f) - values.begin());
    const auto sparse = PackSparse24(format, k, n, Canonical(k, n, codes));
    ASSERT_TRUE(sparse.ok());
    const auto dense = Dense(format, *sparse);
    std::map<uint32_t, int> seen;
    for (int64_t i = 0; i < k / 4 * n; ++i) {
      const int64_t block = i / n;
      const int64_t column = i % n;
      std::vector<float> magnitude(4);
      const auto code_at = [&](const std::vector<uint8_t>& from, int64_t j) {
        return from[static_cast<size_t>((block * 4 + j) * n + column)];
      };
      for (int64_t j = 0; j < 4; ++j) {
        magnitude[static_cast<size_t>(j)] = std::fabs(values[code_at(codes, j)]);
      }
      const uint32_t expected = ExpectedNibble(magnitude);
      const uint32_t word = sparse->metadata[static_cast<size_t>(column)];
      ASSERT_EQ(word >> (4 * block) & 15u, expected);
      ++seen[expected];
      for (uint32_t j = 0; j < 4; ++j) {
        const bool kept = j == (expected & 3u) || j == expected >> 2;
        ASSERT_EQ(code_at(dense, j), kept ? code_at(codes, j) : zero);
      }
    }
    EXPECT_EQ(seen.size(), 6u);
  }
}

TEST(Sparse24, WordsFollowTheDocumentedBits) {
  // Block b keeps positions of pattern b: (0,1) (0,2) (0,3) (1,2) (1,3) (2,3), then (0,1) twice.
  const int pattern[8][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}, {0, 1}, {0, 1}};
  std::vector<uint8_t> codes(32, 8);  // s4: value 0
  for (size_t b = 0; b < 8; ++b) {
    codes[b * 4 + static_cast<size_t>(pattern[b][0])] = static_cast<uint8_t>(b);  // b - 8 < 0
    codes[b * 4 + static_cast<size_t>(pattern[b][1])] = 15;
  }
  const auto sparse = PackSparse24(Format::kS4, 32, 1, Canonical(32, 1, codes));
  ASSERT_TRUE(sparse.ok());
  EXPECT_EQ(sparse->metadata, (std::vector<uint32_t>{0x44ed9c84u}));
  EXPECT_EQ(sparse->values, (std::vector<uint32_t>{0xf3f2f1f0u, 0xf7f6f5f4u}));
  EXPECT_EQ(Dense(Format::kS4, *sparse), codes);
}

TEST(Sparse24, SaliencyOverridesMagnitudeAndTiesGoToTheLowerIndex) {
  const std::vector<uint8_t> codes = {15, 14, 9, 10, 9, 9, 9, 9};
  const auto words = Canonical(8, 1, codes);
  const std::vector<float> saliency = {0.0f, 1.0f, 3.0f, 2.0f, 5.0f, 5.0f, 5.0f, 5.0f};
  const auto sparse = PackSparse24(Format::kS4, 8, 1, words, saliency);
  ASSERT_TRUE(sparse.ok());
  EXPECT_EQ(sparse->metadata[0] & 0xffu, 0x4eu);
  EXPECT_EQ(Dense(Format::kS4, *sparse), (std::vector<uint8_t>{8, 8, 9, 10, 9, 9, 8, 8}));
}

TEST(Sparse24, PadsKWithCodeZero) {
  for (const int64_t k : {1, 2, 3, 5, 31, 33, 61}) {
    std::vector<uint8_t> codes(static_cast<size_t>(k), 8);  // Value 0: never above the padding.
    codes[static_cast<size_t>(k - 1)] = 9;
    const auto sparse = PackSparse24(Format::kS4, k, 1, Canonical(k, 1, codes));
    ASSERT_TRUE(sparse.ok());
    EXPECT_EQ(static_cast<int64_t>(sparse->values.size()), (k + 31) / 32 * 2);
    EXPECT_EQ(static_cast<int64_t>(sparse->metadata.size()), (k + 31) / 32);
    EXPECT_EQ(Dense(Format::kS4, *sparse), codes) << k;
  }
}

TEST(Sparse24, TakesNoTimeForRowsWithoutColumns) {
  constexpr int64_t kRows = int64_t{1} << 60;
  const Result<Sparse24> packed = PackSparse24(Format::kFp4E2M1, kRows, 0, {});
  ASSERT_TRUE(packed.ok());
  EXPECT_EQ(packed->k, kRows);
  EXPECT_TRUE(packed->values.empty());
  EXPECT_TRUE(UnpackSparse24(Format::kFp4E2M1, *packed, {}).ok());
}

TEST(Sparse24, RefusesEveryInvalidNibble) {
  const auto good = PackSparse24(Format::kFp4E2M1, 64, 3, std::vector<uint32_t>(24, 0x76543210u));
  ASSERT_TRUE(good.ok());
  std::vector<uint32_t> words(24, 7u);
  for (uint32_t nibble = 0; nibble < 16; ++nibble) {
    Sparse24 bad = *good;
    uint32_t& word = bad.metadata[3 + 1];  // Blocks 8..15 of column 1.
    word = (word & ~0xf00u) | nibble << 8;
    const Status status = UnpackSparse24(Format::kFp4E2M1, bad, words);
    if (nibble == 4 || nibble == 8 || nibble == 9 || nibble >= 12) {
      EXPECT_EQ(status.ok(), nibble != 15) << nibble;
    } else {
      EXPECT_EQ(status.code(), Code::kMalformedFile);
      EXPECT_EQ(status.message(), "metadata: nibble " + std::to_string(nibble) +
                                      " of block 10, column 1 is not one of 4, 8, 9, 12, 13, 14");
    }
  }
}

TEST(Sparse24, NamesWhatIsWrong) {
  const std::vector<uint32_t> words(8);
  const auto error = [](const Result<Sparse24>& result) { return result.status().message(); };
  EXPECT_EQ(error(PackSparse24(Format::kNf3, 64, 1, words)), "format: 2:4 needs 4 bits, nf3 has 3");
  EXPECT_EQ(PackSparse24(Format::kU4, 64, 1, words).status().code(), Code::kUnsupported);
  EXPECT_EQ(error(PackSparse24(Format::kS4, 60, 2, words)),
            "canonical: expected 16, got 8 for [60, 2]");
  EXPECT_EQ(error(PackSparse24(Format::kS4, 64, 1, words, std::vector<float>(3))),
            "saliency: expected 64, got 3 for [64, 1]");
  std::vector<float> saliency(64, 1.0f);
  saliency[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(error(PackSparse24(Format::kS4, 64, 1, words, saliency)), "saliency: NaN at [7, 0]");
  const auto sparse = PackSparse24(Format::kCodebook4, 64, 1, words);
  ASSERT_TRUE(sparse.ok());
  std::vector<uint32_t> out(8);
  EXPECT_EQ(UnpackSparse24(Format::kCodebook4, *sparse, out).message(),
            "format: codebook4 has no code of value 0");
  EXPECT_EQ(UnpackSparse24(Format::kS4, *sparse, std::span(out).first(7)).message(),
            "canonical: expected 8, got 7 for [64, 1]");
}

}  // namespace
}  // namespace marlin::sparse_24_test
