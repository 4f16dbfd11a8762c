// Directories quantized by methods without a reader are refused by name: read as plain directories,
// their codes would be taken for integers and their scales for vectors.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/module_reader.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "test_files.h"

namespace marlin::quant_method_test {
namespace {

using testing::BuildSafetensors;
using testing::Contains;
using testing::RandomBf16;
using testing::TemporaryDirectory;
using testing::WriteFile;

class QuantMethods : public ::testing::Test {
 protected:
  void SetUp() override {
    WriteFile(directory_ / "model.safetensors",
              BuildSafetensors({RandomBf16("model.norm.weight", {64}, 1)}));
  }
  void Config(const std::string& text) { WriteFile(directory_ / "config.json", text); }
  void ExpectError(Code code, const std::string& part) {
    const auto opened = Checkpoint::Open(directory_.path());
    ASSERT_FALSE(opened.ok()) << part;
    EXPECT_EQ(opened.status().code(), code) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), part)) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), directory_.path()))
        << opened.status().message();
    EXPECT_FALSE(Contains(opened.status().message(), "\n")) << opened.status().message();
  }
  void ExpectMethod(const std::string& method) {
    const auto opened = Checkpoint::Open(directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    EXPECT_EQ(opened->quant_method(), method);
    EXPECT_FALSE(opened->quantized());
  }
  void ExpectPlain() {
    const auto opened = Checkpoint::Open(directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    EXPECT_FALSE(opened->quantized());
    EXPECT_EQ(opened->quant_method(), "");
    EXPECT_EQ(opened->recipe_name(), "");
    EXPECT_TRUE(opened->modules().empty());
    EXPECT_FALSE(opened->IsModulePart("model.norm.weight"));
  }
  TemporaryDirectory directory_;
};

TEST_F(QuantMethods, UnknownOnesAreNamedWithTheKnown) {
  for (const char* method : {"quark", "torchao", "aqlm", "exl3", "GPTQ", "METAL_MARLIN",
                             "metal_marlin ", "plain", ".safetensors", "safetensors"}) {
    Config(std::string(R"({"quantization_config": {"quant_method": ")") + method + R"("}})");
    ExpectError(Code::kUnsupported,
                std::string("config.json: quantization_config: quant_method \"") + method +
                    "\" is not supported; supported: metal_marlin");
  }
}

TEST_F(QuantMethods, OddTypesAreMalformed) {
  const std::string place = "config.json: quantization_config: ";
  for (const auto& [value, got] : {std::pair("4", "4"),
                                   {"[]", "array"},
                                   {"true", "true"},
                                   {"null", "null"},
                                   {"{}", "object"},
                                   {"1.5", "1.5"}}) {
    Config(std::string(R"({"quantization_config": {"quant_method": )") + value + "}}");
    ExpectError(Code::kMalformedFile,
                place + "\"quant_method\": expected a string, got " + std::string(got));
  }
  for (const char* value : {"4", "[]", "true", "\"gptq\"", "[{\"quant_method\": \"gptq\"}]"}) {
    Config(std::string(R"({"quantization_config": )") + value + "}");
    ExpectError(Code::kMalformedFile, place + "expected an object, got ");
  }
}

TEST_F(QuantMethods, AnUnnamedMethodIsNotAPlainCheckpoint) {
  for (const char* value : {"{}", R"({"bits": 4})", R"({"quant_method": ""})"}) {
    Config(std::string(R"({"quantization_config": )") + value + "}");
    ExpectError(Code::kUnsupported,
                "quantization_config: names no \"quant_method\"; supported: metal_marlin");
  }
}

TEST_F(QuantMethods, WritersHaveOtherPlaces) {
  Config(R"({"quantization_config": {"load_in_4bit": true}})");
  ExpectMethod("bitsandbytes");
  Config(R"({"compression_config": {"format": "pack-quantized"}})");
  ExpectMethod("compressed-tensors");
  // MLX writes its key a second time under the usual name.
  Config(R"({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}})");
  ExpectMethod("mlx");
  Config(R"({"text_config": {"quantization_config": {"quant_method": "fp8"}}})");
  ExpectMethod("fp8");
  Config(R"({"text_config": {"quantization_config": {"quant_method": "other"}}})");
  ExpectError(Code::kUnsupported, "config.json: text_config: quantization_config: quant_method");
}

TEST_F(QuantMethods, WritersHaveFilesOfTheirOwn) {
  const std::pair<const char*, const char*> files[] = {{"hf_quant_config.json", "modelopt"},
                                                       {"quantize_config.json", "gptq"},
                                                       {"quant_config.json", "awq"}};
  for (const auto& [name, method] : files) {
    for (const bool config : {false, true}) {
      if (config) Config(R"({"model_type": "llama", "quantization_config": null})");
      EXPECT_TRUE(IsQuantizationFile(name));
      WriteFile(directory_ / name, R"({"bits": 4})");
      ExpectMethod(method);
      WriteFile(directory_ / name, R"({"quant_method": "other"})");
      ExpectError(Code::kUnsupported, std::string(name) + ": quant_method \"other\"");
      WriteFile(directory_ / name, R"({"quant_method": 1})");
      ExpectError(Code::kMalformedFile, std::string(name) + ": \"quant_method\": expected");
      WriteFile(directory_ / name, "[]");
      ExpectError(Code::kMalformedFile, name);
      std::filesystem::remove(directory_ / name);
      if (config) std::filesystem::remove(directory_ / "config.json");
    }
  }
  EXPECT_FALSE(IsQuantizationFile("config.json"));
  EXPECT_FALSE(IsQuantizationFile("generation_config.json"));
}

TEST_F(QuantMethods, CodesOfNoModuleAreNotPlainNumbers) {
  WriteFile(directory_ / "model.safetensors",
            BuildSafetensors({{"m.packed", DType::kI32, {2, 4}, std::string(32, 1)}}));
  for (const char* method :
       {"gptq", "awq", "compressed-tensors", "bitsandbytes", "modelopt", "mxfp4", "fp8", "hqq"}) {
    Config(std::string(R"({"quantization_config": {"quant_method": ")") + method + R"("}})");
    ExpectError(Code::kUnsupported, "tensor \"m.packed\", i32 [2, 4], is a part of no quantized");
  }
}

TEST_F(QuantMethods, NothingSaidIsPlain) {
  ExpectPlain();
  for (const char* config : {"{}", R"({"quantization_config": null})", R"({"quantization": null})",
                             R"({"text_config": {"hidden_size": 4}})", R"({"text_config": 3})",
                             R"({"compression_config": null, "model_type": "llama"})"}) {
    Config(config);
    ExpectPlain();
  }
}

TEST_F(QuantMethods, EveryEntryRefuses) {
  Config(R"({"model_type": "llama", "quantization_config": {"quant_method": "quark"}})");
  const auto device = Device::Open("cpu", {.threads = 1});
  ASSERT_TRUE(device.ok());
  const Status statuses[] = {
      Checkpoint::Open(directory_.path()).status(),
      Model::Open(directory_.path(), *device).status(),
      QuantizeCheckpoint(directory_.path(), directory_ / "q", {}).status(),
      DequantizeCheckpoint(directory_.path(), directory_ / "d", DType::kBf16, false),
  };
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), Code::kUnsupported) << status.message();
    EXPECT_TRUE(Contains(status.message(), "quant_method \"quark\"")) << status.message();
  }
}

TEST(RemoveQuantization, LeavesNothingThatOpenWouldRefuse) {
  Json config = {
      {"quantization_config", 1}, {"quantization", 2}, {"compression_config", 3}, {"a", 4}};
  RemoveQuantization(&config);
  EXPECT_EQ(config, (Json{{"a", 4}}));
}

}  // namespace
}  // namespace marlin::quant_method_test
