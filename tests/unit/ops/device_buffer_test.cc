// Device memory and synchronization: on the CPU, and on a GPU if there is one.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "marlin/device.h"

namespace marlin::device_buffer_test {
namespace {

class DeviceBufferTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    Result<Device> device = Device::Open(GetParam());
    if (!device.ok() && std::string(GetParam()) != "cpu") {
      GTEST_SKIP() << "no " << (std::string(GetParam()) == "cuda" ? "CUDA" : "metal")
                   << " device: " << device.status().message();
    }
    ASSERT_TRUE(device.ok()) << device.status().message();
    device_ = *device;
  }

  DeviceBuffer Make(int64_t bytes) {
    Result<DeviceBuffer> buffer = DeviceBuffer::Allocate(*device_, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    return buffer.ok() ? std::move(*buffer) : DeviceBuffer();
  }

  std::optional<Device> device_;
};

std::vector<uint8_t> Ascending(size_t count) {
  std::vector<uint8_t> bytes(count);
  std::iota(bytes.begin(), bytes.end(), uint8_t{1});
  return bytes;
}

TEST_P(DeviceBufferTest, GivesBackWhatWasCopied) {
  for (size_t count : {size_t{1}, size_t{63}, size_t{4097}, size_t{5} << 20}) {
    const auto bytes = static_cast<int64_t>(count);
    const DeviceBuffer buffer = Make(bytes);
    ASSERT_NE(buffer.data(), nullptr);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    const std::vector<uint8_t> sent = Ascending(count);
    ASSERT_TRUE(buffer.CopyFrom(sent.data(), bytes).ok());
    std::vector<uint8_t> got(count);
    ASSERT_TRUE(buffer.CopyTo(got.data(), bytes).ok());
    EXPECT_EQ(got, sent);
  }
}

TEST_P(DeviceBufferTest, CopiesRanges) {
  const DeviceBuffer buffer = Make(256);
  std::vector<uint8_t> expected(256, 0xee);
  ASSERT_TRUE(buffer.CopyFrom(expected.data(), 256).ok());
  const std::vector<uint8_t> part = Ascending(7);
  ASSERT_TRUE(buffer.CopyFrom(part.data(), 7, 13).ok());
  ASSERT_TRUE(buffer.CopyFrom(part.data(), 7, 249).ok());
  for (size_t i = 0; i < part.size(); ++i) expected[13 + i] = expected[249 + i] = part[i];
  std::vector<uint8_t> all(256);
  ASSERT_TRUE(buffer.CopyTo(all.data(), 256).ok());
  EXPECT_EQ(all, expected);
  std::vector<uint8_t> end(6);
  ASSERT_TRUE(buffer.CopyTo(end.data(), 6, 250).ok());
  EXPECT_EQ(end, std::vector<uint8_t>(expected.begin() + 250, expected.end()));
}

TEST_P(DeviceBufferTest, AsynchronousCopiesRunInOrder) {
  for (size_t count : {size_t{1}, size_t{63}, size_t{4097}, size_t{5} << 20}) {
    const auto bytes = static_cast<int64_t>(count);
    const DeviceBuffer buffer = Make(bytes + 13);
    const std::vector<uint8_t> sent = Ascending(count);
    const std::vector<uint8_t> later(count, 0xee);
    std::vector<uint8_t> got(count);
    ASSERT_TRUE(buffer.CopyFromAsync(sent.data(), bytes, 13).ok());
    ASSERT_TRUE(buffer.CopyToAsync(got.data(), bytes, 13).ok());
    // Only CUDA may return before the copy is done.
    if (std::string(GetParam()) != "cuda") {
      EXPECT_EQ(got, sent);
    }
    ASSERT_TRUE(buffer.CopyFromAsync(later.data(), bytes, 13).ok());
    ASSERT_TRUE(device_->Synchronize().ok());
    EXPECT_EQ(got, sent);
    ASSERT_TRUE(buffer.CopyTo(got.data(), bytes, 13).ok());
    EXPECT_EQ(got, later);
  }
}

TEST_P(DeviceBufferTest, RefusesRangesOutsideOfIt) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const DeviceBuffer buffer = Make(16);
  std::vector<uint8_t> host(64, 7);
  for (const auto& [bytes, offset] : {std::pair<int64_t, int64_t>{17, 0},
                                      {16, 1},
                                      {1, 16},
                                      {-1, 0},
                                      {1, -1},
                                      {0, 17},
                                      {kMost, 1},
                                      {1, kMost}}) {
    const Status from = buffer.CopyFrom(host.data(), bytes, offset);
    const Status to = buffer.CopyTo(host.data(), bytes, offset);
    EXPECT_EQ(from.code(), Code::kInvalidArgument) << bytes << " at " << offset;
    EXPECT_EQ(to.code(), Code::kInvalidArgument) << bytes << " at " << offset;
    EXPECT_NE(from.message().find(std::to_string(bytes)), std::string::npos) << from.message();
    EXPECT_NE(from.message().find("16"), std::string::npos) << from.message();
    const Status from_async = buffer.CopyFromAsync(host.data(), bytes, offset);
    const Status to_async = buffer.CopyToAsync(host.data(), bytes, offset);
    EXPECT_EQ(from_async.code(), Code::kInvalidArgument) << bytes << " at " << offset;
    EXPECT_EQ(from_async.message(), from.message());
    EXPECT_EQ(to_async.message(), to.message());
  }
  EXPECT_EQ(buffer.CopyFromAsync(nullptr, 1).message(), "host: null data");
  EXPECT_EQ(buffer.CopyToAsync(nullptr, 1).message(), "host: null data");
  EXPECT_TRUE(device_->Synchronize().ok());
  EXPECT_EQ(host, std::vector<uint8_t>(64, 7));
}

TEST_P(DeviceBufferTest, ZeroSizes) {
  const DeviceBuffer none = Make(0);
  EXPECT_EQ(none.bytes(), 0);
  EXPECT_TRUE(none.CopyFrom(nullptr, 0).ok());
  EXPECT_TRUE(none.CopyTo(nullptr, 0).ok());
  EXPECT_EQ(none.CopyFrom("x", 1).code(), Code::kInvalidArgument);
  const DeviceBuffer some = Make(8);
  EXPECT_TRUE(some.CopyFrom(nullptr, 0, 8).ok());
  EXPECT_TRUE(some.CopyTo(nullptr, 0, 0).ok());
  EXPECT_TRUE(some.CopyFromAsync(nullptr, 0, 8).ok());
  EXPECT_TRUE(some.CopyToAsync(nullptr, 0).ok());

  const DeviceBuffer empty;
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(empty.bytes(), 0);
  EXPECT_TRUE(empty.CopyTo(nullptr, 0).ok());
  EXPECT_EQ(empty.CopyFrom("x", 1).code(), Code::kInvalidArgument);
  EXPECT_TRUE(empty.CopyToAsync(nullptr, 0).ok());
  EXPECT_EQ(empty.CopyFromAsync("x", 1).code(), Code::kInvalidArgument);
}

TEST_P(DeviceBufferTest, RefusesSizesThatNoDeviceHas) {
  const Result<DeviceBuffer> negative = DeviceBuffer::Allocate(*device_, -5);
  EXPECT_EQ(negative.status().code(), Code::kInvalidArgument);
  EXPECT_NE(negative.status().message().find("-5"), std::string::npos);
  for (int64_t bytes : {int64_t{1} << 60, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(DeviceBuffer::Allocate(*device_, bytes).status().code(), Code::kOutOfMemory);
  }
  // The refusal leaves the device usable.
  EXPECT_TRUE(device_->Synchronize().ok());
  EXPECT_NE(Make(64).data(), nullptr);
}

TEST_P(DeviceBufferTest, MovesAndOutlivesTheHandle) {
  DeviceBuffer buffer = Make(4);
  device_.reset();
  const std::vector<uint8_t> sent = Ascending(4);
  ASSERT_TRUE(buffer.CopyFrom(sent.data(), 4).ok());
  void* data = buffer.data();
  DeviceBuffer other = std::move(buffer);
  EXPECT_EQ(other.data(), data);
  EXPECT_EQ(other.bytes(), 4);
  std::vector<uint8_t> got(4);
  ASSERT_TRUE(other.CopyTo(got.data(), 4).ok());
  EXPECT_EQ(got, sent);
  other = DeviceBuffer();
  EXPECT_EQ(other.data(), nullptr);
}

TEST_P(DeviceBufferTest, SynchronizesWithNothingToWaitFor) {
  EXPECT_TRUE(device_->Synchronize().ok());
  EXPECT_TRUE(device_->Synchronize(nullptr).ok());
}

TEST_P(DeviceBufferTest, ServesSeveralThreads) {
  constexpr size_t kThreads = 4;
  constexpr int kRounds = 50;
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<uint8_t> sent(1000 + t, static_cast<uint8_t>(t + 1));
      const auto bytes = static_cast<int64_t>(sent.size());
      for (int round = 0; round < kRounds; ++round) {
        const Result<DeviceBuffer> buffer = DeviceBuffer::Allocate(*device_, bytes);
        std::vector<uint8_t> got(sent.size());
        const bool right = buffer.ok() && buffer->CopyFrom(sent.data(), bytes).ok() &&
                           device_->Synchronize().ok() && buffer->CopyTo(got.data(), bytes).ok() &&
                           got == sent;
        wrong[t] += !right;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceBufferTest, ::testing::Values("cpu", "cuda", "metal-sim"),
                         [](const auto& device) {
                           const std::string name = device.param;
                           return name.substr(0, name.find('-'));
                         });

}  // namespace
}  // namespace marlin::device_buffer_test
