// Columns of several weights that are prepared in place equal a prepared concatenated copy: every
// format, boundaries inside a block, every second column, transposed codes.
#include "ops/gemm/prepare_columns.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/scalars.h"
#include "layout/join_columns.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"

namespace marlin::prepare_columns_test {
namespace {

std::vector<float> Random(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

QuantizedWeights Quantized(Format format, int64_t k, int64_t n, uint32_t seed) {
  const std::vector<float> dense = Random(k * n, seed);
  const auto weights =
      Quantize(TensorView(dense.data(), DType::kF32, {k, n}), {.format = format, .group_size = 32});
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  return *weights;
}

std::vector<float> Dense(const Device& device, const PreparedWeights& weights) {
  const WeightsSpec& spec = weights.spec();
  std::vector<float> out(static_cast<size_t>(spec.k * spec.n), -1.0f);
  const Status status =
      Dequantize(device, weights, MutableTensorView(out.data(), DType::kF32, {spec.k, spec.n}));
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

void ExpectSame(const Device& device, std::span<const WeightColumns> columns,
                const std::string& what) {
  const auto joined = JoinColumns(columns);
  ASSERT_TRUE(joined.ok());
  const auto expected = Prepare(*joined, device);
  const auto prepared = PrepareColumns(columns, device);
  ASSERT_TRUE(expected.ok() && prepared.ok()) << what;
  EXPECT_EQ(prepared->spec(), expected->spec()) << what;
  EXPECT_EQ(prepared->bytes(), expected->bytes()) << what;
  EXPECT_EQ(Dense(device, *prepared), Dense(device, *expected)) << what;
}

class PrepareColumnsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = Device::Open("cpu", {.threads = 2});
    ASSERT_TRUE(opened.ok());
    device_.emplace(*std::move(opened));
  }
  std::optional<Device> device_;
};

TEST_F(PrepareColumnsTest, IsPrepareOfTheJoined) {
  for (const FormatInfo& info : AllFormats()) {
    for (const int64_t k : {32, 129, 300}) {
      const QuantizedWeights a = Quantized(info.format, k, 48, 1);
      const QuantizedWeights b = Quantized(info.format, k, 5, 2);
      const QuantizedWeights c = Quantized(info.format, k, 33, 3);
      const std::string what = std::string(info.name) + " k " + std::to_string(k);
      const std::vector<std::vector<WeightColumns>> cases = {
          {{&a, 0, 1, 48}},
          {{&b, 0, 1, 5}},
          {{&a, 0, 1, 48}, {&b, 0, 1, 5}, {&c, 0, 1, 33}},
          {{&b, 0, 1, 5}, {&b, 0, 1, 5}, {&b, 0, 1, 5}, {&b, 0, 1, 5}},
          {{&a, 0, 2, 24}, {&a, 1, 2, 24}},
          {{&c, 3, 1, 17}, {&c, 0, 3, 11}},
          {{&a, 16, 1, 0}, {&a, 16, 1, 16}},
      };
      for (size_t i = 0; i < cases.size(); ++i) {
        ExpectSame(*device_, cases[i], what + " case " + std::to_string(i));
      }
    }
  }
}

/// A matrix stored [n, k], optionally at an odd address.
struct Stored {
  Stored(DType type, int64_t k, int64_t n, uint32_t seed, bool odd) : dtype(type) {
    values = Random(k * n, seed);
    const int64_t size = DTypeBytes(dtype);
    bytes.resize(values.size() * static_cast<size_t>(size) + 1);
    uint8_t* to = bytes.data() + (odd ? 1 : 0);
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t half = dtype == DType::kBf16 ? FloatToBf16(values[i]) : FloatToHalf(values[i]);
      if (size == 4) {
        std::memcpy(to + 4 * i, &values[i], 4);
      } else {
        std::memcpy(to + 2 * i, &half, 2);
        values[i] = dtype == DType::kBf16 ? Bf16ToFloat(half) : HalfToFloat(half);
      }
    }
    weights.spec.format = dtype == DType::kBf16  ? Format::kBf16
                          : dtype == DType::kF16 ? Format::kFp16
                                                 : Format::kFp32;
    weights.spec.k = k;
    weights.spec.n = n;
    weights.spec.group_size = k;
    weights.codes = TensorView(to, dtype, {1, k, n}, {k * n, 1, k});
  }
  DType dtype;
  std::vector<float> values;
  std::vector<uint8_t> bytes;
  QuantizedWeights weights;
};

TEST_F(PrepareColumnsTest, TakesTransposedNumbers) {
  const auto check = [&](DType dtype, bool odd, int64_t k) {
    const Stored a(dtype, k, 32, 1, odd);
    const Stored b(dtype, k, 21, 2, odd);
    const WeightColumns columns[] = {{&a.weights, 0, 1, 32}, {&b.weights, 0, 1, 21}};
    const auto prepared = PrepareColumns(columns, *device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    std::vector<float> expected(static_cast<size_t>(k * 53));
    for (size_t i = 0; i < expected.size(); ++i) {
      const size_t row = i / 53;
      const size_t n = i % 53;
      const auto rows = static_cast<size_t>(k);
      expected[i] = n < 32 ? a.values[n * rows + row] : b.values[(n - 32) * rows + row];
    }
    EXPECT_EQ(Dense(*device_, *prepared), expected) << DTypeName(dtype) << " k " << k;
    const WeightColumns turns[] = {{&a.weights, 0, 2, 16}, {&a.weights, 1, 2, 16}};
    ExpectSame(*device_, turns, "turns");
  };
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    for (const int64_t k : {1, 31, 128, 321}) {
      check(dtype, false, k);
      check(dtype, true, k);
    }
  }
}

TEST_F(PrepareColumnsTest, OtherDevicesJoinACopy) {
  const auto simulator = Device::Open("metal-sim");
  if (!simulator.ok()) GTEST_SKIP() << simulator.status().message();
  Stored a(DType::kBf16, 64, 32, 1, false);
  const Stored b(DType::kBf16, 64, 16, 2, true);
  const WeightColumns columns[] = {{&a.weights, 0, 1, 32}, {&b.weights, 1, 2, 8}};
  const auto here = PrepareColumns(columns, *device_);
  const auto there = PrepareColumns(columns, *simulator);
  ASSERT_TRUE(here.ok() && there.ok()) << there.status().message();
  EXPECT_EQ(Dense(*simulator, *there), Dense(*device_, *here));
  a.bytes[2 * 77 + 1] = 0x7f;
  a.bytes[2 * 77] = 0x80;
  EXPECT_EQ(PrepareColumns(columns, *simulator).status().code(), Code::kNonFiniteInput);
  EXPECT_EQ(PrepareColumns(columns, *device_).status().code(), Code::kNonFiniteInput);
}

TEST_F(PrepareColumnsTest, ReadsOneMatrixInPlaceOnOtherDevices) {
  const auto simulator = Device::Open("metal-sim");
  if (simulator.status().code() == Code::kUnsupported) GTEST_SKIP() << simulator.status().message();
  ASSERT_TRUE(simulator.ok()) << simulator.status().message();
  const QuantizedWeights codes = Quantized(Format::kFp4E2M1, 64, 48, 1);
  const Stored stored(DType::kF32, 64, 48, 2, false);
  const WeightColumns transposed{&stored.weights, 0, 1, 48};
  const auto joined = JoinColumns({&transposed, 1});
  ASSERT_TRUE(joined.ok());
  const QuantizedWeights& numbers = *joined;
  for (const QuantizedWeights* weights : {&codes, &numbers}) {
    const WeightColumns all{weights, 0, 1, 48};
    ExpectSame(*simulator, {&all, 1}, "all columns");
    const WeightColumns some{weights, 3, 1, 40};
    ExpectSame(*simulator, {&some, 1}, "some columns");
  }
  // Files have numbers at any address.
  std::vector<std::byte> file(static_cast<size_t>(numbers.codes.ByteCount()) + 1);
  std::memcpy(file.data() + 1, numbers.codes.data(), file.size() - 1);
  QuantizedWeights misaligned = numbers;
  misaligned.codes = TensorView(file.data() + 1, DType::kF32, numbers.codes.shape());
  const WeightColumns all{&misaligned, 0, 1, 48};
  ExpectSame(*simulator, {&all, 1}, "a misaligned matrix");
}

TEST_F(PrepareColumnsTest, FindsEveryNumberThatIsNotFinite) {
  constexpr int64_t kK = 200;
  constexpr int64_t kN = 19;
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    Stored stored(dtype, kK, kN, 1, false);
    const WeightColumns columns{&stored.weights, 0, 1, kN};
    ASSERT_TRUE(PrepareColumns({&columns, 1}, *device_).ok());
    const size_t size = static_cast<size_t>(DTypeBytes(dtype));
    for (size_t at = 0; at < kK * kN; at += 97) {
      std::vector<uint8_t> kept(stored.bytes);
      const float inf = std::numeric_limits<float>::infinity();
      const uint16_t half = dtype == DType::kBf16 ? FloatToBf16(inf) : FloatToHalf(inf);
      if (size == 4) {
        std::memcpy(stored.bytes.data() + at * size, &inf, 4);
      } else {
        std::memcpy(stored.bytes.data() + at * size, &half, 2);
      }
      const auto prepared = PrepareColumns({&columns, 1}, *device_);
      EXPECT_EQ(prepared.status().code(), Code::kNonFiniteInput) << at;
      std::copy(kept.begin(), kept.end(), stored.bytes.begin());
    }
  }
}

}  // namespace
}  // namespace marlin::prepare_columns_test
