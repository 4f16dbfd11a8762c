// Metal sources from their text to results: compiled as they are, run, and checked, with findings
// at their lines. Skipped where there is no clang that is new enough.
#include "metal_sim/metal_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "metal_program_fixture.h"
#include "scalars.h"

namespace metal_sim::metal_program_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::string_view kSum = R"(
kernel void sum(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                uint i [[thread_position_in_threadgroup]]) {
  threadgroup float part[64];
  part[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint rest = 32; rest > 0; rest /= 2) {
    if (i < rest) part[i] += part[i + rest];
    BARRIER
  }
  if (i == 0) out[0] = part[0];
}
)";

CompileOptions WithBarrier(const std::string& barrier) {
  CompileOptions options;
  options.defines = {"BARRIER=" + barrier};
  return options;
}

TEST_F(MetalProgramTest, SumsInThreadgroupMemory) {
  Compile(kSum, WithBarrier("threadgroup_barrier(mem_flags::mem_threadgroup);"));
  std::vector<float> in(64);
  std::iota(in.begin(), in.end(), 1.0F);
  std::vector<float> out(1);
  Launch launch = OneThreadgroup(64);
  Bind(0, &in, &launch);
  Bind(1, &out, &launch);
  for (const uint64_t seed : {0u, 1u, 2u}) {
    out[0] = 0;
    EXPECT_TRUE(Run("sum", launch, seed).clean()) << seed;
    EXPECT_EQ(out[0], 64 * 65 / 2);
  }
}

TEST_F(MetalProgramTest, FindsTheReadOfACompoundAssignment) {
  Compile(R"(
kernel void add(device float* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  threadgroup float sum[32];
  sum[i] += 1.0f;
  out[i] = sum[i];
}
)");
  std::vector<float> out(32);
  Launch launch = OneThreadgroup(32);
  Bind(0, &out, &launch);
  const Report report = Run("add", launch, 0);
  ASSERT_FALSE(report.clean());
  EXPECT_EQ(report.findings[0].kind, FindingKind::kUninitialisedRead);
}

TEST_F(MetalProgramTest, FindsAMissingBarrierAtItsLines) {
  Compile(kSum, WithBarrier(""));
  std::vector<float> in(64, 1.0F);
  std::vector<float> out(1);
  Launch launch = OneThreadgroup(64);
  Bind(0, &in, &launch);
  Bind(1, &out, &launch);
  for (const uint64_t seed : {0u, 1u, 2u}) {
    const std::vector<std::string> places = Places(Run("sum", launch, seed));
    ASSERT_FALSE(places.empty()) << seed;
    for (const std::string& place : places) EXPECT_THAT(place, HasSubstr("race sample.metal:10"));
  }
}

TEST_F(MetalProgramTest, FindsAccessesOutOfBounds) {
  Compile(R"(
kernel void shift(device float* data [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  data[i + 1] = 1.0f;
}
)");
  std::vector<float> data(32);
  Launch launch = OneThreadgroup(32);
  Bind(0, &data, &launch);
  const std::vector<std::string> places = Places(Run("shift", launch));
  ASSERT_EQ(places.size(), 1u);
  EXPECT_THAT(places[0], HasSubstr("sample.metal:5"));
}

TEST_F(MetalProgramTest, EndsALaunchThatDividesByZero) {
  Compile(R"(
kernel void divide(device int* data [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  data[i] = 100 / data[i];
}
)");
  std::vector<int> data = {1, 2, 0, 4};
  Launch launch = OneThreadgroup(4);
  Bind(0, &data, &launch);
  const Report report = Run("divide", launch);
  ASSERT_THAT(Places(report), ElementsAre(HasSubstr("undefined operation sample.metal:5")));
  EXPECT_THAT(report.findings[0].text, HasSubstr("by zero by thread 2"));
}

TEST_F(MetalProgramTest, TakesTemplatesConstantsAndThreadgroupArguments) {
  Compile(R"(
constant int factor [[function_constant(2)]];
constant bool has_factor = is_function_constant_defined(factor);

template <typename T, int N>
kernel void scale(device T* data [[buffer(0)]], constant uint& count [[buffer(1)]],
                  threadgroup T* scratch [[threadgroup(0)]],
                  uint i [[thread_position_in_grid]],
                  uint j [[thread_index_in_threadgroup]]) {
  if (i >= count) return;
  scratch[j] = data[i] * T(N);
  data[i] = has_factor ? T(scratch[j] * T(factor)) : scratch[j];
}
template [[host_name("scale_int")]] kernel void scale<int, 3>(device int*, constant uint&,
                                                              threadgroup int*, uint, uint);
)");
  std::vector<int> data = {1, 2, 3, 4, 5};
  Launch launch = OneThreadgroup(4);
  launch.grid = {5, 1, 1};
  launch.grid_counts_threads = true;
  launch.values[1] = {5, 0, 0, 0};
  launch.threadgroup_memory[0] = 16;
  Bind(0, &data, &launch);
  EXPECT_TRUE(Run("scale_int", launch).clean());
  EXPECT_THAT(data, ElementsAre(3, 6, 9, 12, 15));
  ASSERT_TRUE(program_->SetConstants({{2, {10, 0, 0, 0}}}).ok());
  EXPECT_TRUE(Run("scale_int", launch).clean());
  EXPECT_THAT(data, ElementsAre(90, 180, 270, 360, 450));
  EXPECT_THAT(program_->SetConstants({{2, {1}}}).message(), HasSubstr("expected 4 bytes, got 1"));
  EXPECT_THAT(program_->SetConstants({{7, {1}}}).message(), HasSubstr("function constant 7"));
}

TEST_F(MetalProgramTest, MultipliesMatricesOfASimdgroup) {
  Compile(R"(
kernel void multiply(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                     device float* c [[buffer(2)]]) {
  simdgroup_half8x8 left, right;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, c, 8);
}
)");
  std::vector<uint16_t> a(64);
  std::vector<uint16_t> b(64);
  std::vector<float> c(64, -1.0F);
  for (size_t i = 0; i < 64; ++i) {
    a[i] = FloatToHalf(static_cast<float>(i % 7) - 3.0F);
    b[i] = FloatToHalf(static_cast<float>(i % 5) - 2.0F);
  }
  Launch launch = OneThreadgroup(32);
  Bind(0, &a, &launch);
  Bind(1, &b, &launch);
  Bind(2, &c, &launch);
  const Report report = Run("multiply", launch);
  EXPECT_TRUE(report.clean());
  EXPECT_EQ(report.counters.matrix_operations, 1);
  EXPECT_EQ(report.counters.multiply_adds, 512);
  for (size_t row = 0; row < 8; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      float sum = 0;
      for (size_t k = 0; k < 8; ++k) {
        sum += HalfToFloat(a[row * 8 + k]) * HalfToFloat(b[k * 8 + column]);
      }
      EXPECT_EQ(c[row * 8 + column], sum) << row << " " << column;
    }
  }
}

TEST_F(MetalProgramTest, NamesTheLineOfAnError) {
  Write("kernel void broken(device float* x [[buffer(0)]]) { x[0] = nonsense; }");
  const auto compiled = MetalProgram::Compile(path_, {});
  ASSERT_FALSE(compiled.ok());
  EXPECT_EQ(compiled.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(compiled.status().message(), HasSubstr("sample.metal:3"));
  EXPECT_THAT(compiled.status().message(), HasSubstr("nonsense"));
  const auto missing = MetalProgram::Compile("nowhere.metal", {});
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().message(), "nowhere.metal: no such file");
}

TEST_F(MetalProgramTest, ListsKernelsWhereOneIsUnknown) {
  Compile("kernel void one() {}\nkernel void two() {}");
  const auto found = program_->Find("three");
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.status().message(), "kernel: no 'three'; there are: one, two");
}

TEST_F(MetalProgramTest, RoundsAsHalfDoes) {
  Compile(R"(
kernel void round(device const half* in [[buffer(0)]], device half* out [[buffer(1)]]) {
  out[0] = (in[0] - 1024) - in[1];
}
)");
  std::vector<uint16_t> in = {FloatToHalf(1030.0F), FloatToHalf(5.5F)};
  std::vector<uint16_t> out(1);
  Launch launch = OneThreadgroup(1);
  Bind(0, &in, &launch);
  Bind(1, &out, &launch);
  EXPECT_TRUE(Run("round", launch).clean());
  EXPECT_EQ(HalfToFloat(out[0]), 0.5F);
}

// Indices beyond arrays that a thread has of its own, which no callback sees.
TEST_F(MetalProgramTest, PrivateArraysHaveBounds) {
  Compile(R"(
kernel void own(device float* out [[buffer(0)]], device const int* at [[buffer(1)]]) {
  float mine[8] = {};
  mine[at[0]] = 1;
  out[0] = mine[at[1]];
}
kernel void row(device float* out [[buffer(0)]], device const int* at [[buffer(1)]]) {
  threadgroup float tile[4][8];
  for (int i = 0; i < 32; ++i) tile[i / 8][i % 8] = 0;
  out[0] = tile[1][at[0]];
}
void Put(thread float* to, int at) { to[at] = 1; }
kernel void pointer(device float* out [[buffer(0)]], device const int* at [[buffer(1)]]) {
  float mine[8] = {};
  Put(mine, at[0]);
  out[0] = mine[at[1]];
}
)");
  for (const char* const kernel : {"own", "row", "pointer"}) {
    for (const int index : {7, 8, 4000, -1, 100'000'000}) {
      std::vector<float> out(1);
      std::vector<int> at = {index, 0};
      Launch launch = OneThreadgroup(1);
      Bind(0, &out, &launch);
      Bind(1, &at, &launch);
      const Report report = Run(kernel, launch);
      EXPECT_EQ(report.findings.size(), index == 7 ? 0U : 1U) << kernel << " " << index;
      for (const std::string& place : Places(report)) {
        EXPECT_THAT(place, ::testing::HasSubstr("sample.metal:")) << kernel << " " << index;
      }
    }
  }
}

TEST_F(MetalProgramTest, VectorsMustBeAligned) {
  Compile(R"(
kernel void load(device float* out [[buffer(0)]], device const uchar* in [[buffer(1)]],
                 constant int& at [[buffer(2)]]) {
  out[0] = (*(device const float4*)(in + at)).y;
}
kernel void packed(device float* out [[buffer(0)]], device const uchar* in [[buffer(1)]],
                   constant int& at [[buffer(2)]]) {
  out[0] = float4(*(device const packed_float4*)(in + at)).y;
}
)");
  const auto count = [&](const char* kernel, int at) {
    std::vector<float> out(1);
    std::vector<uint8_t> in(64);
    std::vector<int> offset = {at};
    Launch launch = OneThreadgroup(1);
    Bind(0, &out, &launch);
    Bind(1, &in, &launch);
    Bind(2, &offset, &launch);
    return Run(kernel, launch).findings.size();
  };
  EXPECT_EQ(count("load", 16), 0U);
  EXPECT_EQ(count("load", 4), 1U);
  EXPECT_EQ(count("load", 8), 1U);
  EXPECT_EQ(count("packed", 4), 0U);
  EXPECT_EQ(count("packed", 2), 1U);
}

TEST_F(MetalProgramTest, ShufflesTakeFromActiveLanes) {
  Compile(R"(
kernel void shuffle(device uint* out [[buffer(0)]], constant int& mode [[buffer(1)]],
                    uint lane [[thread_index_in_simdgroup]]) {
  uint got = 0;
  if (mode == 0) got = simd_shuffle_down(lane, 4) + simd_shuffle_up(lane, 9);
  if (mode == 1) got = simd_shuffle(lane, ushort(lane + 1));
  if (mode == 2) got = simd_shuffle_xor(lane, 32);
  if (mode == 3 && lane < 16) got = simd_shuffle_xor(lane, 16);
  if (mode == 4 && lane < 16) got = simd_shuffle_xor(lane, 8);
  if (mode == 5) got = lane < 16 ? simd_sum(lane) : simd_max(lane);
  out[lane] = got;
}
)");
  for (int mode = 0; mode <= 5; ++mode) {
    std::vector<uint32_t> out(32);
    std::vector<int> value = {mode};
    Launch launch = OneThreadgroup(32);
    Bind(0, &out, &launch);
    Bind(1, &value, &launch);
    const Report report = Run("shuffle", launch, 1);
    EXPECT_EQ(report.findings.size(), mode >= 1 && mode <= 3 ? 1U : 0U) << mode;
    if (mode == 5) {
      EXPECT_EQ(out[3], 120U);
      EXPECT_EQ(out[20], 31U);
    }
  }
}

// Arguments that a function constant switches off need no binding.
TEST_F(MetalProgramTest, FunctionConstantsSwitchArgumentsOff) {
  Compile(R"(
constant bool has_bias [[function_constant(65535)]];
constant bool no_bias = !has_bias;
kernel void add(device float* out [[buffer(0)]],
                device const float* bias [[buffer(1), function_constant(has_bias)]],
                constant float& one [[buffer(2), function_constant(no_bias)]]) {
  out[0] = has_bias ? bias[0] : one;
}
)");
  std::vector<float> out(1);
  std::vector<float> bias = {5};
  for (const uint8_t has : {uint8_t{0}, uint8_t{1}}) {
    ASSERT_TRUE(program_->SetConstants({{65535, {has}}}).ok());
    Launch launch = OneThreadgroup(1);
    Bind(0, &out, &launch);
    Bind(has != 0 ? 1 : 2, &bias, &launch);
    EXPECT_TRUE(Run("add", launch).clean());
    EXPECT_EQ(out[0], 5.0F);
    launch.buffers.erase(has != 0 ? 1 : 2);
    const auto kernel = program_->Find("add");
    EXPECT_FALSE(Simulate(**kernel, launch, {}).ok());
  }
}

}  // namespace
}  // namespace metal_sim::metal_program_test
