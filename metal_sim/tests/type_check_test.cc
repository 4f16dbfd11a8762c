// The check of address spaces: code that Metal refuses is reported at its line, valid code passes.
// The rules are from the Metal Shading Language Specification, chapter 4 (address spaces).
#include "metal_sim/type_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "metal_program_fixture.h"

namespace metal_sim::type_check_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TypeCheckTest : public MetalProgramTest {
 protected:
  std::vector<std::string> Check(std::string_view text) {
    Write(text);
    return Findings();
  }

  /// Expects one finding, in line 4 of the file: the second of `text`, which starts in line 3.
  void ExpectFinding(std::string_view text, std::string_view message) {
    EXPECT_THAT(Check(text), ElementsAre(AllOf(HasSubstr("sample.metal:4"), HasSubstr(message))))
        << text;
  }
};

TEST_F(TypeCheckTest, RefusesWhatMetalDoesNotHave) {
  ExpectFinding("kernel void f(device float* x [[buffer(0)]]) {\n  double y = x[0]; x[0] = y; }\n",
                "Metal has no 'double'");
  ExpectFinding("struct S {\n  virtual void f() {} };\n", "Metal has no 'virtual'");
  ExpectFinding(
      "kernel void f(device float* x [[buffer(0)]]) { threadgroup float a[8000];\n"
      "  threadgroup float b[193]; a[0] = 1; b[0] = a[0]; x[0] = b[0]; }\n",
      "more than 32768 bytes");
  EXPECT_THAT(Check("template <int N> void g(device float* x) {\n"
                    "  threadgroup float a[N]; a[0] = 1; x[0] = a[0]; }\n"
                    "kernel void f(device float* x [[buffer(0)]]) { g<8192>(x); }\n"),
              IsEmpty());
}

TEST_F(TypeCheckTest, ReportsPointersThatCrossAddressSpaces) {
  ExpectFinding(
      "float First(threadgroup const float* x) { return x[0]; }\n"
      "kernel void f(device float* x [[buffer(0)]]) { x[0] = First(x); }\n",
      "no matching function for call to 'First'");
  ExpectFinding(
      "void f(device float* x) {\n"
      "  threadgroup float* y = (threadgroup float*)x + 1; y[0] = 1; }\n",
      "__local");
  ExpectFinding(
      "void f(device float* x, constant float* y) {\n"
      "  device const float* z = y; x[0] = z[0]; }\n",
      "__constant float");
  ExpectFinding(
      "kernel void f(device half* x [[buffer(0)]]) { threadgroup half tile[4];\n"
      "  device half* y = tile; x[0] = y[0]; }\n",
      "__local half");
  ExpectFinding(
      "void f(device float* x) { float mine[2];\n"
      "  x = mine; }\n",
      "__private");
  ExpectFinding(
      "void f(thread simdgroup_float8x8& m) { float mine[64];\n"
      "  simdgroup_load(m, mine); }\n",
      "no matching function for call to 'simdgroup_load'");
  ExpectFinding(
      "struct Strip { device const half* codes; };\n"
      "Strip Take(threadgroup half* x) { Strip s = {x}; return s; }\n",
      "cannot initialize");
}

TEST_F(TypeCheckTest, ReportsPointersWithoutAnAddressSpace) {
  ExpectFinding(
      "void g() {}\n"
      "float First(const float* x) { return x[0]; }\n",
      "'const float* x' names no address space");
  ExpectFinding(
      "struct S { float a;\n"
      "  void Put(float& x) const { x = a; } };\n",
      "'float& x' names no address space");
  ExpectFinding(
      "void f(device float* x) { float y = 1;\n"
      "  float* z = &y; x[0] = y; }\n",
      "'float* z' names no address space");
  EXPECT_THAT(Check("void f(device float* x, float y = 2 * 3) { y * 2; if (y * y > 1) x[0] = y; }"),
              IsEmpty());
}

TEST_F(TypeCheckTest, ReportsWritesToConstants) {
  ExpectFinding(
      "struct P { uint m; };\n"
      "kernel void f(constant P& p [[buffer(0)]]) { p.m = 1; }\n",
      "not assignable");
  ExpectFinding(
      "constant float kTable[2] = {1, 2};\n"
      "void f() { kTable[0] = 1; }\n",
      "not assignable");
  ExpectFinding(
      "constant int count [[function_constant(0)]];\n"
      "void f() { count = 1; }\n",
      "not assignable");
  ExpectFinding(
      "void g() {}\n"
      "kernel void f(device const half* x [[buffer(0)]]) { x[1] = 0; }\n",
      "not assignable");
}

TEST_F(TypeCheckTest, ReportsVariablesOfTheProgramOutsideOfConstantMemory) {
  ExpectFinding(
      "void g() {}\n"
      "constexpr int kCount = 4;\n",
      "constant address space");
}

TEST_F(TypeCheckTest, LooksIntoInstantiatedKernels) {
  const std::string_view text =
      "template <typename T> float First(threadgroup const T* x) { return float(x[0]); }\n"
      "template <typename T> kernel void f(device T* x [[buffer(0)]]) { x[0] = T(First(x)); }\n";
  EXPECT_THAT(Check(text), IsEmpty());
  const std::vector<std::string> findings = Check(
      std::string(text) +
      "template [[host_name(\"f_half\")]] kernel void f<half>(device half* x [[buffer(0)]]);\n");
  EXPECT_THAT(findings, ElementsAre(HasSubstr("sample.metal:4")));
}

TEST_F(TypeCheckTest, ReportsOtherErrorsOfTypes) {
  ExpectFinding(
      "void g() {}\n"
      "float2 f(float2 x) { return x + nonsense; }\n",
      "nonsense");
  ExpectFinding(
      "void g() {}\n"
      "float4 f(float3 x) { return float4(x); }\n",
      "");
}

TEST_F(TypeCheckTest, TakesWhatMetalTakes) {
  EXPECT_THAT(Check(R"(
struct P { uint m, n; float Sum() const { return float(m + n); } };
template <typename T> struct Rows { T at[4]; thread T* data() { return at; } };
constant float kTable[4] = {0, 1, 2, 3};
constant P kDefault = {1, 2};
constant constexpr int kSide = 8;
constant int wanted [[function_constant(0)]];
constant int count = is_function_constant_defined(wanted) ? wanted : kSide;
template <typename T> struct Tile {
  static constexpr constant int kStride = kSide + 8 / sizeof(T);
};
enum class Mode : uint { kAdd, kMultiply };
template <Mode kMode> float Apply(float x, float y) {
  if constexpr (kMode == Mode::kAdd) return x + y;
  return x * y;
}
P Choose(bool first, P given) { return first ? P{1, 2} : given; }
kernel void f(device const half* a [[buffer(0)]], device float* out [[buffer(1)]],
              constant P& p [[buffer(2)]], device atomic_uint* ticket [[buffer(3)]],
              threadgroup float4* shared [[threadgroup(0)]],
              uint3 i [[thread_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[8][Tile<half>::kStride], one;
  const P copy = p;
  const P other = Choose(copy.m > 2, kDefault);
  Rows<float> rows;
  rows.data()[1] = copy.Sum();
  const float4 v = float4(*(device const half4*)(a + i.x));
  float4 w = metal::float4(v.xy, half2(1).x, 2.0f) * kTable[i.y & 3];
  w.zw = float2(1) + max(v.xy, 0.0f);
  shared[lane] = select(w, v, w < v);
  tile[0][lane & 7] = simd_sum(w.x) + Apply<Mode::kMultiply>(rows.at[1], float(other.n));
  one = float(bfloat(w.y)) + as_type<float>(0x3f800000u) + float(half(bfloat(w.x)));
  atomic_fetch_add_explicit(ticket, 1u, memory_order_relaxed);
  simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_half8x8 b;
  simdgroup_load(b, a, 8, ulong2(0, 1), true);
  simdgroup_multiply_accumulate(c, b, b, c);
  c.thread_elements()[0] += float(b.thread_elements()[0]);
  simdgroup_store(c, &tile[0][0], ulong(Tile<half>::kStride));
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  thread float* mine = rows.at;
  out[i.z] = mine[0] + one + float(count) + simd_shuffle_xor(w, ushort(1)).x;
}
)"),
              IsEmpty());
}

TEST_F(TypeCheckTest, RefusesWhatCannotBeRead) {
  Write("kernel void f(device float* x [[texture(0)]]) {}");
  EXPECT_THAT(TypeCheck(path_, {}).status().message(), HasSubstr("sample.metal:3"));
  EXPECT_EQ(TypeCheck("nowhere.metal", {}).status().code(), Code::kIo);
}

}  // namespace
}  // namespace metal_sim::type_check_test
