// Double precision on integers (plan/integers/soft_double.h) against the host's doubles, in the
// simulator, strict and with fast math.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/metal/plan/kernel_text.h"
#include "metal_sim/launch.h"
#include "metal_sim/metal_program.h"

namespace marlin::metal::simulated_doubles_test {
namespace {

constexpr const char* kProbes = R"(
[[kernel]] void probe_sums(device const ulong* a [[buffer(0)]], device const ulong* b [[buffer(1)]],
                           device ulong* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = AddDoubles(a[i], b[i]);
}
[[kernel]] void probe_floats(device const float* a [[buffer(0)]], device ulong* out [[buffer(2)]],
                             uint i [[thread_position_in_grid]]) {
  out[i] = DoubleOfOrdered(OrderedOf(DoubleOfFloat(a[i])));
}
[[kernel]] void probe_roundings(device const ulong* a [[buffer(0)]],
                                device const int* b [[buffer(1)]],
                                device float* out [[buffer(2)]],
                                uint i [[thread_position_in_grid]]) {
  out[i] = FloatOf(Normalized(a[i], b[i]));
}
[[kernel]] void probe_powers(device const ulong* a [[buffer(0)]], device ulong* out [[buffer(2)]],
                             uint i [[thread_position_in_grid]]) {
  out[i] = DoubleOf(ExpOfMinus(a[i]));
}
[[kernel]] void probe_quotients(device const ulong* a [[buffer(0)]],
                                device const ulong* b [[buffer(1)]],
                                device ulong* out [[buffer(2)]],
                                uint i [[thread_position_in_grid]]) {
  const Wide sum = Add(WideOf(a[i], kDoubleDigits, kDoubleLeast), Wide{kTopBit, 0});
  out[i] = DoubleOf(Multiply(WideOf(b[i], kDoubleDigits, kDoubleLeast), Reciprocal(sum)));
}
[[kernel]] void probe_sigmoids(device const float* a [[buffer(0)]], device ulong* out [[buffer(2)]],
                               uint i [[thread_position_in_grid]]) {
  out[i] = DoubleOf(SigmoidOf(a[i]));
}
)";

constexpr size_t kCount = 4096;

template <typename T>
metal_sim::BufferBinding Bind(std::vector<T>& values, bool read_only) {
  return {values.data(), static_cast<int64_t>(values.size() * sizeof(T)), read_only, true, {}};
}

class SimulatedDoubles : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    const auto text = KernelText("route.metal", {});
    ASSERT_TRUE(text.ok()) << text.status().message();
    const std::filesystem::path path = std::filesystem::path(::testing::TempDir()) / "probe.metal";
    std::ofstream(path) << *text << kProbes;
    metal_sim::CompileOptions options;
    options.fast_math = GetParam();
    auto program = metal_sim::MetalProgram::Compile(path, options);
    if (program.status().code() == metal_sim::Code::kUnsupported) {
      GTEST_SKIP() << program.status().message();
    }
    ASSERT_TRUE(program.ok()) << program.status().message();
    program_ = std::move(*program);
  }

  template <typename Out, typename A, typename B = int32_t>
  std::vector<Out> Run(const char* kernel, std::vector<A> a, std::vector<B> b = {}) const {
    std::vector<Out> out(a.size());
    metal_sim::Launch launch;
    launch.grid = {static_cast<uint32_t>(a.size() / 64), 1, 1};
    launch.threads_per_threadgroup = {64, 1, 1};
    launch.program_ranges = program_->ranges();
    launch.buffers[0] = Bind(a, true);
    if (!b.empty()) launch.buffers[1] = Bind(b, true);
    launch.buffers[2] = Bind(out, false);
    const auto found = program_->Find(kernel);
    EXPECT_TRUE(found.ok()) << found.status().message();
    const auto report = metal_sim::Simulate(**found, launch, {});
    EXPECT_TRUE(report.ok() && report->clean()) << kernel;
    return out;
  }

  uint64_t Bits() { return random_(); }

  /// Doubles of every exponent, some near each other, some subnormal, zero or infinite.
  double AnyDouble(double near) {
    switch (random_() % 8) {
      case 0:
        return std::bit_cast<double>(Bits() & 0x800fffffffffffff);
      case 1:
        return random_() % 2 == 0 ? 0.0 : -0.0;
      case 2:
        return -std::nextafter(near, near * 2);
      case 3:
        return near * std::exp2(static_cast<double>(random_() % 120) - 60) * 1.0000001;
      case 4:
        return random_() % 8 == 0 ? -std::numeric_limits<double>::infinity() : -near;
      default: {
        const double any = std::bit_cast<double>(Bits());
        return std::isfinite(any) ? any : 1.5;
      }
    }
  }

  std::mt19937_64 random_{3};
  std::unique_ptr<metal_sim::MetalProgram> program_;
};

/// Equal numbers, both zeros being one.
void ExpectSame(uint64_t bits, double expected) {
  ASSERT_EQ(std::bit_cast<double>(bits), expected) << std::hexfloat << expected;
}

TEST_P(SimulatedDoubles, SumsAreRoundedAsTheHostRoundsThem) {
  std::vector<uint64_t> a;
  std::vector<uint64_t> b;
  while (a.size() < kCount) {
    const double x = AnyDouble(1.0);
    const double y = AnyDouble(x);
    if (std::isnan(x + y)) continue;
    a.push_back(std::bit_cast<uint64_t>(x));
    b.push_back(std::bit_cast<uint64_t>(y));
  }
  const auto out = Run<uint64_t>("probe_sums", a, b);
  for (size_t i = 0; i < kCount; ++i) {
    ExpectSame(out[i], std::bit_cast<double>(a[i]) + std::bit_cast<double>(b[i]));
  }
}

TEST_P(SimulatedDoubles, FloatsAreExact) {
  std::vector<float> a;
  while (a.size() < kCount) {
    const auto bits = static_cast<uint32_t>(Bits());
    const float x = std::bit_cast<float>(a.size() % 8 == 0 ? bits & 0x807fffff : bits);
    if (!std::isnan(x)) a.push_back(x);
  }
  const auto out = Run<uint64_t>("probe_floats", a);
  for (size_t i = 0; i < kCount; ++i) ExpectSame(out[i], double{a[i]});
}

TEST_P(SimulatedDoubles, FloatsAreRoundedToNearest) {
  std::vector<uint64_t> mantissas;
  std::vector<int32_t> exponents;
  for (size_t i = 0; i < kCount; ++i) {
    // A third lies between two floats, so that ties go to the even one.
    const uint64_t bits = Bits() | uint64_t{1} << 63;
    mantissas.push_back(i % 3 == 0 ? bits >> 39 << 39 : bits);
    exponents.push_back(static_cast<int32_t>(random_() % 320) - 170);
  }
  const auto out = Run<float>("probe_roundings", mantissas, exponents);
  for (size_t i = 0; i < kCount; ++i) {
    const long double exact = std::ldexp(static_cast<long double>(mantissas[i]), exponents[i] - 63);
    ASSERT_EQ(out[i], static_cast<float>(exact)) << mantissas[i] << " " << exponents[i];
  }
}

TEST_P(SimulatedDoubles, PowersAndQuotientsAreCloserThanAFloatNeeds) {
  std::vector<uint64_t> distances;
  std::vector<uint64_t> divisors;
  for (size_t i = 0; i < kCount; ++i) {
    const double most = i % 3 == 0 ? 760.0 : (i % 3 == 1 ? 3.0 : 0x1p-30);
    const double distance = i == 0 ? 0.0 : static_cast<double>(Bits() >> 11) * 0x1p-53 * most;
    distances.push_back(static_cast<uint64_t>(distance * 0x1p51));
    divisors.push_back(std::bit_cast<uint64_t>(static_cast<double>(Bits() >> 11) * 0x1p-53));
  }
  const auto powers = Run<uint64_t>("probe_powers", distances);
  std::vector<uint64_t> numerators = divisors;
  std::reverse(numerators.begin(), numerators.end());
  const auto quotients = Run<uint64_t>("probe_quotients", divisors, numerators);
  EXPECT_EQ(std::bit_cast<double>(powers[0]), 1.0);
  for (size_t i = 0; i < kCount; ++i) {
    const long double power = std::exp(-static_cast<long double>(distances[i]) * 0x1p-51L);
    ASSERT_NEAR(std::bit_cast<double>(powers[i]), static_cast<double>(power),
                static_cast<double>(power) * 0x1p-49 + 0x1p-1074);
    const double quotient =
        std::bit_cast<double>(numerators[i]) / (1.0 + std::bit_cast<double>(divisors[i]));
    ASSERT_NEAR(std::bit_cast<double>(quotients[i]), quotient, quotient * 0x1p-51);
  }
}

// Which sigmoids are equal decides the selection of saturated routers.
TEST_P(SimulatedDoubles, SigmoidsSaturateAsTheHostsDo) {
  std::vector<float> x;
  for (size_t i = 0; i < kCount; ++i) {
    x.push_back(30.0F + static_cast<float>(i) * (10.0F / kCount));
  }
  x[0] = 1e30F;
  x[1] = -1e30F;
  x[2] = -709.0F;
  x[3] = -709.9F;
  x[4] = 0.0F;
  x[5] = -std::numeric_limits<float>::infinity();
  x[6] = -740.0F;
  const auto out = Run<uint64_t>("probe_sigmoids", x);
  for (size_t i = 0; i < kCount; ++i) {
    const double expected = 1.0 / (1.0 + std::exp(-double{x[i]}));
    ASSERT_NEAR(std::bit_cast<double>(out[i]), expected, i == 2 ? expected * 0x1p-49 : 0.0) << x[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Math, SimulatedDoubles, ::testing::Bool(), [](const auto& mode) {
  return std::string(mode.param ? "fast" : "strict");
});

}  // namespace
}  // namespace marlin::metal::simulated_doubles_test
