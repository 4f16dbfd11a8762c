// The conversion of e4m3 caches for the AMX kernel of attention, which needs AVX-512 only.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "backends/cpu/decoder/decoder_kernels.h"
#include "backends/cpu/runtime/cpu_features.h"
#include "base/scalars.h"

namespace marlin::cpu::fp8_cache_test {
namespace {

#if defined(__x86_64__)
TEST(SegmentKernel, WidensEveryCodeExactly) {
  if (!GetCpuFeatures().avx512) GTEST_SKIP() << "no AVX-512";
  // Whole vectors of 32 codes, and a half at the end.
  for (const int64_t count : {int64_t{256}, int64_t{240}, int64_t{16}}) {
    std::vector<uint8_t> codes(static_cast<size_t>(count));
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(255 - i);
    std::vector<uint16_t> wide(codes.size() + 16, 0x1234);
    amx::kSegmentKernel.widen(codes.data(), count, wide.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      const float want = Fp8E4M3ToFloat(codes[i]);
      const float got = Bf16ToFloat(wide[i]);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << int{codes[i]};
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << int{codes[i]};
      }
    }
    for (size_t i = codes.size(); i < wide.size(); ++i) EXPECT_EQ(wide[i], 0x1234) << i;
  }
}
#endif

}  // namespace
}  // namespace marlin::cpu::fp8_cache_test
