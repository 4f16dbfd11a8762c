// Files of prepared weights: the same bits as loading the directory, and every way in which a file
// can be wrong.
#include "model/prepared_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "checkpoint/files/checksum.h"
#include "marlin/checkpoint.h"
#include "marlin/model.h"
#include "marlin/prepared.h"

namespace marlin::prepared_file_test {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::WriteFile;

const std::string kQwen = SourceDirectory() + "/examples/tiny-qwen3-moe";
const std::string kGlm = SourceDirectory() + "/tests/data/tiny-glm4-moe";

class Prepared : public ::testing::Test {
 protected:
  void SetUp() override { device_.emplace(*Device::Open("cpu", {.threads = 2})); }

  std::vector<float> Logits(const Model& model) {
    const std::vector<int32_t> tokens = {5, 17, 4, 99, 200, 31, 8};
    std::vector<float> logits(tokens.size() * static_cast<size_t>(model.info().vocab_size));
    Sequence sequence = *model.NewSequence();
    const SequenceInput input{&sequence, tokens, true};
    const Shape shape{static_cast<int64_t>(tokens.size()), model.info().vocab_size};
    const Status status =
        model.Forward({&input, 1}, MutableTensorView(logits.data(), DType::kF32, shape));
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }

  void Prepare(const std::string& model) {
    model_ = model;
    file_ = directory_ / "m.prepared";
    const auto report = PrepareModel(model, *device_, file_, {.overwrite = true});
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->bytes, static_cast<int64_t>(fs::file_size(file_)));
    EXPECT_EQ(report->layout, "cpu_panels/1");
    EXPECT_TRUE(IsPreparedModel(file_));
    EXPECT_TRUE(VerifyPreparedModel(file_).ok());
    image_ = ReadFile(file_);
  }
  Status Open() { return Model::Open(model_, *device_, {.prepared = file_}).status(); }

  void ExpectError(Code code, const std::string& part) {
    const Status status = Open();
    EXPECT_EQ(status.code(), code) << part << ": " << status.message();
    EXPECT_TRUE(Contains(status.message(), part)) << status.message();
    EXPECT_TRUE(Contains(status.message(), file_)) << status.message();
    EXPECT_FALSE(Contains(status.message(), "\n")) << status.message();
  }

  uint64_t HeadWord(size_t at) const {
    uint64_t word = 0;
    std::memcpy(&word, image_.data() + at, sizeof(word));
    return word;
  }
  /// Writes the file with a changed index, everything else being consistent.
  void EditIndex(const std::function<void(Json&)>& edit, uint64_t version = kPreparedVersion) {
    const auto begin = static_cast<size_t>(HeadWord(16));
    Json index = Json::parse(image_.substr(begin));
    edit(index);
    const std::string text = index.dump();
    const std::string head = BuildPreparedHead(version, static_cast<int64_t>(begin), text);
    WriteFile(file_, head + image_.substr(head.size(), begin - head.size()) + text);
  }

  TemporaryDirectory directory_;
  std::optional<Device> device_;
  std::string model_;
  std::string file_;
  std::string image_;
};

TEST_F(Prepared, GivesTheLogitsOfTheDirectory) {
  const std::pair<std::string, const char*> cases[] = {{kQwen, ""},
                                                       {kGlm, ""},
                                                       {kQwen, "default_moe"},
                                                       {kQwen, "aggressive_moe"},
                                                       {kGlm, "uniform:fp4_e2m1/g16/e4m3"},
                                                       {kQwen, "uniform:fp8_e4m3/g32"},
                                                       {kQwen, "uniform:int6/g32"},
                                                       {kQwen, "uniform:u5/g64"},
                                                       {kQwen, "uniform:nf4/g64/2:4"},
                                                       {kQwen, "uniform:fp8_e4m3/g32/2:4"}};
  for (const auto& [source, recipe] : cases) {
    std::string model = source;
    if (*recipe != '\0') {
      model = directory_ / "quantized";
      QuantizeCheckpointOptions options;
      options.recipe = *MixedPrecisionConfig::FromNameOrFile(recipe);
      options.overwrite = true;
      const auto report = QuantizeCheckpoint(source, model, options);
      ASSERT_TRUE(report.ok()) << report.status().message();
    }
    Prepare(model);
    for (const bool exact : {false, true}) {
      const auto loaded = Model::Open(model, *device_, {.allow_bf16_activations = !exact});
      const auto mapped =
          Model::Open(model, *device_, {.allow_bf16_activations = !exact, .prepared = file_});
      ASSERT_TRUE(loaded.ok() && mapped.ok()) << mapped.status().message();
      EXPECT_EQ(Logits(*loaded), Logits(*mapped)) << source << " " << recipe;
      EXPECT_EQ(loaded->info().parameters, mapped->info().parameters);
      EXPECT_EQ(loaded->info().bytes, mapped->info().bytes);
    }
  }
}

TEST_F(Prepared, ChecksTheSparsityOfParts) {
  // A level that keeps 2:4 weights on every processor: AVX2 expands them.
  setenv("MARLIN_CPU", "scalar", 1);
  device_.emplace(*Device::Open("cpu", {.threads = 2}));
  unsetenv("MARLIN_CPU");
  const auto quantize = [&](const char* recipe) {
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::FromNameOrFile(recipe);
    options.overwrite = true;
    const std::string model = directory_ / "quantized";
    const auto report = QuantizeCheckpoint(kQwen, model, options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    Prepare(model);
  };
  // Sets the sparsity of every quantized part.
  const auto set = [](const char* sparsity) {
    return [sparsity](Json& index) {
      for (Json& projection : index["projections"]) {
        for (Json& part : projection["parts"]) {
          if (part["format"] != "bf16") part["sparsity"] = sparsity;
        }
      }
    };
  };
  quantize("uniform:fp8_e4m3/g32/2:4");
  EXPECT_TRUE(Open().ok());
  EditIndex(set("2:4"));
  ExpectError(Code::kMalformedFile, "fp8_e4m3 weights are dense in this layout, got 2:4");
  quantize("uniform:s4/g64/2:4");
  EXPECT_TRUE(Open().ok());
  EditIndex(set("dense"));
  ExpectError(Code::kMalformedFile, "prepared weights: expected ");
  EditIndex(set("3:4"));
  ExpectError(Code::kMalformedFile, "unknown name '3:4'");
  quantize("uniform:s4/g64");
  EditIndex(set("2:4"));
  ExpectError(Code::kMalformedFile, "its parts are not the model's matrices");
}

TEST_F(Prepared, TheMappingOutlivesTheFile) {
  Prepare(kQwen);
  const auto loaded = Model::Open(kQwen, *device_);
  const auto mapped = Model::Open(kQwen, *device_, {.prepared = file_});
  ASSERT_TRUE(mapped.ok());
  fs::remove(file_);
  EXPECT_EQ(Logits(*loaded), Logits(*mapped));
}

TEST_F(Prepared, EveryByteOfTheHeadIsChecked) {
  Prepare(kQwen);
  for (size_t at = 0; at < 64; ++at) {
    std::string broken = image_;
    broken[at] = static_cast<char>(broken[at] ^ 0x10);
    WriteFile(file_, broken);
    ExpectError(Code::kMalformedFile, at < 8 ? "is not a file of prepared weights"
                                             : "the head does not have its checksum");
  }
  const auto begin = static_cast<size_t>(HeadWord(16));
  for (size_t at = begin; at < image_.size(); at += 509) {
    std::string broken = image_;
    broken[at] = static_cast<char>(broken[at] ^ 0x10);
    WriteFile(file_, broken);
    ExpectError(Code::kMalformedFile, "the index does not have its checksum");
  }
}

TEST_F(Prepared, OtherSizesAreRefused) {
  Prepare(kQwen);
  for (const size_t size : {size_t{0}, size_t{7}, size_t{8}, size_t{64}, size_t{4095}}) {
    WriteFile(file_, image_.substr(0, size));
    ExpectError(Code::kMalformedFile, "is not a file of prepared weights");
  }
  for (const size_t size : {size_t{4096}, image_.size() / 2, image_.size() - 1}) {
    WriteFile(file_, image_.substr(0, size));
    ExpectError(Code::kMalformedFile, "bytes, got " + std::to_string(size));
  }
  WriteFile(file_, image_ + "x");
  ExpectError(Code::kMalformedFile, "bytes, got " + std::to_string(image_.size() + 1));
  const std::string index = image_.substr(static_cast<size_t>(HeadWord(16)));
  // A consistent head with a wrong position of the index.
  for (const int64_t begin : {int64_t{0}, int64_t{64}, int64_t{4095}}) {
    const std::string head = BuildPreparedHead(kPreparedVersion, begin, index);
    std::string file = head + std::string(static_cast<size_t>(4096), ' ');
    file.resize(static_cast<size_t>(begin) + index.size(), ' ');
    WriteFile(file_, file);
    ExpectError(Code::kMalformedFile, "does not end the");
  }
}

TEST_F(Prepared, EveryFieldOfTheIndexIsChecked) {
  Prepare(kQwen);
  EditIndex([](Json&) {});
  EXPECT_TRUE(Open().ok()) << Open().message();
  const auto part = [](Json& index, const char* key, const Json& value) {
    index["projections"][1]["parts"][0][key] = value;
  };
  struct Case {
    std::function<void(Json&)> edit;
    Code code;
    const char* says;
  };
  const Case cases[] = {
      {[](Json& i) { i["layout"] = "cuda_tiles/1"; }, Code::kInvalidArgument,
       "weights in the layout cuda_tiles/1, this device reads cpu_panels/1"},
      {[](Json& i) { i["layout"] = 1; }, Code::kMalformedFile, "\"layout\": expected a string"},
      {[](Json& i) { i["source"] = "0123456789abcdef"; }, Code::kInvalidArgument,
       "weights of model 0123456789abcdef"},
      {[](Json& i) { i.erase("source"); }, Code::kMalformedFile, "no \"source\""},
      {[](Json& i) { i["more"] = 1; }, Code::kMalformedFile, "unknown key \"more\""},
      {[](Json& i) { i["projections"] = 1; }, Code::kMalformedFile, "\"projections\": expected"},
      {[](Json& i) { i["projections"][0] = 1; }, Code::kMalformedFile, "expected an object"},
      {[](Json& i) { i["projections"][0]["name"] = 1; }, Code::kMalformedFile, "\"name\""},
      {[](Json& i) { i["projections"][0]["name"] = "x"; }, Code::kMalformedFile,
       "holds no prepared weights of"},
      {[](Json& i) { i["projections"][0]["name"] = i["projections"][1]["name"]; },
       Code::kMalformedFile, "two projections"},
      {[](Json& i) { i["projections"][0]["parts"] = Json::array(); }, Code::kMalformedFile,
       "\"parts\": expected an array of parts"},
      {[](Json& i) { i["projections"][0]["parts"][0] = 1; }, Code::kMalformedFile, "not an object"},
      {[](Json& i) { i["projections"].erase(i["projections"].size() - 1); }, Code::kMalformedFile,
       "the parts end at"},
      {[&](Json& i) { part(i, "format", "fp5"); }, Code::kMalformedFile, "fp5"},
      {[&](Json& i) { part(i, "format", "fp16"); }, Code::kMalformedFile,
       "its parts are not the model's matrices"},
      {[&](Json& i) { part(i, "k", 64); }, Code::kMalformedFile, "not the model's matrices"},
      {[&](Json& i) { part(i, "k", -1); }, Code::kMalformedFile, "\"k\": expected"},
      {[&](Json& i) { part(i, "k", uint64_t{1} << 40); }, Code::kMalformedFile, "exceeds"},
      {[&](Json& i) { part(i, "n", 0); }, Code::kMalformedFile, "prepared weights: expected"},
      {[&](Json& i) { part(i, "n", 2147483647); }, Code::kMalformedFile,
       "not the model's matrices"},
      {[&](Json& i) { part(i, "group_size", 32); }, Code::kMalformedFile,
       "not the model's matrices"},
      {[&](Json& i) { part(i, "scale_type", "fp12"); }, Code::kMalformedFile, "fp12"},
      {[&](Json& i) { part(i, "zeros", 1); }, Code::kMalformedFile, "\"zeros\": expected"},
      {[&](Json& i) { part(i, "zeros", true); }, Code::kMalformedFile, "no scales"},
      {[&](Json& i) { part(i, "global_scale", "x"); }, Code::kMalformedFile, "\"global_scale\""},
      {[&](Json& i) { part(i, "checksum", "xxh3:1"); }, Code::kMalformedFile, "16 digits"},
      {[&](Json& i) { part(i, "bytes", -4); }, Code::kMalformedFile, "\"bytes\": expected"},
      {[&](Json& i) { part(i, "bytes", uint64_t{1} << 62); }, Code::kMalformedFile, "reach past"},
      {[&](Json& i) { part(i, "bytes", UINT64_MAX); }, Code::kMalformedFile, "reach past"},
      {[&](Json& i) { part(i, "more", 1); }, Code::kMalformedFile, "unknown key"},
      // Two wrong sizes with the right sum.
      {[&](Json& i) {
         const auto of = [&](size_t p) -> Json& {
           return i["projections"][p]["parts"][0]["bytes"];
         };
         of(1) = of(1).get<uint64_t>() - 64;
         of(2) = of(2).get<uint64_t>() + 64;
       },
       Code::kMalformedFile, "prepared weights: expected"},
  };
  for (const Case& wrong : cases) {
    EditIndex(wrong.edit);
    ExpectError(wrong.code, wrong.says);
  }
  EditIndex([](Json&) {}, 3);
  ExpectError(Code::kUnsupported, "version 3 of prepared weights, this build reads 2");
}

TEST_F(Prepared, VerifyReadsEveryPart) {
  Prepare(kQwen);
  const auto begin = static_cast<size_t>(HeadWord(16));
  for (size_t at = 4096; at + 64 < begin; at += begin / 13) {
    std::string broken = image_;
    broken[at] = static_cast<char>(broken[at] ^ 1);
    WriteFile(file_, broken);
    const Status status = VerifyPreparedModel(file_);
    EXPECT_EQ(status.code(), Code::kMalformedFile) << at;
    EXPECT_TRUE(Contains(status.message(), "have checksum")) << status.message();
  }
}

TEST_F(Prepared, AChangedModelIsAnother) {
  const std::string model = directory_ / "model";
  fs::create_directory(model);
  for (const auto& entry : fs::directory_iterator(kQwen)) {
    fs::copy_file(entry.path(), model + "/" + entry.path().filename().string());
  }
  Prepare(model);
  EXPECT_TRUE(Open().ok());
  const auto written = fs::last_write_time(model + "/model.safetensors");
  fs::last_write_time(model + "/model.safetensors", written + std::chrono::seconds(1));
  ExpectError(Code::kInvalidArgument, "another, or changed since");
  fs::last_write_time(model + "/model.safetensors", written);
  EXPECT_TRUE(Open().ok());
  const std::string config = ReadFile(model + "/config.json");
  WriteFile(model + "/config.json", config + " ");
  ExpectError(Code::kInvalidArgument, "another, or changed since");
}

TEST_F(Prepared, OnlyRegularFilesAreOpened) {
  model_ = kQwen;
  file_ = directory_ / "absent";
  ExpectError(Code::kIo, "absent");
  file_ = directory_.path();
  ExpectError(Code::kIo, "not a regular file");
  file_ = directory_ / "pipe";
  ASSERT_EQ(mkfifo(file_.c_str(), 0600), 0);
  ExpectError(Code::kIo, "not a regular file");
  EXPECT_FALSE(IsPreparedModel(file_));
  file_ = "/dev/zero";
  ExpectError(Code::kIo, "not a regular file");
}

TEST_F(Prepared, OtherDevicesAreRefused) {
  const auto simulator = Device::Open("metal-sim");
  if (!simulator.ok()) GTEST_SKIP() << simulator.status().message();
  const auto report = PrepareModel(kQwen, *simulator, directory_ / "m", {});
  EXPECT_EQ(report.status().code(), Code::kUnsupported) << report.status().message();
  EXPECT_TRUE(directory_.Entries().empty());
}

TEST_F(Prepared, OutputsAreNotReplacedUnasked) {
  const std::string file = directory_ / "out";
  ASSERT_TRUE(PrepareModel(kQwen, *device_, file, {}).ok());
  const auto again = PrepareModel(kQwen, *device_, file, {});
  EXPECT_EQ(again.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Contains(again.status().message(), "exists already"));
  EXPECT_TRUE(PrepareModel(kQwen, *device_, file, {.overwrite = true}).ok());
  WriteFile(file, "precious");
  const auto other = PrepareModel(kQwen, *device_, file, {.overwrite = true});
  EXPECT_EQ(other.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(ReadFile(file), "precious");
  fs::remove(file);
  fs::create_directory(file);
  EXPECT_FALSE(PrepareModel(kQwen, *device_, file, {.overwrite = true}).ok());
  EXPECT_EQ(directory_.Entries(), std::vector<std::string>{"out"});
  EXPECT_EQ(PrepareModel(kQwen, *device_, directory_ / "no/such", {}).status().code(), Code::kIo);
  for (const std::string name : {"", "/", "..", "."}) {
    EXPECT_FALSE(PrepareModel(kQwen, *device_, directory_.path() + "/" + name, {}).ok()) << name;
  }
  EXPECT_FALSE(PrepareModel(kQwen, *device_, std::string("a\0b", 3), {}).ok());
}

/// Fails one system call, counted over all calls.
class FailingIo final : public Io {
 public:
  explicit FailingIo(int call) : left_(call) {}
  bool failed() const { return left_ < 0; }

 protected:
  int InjectedError(IoCall, const std::string&) override { return left_-- == 0 ? EIO : 0; }

 private:
  int left_;
};

TEST_F(Prepared, AFailedWriteLeavesWhatWasThere) {
  const std::string file = directory_ / "out";
  const std::vector<std::byte> data(100);
  WeightsSpec spec;
  spec.format = Format::kBf16;
  spec.k = spec.n = 5;
  spec.group_size = 5;
  const auto write = [&](Io& io) -> Status {
    auto writer = PreparedFileWriter::Begin(io, file, true);
    if (!writer.ok()) return writer.status();
    for (const char* name : {"a", "b"}) {
      if (Status status = (*writer)->AddProjection(name); !status.ok()) return status;
      if (Status status = (*writer)->AddPart(spec, data); !status.ok()) return status;
    }
    return (*writer)->Finish("layout", "source");
  };
  for (const bool replaces : {false, true}) {
    int calls = 0;
    for (;; ++calls) {
      FailingIo io(calls);
      const Status status = write(io);
      if (!io.failed()) {
        EXPECT_TRUE(status.ok()) << status.message();
        break;
      }
      // The last two calls fail after the file has got its name.
      const std::vector<std::string> there = directory_.Entries();
      EXPECT_LE(there.size(), 1u) << calls << ": " << status.message();
      if (!there.empty()) {
        SystemIo system;
        EXPECT_EQ(there.front(), "out");
        EXPECT_TRUE(PreparedFile::Open(system, file).ok()) << calls;
        if (!replaces) fs::remove(file);
      }
    }
    EXPECT_GT(calls, 8);
  }
}

}  // namespace
}  // namespace marlin::prepared_file_test
