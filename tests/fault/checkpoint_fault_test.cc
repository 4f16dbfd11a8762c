// Injects an error or a kill at every I/O call of quantizing and dequantizing: the target is then
// absent, or the old directory, or the new one, and never anything in between.
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
#include "checkpoint/convert/convert.h"
#include "checkpoint/files/io.h"
#include "marlin/checkpoint.h"

namespace marlin::checkpoint_fault_test {
namespace {

using testing::Contains;
using testing::TemporaryDirectory;

// Fails the n-th call, or kills the process there; counts from 0.
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
    testing::WriteFile(source_ + "/README.md", "---\nlicense: mit\n---\n");
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
    options_.recipe.Set(LayerClass::kEmbedding, FormatChoice());  // One tensor is copied.
    options_.model_card = true;
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
    if (!opened.ok()) return opened.status();
    if (opened->modules().size() != module_count_) {
      return Status(Code::kInternal, "modules: " + std::to_string(opened->modules().size()));
    }
    return opened->VerifyChecksums();
  }
  // Stops a resumable run at call n; returns the partial directory if one is left.
  std::string Interrupt(int64_t n) {
    options_.resume = true;
    FaultyIo io(n);
    (void)Quantize(io);
    for (const std::string& name : directory_.Entries()) {
      if (Contains(name, ".partial-")) return directory_ / name;
    }
    return {};
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
  size_t module_count_ = 2;
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
  module_count_ = 0;
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

// One file in place of a directory.
TEST_F(CheckpointFault, EveryCallOfExportFails) {
  testing::WriteFile(source_ + "/config.json",
                     R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 3,
                         "num_experts_per_tok": 2,
                         "vocab_size": 100, "intermediate_size": 64})");
  target_ += ".gguf";
  ConvertCheckpointOptions options;
  options.target = "gguf";
  for (const bool replaces : {false, true}) {
    options.overwrite = replaces;
    if (replaces) testing::WriteFile(target_, "old");
    int64_t n = 0;
    for (;; ++n) {
      SCOPED_TRACE(n);
      FaultyIo io(n);
      const Status status = ConvertCheckpointOn(io, source_, target_, options).status();
      EXPECT_TRUE(status.ok() || status.code() == Code::kIo) << status.message();
      const bool old = TargetExists() && testing::ReadFile(target_) == "old";
      EXPECT_TRUE(TargetExists() || (!replaces && !status.ok()));
      if (TargetExists() && !old) {
        EXPECT_TRUE(Checkpoint::Open(target_).ok());
      }
      EXPECT_FALSE(status.ok() && old);
      std::vector<std::string> names = {"source"};
      if (TargetExists()) names.push_back("target.gguf");
      EXPECT_EQ(directory_.Entries(), names);
      if (!io.hit()) break;
      std::filesystem::remove(target_);
      if (replaces) testing::WriteFile(target_, "old");
    }
    EXPECT_GT(n, 30);
    std::filesystem::remove(target_);
  }
}

TEST_F(CheckpointFault, EveryCallOfExportInShardsFails) {
  testing::WriteFile(source_ + "/config.json",
                     R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 3,
                         "num_experts_per_tok": 2,
                         "vocab_size": 100, "intermediate_size": 64})");
  ConvertCheckpointOptions options;
  options.target = "gguf";
  options.shard_bytes = 1;
  int64_t n = 0;
  for (;; ++n) {
    SCOPED_TRACE(n);
    FaultyIo io(n);
    const Status status = ConvertCheckpointOn(io, source_, target_, options).status();
    EXPECT_TRUE(status.ok() || status.code() == Code::kIo) << status.message();
    EXPECT_TRUE(TargetExists() || !status.ok());
    std::vector<std::string> names = {"source"};
    if (TargetExists()) names.push_back("target");
    EXPECT_EQ(directory_.Entries(), names);
    if (TargetExists()) {
      EXPECT_TRUE(Checkpoint::Open(target_).ok());
    }
    if (!io.hit()) break;
    std::filesystem::remove_all(target_);
  }
  EXPECT_GT(n, 40);
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
    // The next run, with or without --resume, completes and leaves no other files.
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

// A limit of the operating system instead of an injected error.
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
  // Counts the calls of a whole run, from which the interruption points are chosen.
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

TEST_F(CheckpointFault, ResumingDoesNotTrustADamagedShard) {
  int damaged = 0;
  for (int64_t n = 0; n < 100; ++n) {
    const std::string partial = Interrupt(n);
    if (!partial.empty()) {
      const std::string shard = partial + "/model-00001-of-00003.safetensors";
      std::string image = testing::ReadFile(shard);
      if (!image.empty()) {
        image.back() = static_cast<char>(image.back() ^ 1);
        testing::WriteFile(shard, image);
        testing::WriteFile(partial + "/stray.txt", "of an earlier run");
        ++damaged;
      }
      SystemIo system;
      const Status status = Quantize(system);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_FALSE(std::filesystem::exists(target_ + "/stray.txt"));
    }
    SCOPED_TRACE(n);
    const Status valid = TargetExists() ? CheckTarget() : Status();
    EXPECT_TRUE(valid.ok()) << valid.message();
    std::filesystem::remove_all(target_);
  }
  EXPECT_GT(damaged, 3);
}

TEST_F(CheckpointFault, TwoRunsDoNotShareAPartialDirectory) {
  std::string partial;
  for (int64_t n = 0; n < 100 && partial.empty(); ++n) {
    partial = Interrupt(n);
    std::filesystem::remove_all(target_);
  }
  ASSERT_FALSE(partial.empty());
  SystemIo io;
  {
    const Result<FileHandle> other = io.LockDirectory(partial);
    ASSERT_TRUE(other.ok()) << other.status().message();
    const Status refused = Quantize(io);
    EXPECT_EQ(refused.code(), Code::kIo);
    EXPECT_TRUE(Contains(refused.message(), "another process is writing it"));
    // A run with other parameters does not touch it, either.
    options_.shard_bytes = 5000;
    const Status parallel = Quantize(io);
    EXPECT_TRUE(parallel.ok()) << parallel.message();
    EXPECT_TRUE(std::filesystem::exists(partial));
  }
  std::filesystem::remove_all(target_);
  EXPECT_TRUE(Quantize(io).ok());
  EXPECT_FALSE(std::filesystem::exists(partial));
}

// Records every call in order.
class RecordingIo final : public Io {
 public:
  struct Entry {
    IoCall call;
    std::string path;
  };
  const std::vector<Entry>& entries() const { return entries_; }
  // Returns the index of the last call on a path, or -1.
  int64_t Last(IoCall call, const std::string& path) const {
    for (size_t i = entries_.size(); i-- > 0;) {
      if (entries_[i].call == call && entries_[i].path == path) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  int InjectedError(IoCall call, const std::string& path) override {
    entries_.push_back({call, path});
    return 0;
  }
  std::vector<Entry> entries_;
};

TEST_F(CheckpointFault, EverythingIsFlushedBeforeItGetsItsName) {
  RecordingIo io;
  ASSERT_TRUE(Quantize(io).ok());
  const int64_t renamed = io.Last(IoCall::kRename, target_);
  ASSERT_GE(renamed, 0);
  std::string partial;
  int files = 0;
  for (const RecordingIo::Entry& entry : io.entries()) {
    if (entry.call == IoCall::kMakeDirectory) partial = entry.path;
    if (entry.call != IoCall::kCreate) continue;
    ++files;
    const int64_t flushed = io.Last(IoCall::kSync, entry.path);
    EXPECT_GT(flushed, io.Last(IoCall::kWrite, entry.path)) << entry.path;
    EXPECT_LT(flushed, renamed) << entry.path;
    EXPECT_LT(flushed, io.Last(IoCall::kSync, partial)) << entry.path;
  }
  EXPECT_EQ(files, 7);  // Three shards, index, tokenizer.json, config.json, README.md.
  EXPECT_LT(io.Last(IoCall::kSync, partial), renamed);
  EXPECT_GT(io.Last(IoCall::kSync, directory_.path()), renamed);
}

}  // namespace
}  // namespace marlin::checkpoint_fault_test
