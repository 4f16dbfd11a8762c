#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "marlin/layout.h"
#include "marlin/weights.h"

namespace marlin::codes_test {
namespace {

std::vector<uint8_t> RandomCodes(int bits, int64_t count) {
  std::mt19937 rng(static_cast<unsigned>(count) * 31u + static_cast<unsigned>(bits));
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng() % (1u << bits));
  return codes;
}

/// Returns bit `bit` of column n, counted along the column's words.
unsigned ColumnBits(const std::vector<uint32_t>& words, int64_t n_count, int64_t n, int64_t bit,
                    int bits) {
  unsigned code = 0;
  for (int i = 0; i < bits; ++i) {
    const int64_t at = bit + i;
    const uint32_t word = words[static_cast<size_t>(at / 32 * n_count + n)];
    code |= ((word >> (at % 32)) & 1u) << i;
  }
  return code;
}

void CheckPacking(const FormatInfo& info, int64_t k, int64_t n) {
  const auto codes = RandomCodes(info.bits, k * n);
  std::vector<uint32_t> words(static_cast<size_t>(WordsAlongK(info.format, k) * n), ~0u);
  ASSERT_TRUE(PackCodes(info.format, k, n, codes, words).ok());
  for (int64_t i = 0; i < k * n; ++i) {
    ASSERT_EQ(ColumnBits(words, n, i % n, i / n * info.bits, info.bits),
              codes[static_cast<size_t>(i)])
        << "i=" << i;
  }
  // Positions past k hold code 0.
  const int64_t spare_bits = WordsAlongK(info.format, k) * 32 - k * info.bits;
  for (int64_t i = 0; i < spare_bits * n; ++i) {
    ASSERT_EQ(ColumnBits(words, n, i % n, k * info.bits + i / n, 1), 0u);
  }
  std::vector<uint8_t> back(codes.size(), 0xee);
  ASSERT_TRUE(UnpackCodes(info.format, k, n, words, back).ok());
  EXPECT_EQ(back, codes);
}

TEST(PackCodes, PutsCodeKAtBitKTimesBitsOfItsColumn) {
  for (const FormatInfo& info : AllFormats()) {
    if (info.bits > 8) continue;
    for (const int64_t k : {1, 7, 8, 31, 32, 33, 64, 100, 513, 1030}) {
      for (const int64_t n : {1, 3, 16, 17, 40}) {
        SCOPED_TRACE(std::string(info.name) + " k=" + std::to_string(k) +
                     " n=" + std::to_string(n));
        CheckPacking(info, k, n);
      }
    }
  }
}

TEST(PackCodes, AcceptsEmptyMatrices) {
  EXPECT_TRUE(PackCodes(Format::kU4, 0, 5, {}, {}).ok());
  EXPECT_TRUE(UnpackCodes(Format::kNf3, 64, 0, {}, {}).ok());
}

TEST(PackCodes, TakesNoTimeForColumnsWithoutRows) {
  constexpr int64_t kColumns = int64_t{1} << 60;
  EXPECT_TRUE(PackCodes(Format::kFp4E2M1, 0, kColumns, {}, {}).ok());
  EXPECT_TRUE(UnpackCodes(Format::kFp4E2M1, 0, kColumns, {}, {}).ok());
}

TEST(PackCodes, NamesWhatIsWrong) {
  std::vector<uint8_t> codes(16, 1);
  std::vector<uint32_t> words(2);
  const auto message = [&](Format format, int64_t k, int64_t n) {
    const Status status = PackCodes(format, k, n, codes, words);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message(Format::kU4, 8, 3), "codes: expected 24, got 16 (u4 [8, 3])");
  EXPECT_EQ(message(Format::kBf16, 8, 2), "format: bf16 has no packed codes");
  EXPECT_EQ(message(Format::kU4, -8, 2), "codes: negative shape [-8, 2]");
  EXPECT_EQ(message(Format::kU4, int64_t{1} << 40, int64_t{1} << 40).substr(0, 40),
            "codes: the number of elements overflows ");
  words.resize(4);
  EXPECT_EQ(message(Format::kU4, 8, 2), "words: expected 2, got 4 (u4 [8, 2])");
  words.resize(2);
  codes[9] = 16;
  EXPECT_EQ(message(Format::kU4, 8, 2), "codes: 16 at [4, 1] does not fit in 4 bits");
}

}  // namespace
}  // namespace marlin::codes_test
