// Exporting to GGUF: each file is read back, and every weight compared with the source's in fp32.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>

#include "base/json.h"
#include "base/scalars.h"
#include "marlin/checkpoint.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::export_gguf_test {
namespace {

using testing::Contains;
using testing::RandomModule;
using testing::TestModule;
using testing::TestTensor;

const char kQuery[] = "model.layers.0.self_attn.q_proj.weight";
const char kUp[] = "model.layers.0.mlp.up_proj.weight";
const char kExperts[] = "model.layers.0.mlp.experts.*.up_proj.weight";

WeightsSpec SpecOf(Format format, int64_t group_size = 32, ScaleType scales = ScaleType::kF16) {
  WeightsSpec spec;
  spec.format = format;
  spec.k = 64;
  spec.n = 40;
  spec.group_size = group_size;
  spec.scale_type = scales;
  spec.has_zeros = GetFormatInfo(format).zero_point == ZeroPoint::kRequired;
  spec.has_global_scale = scales == ScaleType::kE4M3;
  return spec;
}

Json ConfigOf(const std::string& type) {
  return {{"model_type", type},     {"hidden_size", 64},          {"intermediate_size", 96},
          {"num_hidden_layers", 2}, {"num_attention_heads", 5},   {"num_key_value_heads", 5},
          {"head_dim", 8},          {"vocab_size", 16},           {"max_position_embeddings", 512},
          {"rms_norm_eps", 1e-5},   {"rope_theta", 20000.0},      {"bos_token_id", 1},
          {"eos_token_id", {2, 3}}, {"tie_word_embeddings", true}};
}

class ExportGgufTest : public ::testing::Test {
 protected:
  Status Export(const std::vector<TestModule>& modules, const Json& config = ConfigOf("llama"),
                std::vector<TestTensor> more = {}) {
    more.push_back(testing::RandomBf16("model.embed_tokens.weight", {16, 64}, 2));
    more.push_back(testing::RandomBf16("model.layers.0.input_layernorm.weight", {64}, 3));
    std::filesystem::remove_all(source());
    testing::WriteQuantizedDirectory(source(), modules, more, config);
    return Convert(out(), true);
  }
  Status Convert(const std::string& output, bool overwrite) {
    ConvertCheckpointOptions options;
    options.target = "gguf";
    options.overwrite = overwrite;
    Result<ConvertCheckpointReport> report = ConvertCheckpoint(source(), output, options);
    if (report.ok()) report_ = *std::move(report);
    return report.status();
  }
  std::string source() const { return directory_ / "source"; }
  std::string out() const { return directory_ / "model.gguf"; }

  void ExpectSame(const TestModule& module, Format format) {
    const std::string& name = module.record.module.name;
    const Result<Checkpoint> read = Checkpoint::Open(out());
    ASSERT_TRUE(read.ok()) << read.status().message();
    const Result<QuantizedWeights> weights = read->Weights(name);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(FormatName(weights->spec.format), FormatName(format));
    EXPECT_EQ(testing::DenseOf(*weights), testing::DenseOf(module.weights)) << name;
  }
  void ExpectRefused(const TestModule& module, const std::string& part) {
    const Status status = Export({module});
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_TRUE(Contains(status.message(), part)) << status.message();
    EXPECT_TRUE(Contains(status.message(), module.record.module.name)) << status.message();
    EXPECT_EQ(directory_.Entries(), std::vector<std::string>{"source"});
  }

  testing::TemporaryDirectory directory_;
  ConvertCheckpointReport report_;
};

struct Held {
  WeightsSpec spec;
  Format read;
};

TEST_F(ExportGgufTest, EveryWeightIsKept) {
  std::vector<Held> cases = {
      {SpecOf(Format::kS4), Format::kS4},
      {SpecOf(Format::kS4, 64), Format::kS4},
      {SpecOf(Format::kInt3), Format::kS4},
      {SpecOf(Format::kInt2), Format::kS4},
      {SpecOf(Format::kU4), Format::kU4},
      {SpecOf(Format::kU4, 64, ScaleType::kF32), Format::kU4},
      {SpecOf(Format::kS8), Format::kS8},
      {SpecOf(Format::kS8, 64, ScaleType::kBf16), Format::kS8},
      {SpecOf(Format::kInt5), Format::kInt5},
      {SpecOf(Format::kU5), Format::kU5},
      {SpecOf(Format::kInt6), Format::kS8},
      {SpecOf(Format::kInt6, 64, ScaleType::kF32), Format::kS8},
      {SpecOf(Format::kFp6E2M3), Format::kS8},
      {SpecOf(Format::kFp6E2M3, 32, ScaleType::kE8M0), Format::kS8},
      {SpecOf(Format::kCodebook4), Format::kCodebook4},
      {SpecOf(Format::kFp4E2M1, 32, ScaleType::kE8M0), Format::kFp4E2M1},
      {SpecOf(Format::kFp4E2M1, 64, ScaleType::kE8M0), Format::kFp4E2M1},
      {SpecOf(Format::kFp4E2M1, 16, ScaleType::kE4M3), Format::kFp4E2M1},
      {SpecOf(Format::kFp4E2M1, 32, ScaleType::kE4M3), Format::kFp4E2M1},
  };
  cases.push_back({SpecOf(Format::kInt3), Format::kU4});
  cases.back().spec.has_zeros = true;
  cases.push_back({SpecOf(Format::kInt5), Format::kU5});
  cases.back().spec.has_zeros = true;
  for (const Format format : {Format::kU4, Format::kU5}) {
    cases.push_back({SpecOf(format), format});
    cases.back().spec.has_zeros = false;
    cases.back().spec.has_biases = true;
  }
  for (const auto& [spec, read] : cases) {
    for (const char* const name : {kUp, kQuery}) {  // Rows of q are stored in another order.
      SCOPED_TRACE(std::string(FormatName(spec.format)) + " " + name);
      const TestModule module = RandomModule(name, spec, 5);
      const Status status = Export({module});
      ASSERT_TRUE(status.ok()) << status.message();
      ExpectSame(module, read);
    }
  }
}

TEST_F(ExportGgufTest, WeightsWithAPermutationAreF32) {
  WeightsSpec spec = SpecOf(Format::kU4);
  spec.has_permutation = true;
  for (const char* const name : {kUp, kQuery}) {
    const TestModule module = RandomModule(name, spec, 5);
    const Status status = Export({module});
    ASSERT_TRUE(status.ok()) << status.message();
    const Checkpoint read = *Checkpoint::Open(out());
    const TensorView stored = *read.Tensor(name);
    ASSERT_EQ(stored.dtype(), DType::kF32);
    ASSERT_EQ(stored.shape(), (Shape{spec.n, spec.k}));
    const std::vector<float> dense = testing::DenseOf(module.weights);
    for (int64_t i = 0; i < spec.k * spec.n; ++i) {
      ASSERT_EQ(stored.As<float>()[i % spec.n * spec.k + i / spec.n], dense[static_cast<size_t>(i)])
          << name << " " << i;
    }
  }
}

TEST_F(ExportGgufTest, ExpertsAndTheirGlobalScales) {
  Json config = ConfigOf("qwen3_moe");
  config["num_experts"] = 3;
  config["num_experts_per_tok"] = 2;
  config["moe_intermediate_size"] = 40;
  config["norm_topk_prob"] = true;
  WeightsSpec spec = SpecOf(Format::kFp4E2M1, 16, ScaleType::kE4M3);
  spec.experts = 3;
  const TestModule module = RandomModule(kExperts, spec, 8);
  std::vector<TestTensor> plain;
  for (int e = 0; e < 3; ++e) {
    plain.push_back(testing::RandomBf16(
        "model.layers.1.mlp.experts." + std::to_string(e) + ".down_proj.weight", {64, 40}, 9));
  }
  plain.push_back(testing::RandomBf16("model.layers.0.mlp.gate.weight", {3, 64}, 10));
  const Status status = Export({module}, config, plain);
  ASSERT_TRUE(status.ok()) << status.message();
  ExpectSame(module, Format::kFp4E2M1);
  const Checkpoint read = *Checkpoint::Open(out());
  const TensorView down = *read.Tensor("model.layers.1.mlp.experts.2.down_proj.weight");
  EXPECT_EQ(down.dtype(), DType::kBf16);
  EXPECT_EQ(std::memcmp(down.data(), plain[2].data.data(), plain[2].data.size()), 0);
  const TensorView router = *read.Tensor("model.layers.0.mlp.gate.weight");
  ASSERT_EQ(router.dtype(), DType::kF32);
  const TestTensor wide = testing::RandomF32("x", {3, 64}, 10);
  EXPECT_EQ(std::memcmp(router.data(), wide.data.data(), wide.data.size()), 0);
  const Json found = Json::parse(read.config_json());
  for (const char* const key : {"num_experts", "num_experts_per_tok", "moe_intermediate_size",
                                "norm_topk_prob", "model_type"}) {
    EXPECT_EQ(found[key], config[key]) << key;
  }
}

/// The numbers of a tensor of floats.
std::vector<float> NumbersOf(const TensorView& view) {
  std::vector<float> numbers;
  for (int64_t i = 0; i < view.ElementCount(); ++i) {
    if (view.dtype() == DType::kF32) {
      numbers.push_back(view.As<float>()[i]);
    } else {
      EXPECT_EQ(view.dtype(), DType::kBf16);
      numbers.push_back(Bf16ToFloat(view.As<uint16_t>()[i]));
    }
  }
  return numbers;
}

Json GptOss() {
  Json config = ConfigOf("gpt_oss");
  config["num_local_experts"] = 3;
  config["num_experts_per_tok"] = 2;
  config["intermediate_size"] = 32;
  config["sliding_window"] = 128;
  config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 32.0},
                            {"beta_fast", 32.0},   {"beta_slow", 1.0},
                            {"truncate", false},   {"original_max_position_embeddings", 4096}};
  return config;
}

/// Experts of gpt-oss in one tensor.
TestModule FusedExperts(const std::string& projection, WeightsSpec spec, int64_t k, int64_t n) {
  spec.experts = 3;
  spec.k = k;
  spec.n = n;
  TestModule module = RandomModule("model.layers.0.mlp.experts." + projection, spec, 11);
  module.record.layout = SourceLayout::kInOut;
  return module;
}

TEST_F(ExportGgufTest, ExpertsOfGptOssAreTakenApart) {
  for (const WeightsSpec& spec :
       {SpecOf(Format::kFp4E2M1, 32, ScaleType::kE8M0), SpecOf(Format::kS8),
        SpecOf(Format::kFp4E2M1, 16, ScaleType::kE4M3)}) {
    SCOPED_TRACE(FormatName(spec.format));
    TestModule both = FusedExperts("gate_up_proj", spec, 64, 84);
    const TestModule down = FusedExperts("down_proj", spec, 64, 40);
    const std::string stem = "model.layers.1.mlp.experts.";
    const std::vector<TestTensor> plain = {
        testing::RandomBf16(stem + "gate_up_proj", {3, 64, 84}, 20),
        testing::RandomBf16(stem + "gate_up_proj_bias", {3, 84}, 21),
        testing::RandomBf16(stem + "down_proj", {3, 42, 64}, 22),
        testing::RandomF32(stem + "down_proj_bias", {3, 64}, 23),
        testing::RandomBf16("model.layers.0.self_attn.sinks", {5}, 24),
        testing::RandomBf16("model.layers.0.post_attention_layernorm.weight", {64}, 25),
        testing::RandomBf16("model.layers.0.mlp.router.weight", {3, 64}, 26),
        testing::RandomBf16("model.layers.0.mlp.router.bias", {3}, 27)};
    const Status status = Export({both, down}, GptOss(), plain);
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSame(both, spec.format);
    ExpectSame(down, spec.format);
    const Checkpoint read = *Checkpoint::Open(out());
    const Checkpoint from = *Checkpoint::Open(source());
    for (const TestTensor& tensor : plain) {
      const auto got = read.Tensor(tensor.name);
      ASSERT_TRUE(got.ok()) << got.status().message();
      EXPECT_EQ(got->shape().ToString(), tensor.shape.ToString()) << tensor.name;
      EXPECT_EQ(NumbersOf(*got), NumbersOf(*from.Tensor(tensor.name))) << tensor.name;
      // Vectors, biases and routers are widened.
      const bool fused = tensor.name.ends_with("_proj");
      EXPECT_EQ(got->dtype(), fused ? tensor.dtype : DType::kF32) << tensor.name;
    }
    const std::string file = testing::ReadFile(out());
    for (const char* const name :
         {"blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.1.ffn_up_exps.bias",
          "blk.0.post_attention_norm.weight", "blk.0.attn_sinks.weight"}) {
      EXPECT_TRUE(Contains(file, name)) << name;
    }
    EXPECT_FALSE(Contains(file, "ffn_norm"));
    const Json found = Json::parse(read.config_json());
    const Json config = GptOss();
    for (const auto& [key, value] : config.items()) EXPECT_EQ(found[key], value) << key;
  }
}

TEST_F(ExportGgufTest, WhatFilesOfGptOssTakeForGranted) {
  const auto refused = [this](const Json& changed, const std::string& part) {
    Json config = GptOss();
    config.update(changed);
    const Status status = Export({}, config);
    EXPECT_FALSE(status.ok()) << changed.dump();
    EXPECT_TRUE(Contains(status.message(), part)) << status.message();
  };
  refused({{"swiglu_limit", 5.0}}, "swiglu_limit");
  refused({{"swiglu_alpha", 1.0}}, "swiglu_alpha");
  refused({{"layer_types", {"full_attention", "sliding_attention"}}}, "layer_types");
  refused({{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}}, "truncate");
  const Status odd = Export({FusedExperts("gate_up_proj", SpecOf(Format::kS8), 64, 41)}, GptOss());
  EXPECT_EQ(odd.code(), Code::kMalformedFile);
  EXPECT_TRUE(Contains(odd.message(), "41 rows are not gate and up in turn")) << odd.message();
  const Status rank =
      Export({}, GptOss(), {testing::RandomBf16("model.layers.1.mlp.experts.down_proj", {4}, 1)});
  EXPECT_TRUE(Contains(rank.message(), "gguf cannot hold the shape [4]")) << rank.message();
  // Other architectures have no such tensors.
  const Status other = Export({FusedExperts("down_proj", SpecOf(Format::kS8), 64, 40)});
  EXPECT_EQ(other.code(), Code::kUnsupported) << other.message();
}

TEST_F(ExportGgufTest, LatentAttentionKeepsItsCodes) {
  Json config = ConfigOf("deepseek_v3");
  config.erase("head_dim");
  config.update({{"q_lora_rank", 48},
                 {"kv_lora_rank", 64},
                 {"qk_nope_head_dim", 24},
                 {"qk_rope_head_dim", 16},
                 {"v_head_dim", 20},
                 {"n_routed_experts", 4},
                 {"num_experts_per_tok", 2},
                 {"moe_intermediate_size", 32},
                 {"n_shared_experts", 1},
                 {"n_group", 2},
                 {"topk_group", 1},
                 {"first_k_dense_replace", 1},
                 {"norm_topk_prob", true},
                 {"routed_scaling_factor", 2.5}});
  config["rope_scaling"] = {{"rope_type", "yarn"},
                            {"factor", 40.0},
                            {"beta_fast", 32.0},
                            {"beta_slow", 1.0},
                            {"mscale", 1.0},
                            {"mscale_all_dim", 1.0},
                            {"original_max_position_embeddings", 4096}};
  WeightsSpec spec = SpecOf(Format::kS4);
  spec.n = 5 * (24 + 20);
  const TestModule both = RandomModule("model.layers.0.self_attn.kv_b_proj.weight", spec, 3);
  const Status status =
      Export({both}, config,
             {testing::RandomBf16("model.layers.1.mlp.gate.weight", {4, 64}, 7),
              testing::RandomF32("model.layers.1.mlp.gate.e_score_correction_bias", {4}, 8)});
  ASSERT_TRUE(status.ok()) << status.message();
  ExpectSame(both, Format::kS4);
  const Checkpoint read = *Checkpoint::Open(out());
  EXPECT_TRUE(read.Tensor("model.layers.1.mlp.gate.e_score_correction_bias").ok());
  const Json found = Json::parse(read.config_json());
  for (const auto& [key, value] : config.items()) EXPECT_EQ(found[key], value) << key;
  Json other = config;
  other["rope_scaling"]["mscale"] = 0.7;
  EXPECT_TRUE(Contains(Export({both}, other).message(), "mscale"));
  other = config;
  other["rope_interleave"] = false;
  EXPECT_TRUE(Contains(Export({both}, other).message(), "rope_interleave"));
}

TEST_F(ExportGgufTest, TheConfigurationComesBack) {
  for (const std::string type :
       {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "glm4", "glm4_moe"}) {
    SCOPED_TRACE(type);
    Json config = ConfigOf(type);
    if (type == "mistral") config["sliding_window"] = 128;
    if (type == "mixtral") config["num_local_experts"] = 4;
    if (type == "glm4_moe") config["n_routed_experts"] = 4;
    if (type == "glm4_moe") config["num_experts_per_tok"] = 2;
    if (type == "glm4_moe") config["routed_scaling_factor"] = 1.5;
    if (type == "qwen2_moe") config["num_experts"] = 4;
    config["rope_scaling"] = {{"rope_type", "yarn"},
                              {"factor", 4.0},
                              {"original_max_position_embeddings", 128},
                              {"beta_fast", 16.0},
                              {"beta_slow", 1.0}};
    const Status status = Export({}, config);
    ASSERT_TRUE(status.ok()) << status.message();
    const Json found = Json::parse(Checkpoint::Open(out())->config_json());
    for (const auto& [key, value] : config.items()) EXPECT_EQ(found[key], value) << key;
  }
}

TEST_F(ExportGgufTest, FactorsOfLlama3) {
  Json config = ConfigOf("llama");
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  ASSERT_TRUE(Export({}, config).ok());
  EXPECT_EQ(Json::parse(Checkpoint::Open(out())->config_json())["rope_scaling"],
            config["rope_scaling"]);
}

TEST_F(ExportGgufTest, WhatNoTypeHolds) {
  ExpectRefused(RandomModule(kUp, SpecOf(Format::kNf4), 1), "gguf cannot hold nf4 in groups of 32");
  ExpectRefused(RandomModule(kUp, SpecOf(Format::kU8), 1), "gguf cannot hold u8");
  ExpectRefused(RandomModule(kUp, SpecOf(Format::kU6), 1),
                "gguf cannot hold u6 in groups of 32 with fp16 scales and zeros");
  ExpectRefused(RandomModule(kUp, SpecOf(Format::kS4, 16), 1), "groups of 16 k");
  ExpectRefused(RandomModule(kUp, SpecOf(Format::kFp8E4M3, 64), 1), "gguf cannot hold fp8_e4m3");
  WeightsSpec narrow = SpecOf(Format::kS4);
  narrow.k = 48;
  ExpectRefused(RandomModule(kUp, narrow, 1), "48 k as blocks of 32 (Q4_0)");
  TestModule fine = RandomModule(kUp, SpecOf(Format::kS4, 32, ScaleType::kF32), 1);
  const_cast<float*>(fine.weights.scales.As<float>())[0] = 0.3f;
  ExpectRefused(fine, "the scale 0.300000012 at [0, 0], which f16 does not hold");
  fine = RandomModule(kUp, SpecOf(Format::kFp6E2M3, 32, ScaleType::kE8M0), 1);
  const_cast<uint8_t*>(fine.weights.scales.As<uint8_t>())[1] = 150;
  ExpectRefused(fine, "the eighth of a scale 1048576 at [0, 1], which f16 does not hold");
  TestModule book = RandomModule(kUp, SpecOf(Format::kCodebook4), 1);
  book.weights.codebook.assign(16, 0.5f);
  ExpectRefused(book, "a codebook other than that of IQ4_NL");
  TestModule negative = RandomModule(kUp, SpecOf(Format::kFp4E2M1, 16, ScaleType::kE4M3), 1);
  const_cast<uint8_t*>(negative.weights.scales.As<uint8_t>())[3] |= 0x80;
  ExpectRefused(negative, "the negative scale");
  ExpectRefused(RandomModule("model.layers.0.mlp.other.weight", SpecOf(Format::kS4), 1),
                "gguf has no name for it in a model of the architecture llama");
}

TEST_F(ExportGgufTest, SourcesAndTargetsThatCannotBe) {
  const TestModule module = RandomModule(kUp, SpecOf(Format::kS4), 1);
  Status status = Export({module}, ConfigOf("gemma9"));
  EXPECT_TRUE(Contains(status.message(), "a model of type \"gemma9\"")) << status.message();
  Json config = ConfigOf("llama");
  config["rope_scaling"] = {{"rope_type", "longrope"}};
  status = Export({module}, config);
  EXPECT_TRUE(Contains(status.message(), "longrope")) << status.message();
  config = ConfigOf("llama");
  config["num_attention_heads"] = 0;
  EXPECT_EQ(Export({module}, config).code(), Code::kMalformedFile);
  config["num_attention_heads"] = config["num_key_value_heads"] = 7;
  status = Export({RandomModule(kQuery, SpecOf(Format::kS4), 1)}, config);
  EXPECT_TRUE(Contains(status.message(), "40 rows are not 7 heads")) << status.message();
  status = Export({module}, ConfigOf("llama"), {{"a.buffer", DType::kF32, {1}, "1234"}});
  EXPECT_TRUE(Contains(status.message(), "tensor \"a.buffer\": gguf has no name"))
      << status.message();
  EXPECT_EQ(directory_.Entries(), std::vector<std::string>{"source"});
}

TEST_F(ExportGgufTest, OneFileThatAppearsWholeOrNotAtAll) {
  ASSERT_TRUE(Export({RandomModule(kUp, SpecOf(Format::kS4), 1)}).ok());
  EXPECT_EQ(directory_.Entries(), (std::vector<std::string>{"model.gguf", "source"}));
  const std::string first = testing::ReadFile(out());
  EXPECT_EQ(report_.files.size(), size_t{1});
  EXPECT_EQ(report_.files[0].name, "tokenizer.json");
  EXPECT_TRUE(Contains(Convert(out(), false).message(), "exists already"));
  std::filesystem::create_directory(directory_ / "folder.gguf");
  EXPECT_TRUE(Contains(Convert(directory_ / "folder.gguf", true).message(), "is not a file"));
  ASSERT_TRUE(Convert(out(), true).ok());
  EXPECT_EQ(testing::ReadFile(out()), first);
  EXPECT_EQ(directory_.Entries(),
            (std::vector<std::string>{"folder.gguf", "model.gguf", "source"}));
  // The file itself as the source.
  ConvertCheckpointOptions options;
  options.target = "gguf";
  options.overwrite = true;
  const Status status = ConvertCheckpoint(out(), out(), options).status();
  EXPECT_TRUE(Contains(status.message(), "would replace the source")) << status.message();
  const std::string copy = directory_ / "copy.gguf";
  ASSERT_TRUE(ConvertCheckpoint(out(), copy, options).ok());
  EXPECT_EQ(testing::ReadFile(copy).size(), first.size());
}

/// The bytes of each tensor with padding, by its place in the file.
std::map<int64_t, int64_t> SizesOf(const Checkpoint& file) {
  std::map<int64_t, int64_t> sizes;
  for (const TensorInfo& tensor : file.tensors()) {
    sizes[tensor.offset] = (tensor.bytes + 31) / 32 * 32;
  }
  return sizes;
}

/// How many shards the tensors take.
int64_t ShardsOf(const std::map<int64_t, int64_t>& sizes, int64_t shard_bytes) {
  int64_t count = 1;
  int64_t filled = 0;
  for (const auto& [offset, bytes] : sizes) {
    if (filled > 0 && filled + bytes > shard_bytes) {
      ++count;
      filled = 0;
    }
    filled += bytes;
  }
  return count;
}

/// A number of `width` bytes in a file's metadata, which must have llama.cpp's type.
int NumberIn(const std::string& file, const std::string& key, uint8_t type, size_t width) {
  const size_t at = file.find(key);
  EXPECT_NE(at, std::string::npos) << key;
  if (at == std::string::npos) return -1;
  EXPECT_EQ(file[at + key.size()], static_cast<char>(type)) << key;
  int number = 0;
  std::memcpy(&number, file.data() + at + key.size() + 4, width);
  return number;
}

TEST_F(ExportGgufTest, ShardsHoldWhatOneFileHolds) {
  std::vector<TestModule> modules;
  for (const char* name :
       {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.up_proj.weight"}) {
    modules.push_back(RandomModule(name, SpecOf(Format::kS4), 7));
  }
  Json config = ConfigOf("llama");
  config["num_hidden_layers"] = 2;
  ASSERT_TRUE(Export(modules, config).ok());
  const Result<Checkpoint> whole = Checkpoint::Open(out());
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  const std::map<int64_t, int64_t> sizes = SizesOf(*whole);
  const std::string folder = directory_ / "shards";
  ConvertCheckpointOptions options;
  options.target = "gguf";
  const auto export_shards = [&](int64_t shard_bytes) {
    options.shard_bytes = shard_bytes;
    const Status status = ConvertCheckpoint(source(), folder, options).status();
    EXPECT_TRUE(status.ok()) << status.message();
    options.overwrite = true;
    int64_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      ++count;
      EXPECT_TRUE(Contains(entry.path().filename().string(), "model-0000"));
    }
    const Result<Checkpoint> read = Checkpoint::Open(folder);
    EXPECT_TRUE(read.ok()) << read.status().message();
    if (!read.ok()) return count;
    EXPECT_EQ(read->config_json(), whole->config_json());
    EXPECT_EQ(read->modules().size(), modules.size());
    for (const TestModule& module : modules) {
      const Result<QuantizedWeights> weights = read->Weights(module.record.module.name);
      EXPECT_TRUE(weights.ok()) << weights.status().message();
      if (weights.ok()) {
        EXPECT_EQ(testing::DenseOf(*weights), testing::DenseOf(module.weights));
      }
    }
    return count;
  };
  // A tensor is never cut, and the limit counts tensors, not metadata.
  ASSERT_EQ(sizes.size(), size_t{5});
  int64_t total = 0;
  for (const auto& [offset, bytes] : sizes) total += bytes;
  for (const int64_t limit : {int64_t{3000}, int64_t{5000}, total - 1}) {
    EXPECT_EQ(export_shards(limit), ShardsOf(sizes, limit)) << limit;
  }
  EXPECT_EQ(export_shards(total), 1);
  EXPECT_TRUE(std::filesystem::exists(folder + "/model-00001-of-00001.gguf"));
  EXPECT_EQ(export_shards(1), 5);
  // Any shard names the model.
  EXPECT_TRUE(Checkpoint::Open(folder + "/model-00002-of-00005.gguf").ok());
  const std::string last = testing::ReadFile(folder + "/model-00005-of-00005.gguf");
  EXPECT_EQ(NumberIn(last, "split.no", 2, 2), 4);
  EXPECT_EQ(NumberIn(last, "split.count", 2, 2), 5);
  EXPECT_EQ(NumberIn(last, "split.tensors.count", 5, 4), 5);
  EXPECT_FALSE(Contains(last, "general.architecture"));
  // Directories of other files are kept.
  const std::string other = directory_ / "other";
  std::filesystem::create_directory(other);
  testing::WriteFile(other + "/mine.gguf", "GGUF");
  EXPECT_TRUE(Contains(Convert(other, true).message(), "is not a checkpoint"));
}

TEST_F(ExportGgufTest, PiecesComeBack) {
  ASSERT_TRUE(Export({RandomModule(kUp, SpecOf(Format::kS4), 1)}).ok());
  Json tokenizer = Json::parse(R"({
    "normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "_"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
    "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
      "vocab": {"<unk>": 0, "<0x0A>": 1, "a": 2, "b": 3, "c": 4, "bc": 5, "ab": 6, "abc": 7},
      "merges": ["b c", "a b", "a bc", "ab c"]},
    "added_tokens": [{"id": 0, "content": "<unk>", "special": true}]})");
  testing::WriteFile(source() + "/tokenizer.json", tokenizer.dump());
  ASSERT_TRUE(Convert(out(), true).ok());
  ASSERT_TRUE(report_.files.empty()) << report_.files[0].reason;
  Json found = Json::parse(**Checkpoint::Open(out())->ReadFile("tokenizer.json"));
  EXPECT_EQ(found["model"]["merges"],
            Json::parse(R"([["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"]])"));
  EXPECT_EQ(found["model"]["unk_token"], "<unk>");
  EXPECT_EQ(found["normalizer"]["normalizers"][0]["type"], "Prepend");
  tokenizer["normalizer"] = nullptr;
  tokenizer["pre_tokenizer"] = {{"type", "Metaspace"}, {"prepend_scheme", "never"}};
  testing::WriteFile(source() + "/tokenizer.json", tokenizer.dump());
  ASSERT_TRUE(Convert(out(), true).ok());
  ASSERT_TRUE(report_.files.empty()) << report_.files[0].reason;
  found = Json::parse(**Checkpoint::Open(out())->ReadFile("tokenizer.json"));
  EXPECT_EQ(found["normalizer"]["normalizers"].size(), size_t{1});
  // Scores give all merges of a piece the same rank.
  tokenizer["model"]["merges"] = {"b c", "a bc", "a b", "ab c"};
  testing::WriteFile(source() + "/tokenizer.json", tokenizer.dump());
  ASSERT_TRUE(Convert(out(), true).ok());
  ASSERT_EQ(report_.files.size(), size_t{1});
  EXPECT_TRUE(Contains(report_.files[0].reason, "the order of the tokenizer's merges"));
}

/// A post-processor: special tokens, and "$" for the text.
Json Template(const std::vector<std::string>& parts) {
  Json single = Json::array();
  for (const std::string& part : parts) {
    single.push_back(part == "$" ? Json{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}
                                 : Json{{"SpecialToken", {{"id", part}, {"type_id", 0}}}});
  }
  return {{"type", "TemplateProcessing"}, {"single", single}};
}

TEST_F(ExportGgufTest, EndsOfGenerationAndSamplingComeBack) {
  ASSERT_TRUE(Export({RandomModule(kUp, SpecOf(Format::kS4), 1)}).ok());
  testing::WriteFile(source() + "/tokenizer.json", R"({
      "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 9}, "merges": []},
      "pre_tokenizer": {"type": "ByteLevel"},
      "added_tokens": [{"id": 5, "content": "<|im_end|>", "special": true}]})");
  testing::WriteFile(source() + "/tokenizer_config.json", R"({"eos_token": "c"})");
  testing::WriteFile(source() + "/generation_config.json",
                     R"({"eos_token_id": [5, 2], "do_sample": true, "temperature": 0.6,
                         "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1})");
  ASSERT_TRUE(Convert(out(), true).ok());
  const Checkpoint read = *Checkpoint::Open(out());
  // That of config.json first, then two others by their keys, and one by its text.
  EXPECT_EQ(Json::parse(read.config_json())["eos_token_id"], (Json{2, 3, 9, 5}));
  EXPECT_EQ(Json::parse(**read.ReadFile("generation_config.json")),
            Json::parse(R"({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
                            "repetition_penalty": 1.1})"));
}

TEST_F(ExportGgufTest, StartsAndEndsOfTextsComeBack) {
  ASSERT_TRUE(Export({RandomModule(kUp, SpecOf(Format::kS4), 1)}).ok());
  Json tokenizer = Json::parse(R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
      "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, {"type": "ByteLevel"}]},
      "added_tokens": [{"id": 4, "content": "<s>", "special": true},
                       {"id": 2, "content": "</s>", "special": true}]})");
  const auto back = [&](const Json& processor, const char* config) {
    tokenizer["post_processor"] = processor;
    testing::WriteFile(source() + "/tokenizer.json", tokenizer.dump());
    testing::WriteFile(source() + "/tokenizer_config.json", config);
    EXPECT_TRUE(Convert(out(), true).ok());
    EXPECT_TRUE(report_.files.empty()) << report_.files[0].reason;
    const Json found = Json::parse(**Checkpoint::Open(out())->ReadFile("tokenizer_config.json"));
    return std::pair<bool, bool>(found["add_bos_token"], found["add_eos_token"]);
  };
  using Flags = std::pair<bool, bool>;
  const Json sequence = {{"type", "Sequence"},
                         {"processors", {{{"type", "ByteLevel"}}, Template({"<s>", "$"})}}};
  EXPECT_EQ(back(Template({"<s>", "$"}), "{}"), Flags(true, false));
  EXPECT_EQ(back(sequence, "{}"), Flags(true, false));
  EXPECT_EQ(back(Template({"<s>", "$", "</s>"}), "{}"), Flags(true, true));
  // The template decides where there is one.
  const char* const kAdds = R"({"bos_token": "<s>", "add_bos_token": true})";
  EXPECT_EQ(back(Template({"$"}), kAdds), Flags(false, false));
  EXPECT_EQ(back(nullptr, kAdds), Flags(true, false));
  EXPECT_EQ(back(nullptr, R"({"bos_token": "<s>"})"), Flags(false, false));
}

TEST_F(ExportGgufTest, TheTokenizerComesBack) {
  ASSERT_TRUE(Export({RandomModule(kUp, SpecOf(Format::kS4), 1)}).ok());
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", "x+"}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  const Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  Json tokenizer = {{"model",
                     {{"type", "BPE"},
                      {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}}},
                      {"merges", Json::array({{"a", "b"}})}}},
                    {"pre_tokenizer", bytes},
                    {"added_tokens", {{{"id", 5}, {"content", "<s>"}, {"special", true}}}}};
  testing::WriteFile(source() + "/tokenizer.json", tokenizer.dump());
  testing::WriteFile(source() + "/tokenizer_config.json",
                     R"({"bos_token": {"content": "<s>"}, "chat_template": "{{ x }}"})");
  ASSERT_TRUE(Convert(out(), true).ok());
  EXPECT_TRUE(report_.files.empty());
  const Checkpoint read = *Checkpoint::Open(out());
  const Json found = Json::parse(**read.ReadFile("tokenizer.json"));
  EXPECT_EQ(found["model"]["vocab"]["ab"], 2);
  EXPECT_EQ(found["model"]["vocab"]["[PAD7]"], 7);
  EXPECT_EQ(found["model"]["merges"], tokenizer["model"]["merges"]);
  EXPECT_EQ(found["added_tokens"][0]["content"], "<s>");
  const Json config = Json::parse(**read.ReadFile("tokenizer_config.json"));
  EXPECT_EQ(config["chat_template"], "{{ x }}");
  EXPECT_EQ(config["add_bos_token"], false);
  const auto chat = [&](const char* written) {
    testing::WriteFile(source() + "/tokenizer_config.json", written);
    EXPECT_TRUE(Convert(out(), true).ok());
    return Json::parse(**Checkpoint::Open(out())->ReadFile("tokenizer_config.json"))
        .value("chat_template", "");
  };
  EXPECT_EQ(chat(R"({"chat_template": [{"name": "rag", "template": "r"},
                                       {"name": "default", "template": "d"}]})"),
            "d");
  EXPECT_EQ(chat(R"({"chat_template": [{"name": "rag", "template": "r"}, 5]})"), "");
  testing::WriteFile(source() + "/chat_template.jinja", "in a file");
  EXPECT_EQ(chat(R"({"chat_template": "{{ x }}"})"), "in a file");
  EXPECT_EQ(chat("{}"), "in a file");
  // A token without a row of the embedding is left out: no program could take it.
  tokenizer["added_tokens"].push_back({{"id", 99}, {"content", "<pad>"}, {"special", true}});
  testing::WriteFile(source() + "/tokenizer.json", tokenizer.dump());
  ASSERT_TRUE(Convert(out(), true).ok());
  EXPECT_TRUE(report_.files.empty());
  EXPECT_EQ(Json::parse(**Checkpoint::Open(out())->ReadFile("tokenizer.json"))["added_tokens"],
            found["added_tokens"]);
  // Others are reported, and the weights written.
  const std::vector<std::function<void(Json*)>> changes = {
      [&](Json* json) {
        (*json)["pre_tokenizer"] = {{"pretokenizers", {split, bytes}}};
      },
      [](Json* json) { (*json)["model"]["type"] = "Unigram"; },
      [](Json* json) { (*json)["model"]["vocab"]["c"] = -1; },
      [](Json* json) { (*json)["model"]["vocab"]["c"] = 1; },
      [](Json* json) { (*json)["model"]["merges"] = {1}; },
      [](Json* json) { (*json)["model"]["byte_fallback"] = true; },
      [](Json* json) { (*json)["model"]["merges"] = {"a c"}; },
      [](Json* json) { (*json)["model"]["vocab"] = 3; },
      [](Json* json) {
        (*json)["normalizer"] = {{"type", "NFKC"}};
      },
      [](Json* json) {
        (*json)["post_processor"] = Template({"<s>", "a", "$"});
      },
  };
  for (const auto& change : changes) {
    Json other = tokenizer;
    change(&other);
    testing::WriteFile(source() + "/tokenizer.json", other.dump());
    ASSERT_TRUE(Convert(out(), true).ok());
    ASSERT_EQ(report_.files.size(), size_t{1}) << other.dump();
    EXPECT_FALSE(Contains(report_.files[0].reason, "\n"));
    EXPECT_FALSE(Checkpoint::Open(out())->ReadFile("tokenizer.json")->has_value());
  }
}

}  // namespace
}  // namespace marlin::export_gguf_test
