// Conversion of 2:4 metadata to CUTLASS's order and back.
#include "layout/cutlass_metadata.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace marlin::cutlass_metadata_test {
namespace {

constexpr uint32_t kNibbles[] = {4, 8, 9, 12, 13, 14};

std::vector<uint32_t> RandomMetadata(int64_t k, int64_t n, uint32_t seed) {
  std::mt19937 bits(seed);
  std::vector<uint32_t> words(static_cast<size_t>(k / 32 * n));
  for (uint32_t& word : words) {
    for (int i = 0; i < 8; ++i) word |= kNibbles[bits() % 6] << (4 * i);
  }
  return words;
}

/// The place of a 16-bit unit as CUTLASS's host code computes it, written as its documentation
/// describes it: rows are interleaved by 4 within 32, then the off-diagonal units of every 2 x 2
/// are exchanged, and the result is column-major with two columns interleaved.
size_t UnitPlace(int64_t n, int64_t row, int64_t unit) {
  int64_t to_row = row / 32 * 32 + row % 8 * 4 + row % 32 / 8;
  int64_t to_unit = unit;
  if (to_row % 2 == 0 && to_unit % 2 == 1) {
    ++to_row;
    --to_unit;
  } else if (to_row % 2 == 1 && to_unit % 2 == 0) {
    --to_row;
    ++to_unit;
  }
  return static_cast<size_t>(to_unit / 2 * 2 * n + to_row * 2 + to_unit % 2);
}

TEST(CutlassMetadata, HasEveryUnitInItsPlace) {
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{32, 32}, {64, 32}, {32, 96}, {256, 128}}) {
    const std::vector<uint32_t> canonical = RandomMetadata(k, n, 1);
    std::vector<uint32_t> reordered(canonical.size());
    ASSERT_TRUE(ToCutlassMetadata(k, n, canonical, reordered).ok());
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t unit = 0; unit < k / 16; ++unit) {
        const size_t place = UnitPlace(n, row, unit);
        const uint32_t got = reordered[place / 2] >> (place % 2 * 16) & 0xffffu;
        const uint32_t expected =
            canonical[static_cast<size_t>(unit / 2 * n + row)] >> (unit % 2 * 16) & 0xffffu;
        ASSERT_EQ(got, expected) << "row " << row << ", unit " << unit;
      }
    }
  }
}

TEST(CutlassMetadata, ComesBack) {
  // Every pattern of a block in every block of a row of words, among other patterns.
  const int64_t k = 64;
  const int64_t n = 64;
  std::vector<uint32_t> reordered(static_cast<size_t>(k / 32 * n));
  std::vector<uint32_t> back(reordered.size());
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::vector<uint32_t> canonical = RandomMetadata(k, n, seed);
    for (const uint32_t nibble : kNibbles) {
      const size_t word = seed * 7 % canonical.size();
      const auto shift = seed % 8 * 4;
      canonical[word] = (canonical[word] & ~(15u << shift)) | nibble << shift;
      ASSERT_TRUE(ToCutlassMetadata(k, n, canonical, reordered).ok());
      ASSERT_TRUE(FromCutlassMetadata(k, n, reordered, back).ok());
      ASSERT_EQ(back, canonical);
    }
  }
}

TEST(CutlassMetadata, NamesEveryInvalidNibble) {
  for (const uint32_t nibble : {0u, 1u, 2u, 3u, 5u, 6u, 7u, 10u, 11u, 15u}) {
    std::vector<uint32_t> canonical = RandomMetadata(64, 32, 5);
    std::vector<uint32_t> reordered(canonical.size());
    ASSERT_TRUE(ToCutlassMetadata(64, 32, canonical, reordered).ok());
    // Row 9, blocks 8 to 11: the high half of the word of g = 1, t = 0.
    reordered[32 + 4] = (reordered[32 + 4] & ~(15u << 20)) | nibble << 20;
    const Status from = FromCutlassMetadata(64, 32, reordered, canonical);
    EXPECT_EQ(from.code(), Code::kMalformedFile);
    EXPECT_NE(from.message().find("nibble " + std::to_string(nibble) + " of block 9, column 9"),
              std::string::npos)
        << from.message();
    EXPECT_EQ(ToCutlassMetadata(64, 32, canonical, reordered).code(), Code::kMalformedFile);
  }
}

TEST(CutlassMetadata, RefusesWrongSizes) {
  std::vector<uint32_t> words(32);
  std::vector<uint32_t> more(64);
  EXPECT_EQ(ToCutlassMetadata(32, 33, words, more).code(), Code::kInvalidArgument);
  EXPECT_EQ(ToCutlassMetadata(33, 32, words, more).code(), Code::kInvalidArgument);
  EXPECT_EQ(ToCutlassMetadata(-32, -32, words, more).code(), Code::kInvalidArgument);
  EXPECT_EQ(ToCutlassMetadata(32, 32, words, more).code(), Code::kInvalidArgument);
  EXPECT_EQ(FromCutlassMetadata(32, 32, more, words).code(), Code::kInvalidArgument);
  EXPECT_TRUE(ToCutlassMetadata(0, 0, {}, {}).ok());
}

}  // namespace
}  // namespace marlin::cutlass_metadata_test
