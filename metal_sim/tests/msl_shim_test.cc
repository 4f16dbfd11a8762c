// The shim: compiles msl_shim_kernels.cc as the simulator compiles kernels, runs them on a runtime
// of 32 lanes, and compares with values computed here.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lane_runtime.h"
#include "metal_sim/compile_flags.h"
#include "scalars.h"

namespace metal_sim::msl_shim_test {
namespace {

constexpr const char* kCompiler = "clang++-19";
constexpr const char* kShim = "metal_sim/shim/msl.h";

/// The exit status of the compiler on `source`, made into the library `library`; `extra` is added.
int Compile(const std::string& source, const std::string& library, const std::string& extra) {
  std::string command = kCompiler;
  for (const char* flag : kCompileFlags) command += std::string(" ") + flag;
  command += " -D__METAL_VERSION__=310 -I" METAL_SIM_SOURCE_DIR "/src -include ";
  command += kShim + (" " + extra + " " + source + " -o " + library);
  return std::system(command.c_str());
}

class MslShimTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (std::system((std::string("command -v ") + kCompiler + " >/dev/null").c_str()) != 0) return;
    folder_ = std::filesystem::temp_directory_path() / ("msl_shim." + std::to_string(getpid()));
    std::filesystem::create_directory(folder_);
    const std::string library = folder_ / "kernels.so";
    const char* source = METAL_SIM_SOURCE_DIR "/tests/msl_shim_kernels.cc";
    ASSERT_EQ(Compile(source, library, "-Wall"), 0);
    library_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    const auto attach =
        reinterpret_cast<decltype(&metal_sim_attach)>(dlsym(library_, "metal_sim_attach"));
    const auto module =
        reinterpret_cast<decltype(&metal_sim_module)>(dlsym(library_, "metal_sim_module"));
    ASSERT_TRUE(attach != nullptr && module != nullptr);
    attach(LaneRuntime::Table());
    module_ = module();
  }

  static void TearDownTestSuite() {
    if (library_ != nullptr) dlclose(library_);
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }

  void SetUp() override {
    if (folder_.empty()) GTEST_SKIP() << "no " << kCompiler;
    ASSERT_NE(module_, nullptr);
  }

  /// The output of a kernel of the module; `count` elements, 0 at first.
  template <typename Out, typename In>
  std::vector<Out> Run(const std::string& name, std::vector<In> in, size_t count, int lanes = 1) {
    std::vector<Out> out(count);
    for (int i = 0; i < module_->kernel_count; ++i) {
      if (module_->kernels[i].name != name) continue;
      LaneRuntime::Run(module_->kernels[i], out.data(), in.data(), lanes);
      return out;
    }
    ADD_FAILURE() << "no kernel " << name;
    return out;
  }

  static std::filesystem::path folder_;
  static void* library_;
  static const Module* module_;
};

std::filesystem::path MslShimTest::folder_;
void* MslShimTest::library_ = nullptr;
const Module* MslShimTest::module_ = nullptr;

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

/// The result of a half operation: the exact one rounded once (doubles hold it).
uint16_t Half(double value) { return FloatToHalf(static_cast<float>(value)); }

TEST_F(MslShimTest, HalfRoundsAfterEveryOperation) {
  const uint16_t a = Half(2048), b = Half(1.0009765625), c = Half(0.333251953125);
  const auto out = Run<uint16_t>("HalfArithmetic", std::vector<uint16_t>{a, b, c}, 8);
  const double x = HalfToFloat(a), y = HalfToFloat(b), z = HalfToFloat(c);
  EXPECT_EQ(out[0], Half(x + y));
  EXPECT_EQ(out[1], Half(x * y));
  EXPECT_EQ(out[2], Half(x / y));
  EXPECT_EQ(HalfToFloat(out[3]), 2.0f) << "2048 + 1.001 is 2050 in half";
  EXPECT_EQ(out[4], Half(x * y + z));
  EXPECT_EQ(out[5], Half(x * y));
  EXPECT_EQ(out[6], Half(0.1));
  EXPECT_EQ(out[7], Half(static_cast<double>(HalfToFloat(Half(0.1))) + 1.5));
}

TEST_F(MslShimTest, FusedMultiplyAddOfHalfRoundsOnce) {
  // 683/1024 * 1.5 is 1 + 2^-11, a tie in half; the addend 2^-24 decides it, and a float on the way
  // would lose it.
  const std::vector<uint16_t> in = {FloatToHalf(683.0f / 1024.0f), FloatToHalf(1.5f), 0x0001};
  const auto out = Run<uint16_t>("HalfArithmetic", in, 8);
  EXPECT_EQ(out[4], 0x3c01);
}

TEST_F(MslShimTest, BfloatRoundsToNearestEven) {
  const std::vector<float> in = {256.0f, 1.00390625f, 16909060.0f, NAN};
  const auto out = Run<uint16_t>("BfloatArithmetic", in, 11);
  EXPECT_EQ(out[0], FloatToBf16(256.0f));
  EXPECT_EQ(out[1], 0x3f80) << "1 + 2^-8 is a tie, and 1 is even";
  EXPECT_EQ(out[2], 0x4380) << "256 + 1 is a tie in bfloat";
  EXPECT_EQ(out[3], 0x4380);
  EXPECT_EQ(out[4], FloatToBf16(256.0f));
  EXPECT_EQ(out[5], FloatToBf16(16909060.0f));
  EXPECT_EQ(out[6], Half(256));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(out[7])));
  EXPECT_EQ(out[8], 0) << "256 + 1 - 256 is 0 where every operation rounds";
  EXPECT_EQ(out[9], 0x3f80);
  EXPECT_EQ(out[10], FloatToBf16(262)) << "9 * 29 is a tie, which 2^-60 decides";
}

TEST_F(MslShimTest, LiteralsAreFloatOrHalfAndTypesHaveMetalsSizes) {
  const auto out = Run<uint32_t>("Literals", std::vector<uint32_t>{0}, 9);
  const std::vector<uint32_t> expected = {4, 2, 2, Bits(1.0f / 3.0f), 0x3f80, 8, 6, 16, 4};
  EXPECT_EQ(out, expected);
}

TEST_F(MslShimTest, FloatsBecomeIntegersByTruncationAndSaturate) {
  const std::vector<float> in = {-1.75f, 2.9f, 3e9f, NAN, -3e9f, 255.5f};
  const auto out = Run<int32_t>("Conversions", in, 15);
  const std::vector<int32_t> expected = {
      -1, 2, INT32_MAX, 0, INT32_MIN, 255, 0, 2, 255, 0, 0, 255, -1, std::bit_cast<int32_t>(in[0]),
      1};
  EXPECT_EQ(out, expected);
}

TEST_F(MslShimTest, IntegerFunctionsFollowMetal) {
  const uint32_t a = 0x9a5b3c70u, b = 0x00012340u;
  const auto s = static_cast<int32_t>(a);
  const auto out = Run<uint32_t>("Integers", std::vector<uint32_t>{a, b}, 33);
  const auto low24 = [](uint32_t value) { return value & 0xffffffu; };
  const std::vector<uint32_t> expected = {
      static_cast<uint32_t>(std::popcount(a)),
      0,
      6,
      15,
      32,
      0x0e3cda59u,
      0x80,
      std::rotl(a, 8),
      std::rotl(a, 8),
      (a >> 4) & 0xff,
      0xfffffff9u,
      (a & ~0xff0u) | ((b & 0xff) << 4),
      static_cast<uint32_t>((uint64_t{a} * b) >> 32),
      static_cast<uint32_t>((int64_t{s} * s) >> 32),
      low24(a) * low24(b) + 1,
      static_cast<uint32_t>((uint64_t{a} + 0xffffffffu) >> 1),
      static_cast<uint32_t>((uint64_t{a} + 0xffffffffu + 1) >> 1),
      a - 1,
      0xffffffffu,
      0xffffffffu,
      127,
      0,
      0x80000000u,
      0xfffffffbu,
      static_cast<uint32_t>(-s),
      a << 1,
      static_cast<uint32_t>(s >> 4),
      static_cast<uint32_t>(static_cast<int16_t>(90000 & 0xffff)),
      0,
      a % b,
      2,
      b,
      0xffffffffu,
  };
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(out[i], expected[i]) << "value " << i;
}

TEST_F(MslShimTest, FloatFunctionsFollowMetal) {
  const float x = 2.75f, y = -0.5f;
  const auto out = Run<float>("FloatFunctions", std::vector<float>{x, NAN, y}, 45);
  const std::vector<float> expected = {
      x,
      x,
      x,
      1.0f,
      0.0f,
      0.0f,
      2.0f,
      3.0f,
      -1.0f,
      0.0f,
      x + (y - x) * 0.25f,
      0.0f,
      1.0f,
      0.25f * 0.25f * (3.0f - 0.5f),
      y,
      1.0f - 0x1p-24f,
      44.0f,
      0.6875f,
      2.0f,
      std::fma(x, y, 1.0f),
      std::exp(x),
      std::exp2(x),
      100.0f,
      std::log(x),
      3.0f,
      std::pow(x, y),
      std::pow(x, y),
      std::tanh(y),
      0.5f,
      -0.75f,
      -0.75f,
      -2.0f,
      -x,
      0.0f,
      x / y,
      std::sqrt(x),
      std::exp(y),
      x - y,
      1.0f,
      1.0f + 0x1p-23f,
      1 + 2 + 4 + 16 + 32,
      HalfToFloat(Half(std::exp(2.75))),
      x,
      1 + 2,
      Bf16ToFloat(FloatToBf16(std::exp(x))),
  };
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(Bits(out[i]), Bits(expected[i])) << "value " << i << ": " << out[i];
  }
}

TEST_F(MslShimTest, VectorsSwizzlesAndMatrices) {
  const std::vector<float> in = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto out = Run<float>("Vectors", in, 20);
  // v.xy = v.wz: (4, 3, 3, 4); v.bg *= 2: (4, 6, 6, 4); v.w += 1: (4, 6, 6, 5).
  const std::vector<float> expected = {4,  6,  6,    5,           7 + 12 + 15, 21 - 5, 5,
                                       1,  3,  2.5f, 1.5f,        5,           49,     3,
                                       63, 15, 3,    24 - 1 + 16, 6,           2048};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(out[i], expected[i]) << "value " << i;
}

TEST_F(MslShimTest, Packing) {
  const std::vector<float> in = {1.0f, 0.5f, -1.0f, 2.0f};
  const auto out = Run<uint32_t>("Packing", in, 7);
  EXPECT_EQ(out[0], 0xff0080ffu);
  EXPECT_EQ(out[1], 0x7f81407fu);
  EXPECT_EQ(out[2], 0x8000ffffu);
  EXPECT_EQ(out[3], 31u << 11 | 32u << 5);
  EXPECT_EQ(out[4], Bits(128.0f / 255.0f));
  EXPECT_EQ(out[5], Bits(-1.0f));
  EXPECT_EQ(out[6], 3u << 30 | 512u << 10 | 1023u);
}

TEST_F(MslShimTest, EveryAccessIsReportedWithItsAddressSizeAndDirection) {
  std::vector<uint8_t> out(80), in(1, 9);
  const auto& kernels = module_->kernels;
  for (int i = 0; i < module_->kernel_count; ++i) {
    if (std::string(kernels[i].name) == "Accesses") {
      LaneRuntime::Run(kernels[i], out.data(), in.data(), 1);
    }
  }
  std::vector<std::tuple<size_t, size_t, bool>> writes;
  for (const RecordedAccess& access : LaneRuntime::Current().accesses) {
    const auto* address = static_cast<const uint8_t*>(access.address);
    if (address == in.data()) {
      EXPECT_FALSE(access.write);
      EXPECT_EQ(access.bytes, 1u);
    }
    if (address < out.data() || address >= out.data() + out.size()) continue;
    Dl_info info;
    ASSERT_NE(dladdr(access.site, &info), 0);
    EXPECT_NE(std::string(info.dli_fname).find("kernels.so"), std::string::npos);
    writes.emplace_back(address - out.data(), access.bytes, access.write);
  }
  const std::vector<std::tuple<size_t, size_t, bool>> expected = {
      {0, 1, true},  {2, 2, true},  {4, 4, true},  {8, 8, true},    {16, 4, true},
      {20, 4, true}, {24, 4, true}, {28, 4, true}, {32, 4, true},   {36, 4, true},
      {40, 4, true}, {50, 2, true}, {52, 2, true}, {16, 16, false}, {64, 16, true}};
  EXPECT_EQ(writes, expected);
  EXPECT_EQ(out[0], 9);
}

TEST_F(MslShimTest, SimdReductionsAndScans) {
  std::vector<float> in(32);
  for (size_t i = 0; i < 32; ++i) in[i] = static_cast<float>(i % 7) - 2.0f;
  const auto out = Run<float>("SimdReductions", in, 24 * 32, 32);
  float sum = 0;
  for (float x : in) sum += x;
  int prefix = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const auto* own = &out[static_cast<size_t>(24 * lane)];
    const int quad = lane / 4 * 4;
    float quad_low = in[static_cast<size_t>(quad)];
    for (int i = quad; i < quad + 4; ++i) quad_low = std::min(quad_low, in[static_cast<size_t>(i)]);
    const std::vector<float> expected = {sum,
                                         -2,
                                         4,
                                         in[0] * in[1] * in[2] * in[3],
                                         64 & 127 & ~31 & (1 | 64),
                                         63,
                                         32,
                                         static_cast<float>(prefix + lane + 1),
                                         static_cast<float>(prefix),
                                         lane == 0   ? 1.0f
                                         : lane == 1 ? 1.0f
                                         : lane == 2 ? 2.0f
                                                     : 6.0f,
                                         static_cast<float>(4 * quad + 10),
                                         -quad_low,
                                         sum,
                                         1,
                                         static_cast<float>(1 + 4 * (lane == 0)),
                                         static_cast<float>((quad == 0) + 2 * (quad == 4)),
                                         1};
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(own[i], expected[i]) << "lane " << lane << " value " << i;
    }
    prefix += lane + 1;
  }
}

TEST_F(MslShimTest, InactiveLanesTakeNoPart) {
  const auto out = Run<float>("SimdReductions", std::vector<float>(32, 1.5f), 24 * 32, 3);
  EXPECT_EQ(out[0], 4.5f);
  EXPECT_EQ(out[2 * 24 + 16], 0.0f) << "three lanes are active, not 32";
}

TEST_F(MslShimTest, SimdShuffles) {
  std::vector<int32_t> in(32);
  for (int i = 0; i < 32; ++i) in[static_cast<size_t>(i)] = 100 + i;
  const auto out = Run<int32_t>("SimdShuffles", in, 16 * 32, 32);
  for (int lane = 0; lane < 32; ++lane) {
    const auto value = [](int source) { return 100 + source; };
    const std::vector<int32_t> expected = {
        value(31 - lane),
        value(lane ^ 5),
        value(lane + 3 < 32 ? lane + 3 : lane),
        value(lane >= 3 ? lane - 3 : lane),
        value((lane + 3) % 32),
        value((lane + 29) % 32),
        lane + 3 < 32 ? value(lane + 3) : -value(lane + 3 - 32),
        lane % 8 >= 3 ? value(lane - 3) : -value(lane - 3 + 8),
        value(7),
        value(0),
        value(lane / 4 * 4 + 3),
        value(lane ^ 1),
        value(lane / 4 * 4 + (lane + 3) % 4),
        FloatToBf16(static_cast<float>(value(lane ^ 1))),
    };
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(out[static_cast<size_t>(16 * lane) + i], expected[i]) << lane << " value " << i;
    }
  }
}

template <typename Encode>
void ExpectProduct(const std::vector<float>& out, const Encode& decode) {
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 2.0f;
      for (int k = 0; k < 8; ++k) {
        sum += decode((row + 2) * 16 + k + 1) * decode(column * 16 + k);
      }
      EXPECT_EQ(out[static_cast<size_t>(8 * row + column)], sum) << row << " " << column;
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int row = (lane & 16) / 4 + lane / 2 % 4;
    const int column = (lane & 8) / 2 + lane % 2 * 2;
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(out[static_cast<size_t>(64 + 2 * lane + i)],
                3.0f * decode((row + 2) * 16 + column + i + 1));
    }
  }
  EXPECT_EQ(LaneRuntime::Current().multiply_adds, 1024u);
  EXPECT_EQ(LaneRuntime::Current().events.at(0), "simdgroup_multiply_accumulate whole");
}

TEST_F(MslShimTest, SimdgroupMatricesMultiplyInFloat) {
  const auto number = [](int i) { return static_cast<float>(i * 37 % 61 - 30) / 4.0f; };
  std::vector<float> floats(256);
  std::vector<uint16_t> halves(256), bfloats(256);
  for (int i = 0; i < 256; ++i) {
    floats[static_cast<size_t>(i)] = number(i);
    halves[static_cast<size_t>(i)] = FloatToHalf(number(i));
    bfloats[static_cast<size_t>(i)] = FloatToBf16(number(i));
  }
  ExpectProduct(Run<float>("Multiply<half>", halves, 128, 32), number);
  ExpectProduct(Run<float>("Multiply<bfloat>", bfloats, 128, 32), number);
  ExpectProduct(Run<float>("Multiply<float>", floats, 128, 32), number);
}

TEST_F(MslShimTest, BarriersAndFencesNameTheirPlace) {
  std::vector<uint32_t> in(32);
  for (uint32_t i = 0; i < 32; ++i) in[i] = i * i;
  const auto out = Run<uint32_t>("Exchange", in, 32, 32);
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], in[31 - i]);
  const auto& runtime = LaneRuntime::Current();
  ASSERT_EQ(runtime.events.size(), 96u);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(runtime.events[i], "threadgroup_barrier 2");
    EXPECT_EQ(runtime.events[32 + i], "simdgroup_barrier 3");
    EXPECT_EQ(runtime.events[64 + i], "fence 1 4 1");
    EXPECT_EQ(runtime.sites[i], runtime.sites[0]);
  }
  EXPECT_NE(runtime.sites[0], runtime.sites[32]);
  Dl_info info;
  ASSERT_NE(dladdr(runtime.sites[0], &info), 0);
  EXPECT_NE(std::string(info.dli_fname).find("kernels.so"), std::string::npos);
}

TEST_F(MslShimTest, AtomicsAreAnnouncedAndNotAccesses) {
  const auto out = Run<uint32_t>("Atomics", std::vector<uint32_t>{0}, 64, 32);
  EXPECT_EQ(out[0], 96u);
  EXPECT_EQ(out[1], Bits(16.0f));
  EXPECT_EQ(static_cast<int32_t>(out[2]), -31);
  EXPECT_EQ(out[3], 0xffffffffu);
  EXPECT_EQ(out[4], 32u);
  for (uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(out[8 + lane], lane + 100);
  EXPECT_EQ(out[6], 77u);
  const auto& runtime = LaneRuntime::Current();
  EXPECT_EQ(runtime.events.size(), 32u * 5 + 2);
  EXPECT_EQ(runtime.events[0], "atomic 4rw 0");
  EXPECT_EQ(runtime.events.back(), "atomic 4r 0");
  EXPECT_EQ(runtime.events[runtime.events.size() - 2], "atomic 4w 0");
}

TEST_F(MslShimTest, CompilesWithFastMath) {
  std::string flags = "-Werror";
  for (const char* flag : kFastMathFlags) flags += std::string(" ") + flag;
  const char* source = METAL_SIM_SOURCE_DIR "/tests/msl_shim_kernels.cc";
  EXPECT_EQ(Compile(source, folder_ / "reordered.so", flags), 0);
}

TEST_F(MslShimTest, LoadsOfMatricesAreAccessesOfTheirLanes) {
  std::vector<uint16_t> in(256, 0x3c00);
  std::vector<float> out(128);
  for (int i = 0; i < module_->kernel_count; ++i) {
    if (std::string(module_->kernels[i].name) != "Multiply<half>") continue;
    LaneRuntime::Run(module_->kernels[i], out.data(), in.data(), 32);
  }
  std::vector<int> reads(256), expected(256);
  std::vector<int> writes(128);
  for (const RecordedAccess& access : LaneRuntime::Current().accesses) {
    const auto* read = static_cast<const uint16_t*>(access.address);
    const auto* write = static_cast<const float*>(access.address);
    if (read >= in.data() && read < in.data() + in.size()) {
      EXPECT_TRUE(access.bytes == 2 && !access.write);
      ++reads[static_cast<size_t>(read - in.data())];
    }
    if (write >= out.data() && write < out.data() + out.size()) {
      EXPECT_TRUE(access.bytes == 4 && access.write);
      ++writes[static_cast<size_t>(write - out.data())];
    }
  }
  for (size_t row = 0; row < 8; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      ++expected[(row + 2) * 16 + column + 1];
      ++expected[row * 16 + column];
    }
  }
  EXPECT_EQ(reads, expected);
  EXPECT_EQ(writes, std::vector<int>(128, 1));
}

TEST_F(MslShimTest, RefusesWhatMetalRefuses) {
  const auto refused = [](const std::string& code) {
    const std::string source = folder_ / "refused.cc";
    FILE* file = std::fopen(source.c_str(), "w");
    std::fputs(
        ("using namespace metal;\nvoid F(float4 v, half h, bfloat b, uint u) {" + code + "}\n")
            .c_str(),
        file);
    std::fclose(file);
    return Compile(source, "/dev/null", "-fsyntax-only 2>/dev/null") != 0;
  };
  EXPECT_FALSE(refused("v.xy = v.yx; (void)(h + 1.0f); (void)as_type<uint>(v.x);"));
  EXPECT_TRUE(refused("v.xx = v.yx;"));
  EXPECT_TRUE(refused("(void)as_type<uint>(h);"));
  EXPECT_TRUE(refused("(void)(h + b);"));
  EXPECT_TRUE(refused("(void)exp(u);"));
  EXPECT_TRUE(refused("int4 w = v;"));
  EXPECT_TRUE(refused("(void)float4(v.xyz, v.xy);"));
  EXPECT_TRUE(refused("(void)(v + int4(1));"));
  EXPECT_TRUE(refused("simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, &h);"));
  EXPECT_TRUE(refused("simdgroup_matrix<float, 4, 8> m;"));
  EXPECT_TRUE(refused("(void)simd_sum(true);"));
}

}  // namespace
}  // namespace metal_sim::msl_shim_test
