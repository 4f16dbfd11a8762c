// FP4 words decoded to e4m3 bytes, and the k order of quantized activations.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>

#include "backends/cuda/gemm/fp8/fp8_fragment.cuh"
#include "base/scalars.h"
#include "lane_codes.cuh"

namespace marlin::cuda {
namespace {

/// The k of byte `byte` of a lane's four in a step: 2 t plus 0, 1, 8 or 9.
int KOfByte(int byte) { return Fp8Source(byte); }

/// The index of a code in a step: pair p holds row p & 1 and k 8 (p >> 1), half h one k further.
int PlaceOf(int row, int k) { return 2 * (row + 2 * (k / 8)) + k % 8; }

void ExpectExact(const LaneCodes& codes) {
  constexpr std::array<float, 8> kValues = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  const LaneWords words = Encode(CodeKind::kFp4, codes);
  for (int step = 0; step < kSteps; ++step) {
    uint32_t rows[2];
    SplitFp4ToBytes(words[static_cast<size_t>(step)], rows);
    for (int row = 0; row < 2; ++row) {
      for (int byte = 0; byte < 4; ++byte) {
        const int place = 8 * step + PlaceOf(row, KOfByte(byte));
        const uint8_t code = codes[static_cast<size_t>(place)];
        const float value = kValues[code & 7U] * ((code & 8U) != 0 ? -1.0F : 1.0F);
        const auto bits = static_cast<uint8_t>(rows[row] >> (8 * byte));
        ASSERT_EQ(std::ldexp(Fp8E4M3ToFloat(bits), -Fp8DecodeExponent(CodeKind::kFp4)), value)
            << "code " << int{code} << " at " << place;
      }
    }
  }
}

TEST(SplitFp4ToBytes, GivesEveryCodeInEveryPlace) {
  for (int background : {0, 15}) {
    for (int place = 0; place < kCodes; ++place) {
      for (int code = 0; code < CountOf(CodeKind::kFp4); ++code) {
        LaneCodes codes;
        codes.fill(static_cast<uint8_t>(background));
        codes[static_cast<size_t>(place)] = static_cast<uint8_t>(code);
        ExpectExact(codes);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(SplitFp4ToBytes, GivesEveryMixture) {
  std::mt19937 bits(3);
  for (int round = 0; round < 2000; ++round) {
    LaneCodes codes;
    for (uint8_t& code : codes) code = static_cast<uint8_t>(bits() % 16);
    ExpectExact(codes);
    if (HasFatalFailure()) return;
  }
}

/// The order is a permutation of 16 k that gives every lane its own: 2 t, 2 t + 1, 2 t + 8, 2 t
/// + 9.
TEST(Fp8Source, IsAPermutationOfEveryLanesOwn) {
  std::array<int, 16> seen{};
  for (int at = 0; at < 16; ++at) {
    const int k = Fp8Source(at);
    ++seen.at(static_cast<size_t>(k));
    EXPECT_EQ(k % 8 / 2, at / 4);
  }
  for (const int count : seen) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace marlin::cuda
