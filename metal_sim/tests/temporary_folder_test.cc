// Folders go with their objects, and with a process that never destroys them.
#include "metal_sim/temporary_folder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace metal_sim::temporary_folder_test {
namespace {

namespace fs = std::filesystem;

TEST(TemporaryFolder, IsRemovedWithItsObject) {
  fs::path path;
  {
    Result<TemporaryFolder> made = TemporaryFolder::Make("metal-sim-test-");
    ASSERT_TRUE(made.ok());
    path = made->path();
    std::ofstream(path / "file") << "text";
    const TemporaryFolder moved = *std::move(made);
    EXPECT_EQ(moved.path(), path);
    EXPECT_TRUE(fs::is_directory(path));
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST(TemporaryFolder, IsRemovedAtExit) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "metal_sim_tests", "--gtest_also_run_disabled_tests",
          "--gtest_filter=TemporaryFolder.DISABLED_Leaks", static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::temp_directory_path())) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("metal-sim-leak-")) << entry.path();
  }
}

/// Run in the process of IsRemovedAtExit.
TEST(TemporaryFolder, DISABLED_Leaks) {
  Result<TemporaryFolder> made = TemporaryFolder::Make("metal-sim-leak-");
  ASSERT_TRUE(made.ok());
  std::ofstream(made->path() / "file") << "text";
  static_cast<void>(new TemporaryFolder(*std::move(made)));
}

}  // namespace
}  // namespace metal_sim::temporary_folder_test
