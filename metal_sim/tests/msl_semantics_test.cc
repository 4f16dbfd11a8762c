// Expressions, types and functions of Metal, from their text to their results. Where it
// is said by the Metal Shading Language Specification, a test names the part; the rest is how
// public kernels use the language.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "metal_program_fixture.h"
#include "scalars.h"

namespace metal_sim::msl_semantics_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class MslSemanticsTest : public MetalProgramTest {
 protected:
  /// The first words that the kernel `f` writes to buffer 0, of one threadgroup; buffer 1 holds
  /// `in`.
  std::vector<int> RunWords(std::string_view text, std::vector<int> in = {0}, uint32_t threads = 1,
                            size_t words = 64) {
    Compile(text);
    if (program_ == nullptr) return {};
    std::vector<int> out(words);
    Launch launch = OneThreadgroup(threads);
    Bind(0, &out, &launch);
    Bind(1, &in, &launch);
    report_ = Run("f", launch);
    EXPECT_TRUE(report_.clean()) << (report_.clean() ? "" : report_.findings[0].text);
    return out;
  }

  /// A kernel with `body` for one thread.
  static std::string Kernel(std::string_view body) {
    return "kernel void f(device int* out [[buffer(0)]], device const int* in [[buffer(1)]],\n"
           "              uint i [[thread_position_in_grid]]) {\n" +
           std::string(body) + "\n}\n";
  }

  static std::vector<int> First(size_t count, const std::vector<int>& words) {
    return {words.begin(),
            words.begin() + static_cast<std::ptrdiff_t>(std::min(count, words.size()))};
  }

  Report report_;
};

// 2.1: half literals end in h or H, bfloat literals in bf or BF.
TEST_F(MslSemanticsTest, LiteralsHaveSuffixes) {
  const auto out = RunWords(Kernel(R"(
  half a = 1.5h + 2.5H + 1e1h + .5H + 0x1p3h + 1.H;
  bfloat b = 1.5bf + 2.5BF;
  b += 0x1p1bf;
  out[0] = int(a * 10.0h); out[1] = int(b); out[2] = 0x1BF; out[3] = 0xabf;
  out[4] = sizeof(1.0H); out[5] = sizeof(1.0bf); out[6] = sizeof(1.0);
  out[7] = as_type<short>(1.0009765625h);
  out[8] = as_type<ushort>(1.00390625bf);)"));
  EXPECT_THAT(First(9, out), ElementsAre(235, 6, 0x1BF, 0xabf, 2, 2, 4, 0x3c01, 0x3f80));
}

// 2.1: there is no double. clang makes literals of templates that.
TEST_F(MslSemanticsTest, LiteralsOfTemplatesAreFloats) {
  const auto out = RunWords(
      "template <typename T> T third(T x) { return 0.1 * x + 1e-9; }\n"
      "template <typename T> int size(T x) { return sizeof(0.1 * x); }\n" +
          Kernel("out[0] = as_type<int>(third(float(in[0]))); out[1] = size(float(in[0]));"),
      {3});
  EXPECT_THAT(First(2, out), ElementsAre(std::bit_cast<int>(0.1F * 3.0F + 1e-9F), 4));
}

// 2.2: lists in braces may be shorter than the vector.
TEST_F(MslSemanticsTest, ListsFillVectorsWithZeros) {
  const auto out = RunWords(Kernel(R"(
  uint4 a = {uint(in[0]), 2, 3}; float2 b = {5}; int3 c[2] = {{1}, {2, 3}}; float2 d = 5;
  out[0] = a.x; out[1] = a.z; out[2] = a.w; out[3] = int(b.y); out[4] = c[1].y; out[5] = c[1].z;
  out[6] = int(d.y);)"),
                            {7});
  EXPECT_THAT(First(7, out), ElementsAre(7, 3, 0, 0, 3, 0, 5));
}

// 4.1: functions may differ in the address space of a parameter or of their object alone.
TEST_F(MslSemanticsTest, OverloadsDifferInAddressSpaces) {
  const auto out = RunWords(R"(
template <typename T> T first(device const T* x) { return x[0]; }
template <typename T> T first(threadgroup const T* x) { return x[0]; }
struct Twice {
  int x;
  Twice(int value) thread : x(2 * value) {}
  Twice(int value) threadgroup : x(2 * value) {}
  operator int() const thread { return x; }
  operator int() const device { return x; }
};
template <typename T> struct pointee {};
template <typename T> struct pointee<device T*> { using type = T; };
template <typename T> struct pointee<thread T*> { using type = T; };
)" + Kernel(R"(
  threadgroup int part[2] = {0};
  part[0] = 5;
  Twice twice(first(in));
  int one = twice;
  out[0] = one; out[1] = first(part); out[2] = sizeof(pointee<thread int*>::type);)"),
                            {3});
  EXPECT_THAT(First(3, out), ElementsAre(6, 5, 4));
}

// The library's functions stand next to a program's of the same name.
TEST_F(MslSemanticsTest, ProgramsAddToTheLibrarysFunctions) {
  const auto out = RunWords(R"(
#include <metal_stdlib>
using namespace metal;
struct Pair { int a, b; };
Pair max(Pair x, Pair y) { return x.a > y.a ? x : y; }
namespace metal { Pair min(Pair x, Pair y) { return x.a < y.a ? x : y; }
namespace fast { Pair exp(Pair x) { return {x.b, x.a}; } } }
constant bool forward = true;
)" + Kernel(R"(
  Pair p = max(Pair{1, 2}, Pair{3, 4}), q = min(Pair{1, 2}, Pair{3, 4});
  out[0] = p.b; out[1] = q.b; out[2] = max(in[0], 9); out[3] = min(in[0], 9);
  out[4] = fast::exp(p).a; out[5] = int(fast::exp(0.0f)); out[6] = forward;)"),
                            {7});
  EXPECT_THAT(First(7, out), ElementsAre(4, 2, 9, 7, 4, 1, 1));
}

// bfloat becomes an integer or a float without a cast, and takes classes that convert to a number.
TEST_F(MslSemanticsTest, BfloatsConvert) {
  const auto out = RunWords("struct Yes { operator bool() const { return true; } };\n" + Kernel(R"(
  bfloat b = 2.5bf; uint u = b; bool t = b; float f = 1; f += b; int n = 4; n *= b;
  out[0] = u; out[1] = t; out[2] = int(2 * f); out[3] = n; out[4] = int(bfloat(Yes()));
  out[5] = b;)"));
  EXPECT_THAT(First(6, out), ElementsAre(2, 1, 7, 10, 1, 2));
}

TEST_F(MslSemanticsTest, BranchesMayBeZero) {
  const auto out = RunWords(Kernel(R"(
  bool yes = in[0] == 7; bfloat b = 2.5bf; short s = -3; half h = 1.5h; uchar c = 200;
  float2 v = float2(3); device int* p = out;
  out[0] = int(4 * (yes ? b : 0)); out[1] = int(4 * (yes ? 0 : b)); out[2] = (yes ? s : 0) - 1;
  out[3] = int(2 * (yes ? h : 0)); out[4] = (yes ? c : 0) + 100; out[5] = int((yes ? v : 0).y);
  out[6] = sizeof(yes ? s : 0); out[7] = sizeof(yes ? 0 : h); out[8] = (yes ? p : 0) == p;
  out[9] = yes ? 0 : 1; out[10] = yes ? yes ? 5 : 0 : 0; out[11] = sizeof(yes ? 1.0f : 0);
  out[13] = int(3 + (4 * in[0] < 29 ? bfloat(in[0] + 1) : 0));
  switch (in[0]) { case 7: 0; default: out[12] = (yes ? 1ul : 0) > 0; })"),
                            {7});
  EXPECT_THAT(First(14, out), ElementsAre(10, 0, -4, 3, 300, 3, 4, 2, 1, 0, 5, 4, 1, 11));
}

// Logs of kernels go to the standard error stream.
TEST_F(MslSemanticsTest, KernelsLog) {
  testing::internal::CaptureStderr();
  RunWords("#include <metal_logging>\n" +
               Kernel("metal::os_log_default.log_info(\"n %d, %.1f\", in[0], 1.5h); out[0] = 1;"),
           {7});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("n 7, 1.5\n"));
}

// MLX's functions for bfloat call Apple's built-in functions.
TEST_F(MslSemanticsTest, HasTheBuiltInsThatMlxCalls) {
  const auto out = RunWords(R"(
#include <metal_stdlib>
namespace metal {
METAL_FUNC bfloat exp2(bfloat x) {
  return static_cast<bfloat>(__metal_exp2(static_cast<float>(x), __METAL_MAYBE_FAST_MATH__));
}
METAL_FUNC bfloat fma(bfloat x, bfloat y, bfloat z) {
  return static_cast<bfloat>(
      __metal_fma(static_cast<float>(x), static_cast<float>(y), static_cast<float>(z)));
}
METAL_FUNC bfloat simd_sum(bfloat x) {
  return static_cast<bfloat>(__metal_simd_sum(static_cast<float>(x)));
}
}
)" + Kernel(R"(
  const bfloat sum = metal::simd_sum(bfloat(int(i)));
  const metal::uniform<int> n = metal::make_uniform(3);
  if (i == 0) {
    out[0] = sum; out[1] = metal::exp2(3.0bf); out[2] = metal::fma(2.0bf, 3.0bf, 1.0bf);
    out[3] = n + __metal_get_simdgroup_size(ushort());
  })"),
                            {0}, 32);
  EXPECT_THAT(First(4, out), ElementsAre(496, 8, 7, 35));
}

// 3.1, shifts: the count is taken modulo the number of bits of the (promoted) left operand.
TEST_F(MslSemanticsTest, ShiftsTakeTheirCountModuloTheWidth) {
  const auto out = RunWords("template <typename T> struct Box { T x; };\n" + Kernel(R"(
  int n = in[0];
  uint u = 0x80000001u; long w = 1; short s = -4; uchar c = 0xff;
  out[0] = 1 << n; out[1] = int(u >> n); out[2] = -8 >> n;
  out[3] = int((w << (n + 32)) >> 32); out[4] = s >> n; out[5] = c << n;
  int k = 3; k <<= n; out[6] = k; k >>= n; out[7] = k;
  uint2 v = uint2(1, 2) << uint2(33, 34); v <<= 33u; out[8] = int(v.x); out[9] = int(v.y);
  out[10] = 1 << 2 << n + 1; out[11] = n >> 1 > 3 ? 1 : 0;
  out[12] = (1 << 33 & 2) == 2 ? 1 : 0; constexpr int kC = 1 << 4 >> 2; int a[1 << 1] = {kC, 5};
  out[13] = a[0] + a[1];
  Box<Box<int>> box; box.x.x = 7 >> 1; out[15] = box.x.x;
  out[14] = int(u >>= 31);)"),
                            {33});
  EXPECT_THAT(First(16, out),
              ElementsAre(2, 0x40000000, -4, 0, -2, 0x1fe, 6, 3, 4, 16, 16, 1, 1, 9, 1, 3));
}

TEST_F(MslSemanticsTest, DivisionsAreThoseOfTheirTypes) {
  const auto out = RunWords(Kernel(R"(
  int n = in[0]; uint u = 7; half h = 7; float2 v = float2(6, 9); int2 w = int2(7, -7);
  out[0] = n / 2; out[1] = n % 4; out[2] = int(u / 2); out[3] = int(h / 2.0h * 2);
  v /= 3; v.x /= 2; out[4] = int(v.x + v.y); w %= 4; out[5] = w.x * 10 + w.y;
  n /= -2; out[6] = n; n %= 2; out[7] = n; out[8] = 100 / 5 / 2; out[9] = 100 * 2 / 3 % 4;
  out[10] = int(sizeof(1 / 2.0h)); out[11] = int(-7 / 2u > 3); out[12] = short(7) / short(2);
  constexpr int kHalf = 9 / 2; out[13] = kHalf; bfloat b = 7.0bf; b /= 2; out[14] = int(b * 2);
  out[15] = in[0] / char(-1);)"),
                            {-7});
  EXPECT_THAT(First(16, out), ElementsAre(-3, -3, 3, 7, 4, 27, 3, 1, 10, 2, 2, 1, 3, 4, 7, 7));
}

// 3.1, arithmetic operators: quotients out of range have no defined value.
TEST_F(MslSemanticsTest, ReportsTheQuotientThatAnIntegerCannotHold) {
  for (const std::string operation : {"x / y", "x % y", "(x /= y)", "(x %= y)"}) {
    Compile(Kernel("int x = in[0];\nint y = in[1]; out[0] = " + operation + ";"));
    std::vector<int> out(1);
    std::vector<int> in = {std::numeric_limits<int>::min(), -1};
    Launch launch = OneThreadgroup(1);
    Bind(0, &out, &launch);
    Bind(1, &in, &launch);
    const Report report = Run("f", launch);
    EXPECT_THAT(Places(report), ElementsAre(HasSubstr("undefined operation sample.metal:6")));
    ASSERT_EQ(report.findings.size(), 1U);
    EXPECT_THAT(report.findings[0].text, HasSubstr("smallest integer by -1 by thread 0"));
  }
}

TEST_F(MslSemanticsTest, AutoTakesTheVectorThatASwizzleNames) {
  const auto out = RunWords(R"(
template <typename T> int CountOf(T) { return sizeof(T); }
kernel void f(device int* out [[buffer(0)]], device const int4* in [[buffer(1)]]) {
  int4 v = in[0];
  auto a = v.zw;
  const auto b = v.xy;
  v = int4(0);
  out[0] = a.x; out[1] = a[1]; out[2] = sizeof(a); out[3] = CountOf(a); a.x = 9; a.y += 1;
  out[4] = a.x; out[5] = a.y; out[6] = b.x + b.y;
  for (auto k = in[0].y; k < 4; ++k) out[7] = k;
  auto c = out; c[8] = 8; int d[2] = {3, 4}; auto e = d; out[9] = e[1]; auto g = 1 ? 2.5f : 1;
  out[10] = int(g * 2);
  thread auto& r = v; r.x = 6; out[11] = v.x; auto h = in[0].xxyy.z; out[12] = h;
}
)",
                            {1, 2, 3, 4});
  EXPECT_THAT(First(13, out), ElementsAre(3, 4, 8, 8, 9, 5, 3, 3, 8, 4, 5, 6, 2));
}

// 2.1 and C++'s conversions: half with an integer is half, with float float; short operands of
// scalars become int, vectors stay short.
TEST_F(MslSemanticsTest, OperandsAreConverted) {
  const auto out = RunWords(Kernel(R"(
  half h = 2049; short s = 300; uchar c = 200; ushort u = 65535;
  out[0] = int(h); out[1] = int(h * 3); out[2] = sizeof(h * 3); out[3] = sizeof(h * 3.0f);
  out[4] = s * s;
  out[5] = c + c; out[6] = u * 2; out[7] = (ushort2(u) * ushort2(2)).x;
  out[8] = int((half2(h) + 1).y);
  out[9] = -1 < 1u ? 1 : 0; out[10] = sizeof(c * 1.0h); out[11] = int(max(half(1), h));
  out[12] = int(h + 1.0);
  out[13] = uchar(300); out[14] = int(float(uint(0xffffffffu)) / 65536.0f);
  out[15] = char(200);)"));
  EXPECT_THAT(First(16, out), ElementsAre(2048, 6144, 2, 4, 90000, 400, 131070, 65534, 2048, 0, 2,
                                          2048, 2049, 44, 65536, -56));
}

TEST_F(MslSemanticsTest, SelectAndAsTypeTakeEverySize) {
  const auto out = RunWords(Kernel(R"(
  out[0] = select(1, 2, true);
  out[1] = int(select(half4(1), half4(2), bool4(true, false, true, false)).x);
  float3 v = select(float3(1, 2, 3), float3(4, 5, 6), float3(0, 1, 0) > 0.5f);
  out[2] = int(v.x * 100 + v.y * 10 + v.z);
  out[3] = as_type<int>(1.0f); out[4] = as_type<short>(half(-1));
  out[5] = as_type<uchar4>(0x04030201u).z;
  out[6] = as_type<half2>(0x3c004000u).y == 1.0h ? 1 : 0;
  out[7] = int(as_type<ulong>(uint2(5, 1)) >> 32);
  out[8] = as_type<uint2>(0x100000002ul).y;
  out[9] = as_type<ushort4>(uint2(0x00020001u, 0x00040003u)).w;
  out[10] = as_type<uchar>(char(-1)); out[11] = as_type<ushort>(1.0bf);
  out[12] = as_type<int4>(float4(1, 2, 3, 4)).w;
  out[13] = int(as_type<bfloat2>(0x3f804000u).x);
  out[14] = as_type<ushort2>(as_type<float>(0x7fc00001u)).x;)"));
  EXPECT_THAT(First(15, out), ElementsAre(2, 2, 153, 0x3f800000, static_cast<int16_t>(0xbc00), 3, 1,
                                          1, 1, 4, 255, 0x3f80, 0x40800000, 2, 1));
}

TEST_F(MslSemanticsTest, ShufflesTakeVectorsAndBfloat) {
  const auto out = RunWords(Kernel(R"(
  float4 v = simd_shuffle_xor(float4(i, 1, 2, 3), ushort(1));
  half2 h = simd_shuffle_down(half2(i, i + 1), ushort(2));
  bfloat b = simd_shuffle_xor(bfloat(i), ushort(4));
  uchar2 c = simd_broadcast(uchar2(i, 7), ushort(5));
  bfloat2 d = simd_shuffle_up(bfloat2(i, 1), ushort(1));
  long w = simd_shuffle(long(i) << 33, ushort(3));
  if (i == 8) { out[0] = int(v.x + v.w); out[1] = int(h.x * h.y); out[2] = int(b);
  out[3] = c.x + c.y; out[4] = int(d.x + d.y); out[5] = int(w >> 33); })"),
                            {0}, 32);
  EXPECT_THAT(First(6, out), ElementsAre(12, 110, 12, 12, 8, 3));
}

constexpr std::string_view kMatrices = R"(
template <typename A, typename B, typename D>
kernel void multiply(device const A* a [[buffer(0)]], device const B* b [[buffer(1)]],
device float* out [[buffer(2)]],
                     ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup A tile[16 * 20];
  for (int i = lane; i < 16 * 16; i += 32) tile[i / 16 * 20 + i % 16] = a[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<A, 8, 8> left; simdgroup_matrix<B, 8, 8> right;
  simdgroup_matrix<D, 8, 8> sum(D(1));
  simdgroup_load(left, tile, 20, ulong2(8, 1), true);
  simdgroup_load(right, b, 16, ulong2(2, 3));
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_float8x8 result;
  thread auto& elements = result.thread_elements();
  elements[0] = float(sum.thread_elements()[0]); elements[1] = float(sum.thread_elements()[1]);
  result.thread_elements()[0] *= 2; elements[1] *= 2;
  simdgroup_store(result, out, 8, 0, true);
}
#define INSTANTIATE(name, A, B, D) template [[host_name(name)]] [[kernel]] void multiply<A, B, \
  D>(device const A*, device const B*, device float*, ushort);
INSTANTIATE("half half float", half, half, float)
INSTANTIATE("bfloat bfloat float", bfloat, bfloat, float)
INSTANTIATE("half half half", half, half, half)
INSTANTIATE("bfloat bfloat bfloat", bfloat, bfloat, bfloat)
INSTANTIATE("half bfloat float", half, bfloat, float)
INSTANTIATE("half float float", half, float, float)
)";

/// The bits of small integers, exact in every type.
std::vector<uint32_t> Encoded(const std::string& type, const std::vector<float>& values) {
  std::vector<uint32_t> words(values.size());
  auto* const shorts = reinterpret_cast<uint16_t*>(words.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == "float") words[i] = std::bit_cast<uint32_t>(values[i]);
    if (type == "half") shorts[i] = FloatToHalf(values[i]);
    if (type == "bfloat")
      shorts[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]) >> 16);
  }
  return words;
}

// 6.7, simdgroup matrices. ggml and MLX rely on operands of different types; the
// specification shows one type.
TEST_F(MslSemanticsTest, MatricesOfAllTypesAreLoadedTransposedAndAtOrigins) {
  ASSERT_NO_FATAL_FAILURE(Compile(kMatrices));
  std::vector<float> a(256);
  std::vector<float> b(256);
  for (size_t i = 0; i < 256; ++i) {
    a[i] = static_cast<float>(i * 7 % 11) - 5;
    b[i] = static_cast<float>(i * 5 % 7) - 3;
  }
  for (const std::string types :
       {"half half float", "bfloat bfloat float", "half half half", "bfloat bfloat bfloat",
        "half bfloat float", "half float float"}) {
    const size_t first = types.find(' ');
    const size_t second = types.find(' ', first + 1);
    std::vector<uint32_t> left = Encoded(types.substr(0, first), a);
    std::vector<uint32_t> right = Encoded(types.substr(first + 1, second - first - 1), b);
    std::vector<float> out(64);
    Launch launch = OneThreadgroup(32);
    Bind(0, &left, &launch);
    Bind(1, &right, &launch);
    Bind(2, &out, &launch);
    EXPECT_TRUE(Run(types, launch).clean()) << types;
    for (size_t row = 0; row < 8; ++row) {
      for (size_t column = 0; column < 8; ++column) {
        float sum = row == column ? 1 : 0;
        for (size_t k = 0; k < 8; ++k)
          sum += a[(1 + k) * 16 + 8 + row] * b[(3 + k) * 16 + 2 + column];
        EXPECT_EQ(out[column * 8 + row], 2 * sum) << types << " " << row << " " << column;
      }
    }
  }
}

// Function attributes: this one bounds the threadgroups that a kernel may be launched with.
TEST_F(MslSemanticsTest, KernelsMayBoundTheirThreads) {
  Compile(
      "[[kernel, max_total_threads_per_threadgroup(64)]] void f(device int* x [[buffer(0)]]) {}\n");
  std::vector<int> x(1);
  Launch launch = OneThreadgroup(64);
  Bind(0, &x, &launch);
  EXPECT_TRUE(Run("f", launch).clean());
  launch.threads_per_threadgroup = {65, 1, 1};
  const auto refused = Simulate(**program_->Find("f"), launch, {});
  EXPECT_THAT(refused.status().message(), HasSubstr("65x1x1, expected 1 to 64 threads (f has"));
}

TEST_F(MslSemanticsTest, TakesTablesStructsAndEnumsOfPrograms) {
  {
    std::ofstream header(path_.parent_path() / "tables.h");
    header << "#line 100 \"tables.h\"\nstatic constexpr constant int kTable[4] = {1, 2, 4, 8};\n"
              "constant constexpr float2 kPairs[2] = {float2(1, 2), float2(3, 4)};\n";
  }
  const auto out = RunWords(R"(
#include "tables.h"
enum class Mode : ushort { kAdd = 1, kMultiply };
struct Shape {
  int m, n;
  int Area() const { return m * n; }
  int At(int row, int column) const constant { return row * n + column; }
  static int Twice(int x) { return 2 * x; }
};
template <Mode kMode, int kN> struct Fold {
  static constexpr constant int kWidth = kMode == Mode::kAdd ? kN : kN / 2;
  template <typename T> static T Of(T a, T b) { return kMode == Mode::kAdd ? a + b : a * b; }
};
constant Shape kShape = {3, 5};
namespace inner { template <Mode kMode> inline int Run(int a, int b) {
return Fold<kMode, 4>::Of(a, b) + Fold<kMode, 4>::kWidth; } }
template <Mode kMode> kernel void g(device int* out [[buffer(0)]],
device const int* in [[buffer(1)]]) {
  const Shape shape = {in[0], in[1]};
  out[0] = kTable[in[0]] + int(kPairs[1].y); out[1] = shape.Area(); out[2] = kShape.At(1, 2);
  out[3] = Shape::Twice(4);
  out[4] = inner::Run<kMode>(in[0], in[1]); out[5] = int(Mode::kMultiply);
  out[6] = static_cast<int>(kMode);
}
template [[host_name("f")]] kernel void g<Mode::kAdd>(device int*, device const int*);
template [[host_name("f2")]] kernel void g<Mode::kMultiply>(device int*, device const int*);
)",
                            {3, 4});
  EXPECT_THAT(First(7, out), ElementsAre(12, 12, 7, 8, 11, 2, 1));
  EXPECT_TRUE(program_->Find("f2").ok());
}

TEST_F(MslSemanticsTest, LineDirectivesNameWhereFindingsAre) {
  Compile(
      "#line 40 \"other.metal\"\n"
      "kernel void f(device int* out [[buffer(0)]]) {\n  out[1] = 1;\n}\n");
  std::vector<int> out(1);
  Launch launch = OneThreadgroup(1);
  Bind(0, &out, &launch);
  EXPECT_THAT(Places(Run("f", launch)), ElementsAre(HasSubstr("out of bounds other.metal:41")));
}

}  // namespace
}  // namespace metal_sim::msl_semantics_test
