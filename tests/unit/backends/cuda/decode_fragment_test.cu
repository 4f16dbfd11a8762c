// Encodes and decodes every code of every kind in every position of a lane's words on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "lane_codes.cuh"

namespace marlin::cuda {
namespace {

/// Codes round-trip through their words, and nothing is written beyond those.
void ExpectComeBack(CodeKind kind, const LaneCodes& codes) {
  const LaneWords words = Encode(kind, codes);
  for (int i = 0; i < kCodes; ++i) {
    ASSERT_EQ(CodeOf(kind, words.data(), i), codes[static_cast<size_t>(i)])
        << "kind " << static_cast<int>(kind) << ", read at " << i;
  }
  for (int i = CodeBits(kind); i < kMaxWords; ++i) {
    ASSERT_EQ(words[static_cast<size_t>(i)], kUntouched) << "kind " << static_cast<int>(kind);
  }
}

/// Every code in every position, among codes of all zeros and of all ones.
void ExpectAllComeBack(CodeKind kind, int background) {
  for (int place = 0; place < kCodes; ++place) {
    for (int code = 0; code < CountOf(kind); ++code) {
      LaneCodes codes;
      codes.fill(static_cast<uint8_t>(background));
      codes[static_cast<size_t>(place)] = static_cast<uint8_t>(code);
      ExpectComeBack(kind, codes);
    }
  }
}

TEST(EncodeWords, GivesBackEveryCodeFromEveryPlace) {
  for (const CodeKind kind : CodedKinds()) {
    ExpectAllComeBack(kind, 0);
    ExpectAllComeBack(kind, CountOf(kind) - 1);
    if (HasFailure()) return;
  }
}

/// Codes with mixed neighbours: a word holds bits of several codes.
TEST(EncodeWords, GivesBackEveryMixture) {
  constexpr int kRounds = 20000;
  std::mt19937 bits(5);
  for (const CodeKind kind : CodedKinds()) {
    for (int round = 0; round < kRounds; ++round) {
      LaneCodes codes;
      for (uint8_t& code : codes) {
        code = static_cast<uint8_t>(bits() % static_cast<uint32_t>(CountOf(kind)));
      }
      ExpectComeBack(kind, codes);
      if (HasFailure()) return;
    }
  }
}

/// WordOffset places the words of all lanes in a fragment block once each.
TEST(WordOffset, IsOneToOne) {
  for (const int bits : {2, 3, 4, 8, 16}) {
    std::vector<int> seen(static_cast<size_t>(BlockBytes(bits) / 4), 0);
    for (int lane = 0; lane < 32; ++lane) {
      for (int word = 0; word < bits; ++word) {
        const int offset = WordOffset(bits, lane, word);
        ASSERT_LT(static_cast<size_t>(offset), seen.size()) << bits << " bits";
        ++seen[static_cast<size_t>(offset)];
      }
    }
    EXPECT_EQ(*std::min_element(seen.begin(), seen.end()), 1) << bits << " bits";
  }
}

}  // namespace
}  // namespace marlin::cuda
