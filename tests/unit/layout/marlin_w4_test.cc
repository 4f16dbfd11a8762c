#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "marlin/layout.h"

namespace marlin::marlin_w4_test {
namespace {

nlohmann::json Golden(const std::string& name) {
  std::ifstream file(SourceDirectory() + "/tests/golden/" + name);
  EXPECT_TRUE(file.good()) << name;
  return nlohmann::json::parse(file);
}

std::vector<uint32_t> Canonical(int64_t k, int64_t n, const std::vector<uint8_t>& codes) {
  std::vector<uint32_t> words(static_cast<size_t>((k + 7) / 8 * n));
  EXPECT_TRUE(PackCodes(Format::kU4, k, n, codes, words).ok());
  return words;
}

std::vector<uint8_t> RandomCodes(int64_t count) {
  std::mt19937 rng(static_cast<unsigned>(count));
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng() % 16);
  return codes;
}

/// One pass per nibble of the code index reveals the index at every position.
TEST(MarlinW4, MatchesThePublishedTableOf32x32) {
  const auto rows = Golden("marlin_w4_32x32.json")["rows"];
  ASSERT_EQ(rows.size(), 32u);
  std::vector<int> index_at(1024, 0);
  for (int pass = 0; pass < 3; ++pass) {
    std::vector<uint8_t> codes(1024);
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<uint8_t>(i >> (4 * pass) & 15u);
    }
    std::vector<uint32_t> tiles(128, ~0u);
    ASSERT_EQ(MarlinW4WordCount(32, 32), 128);
    ASSERT_TRUE(RepackToMarlinW4(32, 32, Canonical(32, 32, codes), tiles).ok());
    for (size_t i = 0; i < 1024; ++i) {
      index_at[i] |= static_cast<int>(tiles[i / 8] >> (4 * (i % 8)) & 15u) << (4 * pass);
    }
  }
  for (size_t lane = 0; lane < 32; ++lane) {
    for (size_t j = 0; j < 32; ++j) {
      EXPECT_EQ(index_at[lane * 32 + j], rows[lane][j].get<int>()) << lane << " " << j;
    }
  }
}

TEST(MarlinW4, BlocksRunAlongNThenKAndPaddingIsCodeZero) {
  const int64_t k = 40;
  const int64_t n = 70;
  std::vector<uint8_t> codes(static_cast<size_t>(k * n), 0);
  codes[static_cast<size_t>(33 * n + 66)] = 5;  // Row 1, column 2 of block (1, 2): lane 8, word 0.
  std::vector<uint32_t> tiles(static_cast<size_t>(MarlinW4WordCount(k, n)), ~0u);
  ASSERT_EQ(tiles.size(), 2u * 3u * 128u);
  ASSERT_TRUE(RepackToMarlinW4(k, n, Canonical(k, n, codes), tiles).ok());
  for (size_t i = 0; i < tiles.size(); ++i) {
    // Code 1 of the lane's eight is nibble 4.
    EXPECT_EQ(tiles[i], i == (1 * 3 + 2) * 128 + 8 * 4 ? 5u << 16 : 0u) << i;
  }
}

TEST(MarlinW4, RoundTripsEveryShape) {
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{32, 32},
                             {1, 1},
                             {33, 65},
                             {100, 7},
                             {128, 256},
                             {0, 8},
                             {8, 0}}) {
    const auto words = Canonical(k, n, RandomCodes(k * n));
    std::vector<uint32_t> tiles(static_cast<size_t>(MarlinW4WordCount(k, n)));
    ASSERT_TRUE(RepackToMarlinW4(k, n, words, tiles).ok());
    std::vector<uint32_t> back(words.size(), ~0u);
    ASSERT_TRUE(RepackFromMarlinW4(k, n, tiles, back).ok());
    EXPECT_EQ(back, words) << k << " x " << n;
  }
}

TEST(MarlinW4, ReadsTheOriginalsAndVllmsLayout) {
  const auto golden = Golden("original_marlin_48x128.json");
  const int64_t k = golden["k"];
  const int64_t n = golden["n"];
  std::vector<uint8_t> codes;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const int64_t value = 7 * i + 13 * j + i * j / 5 + i / 3 * (j / 7) * 11;
      codes.push_back(static_cast<uint8_t>(value % 16));
    }
  }
  const auto expected = Canonical(k, n, codes);
  const auto words = golden["words"].get<std::vector<uint32_t>>();
  std::vector<uint32_t> canonical(expected.size(), ~0u);
  ASSERT_TRUE(RepackFromOriginalMarlin(k, n, words, canonical).ok());
  EXPECT_EQ(canonical, expected);
  std::fill(canonical.begin(), canonical.end(), ~0u);
  ASSERT_TRUE(RepackFromVllmMarlin(k, n, words, canonical).ok());
  EXPECT_EQ(canonical, expected);
}

TEST(MarlinW4, NamesWrongSizes) {
  std::vector<uint32_t> words(128);
  EXPECT_EQ(RepackToMarlinW4(32, 32, words, std::span(words).first(127)).message(),
            "tiles: expected 128 words, got 127 (k=32, n=32)");
  EXPECT_EQ(RepackFromMarlinW4(32, 64, words, words).message(),
            "canonical: expected 256 words, got 128 (k=32, n=64)");
  EXPECT_EQ(RepackFromOriginalMarlin(16, 32, words, words).message(),
            "words: the layout needs k % 16 == 0 and n % 64 == 0, got k=16, n=32");
  EXPECT_EQ(RepackFromVllmMarlin(16, 64, std::span(words).first(5), words).message(),
            "words: expected 128 words, got 5 (k=16, n=64)");
  EXPECT_EQ(RepackToMarlinW4(-32, 32, words, words).code(), Code::kInvalidArgument);
  EXPECT_EQ(RepackToMarlinW4(int64_t{1} << 40, int64_t{1} << 40, words, words).code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace marlin::marlin_w4_test
