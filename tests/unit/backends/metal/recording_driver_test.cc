// Recordings of a driver's launches: what is collected, and what cannot be.
#include "backends/metal/runtime/recording_driver.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/runtime/host_memory_driver.h"
#include "base/macros.h"

namespace marlin::metal::recording_driver_test {
namespace {

/// Notes what it runs.
class Notes final : public HostMemoryDriver {
 public:
  explicit Notes(std::vector<std::string>* notes) : notes_(*notes) {}
  DriverInfo Info() const override { return {}; }
  DeviceShape Shape() const override { return {}; }
  Status Run(std::span<const KernelLaunch> launches, void* stream) override {
    std::string note = stream == nullptr ? "" : "stream:";
    for (const KernelLaunch& launch : launches) note += launch.function;
    notes_.push_back(note);
    return {};
  }

 private:
  std::vector<std::string>& notes_;
};

class RecordingDriverTest : public testing::Test {
 protected:
  static KernelLaunch Launch(std::string_view function) {
    KernelLaunch launch;
    launch.function = function;
    return launch;
  }
  Status Run(std::string_view function, void* stream) {
    const KernelLaunch launch = Launch(function);
    return driver_.Run({&launch, 1}, stream);
  }
  Status RunAndCheck(std::string_view function, void* stream) {
    const KernelLaunch launch = Launch(function);
    return driver_.RunAndCheck({&launch, 1}, stream, [this]() -> Status {
      notes_.emplace_back("check");
      return wrong_;
    });
  }
  using Texts = std::vector<std::string>;
  Texts TakeNotes() { return std::exchange(notes_, {}); }

  Texts notes_;
  Status wrong_;
  RecordingDriver driver_{std::make_unique<Notes>(&notes_)};
};

TEST_F(RecordingDriverTest, RunsOnceAndThenAsOftenAsItIsLaunched) {
  const auto work = driver_.Record([this](void* stream) {
    MARLIN_RETURN_IF_ERROR(Run("a", stream));
    MARLIN_RETURN_IF_ERROR(Run("other", nullptr));  // Not on the recording's stream.
    return RunAndCheck("b", stream);
  });
  ASSERT_TRUE(work.ok() && *work != nullptr);
  EXPECT_EQ(TakeNotes(), Texts({"a", "other", "b", "check", "other"}));
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE((*work)->Launch(nullptr).ok());
    EXPECT_EQ(TakeNotes(), Texts({"a", "b", "check"}));
  }
  wrong_ = Status(Code::kInvalidArgument, "wrong");
  EXPECT_EQ((*work)->Launch(nullptr).message(), "wrong");
  int other = 0;
  EXPECT_EQ((*work)->Launch(&other).code(), Code::kInvalidArgument);
  EXPECT_TRUE(Run("c", &other).ok());
  EXPECT_EQ(notes_.back(), "stream:c");
}

// Host work would run only once, so the work is done and not recorded.
TEST_F(RecordingDriverTest, TheHostEndsARecording) {
  void* used = nullptr;
  int host = 0;
  for (int i = 0; i < 2; ++i) {
    const auto work = driver_.Record([&](void* stream) {
      EXPECT_TRUE(used == nullptr || used == stream) << "its workspaces are used again";
      used = stream;
      MARLIN_RETURN_IF_ERROR(Run("a", stream));
      MARLIN_RETURN_IF_ERROR(i == 0 ? driver_.Synchronize(stream)
                                    : driver_.WaitFor({&host, sizeof(host)}, stream));
      ++host;
      return Run("b", stream);
    });
    ASSERT_TRUE(work.ok());
    EXPECT_EQ(*work, nullptr);
    EXPECT_EQ(host, i + 1);
    EXPECT_EQ(TakeNotes(), Texts({"a", "b"}));
  }
}

TEST_F(RecordingDriverTest, AnErrorOfTheWorkIsTheRecordings) {
  const auto work = driver_.Record([this](void* stream) {
    MARLIN_RETURN_IF_ERROR(Run("a", stream));
    return Status(Code::kOutOfMemory, "no memory");
  });
  EXPECT_EQ(work.status().message(), "no memory");
  EXPECT_EQ(TakeNotes(), Texts({"a"}));
}

TEST_F(RecordingDriverTest, RecordingsHaveStreamsOfTheirOwn) {
  const auto enqueue = [this](void* stream) { return Run("a", stream); };
  const auto first = driver_.Record(enqueue);
  const auto second = driver_.Record(enqueue);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE((*first)->stream(), (*second)->stream());
}

}  // namespace
}  // namespace marlin::metal::recording_driver_test
