// PrepareColumns on the GPU, which sends weights in pieces that overlap: as preparing a joined
// copy, for matrices of one piece and of several, on several threads, and after an error.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/scalars.h"
#include "gpu_fixture.h"
#include "layout/join_columns.h"
#include "ops/gemm/prepare_columns.h"

namespace marlin::prepare_columns_gpu_test {
namespace {

QuantizedWeights Quantized(Format format, int64_t k, int64_t n, uint32_t seed, int64_t experts = 1,
                           ScaleType scales = ScaleType::kF16) {
  const std::vector<float> dense = GaussianFloats(experts * k * n, seed);
  const TensorView view(dense.data(), DType::kF32, {experts, k, n});
  const auto weights = Quantize(view, {.format = format, .group_size = 32, .scale_type = scales});
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  return *weights;
}

/// Numbers that are stored with k contiguous.
struct Transposed {
  Transposed(int64_t k, int64_t n, uint32_t seed) {
    for (const float value : GaussianFloats(k * n, seed)) numbers.push_back(FloatToBf16(value));
    weights.spec = {.format = Format::kBf16, .k = k, .n = n, .group_size = k};
    weights.codes = TensorView(numbers.data(), DType::kBf16, {1, k, n}, {k * n, 1, k});
  }
  std::vector<uint16_t> numbers;
  QuantizedWeights weights;
};

class PrepareColumnsOnGpu : public GpuTest<::testing::Test> {
 protected:
  std::vector<float> Dense(const PreparedWeights& weights, int64_t expert) const {
    const WeightsSpec& spec = weights.spec();
    const DeviceBuffer out = Make(spec.k * spec.n * 4);
    const MutableTensorView view(out.data(), DType::kF32, {spec.k, spec.n});
    EXPECT_TRUE(Dequantize(device(), weights, view, expert).ok());
    EXPECT_TRUE(device().Synchronize().ok());
    return Download<float>(out);
  }

  void ExpectSame(const std::vector<std::vector<WeightColumns>>& matrices,
                  const std::string& what) const {
    std::vector<PreparedWeights> prepared;
    for (const std::vector<WeightColumns>& columns : matrices) {
      const auto made = PrepareColumns(columns, device());
      ASSERT_TRUE(made.ok()) << what << ": " << made.status().message();
      prepared.push_back(*made);
    }
    ASSERT_TRUE(FinishPreparing(device()).ok());
    const auto cpu = Device::Open("cpu");
    ASSERT_TRUE(cpu.ok());
    for (size_t i = 0; i < matrices.size(); ++i) {
      const auto joined = JoinColumns(matrices[i]);
      ASSERT_TRUE(joined.ok());
      const auto expected = Prepare(*joined, *cpu);
      ASSERT_TRUE(expected.ok()) << what << ": " << expected.status().message();
      const WeightsSpec& spec = joined->spec;
      for (int64_t expert = 0; expert < spec.experts; ++expert) {
        std::vector<float> dense(static_cast<size_t>(spec.k * spec.n));
        const MutableTensorView view(dense.data(), DType::kF32, {spec.k, spec.n});
        ASSERT_TRUE(Dequantize(*cpu, *expected, view, expert).ok());
        EXPECT_EQ(Dense(prepared[i], expert), dense) << what << " " << i << ", expert " << expert;
      }
    }
  }
};

TEST_F(PrepareColumnsOnGpu, IsPrepareOfTheJoined) {
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kNf3, Format::kFp8E4M3}) {
    const QuantizedWeights a = Quantized(format, 256, 96, 1);
    const QuantizedWeights b = Quantized(format, 256, 200, 2);
    ExpectSame(
        {{{&a, 0, 1, 96}, {&b, 0, 1, 200}}, {{&b, 0, 2, 100}, {&b, 1, 2, 100}}, {{&b, 40, 1, 131}}},
        std::string(FormatName(format)));
  }
}

TEST_F(PrepareColumnsOnGpu, TakesStacksAndWeightsThatAreNotTiled) {
  const QuantizedWeights stack = Quantized(Format::kU4, 256, 160, 3, 5);
  ExpectSame({{{&stack, 0, 1, 160}}, {{&stack, 0, 2, 80}, {&stack, 1, 2, 80}}}, "a stack");
  // 16 bits do not hold these scales.
  const QuantizedWeights wide = Quantized(Format::kS8, 128, 300, 4, 2, ScaleType::kF32);
  ExpectSame({{{&wide, 0, 1, 300}}}, "fp32 scales");
}

TEST_F(PrepareColumnsOnGpu, SendsLargeMatricesInPieces) {
  // 12 MiB of codes and scales each, and 24 MiB of numbers.
  const QuantizedWeights a = Quantized(Format::kFp4E2M1, 4096, 5400, 5);
  const Transposed numbers(2048, 6000, 6);
  std::vector<std::vector<WeightColumns>> matrices(4, {{&a, 0, 1, 5400}});
  matrices.push_back({{&numbers.weights, 0, 1, 6000}});
  matrices.push_back({{&a, 0, 2, 2700}, {&a, 1, 2, 2700}});
  ExpectSame(matrices, "a large matrix");
}

TEST_F(PrepareColumnsOnGpu, NamesNonFiniteNumbersAndGoesOn) {
  Transposed numbers(2048, 6000, 7);
  const WeightColumns all{&numbers.weights, 0, 1, 6000};
  for (const size_t at : {size_t{0}, size_t{2048} * 3000 + 1, size_t{2048} * 6000 - 1}) {
    const uint16_t before = numbers.numbers[at];
    numbers.numbers[at] = 0x7f80;
    const auto refused = PrepareColumns({&all, 1}, device());
    EXPECT_EQ(refused.status().code(), Code::kNonFiniteInput) << at;
    numbers.numbers[at] = before;
  }
  ExpectSame({{all}}, "after errors");
}

TEST_F(PrepareColumnsOnGpu, ServesSeveralThreads) {
  const QuantizedWeights a = Quantized(Format::kFp4E2M1, 1024, 1100, 8);
  const auto expected = Prepare(a, device());
  ASSERT_TRUE(expected.ok());
  const std::vector<float> dense = Dense(*expected, 0);
  std::vector<Result<PreparedWeights>> made(24, Status(Code::kInternal, "not made"));
  std::vector<std::thread> threads;
  for (size_t first = 0; first < 3; ++first) {
    threads.emplace_back([&, first] {
      for (size_t i = first; i < made.size(); i += 3) {
        const WeightColumns all{&a, 0, 1, 1100};
        made[i] = PrepareColumns({&all, 1}, device());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(FinishPreparing(device()).ok());
  for (const Result<PreparedWeights>& weights : made) {
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(Dense(*weights, 0), dense);
  }
}

}  // namespace
}  // namespace marlin::prepare_columns_gpu_test
