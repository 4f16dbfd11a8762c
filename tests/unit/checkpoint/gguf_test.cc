// GGUF files: values against those of the gguf package, names, configuration, malformed files.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "../../source_directory.h"
#include "base/json.h"
#include "base/scalars.h"
#include "gguf_files.h"
#include "layout/slice_expert.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "test_files.h"

namespace marlin::gguf_test {
namespace {

using testing::Contains;
using testing::FloatBytes;
using testing::GgufBuilder;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::WriteFile;

constexpr uint32_t kF32 = 0;
constexpr uint32_t kF16 = 1;
constexpr uint32_t kQ80 = 8;
constexpr uint32_t kQ40 = 2;
constexpr uint32_t kNvfp4 = 40;

const std::string kGolden = SourceDirectory() + "/tests/golden/gguf_types";

/// A module's values [experts, n, k] in fp32.
std::vector<float> ValuesOf(const Checkpoint& checkpoint, const std::string& name) {
  const auto weights = checkpoint.Weights(name);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (!weights.ok()) return {};
  const WeightsSpec& spec = weights->spec;
  std::vector<float> values(static_cast<size_t>(spec.experts * spec.k * spec.n));
  for (int64_t e = 0; e < spec.experts; ++e) {
    const auto slice = SliceExpert(*weights, e);
    const MutableTensorView to(values.data() + e * spec.k * spec.n, DType::kF32, {spec.n, spec.k});
    EXPECT_TRUE(slice.ok() && Dequantize(*slice, to.Transposed()).ok()) << name;
  }
  return values;
}

std::vector<float> PlainValues(const Checkpoint& checkpoint, const std::string& name) {
  const auto view = checkpoint.Tensor(name);
  EXPECT_TRUE(view.ok()) << view.status().message();
  if (!view.ok()) return {};
  std::vector<float> values;
  for (int64_t i = 0; i < view->ElementCount(); ++i) {
    const auto* at = static_cast<const std::byte*>(view->data()) + i * DTypeBytes(view->dtype());
    if (view->dtype() == DType::kF32) {
      float value = 0;
      std::memcpy(&value, at, sizeof(value));
      values.push_back(value);
      continue;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, at, sizeof(bits));
    values.push_back(view->dtype() == DType::kF16 ? HalfToFloat(bits)
                                                  : static_cast<float>(static_cast<int16_t>(bits)));
  }
  return values;
}

TEST(Gguf, HoldsEveryValueOfTheGgufPackage) {
  const auto file = Checkpoint::Open(kGolden + "/all_types.gguf");
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->quant_method(), "gguf");
  EXPECT_FALSE(file->quantized());
  const auto expected = Checkpoint::Open(kGolden + "/all_types.expected.safetensors");
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_EQ(expected->tensors().size(), 23 * 4 + 2 + 3);
  size_t modules = 0;
  for (const TensorInfo& tensor : expected->tensors()) {
    const std::vector<float> want = PlainValues(*expected, tensor.name);
    const bool plain = file->Find(tensor.name) && !file->IsModulePart(tensor.name);
    modules += plain ? 0 : 1;
    const std::vector<float> got =
        plain ? PlainValues(*file, tensor.name) : ValuesOf(*file, tensor.name);
    ASSERT_EQ(got.size(), want.size()) << tensor.name;
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(got[i], want[i]) << tensor.name << " element " << i;
    }
  }
  // Vectors and unquantized tensors are plain.
  EXPECT_EQ(modules, 23 * 3 + 2);
  EXPECT_EQ(file->modules().size(), modules);
  EXPECT_TRUE(file->VerifyChecksums().ok());
}

TEST(Gguf, ImportsEveryTypeExactly) {
  TemporaryDirectory directory;
  const auto report = ImportCheckpoint(kGolden + "/all_types.gguf", directory / "out", {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->method, "gguf");
  for (const ImportedModule& module : report->modules) EXPECT_EQ(module.exactness, "exact");
  const auto source = Checkpoint::Open(kGolden + "/all_types.gguf");
  const auto imported = Checkpoint::Open(directory / "out");
  ASSERT_TRUE(source.ok() && imported.ok());
  EXPECT_TRUE(imported->quantized());
  EXPECT_TRUE(imported->VerifyChecksums().ok());
  ASSERT_EQ(imported->modules().size(), source->modules().size());
  for (const QuantizedModule& module : source->modules()) {
    EXPECT_EQ(ValuesOf(*imported, module.name), ValuesOf(*source, module.name)) << module.name;
  }
  for (const ImportedModule& module : report->modules) {
    const bool larger = module.name.find("Q2_K") != std::string::npos ||
                        module.name.find("TQ1") != std::string::npos ||
                        module.name.find("IQ1") != std::string::npos ||
                        module.name.find("IQ2") != std::string::npos ||
                        module.name.find("IQ3") != std::string::npos;
    EXPECT_EQ(module.growth > 1.1, larger) << module.name << " " << module.growth;
  }
}

/// One Q8_0 block: scale 1 and the code of each element.
std::string Q80Block(int first) {
  std::string block("\x00\x3c", 2);
  for (int i = 0; i < 32; ++i) block += static_cast<char>(first + i % 7);
  return block;
}

std::string Q80Rows(int rows) {
  std::string data;
  for (int row = 0; row < rows; ++row) data += Q80Block(row);
  return data;
}

GgufBuilder Llama() {
  GgufBuilder file;
  file.Text("general.architecture", "llama")
      .Count("llama.block_count", 1)
      .Count("llama.embedding_length", 32)
      .Count("llama.feed_forward_length", 64)
      .Count("llama.context_length", 128)
      .Count("llama.attention.head_count", 2)
      .Count("llama.attention.head_count_kv", 1)
      .Real("llama.rope.freq_base", 10000)
      .Real("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  return file;
}

class GgufFiles : public ::testing::Test {
 protected:
  Result<Checkpoint> Open(const std::string& content) {
    WriteFile(path_, content);
    return Checkpoint::Open(path_);
  }
  void ExpectError(const std::string& content, Code code, const std::string& part) {
    const auto opened = Open(content);
    ASSERT_FALSE(opened.ok()) << part;
    EXPECT_EQ(opened.status().code(), code) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), part)) << opened.status().message();
    EXPECT_TRUE(Contains(opened.status().message(), "model.gguf")) << opened.status().message();
    EXPECT_FALSE(Contains(opened.status().message(), "\n")) << opened.status().message();
  }
  TemporaryDirectory directory_;
  std::string path_ = directory_ / "model.gguf";
};

TEST_F(GgufFiles, RowsOfHeadsAreInTheOrderOfHuggingFace) {
  // Two heads of 8 rows: row r of the file has codes that begin with r.
  std::vector<float> bias;
  for (int i = 0; i < 16; ++i) bias.push_back(static_cast<float>(i));
  std::vector<float> dense;
  for (int i = 0; i < 8 * 32; ++i) dense.push_back(static_cast<float>(i / 32));
  GgufBuilder file = Llama();
  file.Tensor("blk.0.attn_q.weight", {32, 16}, kQ80, Q80Rows(16))
      .Tensor("blk.0.attn_q.bias", {16}, kF32, FloatBytes(bias))
      .Tensor("blk.0.attn_k.weight", {32, 8}, kF32, FloatBytes(dense))
      .Tensor("blk.0.attn_v.weight", {32, 8}, kQ80, Q80Rows(8));
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const std::string layer = "model.layers.0.self_attn.";
  const std::vector<float> q = ValuesOf(*opened, layer + "q_proj.weight");
  const std::vector<float> v = ValuesOf(*opened, layer + "v_proj.weight");
  const std::vector<float> k = PlainValues(*opened, layer + "k_proj.weight");
  const std::vector<float> b = PlainValues(*opened, layer + "q_proj.bias");
  ASSERT_EQ(q.size(), 16U * 32);
  ASSERT_EQ(b.size(), 16U);
  for (size_t row = 0; row < 16; ++row) {
    // In a head of 8, row 0..3 come from 0, 2, 4, 6 and row 4..7 from 1, 3, 5, 7.
    const size_t from = row / 8 * 8 + row % 4 * 2 + row % 8 / 4;
    EXPECT_EQ(q[row * 32], static_cast<float>(from)) << row;
    EXPECT_EQ(b[row], static_cast<float>(from)) << row;
    if (row >= 8) continue;
    EXPECT_EQ(k[row * 32], static_cast<float>(from)) << row;
    EXPECT_EQ(v[row * 32], static_cast<float>(row)) << row;
  }
}

TEST_F(GgufFiles, TheOrderOfRowsNeedsTheNumberOfHeads) {
  GgufBuilder file;
  file.Text("general.architecture", "llama");
  file.Tensor("blk.0.attn_q.weight", {32, 16}, kQ80, Q80Rows(16));
  ExpectError(file.Build(), Code::kMalformedFile,
              "tensor \"blk.0.attn_q.weight\": the order of its rows needs "
              "llama.attention.head_count, which is missing");
  file.Count("llama.attention.head_count", 3);
  ExpectError(file.Build(), Code::kMalformedFile,
              "16 rows are not 3 heads of even size (llama.attention.head_count)");
}

TEST_F(GgufFiles, MetadataBecomeTheConfiguration) {
  GgufBuilder file = Llama();
  file.Count("llama.expert_count", 4)
      .Count("llama.expert_used_count", 2)
      .Count("tokenizer.ggml.eos_token_id", 2)
      .Tensor("token_embd.weight", {32, 5}, kQ80, Q80Rows(5))
      .Tensor("blk.0.ffn_gate_exps.weight", {32, 64, 4}, kQ80, Q80Rows(256))
      .Tensor("blk.0.ffn_down_exps.weight", {32, 1, 2}, kF32,
              FloatBytes(std::vector<float>(64, 1.5F)));
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const auto config = ParseJsonObject(opened->config_json(), "config");
  ASSERT_TRUE(config.ok());
  const Json expected = {{"model_type", "mixtral"},
                         {"hidden_size", 32},
                         {"num_hidden_layers", 1},
                         {"intermediate_size", 64},
                         {"max_position_embeddings", 128},
                         {"num_attention_heads", 2},
                         {"num_key_value_heads", 1},
                         {"head_dim", 16},
                         {"vocab_size", 5},
                         {"rope_theta", 10000.0},
                         {"rms_norm_eps", 1e-5},
                         {"num_local_experts", 4},
                         {"num_experts_per_tok", 2},
                         {"eos_token_id", 2},
                         {"tie_word_embeddings", true}};
  for (const auto& [key, value] : expected.items()) EXPECT_EQ((*config)[key], value) << key;
  ASSERT_EQ(opened->modules().size(), 2U);
  EXPECT_EQ(opened->modules()[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(opened->modules()[1].name, "model.layers.0.block_sparse_moe.experts.*.w1.weight");
  EXPECT_EQ(opened->modules()[1].spec.experts, 4);
  // Unquantized stacks are views of the file, one for each expert.
  for (const char* expert : {"0", "1"}) {
    const TensorInfo* const info = opened->Find(
        std::string("model.layers.0.block_sparse_moe.experts.") + expert + ".w2.weight");
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->shape, (Shape{1, 32}));
  }
}

TEST_F(GgufFiles, FrequenciesOfLlama3AreRecognized) {
  const double factor = 8;
  std::vector<float> factors;
  for (int i = 0; i < 8; ++i) {
    const double turns = 8192 * std::pow(500000.0, -i / 8.0) / (2 * 3.14159265358979323846);
    const double smooth = std::min(1.0, std::max(0.0, (turns - 1) / 3));
    factors.push_back(static_cast<float>(1 / ((1 - smooth) / factor + smooth)));
  }
  for (const bool other : {false, true}) {
    if (other) factors[3] = 5;
    GgufBuilder file;
    file.Text("general.architecture", "llama").Real("llama.rope.freq_base", 500000);
    file.Tensor("rope_freqs.weight", {8}, kF32, FloatBytes(factors));
    const auto opened = Open(file.Build());
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    const auto config = ParseJsonObject(opened->config_json(), "config");
    ASSERT_TRUE(config.ok());
    const Json& scaling = (*config)["rope_scaling"];
    if (other) {
      EXPECT_TRUE(Contains(scaling["rope_type"].get<std::string>(), "rope_freqs.weight"));
    } else {
      EXPECT_EQ(scaling, (Json{{"rope_type", "llama3"},
                               {"factor", 8.0},
                               {"low_freq_factor", 1.0},
                               {"high_freq_factor", 4.0},
                               {"original_max_position_embeddings", 8192}}));
    }
    EXPECT_TRUE(opened->tensors().empty());
  }
}

TEST_F(GgufFiles, GateAndUpOfGptOssAreOneStack) {
  GgufBuilder file;
  file.Text("general.architecture", "gpt-oss").Count("gpt-oss.expert_count", 2);
  std::string up;
  for (int row = 0; row < 6; ++row) up += Q80Block(100 + row);
  file.Tensor("blk.0.ffn_gate_exps.weight", {32, 3, 2}, kQ80, Q80Rows(6))
      .Tensor("blk.0.ffn_up_exps.weight", {32, 3, 2}, kQ80, up)
      .Tensor("blk.0.ffn_gate_exps.bias", {3, 2}, kF32, FloatBytes({0, 1, 2, 3, 4, 5}))
      .Tensor("blk.0.ffn_up_exps.bias", {3, 2}, kF32, FloatBytes({10, 11, 12, 13, 14, 15}));
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ASSERT_EQ(opened->modules().size(), 1U);
  const std::string name = "model.layers.0.mlp.experts.gate_up_proj";
  EXPECT_EQ(opened->modules()[0].name, name);
  const std::vector<float> values = ValuesOf(*opened, name);
  const std::vector<float> bias = PlainValues(*opened, name + "_bias");
  for (size_t e = 0; e < 2; ++e) {
    for (size_t row = 0; row < 6; ++row) {
      const auto stored = static_cast<float>(e * 3 + row / 2);
      EXPECT_EQ(values[(e * 6 + row) * 32], stored + (row % 2 == 0 ? 0 : 100));
      EXPECT_EQ(bias[e * 6 + row], stored + (row % 2 == 0 ? 0 : 10));
    }
  }
}

TEST_F(GgufFiles, KeysAndValuesOfLatentAttentionAreOneMatrix) {
  // Two heads, rank 32, two keys and one value a head.
  std::vector<float> keys;
  for (int i = 0; i < 2 * 32 * 2; ++i) keys.push_back(static_cast<float>(i));
  GgufBuilder file;
  file.Text("general.architecture", "deepseek2");
  file.Tensor("blk.3.attn_k_b.weight", {2, 32, 2}, kF32, FloatBytes(keys))
      .Tensor("blk.3.attn_v_b.weight", {32, 1, 2}, kQ80, Q80Rows(2));
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ASSERT_EQ(opened->tensors().size(), 1U);
  const std::string name = "model.layers.3.self_attn.kv_b_proj.weight";
  const std::vector<float> joined = PlainValues(*opened, name);
  ASSERT_EQ(joined.size(), 6U * 32);
  for (size_t head = 0; head < 2; ++head) {
    for (size_t r = 0; r < 32; ++r) {
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(joined[(head * 3 + i) * 32 + r], keys[(head * 32 + r) * 2 + i]);
      }
      EXPECT_EQ(joined[(head * 3 + 2) * 32 + r], static_cast<float>(head + r % 7));
    }
  }
  file.Tensor("blk.4.attn_k_b.weight", {2, 16, 2}, kF32, std::string(256, '\0'))
      .Tensor("blk.4.attn_v_b.weight", {32, 1, 2}, kQ80, Q80Rows(2));
  ExpectError(file.Build(), Code::kMalformedFile, "[2, 16, 2] does not fit [2, 1, 32]");
}

TEST_F(GgufFiles, UnknownArchitecturesKeepTheirNames) {
  GgufBuilder file;
  file.Text("general.architecture", "other");
  file.Tensor("blk.0.attn_q.weight", {32, 3}, kQ80, Q80Rows(3));
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ASSERT_EQ(opened->modules().size(), 1U);
  EXPECT_EQ(opened->modules()[0].name, "blk.0.attn_q.weight");
  EXPECT_TRUE(Contains(opened->config_json(), "\"other\""));
}

TEST_F(GgufFiles, ShardsAreOneModel) {
  const auto shard = [](uint32_t number, uint32_t count) {
    GgufBuilder file;
    file.Count("split.no", number).Count("split.count", count).Count("split.tensors.count", 2);
    if (number == 0) file.Text("general.architecture", "other");
    file.Tensor("t" + std::to_string(number), {32, 3}, kQ80, Q80Rows(3));
    return file.Build();
  };
  const std::string first = directory_ / "m-00001-of-00002.gguf";
  const std::string second = directory_ / "m-00002-of-00002.gguf";
  WriteFile(first, shard(0, 2));
  EXPECT_TRUE(Contains(std::string(Checkpoint::Open(first).status().message()),
                       "m-00002-of-00002.gguf: no such file"));
  WriteFile(second, shard(1, 2));
  for (const std::string& path : {first, second, directory_.path()}) {
    const auto opened = Checkpoint::Open(path);
    ASSERT_TRUE(opened.ok()) << path << ": " << opened.status().message();
    EXPECT_EQ(opened->modules().size(), 2U);
    EXPECT_EQ(ValuesOf(*opened, "t1")[32], 1);
  }
  WriteFile(second, shard(0, 2));
  EXPECT_TRUE(Contains(std::string(Checkpoint::Open(first).status().message()),
                       "m-00002-of-00002.gguf: split.no is 0, expected 1"));
  WriteFile(second, shard(1, 3));
  EXPECT_TRUE(Contains(std::string(Checkpoint::Open(first).status().message()),
                       "m-00002-of-00002.gguf: split.count is 3, and 2 files were found"));
  WriteFile(path_, shard(0, 2));
  EXPECT_FALSE(Checkpoint::Open(path_).ok());
}

TEST_F(GgufFiles, MalformedOnesAreNamed) {
  const auto with = [](uint32_t type, std::vector<uint64_t> dims, const std::string& data) {
    GgufBuilder file;
    file.Tensor("t", std::move(dims), type, data);
    return file.Build();
  };
  ExpectError("GGUX", Code::kMalformedFile, "does not begin with GGUF");
  GgufBuilder old;
  old.version = 1;
  ExpectError(old.Build(), Code::kUnsupported, "GGUF version 1, this build reads 2 and 3");
  old.version = 0x03000000;
  ExpectError(old.Build(), Code::kUnsupported, "(the file is big-endian)");
  ExpectError(with(15, {256, 1}, ""), Code::kUnsupported,
              "tensor \"t\": type Q8_K (15) is not supported");
  ExpectError(with(99, {256, 1}, ""), Code::kUnsupported, "tensor \"t\": type 99 is not known");
  ExpectError(with(kQ80, {33, 1}, Q80Rows(1)), Code::kMalformedFile,
              "tensor \"t\": rows of 33 elements are not whole blocks of 32 (Q8_0)");
  ExpectError(with(kQ80, {32, 5}, Q80Rows(4)), Code::kMalformedFile,
              "tensor \"t\": 170 bytes at offset 0");
  ExpectError(with(kF32, {1, 1, 1, 1, 1}, "0000"), Code::kMalformedFile, "5 dimensions, at most 4");
  ExpectError(with(kF32, {uint64_t{1} << 62, 4}, ""), Code::kMalformedFile, "overflows");
  ExpectError(with(kF32, {uint64_t{1} << 63}, ""), Code::kMalformedFile, "dimension at byte");
  ExpectError(with(kF32, {0, uint64_t{1} << 40, uint64_t{1} << 40}, ""), Code::kMalformedFile,
              "overflows");
  ExpectError(with(kQ80, {0, 4}, ""), Code::kMalformedFile, "[4, 0] holds no weights");
  GgufBuilder twice;
  twice.Tensor("t", {1}, kF32, "0000").Tensor("t", {1}, kF32, "0000");
  ExpectError(twice.Build(), Code::kMalformedFile, "tensor \"t\": occurs twice");
  GgufBuilder keys;
  keys.Count("k", 1).Count("k", 1);
  ExpectError(keys.Build(), Code::kMalformedFile, "metadata \"k\" occurs twice");
  ExpectError(GgufBuilder().Raw("k", 13, "").Build(), Code::kMalformedFile,
              "metadata \"k\": type 13, known are 0 to 12");
  ExpectError(GgufBuilder().Count("general.alignment", 24).Build(), Code::kMalformedFile,
              "\"general.alignment\": 24 is not a power of two");
  ExpectError(GgufBuilder().Text("general.alignment", "x").Build(), Code::kMalformedFile,
              "a value of another type");
  GgufBuilder star;
  star.Tensor("a.*.b", {1}, kF32, "0000");
  ExpectError(star.Build(), Code::kMalformedFile, "its name contains '*'");
  GgufBuilder bytes;
  bytes.Tensor("a\xff", {32, 1}, kQ80, Q80Rows(1));
  ExpectError(bytes.Build(), Code::kMalformedFile, "its name is not printable UTF-8");
  GgufBuilder clash;
  clash.Text("general.architecture", "qwen2");
  clash.Tensor("output.weight", {32, 3}, kQ80, Q80Rows(3))
      .Tensor("lm_head.weight", {32, 3}, kQ80, Q80Rows(3));
  ExpectError(clash.Build(), Code::kMalformedFile, "two tensors would both be \"lm_head.weight\"");
  GgufBuilder mixed;
  mixed.Text("general.architecture", "qwen2");
  mixed.Tensor("output.weight", {32, 3}, kQ80, Q80Rows(3))
      .Tensor("lm_head.weight", {1}, kF32, "0000");
  ExpectError(mixed.Build(), Code::kMalformedFile, "are both \"lm_head.weight\"");
}

TEST_F(GgufFiles, TensorsWithoutDataAreNotLoopedOver) {
  constexpr uint64_t kHuge = uint64_t{1} << 40;
  GgufBuilder file;
  file.Text("general.architecture", "deepseek2").Count("deepseek2.attention.head_count", 2);
  file.Tensor("blk.0.attn_k_b.weight", {0, 0, kHuge}, kF32, "")
      .Tensor("blk.0.attn_v_b.weight", {0, 0, kHuge}, kF32, "")
      .Tensor("blk.0.ffn_gate_exps.weight", {0, 1, kHuge}, kF32, "");
  ExpectError(file.Build(), Code::kMalformedFile, "is no stack of experts");
  GgufBuilder empty;
  empty.Text("general.architecture", "llama").Count("llama.attention.head_count", 2);
  empty.Tensor("blk.0.attn_q.weight", {0, kHuge}, kF32, "").Tensor("v", {0}, kQ80, "");
  const auto opened = Open(empty.Build());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  for (const TensorInfo& tensor : opened->tensors()) {
    EXPECT_TRUE(opened->Tensor(tensor.name).ok());
    EXPECT_EQ(tensor.bytes, 0);
  }
  GgufBuilder pair;
  pair.Text("general.architecture", "gpt-oss");
  pair.Tensor("blk.0.ffn_gate_exps.weight", {0, uint64_t{1} << 62, 1}, kF32, "")
      .Tensor("blk.0.ffn_up_exps.weight", {0, uint64_t{1} << 62, 1}, kF32, "");
  ExpectError(pair.Build(), Code::kMalformedFile, "holds no weights");
}

TEST_F(GgufFiles, ScalesOfNvfp4AreChecked) {
  GgufBuilder file;
  file.Tensor("a.weight", {64, 1}, kNvfp4, std::string(36, '\x11'))
      .Tensor("a.scale", {2}, kF32, FloatBytes({1, 2}));
  ExpectError(file.Build(), Code::kMalformedFile,
              "tensor \"a.scale\": expected 1 or 1 values, got 2");
  GgufBuilder half;
  half.Tensor("a.weight", {64, 1}, kNvfp4, std::string(36, '\x11'))
      .Tensor("a.scale", {1}, kF16, "00");
  ExpectError(half.Build(), Code::kMalformedFile, "tensor \"a.scale\": expected F32, got F16");
  // Gate and up of gpt-oss are one matrix with one factor for each expert.
  const auto pair = [](const std::vector<float>& of_gate, const std::vector<float>& of_up) {
    GgufBuilder stacks;
    stacks.Text("general.architecture", "gpt-oss").Count("gpt-oss.expert_count", 2);
    const std::string blocks(72, '\x11');
    stacks.Tensor("blk.0.ffn_gate_exps.weight", {64, 1, 2}, kNvfp4, blocks)
        .Tensor("blk.0.ffn_up_exps.weight", {64, 1, 2}, kNvfp4, blocks)
        .Tensor("blk.0.ffn_gate_exps.scale", {2}, kF32, FloatBytes(of_gate));
    if (!of_up.empty()) {
      stacks.Tensor("blk.0.ffn_up_exps.scale", {2}, kF32, FloatBytes(of_up));
    }
    return stacks.Build();
  };
  ExpectError(pair({1, 2}, {1, 3}), Code::kUnsupported, "its factors differ");
  ExpectError(pair({1, 2}, {}), Code::kUnsupported, "its factors differ");
  const auto opened = Open(pair({1, 2}, {1, 2}));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->Weights("model.layers.0.mlp.experts.gate_up_proj").ok());
}

TEST_F(GgufFiles, ScalesThatAreNotFiniteAreFound) {
  std::string block(18, '\x00');
  block[1] = '\x7c';  // Infinity in fp16.
  GgufBuilder file;
  file.Tensor("t", {32, 1}, kQ40, block);
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->Weights("t").status().code(), Code::kMalformedFile);
  EXPECT_EQ(opened->VerifyChecksums().code(), Code::kMalformedFile);
  const auto report = ImportCheckpoint(path_, directory_ / "out", {});
  EXPECT_EQ(report.status().code(), Code::kMalformedFile);
  EXPECT_EQ(directory_.Entries(), std::vector<std::string>{"model.gguf"});
}

TEST_F(GgufFiles, ScalesOfGridsThatAreNotFiniteAreFound) {
  // Type and size of a block, and the byte that holds the exponent of its scale.
  struct Grid {
    uint32_t type;
    size_t bytes;
    size_t high;
  };
  constexpr Grid kGrids[] = {{16, 66, 1},  {17, 74, 1}, {18, 98, 1}, {19, 50, 1},
                             {21, 110, 1}, {22, 82, 1}, {29, 56, 55}};
  for (const Grid& grid : kGrids) {
    std::string block(grid.bytes, '\xff');
    GgufBuilder file;
    file.Tensor("t", {256, 1}, grid.type, block);
    const auto nan = Open(file.Build());
    ASSERT_TRUE(nan.ok()) << grid.type << " " << nan.status().message();
    EXPECT_EQ(nan->Weights("t").status().code(), Code::kMalformedFile) << grid.type;
    // All indexes at their ends, and a finite scale.
    block[grid.high] = '\x3b';
    GgufBuilder finite;
    finite.Tensor("t", {256, 1}, grid.type, block);
    const auto opened = Open(finite.Build());
    ASSERT_TRUE(opened.ok()) << grid.type;
    EXPECT_TRUE(opened->Weights("t").ok()) << grid.type;
    // Rows are whole blocks, and all of their bytes are there.
    GgufBuilder odd;
    odd.Tensor("t", {32, 1}, grid.type, block);
    EXPECT_EQ(Open(odd.Build()).status().code(), Code::kMalformedFile) << grid.type;
    GgufBuilder cut;
    cut.Tensor("t", {256, 1}, grid.type, block.substr(0, 20));
    EXPECT_EQ(Open(cut.Build()).status().code(), Code::kMalformedFile) << grid.type;
  }
}

TEST_F(GgufFiles, EveryTruncationIsRefused) {
  GgufBuilder file = Llama();
  file.Texts("tokenizer.ggml.tokens", {"a", "b"}).Numbers("tokenizer.ggml.token_type", {1, 1});
  file.Tensor("token_embd.weight", {32, 2}, kQ80, Q80Rows(2)).Tensor("x", {2}, kF32, "00000000");
  const std::string whole = file.Build();
  ASSERT_TRUE(Open(whole).ok());
  for (size_t bytes = 0; bytes < whole.size() - 24; ++bytes) {
    const auto opened = Open(whole.substr(0, bytes));
    ASSERT_FALSE(opened.ok()) << bytes;
    EXPECT_EQ(opened.status().code(), Code::kMalformedFile) << opened.status().message();
  }
}

TEST_F(GgufFiles, MutationsNeverCrash) {
  GgufBuilder file = Llama();
  file.Texts("tokenizer.ggml.tokens", {"a", "b"}).Text("tokenizer.ggml.model", "gpt2");
  file.Tensor("token_embd.weight", {32, 2}, kQ80, Q80Rows(2))
      .Tensor("blk.0.attn_q.weight", {32, 16}, kQ80, Q80Rows(16))
      .Tensor("blk.0.attn_k.weight", {4, 4}, kF32, std::string(64, '\x00'));
  const std::string whole = file.Build();
  const size_t header = file.HeaderBytes();
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 800; ++i) {
    std::string content = whole;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int change = 0; change < changes; ++change) {
      content[random() % header] = static_cast<char>(random());
    }
    const auto opened = Open(content);
    if (!opened.ok()) {
      ++refused;
      EXPECT_FALSE(Contains(opened.status().message(), "\n"));
      continue;
    }
    // A file that opens can be loaded, or the error says why not.
    for (const QuantizedModule& module : opened->modules()) (void)opened->Weights(module.name);
    for (const TensorInfo& tensor : opened->tensors()) (void)opened->Tensor(tensor.name);
    (void)opened->ReadFile("tokenizer.json");
  }
  EXPECT_GT(refused, 300);
}

TEST_F(GgufFiles, UnquantizedOnesBecomeUnquantizedDirectories) {
  std::vector<float> dense;
  for (int i = 0; i < 16 * 32; ++i) dense.push_back(static_cast<float>(i));
  GgufBuilder file = Llama();
  file.Tensor("blk.0.attn_q.weight", {32, 16}, kF32, FloatBytes(dense));
  const auto opened = Open(file.Build());
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->quant_method(), "");
  const auto report = ImportCheckpoint(path_, directory_ / "out", {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  const auto imported = Checkpoint::Open(directory_ / "out");
  ASSERT_TRUE(imported.ok());
  EXPECT_EQ(imported->quant_method(), "");
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  EXPECT_EQ(PlainValues(*imported, name), PlainValues(*opened, name));
  EXPECT_NE(PlainValues(*imported, name), dense);
}

TEST(Import, RefusesWhatIsNotForeign) {
  TemporaryDirectory directory;
  WriteFile(directory / "model.safetensors",
            testing::BuildSafetensors({testing::RandomBf16("a.weight", {64, 64}, 1)}));
  const auto plain = ImportCheckpoint(directory.path(), directory / "out", {});
  EXPECT_EQ(plain.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Contains(plain.status().message(), "nothing to import")) << plain.status().message();
  const std::string own = SourceDirectory() + "/tests/golden/checkpoint_v1";
  const auto already = ImportCheckpoint(own, directory / "out", {});
  EXPECT_EQ(already.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Contains(already.status().message(), "is a directory of metal-marlin already"));
}

}  // namespace
}  // namespace marlin::gguf_test
