// The kernel that adds the host's rows on a GPU, against the definition on the host.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "gpu_fixture.h"
#include "ops/device/device.h"
#include "plan/gemm/host_staging.h"

namespace marlin::add_rows_gpu_test {
namespace {

class AddRows : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) cpu_ = *Device::Open("cpu", {.threads = 1});
  }

  /// The bytes of `out` after a call on a device, with rows of `out_stride` elements.
  std::vector<uint8_t> Run(const Device& on, const std::vector<float>& sum,
                           const std::vector<float>& rows, const std::vector<int32_t>& slot_of,
                           AddRowsCall call) const {
    const auto upload = [&](const auto& values) {
      const auto bytes = static_cast<int64_t>(values.size() * 4);
      DeviceBuffer buffer = *DeviceBuffer::Allocate(on, bytes);
      EXPECT_TRUE(buffer.CopyFrom(values.data(), bytes).ok());
      return buffer;
    };
    const DeviceBuffer sum_there = upload(sum);
    const DeviceBuffer rows_there = upload(rows);
    const DeviceBuffer slots_there = upload(slot_of);
    std::vector<uint8_t> out(
        static_cast<size_t>(call.tokens * call.out_stride * DTypeBytes(call.out_type)), 0x5a);
    const auto bytes = static_cast<int64_t>(out.size());
    const DeviceBuffer out_there = *DeviceBuffer::Allocate(on, bytes);
    EXPECT_TRUE(out_there.CopyFrom(out.data(), bytes).ok());
    if (!sum.empty()) call.sum = static_cast<const float*>(sum_there.data());
    if (!rows.empty()) call.rows = static_cast<const float*>(rows_there.data());
    call.slot_of = static_cast<const int32_t*>(slots_there.data());
    call.out = out_there.data();
    EXPECT_TRUE(Internals::Impl(on).backend().AddRows(call, nullptr).ok());
    EXPECT_TRUE(on.Synchronize().ok());
    EXPECT_TRUE(out_there.CopyTo(out.data(), bytes).ok());
    return out;
  }

  std::optional<Device> cpu_;
};

TEST_F(AddRows, HasTheBitsOfTheDefinition) {
  // More tokens than CTAs, and widths around a CTA.
  for (const int64_t tokens : {int64_t{1}, int64_t{5}, int64_t{1500}}) {
    for (const int64_t width : {int64_t{1}, int64_t{255}, int64_t{256}, int64_t{513}}) {
      std::vector<float> sum = GaussianFloats(tokens * width, 1);
      sum.front() = -0.0F;
      sum.back() = std::numeric_limits<float>::infinity();
      std::vector<int32_t> slot_of(static_cast<size_t>(tokens), -1);
      int32_t slots = 0;
      for (size_t t = 0; t < slot_of.size(); t += 2) slot_of[t] = slots++;
      std::vector<float> rows = GaussianFloats(slots * width, 2);
      rows.front() = -0.0F;
      for (const DType type : {DType::kF32, DType::kBf16, DType::kF16}) {
        for (const int64_t padding : {0, 3}) {
          AddRowsCall call;
          call.tokens = tokens;
          call.width = width;
          call.out_stride = width + padding;
          call.out_type = type;
          const auto expect_same = [&](const std::vector<float>& some_sum,
                                       const std::vector<float>& some_rows) {
            EXPECT_EQ(Run(device(), some_sum, some_rows, slot_of, call),
                      Run(*cpu_, some_sum, some_rows, slot_of, call))
                << tokens << " x " << width << " " << DTypeName(type);
          };
          expect_same(sum, rows);
          expect_same(sum, {});
          expect_same({}, rows);
        }
      }
    }
  }
}

TEST_F(AddRows, KeepsNaNsInTheirRows) {
  constexpr int64_t kWidth = 300;
  std::vector<float> sum(3 * kWidth, 1.0F);
  std::vector<float> rows(kWidth, std::numeric_limits<float>::quiet_NaN());
  AddRowsCall call;
  call.tokens = 3;
  call.width = kWidth;
  call.out_stride = kWidth;
  const std::vector<uint8_t> bytes = Run(device(), sum, rows, {-1, 0, -1}, call);
  const auto* const out = reinterpret_cast<const float*>(bytes.data());
  for (int64_t i = 0; i < 3 * kWidth; ++i) EXPECT_EQ(std::isnan(out[i]), i / kWidth == 1) << i;
}

}  // namespace
}  // namespace marlin::add_rows_gpu_test
