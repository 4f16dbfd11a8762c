// A small random model of every runnable type, plain and quantized: the tensors listed for a
// config.json are those that loading needs, and the spellings of different writers give one model.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>
#include <set>

#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "base/json.h"
#include "base/scalars.h"
#include "calibrate/awq_scaler.h"
#include "checkpoint/codes/scaled_tensors.h"
#include "checkpoint/convert/quantize_plan.h"
#include "marlin/calibrate.h"
#include "marlin/checkpoint.h"
#include "marlin/importance.h"
#include "marlin/model.h"
#include "newer_families.h"
#include "recipe/architecture.h"
#include "recipe/decoder_shape.h"

namespace marlin::families_test {
namespace {

using testing::BuildSafetensors;
using testing::RandomBf16;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

/// Two layers, the first one a gated delta net.
Json Hybrid(Json own) {
  own.update({{"layer_types", {"linear_attention", "full_attention"}},
              {"linear_num_key_heads", 2},
              {"linear_num_value_heads", 4},
              {"linear_key_head_dim", 12},
              {"linear_value_head_dim", 16}});
  return own;
}

ConfigMap SomeConfigs() {
  return {
      {"llama", {{"attention_bias", true}, {"mlp_bias", true}}},
      {"mistral", {{"sliding_window", 4}}},
      {"mixtral", {{"num_local_experts", 4}}},
      {"glm", {{"attention_bias", true}}},
      {"helium", {{"attention_bias", true}, {"mlp_bias", true}}},
      {"cohere2", {{"attention_bias", true}, {"sliding_window", 4}, {"sliding_window_pattern", 2}}},
      {"qwen2", {{"use_sliding_window", true}, {"sliding_window", 4}, {"max_window_layers", 1}}},
      {"qwen3", {{"attention_bias", true}}},
      {"qwen2_moe", {{"num_experts", 4}, {"shared_expert_intermediate_size", 48}}},
      {"qwen3_moe", {{"num_experts", 4}, {"decoder_sparse_step", 2}}},
      {"qwen3_next", Hybrid({{"num_experts", 4}, {"shared_expert_intermediate_size", 48}})},
      {"qwen3_5_text", Hybrid({})},
      {"qwen3_5_moe_text", Hybrid({{"num_experts", 4}, {"shared_expert_intermediate_size", 48}})},
      {"glm4", {{"attention_bias", true}}},
      {"glm4_moe",
       {{"n_routed_experts", 4},
        {"attention_bias", true},
        {"use_qk_norm", true},
        {"n_shared_experts", 1},
        {"first_k_dense_replace", 1},
        {"num_nextn_predict_layers", 1}}},
      {"glm4_moe_lite", {{"n_routed_experts", 4}, {"n_shared_experts", 1}, {"q_lora_rank", 32}}},
      {"deepseek_v3",
       {{"n_routed_experts", 4},
        {"n_shared_experts", 2},
        {"q_lora_rank", nullptr},
        {"n_group", 1},
        {"topk_group", 1},
        {"first_k_dense_replace", 0}}},
      {"gpt_oss", {{"num_local_experts", 4}, {"sliding_window", 4}}},
      {"deepseek_v2",
       {{"n_routed_experts", 4},
        {"n_shared_experts", 1},
        {"q_lora_rank", nullptr},
        {"topk_method", "group_limited_greedy"},
        {"n_group", 2},
        {"topk_group", 1},
        {"routed_scaling_factor", 2.0},
        {"first_k_dense_replace", 1}}},
      {"kimi_k2",
       {{"n_routed_experts", 4},
        {"q_lora_rank", 32},
        {"n_group", 1},
        {"topk_group", 1},
        {"first_k_dense_replace", 1}}},
  };
}

/// Types with Mamba-2 mixers or short convolutions.
ConfigMap HybridConfigs() {
  return {
      {"lfm2", {{"layer_types", {"conv", "full_attention"}}, {"block_multiple_of", 32}}},
      {"lfm2_moe",
       {{"layer_types", {"full_attention", "conv"}},
        {"conv_bias", true},
        {"num_experts", 4},
        {"num_dense_layers", 1}}},
      {"nemotron_h",
       {{"layer_types", {"mamba", "moe", "attention", "mlp"}},
        {"n_routed_experts", 4},
        {"moe_shared_expert_intermediate_size", 48},
        {"mamba_num_heads", 4},
        {"mamba_head_dim", 16},
        {"n_groups", 2},
        {"ssm_state_size", 24}}},
      {"granitemoehybrid",
       {{"layer_types", {"mamba", "attention"}},
        {"num_local_experts", 4},
        {"shared_intermediate_size", 48},
        {"mamba_n_heads", 8},
        {"mamba_n_groups", 2},
        {"mamba_d_state", 24},
        {"embedding_multiplier", 6.0},
        {"residual_multiplier", 0.5},
        {"attention_multiplier", 0.1},
        {"logits_scaling", 3.0}}},
  };
}

/// By type, and of further ones by "type/name".
const ConfigMap& Configs() {
  static const ConfigMap configs = [] {
    ConfigMap all = SomeConfigs();
    all.merge(OtherConfigs());
    all.merge(HybridConfigs());
    all.merge(GemmaConfigs());
    all.merge(NewerConfigs());
    return all;
  }();
  return configs;
}

std::string TypeOf(const std::string& name) { return name.substr(0, name.find('/')); }

class Families : public ::testing::Test {
 protected:
  void SetUp() override { device_.emplace(*Device::Open(TestDevice(), {.threads = 2})); }

  void Make(const std::string& name) {
    const std::string type = TypeOf(name);
    config_ = {{"model_type", type},       {"hidden_size", 64},
               {"intermediate_size", 96},  {"num_hidden_layers", 2},
               {"vocab_size", 64},         {"num_attention_heads", 4},
               {"num_key_value_heads", 2}, {"moe_intermediate_size", 32},
               {"num_experts_per_tok", 2}, {"kv_lora_rank", 16},
               {"qk_nope_head_dim", 16},   {"qk_rope_head_dim", 8},
               {"v_head_dim", 16},         {"max_position_embeddings", 64}};
    config_.update(Configs().at(name));
    // The class of latent attention has qk_rope_head_dim instead.
    const Json defaults = Json::parse(TypeDefaults(type));
    if (!defaults.contains("kv_lora_rank")) config_["head_dim"] = 16;
    const auto model = DescribeModel(config_.dump());
    ASSERT_TRUE(model.ok()) << model.status().message();
    tensors_.clear();
    uint32_t seed = 1;
    for (const ModelTensor& tensor : model->tensors) {
      tensors_.push_back(RandomBf16(tensor.name, tensor.shape, seed++));
    }
  }
  std::string Write(const std::string& name) {
    const std::string path = directory_ / name;
    std::filesystem::create_directories(path);
    WriteFile(path + "/config.json", config_.dump());
    WriteFile(path + "/model.safetensors", BuildSafetensors(tensors_));
    return path;
  }
  std::vector<float> Logits(const std::string& path) { return Logits(path, *device_); }
  static std::vector<float> Logits(const std::string& path, const Device& device,
                                   const ModelOptions& options = {}) {
    const auto model = Model::Open(path, device, options);
    EXPECT_TRUE(model.ok()) << model.status().message();
    if (!model.ok()) return {};
    const std::vector<int32_t> tokens = {5, 17, 4, 40, 63, 31, 8, 2};
    std::vector<float> logits(tokens.size() * 64);
    Sequence sequence = *model->NewSequence();
    const SequenceInput input{&sequence, tokens, true};
    const MutableTensorView out(logits.data(), DType::kF32, {8, 64});
    EXPECT_TRUE(model->Forward({&input, 1}, out).ok());
    for (const float logit : logits) EXPECT_TRUE(std::isfinite(logit));
    return logits;
  }
  std::string Quantize(const std::string& source, const char* format = "s8/g16") {
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::Uniform(format);
    options.overwrite = true;
    const auto report = QuantizeCheckpoint(source, directory_ / "quantized", options);
    EXPECT_TRUE(report.ok()) << report.status().message();
    return directory_ / "quantized";
  }
  /// With 1600 tokens; the least for 96 inputs is 1216.
  Result<QuantizeCheckpointReport> CalibrateTo(const std::string& source, const char* format,
                                               QuantizeMethod method, uint32_t tokens = 1600) {
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::Uniform(format);
    options.method = method;
    options.overwrite = true;
    CalibrationOptions calibration;
    for (uint32_t i = 0, x = 1; i < tokens; ++i, x = x * 1664525 + 1013904223) {
      calibration.text.push_back(static_cast<int32_t>(x >> 26));
    }
    const std::string output = directory_ / "calibrated";
    return NeedsCalibration(method)
               ? QuantizeCalibrated(source, output, *device_, options, calibration)
               : QuantizeCheckpoint(source, output, options);
  }
  /// 3 bits.
  std::string Calibrate(const std::string& source, QuantizeMethod method) {
    const auto report = CalibrateTo(source, "nf3/g32", method);
    EXPECT_TRUE(report.ok()) << report.status().message();
    if (!report.ok()) return source;
    for (const SkippedTensor& tensor : report->fallbacks) {
      const bool known = tensor.reason.find("predicts further tokens") != std::string::npos;
      EXPECT_TRUE(known) << tensor.name << ": " << tensor.reason;
    }
    return report->output;
  }
  /// The method that the directory's record has for a module of the last calibration: its own, or
  /// the directory's.
  std::string RecordedMethod(const std::string& module) {
    const Result<Checkpoint> made = Checkpoint::Open(directory_ / "calibrated");
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (!made.ok()) return {};
    const Json record = Json::parse(made->config_json()).at("quantization_config");
    const Json& own = record.at("modules").at(module);
    return (own.contains("method") ? own : record).at("method").get<std::string>();
  }

  /// Multiplies every eleventh element of the norms, and row of v and up, by 64.
  void PlantOutliers() {
    for (TestTensor& tensor : tensors_) {
      // Norms of queries and keys make scores, no matrix's inputs.
      const bool norm = tensor.name.ends_with("norm.weight") &&
                        tensor.name.find("q_norm") == std::string::npos &&
                        tensor.name.find("k_norm") == std::string::npos;
      const bool rows = tensor.name.find("v_proj") != std::string::npos ||
                        tensor.name.find("kv_b_proj") != std::string::npos ||
                        tensor.name.find("up_proj") != std::string::npos;
      if (!norm && !rows) continue;
      const int64_t outputs = tensor.shape[std::max(tensor.shape.rank() - 2, 0)];
      const int64_t width = tensor.shape.ElementCount() / outputs;
      for (int64_t i = 0; i < tensor.shape.ElementCount(); ++i) {
        if (i / width % 11 != 3) continue;
        uint16_t bits = 0;
        std::memcpy(&bits, tensor.data.data() + i * 2, sizeof(bits));
        bits = FloatToBf16(64.0F * Bf16ToFloat(bits));
        std::memcpy(tensor.data.data() + i * 2, &bits, sizeof(bits));
      }
    }
  }

  /// Multiplies AWQ's scales into the tensors and expects the same logits.
  void ScaleAndCompare() {
    std::vector<std::vector<int32_t>> texts(2);
    for (int32_t i = 0; i < 400; ++i) texts[static_cast<size_t>(i / 200)].push_back(i * i % 61);
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::Uniform("u4/g16");
    const std::string path = Write("plain");
    const auto directory = OpenModelDirectory(path);
    ASSERT_TRUE(directory.ok()) << directory.status().message();
    const Checkpoint::Impl& source = CheckpointAccess::Get(directory->checkpoint);
    const auto plan = PlanQuantize(source, options);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    AwqScaler scaler(*directory, *device_, texts, *plan);
    const Status status = scaler.Run();
    ASSERT_TRUE(status.ok()) << status.message();
    // Two layers of at least: q, k and v; the output projection; gate and up. Without a norm before
    // its block, nothing takes the scales of the first and the last.
    const Family& family = **FindFamily(config_["model_type"]);
    EXPECT_GE(scaler.inputs(), family.norms->input.empty() ? 4 : 6);
    EXPECT_GE(scaler.scaled_inputs() * 10, scaler.inputs() * 7)
        << scaler.scaled_inputs() << " of " << scaler.inputs();
    const std::vector<float> before = Logits(path);
    for (TestTensor& tensor : tensors_) {
      const auto found = scaler.exponents().find(tensor.name);
      if (found == scaler.exponents().end()) continue;
      const auto scaled = ScaledTensor(source, *source.FindTensor(tensor.name), found->second);
      ASSERT_TRUE(scaled.ok());
      tensor.dtype = ScaledDType(tensor.dtype, found->second);
      const int64_t bytes = tensor.shape.ElementCount() * DTypeBytes(tensor.dtype);
      tensor.data.assign(reinterpret_cast<const char*>(scaled->data()), static_cast<size_t>(bytes));
    }
    const std::vector<float> after = Logits(Write("scaled"));
    if (!(*FindFamily(config_["model_type"]))->one_plus_norms) {
      EXPECT_EQ(after, before);
      return;
    }
    // A product minus 1 is rounded to f32.
    ASSERT_EQ(after.size(), before.size());
    double difference = 0;
    double size = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      difference += std::pow(double{after[i]} - double{before[i]}, 2);
      size += std::pow(double{before[i]}, 2);
    }
    EXPECT_LT(difference, 1e-6 * size);
  }

  bool HasExperts() const {
    return std::any_of(tensors_.begin(), tensors_.end(), [](const TestTensor& tensor) {
      return tensor.name.find(".experts.") != std::string::npos;
    });
  }

  void Rename(const char* from, const char* to) {
    for (TestTensor& tensor : tensors_) {
      tensor.name = std::regex_replace(tensor.name, std::regex(from), to);
    }
  }
  /// Fuses individual experts into the two stacks of transformers 5, [experts, out, in].
  void Fuse(const std::string& block) {
    std::map<std::string, TestTensor> of;
    std::vector<TestTensor> kept;
    for (TestTensor& tensor : tensors_) {
      if (tensor.name.find(".experts.") == std::string::npos) {
        kept.push_back(tensor);
      } else {
        of[tensor.name] = tensor;
      }
    }
    for (int layer = 0; layer < 2; ++layer) {
      const std::string experts =
          "model.layers." + std::to_string(layer) + "." + block + ".experts";
      if (!of.contains(experts + ".0.gate_proj.weight")) continue;
      TestTensor both{experts + ".gate_up_proj", DType::kBf16, {4, 0, 64}, {}};
      TestTensor down{experts + ".down_proj", DType::kBf16, {4, 64, 0}, {}};
      for (int e = 0; e < 4; ++e) {
        const std::string name = experts + "." + std::to_string(e);
        const TestTensor& gate = of.at(name + ".gate_proj.weight");
        both.data += gate.data + of.at(name + ".up_proj.weight").data;
        down.data += of.at(name + ".down_proj.weight").data;
        both.shape[1] = 2 * gate.shape[0];
        down.shape[2] = gate.shape[0];
      }
      kept.push_back(both);
      kept.push_back(down);
    }
    tensors_ = kept;
  }

  TemporaryDirectory directory_;
  std::optional<Device> device_;
  Json config_;
  std::vector<TestTensor> tensors_;
};

TEST_F(Families, EveryTypeHasAConfig) {
  for (const std::string& type : SupportedModelTypes())
    EXPECT_TRUE(Configs().contains(type)) << type;
}

TEST_F(Families, WhatIsListedIsLoaded) {
  for (const auto& [type, changes] : Configs()) {
    SCOPED_TRACE(type);
    Make(type);
    const std::string path = Write("plain");
    const std::vector<float> plain = Logits(path);
    const std::vector<float> quantized = Logits(Quantize(path));
    ASSERT_EQ(plain.size(), quantized.size());
    double difference = 0;
    double size = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      difference += std::pow(double{plain[i]} - double{quantized[i]}, 2);
      size += std::pow(double{plain[i]}, 2);
    }
    EXPECT_LT(difference, 0.01 * size);
    EXPECT_GT(difference, 0);
    // One missing tensor, one extra tensor.
    for (size_t at = 0; at < tensors_.size(); at += 7) {
      const TestTensor tensor = tensors_[at];
      tensors_[at].name = "extra";
      const Status status = Model::Open(Write("plain"), *device_).status();
      EXPECT_EQ(status.code(), Code::kMalformedFile) << tensor.name << ": " << status.message();
      tensors_[at] = tensor;
    }
  }
}

TEST_F(Families, WrongGatedDeltaNetsAreRefused) {
  const auto expect = [&](Code code, const std::string& text) {
    const Status status = Model::Open(Write("wrong"), *device_).status();
    EXPECT_EQ(status.code(), code) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
  };
  const auto tensor = [&](const std::string& name) -> TestTensor& {
    return *std::ranges::find(tensors_, "model.layers.0.linear_attn." + name, &TestTensor::name);
  };
  for (const char* const name : {"A_log", "dt_bias", "conv1d.weight", "norm.weight"}) {
    Make("qwen3_5_text");
    tensor(name).name = "model.layers.1.linear_attn." + std::string(name);
    expect(Code::kMalformedFile,
           "tensor \"model.layers.0.linear_attn." + std::string(name) + "\" is missing");
    Make("qwen3_5_text");
    tensors_.push_back(RandomBf16("model.layers.1.linear_attn." + std::string(name), {4}, 1));
    expect(Code::kMalformedFile, "\"model.layers.1.linear_attn." + std::string(name) + "\"");
  }
  Make("qwen3_5_text");
  tensor("conv1d.weight").shape = {112, 4, 1};
  expect(Code::kMalformedFile, "conv1d.weight\": expected [112, 1, 4], got [112, 4, 1]");
  Make("qwen3_5_text");
  config_["linear_conv_kernel_dim"] = 3;
  expect(Code::kMalformedFile, "conv1d.weight\": expected [112, 1, 3], got [112, 1, 4]");
  config_["linear_conv_kernel_dim"] = 17;
  expect(Code::kMalformedFile, "linear_conv_kernel_dim: ");
  Make("qwen3_5_text");
  config_["layer_types"][0] = "mamba";
  expect(Code::kUnsupported, "layer_types: 'mamba' is not supported");
  config_["layer_types"] = {"full_attention"};
  expect(Code::kMalformedFile, "layer_types: 1 entries for 2 layers");
  Make("qwen3_next");
  config_["linear_num_key_heads"] = 3;
  expect(Code::kMalformedFile, "linear_num_value_heads: ");
  Make("qwen3_next");
  config_["hidden_act"] = "gelu_pytorch_tanh";
  expect(Code::kMalformedFile, "hidden_act: ");
}

TEST_F(Families, CalibrationKeepsEveryTypeNearer) {
  for (const auto& [type, changes] : Configs()) {
    SCOPED_TRACE(type);
    Make(type);
    const std::string path = Write("plain");
    const std::vector<float> plain = Logits(path);
    const auto difference = [&](QuantizeMethod method) {
      const std::vector<float> quantized = Logits(Calibrate(path, method));
      double sum = 0;
      for (size_t i = 0; i < plain.size(); ++i) {
        sum += std::pow(double{plain[i]} - double{quantized[i]}, 2);
      }
      return sum;
    };
    EXPECT_LT(difference(QuantizeMethod::kGptq), 0.9 * difference(QuantizeMethod::kMse));
  }
}

TEST_F(Families, EveryTypeIsRotated) {
  for (const auto method : {QuantizeMethod::kGptq, QuantizeMethod::kAwqGptq}) {
    SCOPED_TRACE(std::string(QuantizeMethodName(method)));
    for (const auto& [type, changes] : Configs()) {
      SCOPED_TRACE(type);
      Make(type);
      PlantOutliers();
      const auto report = CalibrateTo(Write("plain"), "s8/g16/h16", method);
      ASSERT_TRUE(report.ok()) << report.status().message();
      EXPECT_GT(report->rotatable, 0);
      EXPECT_GT(report->rotated, 0);
      const std::vector<float> plain = Logits(directory_ / "plain");
      const std::vector<float> rotated = Logits(report->output);
      std::vector<double> differences(8);  // One for each token.
      double size = 0;
      for (size_t i = 0; i < plain.size(); ++i) {
        differences[i / 64] += std::pow(double{plain[i]} - double{rotated[i]}, 2);
        size += std::pow(double{plain[i]}, 2);
      }
      // Where two experts are almost equally good, rounding decides which one a token gets, and the
      // order of a processor's additions decides the rounding.
      std::sort(differences.begin(), differences.end());
      if (HasExperts()) differences.pop_back();
      EXPECT_LT(std::accumulate(differences.begin(), differences.end(), 0.0), 0.01 * size);
    }
  }
}

/// In fp32, every type has the CPU's logits but for rounding, on the Metal simulator if the tests
/// are not on another device.
TEST_F(Families, EveryTypeHasTheLogitsOfTheCpu) {
  const auto device = Device::Open(OnOtherDevice() ? TestDevice() : "metal-sim");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  const Device cpu = *Device::Open("cpu");
  const ModelOptions exact{.allow_bf16_activations = false};
  for (const auto& [type, changes] : Configs()) {
    SCOPED_TRACE(type);
    Make(type);
    const std::string path = Write("plain");
    const std::vector<float> expected = Logits(path, cpu, exact);
    const std::vector<float> logits = Logits(path, *device, exact);
    double most = 0;
    for (const float logit : expected) most = std::max(most, std::abs(double{logit}));
    for (size_t i = 0; i < logits.size(); ++i) {
      ASSERT_NEAR(logits[i], expected[i], 1e-4 * most) << i;
    }
  }
}

/// The same with the first layers on the host, and with all of them.
TEST_F(Families, EveryTypeRunsInTwoParts) {
  if (!OnOtherDevice()) GTEST_SKIP() << "the tests' device is the host";
  const Device device = *Device::Open(TestDevice());
  const Device cpu = *Device::Open("cpu");
  ModelOptions options{.allow_bf16_activations = false};
  for (const auto& [type, changes] : Configs()) {
    Make(type);
    const std::string path = Write("plain");
    options.gpu_layers = kGpuLayersAuto;
    const std::vector<float> expected = Logits(path, cpu, options);
    double most = 0;
    for (const float logit : expected) most = std::max(most, std::abs(double{logit}));
    for (const int64_t layers : {0, 1}) {
      SCOPED_TRACE(type + " " + std::to_string(layers));
      options.gpu_layers = layers;
      const Status opened = Model::Open(path, device, options).status();
      if (opened.message().find("reads the keys of layer") != std::string::npos) continue;
      const std::vector<float> logits = Logits(path, device, options);
      for (size_t i = 0; i < logits.size(); ++i) {
        ASSERT_NEAR(logits[i], expected[i], 1e-4 * most) << i;
      }
    }
  }
}

/// A layer with experts expands rotated matrices of theirs, so that a recipe rotates none.
TEST_F(Families, ExpertsAreNotRotated) {
  Make("qwen2_moe");
  const auto report = CalibrateTo(Write("plain"), "nf3/g32/h16", QuantizeMethod::kGptq);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const auto made = Checkpoint::Open(report->output);
  ASSERT_TRUE(made.ok());
  int64_t shared = 0;
  for (const QuantizedModule& module : made->modules()) {
    if (module.name.find("expert") == std::string::npos) continue;
    EXPECT_EQ(module.spec.input_hadamard, 0) << module.name;
    if (module.name.find("shared_expert.") != std::string::npos) ++shared;
  }
  EXPECT_EQ(shared, 6);
}

TEST_F(Families, LayersThatPredictAreListed) {
  Make("glm4_moe");
  const auto model = DescribeModel(config_.dump());
  for (const ModelTensor& tensor : model->prediction_tensors) {
    tensors_.push_back(RandomBf16(tensor.name, tensor.shape, 7));
  }
  const std::string path = Write("plain");
  const std::string prefix = "model.layers.2.";
  for (const auto method :
       {QuantizeMethod::kGptq, QuantizeMethod::kAwq, QuantizeMethod::kAwqGptq}) {
    SCOPED_TRACE(std::string(QuantizeMethodName(method)));
    const auto report = CalibrateTo(path, "nf3/g32", method);
    ASSERT_TRUE(report.ok()) << report.status().message();
    std::map<std::string, std::string> reasons;
    for (const SkippedTensor& tensor : report->fallbacks) reasons[tensor.name] = tensor.reason;
    int64_t unreached = 0;
    for (const TestTensor& tensor : tensors_) {
      const bool quantized = tensor.name.starts_with(prefix) &&
                             tensor.name.ends_with("_proj.weight") &&
                             tensor.name.find("eh_proj") == std::string::npos;
      if (!quantized) continue;
      unreached += tensor.shape.ElementCount();
      EXPECT_EQ(reasons[tensor.name],
                "mse: it is in a layer that predicts further tokens, which calibration skips");
    }
    EXPECT_GT(unreached, 0);
    EXPECT_EQ(report->calibrated_parameters, report->quantized_parameters - unreached);
    EXPECT_EQ(RecordedMethod(prefix + "self_attn.q_proj.weight"), "mse");
    EXPECT_EQ(RecordedMethod(prefix + "mlp.experts.*.up_proj.weight"), "mse");
    EXPECT_EQ(RecordedMethod("model.layers.1.self_attn.q_proj.weight"), QuantizeMethodName(method));
    EXPECT_EQ(RecordedMethod("model.layers.1.mlp.shared_experts.up_proj.weight"),
              QuantizeMethodName(method));
  }
}

TEST_F(Families, LayersBeyondTheConfigAreListed) {
  Make("llama");
  config_["num_hidden_layers"] = 1;
  const auto report = CalibrateTo(Write("plain"), "nf3/g32/h16", QuantizeMethod::kGptq);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->fallbacks.size(), 7U);
  for (const SkippedTensor& tensor : report->fallbacks) {
    EXPECT_TRUE(tensor.name.starts_with("model.layers.1.")) << tensor.name;
    EXPECT_EQ(tensor.reason,
              "mse: it is not a matrix of the model's layers, \"model.layers.0.\" to "
              "\"model.layers.0.\"");
  }
  EXPECT_EQ(2 * report->calibrated_parameters, report->quantized_parameters);
  EXPECT_EQ(report->rotatable, 7);
  EXPECT_EQ(RecordedMethod("model.layers.0.mlp.up_proj.weight"), "gptq");
  EXPECT_EQ(RecordedMethod("model.layers.1.mlp.up_proj.weight"), "mse");
}

TEST_F(Families, AMethodWithoutAnyDataIsRefused) {
  Make("llama");
  Rename("^model\\.", "thinker.model.");
  const std::string path = Write("plain");
  for (const auto method :
       {QuantizeMethod::kGptq, QuantizeMethod::kAwq, QuantizeMethod::kAwqGptq}) {
    SCOPED_TRACE(std::string(QuantizeMethodName(method)));
    const Status status = CalibrateTo(path, "nf3/g32", method).status();
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_NE(status.message().find(
                  "there are no data for any of the matrices that the recipe quantizes: "
                  "\"thinker.model.layers.0."),
              std::string::npos)
        << status.message();
    EXPECT_FALSE(std::filesystem::exists(directory_ / "calibrated"));
  }
  Make("llama");
  const Status few = CalibrateTo(Write("plain"), "nf3/g32", QuantizeMethod::kGptq, 1100).status();
  EXPECT_EQ(few.code(), Code::kInvalidArgument);
  EXPECT_NE(few.message().find("tokens are too few for every matrix: \"model.layers.0."),
            std::string::npos)
      << few.message();
  EXPECT_NE(few.message().find("with 64 inputs, needs at least 1152"), std::string::npos);
  // Enough for 64 inputs, and not for the 96 of down.
  const auto some = CalibrateTo(Write("plain"), "nf3/g32", QuantizeMethod::kGptq, 1152);
  ASSERT_TRUE(some.ok()) << some.status().message();
  EXPECT_EQ(some->fallbacks.size(), 2U);
  EXPECT_EQ(some->calibrated_parameters, some->quantized_parameters - 2 * 64 * 96);
  EXPECT_EQ(RecordedMethod("model.layers.1.mlp.down_proj.weight"), "mse");
  EXPECT_EQ(RecordedMethod("model.layers.1.mlp.up_proj.weight"), "gptq");
}

/// The scales that are found move between tensors, and the model computes what it did, bit for bit.
TEST_F(Families, AwqScalesChangeNoLogit) {
  for (const auto& [type, changes] : Configs()) {
    SCOPED_TRACE(type);
    Make(type);
    PlantOutliers();
    ScaleAndCompare();
  }
  Make("qwen3_moe");
  PlantOutliers();
  Fuse("mlp");
  SCOPED_TRACE("experts in stacks");
  ScaleAndCompare();
}

/// Every matrix that quantization asks for is among those that were measured, under its name.
TEST_F(Families, ImportanceIsMeasuredForEveryTypeWithNamesInGguf) {
  ImportanceOptions measure;
  for (int32_t i = 0; i < 600; ++i) measure.text.text.push_back(i * i % 61);
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::Uniform("nf3/g16");
  options.method = QuantizeMethod::kMse;
  options.overwrite = true;
  for (const auto& [type, changes] : Configs()) {
    SCOPED_TRACE(type);
    Make(type);
    const std::string path = Write("plain");
    const auto measured = MeasureImportance(path, *device_, measure);
    if (WithoutGgufNames().contains(TypeOf(type))) {
      EXPECT_EQ(measured.status().code(), Code::kUnsupported);
      EXPECT_NE(measured.status().message().find("model_type '" + TypeOf(type)), std::string::npos);
      continue;
    }
    ASSERT_TRUE(measured.ok()) << measured.status().message();
    const auto report = QuantizeWithImportance(path, directory_ / "weighted", options, *measured);
    ASSERT_TRUE(report.ok()) << report.status().message();
    for (const SkippedTensor& tensor : report->fallbacks) {
      // Layers that predict further tokens are not run.
      const bool known = tensor.name == "model.embed_tokens.weight" ||
                         tensor.name.starts_with("model.layers.2.") ||
                         tensor.name.starts_with("mtp.") ||
                         tensor.reason == "unweighted: no token was seen";
      EXPECT_TRUE(known) << tensor.name << ": " << tensor.reason;
    }
    if (type == "gpt_oss") {
      EXPECT_EQ(measured->inputs.at("blk.1.ffn_up_exps.weight"),
                measured->inputs.at("blk.1.ffn_gate_exps.weight"));
    }
    if (type == "deepseek_v3") {
      EXPECT_EQ(measured->inputs.at("blk.1.attn_kv_b.weight").k, 16);
    }
  }
}

TEST_F(Families, ImportanceOfAStackWithoutANameInGgufIsRefused) {
  Make("qwen3_moe");
  Fuse("mlp");
  ImportanceOptions options;
  options.text.text = {1, 2, 3};
  const Status status = MeasureImportance(Write("fused"), *device_, options).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("no name for \"model.layers.1.mlp.experts.gate_up_proj\""),
            std::string::npos)
      << status.message();
}

TEST_F(Families, SpellingsOfExpertsAreOneModel) {
  Make("mixtral");
  const std::vector<float> logits = Logits(Write("hf"));
  const std::vector<float> quantized = Logits(Quantize(directory_ / "hf"));
  const std::vector<float> calibrated = Logits(Calibrate(directory_ / "hf", QuantizeMethod::kGptq));
  const std::function<void()> spellings[] = {
      [&] {
        Rename("\\.w1\\.", ".gate_proj.");
        Rename("\\.w3\\.", ".up_proj.");
        Rename("\\.w2\\.", ".down_proj.");
      },
      [&] { Rename("block_sparse_moe", "mlp"); },
      [&] { Fuse("mlp"); },
  };
  int number = 0;
  for (const auto& spell : spellings) {
    spell();
    const std::string path = Write("spelling" + std::to_string(number++));
    EXPECT_EQ(Logits(path), logits) << number;
    EXPECT_EQ(Logits(Quantize(path)), quantized) << number;
    EXPECT_EQ(Logits(Calibrate(path, QuantizeMethod::kGptq)), calibrated) << number;
  }
}

TEST_F(Families, FusedExpertsOfQwenAreTheSame) {
  Make("qwen3_moe");
  const std::vector<float> logits = Logits(Write("single"));
  Fuse("mlp");
  EXPECT_EQ(Logits(Write("fused")), logits);
}

// The sums of many rows differ from those of few, unless the model is opened so.
TEST_F(Families, BatchInvariantModelsGiveTheSameBitsInPiecesAndBatches) {
  for (const auto& [type, changes] : Configs()) {
    SCOPED_TRACE(type);
    Make(type);
    const std::string source = Write(type);
    const std::string quantized = Quantize(source, "fp4_e2m1/g32");
    for (const auto& [path, cache] :
         {std::pair(source, DType::kBf16), std::pair(quantized, DType::kBf16),
          std::pair(quantized, DType::kF8E4M3)}) {
      SCOPED_TRACE(KvCacheTypeName(cache));
      ModelOptions options;
      options.batch_invariant = true;
      options.kv_cache = cache;
      const auto model = Model::Open(path, *device_, options);
      ASSERT_TRUE(model.ok()) << model.status().message();
      const std::vector<int32_t> tokens = {5, 17, 4, 40, 63, 31, 8, 2, 11, 50, 7, 21};
      const auto run = [&](std::span<const SequenceInput> inputs, int64_t rows) {
        std::vector<float> logits(static_cast<size_t>(rows * 64));
        EXPECT_TRUE(model->Forward(inputs, {logits.data(), DType::kF32, {rows, 64}}).ok());
        return logits;
      };
      Sequence whole = *model->NewSequence();
      const SequenceInput all{&whole, tokens, true};
      const std::vector<float> want = run({&all, 1}, 12);

      Sequence pieces = *model->NewSequence();
      std::vector<float> got;
      for (const int64_t count : {7, 1, 1, 3}) {
        const auto first = static_cast<size_t>(pieces.length());
        const auto part = std::span(tokens).subspan(first, static_cast<size_t>(count));
        const SequenceInput piece{&pieces, part, true};
        const std::vector<float> logits = run({&piece, 1}, count);
        got.insert(got.end(), logits.begin(), logits.end());
      }
      EXPECT_EQ(got, want);

      std::vector<Sequence> others;
      std::vector<SequenceInput> inputs;
      for (int i = 0; i < 4; ++i) others.push_back(*model->NewSequence());
      for (Sequence& other : others) inputs.push_back({&other, std::span(tokens).subspan(3), true});
      Sequence one = *model->NewSequence();
      inputs.push_back({&one, tokens, true});
      const std::vector<float> batch = run(inputs, 4 * 9 + 12);
      EXPECT_TRUE(std::equal(want.begin(), want.end(), batch.begin() + 4 * 9 * 64));
    }
  }
}

}  // namespace
}  // namespace marlin::families_test
