// Resource use of the kernels as counted by the simulator: weight bytes, barriers, threadgroup
// memory. The budgets are those of docs/kernels/metal.md.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/metal_backend.h"
#include "backends/metal/plan/kernel_table.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "base/scalars.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "ops/device/device.h"

namespace marlin::metal::simulated_counters_test {
namespace {

class SimulatedCounters : public ::testing::Test {
 protected:
  void SetUp() override { Open(false); }

  void Open(bool count_slots) {
    auto driver = OpenSimulatedDriver(&launches_, nullptr, count_slots);
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    device_ = Internals::Make<Device>(
        std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver))));
  }

  /// Runs a GEMM; its launches are recorded in launches_.
  std::vector<float> Run(const std::string& kernel, int64_t m, int64_t n, int64_t k, DType type,
                         Format format = Format::kFp4E2M1) {
    return RunQuantized(kernel, {m, n, k}, type, {.format = format, .group_size = 32});
  }

  std::vector<float> RunQuantized(const std::string& kernel, const std::array<int64_t, 3>& mnk,
                                  DType type, const QuantizeOptions& options) {
    const auto [m, n, k] = mnk;
    std::vector<float> dense(static_cast<size_t>(k * n));
    for (size_t i = 0; i < dense.size(); ++i) dense[i] = static_cast<float>(i * 7919 % 23) - 11.0F;
    const TensorView view(dense.data(), DType::kF32, {k, n});
    const auto weights = Quantize(view, options);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    const auto prepared = Prepare(*weights, *device_);
    std::vector<float> input(static_cast<size_t>(m * k));
    // Small integers, exact in every activation type.
    for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(i * 31 % 17) - 8.0F;
    std::vector<uint16_t> narrow(input.size());
    for (size_t i = 0; i < input.size(); ++i) {
      narrow[i] = type == DType::kF16 ? FloatToHalf(input[i]) : FloatToBf16(input[i]);
    }
    const void* data = type == DType::kF32 ? static_cast<const void*>(input.data()) : narrow.data();
    std::vector<float> out(static_cast<size_t>(m * n));
    launches_.clear();
    const Status status = Gemm(*device_, {data, type, {m, k}}, *prepared,
                               {out.data(), DType::kF32, {m, n}}, {.kernel = kernel});
    EXPECT_TRUE(status.ok()) << kernel << ": " << status.message();
    return out;
  }

  static const metal_sim::BufferCounters& Codes(const SimulatedLaunch& launch) {
    const auto& buffers = launch.counters.buffers;
    return *std::find_if(buffers.begin(), buffers.end(),
                         [](const auto& buffer) { return buffer.name == "codes"; });
  }

  /// The number of times that the codes are read, from the counters of the main launch.
  double CodeReads(const std::string& what) const {
    for (const SimulatedLaunch& launch : launches_) {
      if (launch.function == "marlin_finish" || launch.function == "marlin_zero_reduction")
        continue;
      const metal_sim::BufferCounters& codes = Codes(launch);
      const double reads =
          static_cast<double>(codes.bytes_read) / static_cast<double>(codes.unique_bytes_read);
      fmt::print(
          "{:<46} codes read {:.2f} times, {} barriers of a threadgroup, {} bytes of "
          "threadgroup memory, {} matrix operations\n",
          what, reads, launch.counters.threadgroup_barriers / launch.counters.threadgroups,
          launch.counters.threadgroup_bytes, launch.counters.matrix_operations);
      return reads;
    }
    ADD_FAILURE() << what << ": no launch reads codes";
    return 0;
  }

  /// The slots that a weight more costs along k, of the kernel for one row.
  double SlotsOfWeight(DType type, const QuantizeOptions& options) {
    const auto slots = [&](int64_t k) {
      RunQuantized("marlin_gemv", {1, 8, k}, type, options);
      return launches_.front().slots;
    };
    constexpr int64_t kShort = 1024;
    constexpr int64_t kLong = 3072;
    return static_cast<double>(slots(kLong) - slots(kShort)) / (8 * (kLong - kShort));
  }

  const metal_sim::Counters& First() const { return launches_.front().counters; }

  std::vector<SimulatedLaunch> launches_;
  std::optional<Device> device_;
};

TEST_F(SimulatedCounters, FewRowsReadWeightsOnce) {
  for (const int64_t m : {1, 2, 3, 5, 8, 9, 16}) {
    const std::string kernel = m == 1 ? "marlin_gemv" : "marlin_gemv_wide";
    for (const Format format : {Format::kFp4E2M1, Format::kInt3, Format::kS8}) {
      Run(kernel, m, 136, 640, DType::kBf16, format);
      const double reads = CodeReads(fmt::format("{} {} m {}", kernel, FormatName(format), m));
      EXPECT_EQ(reads, 1.0);
      EXPECT_EQ(Codes(launches_.front()).unique_bytes_read,
                17 * 5 * 128 * GetFormatInfo(format).bits);
      EXPECT_EQ(First().threadgroup_barriers, First().threadgroups);
      int64_t rows = 1;
      while (rows < m) rows *= 2;
      EXPECT_EQ(First().threadgroup_bytes, std::max<int64_t>(256 * rows, 2048));
    }
  }
}

// Before sums of groups were scaled: 17.2 with groups of 128 and 24.1 with groups of 64 and 32.
TEST_F(SimulatedCounters, GemvTakesFewSlotsPerWeight) {
  Open(true);
  struct Pinned {
    Format format;
    int64_t group_size;
    double slots;
  };
  for (const Pinned& pinned :
       {Pinned{Format::kFp4E2M1, 128, 5.69}, Pinned{Format::kFp4E2M1, 64, 5.91},
        Pinned{Format::kFp4E2M1, 32, 6.34}, Pinned{Format::kU4, 32, 6.09},
        Pinned{Format::kNf4, 32, 4.97}}) {
    const double slots =
        SlotsOfWeight(DType::kBf16, {.format = pinned.format, .group_size = pinned.group_size});
    const std::string what =
        fmt::format("{} in groups of {}", FormatName(pinned.format), pinned.group_size);
    fmt::print("{}: {:.2f} slots per weight\n", what, slots);
    EXPECT_LE(slots, 6.5) << what;
    EXPECT_NEAR(slots, pinned.slots, 0.01) << what;
  }
}

// Two strips per simdgroup, which m up to 4 have where n is large, add as one does.
TEST_F(SimulatedCounters, TwoStripsHaveTheBitsOfOne) {
  constexpr int64_t kN = 4104;  // An odd number of strips.
  const std::vector<float> all = Run("marlin_gemv_wide", 5, kN, 136, DType::kF16, Format::kU4);
  EXPECT_EQ(launches_.front().function, "marlin_gemv_8");
  for (const int64_t m : {1, 4}) {
    const std::vector<float> some =
        Run(m == 1 ? "marlin_gemv" : "marlin_gemv_wide", m, kN, 136, DType::kF16, Format::kU4);
    EXPECT_EQ(launches_.front().function, m == 1 ? "marlin_gemv_1x2" : "marlin_gemv_4x2");
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << "m " << m;
  }
}

TEST_F(SimulatedCounters, EveryRowHasTheSameBitsHoweverManyThereAre) {
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kNf3}) {
    const std::vector<float> all = Run("marlin_gemv_wide", 16, 72, 400, DType::kF16, format);
    for (int64_t m = 1; m < 16; ++m) {
      const std::vector<float> some =
          Run(m == 1 ? "marlin_gemv" : "marlin_gemv_wide", m, 72, 400, DType::kF16, format);
      EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()))
          << FormatName(format) << ", m " << m;
    }
  }
}

TEST_F(SimulatedCounters, SmallTilesReadWeightsOnce) {
  for (const int64_t m : {8, 16, 17, 32}) {
    Run("marlin_gemm_split_k", m, 192, 640, DType::kF16);
    EXPECT_EQ(CodeReads(fmt::format("marlin_gemm_split_k m {}", m)), 1.0);
    EXPECT_EQ(First().threadgroup_barriers, 0);
    EXPECT_EQ(First().threadgroup_bytes, 0);
  }
}

TEST_F(SimulatedCounters, TilesOf64RowsReadWeightsTwiceAtMost) {
  for (const char* kernel : {"marlin_gemm_fused_fp4", "marlin_gemm_staged", "marlin_gemm_fp4",
                             "marlin_gemm_fp4_single_stage", "marlin_gemm_fp4_striped"}) {
    Run(kernel, 64, 192, 640, DType::kF16);
    EXPECT_LE(CodeReads(fmt::format("{} m 64", kernel)), 2.0);
  }
}

TEST_F(SimulatedCounters, StagedTilesKeepTheirBudgets) {
  struct Budget {
    const char* kernel;
    DType type;
    int64_t bytes;
    int64_t barriers_of_step;
  };
  for (const Budget& budget : {Budget{"marlin_gemm_fp4", DType::kF16, 2 * 13824, 1},
                               Budget{"marlin_gemm_fp4", DType::kBf16, 2 * 13824, 1},
                               Budget{"marlin_gemm_fp4", DType::kF32, 32768, 1},
                               Budget{"marlin_gemm_fp4_single_stage", DType::kF16, 16384, 2},
                               Budget{"marlin_gemm_fp4_single_stage", DType::kF32, 16384, 2}}) {
    Run(budget.kernel, 64, 128, 640, budget.type);
    CodeReads(fmt::format("{} {}", budget.kernel, DTypeName(budget.type)));
    EXPECT_EQ(First().threadgroup_bytes, budget.bytes);
    const int64_t steps = 640 / 32;
    const int64_t per_group = First().threadgroup_barriers / First().threadgroups;
    EXPECT_LE(per_group, budget.barriers_of_step * steps + 3) << budget.kernel;
    EXPECT_EQ(First().matrix_operations, 64 * 128 * 640 / 512);
  }
}

}  // namespace
}  // namespace marlin::metal::simulated_counters_test
