// The files that a path refers to, and their mutual consistency.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::open_test {
namespace {

namespace fs = std::filesystem;
using testing::BuildSafetensors;
using testing::Contains;
using testing::RawSafetensors;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

const TestTensor kA{"a", DType::kF32, {2}, "aaaabbbb"};
const TestTensor kB{"b", DType::kU8, {3}, "xyz"};

void ExpectError(const std::string& path, Code code, const std::string& part) {
  const Result<Checkpoint> opened = Checkpoint::Open(path);
  ASSERT_FALSE(opened.ok()) << path;
  EXPECT_EQ(opened.status().code(), code) << opened.status().message();
  EXPECT_TRUE(Contains(opened.status().message(), part)) << opened.status().message();
  EXPECT_TRUE(Contains(opened.status().message(), path)) << opened.status().message();
}

TEST(Open, SingleFile) {
  TemporaryDirectory directory;
  WriteFile(directory / "x.safetensors", BuildSafetensors({kA, kB}));
  const Result<Checkpoint> opened = Checkpoint::Open(directory / "x.safetensors");
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ASSERT_EQ(opened->tensors().size(), 2u);
  EXPECT_EQ(opened->tensors()[0].name, "a");
  EXPECT_EQ(opened->tensors()[1].file, "x.safetensors");
  ASSERT_NE(opened->Find("b"), nullptr);
  EXPECT_EQ(opened->Find("b")->bytes, 3);
  EXPECT_EQ(opened->Find("c"), nullptr);
  const Result<TensorView> view = opened->Tensor("b");
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(std::string(view->As<char>(), 3), "xyz");
  EXPECT_EQ(opened->Tensor("c").status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(opened->quantized());
  EXPECT_EQ(opened->config_json(), "");
  EXPECT_EQ(opened->Weights("a").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(opened->VerifyChecksums().code(), Code::kMalformedFile);
}

TEST(Open, MetadataMayBeNull) {
  TemporaryDirectory directory;
  WriteFile(directory / "x.safetensors",
            RawSafetensors(R"({"__metadata__":null,)"
                           R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
                           "xy"));
  const Result<Checkpoint> opened = Checkpoint::Open(directory / "x.safetensors");
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ASSERT_EQ(opened->tensors().size(), 1u);
  EXPECT_EQ(opened->tensors()[0].name, "a");
}

TEST(Open, TheMappingOutlivesTheCheckpointsFirstCopy) {
  TemporaryDirectory directory;
  WriteFile(directory / "x.safetensors", BuildSafetensors({kA}));
  Result<Checkpoint> opened = Checkpoint::Open(directory / "x.safetensors");
  ASSERT_TRUE(opened.ok());
  const Checkpoint copy = *opened;
  opened = Status(Code::kInternal, "let go of the first");
  fs::remove(directory / "x.safetensors");
  EXPECT_EQ(std::string(copy.Tensor("a")->As<char>(), 8), "aaaabbbb");
}

TEST(Open, DirectoryWithConfigAndWithoutIndex) {
  TemporaryDirectory directory;
  WriteFile(directory / "one.safetensors", BuildSafetensors({kA}));
  WriteFile(directory / "two.safetensors", BuildSafetensors({kB}));
  WriteFile(directory / "config.json", "{\"model_type\": \"llama\"}");
  const Result<Checkpoint> opened = Checkpoint::Open(directory.path());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->tensors().size(), 2u);
  EXPECT_EQ(opened->config_json(), "{\"model_type\": \"llama\"}");
}

TEST(Open, SameTensorInTwoFiles) {
  TemporaryDirectory directory;
  WriteFile(directory / "one.safetensors", BuildSafetensors({kA}));
  WriteFile(directory / "two.safetensors", BuildSafetensors({kA, kB}));
  ExpectError(directory.path(), Code::kMalformedFile,
              "tensor \"a\" is in both one.safetensors and two.safetensors");
}

TEST(Open, PathsThatAreNoCheckpoint) {
  TemporaryDirectory directory;
  ExpectError(directory / "nowhere", Code::kIo, "no such file or directory");
  ExpectError(directory.path(), Code::kInvalidArgument, "holds no *.safetensors");
  ASSERT_EQ(mkfifo((directory / "pipe.safetensors").c_str(), 0600), 0);
  ExpectError(directory / "pipe.safetensors", Code::kIo, "neither a regular file");
  WriteFile(directory / "file", "");
  ExpectError(directory / "file" + "/x", Code::kIo, "Not a directory");
}

TEST(Open, ForeignFilesAreNamed) {
  TemporaryDirectory directory;
  WriteFile(directory / "m.safetensors", "GGUF");
  ExpectError(directory / "m.safetensors", Code::kUnsupported, "its name must end in .gguf");
  std::filesystem::remove(directory / "m.safetensors");
  WriteFile(directory / "pytorch_model.bin", "PK");
  ExpectError(directory.path(), Code::kUnsupported, "pytorch_model.bin is a PyTorch pickle");
  ExpectError(directory / "pytorch_model.bin", Code::kUnsupported, "pickle");
  WriteFile(directory / "m.onnx", "");
  ExpectError(directory / "m.onnx", Code::kMalformedFile, "holds no graph");
}

TEST(Open, AdapterDirectory) {
  TemporaryDirectory directory;
  WriteFile(directory / "adapter_config.json", "{}");
  WriteFile(directory / "adapter_model.safetensors", BuildSafetensors({kA}));
  ExpectError(directory.path(), Code::kUnsupported, "an adapter");
}

class Indexed : public ::testing::Test {
 protected:
  void SetUp() override {
    WriteFile(directory_ / "s1.safetensors", BuildSafetensors({kA}));
    WriteFile(directory_ / "s2.safetensors", BuildSafetensors({kB}));
  }
  void Index(const std::string& json) {
    WriteFile(directory_ / "model.safetensors.index.json", json);
  }
  void Expect(Code code, const std::string& part) { ExpectError(directory_.path(), code, part); }
  TemporaryDirectory directory_;
};

TEST_F(Indexed, Complete) {
  Index(R"({"metadata": {"total_size": 11}, "weight_map": {"a": "s1.safetensors",
            "b": "s2.safetensors"}})");
  const Result<Checkpoint> opened = Checkpoint::Open(directory_.path());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->Find("b")->file, "s2.safetensors");
}

TEST_F(Indexed, TensorMissingInShard) {
  Index(R"({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors",
            "c": "s2.safetensors"}})");
  Expect(Code::kMalformedFile, "tensor \"c\" is listed in s2.safetensors, which does not hold it");
}

TEST_F(Indexed, TensorNotListed) {
  WriteFile(directory_ / "s2.safetensors", BuildSafetensors({kB, {"extra", DType::kU8, {1}, "e"}}));
  Index(R"({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})");
  Expect(Code::kMalformedFile, "tensor \"extra\" of s2.safetensors is not listed");
}

TEST_F(Indexed, TensorInAnotherShard) {
  Index(R"({"weight_map": {"a": "s2.safetensors", "b": "s1.safetensors"}})");
  Expect(Code::kMalformedFile, "tensor \"a\" is listed in s2.safetensors but is in s1");
}

/// The index still decides between two tensors of one name.
TEST_F(Indexed, ExtraTensorsAreLeftOutWhereTheyAreAllowed) {
  const TestTensor old{"a", kA.dtype, kA.shape, std::string(kA.data.size(), 'z')};
  WriteFile(directory_ / "s2.safetensors",
            BuildSafetensors({old, kB, {"extra", DType::kU8, {1}, "e"}}));
  Index(R"({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})");
  const CheckpointOptions allowed{.allow_extra_tensors = true};
  const Result<Checkpoint> opened = Checkpoint::Open(directory_.path(), allowed);
  // Listed in a shard that does not hold it, and held by the other one.
  Index(R"({"weight_map": {"a": "s1.safetensors", "b": "s1.safetensors"}})");
  const Result<Checkpoint> misplaced = Checkpoint::Open(directory_.path(), allowed);
  Index(R"({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors",
            "c": "s2.safetensors"}})");
  const Result<Checkpoint> missing = Checkpoint::Open(directory_.path(), allowed);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->tensors().size(), 2U);
  EXPECT_EQ(opened->Find("a")->file, "s1.safetensors");
  EXPECT_EQ(opened->Find("extra"), nullptr);
  // s2 is no longer named, so that its tensors are not there.
  EXPECT_EQ(misplaced.status().code(), Code::kMalformedFile);
  EXPECT_NE(missing.status().message().find("tensor \"c\" is listed in s2.safetensors, which "),
            std::string::npos)
      << missing.status().message();
}

TEST_F(Indexed, ShardMissing) {
  Index(R"({"weight_map": {"a": "s1.safetensors", "b": "s3.safetensors"}})");
  Expect(Code::kIo, "s3.safetensors: no such file");
}

TEST_F(Indexed, NamesThatLeaveTheDirectory) {
  for (const char* name : {"../s1.safetensors", "/etc/passwd", "x/s1.safetensors", "..", ".", "",
                           "a\\\\b", "s1\\u0000"}) {
    Index(std::string(R"({"weight_map": {"a": ")") + name + "\"}}");
    Expect(Code::kMalformedFile, "is not the name of a file in the directory");
  }
}

TEST_F(Indexed, BrokenIndexes) {
  Index("");
  Expect(Code::kMalformedFile, "parse error");
  Index("[]");
  Expect(Code::kMalformedFile, "expected a JSON object, got array");
  Index("{}");
  Expect(Code::kMalformedFile, "no object \"weight_map\"");
  Index(R"({"weight_map": []})");
  Expect(Code::kMalformedFile, "no object \"weight_map\"");
  Index(R"({"weight_map": {}})");
  Expect(Code::kMalformedFile, "is empty");
  Index(R"({"weight_map": {"a": 1}})");
  Expect(Code::kMalformedFile, "expected a file name, got number");
  Index(R"({"weight_map": {"a": "s1.safetensors", "a": "s2.safetensors"}})");
  Expect(Code::kMalformedFile, "duplicate key \"a\"");
  Index("{\"weight_map\": " + std::string(100, '[') + std::string(100, ']') + "}");
  Expect(Code::kMalformedFile, "nests deeper than 16");
}

TEST(Open, BrokenConfigs) {
  TemporaryDirectory directory;
  WriteFile(directory / "model.safetensors", BuildSafetensors({kA}));
  const auto expect = [&](const std::string& config, const std::string& part) {
    WriteFile(directory / "config.json", config);
    ExpectError(directory.path(), Code::kMalformedFile, part);
  };
  expect("", "parse error");
  expect("{\"a\": 1, \"a\": 2}", "duplicate key \"a\"");
  expect("{\"a\": {\"b\": 1, \"b\": 2}}", "duplicate key \"b\"");
  expect("[1]", "expected a JSON object, got array");
  expect("{\"a\": \"\xff\"}", "parse error");
  expect("{\"a\":" + std::string(1000, '['), "nests deeper");
  expect(std::string(1000, '{'), "parse error");
  // The same key in different objects is not a duplicate.
  WriteFile(directory / "config.json",
            R"({"a": {"b": 1}, "c": {"b": 1}, "b": [{"b": 1}, {"b": 2}]})");
  EXPECT_TRUE(Checkpoint::Open(directory.path()).ok());
}

TEST(Open, ModelFileWinsOverOthers) {
  TemporaryDirectory directory;
  WriteFile(directory / "model.safetensors", BuildSafetensors({kA}));
  WriteFile(directory / "consolidated.safetensors", BuildSafetensors({kA}));
  const Result<Checkpoint> opened = Checkpoint::Open(directory.path());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->tensors().size(), 1u);
}

TEST(Open, ALinkThatTheUserNamesIsFollowed) {
  TemporaryDirectory directory;
  fs::create_directory(directory / "model");
  WriteFile(directory / "model/model.safetensors", BuildSafetensors({kA}));
  fs::create_symlink("model", directory / "link");
  fs::create_symlink("model/model.safetensors", directory / "link.safetensors");
  EXPECT_TRUE(Checkpoint::Open(directory / "link").ok());
  EXPECT_TRUE(Checkpoint::Open(directory / "link.safetensors").ok());
}

TEST(Open, EmptyAndScalarTensors) {
  TemporaryDirectory directory;
  WriteFile(directory / "x.safetensors",
            BuildSafetensors({{"empty", DType::kF32, {0, 5}, ""},
                              {"scalar", DType::kF64, {}, std::string(8, 's')},
                              {"eight", DType::kU8, {1, 1, 1, 1, 1, 1, 1, 1}, "1"}}));
  const Result<Checkpoint> opened = Checkpoint::Open(directory / "x.safetensors");
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->Find("empty")->bytes, 0);
  EXPECT_EQ(opened->Find("scalar")->shape.rank(), 0);
  EXPECT_EQ(opened->Find("eight")->shape.rank(), 8);
}

}  // namespace
}  // namespace marlin::open_test
