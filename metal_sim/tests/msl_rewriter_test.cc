// The rewriter: entries that it collects from Metal source, text and places that it keeps, errors.
#include "metal_sim/msl_rewriter.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "metal_sim/msl_lexer.h"

namespace metal_sim::msl_rewriter_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// The rewritten source; an empty one, and a failure, if there is none.
RewrittenSource Rewrite(const std::string& text) {
  Result<RewrittenSource> result = RewriteMetal(text);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? std::move(*result) : RewrittenSource();
}

std::string Message(const std::string& text) {
  const Result<RewrittenSource> result = RewriteMetal(text);
  if (!result.ok()) {
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
  }
  return result.status().message();
}

/// The rewritten source between the opening of the namespace and the table, with single spaces.
std::string Body(const std::string& text) {
  const std::string rewritten = Rewrite(text).text;
  const std::string start = "namespace metal_sim_program {\n#line 1\n";
  EXPECT_TRUE(rewritten.starts_with(start)) << rewritten;
  const size_t end = std::min(rewritten.find("\n#line 1 \"metal_sim_module\""), rewritten.size());
  std::string body = rewritten.substr(start.size(), end - start.size());
  const auto both_spaces = [](char a, char b) { return a == ' ' && b == ' '; };
  body.erase(std::unique(body.begin(), body.end(), both_spaces), body.end());
  return body;
}

/// "name = expression @location" of each kernel.
std::vector<std::string> Names(const RewrittenSource& source) {
  std::vector<std::string> names;
  for (const KernelEntry& kernel : source.kernels) {
    names.push_back(kernel.name + " = " + kernel.expression + " @" + kernel.location);
  }
  return names;
}

/// "name source index" of each argument of the first kernel.
std::vector<std::string> Arguments(const std::string& text) {
  const RewrittenSource source = Rewrite(text);
  std::vector<std::string> arguments;
  if (source.kernels.empty()) return arguments;
  for (const KernelArgument& argument : source.kernels[0].arguments) {
    arguments.push_back(argument.name + " " + std::to_string(static_cast<int>(argument.source)) +
                        " " + std::to_string(argument.index));
  }
  return arguments;
}

// A kernel of each kind, as the preprocessor leaves them.
constexpr char kProgram[] = R"(# 1 "k.metal"
# 1 "<built-in>" 1
# 1 "k.metal" 2

# 1 "stubs/metal_stdlib" 1
# 3 "k.metal" 2
using namespace metal;
struct Shape { uint m, n; };
constant bool aligned [[function_constant(0)]];
constant int limit = aligned ? 4 : 8;
constant float table[2] = {1, 2};
#pragma unroll
static inline half2 decode(uint q) { return as_type<half2>((q & 0x000F000Fu) | 0x64006400u); }
template <typename T, int M, typename Q = vec<vec<T, 2>, 2>>
[[kernel, max_total_threads_per_threadgroup(128)]] void multiply(
    device const T* a [[buffer(0)]], constant Shape& shape [[buffer(1)]],
    uint3 group [[threadgroup_position_in_grid]], ushort lane[[thread_index_in_simdgroup]]) {
  threadgroup half tile[M * (4 + 8)], row;
  threadgroup vec<T, (M > 2 ? 2 : 4)> sums[4][8];
  threadgroup T* p = (threadgroup T*)tile;
  for (int i = 0; i < limit; ++i) { if (i >> 1 > M) p[i] = a[i]; }
}
template [[host_name("multiply_" "half")]] [[kernel]] void multiply<half, 8>(device const half*,
    constant Shape&, uint3, ushort);
template [[host_name("multiply_float")]] [[kernel]] decltype(multiply<float, 1 << 2>)
    multiply<float, 1 << 2>;
kernel void copy(device float* x, device float* y, uint i [[thread_position_in_grid]]) {
  y[i] = x[i];
}
)";

TEST(MslRewriter, CollectsFunctionsAndInstantiations) {
  const RewrittenSource source = Rewrite(kProgram);
  EXPECT_THAT(Names(source), ElementsAre("copy = copy @k.metal:23",
                                         "multiply_half = multiply<half, 8> @k.metal:19",
                                         "multiply_float = multiply<float, 1<<2> @k.metal:21"));
  ASSERT_EQ(source.kernels.size(), 3u);
  const std::vector<KernelArgument>& arguments = source.kernels[1].arguments;
  ASSERT_EQ(arguments.size(), 4u);
  EXPECT_EQ(arguments[0].declaration, "device const T* a");
  EXPECT_EQ(arguments[1].declaration, "constant Shape& shape");
  EXPECT_EQ(arguments[3].name, "lane");
  EXPECT_EQ(arguments[3].source, Source::kThreadIndexInSimdgroup);
}

TEST(MslRewriter, EndsWithTheModule) {
  const std::string text = Rewrite(kProgram).text;
  EXPECT_THAT(text, HasSubstr("static constexpr ::metal_sim::Argument kArguments_0[3] = "
                              "{{::metal_sim::Source::kBuffer, 0, \"x\"}, "
                              "{::metal_sim::Source::kBuffer, 1, \"y\"}, "
                              "{::metal_sim::Source::kThreadPositionInGrid, 0, \"i\"}, };"));
  EXPECT_THAT(text, HasSubstr("static void Run_1() { ::metal_sim::Invoke("
                              "&::metal_sim_program::multiply<half, 8>, kArguments_1); }"));
  EXPECT_THAT(text, HasSubstr("{\"multiply_half\", kArguments_1, 4, Run_1, 128},\n"));
  EXPECT_THAT(text,
              HasSubstr("{0, \"aligned\", ::metal_sim::StorageOf(::metal_sim_program::aligned), "
                        "sizeof(::metal_sim_program::aligned), "
                        "::metal_sim::StorageOf(::metal_sim_program::aligned__defined)},\n"));
  EXPECT_THAT(text, HasSubstr("METAL_SIM_CONSTANT_STORAGE(0)\n"));
  EXPECT_THAT(text, HasSubstr("kModule = {kKernels, 3, kConstants, 1};"));
  EXPECT_THAT(text, HasSubstr("const metal_sim::Module* metal_sim_module() {"));
}

TEST(MslRewriter, AnEmptySourceIsAnEmptyModule) {
  const std::string text = Rewrite("").text;
  EXPECT_THAT(text, HasSubstr("::metal_sim::Kernel* kKernels = nullptr;"));
  EXPECT_THAT(text, HasSubstr("kModule = {kKernels, 0, kConstants, 0};"));
  EXPECT_THAT(Rewrite("kernel void f() {}").text, HasSubstr("kArguments_0[1] = {};"));
}

/// "word file:line" of the identifiers that start with "at", without the text that the rewriter
/// appends.
std::set<std::string> Places(const std::string& text) {
  const Result<std::vector<Token>> tokens = LexMetal(text);
  EXPECT_TRUE(tokens.ok()) << tokens.status().message();
  std::set<std::string> places;
  if (!tokens.ok()) return places;
  for (const Token& token : *tokens) {
    const std::string_view word = token.text.substr(0, token.text.find("__"));
    if (word.starts_with("at")) places.insert(std::string(word) + " " + LocationOf(token));
  }
  return places;
}

TEST(MslRewriter, EveryWordKeepsItsLine) {
  const std::string text = R"MSL(# 1 "k.metal"
constant int at_a [[function_constant(
  0)]]; int at_b;
constant int at_c =
  at_a + 1
  ; int at_d;
template <typename T> kernel void at_e(device
  T* at_f [[buffer(0)]],
  uint at_g [[thread_position_in_grid]
  ]) { threadgroup float at_h[
    4], at_i,
    at_j; alignas(
    16) threadgroup half at_k[
    3]; at_c; at_l;
}
template [[host_name("a"
  "b")]] kernel
# 17 "k.metal"
void at_e<float>(device
  float*, uint
  ); int at_m;
constant int at_n = R"(
)"[at_a]; int at_o;
# 400 "other.metal" 2
int at_p;
)MSL";
  std::set<std::string> places = Places(text);
  EXPECT_EQ(places.erase("at_e k.metal:17"), 1u);  // The instantiation is taken out.
  const std::set<std::string> rewritten = Places(Rewrite(text).text);
  EXPECT_EQ(places.size(), 19u);
  EXPECT_THAT(rewritten, testing::IsSupersetOf(places));
}

TEST(MslRewriter, ReadsEveryInput) {
  const std::vector<std::string> names = {
      "thread_position_in_grid",      "thread_position_in_threadgroup",
      "threadgroup_position_in_grid", "thread_index_in_threadgroup",
      "thread_index_in_simdgroup",    "simdgroup_index_in_threadgroup",
      "thread_index_in_quadgroup",    "quadgroup_index_in_threadgroup",
      "threads_per_threadgroup",      "threads_per_grid",
      "threadgroups_per_grid",        "simdgroups_per_threadgroup",
      "threads_per_simdgroup",        "dispatch_threads_per_threadgroup"};
  std::string parameters =
      "threadgroup half* t [[threadgroup(3)]], uint w "
      "[[thread_execution_width]]";
  std::vector<std::string> expected = {"t 1 3", "w 14 0"};
  for (size_t i = 0; i < names.size(); ++i) {
    parameters += fmt::format(", uint3 p{} [[{}]]", i, names[i]);
    expected.push_back(fmt::format("p{} {} 0", i, i + 2));
  }
  EXPECT_EQ(Arguments("kernel void f(" + parameters + ") {}"), expected);
}

TEST(MslRewriter, GivesBuffersTheLowestFreeIndices) {
  EXPECT_THAT(Arguments("kernel void f(device int* a, constant P& b [[buffer(0)]],"
                        "device vec<int, 2>* c [[buffer((0x1) + 1u)]], constant int& d) {}"),
              ElementsAre("a 0 1", "b 0 0", "c 0 2", "d 0 3"));
}

TEST(MslRewriter, NamesParameters) {
  EXPECT_THAT(Arguments("kernel void f(device float (&a)[4], const device T<b>* [[buffer(5)]],"
                        "uint3 [[threads_per_grid]], uint c[[threads_per_simdgroup]] = 4,"
                        "[[buffer(4)]] device N::T<(1 > 2)>* d [[maybe_unused]]) {}"),
              ElementsAre("a 0 0", " 0 5", " 11 0", "c 14 0", "d 0 4"));
  EXPECT_THAT(Arguments("kernel void f(void) {}"), ElementsAre());
}

TEST(MslRewriter, FunctionConstantsMayChooseBetweenParametersOfOneIndex) {
  EXPECT_THAT(Arguments("kernel void f(device int* a [[buffer(1), function_constant(x)]],"
                        "device half* b [[buffer(1), function_constant(y)]]) {}"),
              ElementsAre("a 0 1", "b 0 1"));
}

TEST(MslRewriter, KernelsHaveTheirHostNamesAndNamespaces) {
  EXPECT_THAT(
      Names(Rewrite("[[host_name(\"x\")]] kernel void f() {}\n"
                    "namespace a::b { namespace { template <int N> kernel void g() {} }\n"
                    "template kernel void g<1>(); } template [[kernel]] void a::b::g<2>();\n"
                    "extern \"C\" { [[kernel]] static inline void h() {} }")),
      ElementsAre("x = f @<source>:1", "h = h @<source>:4", "a::b::g<1> = a::b::g<1> @<source>:3",
                  "a::b::g<2> = a::b::g<2> @<source>:3"));
  EXPECT_THAT(Rewrite("namespace a { template <class T> kernel void f() {} struct S {};\n"
                      "template [[kernel]] void f<S>(); }")
                  .text,
              HasSubstr("{ using namespace ::metal_sim_program::a; "
                        "::metal_sim::Invoke(&::metal_sim_program::a::f<S>, kArguments_0); }"));
}

TEST(MslRewriter, LeavesDeclarationsAndOtherFunctionsAlone) {
  const std::string text =
      "kernel void f(device int* x, sampler s);\n"
      "template <typename T> T g(T x) { return x; }\n"
      "template int g<int>(int);\n";
  EXPECT_EQ(Body(text), text);
  EXPECT_TRUE(Rewrite(text).kernels.empty());
}

TEST(MslRewriter, WhatIsTakenOutLeavesItsNewlinesAndASpace) {
  EXPECT_EQ(Body("template <int N> kernel void f() {}\n"
                 "template kernel void f<sizeof(R\"(\n)\")>(); const[[maybe_unused]]int a;"),
            "template <int N> kernel void f() {}\n \n const int a;");
}

TEST(MslRewriter, InstantiationsSeeTheNamespacesAround) {
  EXPECT_THAT(Names(Rewrite("namespace a { template <int N> kernel void f() {}\n"
                            "namespace b { template kernel void f<1>(); } }")),
              ElementsAre("a::f<1> = a::f<1> @<source>:2"));
}

TEST(MslRewriter, OverloadsByAddressSpaceBecomeOne) {
  EXPECT_EQ(Body("int f(device int* x) { return 1; }\nint f(threadgroup int* x) {\nreturn 2; }\n"
                 "int f(int x) { return 3; }\nint g(device int* x);"),
            "int f(device int* x) { return 1; }\n \n \n"
            "int f(int x) { return 3; }\nint g(device int* x);");
  // Members, by the address space of the object; with `const` it is another function.
  EXPECT_EQ(Body("struct S { int x; S(int a) thread : x(a) {} S(int a) device : x{a} {}\n"
                 "operator int() const thread { return x; } operator int() const constant;\n"
                 "int get() thread; int get() const device; bool operator()(int) threadgroup; };"),
            "struct S { int x; S(int a) : x(a) {} \n"
            "operator int() const { return x; } \n"
            "int get() ; int get() const ; bool operator()(int) ; };");
  EXPECT_EQ(
      Body("template <typename T> struct P {};\ntemplate <typename T> struct P<device T*> { T "
           "x; };\ntemplate <typename T> struct P<thread T*> { T x; };"),
      "template <typename T> struct P {};\ntemplate <typename T> struct P<device T*> { T "
      "x; };\n ;");
  // A second definition that is the same remains, for the compiler to complain about.
  EXPECT_EQ(Body("int f(device int* x) {} int f(device int* x) {}"),
            "int f(device int* x) {} int f(device int* x) {}");
  EXPECT_EQ(Body("namespace a { int f(device int* x) {} } namespace b { int f(thread int* x) {} }"),
            "namespace a { int f(device int* x) {} } namespace b { int f(thread int* x) {} }");
}

TEST(MslRewriter, OverloadsInDeepTypesAreLeftAlone) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "struct S {";
  text += "void f() thread; void f() device;";
  for (int i = 0; i < 20000; ++i) text += "};";
  EXPECT_THAT(Rewrite(text).text, HasSubstr("void f() thread; void f() device;"));
}

TEST(MslRewriter, LinesStayWhereOverloadsWere) {
  const std::set<std::string> places =
      Places(Rewrite("# 1 \"k.metal\"\nint f(device int* x) { return 1; }\nint f(thread int* x) {\n"
                     "# 9 \"k.h\"\nreturn 2;\n}\nint at_ten;")
                 .text);
  EXPECT_TRUE(places.contains("at_ten k.h:11")) << *places.begin();
}

TEST(MslRewriter, InstantiationsMayLeaveTheArgumentsToTheParameters) {
  const RewrittenSource source = Rewrite(
      "# 1 \"k.metal\"\nnamespace a {\ntemplate <typename T> kernel void f(device T* x "
      "[[buffer(2)]]) {}\ntemplate [[host_name(\"g\")]] kernel void f(device half* x "
      "[[buffer(2)]]);\n}");
  EXPECT_THAT(Names(source), ElementsAre("g = a::metal_sim_instance_0 @k.metal:3"));
  ASSERT_EQ(source.kernels.size(), 1U);
  ASSERT_EQ(source.kernels[0].arguments.size(), 1U);
  EXPECT_EQ(source.kernels[0].arguments[0].index, 2);
  EXPECT_THAT(source.text, HasSubstr("static constexpr auto& metal_sim_instance_0 = "
                                     "static_cast<void (&)(device half* x)>(f)"));
}

TEST(MslRewriter, ArraysAreBuffers) {
  EXPECT_THAT(Arguments("kernel void f(device int* x, constant const int y[3]) {}"),
              ElementsAre("x 0 0", "y 0 1"));
}

TEST(MslRewriter, LiteralsAreFloats) {
  EXPECT_EQ(Body("auto x = 1. + .5 + 1e3 + 0x1p4 + 0x1.8p1 + 1.0f + 2.0h + 3 + 0x1e3 + 1u;"),
            "auto x = 1.f + .5f + 1e3f + 0x1p4f + 0x1.8p1f + 1.0f + 2.0h + 3 + 0x1e3 + 1u;");
}

TEST(MslRewriter, ListsOfVectorsAreMarked) {
  EXPECT_EQ(Body("void f() { uint4 a = {1, 2}; vec<half, 2> b{}; float2 c[2] = {{1}, {2}}; }"),
            "void f() { uint4 a = {::metal_sim::Braces(),1, 2}; vec<half, 2> "
            "b{::metal_sim::Braces()}; float2 c[2] = {{::metal_sim::Braces(),1}, "
            "{::metal_sim::Braces(),2}}; }");
  EXPECT_EQ(Body("using T = float3; T f() { return {1, 2, 3}; } T g = {1};"),
            "using T = float3; T f() { return {1, 2, 3}; } T g = {::metal_sim::Braces(),1};");
}

TEST(MslRewriter, AttributesAreToldFromSubscripts) {
  EXPECT_EQ(Body("void f() { [[unroll_count(4), clang::x]] for (;;) a[b[c[0]]] = \"[[d]]\"[0]; }"),
            "void f() { for (;;) a[b[c[0]]] = \"[[d]]\"[0]; }");
  EXPECT_EQ(Body("int x = a[[] { return 0; }()] + a[[b] { return b; }()];"),
            "int x = a[[] { return 0; }()] + a[[b] { return b; }()];");
}

TEST(MslRewriter, ThreadgroupVariablesBecomeStorage) {
  EXPECT_EQ(Body("void f() { threadgroup T<a, (b > 1)> x[4][8], y; }"),
            "void f() { typedef T<a, (b > 1)> x__type[4][8]; auto& x = "
            "::metal_sim::ThreadgroupVariable<x__type>(0, \"x\"); typedef T<a, (b>1)> y__type; "
            "auto& y = ::metal_sim::ThreadgroupVariable<y__type>(1, \"y\"); }");
  EXPECT_EQ(Body("void f() { if (a) { threadgroup volatile unsigned int x; } }"),
            "void f() { if (a) { typedef volatile unsigned int x__type; auto& x = "
            "::metal_sim::ThreadgroupVariable<x__type>(0, \"x\"); } }");
  EXPECT_EQ(Body("struct S { void f() { threadgroup typename metal::U<T>::V x; } };"),
            "struct S { void f() { typedef typename metal::U<T>::V x__type; auto& x = "
            "::metal_sim::ThreadgroupVariable<x__type>(0, \"x\"); } };");
}

TEST(MslRewriter, ThreadgroupVariablesStandAtAnyStartOfAStatement) {
  const std::string storage =
      "typedef int x__type; auto& x = ::metal_sim::ThreadgroupVariable<x__type>(0, \"x\"); }";
  for (const std::string start : {"void f() { case 0: ", "void f() { {} ", "void f() { g(); ",
                                  "constant int* f() { ", "struct S* f() { "}) {
    EXPECT_EQ(Body(start + "threadgroup int x; }"), start + storage);
  }
}

TEST(MslRewriter, AlignedThreadgroupVariablesAreMembers) {
  EXPECT_EQ(Body("void f() { alignas(16) threadgroup half x[3], y; }"),
            "void f() { struct x__type { alignas(16) half x[3]; }; auto& x = "
            "::metal_sim::ThreadgroupVariable<x__type>(0, \"x\").x; struct y__type { alignas(16) "
            "half y; }; auto& y = ::metal_sim::ThreadgroupVariable<y__type>(1, \"y\").y; }");
}

TEST(MslRewriter, LeavesThreadgroupPointersAlone) {
  const std::string text =
      "struct S { threadgroup half* p; };\n"
      "inline threadgroup half* g(threadgroup half* p, threadgroup half (&q)[4]) { return p; }\n"
      "threadgroup half* h(int a, int b) { return nullptr; } constant int a = 1, b;\n"
      "void f() { threadgroup T<a, b>* p = (threadgroup T<a, b>*)(x), *q; threadgroup int& r = "
      "*p;\n"
      "threadgroup float (*z)[8] = w; using P = S<threadgroup float>; auto threadgroup* y = p;\n"
      "const threadgroup half* s = reinterpret_cast<const threadgroup half*>(p); }";
  EXPECT_EQ(Body(text), text);
}

/// The rewritten declaration of a function constant.
std::string Declared(const std::string& type, const std::string& name, const std::string& index) {
  return "extern constant " + type + " " + name + " METAL_SIM_SYMBOL(constant, " + index +
         ") ; extern constant bool " + name + "__defined METAL_SIM_SYMBOL(defined, " + index + ");";
}

TEST(MslRewriter, FunctionConstantsBecomeVariables) {
  const std::string text =
      "constant bool a [[function_constant(3)]];\n"
      "namespace n { static constant const vec<int, 2> b "
      "[[function_constant(0x4)]]; }\n";
  EXPECT_EQ(Body(text), Declared("bool", "a", "3") + "\nnamespace n { " +
                            Declared("vec<int, 2>", "b", "4") + " }\n");
  const RewrittenSource source = Rewrite(text);
  ASSERT_EQ(source.constants.size(), 2u);
  EXPECT_EQ(source.constants[0].index, 3);
  EXPECT_EQ(source.constants[0].name, "a");
  EXPECT_EQ(source.constants[0].type, "bool");
  EXPECT_EQ(source.constants[1].index, 4);
  EXPECT_EQ(source.constants[1].name, "n::b");
  EXPECT_EQ(source.constants[1].type, "vec<int, 2>");
}

TEST(MslRewriter, ConstantsComputedFromFunctionConstantsBecomeFunctions) {
  EXPECT_EQ(Body("constant int a [[function_constant(0)]]; int c() { return s.b; }\n"
                 "constant int b = is_function_constant_defined(a) ? a : 7;\n"
                 "constant metal::vec<int, 2> c(b, f<b, 1>(b)); constant int d{c.b + p->b};\n"
                 "constant int e = x.a; constant int g[2] = {1, 2};\n"
                 "int f() { if (b) return b; return -d; }"),
            Declared("int", "a", "0") +
                " int c() { return s.b; }\n"
                "static inline int b__value() { return is_function_constant_defined(a) ? a : 7; }\n"
                "static inline metal::vec<int, 2> c__value() { return(b__value(), f<b__value(), "
                "1>(b__value())); } static inline int d__value() { return{c__value().b + p->b}; }\n"
                "constant int e = x.a; constant int g[2] = {1, 2};\n"
                "int f() { if (b__value()) return b__value(); return -d__value(); }");
}

TEST(MslRewriter, ExpressionsThatMeanSomethingElseInCppAreMarked) {
  EXPECT_EQ(Body("float x = 1.0H + 0x1p2bf + 0x1BF + 3.BF + 2.5h;"),
            "float x = 1.0h + 0x1p2_bf + 0x1BF + 3._bf + 2.5h;");
  EXPECT_EQ(
      Body("int f(int a) { a <<= 1; a %= 3; return a << 2 >> 1 / a; }"),
      "int f(int a) { a <<= ::metal_sim::kLeftShift = 1; a %= ::metal_sim::kRemaindering = 3; "
      "return a << ::metal_sim::kLeftShift << 2 << ::metal_sim::kRightShift << 1 / "
      "::metal_sim::kDivision / a; }");
  const std::string kept =
      "struct S { A<B<int>> x; auto y = 1; S operator/(S o) { auto& r = o; auto l = [] {}; } };";
  EXPECT_EQ(Body(kept), kept);
  EXPECT_EQ(Body("void f() { auto x = v.xy; const auto y = 1; a >>= 2; }"),
            "void f() { auto x = ::metal_sim::kAutoValue = v.xy; const auto y = "
            "::metal_sim::kAutoValue = 1; a >>= ::metal_sim::kRightShift = 2; }");
}

TEST(MslRewriter, CommasOfTemplateArgumentsDeclareNothing) {
  EXPECT_EQ(Body("constant int a [[function_constant(0)]]; constant int b = f<a, 1>::x + a;"),
            Declared("int", "a", "0") + " static inline int b__value() { return f<a, 1>::x + a; }");
}

struct Refusal {
  std::string text;
  std::string message;
};

/// Expects each text, in file k.metal, to be refused with its message.
void ExpectRefusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    EXPECT_EQ(Message("# 1 \"k.metal\"\n" + refusal.text), "k.metal:" + refusal.message)
        << refusal.text;
  }
}

TEST(MslRewriter, RefusesBracketsWithoutPartner) {
  ExpectRefusals({{"\n)", "2: ')' closes nothing"},
                  {"void f() {\n", "1: '{' is never closed"},
                  {"f(\n]", "2: ']' closes the '(' of k.metal:1"},
                  {"\ntemplate <typename T", "2: a template head is not closed"}});
}

TEST(MslRewriter, RefusesParameters) {
  const auto kernel = [](const std::string& parameters) {
    return "kernel void f(\n" + parameters + ") {}";
  };
  ExpectRefusals({{kernel("texture2d<half> t [[texture(0)]]"),
                   "2: the simulator does not know [[texture]], an attribute of 't'"},
                  {kernel("V v [[stage_in]]"),
                   "2: the simulator does not know [[stage_in]], an attribute of 'v'"},
                  {kernel("int x"), "2: the kernel's parameter 'x' has no binding"},
                  {kernel("threadgroup half* x"), "2: the kernel's parameter 'x' has no binding"},
                  {kernel("device int* x,"), "2: the kernel's parameter '' has no binding"},
                  {kernel("device int* x [[buffer(31)]]"),
                   "2: the index of [[buffer]] of 'x' is no number from 0 to 30"},
                  {kernel("device int* x [[buffer(1 - 1)]]"),
                   "2: the index of [[buffer]] of 'x' is no number from 0 to 30"},
                  {kernel("device int* x [[buffer(1 +)]]"),
                   "2: the index of [[buffer]] of 'x' is no number from 0 to 30"},
                  {kernel("device int* x [[buffer(kX)]]"),
                   "2: the index of [[buffer]] of 'x' is no number from 0 to 30"},
                  {kernel("device int* x [[buffer(1), threads_per_grid]]"),
                   "2: [[threads_per_grid]] is a second binding of 'x'"},
                  {kernel("device int* x [[buffer(1)]],\ndevice int* y [[buffer(1)]]"),
                   "3: 'x' and 'y' have the same index 1"}});
  std::string many = "device int* x";
  for (int i = 1; i < 32; ++i) many += ", device int* x";
  ExpectRefusals({{kernel(many), "2: no index is left for the buffer 'x'; Metal has 31"}});
}

TEST(MslRewriter, RefusesKernels) {
  const std::string f = "template <int N> kernel void f() {}\n";
  ExpectRefusals(
      {{"\nkernel int f() {}", "2: kernel 'f' returns 'int', not void"},
       {"\nkernel int x;", "2: 'kernel' stands in front of what is no function"},
       {"struct S {\nkernel void f() {} };", "2: a kernel is a function at namespace scope"},
       {"struct S {\n[[kernel]] void f() {} };", "2: a kernel is a function at namespace scope"},
       {f + "template <> kernel void f<1>() {}",
        "2: a kernel template cannot have explicit specialisations"},
       {f + "kernel void f() {}", "2: kernel 'f' is defined a second time; it is at k.metal:1"},
       {"[[host_name(\"a\")]] " + f,
        "1: kernel template 'f' has a host_name; only its instantiations can have one"},
       {"[[host_name(a)]] kernel void f() {}", "1: host_name needs one plain string"},
       {"kernel void a() {}\n[[host_name(\"a\")]] kernel void b() {}",
        "2: a second kernel is named 'a'; the other is at k.metal:1"},
       {f + "template kernel void f<1>();\ntemplate kernel void f<1>();",
        "3: a second kernel is named 'f<1>'; the other is at k.metal:2"},
       {f + "template kernel void g<1>();",
        "2: 'template kernel void g<1>' instantiates no kernel "
        "template"},
       {"kernel void f() {}\ntemplate [[host_name(\"a\")]] void f<1>();",
        "2: 'template void f<1>' instantiates no kernel template"}});
}

TEST(MslRewriter, RefusesThreadgroupVariables) {
  const auto function = [](const std::string& body) { return "void f() {\n" + body + "}"; };
  ExpectRefusals(
      {{"\nthreadgroup int x;", "2: a threadgroup variable outside of a function"},
       {"struct S {\nthreadgroup int x; };", "2: a threadgroup variable outside of a function"},
       {function("threadgroup int *x, y;"), "2: declare threadgroup variables and pointers apart"},
       {function("threadgroup int x,\n*y;"), "3: declare threadgroup variables and pointers apart"},
       {function("int threadgroup x;"),
        "2: 'threadgroup' must stand at the start of the declaration"},
       {function("threadgroup decltype(a) x;"),
        "2: cannot read this declaration of threadgroup variables"},
       {function("threadgroup int x"),
        "2: cannot read this declaration of threadgroup variables"}});
}

TEST(MslRewriter, RefusesConstants) {
  const std::string a = "constant int a [[function_constant(0)]];\n";
  const std::string plain =
      "[[function_constant]] needs `constant T name` without a value, one variable a declaration";
  const std::string computed =
      "a constant computed from function constants must be one plain variable a declaration, no "
      "array";
  ExpectRefusals(
      {{"\nconstant int x [[function_constant(i)]];",
        "2: the index of function constant 'x' is no number from 0 to 65535"},
       {"\nconstant int x [[function_constant(65536)]];",
        "2: the index of function constant 'x' is no number from 0 to 65535"},
       {a + "constant int b [[function_constant(0)]];",
        "2: function constants 'a' and 'b' have the same index 0"},
       {"\nconstant int x [[function_constant(0)]] = 1;", "2: " + plain},
       {"\nconstant int x [[function_constant(0)]], y [[function_constant(1)]];", "2: " + plain},
       {"\nint x [[function_constant(0)]];", "2: " + plain},
       {a + "constant int b[2] = {a, a};", "2: " + computed},
       {a + "constant int b = a, c = 1;", "2: " + computed},
       {a + "constant int b = a;\nvoid f(int b) {}",
        "3: 'b' hides a constant that is computed from function constants; give it another name"}});
}

/// Whether a message names a line, ":12: ". Any text may precede it.
bool HasPlace(const std::string& message) {
  for (size_t i = message.find(": "); i != std::string::npos; i = message.find(": ", i + 1)) {
    if (i > 0 && message[i - 1] >= '0' && message[i - 1] <= '9') return true;
  }
  return false;
}

TEST(MslRewriter, AnswersAnything) {
  std::mt19937 random(7);
  const std::string program = kProgram;
  const std::vector<std::string> words = {"<",
                                          ">",
                                          "(",
                                          ")",
                                          "{",
                                          "}",
                                          "[",
                                          "]",
                                          "[[",
                                          "]]",
                                          ";",
                                          ",",
                                          "=",
                                          "*",
                                          "::",
                                          "\"",
                                          "'",
                                          "\n",
                                          "# 5 \"x\"\n",
                                          " template ",
                                          " kernel ",
                                          " threadgroup ",
                                          " constant ",
                                          " namespace ",
                                          "[[function_constant(2)]]",
                                          "[[host_name(\"x\")]]",
                                          " struct ",
                                          " alignas(8) ",
                                          "R\"(",
                                          "/*"};
  const auto below = [&random](size_t limit) { return random() % limit; };
  for (size_t length = 0; length <= program.size(); ++length) {
    const auto cut = RewriteMetal(std::string_view(program).substr(0, length));
    EXPECT_TRUE(cut.ok() || HasPlace(cut.status().message())) << cut.status().message();
  }
  size_t refused = 0;
  constexpr size_t kRounds = 5000;
  for (size_t round = 0; round < kRounds; ++round) {
    std::string text = program;
    for (size_t edits = 1 + below(4); edits > 0; --edits) {
      const size_t place = below(text.size());
      const size_t other = below(text.size());
      if (below(3) == 0) {
        text.erase(place, below(40));
      } else if (below(3) == 0) {
        text.insert(place, text.substr(other, below(60)));
      } else {
        text.insert(place, words[below(words.size())]);
      }
    }
    const auto result = RewriteMetal(text);
    if (result.ok()) continue;
    ++refused;
    EXPECT_TRUE(HasPlace(result.status().message())) << result.status().message();
  }
  EXPECT_GT(refused, kRounds / 10);
  EXPECT_LT(refused, kRounds);
}

TEST(MslRewriter, ComesToAnEndWithLongTextsThatNeverClose) {
  for (const std::string word : {"a < ", "[[a(", "template <", "namespace a { ", "kernel ",
                                 "threadgroup ", "constant int a = ", "( ", "{ "}) {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += word;
    const auto result = RewriteMetal(text);
    EXPECT_TRUE(result.ok() || HasPlace(result.status().message())) << word;
  }
}

}  // namespace
}  // namespace metal_sim::msl_rewriter_test
