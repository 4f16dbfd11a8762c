// The stream of launches to an Apple GPU: command buffers, barriers, waits, recordings, and the
// buffers that allocations share.
#include <gmock/gmock.h>

#include <array>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "apple_driver_fixture.h"
#include "backends/metal/gemm/row_parts.h"

namespace marlin::metal {
namespace {

using testing::HasSubstr;

class AppleStream : public AppleDriver {
 protected:
  void SetUp() override {
    AppleDriver::SetUp();
    Open();
    TheLog() = {};
  }
  /// The input of the second of a pair of launches: the first's result, then more input.
  float* Between() {
    float* const between = Floats(260);
    std::memcpy(between + kOutputs, Input(0).data() + 67, (kInputs - 67) * 4);
    return between;
  }
  Status Wait() { return driver_->Synchronize(nullptr); }
};

TEST_F(AppleStream, RunsShareACommandBuffer) {
  float* const input = DeviceInput(5);
  float* const between = Between();
  float* const last = Floats(kOutputs);
  ASSERT_TRUE(Run(LaunchOf(input, between)).ok());
  ASSERT_TRUE(Run(LaunchOf(between + 128, last)).ok());
  EXPECT_EQ(TheLog().command_buffers, 0);
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(TheLog().command_buffers, 1);
  EXPECT_EQ(TheLog().waits, 1);
  EXPECT_EQ(TheLog().barriers, 1);
  EXPECT_EQ(TheLog().used_resources, 0);
  EXPECT_EQ(last[0], 5);
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(TheLog().command_buffers, 1);
  EXPECT_EQ(TheLog().waits, 1);
}

TEST_F(AppleStream, OnlyConflictsHaveBarriers) {
  float* const input = DeviceInput(1);
  float* const between = Between();
  float* const other = DeviceInput(2);
  const auto barriers_of = [&](const std::vector<KernelLaunch>& launches) {
    const int64_t before = TheLog().barriers;
    EXPECT_TRUE(driver_->Run(launches, nullptr).ok());
    EXPECT_TRUE(Wait().ok());
    return TheLog().barriers - before;
  };
  float* const first = Floats(kOutputs);
  float* const second = Floats(kOutputs);
  EXPECT_EQ(barriers_of({LaunchOf(input, first), LaunchOf(input, second)}), 0);
  EXPECT_EQ(barriers_of({LaunchOf(input, first), LaunchOf(other, first)}), 1);
  EXPECT_EQ(first[128], 2);
  EXPECT_EQ(barriers_of({LaunchOf(input, between), LaunchOf(between + 128, second)}), 1);
  EXPECT_EQ(second[0], 1);
  // The second launch writes the memory that the first one reads.
  std::memcpy(other + 128, Input(2).data() + 128, 16);
  EXPECT_EQ(barriers_of({LaunchOf(between + 128, second), LaunchOf(input, between)}), 1);
}

TEST_F(AppleStream, AMissingBarrierIsFound) {
  float* const input = DeviceInput(5);
  float* const between = Between();
  float* const last = Floats(kOutputs);
  TheBehaviour().drops_barrier = 0;
  TheBehaviour().error = 2;
  ASSERT_TRUE(Run(LaunchOf(input, between)).ok());
  ASSERT_TRUE(Run(LaunchOf(between + 128, last)).ok());
  const Status found = Wait();
  EXPECT_EQ(found.code(), Code::kInternal);
  EXPECT_THAT(found.message(),
              HasSubstr("no barrier between marlin_self_test and marlin_self_test"));
}

TEST_F(AppleStream, CommitsWhatTheGpuCanBeginWith) {
  float* const input = DeviceInput(1);
  float* const out = Floats(kOutputs);
  const auto run = [&](int launches) {
    for (int i = 0; i < launches; ++i) ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  };
  run(32);
  EXPECT_EQ(TheLog().command_buffers, 0);
  run(1);
  EXPECT_EQ(TheLog().command_buffers, 1);
  run(255);
  EXPECT_EQ(TheLog().command_buffers, 1);
  run(1);
  EXPECT_EQ(TheLog().command_buffers, 2);
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(TheLog().command_buffers, 3);
  EXPECT_EQ(TheLog().dispatches, 289);
}

TEST_F(AppleStream, BoundsTheWorkOfACommandBuffer) {
  KernelLaunch launch = LaunchOf(DeviceInput(1), Floats(kOutputs));
  launch.operations = kMostOperationsOfPart / 2;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Run(launch).ok());
  EXPECT_EQ(TheLog().command_buffers, 1);
  launch.operations = kMostOperationsOfPart * 3;
  ASSERT_TRUE(Run(launch).ok());
  EXPECT_EQ(TheLog().command_buffers, 2);
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(TheLog().command_buffers, 3);
}

TEST_F(AppleStream, WaitsOnlyForWhatUsesAMemory) {
  float* const input = DeviceInput(3);
  float* const out = Floats(kOutputs);
  float* const other = Floats(10);
  ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  ASSERT_TRUE(driver_->WaitFor({other, 40}, nullptr).ok());
  EXPECT_EQ(TheLog().command_buffers, 0);
  ASSERT_TRUE(driver_->WaitFor({out + 100, 40}, nullptr).ok());
  EXPECT_EQ(TheLog().waits, 1);
  EXPECT_EQ(out[128], 3);
  void* const queue = fake_gpu::NewQueue(false);
  ASSERT_TRUE(Run(LaunchOf(input, out), queue).ok());
  ASSERT_TRUE(driver_->WaitFor({other, 40}, queue).ok());
  EXPECT_EQ(TheLog().waits, 1);
  ASSERT_TRUE(driver_->WaitFor({input, 40}, queue).ok());
  EXPECT_EQ(TheLog().waits, 2);
  fake_gpu::ReleaseQueue(queue);
}

TEST_F(AppleStream, ChecksBelongToTheirLaunches) {
  float* const input = DeviceInput(1);
  float* const out = Floats(kOutputs);
  int checks = 0;
  const KernelLaunch launch = LaunchOf(input, out);
  const auto check = [&]() -> Status {
    ++checks;
    return Status(Code::kInvalidArgument, std::to_string(checks));
  };
  ASSERT_TRUE(driver_->RunAndCheck({&launch, 1}, nullptr, check).ok());
  ASSERT_TRUE(driver_->RunAndCheck({&launch, 1}, nullptr, check).ok());
  EXPECT_EQ(checks, 0);
  EXPECT_EQ(Wait().message(), "1");
  EXPECT_EQ(checks, 2);
  EXPECT_TRUE(Wait().ok());
}

// The words that checks look at go back to a list with a lock, under which others allocate.
TEST_F(AppleStream, ChecksMayAllocateAtTheirEnd) {
  bool allocated = false;
  std::shared_ptr<int> last(new int, [&](const int* counter) {
    delete counter;
    allocated = driver_->Allocate(1).ok();
  });
  const KernelLaunch launch = LaunchOf(DeviceInput(1), Floats(kOutputs));
  ASSERT_TRUE(driver_->RunAndCheck({&launch, 1}, nullptr, [kept = last] { return Status(); }).ok());
  const std::weak_ptr<int> watched = last;
  last.reset();
  EXPECT_FALSE(watched.expired());
  ASSERT_TRUE(Wait().ok());
  EXPECT_TRUE(allocated);
}

// A time limit loses the results of a command buffer, and its threads learn it once.
TEST_F(AppleStream, AFailureThatTheDeviceSurvives) {
  float* const input = DeviceInput(1);
  float* const out = Floats(kOutputs);
  TheBehaviour().fails_from = 0;
  TheBehaviour().fails = 1;
  TheBehaviour().error = 2;
  ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  // Another thread waits first; the thread whose work it was still learns of it.
  const Status first = std::async(std::launch::async, [&] { return Wait(); }).get();
  EXPECT_EQ(first.code(), Code::kInternal);
  EXPECT_THAT(first.message(), HasSubstr("marlin_self_test: Caused GPU Timeout Error 0"));
  EXPECT_EQ(std::async(std::launch::async, [&] { return Wait(); }).get().code(), Code::kOk);
  EXPECT_EQ(Run(LaunchOf(input, out)).message(), first.message());
  EXPECT_EQ(Wait().message(), first.message());
  ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(out[128], 1);
  TheBehaviour().fails_from = TheLog().command_buffers;
  TheBehaviour().error = 8;
  ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  EXPECT_EQ(Wait().code(), Code::kOutOfMemory);
}

TEST_F(AppleStream, AllocationsShareBuffers) {
  constexpr int64_t kMiB = 1 << 20;
  const int64_t before = TheLog().buffers;
  std::vector<void*> parts;
  for (int i = 0; i < 1000; ++i) parts.push_back(*driver_->Allocate(10'000));
  // 1, 1, 2, 4 and 8 MiB, of which the first was there.
  EXPECT_EQ(TheLog().buffers, before + 4);
  for (const void* const part : parts) EXPECT_EQ(reinterpret_cast<uintptr_t>(part) % 256, 0u);
  // Space between allocations is found again, and joined.
  driver_->Free(parts[501]);
  driver_->Free(parts[500]);
  driver_->Free(parts[502]);
  EXPECT_EQ(*driver_->Allocate(30'000), parts[500]);
  EXPECT_EQ(TheLog().residency_commits, 0);
  // One commit makes all of them resident.
  ASSERT_TRUE(Run(LaunchOf(DeviceInput(1), Floats(kOutputs))).ok());
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(TheLog().residency_commits, 1);
  EXPECT_TRUE(driver_->Allocate(100 * kMiB).ok());
  EXPECT_EQ(TheLog().buffers, before + 5);
}

// Memory that is freed is not given away while work uses it.
TEST_F(AppleStream, FreedMemoryIsKeptForWork) {
  float* const input = DeviceInput(3);
  float* const out = Floats(kOutputs);
  ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  driver_->Free(input);
  EXPECT_NE(Floats(kInputs), input);
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(out[128], 3);
  EXPECT_EQ(Floats(kInputs), input);
}

TEST_F(AppleStream, RecordsLaunches) {
  float* const input = DeviceInput(5);
  float* const between = Between();
  float* const last = Floats(kOutputs);
  int checks = 0;
  std::vector<CheckedLaunches> calls(2);
  calls[0].launches = {LaunchOf(input, between)};
  calls[0].check = [&]() -> Status {
    ++checks;
    return between[128] == 9 ? Status(Code::kInvalidArgument, "nine") : Status();
  };
  calls[1].launches = {LaunchOf(between + 128, last)};
  const auto recording = driver_->Bind(calls);
  ASSERT_TRUE(recording.ok() && *recording != nullptr);
  calls.clear();
  EXPECT_EQ(TheLog().dispatches, 0);
  const int64_t buffers = TheLog().buffers;
  for (const float value : {6.0F, 7.0F, 9.0F}) {
    std::memcpy(input, Input(value).data(), kInputs * 4);
    // Launches appended before and after a recording have the barriers that they need.
    ASSERT_TRUE(Run(LaunchOf(input, between)).ok());
    ASSERT_TRUE((*recording)->Run().ok());
    ASSERT_TRUE(Run(LaunchOf(between + 128, last)).ok());
    EXPECT_EQ(Wait().message(), value == 9 ? "nine" : "");
    EXPECT_EQ(last[0], value);
  }
  EXPECT_EQ(checks, 3);
  EXPECT_EQ(TheLog().command_buffers, 3);
  EXPECT_EQ(TheLog().dispatches, 12);
  EXPECT_EQ(TheLog().barriers, 9);
  EXPECT_EQ(TheLog().buffers, buffers);
}

TEST_F(AppleStream, EveryBarrierOfARecordingIsNeeded) {
  float* const input = DeviceInput(5);
  float* const between = Between();
  float* const last = Floats(kOutputs);
  std::vector<CheckedLaunches> calls(1);
  for (int i = 0; i < 5; ++i) {
    calls[0].launches.push_back(LaunchOf(input, between));
    calls[0].launches.push_back(LaunchOf(between + 128, last));
  }
  const auto recording = driver_->Bind(calls);
  ASSERT_TRUE(recording.ok() && *recording != nullptr);
  ASSERT_TRUE((*recording)->Run().ok());
  ASSERT_TRUE((*recording)->Run().ok());
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(TheLog().barriers, 19);
  TheBehaviour().error = 2;
  for (int64_t i = 0; i < 19; ++i) {
    TheBehaviour().drops_barrier = TheLog().barriers + i;
    ASSERT_TRUE((*recording)->Run().ok());
    ASSERT_TRUE((*recording)->Run().ok());
    EXPECT_THAT(Wait().message(), HasSubstr("no barrier between ")) << i;
  }
}

TEST_F(AppleStream, ARecordingBeginsWithMoreLaunches) {
  std::vector<CheckedLaunches> calls(1);
  calls[0].launches.assign(129, LaunchOf(DeviceInput(1), Floats(kOutputs)));
  const auto recording = driver_->Bind(calls);
  ASSERT_TRUE(recording.ok() && *recording != nullptr);
  ASSERT_TRUE((*recording)->Run().ok());
  EXPECT_EQ(TheLog().command_buffers, 1);
  ASSERT_TRUE(Wait().ok());
  EXPECT_EQ(TheLog().command_buffers, 2);
  EXPECT_EQ(TheLog().dispatches, 129);
}

TEST_F(AppleStream, RecordsNoMemoryOfTheCaller) {
  const std::vector<float> input = Input(1);
  std::vector<CheckedLaunches> calls(1);
  calls[0].launches = {LaunchOf(input.data(), Floats(kOutputs))};
  const auto recording = driver_->Bind(calls);
  ASSERT_TRUE(recording.ok());
  EXPECT_EQ(*recording, nullptr);
}

}  // namespace
}  // namespace marlin::metal
