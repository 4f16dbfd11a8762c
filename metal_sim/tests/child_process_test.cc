#include "metal_sim/child_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace metal_sim::child_process_test {
namespace {

TEST(RunChild, CollectsBothOutputsAndTheExitCode) {
  const auto done = RunChild({"sh", "-c", "printf out; printf error >&2; exit 3"});
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_EQ(done->out, "out");
  EXPECT_EQ(done->error, "error");
  EXPECT_EQ(done->exit_code, 3);
}

TEST(RunChild, TakesMoreThanPipesHold) {
  // Each pipe would fill up unless both are read concurrently.
  const auto done = RunChild({"sh", "-c",
                              "i=0; while [ $i -lt 3000 ]; do printf '%0100d' 1; "
                              "printf '%0100d' 2 >&2; i=$((i + 1)); done"});
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_EQ(done->out.size(), 300000u);
  EXPECT_EQ(done->error.size(), 300000u);
}

TEST(RunChild, TellsSignalsFromExitCodes) {
  const auto done = RunChild({"sh", "-c", "kill -9 $$"});
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_EQ(done->exit_code, 128 + 9);
}

TEST(RunChild, NamesAProgramThatIsNotThere) {
  const auto done = RunChild({"no-such-program-anywhere"});
  ASSERT_FALSE(done.ok());
  EXPECT_EQ(done.status().code(), Code::kIo);
  EXPECT_THAT(done.status().message(), ::testing::HasSubstr("no-such-program-anywhere"));
}

TEST(RunChild, GivesAnEmptyInput) {
  const auto done = RunChild({"cat"});
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_EQ(done->out, "");
}

}  // namespace
}  // namespace metal_sim::child_process_test
