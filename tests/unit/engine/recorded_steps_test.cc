// Recordings of passes: made for the second equal pass in a row, launched for every later one.
#include "engine/recorded_steps.h"

#include <gtest/gtest.h>

#include <array>

#include "remote_backend.h"

namespace marlin::recorded_steps_test {
namespace {

/// Passes of some rows, with counts of how they ran.
class Passes {
 public:
  explicit Passes(bool records) : device_(testing::OpenRemote({.records = records})) {
    values_.pages.resize(1);
    values_.pages[0].slabs = {numbers_.data()};
    SetRows(1);
  }

  void SetRows(int64_t rows) { values_.positions = {numbers_.data(), DType::kI32, {rows}}; }
  StepValues& values() { return values_; }

  /// Runs a pass. Returns how often it was enqueued with a list of plans, and without.
  std::pair<int, int> Run() {
    recorded_ = eager_ = 0;
    const Status status =
        steps_.Run(device_, values_, [this](void*, std::vector<ExpertsPlan>* plans) {
          ++(plans != nullptr ? recorded_ : eager_);
          if (plans != nullptr) plans->emplace_back();
          return failure_;
        });
    EXPECT_EQ(status.code(), failure_.code());
    return {recorded_, eager_};
  }
  void Fail(const Status& status) { failure_ = status; }

 private:
  Device device_;
  std::array<int32_t, 8> numbers_ = {};
  StepValues values_;
  Status failure_;
  int recorded_ = 0;
  int eager_ = 0;
  RecordedSteps steps_;
};

using Counts = std::pair<int, int>;  ///< Recorded, eager.
constexpr Counts kLaunched = {0, 0};
constexpr Counts kRecorded = {2, 0};  ///< Done, and recorded.

TEST(RecordedSteps, RecordsTheSecondOfEqualPasses) {
  Passes passes(true);
  EXPECT_EQ(passes.Run(), Counts(0, 1));
  EXPECT_EQ(passes.Run(), kRecorded);
  EXPECT_EQ(passes.Run(), kLaunched);
  EXPECT_EQ(passes.Run(), kLaunched);
}

TEST(RecordedSteps, OtherRowsAndOtherMemoryAreOtherPasses) {
  Passes passes(true);
  std::array<int32_t, 8> other = {};
  const auto expect_new = [&passes] {
    EXPECT_EQ(passes.Run(), Counts(0, 1));
    EXPECT_EQ(passes.Run(), kRecorded);
  };
  expect_new();
  passes.SetRows(2);
  expect_new();
  passes.values().pages[0].slabs.push_back(other.data());
  expect_new();
  passes.values().pages[0].block_tables = {other.data(), DType::kI32, {2, 4}};
  expect_new();
  passes.values().pages[0].expanded.pages = {other.data(), DType::kI32, {2}};
  expect_new();
  passes.values().pages[0].expanded.pages = {other.data(), DType::kI32, {3}};
  expect_new();
  passes.values().pages[0].expanded = {};
  // A value between operations at another place.
  passes.values().mixed = {other.data(), DType::kBf16, {2, 4}};
  expect_new();
  passes.values().mixed = {};
  passes.values().samplers = {other.data(), DType::kU8, {2, 16}};
  expect_new();
  // The first is still recorded.
  passes.values().samplers = {};
  EXPECT_EQ(passes.Run(), kLaunched);
}

// Passes of one and of several steps may alternate.
TEST(RecordedSteps, AreRecordedByTheirNumberOfSteps) {
  Passes passes(true);
  std::array<int32_t, 8> tokens = {};
  const auto run = [&](int64_t steps) {
    passes.values().advance.tokens = {};
    if (steps > 1) passes.values().advance.tokens = {tokens.data(), DType::kI32, {1, steps}};
    return passes.Run();
  };
  EXPECT_EQ(run(8), Counts(0, 1));
  EXPECT_EQ(run(4), Counts(0, 1));
  EXPECT_EQ(run(1), Counts(0, 1));
  EXPECT_EQ(run(8), kRecorded);
  EXPECT_EQ(run(4), kRecorded);
  EXPECT_EQ(run(1), kRecorded);
  EXPECT_EQ(run(8), kLaunched);
  EXPECT_EQ(run(2), Counts(0, 1));
  // Other stop ids, and other sampled rows, are other passes.
  passes.values().advance.stop_ids = {tokens.data(), DType::kI32, {1}};
  EXPECT_EQ(run(8), Counts(0, 1));
  passes.values().sampler_rows = {tokens.data(), DType::kI32, {1}};
  EXPECT_EQ(run(8), Counts(0, 1));
  EXPECT_EQ(run(8), kRecorded);
}

TEST(RecordedSteps, LargePassesAndOtherDevicesRunEagerly) {
  Passes large(true);
  large.SetRows(100000);
  Passes other(false);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(large.Run(), Counts(0, 1));
    EXPECT_EQ(other.Run(), Counts(0, 1));
  }
}

TEST(RecordedSteps, AFailedRecordingIsNoRecording) {
  Passes passes(true);
  EXPECT_EQ(passes.Run(), Counts(0, 1));
  passes.Fail(Status(Code::kOutOfMemory, "no memory"));
  EXPECT_EQ(passes.Run(), Counts(1, 0));
  passes.Fail(Status());
  EXPECT_EQ(passes.Run(), kRecorded);
}

}  // namespace
}  // namespace marlin::recorded_steps_test
