// Quantization of activations on the host: both forms of a row hold the same numbers.
#include "backends/cuda/gemm/fp8/fp8_quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "backends/cuda/gemm/fp8/fp8_fragment.cuh"
#include "base/scalars.h"
#include "cuda_emulation/emulate.h"

namespace marlin::cuda {
namespace {

constexpr int kStepK = 16;

double ValueOfE4M3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code >= 128 ? -magnitude : magnitude;
}

/// Rows of random numbers whose sizes span the range of fp32.
std::vector<float> Rows(int m, int k) {
  std::mt19937 bits(20261129);
  std::vector<float> rows;
  for (int row = 0; row < m; ++row) {
    const int exponent = static_cast<int>(bits() % 250) - 125;
    for (int i = 0; i < k; ++i) {
      const float number = static_cast<float>(bits() % 2001) / 1000.0F - 1.0F;
      rows.push_back(std::ldexp(number, exponent - static_cast<int>(bits() % 12)));
    }
  }
  return rows;
}

void ExpectSameNumbers(const std::vector<float>& rows, int m, int k) {
  const ActivationView a = {rows.data(), k, Element::kF32, m, k};
  const int codes_of_row = (k + 127) / 128 * 128;
  const int columns = (k + 7) / 8 * 8;
  std::vector<uint8_t> codes(static_cast<size_t>(m * codes_of_row));
  std::vector<float> scales(static_cast<size_t>(m));
  std::vector<uint16_t> rounded(static_cast<size_t>(m * columns) + 8, 0x1234);
  ASSERT_EQ(LaunchQuantizeRows(a, codes.data(), codes_of_row, scales.data(), nullptr), cudaSuccess);
  ASSERT_EQ(LaunchRoundRows(a, rounded.data(), columns, nullptr), cudaSuccess);
  ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  for (int row = 0; row < m; ++row) {
    for (int at = 0; at < codes_of_row; ++at) {
      const int source = at / kStepK * kStepK + Fp8Source(at % kStepK);
      const uint8_t code = codes[static_cast<size_t>(row * codes_of_row + at)];
      if (source >= columns) {
        EXPECT_EQ(code, 0);
        continue;
      }
      const double want = ValueOfE4M3(code) * static_cast<double>(scales[static_cast<size_t>(row)]);
      const float got = Bf16ToFloat(rounded[static_cast<size_t>(row * columns + source)]);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got));
      } else {
        EXPECT_EQ(static_cast<double>(got), want) << row << ", " << source;
      }
    }
  }
  for (size_t i = static_cast<size_t>(m * columns); i < rounded.size(); ++i) {
    EXPECT_EQ(rounded[i], 0x1234);
  }
}

TEST(RoundRows, HoldsTheQuantizedNumbers) {
  ExpectSameNumbers(Rows(40, 200), 40, 200);
  ExpectSameNumbers(Rows(3, 45), 3, 45);
  ExpectSameNumbers(Rows(2, 4200), 2, 4200);
}

TEST(RoundRows, MakesRowsWithoutFiniteNumbersNaN) {
  std::vector<float> rows(3 * 32, 1.0F);
  rows[5] = std::numeric_limits<float>::infinity();
  rows[40] = std::numeric_limits<float>::quiet_NaN();
  ExpectSameNumbers(rows, 3, 32);
}

/// Rounded up, the largest number would be 2^128.
TEST(RoundRows, StaysInTheRangeOfBf16) {
  const std::vector<float> row(16, -std::numeric_limits<float>::max());
  const ActivationView a = {row.data(), 16, Element::kF32, 1, 16};
  std::vector<uint16_t> rounded(16);
  ASSERT_EQ(LaunchRoundRows(a, rounded.data(), 16, nullptr), cudaSuccess);
  ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  for (const uint16_t number : rounded) EXPECT_EQ(number, 0xff7f);
}

}  // namespace
}  // namespace marlin::cuda
