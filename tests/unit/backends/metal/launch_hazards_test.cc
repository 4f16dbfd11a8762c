// Barriers from declared byte ranges.
#include "backends/metal/runtime/launch_hazards.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <string_view>

namespace marlin::metal {
namespace {

class LaunchHazardsTest : public ::testing::Test {
 protected:
  static constexpr int kPart = 64;
  /// A launch that reads one part of the memory and writes another.
  KernelLaunch Launch(std::string_view function, int read, int written) {
    KernelLaunch launch;
    launch.function = function;
    launch.buffers.push_back({MARLIN_BUFFER_INPUT, Part(read), kPart});
    launch.buffers.push_back({MARLIN_BUFFER_OUTPUT, Part(written), kPart, true, false});
    return launch;
  }
  const std::byte* Part(int part) const { return memory_.data() + ptrdiff_t{part} * kPart; }

  std::array<std::byte, 8 * kPart> memory_{};
  LaunchHazards hazards_;
};

TEST_F(LaunchHazardsTest, FindsEveryOrderOfReadsAndWrites) {
  hazards_.Add(Launch("first", 0, 1));
  EXPECT_EQ(hazards_.Conflict(Launch("reads what it wrote", 1, 2)), "first");
  EXPECT_EQ(hazards_.Conflict(Launch("writes what it read", 2, 0)), "first");
  EXPECT_EQ(hazards_.Conflict(Launch("writes what it wrote", 2, 1)), "first");
  EXPECT_EQ(hazards_.Conflict(Launch("reads what it read", 0, 2)), "");
}

TEST_F(LaunchHazardsTest, RangesThatTouchDoNotOverlap) {
  hazards_.Add(Launch("first", 3, 4));
  EXPECT_EQ(hazards_.Conflict(Launch("next to it", 5, 2)), "");
}

TEST_F(LaunchHazardsTest, CountsAddressedRanges) {
  KernelLaunch append = Launch("append", 0, 1);
  append.addressed.push_back({Part(6), 2 * kPart, true});
  hazards_.Add(append);
  KernelLaunch attend = Launch("attend", 2, 3);
  attend.addressed.push_back({Part(7), kPart, false});
  EXPECT_EQ(hazards_.Conflict(attend), "append");
}

TEST_F(LaunchHazardsTest, NamesTheFirstAndForgetsAtABarrier) {
  hazards_.Add(Launch("first", 0, 1));
  hazards_.Add(Launch("second", 0, 2));
  EXPECT_EQ(hazards_.Conflict(Launch("reads", 2, 3)), "second");
  hazards_.Clear();
  EXPECT_EQ(hazards_.Conflict(Launch("reads", 2, 3)), "");
}

TEST_F(LaunchHazardsTest, EmptyBuffersAreNotRanges) {
  KernelLaunch first = Launch("first", 0, 1);
  first.buffers.push_back({MARLIN_BUFFER_BIAS, nullptr, 64});
  first.buffers.push_back({MARLIN_BUFFER_SCALES, Part(2), 0, true});
  hazards_.Add(first);
  EXPECT_EQ(hazards_.Conflict(Launch("reads", 2, 3)), "");
}

}  // namespace
}  // namespace marlin::metal
