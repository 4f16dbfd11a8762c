#include "recipe/architecture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../../source_directory.h"

namespace marlin::architecture_test {
namespace {

using ::testing::HasSubstr;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Config(const std::string& name) {
  return ReadFile(SourceDirectory() + "/tests/data/configs/" + name + ".json");
}

ModelArchitecture Describe(const std::string& name) {
  const Result<ModelArchitecture> model = DescribeModel(Config(name));
  EXPECT_TRUE(model.ok()) << name << ": " << model.status().message();
  return model.ok() ? *model : ModelArchitecture();
}

double Billions(int64_t count) { return static_cast<double>(count) * 1e-9; }

int64_t EmbeddingCount(const ModelArchitecture& model) {
  return model.vocabulary_size * model.hidden_size;
}

// The published figures, to their published digits.
TEST(Architecture, ParametersMatchPublishedCounts) {
  EXPECT_NEAR(Billions(ParameterCount(Describe("mixtral-8x7b").tensors)), 46.7, 0.05);
  EXPECT_NEAR(Billions(ActiveParameterCount(Describe("mixtral-8x7b"))), 12.9, 0.05);
  EXPECT_EQ(ParameterCount(Describe("llama-3-8b").tensors), 8030261248);
  EXPECT_EQ(ActiveParameterCount(Describe("llama-3-8b")), 8030261248);
  EXPECT_NEAR(Billions(ParameterCount(Describe("qwen3-30b-a3b").tensors)), 30.5, 0.05);
  EXPECT_NEAR(Billions(ActiveParameterCount(Describe("qwen3-30b-a3b"))), 3.3, 0.06);

  const ModelArchitecture glm = Describe("glm-4.5-air");
  EXPECT_NEAR(Billions(ParameterCount(glm.tensors)), 106.5, 0.5);
  EXPECT_NEAR(Billions(ParameterCount(glm.tensors) + ParameterCount(glm.prediction_tensors)), 110.5,
              0.5);
  EXPECT_NEAR(Billions(ActiveParameterCount(glm) - 2 * EmbeddingCount(glm)), 12.0, 0.5);

  const ModelArchitecture oss = Describe("gpt-oss-120b");
  EXPECT_NEAR(Billions(ParameterCount(oss.tensors)), 116.83, 0.005);
  EXPECT_NEAR(Billions(ActiveParameterCount(oss) - EmbeddingCount(oss)), 5.13, 0.005);

  const ModelArchitecture deepseek = Describe("deepseek-v3");
  EXPECT_NEAR(Billions(ParameterCount(deepseek.tensors)), 671.0, 0.5);
  EXPECT_NEAR(Billions(ActiveParameterCount(deepseek)), 37.5, 0.5);
  // The published figure leaves out the copies of embedding and head, and eh_proj.
  const int64_t others =
      2 * (EmbeddingCount(deepseek) + deepseek.hidden_size * deepseek.hidden_size);
  EXPECT_NEAR(Billions(ParameterCount(deepseek.prediction_tensors) - others), 11.5, 0.05);
}

/// Layers that predict further tokens (MTP) in a module of their own: as many as the config says.
TEST(Architecture, PredictionLayersInAModule) {
  const auto described = [](const std::string& layers) {
    const auto model = DescribeModel(R"({"model_type": "qwen3_next", "hidden_size": 64,
      "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 80,
      "num_experts": 2, "num_experts_per_tok": 1)" +
                                     layers + "}");
    EXPECT_TRUE(model.ok()) << model.status().message();
    return model->prediction_tensors;
  };
  EXPECT_TRUE(described("").empty());
  std::map<std::string, ModelTensor> by_name;
  for (const ModelTensor& tensor : described(R"(, "mtp_num_hidden_layers": 2)")) {
    EXPECT_TRUE(tensor.name.starts_with("mtp.")) << tensor.name;
    EXPECT_TRUE(by_name.emplace(tensor.name, tensor).second) << tensor.name;
  }
  EXPECT_EQ(by_name.at("mtp.fc.weight").shape, (Shape{64, 128}));
  for (const char* const norm :
       {"mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"}) {
    EXPECT_EQ(by_name.at(norm).layer_class, LayerClass::kNorm) << norm;
  }
  // Attention, not the mixer of the model's other layers, and experts.
  EXPECT_EQ(by_name.at("mtp.layers.1.self_attn.q_proj.weight").layer_class,
            LayerClass::kAttentionQkv);
  EXPECT_EQ(by_name.at("mtp.layers.0.mlp.experts.1.up_proj.weight").layer_class,
            LayerClass::kMoeExpert);
  EXPECT_FALSE(by_name.contains("mtp.layers.2.self_attn.q_proj.weight"));
  EXPECT_FALSE(by_name.contains("model.layers.4.eh_proj.weight"));
}

TEST(Architecture, NamesAndShapesOfStackedExperts) {
  const ModelArchitecture oss = Describe("gpt-oss-120b");
  std::map<std::string, const ModelTensor*> by_name;
  for (const ModelTensor& tensor : oss.tensors) by_name[tensor.name] = &tensor;
  EXPECT_EQ(by_name.size(), oss.tensors.size());
  const ModelTensor* gate_up = by_name.at("model.layers.35.mlp.experts.gate_up_proj");
  EXPECT_EQ(gate_up->shape, (Shape{128, 2880, 5760}));
  EXPECT_TRUE(gate_up->input_first);
  EXPECT_TRUE(gate_up->routed);
  EXPECT_EQ(gate_up->layer_class, LayerClass::kMoeExpert);
  EXPECT_EQ(by_name.at("model.layers.0.self_attn.sinks")->shape, (Shape{64}));
  EXPECT_EQ(by_name.at("model.layers.0.self_attn.q_proj.weight")->shape, (Shape{4096, 2880}));
}

TEST(Architecture, EveryMatrixOfADecoderLayerHasAClass) {
  for (const char* name : {"mixtral-8x7b", "llama-3-8b", "qwen3-30b-a3b", "glm-4.5-air",
                           "gpt-oss-120b", "deepseek-v3"}) {
    for (const ModelTensor& tensor : Describe(name).tensors) {
      if (IsWeightMatrix(tensor.name, tensor.shape)) {
        EXPECT_NE(tensor.layer_class, LayerClass::kOther) << tensor.name;
      }
    }
  }
}

nlohmann::json Edited(const char* key, nlohmann::json value, const char* base = "qwen3-30b-a3b") {
  nlohmann::json config = nlohmann::json::parse(Config(base));
  config[key] = std::move(value);
  return config;
}

TEST(Architecture, RefusesWrongConfigsByName) {
  const auto expect = [](const std::string& text, Code code, const char* message) {
    const Status status = DescribeModel(text).status();
    EXPECT_EQ(status.code(), code) << text;
    EXPECT_THAT(status.message(), HasSubstr(message));
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
  };
  expect("", Code::kMalformedFile, "config.json");
  expect("[1]", Code::kMalformedFile, "expected a JSON object");
  expect("{}", Code::kMalformedFile, "model_type: the key is missing");
  expect(R"({"model_type": 7})", Code::kMalformedFile, "model_type: expected a string");
  expect(R"({"model_type": "bert"})", Code::kUnsupported, "model_type 'bert' is not known");
  expect(R"({"model_type": "bert"})", Code::kUnsupported, "qwen3_moe");
  expect(Edited("hidden_size", -4).dump(), Code::kMalformedFile,
         "hidden_size: expected 1..1048576");
  expect(Edited("hidden_size", 0).dump(), Code::kMalformedFile, "got 0");
  expect(Edited("hidden_size", 1e30).dump(), Code::kMalformedFile, "hidden_size");
  expect(Edited("hidden_size", "2048").dump(), Code::kMalformedFile, "hidden_size");
  expect(Edited("hidden_size", nullptr).dump(), Code::kMalformedFile, "hidden_size");
  expect(Edited("vocab_size", uint64_t{1} << 63).dump(), Code::kMalformedFile, "vocab_size");
  expect(Edited("num_hidden_layers", 1 << 20).dump(), Code::kMalformedFile, "num_hidden_layers");
  expect(Edited("num_experts_per_tok", 129).dump(), Code::kMalformedFile, "129 of 128 experts");
  expect(Edited("num_key_value_heads", 5).dump(), Code::kMalformedFile, "5 do not divide");
  expect(Edited("mlp_only_layers", "0").dump(), Code::kMalformedFile, "mlp_only_layers");
  expect(Edited("attention_bias", 3).dump(), Code::kMalformedFile, "attention_bias");
  expect(Edited("num_experts", 1 << 14).dump(), Code::kMalformedFile, "more than 1048576 tensors");
  nlohmann::json narrow = Edited("hidden_size", 16, "llama-3-8b");
  narrow.erase("head_dim");
  expect(narrow.dump(), Code::kMalformedFile, "32 heads of a hidden_size of 16");
  expect(std::string(1 << 20, '['), Code::kMalformedFile, "config.json");
}

/// Types whose layers may all have experts read the width of the others if there are any.
TEST(Architecture, RefusesDenseLayersWithoutAWidth) {
  nlohmann::json config = Edited("first_k_dense_replace", 1, "glm-4.5-air");
  config.erase("intermediate_size");
  const Status status = DescribeModel(config.dump()).status();
  EXPECT_EQ(status.code(), Code::kMalformedFile);
  EXPECT_THAT(status.message(), HasSubstr("intermediate_size"));
  config["first_k_dense_replace"] = 0;
  EXPECT_TRUE(DescribeModel(config.dump()).ok());
}

TEST(Architecture, ConfigSwitchesChangeTheTensors) {
  const auto count = [](const nlohmann::json& config) {
    const auto model = DescribeModel(config.dump());
    EXPECT_TRUE(model.ok()) << model.status().message();
    return ParameterCount(model->tensors);
  };
  const int64_t base = count(Edited("tie_word_embeddings", false));
  EXPECT_EQ(base - count(Edited("tie_word_embeddings", true)), 151936 * 2048);
  // One layer changes from 128 experts and a router to one MLP of the dense width.
  EXPECT_EQ(base - count(Edited("mlp_only_layers", {5})),
            3 * 2048 * (128 * 768 - 6144) + 128 * 2048);
  EXPECT_EQ(count(Edited("attention_bias", true)) - base, 48 * (4096 + 512 + 512 + 2048));
}

}  // namespace
}  // namespace marlin::architecture_test
