// Concurrent writers of one output: deterministic interleavings, and many processes at random. The
// output is never incomplete; a losing writer removes only its own files and reports an error.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "../unit/checkpoint/test_files.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/files/io.h"
#include "marlin/checkpoint.h"

namespace marlin::writers_fault_test {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::TemporaryDirectory;

// Calls a hook before every system call; the hook's result is the call's error.
class HookedIo final : public Io {
 public:
  using Hook = std::function<int(IoCall, const std::string&)>;
  explicit HookedIo(Hook hook) : hook_(std::move(hook)) {}

 private:
  int InjectedError(IoCall call, const std::string& path) override { return hook_(call, path); }
  Hook hook_;
};

class Writers : public ::testing::Test {
 protected:
  void SetUp() override {
    source_ = directory_ / "source";
    target_ = directory_ / "target";
    fs::create_directory(source_);
    std::vector<testing::TestTensor> tensors;
    tensors.push_back(testing::RandomBf16("model.embed_tokens.weight", {8, 64}, 1));
    for (uint32_t layer = 0; layer < 4; ++layer) {
      const std::string name = "model.layers." + std::to_string(layer) + ".self_attn.q_proj.weight";
      tensors.push_back(testing::RandomBf16(name, {32, 64}, layer));
    }
    testing::WriteFile(source_ + "/model.safetensors", testing::BuildSafetensors(tensors));
    testing::WriteFile(source_ + "/config.json", "{\"model_type\": \"qwen3_moe\"}");
    testing::WriteFile(source_ + "/tokenizer.json", "{}");
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
    options_.recipe.Set(LayerClass::kEmbedding, FormatChoice());  // One tensor is copied.
    options_.shard_bytes = 1200;
  }
  void TearDown() override { alarm(0); }

  Status Quantize(Io& io, const QuantizeCheckpointOptions& options) const {
    return QuantizeCheckpointOn(io, source_, target_, options).status();
  }
  Status Quantize(const QuantizeCheckpointOptions& options) const {
    SystemIo io;
    return Quantize(io, options);
  }
  // The same inputs with other parameters, hence another partial directory.
  QuantizeCheckpointOptions OtherOptions() const {
    QuantizeCheckpointOptions other = options_;
    other.shard_bytes = 2400;
    return other;
  }
  void ExpectComplete(const char* what) const {
    const Result<Checkpoint> opened = Checkpoint::Open(target_);
    ASSERT_TRUE(opened.ok()) << what << ": " << opened.status().message();
    EXPECT_EQ(opened->modules().size(), 4u) << what;
    const Status valid = opened->VerifyChecksums();
    EXPECT_TRUE(valid.ok()) << what << ": " << valid.message();
  }
  // Checks that the target is complete and that nothing else is in the directory.
  void ExpectOnlyTarget(const char* what) const {
    ExpectComplete(what);
    EXPECT_EQ(directory_.Entries(), (std::vector<std::string>{"source", "target"})) << what;
  }
  static void ExpectLost(const Status& status) {
    EXPECT_EQ(status.code(), Code::kIo) << status.message();
    EXPECT_TRUE(Contains(status.message(), "another process")) << status.message();
    EXPECT_FALSE(Contains(status.message(), "\n"));
  }
  std::string Partial() const {
    for (const std::string& name : directory_.Entries()) {
      if (Contains(name, ".partial-")) return directory_ / name;
    }
    return {};
  }
  // A run with --resume that fails before its second shard; returns its partial directory.
  std::string Interrupt(QuantizeCheckpointOptions options) const {
    options.resume = true;
    int shards = 0;
    HookedIo io([&shards](IoCall call, const std::string& path) {
      return call == IoCall::kCreate && path.ends_with(".safetensors") && ++shards == 2 ? EIO : 0;
    });
    EXPECT_EQ(Quantize(io, options).code(), Code::kIo);
    return Partial();
  }

  TemporaryDirectory directory_{testing::MemoryDirectory()};
  std::string source_;
  std::string target_;
  QuantizeCheckpointOptions options_;
};

// Writer B in its own thread, blocked before its second shard until Finish.
class StoppedWriter {
 public:
  explicit StoppedWriter(std::function<Status(Io&)> run)
      : io_([this](IoCall call, const std::string& path) { return Hook(call, path); }),
        done_(std::async(std::launch::async, [this, run = std::move(run)] { return run(io_); })) {
    stopped_.get_future().wait();
  }
  Status Finish() {
    go_on_.set_value();
    return done_.get();
  }

 private:
  int Hook(IoCall call, const std::string& path) {
    if (call != IoCall::kCreate || !path.ends_with(".safetensors") || ++shards_ != 2) return 0;
    stopped_.set_value();
    go_on_.get_future().wait();
    return 0;
  }
  int shards_ = 0;
  std::promise<void> stopped_;
  std::promise<void> go_on_;
  HookedIo io_;
  std::future<Status> done_;
};

// A creates the partial directory; B locks it first and writes; A fails and must not touch it.
TEST_F(Writers, WhoCreatesTheDirectoryNeedNotGetIt) {
  for (const bool overwrite : {false, true}) {
    options_.overwrite = overwrite;
    ASSERT_EQ(fs::exists(target_), overwrite);
    std::unique_ptr<StoppedWriter> b;
    HookedIo io([&](IoCall call, const std::string& path) {
      if (call == IoCall::kLock && !b && Contains(path, ".partial-")) {
        b = std::make_unique<StoppedWriter>(
            [this](Io& other) { return Quantize(other, options_); });
      }
      return 0;
    });
    ExpectLost(Quantize(io, options_));
    ASSERT_TRUE(b);
    EXPECT_FALSE(Partial().empty());
    const Status second = b->Finish();
    EXPECT_TRUE(second.ok()) << second.message();
    ExpectOnlyTarget("the second writer's");
  }
}

// B commits the partial directory after A has opened it: A then locks B's output.
TEST_F(Writers, ALockedDirectoryMayHaveBeenCommitted) {
  for (const bool overwrite : {false, true}) {
    fs::remove_all(target_);
    options_.overwrite = overwrite;
    bool met = false;
    HookedIo io([&](IoCall call, const std::string& path) {
      if (call == IoCall::kLock && !met && Contains(path, ".partial-")) {
        met = true;
        const Status other = Quantize(options_);
        EXPECT_TRUE(other.ok()) << other.message();
      }
      return 0;
    });
    const Status first = Quantize(io, options_);
    EXPECT_TRUE(met);
    EXPECT_EQ(first.ok(), overwrite) << first.message();
    EXPECT_TRUE(overwrite || Contains(first.message(), "exists already")) << first.message();
    ExpectOnlyTarget("either's");
  }
}

// The same for a leftover that A tries to remove and B resumes.
TEST_F(Writers, ALeftoverThatIsResumedIsNotRemoved) {
  const std::string left = Interrupt(options_);
  ASSERT_FALSE(left.empty());
  QuantizeCheckpointOptions resume = options_;
  resume.resume = true;
  bool met = false;
  HookedIo io([&](IoCall call, const std::string& path) {
    if (call == IoCall::kLock && !met && path == left) {
      met = true;
      const Status other = Quantize(resume);
      EXPECT_TRUE(other.ok()) << other.message();
      ExpectComplete("the resumed run's");
    }
    return 0;
  });
  QuantizeCheckpointOptions other = OtherOptions();
  ExpectLost(Quantize(io, other));
  EXPECT_TRUE(met);
  ExpectOnlyTarget("the resumed run's");
}

TEST_F(Writers, ALeftoverThatIsBeingResumedIsLeftAlone) {
  const std::string left = Interrupt(options_);
  QuantizeCheckpointOptions resume = options_;
  resume.resume = true;
  // The first shard is already present.
  std::promise<void> stopped;
  std::promise<void> go_on;
  HookedIo slow([&, waited = false](IoCall call, const std::string&) mutable {
    if (call == IoCall::kCreate && !waited) {
      waited = true;
      stopped.set_value();
      go_on.get_future().wait();
    }
    return 0;
  });
  std::future<Status> b = std::async(std::launch::async, [&] { return Quantize(slow, resume); });
  stopped.get_future().wait();
  ExpectLost(Quantize(resume));
  ExpectLost(Quantize(options_));
  EXPECT_TRUE(fs::exists(left + "/model-00001-of-00005.safetensors"));
  const Status parallel = Quantize(OtherOptions());
  EXPECT_TRUE(parallel.ok()) << parallel.message();
  go_on.set_value();
  ExpectLost(b.get());  // The target has been created in the meantime.
  ExpectComplete("the parallel run's");
  fs::remove_all(target_);
  const Status again = Quantize(resume);
  EXPECT_TRUE(again.ok()) << again.message();
  ExpectOnlyTarget("the resumed run's");
}

// After the swap the partial name refers to the old output until it is removed.
TEST_F(Writers, WhatWasReplacedIsNotTakenForALeftover) {
  ASSERT_TRUE(Quantize(options_).ok());
  options_.overwrite = true;
  for (const IoCall when : {IoCall::kExchange, IoCall::kSync, IoCall::kRemove}) {
    bool exchanged = false;
    bool met = false;
    HookedIo io([&](IoCall call, const std::string&) {
      exchanged = exchanged || call == IoCall::kExchange;
      if (exchanged && !met && call == when) {
        met = true;
        ExpectLost(Quantize(options_));
      }
      return 0;
    });
    const Status first = Quantize(io, options_);
    EXPECT_TRUE(first.ok()) << first.message();
    EXPECT_TRUE(met);
    ExpectOnlyTarget("the first writer's");
  }
}

TEST_F(Writers, TwoThatReplaceAtOnceBothLeaveAWholeOutput) {
  ASSERT_TRUE(Quantize(options_).ok());
  options_.overwrite = true;
  QuantizeCheckpointOptions other = OtherOptions();
  for (const IoCall when : {IoCall::kExchange, IoCall::kRemove, IoCall::kCreate}) {
    bool met = false;
    Status second;
    HookedIo io([&](IoCall call, const std::string&) {
      if (!met && call == when) {
        met = true;
        second = Quantize(other);
      }
      return 0;
    });
    const Status first = Quantize(io, options_);
    EXPECT_TRUE(first.ok()) << first.message();
    if (!second.ok()) ExpectLost(second);
    ExpectOnlyTarget("one of both");
  }
}

// Changes by processes that take no locks (a user, an older version) are detected before the
// commit.
TEST_F(Writers, WhatIsNoLongerThereIsNotCommitted) {
  ASSERT_TRUE(Quantize(options_).ok());
  const std::string old_config = testing::ReadFile(target_ + "/config.json");
  options_.overwrite = true;
  options_.method = QuantizeMethod::kMse;
  const std::string shard = "/model-00002-of-00005.safetensors";
  const std::string aside = directory_ / "aside";
  const std::map<std::string, std::function<void(const std::string&)>> harms = {
      {"was removed after", [&](const std::string& partial) { fs::remove(partial + shard); }},
      {"was replaced after",
       [&](const std::string& partial) {
         fs::copy_file(partial + shard, aside);
         fs::resize_file(aside, 100);
         fs::rename(aside, partial + shard);
       }},
      {"was not written by this run",
       [&](const std::string& partial) { testing::WriteFile(partial + "/model.safetensors", ""); }},
      {"was replaced while it was written", [&](const std::string& partial) {
         fs::rename(partial, aside);
         fs::create_directory(partial);
         testing::WriteFile(partial + "/precious", "x");
       }}};
  for (const auto& [message, harm] : harms) {
    std::string partial;
    bool done = false;
    HookedIo io([&, &harm = harm](IoCall call, const std::string& path) {
      if (call == IoCall::kSync && path.ends_with("/config.json")) {
        partial = path.substr(0, path.rfind('/'));
      }
      if (!done && !partial.empty() && call == IoCall::kSync && path == partial) {
        done = true;
        harm(partial);
      }
      return 0;
    });
    const Status status = Quantize(io, options_);
    EXPECT_EQ(status.code(), Code::kIo) << message;
    EXPECT_TRUE(Contains(status.message(), message)) << status.message();
    ExpectComplete("the old output");
    EXPECT_EQ(testing::ReadFile(target_ + "/config.json"), old_config);
    if (!fs::exists(partial)) continue;
    // The directory that another process created must not be removed.
    EXPECT_EQ(testing::ReadFile(partial + "/precious"), "x");
    fs::remove_all(partial);
    fs::remove_all(aside);
  }
}

TEST_F(Writers, ATargetThatAppearsMeanwhileIsNotReplaced) {
  for (const bool overwrite : {false, true}) {
    options_.overwrite = overwrite;
    bool met = false;
    HookedIo io([&](IoCall call, const std::string&) {
      if (call == IoCall::kCreate && !met) {
        met = true;
        fs::create_directories(target_ + "/sub");
        testing::WriteFile(target_ + "/sub/precious", "x");
      }
      return 0;
    });
    const Status status = Quantize(io, options_);
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(Contains(status.message(),
                         overwrite ? "holds the directory sub" : "another process has created it"))
        << status.message();
    EXPECT_EQ(testing::ReadFile(target_ + "/sub/precious"), "x");
    EXPECT_TRUE(Partial().empty());
    fs::remove_all(target_);
  }
}

// File systems without an atomic swap: killed at every call, no data is lost.
TEST_F(Writers, SwappingByThreeRenamesLosesNothing) {
  ASSERT_TRUE(Quantize(options_).ok());
  QuantizeCheckpointOptions overwrite = options_;
  overwrite.overwrite = true;
  int restored = 0;
  bool killed = true;
  for (int n = 0; killed; ++n) {
    const pid_t child = fork();
    if (child == 0) {
      int calls = 0;
      HookedIo io([&](IoCall call, const std::string&) {
        if (calls++ == n) raise(SIGKILL);
        return call == IoCall::kExchange ? ENOSYS : 0;
      });
      _exit(Quantize(io, overwrite).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    killed = WIFSIGNALED(status);
    EXPECT_TRUE(killed || WEXITSTATUS(status) == 0);
    SCOPED_TRACE(n);
    if (!fs::exists(target_)) ++restored;
    // A run without --overwrite finds the target in place again.
    const Status refused = Quantize(options_);
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_TRUE(Contains(refused.message(), "exists already")) << refused.message();
    ExpectComplete("old or new");
    const Status again = Quantize(overwrite);
    ASSERT_TRUE(again.ok()) << again.message();
    ExpectOnlyTarget("the next run's");
  }
  EXPECT_GE(restored, 1);
}

// Anything at the path of a leftover's shard is neither waited for nor written through.
TEST_F(Writers, ResumingReplacesWhatIsNoFile) {
  alarm(60);  // Bounds a wait for a pipe.
  const std::string precious = directory_ / "precious";
  const std::map<std::string, std::function<void(const std::string&)>> kinds = {
      {"pipe", [](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); }},
      {"directory", [](const std::string& path) { fs::create_directories(path + "/sub"); }},
      {"link", [&](const std::string& path) { fs::create_symlink(precious, path); }},
      {"link to nothing", [](const std::string& path) { fs::create_symlink("gone", path); }},
      {"link to a device", [](const std::string& path) { fs::create_symlink("/dev/zero", path); }},
      {"hard link",
       [&](const std::string& path) {
         testing::WriteFile(directory_ / "other", "precious");
         fs::create_hard_link(directory_ / "other", path);
       }},
  };
  options_.resume = true;
  for (const auto& [kind, put] : kinds) {
    SCOPED_TRACE(kind);
    testing::WriteFile(precious, "precious");
    for (const char* shard : {"/model-00001-of-00005.safetensors",
                              "/model-00003-of-00005.safetensors", "/config.json"}) {
      const std::string left = Interrupt(options_);
      ASSERT_FALSE(left.empty());
      fs::remove(left + shard);
      put(left + shard);
      const Status status = Quantize(options_);
      ASSERT_TRUE(status.ok()) << status.message();
      ExpectComplete("the resumed run's");
      EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(target_ + shard)));
      EXPECT_EQ(testing::ReadFile(precious), "precious");
      fs::remove_all(target_);
      if (!fs::exists(directory_ / "other")) continue;
      EXPECT_EQ(testing::ReadFile(directory_ / "other"), "precious");
      fs::remove(directory_ / "other");
    }
    fs::remove(precious);
  }
}

// Processes with equal and different parameters, with resuming, replacing and kills. After every
// round the target is complete, and it exists if any process reported success.
TEST_F(Writers, ManyAtRandom) {
  const char* wanted = std::getenv("MARLIN_WRITER_ROUNDS");
  const int rounds = wanted != nullptr ? std::atoi(wanted) : 30;
  std::mt19937 random(11);
  const auto pick = [&random](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    const bool had_target = fs::exists(target_);
    std::vector<pid_t> children;
    for (int i = 0; i < 4; ++i) {
      QuantizeCheckpointOptions options = pick(2) == 0 ? options_ : OtherOptions();
      options.overwrite = had_target || pick(2) == 0;
      options.resume = pick(2) == 0;
      const int delay_us = pick(3000);
      const pid_t child = fork();
      if (child == 0) {
        usleep(static_cast<useconds_t>(delay_us));
        const Status status = Quantize(options);
        if (status.ok()) _exit(0);
        const bool clear = Contains(status.message(), "another process") ||
                           Contains(status.message(), "exists already") ||
                           Contains(status.message(), "File exists");
        if (!clear) fprintf(stderr, "unclear: %s\n", status.message().c_str());
        _exit(clear ? 1 : 2);
      }
      children.push_back(child);
    }
    if (pick(3) == 0) {
      usleep(static_cast<useconds_t>(pick(6000)));
      kill(children[0], SIGKILL);
    }
    bool succeeded = false;
    for (const pid_t child : children) {
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      if (WIFEXITED(status)) {
        EXPECT_NE(WEXITSTATUS(status), 2);
        succeeded = succeeded || WEXITSTATUS(status) == 0;
      }
    }
    EXPECT_TRUE(!(succeeded || had_target) || fs::exists(target_));
    if (fs::exists(target_)) ExpectComplete("somebody's");
    if (pick(3) == 0) fs::remove_all(target_);
  }
  options_.overwrite = true;
  const Status last = Quantize(options_);
  ASSERT_TRUE(last.ok()) << last.message();
  ExpectOnlyTarget("the last run's");
}

}  // namespace
}  // namespace marlin::writers_fault_test
