// Every I/O call of quantizing and dequantizing made to fail, and the process killed at every one:
// the target is absent, or the old directory, or the new one, and never anything between.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "../unit/checkpoint/test_files.h"
#include "checkpoint/convert.h"
#include "checkpoint/io.h"
#include "marlin/checkpoint.h"

namespace marlin {
namespace {

using testing::Contains;
using testing::TemporaryDirectory;

// Fails, or kills the process, at the n-th call; counts from 0.
class FaultyIo final : public Io {
 public:
  explicit FaultyIo(int64_t at, int error = EIO, bool kill = false)
      : at_(at), error_(error), kill_(kill) {}
  bool hit() const { return hit_; }
  int64_t calls() const { return calls_; }
  IoCall call() const { return call_; }

 private:
  int InjectedError(IoCall call, const std::string& /*path*/) override {
    if (calls_++ != at_) return 0;
    if (kill_) raise(SIGKILL);
    hit_ = true;
    call_ = call;
    return error_;
  }
  int64_t at_;
  int error_;
  bool kill_;
  bool hit_ = false;
  int64_t calls_ = 0;
  IoCall call_ = IoCall::kStat;
};

class CheckpointFault : public ::testing::Test {
 protected:
  void SetUp() override {
    source_ = directory_ / "source";
    target_ = directory_ / "target";
    std::filesystem::create_directory(source_);
    std::vector<testing::TestTensor> tensors;
    tensors.push_back(testing::RandomBf16("model.embed_tokens.weight", {8, 64}, 1));
    tensors.push_back(testing::RandomBf16("model.layers.0.self_attn.q_proj.weight", {32, 64}, 2));
    for (uint32_t e = 0; e < 3; ++e) {
      tensors.push_back(testing::RandomBf16(
          "model.layers.0.mlp.experts." + std::to_string(e) + ".up_proj.weight", {16, 64}, e));
    }
    testing::WriteFile(source_ + "/model.safetensors", testing::BuildSafetensors(tensors));
    testing::WriteFile(source_ + "/config.json", "{\"model_type\": \"qwen3_moe\"}");
    testing::WriteFile(source_ + "/tokenizer.json", "{}");
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
    options_.shard_bytes = 1200;
  }

  Status Quantize(Io& io) const {
    return QuantizeCheckpointOn(io, source_, target_, options_).status();
  }
  Status Dequantize(Io& io, const std::string& from) const {
    return DequantizeCheckpointOn(io, from, target_, DType::kBf16, options_.overwrite, 3000, {});
  }
  bool TargetExists() const { return std::filesystem::exists(target_); }
  Status CheckTarget() const {
    const Result<Checkpoint> opened = Checkpoint::Open(target_);
    return opened.ok() ? opened->VerifyChecksums() : opened.status();
  }
  std::vector<std::string> Expected(bool with_target) const {
    std::vector<std::string> names = {"source"};
    if (with_target) names.push_back("target");
    return names;
  }
  void ExpectCleanOrComplete(const Status& status) const {
    if (!status.ok()) {
      EXPECT_EQ(status.code(), Code::kIo) << status.message();
      EXPECT_TRUE(Contains(status.message(), directory_.path())) << status.message();
      EXPECT_FALSE(Contains(status.message(), "\n"));
    } else {
      EXPECT_TRUE(TargetExists());
    }
    if (TargetExists()) {
      const Status valid = CheckTarget();
      EXPECT_TRUE(valid.ok()) << valid.message();
    }
    EXPECT_EQ(directory_.Entries(), Expected(TargetExists()));
  }
  // Runs `body` in a child process; returns whether it was killed.
  template <typename Body>
  bool RunInChild(const Body& body) const {
    const pid_t child = fork();
    if (child == 0) {
      body();
      _exit(0);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(!WIFSIGNALED(status) || WTERMSIG(status) == SIGKILL);
    return WIFSIGNALED(status);
  }

  TemporaryDirectory directory_{testing::MemoryDirectory()};
  std::string source_;
  std::string target_;
  QuantizeCheckpointOptions options_;
};

TEST_F(CheckpointFault, EveryCallOfQuantizeFails) {
  int64_t n = 0;
  for (;; ++n) {
    FaultyIo io(n, n % 2 == 0 ? ENOSPC : EIO);
    const Status status = Quantize(io);
    SCOPED_TRACE(n);
    ExpectCleanOrComplete(status);
    if (!io.hit()) {
      EXPECT_TRUE(status.ok()) << status.message();
      break;
    }
    std::filesystem::remove_all(target_);
  }
  EXPECT_GT(n, 50);
}

TEST_F(CheckpointFault, EveryCallOfDequantizeFails) {
  SystemIo system;
  ASSERT_TRUE(Quantize(system).ok());
  const std::string quantized = directory_ / "source/quantized";
  std::filesystem::rename(target_, quantized);
  int64_t n = 0;
  for (;; ++n) {
    FaultyIo io(n);
    const Status status = Dequantize(io, quantized);
    SCOPED_TRACE(n);
    ExpectCleanOrComplete(status);
    if (!io.hit()) {
      EXPECT_TRUE(status.ok()) << status.message();
      break;
    }
    std::filesystem::remove_all(target_);
  }
  EXPECT_GT(n, 40);
}

TEST_F(CheckpointFault, OverwritingNeverLosesTheOldContent) {
  SystemIo system;
  ASSERT_TRUE(Quantize(system).ok());
  options_.overwrite = true;
  for (int64_t n = 0;; ++n) {
    FaultyIo io(n);
    const Status status = Quantize(io);
    SCOPED_TRACE(n);
    ASSERT_TRUE(TargetExists());
    ExpectCleanOrComplete(status);
    if (!io.hit()) break;
  }
}

TEST_F(CheckpointFault, EveryCallOfOpenFails) {
  SystemIo system;
  ASSERT_TRUE(Quantize(system).ok());
  for (int64_t n = 0;; ++n) {
    FaultyIo io(n);
    const Result<QuantizeCheckpointReport> planned = [&] {
      QuantizeCheckpointOptions dry = options_;
      dry.dry_run = true;
      return QuantizeCheckpointOn(io, source_, target_, dry);
    }();
    if (!io.hit()) break;
    ASSERT_FALSE(planned.ok()) << n;
    EXPECT_EQ(planned.status().code(), Code::kIo) << planned.status().message();
  }
}

TEST_F(CheckpointFault, KilledAtEveryCall) {
  SystemIo system;
  bool killed = true;
  for (int64_t n = 0; killed; ++n) {
    killed = RunInChild([&] {
      FaultyIo io(n, 0, /*kill=*/true);
      (void)Quantize(io);
    });
    SCOPED_TRACE(n);
    if (TargetExists()) {
      const Status valid = CheckTarget();
      ASSERT_TRUE(valid.ok()) << valid.message();
      std::filesystem::remove_all(target_);
    }
    // The next run, resuming or not, finishes and leaves nothing else behind.
    options_.resume = n % 2 == 0;
    const Status again = Quantize(system);
    ASSERT_TRUE(again.ok()) << again.message();
    ExpectCleanOrComplete(again);
    std::filesystem::remove_all(target_);
    options_.resume = false;
  }
}

TEST_F(CheckpointFault, KilledAtEveryCallOfOverwriting) {
  SystemIo system;
  ASSERT_TRUE(Quantize(system).ok());
  options_.overwrite = true;
  bool killed = true;
  for (int64_t n = 0; killed; ++n) {
    killed = RunInChild([&] {
      FaultyIo io(n, 0, /*kill=*/true);
      (void)Quantize(io);
    });
    SCOPED_TRACE(n);
    ASSERT_TRUE(TargetExists());
    const Status valid = CheckTarget();
    ASSERT_TRUE(valid.ok()) << valid.message();
    const Status again = Quantize(system);
    ASSERT_TRUE(again.ok()) << again.message();
    ExpectCleanOrComplete(again);
  }
}

// 50 random moments; MARLIN_KILLS=1000 for more.
TEST_F(CheckpointFault, KilledAtRandomMoments) {
  const char* wanted = std::getenv("MARLIN_KILLS");
  const int rounds = wanted != nullptr ? std::atoi(wanted) : 50;
  std::mt19937 random(7);
  std::uniform_int_distribution<int> delay_us(0, 20000);
  for (int round = 0; round < rounds; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      SystemIo io;
      (void)Quantize(io);
      _exit(0);
    }
    usleep(static_cast<useconds_t>(delay_us(random)));
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (!TargetExists()) continue;
    const Status valid = CheckTarget();
    ASSERT_TRUE(valid.ok()) << "round " << round << ": " << valid.message();
    std::filesystem::remove_all(target_);
  }
  SystemIo io;
  const Status last = Quantize(io);
  ASSERT_TRUE(last.ok()) << last.message();
  ExpectCleanOrComplete(last);
}

// A limit of the operating system itself instead of an injected error.
TEST_F(CheckpointFault, FileSizeLimit) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(3);
    SystemIo io;
    const Status status = Quantize(io);
    const bool right = status.code() == Code::kIo && Contains(status.message(), "cannot write");
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(directory_.Entries(), Expected(false));
}

TEST_F(CheckpointFault, ResumingKeepsFinishedShards) {
  options_.resume = true;
  SystemIo system;
  // As many calls as a whole run makes, from which the interruptions are chosen.
  FaultyIo count(-1);
  ASSERT_TRUE(Quantize(count).ok());
  std::filesystem::remove_all(target_);
  int resumed = 0;
  for (int64_t n = 0; n < count.calls(); ++n) {
    FaultyIo io(n);
    if (Quantize(io).ok()) {
      std::filesystem::remove_all(target_);
      continue;
    }
    SCOPED_TRACE(n);
    EXPECT_FALSE(TargetExists() && !CheckTarget().ok());
    std::filesystem::remove_all(target_);
    FaultyIo again(-1);
    const Status status = Quantize(again);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(CheckTarget().ok());
    EXPECT_EQ(directory_.Entries(), Expected(true));
    if (again.calls() < count.calls()) ++resumed;
    std::filesystem::remove_all(target_);
  }
  EXPECT_GT(resumed, 0);
}

}  // namespace
}  // namespace marlin
