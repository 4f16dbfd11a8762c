// Marks in a stream's work: what they time, and that a held stream cannot block its host.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "marlin/device.h"
#include "ops/device/device.h"
#include "plan/gemm/backend.h"

namespace marlin::event_marks_gpu_test {
namespace {

class EventMarks : public ::testing::Test {
 protected:
  void SetUp() override {
    const Result<Device> device = Device::Open("cuda");
    if (!device.ok()) GTEST_SKIP() << "no CUDA device";
    device_ = *device;
    buffer_ = *DeviceBuffer::Allocate(*device_, kBytes);
    // The copies are asynchronous on the device, from memory that outlives them.
    host_.assign(kBytes, 1);
  }
  const Backend& backend() const { return Internals::Impl(*device_).backend(); }
  std::unique_ptr<StreamMarks> Make(bool holds) const {
    return *backend().MakeMarks(nullptr, holds);
  }
  Status Work() {
    return backend().CopyToDeviceAsync(buffer_.data(), host_.data(), kBytes, nullptr);
  }

  static constexpr int64_t kBytes = int64_t{64} << 20;
  std::optional<Device> device_;
  DeviceBuffer buffer_;
  std::vector<uint8_t> host_;
};

TEST_F(EventMarks, TimeTheWorkBetweenThem) {
  for (const bool holds : {false, true}) {
    const auto marks = Make(holds);
    for (int pass = 0; pass < 3; ++pass) {
      ASSERT_TRUE(marks->Mark().ok());
      ASSERT_TRUE(Work().ok());
      ASSERT_TRUE(marks->Mark().ok());
      ASSERT_TRUE(marks->Mark().ok());
      const auto seconds = marks->Take();
      ASSERT_TRUE(seconds.ok()) << seconds.status().message();
      ASSERT_EQ(seconds->size(), 2U);
      // 64 MiB over any bus take longer than nothing does.
      EXPECT_GT((*seconds)[0], 1e-4);
      EXPECT_LT((*seconds)[1], (*seconds)[0]);
    }
    EXPECT_TRUE(marks->Take()->empty());
  }
}

// The host's work while the stream is held is not in the times.
TEST_F(EventMarks, OfAHeldStreamLeaveOutTheHost) {
  const auto marks = Make(true);
  ASSERT_TRUE(marks->Mark().ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ASSERT_TRUE(marks->Mark().ok());
  EXPECT_LT((*marks->Take())[0], 0.01);
}

TEST_F(EventMarks, OfAHeldStreamLetTheHostWaitForIt) {
  const auto marks = Make(true);
  ASSERT_TRUE(marks->Mark().ok());
  ASSERT_TRUE(Work().ok());
  ASSERT_TRUE(backend().Synchronize(nullptr).ok());
  ASSERT_TRUE(marks->Mark().ok());
  EXPECT_EQ(marks->Take()->size(), 1U);
  // A destructor with marks that nobody took.
  ASSERT_TRUE(marks->Mark().ok());
}

}  // namespace
}  // namespace marlin::event_marks_gpu_test
