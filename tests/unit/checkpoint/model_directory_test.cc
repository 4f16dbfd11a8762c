// Links in a model's directory: allowed inside it and inside the Hugging Face cache, nowhere else.
#include "checkpoint/files/model_directory.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::model_directory_test {
namespace {

namespace fs = std::filesystem;
using testing::BuildSafetensors;
using testing::Contains;
using testing::RandomBf16;
using testing::TemporaryDirectory;
using testing::WriteFile;

class ModelDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(directory_ / "model");
    WriteFile(directory_ / "secret", "secret");
    image_ = BuildSafetensors({RandomBf16("a.q_proj.weight", {8, 32}, 1)});
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
  }
  void Link(const std::string& to, const std::string& name) const {
    fs::create_symlink(to, directory_ / name);
  }
  Status Check(const std::string& name, const std::string& in = "model") {
    return CheckModelFile(io_, directory_ / in, name);
  }
  Status Quantize(const std::string& source) const {
    return QuantizeCheckpoint(directory_ / source, directory_ / "out", options_).status();
  }
  void ExpectRefused(const Status& status, const std::string& link, const std::string& target) {
    EXPECT_EQ(status.code(), Code::kUnsupported) << status.message();
    EXPECT_TRUE(Contains(status.message(), link)) << status.message();
    EXPECT_TRUE(Contains(status.message(), target)) << status.message();
    EXPECT_FALSE(Contains(status.message(), "\n"));
    EXPECT_FALSE(fs::exists(directory_ / "out"));
  }

  TemporaryDirectory directory_;
  SystemIo io_;
  std::string image_;
  QuantizeCheckpointOptions options_;
};

TEST_F(ModelDirectory, LinksWithinTheDirectoryAreFollowed) {
  WriteFile(directory_ / "model/weights", image_);
  fs::create_directory(directory_ / "model/files");
  WriteFile(directory_ / "model/files/config", "{}");
  Link("weights", "model/model.safetensors");
  Link(directory_ / "model/files/config", "model/config.json");
  Link("../model/weights", "model/again.safetensors");
  Link("model", "link");
  for (const char* in : {"model", "link"}) {
    for (const char* name : {"model.safetensors", "config.json", "again.safetensors", "weights",
                             "nothing of this name"}) {
      const Status status = Check(name, in);
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
  EXPECT_TRUE(Quantize("link").ok());
}

TEST_F(ModelDirectory, LinksThatLeadOutsideAreRefused) {
  fs::create_directory(directory_ / "model-2");
  WriteFile(directory_ / "model-2/x", "beside, with a name that begins alike");
  Link("../secret", "model/a");
  Link("a", "model/b");
  Link("../model-2/x", "model/c");
  Link("/dev/null", "model/d");
  Link("..", "model/e");
  Link(".", "model/f");
  ExpectRefused(Check("a"), "model/a", "/secret");
  ExpectRefused(Check("b"), "model/b", "/secret");
  ExpectRefused(Check("c"), "model/c", "/model-2/x");
  ExpectRefused(Check("d"), "model/d", "/dev/null");
  ExpectRefused(Check("e"), "model/e", "outside");
  ExpectRefused(Check("f"), "model/f", "outside");
}

TEST_F(ModelDirectory, LinksToNothingAreNamed) {
  Link("../gone", "model/a");
  const Status status = Check("a");
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_TRUE(Contains(status.message(), "model/a: is a link to ../gone, which does not exist"))
      << status.message();
  Link("b", "model/b");
  EXPECT_EQ(Check("b").code(), Code::kIo);
}

TEST_F(ModelDirectory, TheCacheOfHuggingFaceMayLinkToItsBlobs) {
  const std::string model = "models--org--name";
  for (const char* folder : {"/blobs", "/snapshots/abc", "/snapshots/abc/sub", "/refs"}) {
    fs::create_directories(directory_ / (model + folder));
  }
  WriteFile(directory_ / (model + "/blobs/01"), image_);
  WriteFile(directory_ / (model + "/blobs/02"), "{}");
  WriteFile(directory_ / (model + "/refs/main"), "abc");
  const std::string snapshot = model + "/snapshots/abc";
  Link("../../blobs/01", snapshot + "/model.safetensors");
  Link("../../blobs/02", snapshot + "/config.json");
  Link("../../blobs/02", snapshot + "/tokenizer.json");
  Link("../../../blobs/02", snapshot + "/sub/config.json");
  EXPECT_TRUE(Check("config.json", snapshot + "/sub").ok());
  Link(directory_ / snapshot, "named");
  const Status status = Quantize("named");
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(Checkpoint::Open(directory_ / "out").ok());
  fs::remove_all(directory_ / "out");
  // To another place in the cache, and through a blob that is itself a link.
  Link("../../refs/main", snapshot + "/LICENSE");
  ExpectRefused(Quantize(snapshot), "LICENSE", "/refs/main");
  fs::remove(directory_ / (snapshot + "/LICENSE"));
  Link("../../secret", model + "/blobs/03");
  Link("../../blobs/03", snapshot + "/NOTICE");
  ExpectRefused(Quantize(snapshot), "NOTICE", "/secret");
  // The cache's layout without a model's name grants no access.
  fs::create_directories(directory_ / "other/snapshots/abc");
  fs::create_directories(directory_ / "other/blobs");
  WriteFile(directory_ / "other/blobs/01", image_);
  Link("../../blobs/01", "other/snapshots/abc/model.safetensors");
  ExpectRefused(Quantize("other/snapshots/abc"), "model.safetensors", "/other/blobs/01");
}

TEST_F(ModelDirectory, LinksLeadIntoTheCacheOfHuggingFaceFromAnywhere) {
  const std::string model = "hub/models--org--name";
  for (const char* folder : {"/blobs", "/snapshots/abc", "/refs"}) {
    fs::create_directories(directory_ / (model + folder));
  }
  WriteFile(directory_ / (model + "/blobs/01"), image_);
  WriteFile(directory_ / (model + "/snapshots/abc/config.json"), "{}");
  WriteFile(directory_ / (model + "/refs/main"), "abc");
  Link("../../blobs/01", model + "/snapshots/abc/model.safetensors");
  // Through the snapshot, to the blob, and to a file that is no link.
  Link("../" + model + "/snapshots/abc/model.safetensors", "model/model.safetensors");
  Link(directory_ / (model + "/snapshots/abc/config.json"), "model/config.json");
  const Status status = Quantize("model");
  ASSERT_TRUE(status.ok()) << status.message();
  fs::remove_all(directory_ / "out");
  Link("../" + model + "/refs/main", "model/LICENSE");
  ExpectRefused(Quantize("model"), "LICENSE", "/refs/main");
}

TEST_F(ModelDirectory, EveryFileThatIsReadOrCopiedIsChecked) {
  for (const char* name : {"NOTICE.txt", "config.json", "generation_config.json", "tokenizer.json",
                           "tokenizer.model", "chat_template.jinja", "LICENSE"}) {
    SCOPED_TRACE(name);
    fs::remove_all(directory_ / "model");
    fs::create_directory(directory_ / "model");
    WriteFile(directory_ / "model/model.safetensors", image_);
    Link("../secret", std::string("model/") + name);
    ExpectRefused(Quantize("model"), name, "/secret");
  }
  for (const char* name : {"model.safetensors", "other.safetensors"}) {
    SCOPED_TRACE(name);
    fs::remove_all(directory_ / "model");
    fs::create_directory(directory_ / "model");
    WriteFile(directory_ / "outside.safetensors", image_);
    Link("../outside.safetensors", std::string("model/") + name);
    ExpectRefused(Quantize("model"), name, "/outside.safetensors");
  }
  fs::remove_all(directory_ / "model");
  fs::create_directory(directory_ / "model");
  const std::string index = R"({"weight_map": {"a.q_proj.weight": "one.safetensors"}})";
  WriteFile(directory_ / "index", index);
  WriteFile(directory_ / "model/one.safetensors", image_);
  Link("../index", "model/model.safetensors.index.json");
  ExpectRefused(Quantize("model"), "index.json", "/index");
  fs::remove(directory_ / "model/model.safetensors.index.json");
  WriteFile(directory_ / "model/model.safetensors.index.json", index);
  fs::remove(directory_ / "model/one.safetensors");
  Link("../outside.safetensors", "model/one.safetensors");
  ExpectRefused(Quantize("model"), "one.safetensors", "/outside.safetensors");
}

}  // namespace
}  // namespace marlin::model_directory_test
