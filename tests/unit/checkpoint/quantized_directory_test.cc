// Reading quantized directories: as written, tampered with, and from newer versions.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "checkpoint/module_tensors.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::quantized_directory_test {
namespace {

namespace fs = std::filesystem;
using testing::BuildSafetensors;
using testing::Contains;
using testing::RandomBf16;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::WriteFile;

const char kModule[] = "model.layers.0.self_attn.q_proj.weight";

class QuantizedDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    WriteFile(directory_ / "plain.safetensors",
              BuildSafetensors(
                  {RandomBf16(kModule, {48, 64}, 1), RandomBf16("model.norm.weight", {64}, 2)}));
    path_ = directory_ / "q";
    QuantizeCheckpointOptions options;
    options.recipe = MixedPrecisionConfig::DefaultDense();
    const auto report = QuantizeCheckpoint(directory_ / "plain.safetensors", path_, options);
    ASSERT_TRUE(report.ok()) << report.status().message();
  }
  // Changes quantization_config; `honest` also corrects the checksum.
  void Edit(bool honest, const std::function<void(Json&)>& edit) {
    if (original_.empty()) original_ = ReadFile(path_ + "/config.json");
    Json config = Json::parse(original_);
    Json& quantization = config["quantization_config"];
    edit(quantization);
    if (honest) quantization["checksum"] = QuantizationConfigChecksum(quantization);
    WriteFile(path_ + "/config.json", config.dump());
  }
  void ExpectError(Code code, const std::string& part) {
    const auto opened = Checkpoint::Open(path_);
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.status().code(), code) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), part)) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), path_)) << opened.status().message();
  }
  TemporaryDirectory directory_;
  std::string path_;
  std::string original_;
};

TEST_F(QuantizedDirectory, WeightsAreViewsOfTheMapping) {
  const auto opened = Checkpoint::Open(path_);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const auto weights = opened->Weights(kModule);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  const auto words = opened->Tensor("model.layers.0.self_attn.q_proj.qweight");
  ASSERT_TRUE(words.ok());
  EXPECT_EQ(weights->codes.data(), words->data());
  EXPECT_EQ(weights->codes.shape(), (Shape{1, 8, 48}));
  EXPECT_EQ(opened->Weights("nothing").status().code(), Code::kInvalidArgument);
}

TEST_F(QuantizedDirectory, NewerVersionsAreRefusedWithBothNumbers) {
  Edit(true, [](Json& q) { q["version"] = 4; });
  ExpectError(Code::kUnsupported, "version 4, this build reads up to 3");
  Edit(true, [](Json& q) { q["version"] = 0; });
  ExpectError(Code::kMalformedFile, "\"version\": 0");
}

TEST_F(QuantizedDirectory, TilesAreOfVersion3AndOf4Bits) {
  const auto edit = [this](int version, const char* layout, const char* format) {
    Edit(true, [=](Json& q) {
      q["version"] = version;
      for (auto& [name, module] : q["modules"].items()) {
        module["zero_type"] = "fp16";
        module["global_scale_divides"] = false;
      }
      q["modules"][kModule]["layout"] = layout;
      q["modules"][kModule]["format"] = format;
    });
  };
  edit(2, "marlin_w4", "fp4_e2m1");
  ExpectError(Code::kMalformedFile, "unknown key \"layout\"");
  edit(3, "rows", "fp4_e2m1");
  ExpectError(Code::kMalformedFile, "layout: unknown name 'rows'; known: k_packed, marlin_w4");
  edit(3, "marlin_w4", "fp8_e4m3");
  ExpectError(Code::kMalformedFile, "marlin_w4 holds dense codes of 4 bits, not fp8_e4m3");
  edit(3, "marlin_w4", "fp4_e2m1");
  ExpectError(Code::kMalformedFile, "expected u32 [2, 2, 32, 4], got u32 [8, 48]");
  edit(3, "k_packed", "fp4_e2m1");
  EXPECT_TRUE(Checkpoint::Open(path_).ok());
}

TEST_F(QuantizedDirectory, OtherMethodsAreRefusedByName) {
  Edit(false, [](Json& q) { q["quant_method"] = "exl3"; });
  ExpectError(Code::kUnsupported,
              "quant_method \"exl3\" is not supported; supported: metal_marlin");
}

TEST_F(QuantizedDirectory, AChangedConfigIsNoticed) {
  // A group size of 65 needs the same tensors as 64 here: only the checksum reveals the change.
  Edit(false, [](Json& q) { q["modules"][kModule]["group_size"] = 65; });
  ExpectError(Code::kMalformedFile, "\"checksum\" says");
}

TEST_F(QuantizedDirectory, EveryFieldIsChecked) {
  struct Case {
    const char* key;
    Json value;
    const char* part;
  };
  const Case cases[] = {
      {"format", "fp5", "fp5"},
      {"format", 4, "\"format\": expected a string, got 4"},
      {"format", "bf16", "bf16 is not a quantized format"},
      {"shape", "x", "\"shape\": expected an array"},
      {"shape", {64}, "got 1 numbers"},
      {"shape", {1, 1, 64, 48}, "got 4 numbers"},
      {"shape", {0, 64, 48}, "0 experts"},
      {"shape", {-64, 48}, "expected a non-negative integer, got -64"},
      {"shape", {64.5, 48}, "expected a non-negative integer, got 64.5"},
      {"shape", {uint64_t{1} << 40, 48}, "1099511627776 exceeds 2147483647"},
      {"shape", {64, 49}, "expected u32 [8, 49], got u32 [8, 48]"},
      {"shape", {1, 64, 48}, "expected u32 [1, 8, 48], got u32 [8, 48]"},
      {"shape", {2147483647, 2147483647, 2147483647}, "expected u32"},
      {"group_size", 0, "\"group_size\": 0"},
      {"group_size", -1, "expected a non-negative integer, got -1"},
      {"group_size", 16, "expected f16 [4, 48], got f16 [1, 48]"},
      {"scale_type", "fp64", "fp64"},
      {"scale_type", "fp32", "expected f32 [1, 48], got f16 [1, 48]"},
      {"scale_type", "e4m3", "a global scale belongs to e4m3"},
      {"zeros", 1, "\"zeros\": expected true or false, got 1"},
      {"zeros", true, "fp4_e2m1 has no zero points"},
      {"biases", true, "no tensor \"model.layers.0.self_attn.q_proj.qbias\""},
      {"global_scale", true, "a global scale belongs to e4m3"},
      {"layer_class", "head", "head"},
      {"source_layout", "in", "expected out_in or in_out, got \"in\""},
      {"extra", 1, "unknown key \"extra\""},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(std::string(test.key) + " " + test.value.dump());
    Edit(true, [&](Json& q) { q["modules"][kModule][test.key] = test.value; });
    ExpectError(Code::kMalformedFile, test.part);
  }
  for (const char* key : {"format", "shape", "group_size", "scale_type", "zeros", "biases",
                          "global_scale", "layer_class", "source_layout"}) {
    Edit(true, [&](Json& q) { q["modules"][kModule].erase(key); });
    ExpectError(Code::kMalformedFile, std::string("no \"") + key + "\"");
  }
  for (const char* key : {"version", "recipe", "recipe_document", "method", "layout", "modules"}) {
    Edit(true, [&](Json& q) { q.erase(key); });
    ExpectError(Code::kMalformedFile, std::string("no \"") + key + "\"");
  }
  Edit(true, [&](Json& q) { q["layout"] = "marlin_w4"; });
  ExpectError(Code::kMalformedFile, "expected k_packed, got \"marlin_w4\"");
  Edit(true, [&](Json& q) { q["modules"] = 3; });
  ExpectError(Code::kMalformedFile, "\"modules\": expected an object");
  Edit(true, [&](Json& q) { q["modules"][kModule] = 3; });
  ExpectError(Code::kMalformedFile, "expected an object, got number");
  Edit(true, [&](Json& q) { q["modules"]["a.experts.*.b.weight"] = q["modules"][kModule]; });
  ExpectError(Code::kMalformedFile, "stands for several experts");
  // Dequantizing writes the expert's number over one ".*."; other stars would survive in names.
  for (const char* name : {"a.up_*.weight", "a.*.b.*.weight", "*", "a.*", "a.experts.*.*.weight"}) {
    Edit(true, [&](Json& q) {
      q["modules"][name] = q["modules"][kModule];
      q["modules"][name]["shape"] = {2, 64, 64};
    });
    ExpectError(Code::kMalformedFile, "'*' that is not");
  }
  Edit(true,
       [&](Json& q) { q["modules"]["model.layers.0.self_attn.q_proj"] = q["modules"][kModule]; });
  ExpectError(Code::kMalformedFile, "belongs to module");
}

TEST_F(QuantizedDirectory, Version1HasNoKeysAndFormatsOfVersion2) {
  const auto version = [&] {
    return Json::parse(ReadFile(path_ + "/config.json"))["quantization_config"]["version"];
  };
  EXPECT_EQ(version(), 1);  // Nothing here needs version 2, so older programs can read it.
  Edit(true, [&](Json& q) { q["modules"][kModule]["zero_type"] = "fp16"; });
  ExpectError(Code::kMalformedFile, "unknown key \"zero_type\"");
  Edit(true, [&](Json& q) { q["modules"][kModule]["format"] = "u8"; });
  ExpectError(Code::kMalformedFile, "u8 needs version 2 of quantization_config, got 1");
  Edit(true, [&](Json& q) {
    q["modules"][kModule]["format"] = "s8";
    q["modules"][kModule]["zeros"] = true;
  });
  ExpectError(Code::kMalformedFile, "s8 with zeros needs version 2 of quantization_config, got 1");
}

TEST_F(QuantizedDirectory, EveryKeyOfVersion2IsChecked) {
  const auto edit = [&](const char* key, const Json& value) {
    Edit(true, [&](Json& q) {
      q["version"] = 2;
      Json& module = q["modules"][kModule];
      module["zero_type"] = "fp16";
      module["global_scale_divides"] = false;
      if (value.is_null()) {
        module.erase(key);
      } else {
        module[key] = value;
      }
    });
  };
  edit("group_size", 64);
  const auto opened = Checkpoint::Open(path_);
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  struct Case {
    const char* key;
    Json value;
    const char* part;
  };
  const Case cases[] = {
      {"zero_type", nullptr, "no \"zero_type\""},
      {"zero_type", 16, "\"zero_type\": expected a string, got 16"},
      {"zero_type", "fp64", "fp64"},
      {"zero_type", "e4m3", "zero_type: expected fp16, bf16 or fp32, got e4m3"},
      {"zero_type", "fp32", "zero_type: fp32, but there are no zeros"},
      {"global_scale_divides", nullptr, "no \"global_scale_divides\""},
      {"global_scale_divides", 0, "\"global_scale_divides\": expected true or false, got 0"},
      {"global_scale_divides", true, "global_scale_divides: there is no global scale"},
      {"format", "u8", "expected u32 [16, 48], got u32 [8, 48]"},
      {"extra", 1, "unknown key \"extra\""},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(std::string(test.key) + " " + test.value.dump());
    edit(test.key, test.value);
    ExpectError(Code::kMalformedFile, test.part);
  }
}

TEST_F(QuantizedDirectory, U8IsWrittenAsVersion2AndReadBack) {
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::Uniform("u8/g32");
  const std::string path = directory_ / "u8";
  const auto report = QuantizeCheckpoint(directory_ / "plain.safetensors", path, options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const Json config = Json::parse(ReadFile(path + "/config.json"))["quantization_config"];
  EXPECT_EQ(config["version"], 2);
  EXPECT_EQ(config["modules"][kModule]["zero_type"], "fp16");
  EXPECT_EQ(config["modules"][kModule]["global_scale_divides"], false);
  const auto opened = Checkpoint::Open(path);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const auto weights = opened->Weights(kModule);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_EQ(weights->spec.format, Format::kU8);
  EXPECT_EQ(weights->zeros.dtype(), DType::kF16);
}

class SparseDirectory : public QuantizedDirectory {
 protected:
  void SetUp() override {
    QuantizedDirectory::SetUp();
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::Uniform("s4/g32/2:4");
    path_ = directory_ / "sparse";
    const auto report = QuantizeCheckpoint(directory_ / "plain.safetensors", path_, options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    original_.clear();
  }
};

TEST_F(SparseDirectory, IsWrittenAsVersion2AndReadBack) {
  const Json config = Json::parse(ReadFile(path_ + "/config.json"))["quantization_config"];
  EXPECT_EQ(config["version"], 2);
  EXPECT_EQ(config["modules"][kModule]["sparsity"], "2:4");
  const auto opened = Checkpoint::Open(path_);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->VerifyChecksums().ok());
  EXPECT_EQ(opened->Find("model.layers.0.self_attn.q_proj.qweight")->shape, (Shape{4, 48}));
  EXPECT_EQ(opened->Find("model.layers.0.self_attn.q_proj.metadata")->shape, (Shape{2, 48}));
  const auto weights = opened->Weights(kModule);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_EQ(weights->spec.sparsity, Sparsity::k24);
  // The same numbers as Quantize gives in memory.
  const std::string plain = RandomBf16(kModule, {48, 64}, 1).data;
  const auto expected =
      Quantize(TensorView(plain.data(), DType::kBf16, {48, 64}).Transposed(),
               {.format = Format::kS4, .group_size = 32, .sparsity = Sparsity::k24});
  ASSERT_TRUE(expected.ok());
  ASSERT_EQ(weights->metadata.ByteCount(), expected->metadata.ByteCount());
  EXPECT_EQ(std::memcmp(weights->metadata.data(), expected->metadata.data(),
                        static_cast<size_t>(expected->metadata.ByteCount())),
            0);
  EXPECT_EQ(std::memcmp(weights->codes.data(), expected->codes.data(),
                        static_cast<size_t>(expected->codes.ByteCount())),
            0);
}

TEST_F(SparseDirectory, TheKeyIsChecked) {
  const auto edit = [&](const Json& value) {
    Edit(true, [&](Json& q) {
      Json& module = q["modules"][kModule];
      if (value.is_null()) {
        module.erase("sparsity");
      } else {
        module["sparsity"] = value;
      }
    });
  };
  edit("2:4");
  EXPECT_TRUE(Checkpoint::Open(path_).ok());
  edit(Json());
  ExpectError(Code::kMalformedFile, "expected u32 [8, 48], got u32 [4, 48]");
  edit("2:8");
  ExpectError(Code::kMalformedFile, "sparsity: unknown name '2:8'; known: dense, 2:4");
  edit(24);
  ExpectError(Code::kMalformedFile, "\"sparsity\": expected a string, got 24");
  Edit(true, [](Json& q) { q["modules"][kModule]["format"] = "u4"; });
  ExpectError(Code::kMalformedFile, "zeros: format u4 needs zeros or biases");
  Edit(true, [](Json& q) {
    q["version"] = 1;
    Json& module = q["modules"][kModule];
    module.erase("zero_type");
    module.erase("global_scale_divides");
  });
  ExpectError(Code::kMalformedFile, "unknown key \"sparsity\"");
}

TEST_F(SparseDirectory, AnInvalidNibbleIsMalformed) {
  const auto opened = Checkpoint::Open(path_);
  ASSERT_TRUE(opened.ok());
  const TensorInfo* metadata = opened->Find("model.layers.0.self_attn.q_proj.metadata");
  ASSERT_NE(metadata, nullptr);
  const std::string file = path_ + "/model.safetensors";
  std::string image = ReadFile(file);
  image[static_cast<size_t>(metadata->offset)] = '\0';
  WriteFile(file, image);
  const auto again = Checkpoint::Open(path_);
  ASSERT_TRUE(again.ok());
  const auto weights = again->Weights(kModule);
  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().code(), Code::kMalformedFile);
  EXPECT_TRUE(Contains(weights.status().message(),
                       "tensor \"model.layers.0.self_attn.q_proj.metadata\" of module "
                       "\"model.layers.0.self_attn.q_proj.weight\": nibble 0 of block 0, column 0 "
                       "is not one of 4, 8, 9, 12, 13, 14"))
      << weights.status().message();
}

TEST_F(QuantizedDirectory, ChecksumsNoticeEveryByte) {
  const std::string file = path_ + "/model.safetensors";
  const std::string image = ReadFile(file);
  const auto opened = Checkpoint::Open(path_);
  ASSERT_TRUE(opened.ok());
  for (const TensorInfo& tensor : opened->tensors()) {
    std::string changed = image;
    changed[static_cast<size_t>(tensor.offset + tensor.bytes - 1)] ^= 4;
    WriteFile(file, changed);
    const auto again = Checkpoint::Open(path_);
    ASSERT_TRUE(again.ok()) << again.status().message();
    const Status status = again->VerifyChecksums();
    EXPECT_EQ(status.code(), Code::kMalformedFile);
    EXPECT_TRUE(Contains(status.message(), "\"" + tensor.name + "\"")) << status.message();
    EXPECT_TRUE(Contains(status.message(), "model.safetensors")) << status.message();
  }
}

TEST_F(QuantizedDirectory, NonFiniteScalesAreMalformed) {
  const std::string file = path_ + "/model.safetensors";
  std::string image = ReadFile(file);
  const auto opened = Checkpoint::Open(path_);
  ASSERT_TRUE(opened.ok());
  const TensorInfo* scales = opened->Find("model.layers.0.self_attn.q_proj.scales");
  ASSERT_NE(scales, nullptr);
  image[static_cast<size_t>(scales->offset + 1)] = 0x7c;  // Inf or NaN in fp16.
  WriteFile(file, image);
  const auto again = Checkpoint::Open(path_);
  ASSERT_TRUE(again.ok());
  const auto weights = again->Weights(kModule);
  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().code(), Code::kMalformedFile);
  EXPECT_TRUE(Contains(weights.status().message(), kModule)) << weights.status().message();
}

TEST_F(QuantizedDirectory, UnalignedTensorsAreCopied) {
  // The same tensors as another writer may place them: one odd byte first.
  const auto opened = Checkpoint::Open(path_);
  ASSERT_TRUE(opened.ok());
  const auto before = opened->Weights(kModule);
  ASSERT_TRUE(before.ok());
  std::vector<testing::TestTensor> tensors = {{"odd", DType::kU8, {1}, "x"}};
  for (const TensorInfo& tensor : opened->tensors()) {
    const TensorView view = *opened->Tensor(tensor.name);
    tensors.push_back({tensor.name, tensor.dtype, tensor.shape,
                       std::string(view.As<char>(), static_cast<size_t>(tensor.bytes))});
  }
  WriteFile(path_ + "/new", BuildSafetensors(tensors));
  fs::rename(path_ + "/new", path_ + "/model.safetensors");
  const auto moved = Checkpoint::Open(path_);
  ASSERT_TRUE(moved.ok()) << moved.status().message();
  const auto weights = moved->Weights(kModule);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(weights->codes.data()) % 4, 0u);
  EXPECT_EQ(std::memcmp(weights->codes.data(), before->codes.data(),
                        static_cast<size_t>(weights->codes.ByteCount())),
            0);
  // Without the metadata there is no checksum to verify, and the error says so.
  EXPECT_TRUE(Contains(moved->VerifyChecksums().message(), "no checksum is stored"));
}

TEST_F(QuantizedDirectory, BrokenStoredChecksums) {
  const std::string file = path_ + "/model.safetensors";
  std::string image = ReadFile(file);
  const size_t at = image.find("xxh3:");
  ASSERT_NE(at, std::string::npos);
  image[at + 7] = 'g';
  WriteFile(file, image);
  ExpectError(Code::kMalformedFile, "is not xxh3 and 16 digits");
}

}  // namespace
}  // namespace marlin::quantized_directory_test
