#include "base/host/control_groups.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/environment.h"
#include "base/memory_size.h"

namespace marlin::control_groups_test {
namespace {

/// Files of Linux in a folder of the test.
class ControlGroups : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "control-groups-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  std::string root_;
};

TEST_F(ControlGroups, AreEmptyWithoutFilesAndWithoutLimits) {
  GroupLimits limits = ReadGroupLimits(root_);
  EXPECT_FALSE(limits.memory || limits.left || limits.processors);
  Write("/proc/self/cgroup", "0::/a\nnonsense\n");
  Write("/sys/fs/cgroup/a/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/cpu.max", "max 100000\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  limits = ReadGroupLimits(root_);
  EXPECT_FALSE(limits.memory || limits.left || limits.processors);
}

TEST_F(ControlGroups, TakeTheSmallestOfAllAbove) {
  Write("/proc/self/cgroup", "0::/user.slice/job\n");
  Write("/sys/fs/cgroup/user.slice/job/memory.max", "8000\n");
  Write("/sys/fs/cgroup/user.slice/job/memory.current", "3000\n");
  Write("/sys/fs/cgroup/user.slice/job/memory.stat", "anon 2000\ninactive_file 900\n");
  Write("/sys/fs/cgroup/user.slice/job/cpu.max", "400000 100000\n");
  Write("/sys/fs/cgroup/user.slice/memory.max", "9000\n");
  Write("/sys/fs/cgroup/user.slice/memory.current", "8500\n");
  Write("/sys/fs/cgroup/user.slice/cpu.max", "150000 100000\n");
  const GroupLimits limits = ReadGroupLimits(root_);
  EXPECT_EQ(limits.memory, 8000);
  EXPECT_EQ(limits.left, 500);
  EXPECT_EQ(limits.processors, 1.5);
}

TEST_F(ControlGroups, CacheThatCanBeDroppedIsLeft) {
  Write("/sys/fs/cgroup/memory.max", "8000\n");
  Write("/sys/fs/cgroup/memory.current", "7900\n");
  Write("/sys/fs/cgroup/memory.stat", "anon 2000\ninactive_file 5000\n");
  EXPECT_EQ(ReadGroupLimits(root_).left, 5100);
}

TEST_F(ControlGroups, ReadVersion1) {
  Write("/proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/job\n");
  Write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000\n");
  Write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000\n");
  Write("/sys/fs/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 400\n");
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "50000\n");
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  const GroupLimits limits = ReadGroupLimits(root_);
  EXPECT_EQ(limits.memory, 7000);
  EXPECT_EQ(limits.left, 6400);
  EXPECT_EQ(limits.processors, 0.5);
}

TEST_F(ControlGroups, FreeMemoryIsTheLessOfMachineAndGroup) {
  EXPECT_FALSE(FreeMemoryBytes(root_));
  Write("/proc/meminfo", "MemTotal:       24684092 kB\nMemFree: 1 kB\nMemAvailable:   7 kB\n");
  EXPECT_EQ(FreeMemoryBytes(root_), 7 * 1024);
  Write("/sys/fs/cgroup/memory.max", "6000\n");
  Write("/sys/fs/cgroup/memory.current", "1000\n");
  EXPECT_EQ(FreeMemoryBytes(root_), 5000);
}

TEST(MemorySize, OfThisMachine) {
  EXPECT_GT(MemoryBytes(), 0);
  ASSERT_TRUE(FreeMemoryBytes());
  EXPECT_GT(*FreeMemoryBytes(), 0);
  EXPECT_LE(*FreeMemoryBytes(), MemoryBytes());
}

TEST(ListEnvironment, HasOurPrefixesInOrder) {
  setenv("METAL_MARLIN_ZZZ", "1=2", 1);
  setenv("MARLIN_AAA", "", 1);
  setenv("AMETAL_MARLIN_B", "x", 1);
  std::string names;
  for (const EnvironmentVariable& variable : ListEnvironment()) {
    names += variable.name + " ";
    if (variable.name == "METAL_MARLIN_ZZZ") names += variable.value + " ";
  }
  unsetenv("METAL_MARLIN_ZZZ");
  unsetenv("MARLIN_AAA");
  unsetenv("AMETAL_MARLIN_B");
  EXPECT_NE(names.find("MARLIN_AAA "), std::string::npos) << names;
  EXPECT_LT(names.find("MARLIN_AAA "), names.find("METAL_MARLIN_ZZZ 1=2 ")) << names;
  EXPECT_EQ(names.find("AMETAL"), std::string::npos) << names;
}

}  // namespace
}  // namespace marlin::control_groups_test
