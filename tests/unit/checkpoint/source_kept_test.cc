// --overwrite never removes the source, under any path that leads to it.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::source_kept_test {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::WriteFile;

class SourceKept : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
    options_.overwrite = true;
    image_ = testing::BuildSafetensors({testing::RandomBf16("a.q_proj.weight", {8, 32}, 1)});
    MakeModel("model");
  }
  void MakeModel(const std::string& name) const {
    fs::create_directories(directory_ / name);
    WriteFile(directory_ / (name + "/model.safetensors"), image_);
    WriteFile(directory_ / (name + "/config.json"), "{}");
    WriteFile(directory_ / (name + "/tokenizer.json"), R"({"a": 1})");
  }
  Status Quantize(const std::string& source, const std::string& output) const {
    return QuantizeCheckpoint(directory_ / source, directory_ / output, options_).status();
  }
  void ExpectKept(const std::string& source, const std::string& output) const {
    SCOPED_TRACE(source + " -> " + output);
    for (const bool overwrite : {true, false}) {
      QuantizeCheckpointOptions options = options_;
      options.overwrite = overwrite;
      const auto report = QuantizeCheckpoint(directory_ / source, directory_ / output, options);
      EXPECT_EQ(report.status().code(), Code::kInvalidArgument) << report.status().message();
      EXPECT_TRUE(Contains(report.status().message(), "would replace the source"))
          << report.status().message();
    }
    EXPECT_EQ(ReadFile(directory_ / "model/model.safetensors"), image_);
    EXPECT_EQ(ReadFile(directory_ / "model/tokenizer.json"), R"({"a": 1})");
  }

  TemporaryDirectory directory_;
  QuantizeCheckpointOptions options_;
  std::string image_;
};

TEST_F(SourceKept, ReachedByItsName) {
  ExpectKept("model", "model");
  ExpectKept("model", "model/");
  ExpectKept("model", "../" + fs::path(directory_.path()).filename().string() + "/model");
  ExpectKept("model/model.safetensors", "model");
}

TEST_F(SourceKept, ReachedByALink) {
  fs::create_symlink("model", directory_ / "link");
  fs::create_symlink("link", directory_ / "second");
  fs::create_symlink("model/model.safetensors", directory_ / "other.safetensors");
  ExpectKept("link", "model");
  ExpectKept("second", "model");
  ExpectKept("model", "link");
  ExpectKept("link", "second");
  ExpectKept("other.safetensors", "model");
  // The file is elsewhere; its name in the target would be lost.
  MakeModel("third");
  fs::create_symlink("../model/model.safetensors", directory_ / "third/x.safetensors");
  ExpectKept("third/x.safetensors", "third");
  ExpectKept("model", "third");
}

TEST_F(SourceKept, ReachedByAHardLink) {
  for (const char* file : {"model.safetensors", "config.json", "tokenizer.json"}) {
    fs::remove_all(directory_ / "view");
    MakeModel("view");
    fs::remove(directory_ / (std::string("view/") + file));
    fs::create_hard_link(directory_ / (std::string("model/") + file),
                         directory_ / (std::string("view/") + file));
    ExpectKept("view", "model");
    ExpectKept("model", "view");
  }
  fs::create_hard_link(directory_ / "model/model.safetensors", directory_ / "one.safetensors");
  ExpectKept("one.safetensors", "model");
}

TEST_F(SourceKept, InTheCacheOfHuggingFace) {
  const std::string cache = "models--org--name";
  fs::create_directories(directory_ / (cache + "/snapshots/abc"));
  fs::rename(directory_ / "model", directory_ / (cache + "/blobs"));
  for (const char* file : {"model.safetensors", "config.json"}) {
    fs::create_symlink(std::string("../../blobs/") + file,
                       directory_ / (cache + "/snapshots/abc/" + file));
  }
  fs::create_symlink(cache + "/blobs", directory_ / "model");
  ExpectKept(cache + "/snapshots/abc", cache + "/blobs");
  ExpectKept(cache + "/snapshots/abc", cache + "/snapshots/abc");
}

TEST_F(SourceKept, WhenItIsALeftoverOfTheOutput) {
  const std::string leftover = ".out.partial-0123456789abcdef";
  MakeModel(leftover);
  const Status status = Quantize(leftover, "out");
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(ReadFile(directory_ / (leftover + "/model.safetensors")), image_);
  // The next run for another source removes it as usual.
  EXPECT_TRUE(Quantize("model", "out").ok());
  EXPECT_FALSE(fs::exists(directory_ / leftover));
}

TEST_F(SourceKept, OfDequantize) {
  ASSERT_TRUE(Quantize("model", "quantized").ok());
  const std::string config = ReadFile(directory_ / "quantized/config.json");
  fs::create_symlink("quantized", directory_ / "link");
  MakeModel("other");
  fs::remove(directory_ / "other/config.json");
  fs::create_hard_link(directory_ / "quantized/config.json", directory_ / "other/config.json");
  for (const char* output : {"quantized", "link", "other"}) {
    const Status status = DequantizeCheckpoint(directory_ / "quantized", directory_ / output,
                                               DType::kBf16, /*overwrite=*/true);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
    EXPECT_TRUE(Contains(status.message(), "would replace the source")) << status.message();
  }
  EXPECT_EQ(ReadFile(directory_ / "quantized/config.json"), config);
  EXPECT_TRUE(Checkpoint::Open(directory_ / "quantized").ok());
}

TEST_F(SourceKept, OtherOutputsAreReplaced) {
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Quantize("model", "out").ok());
    // Also inside the source, where none of its files is lost.
    EXPECT_TRUE(Quantize("model", "model/out").ok());
  }
  fs::create_symlink("circle", directory_ / "model/circle");
  EXPECT_TRUE(Quantize("model", "out").ok());
}

TEST_F(SourceKept, APathWithANulIsRefused) {
  MakeModel(".config");
  const std::string output = directory_ / std::string("config\0b", 8);
  const auto report = QuantizeCheckpoint(directory_ / "model", output, options_);
  EXPECT_EQ(report.status().code(), Code::kInvalidArgument) << report.status().message();
  EXPECT_TRUE(Contains(report.status().message(), "ends at a NUL"));
  EXPECT_EQ(ReadFile(directory_ / ".config/model.safetensors"), image_);
}

}  // namespace
}  // namespace marlin::source_kept_test
