// GGUF's types with two levels of scales: a file that is imported and exported again has the same
// blocks; two levels that no type has become one.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/scalars.h"
#include "gguf_files.h"
#include "marlin/checkpoint.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::export_k_quants_test {
namespace {

using testing::Contains;
using testing::GgufBuilder;
using testing::TestModule;

constexpr uint64_t kColumns = 512;
const char kUp[] = "model.layers.0.mlp.up_proj.weight";

struct BlockType {
  const char* name;
  uint32_t id;
  size_t bytes;                // Size of a block of 256.
  std::vector<size_t> halves;  // Offsets of its fp16 numbers.
  Format format;
};

std::vector<BlockType> BlockTypes() {
  return {{"Q2_K", 10, 84, {80, 82}, Format::kNf2}, {"Q3_K", 11, 110, {108}, Format::kInt3},
          {"Q4_K", 12, 144, {0, 2}, Format::kU4},   {"Q5_K", 13, 176, {0, 2}, Format::kU5},
          {"Q6_K", 14, 210, {208}, Format::kInt6},  {"IQ4_XS", 23, 136, {0}, Format::kCodebook4}};
}

/// Rows of random blocks, whose fp16 numbers are finite.
std::string RandomBlocks(const BlockType& type, uint64_t rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::string data(rows * (kColumns / 256) * type.bytes, '\0');
  for (char& byte : data) byte = static_cast<char>(random());
  for (size_t block = 0; block < data.size(); block += type.bytes) {
    for (const size_t half : type.halves) data[block + half + 1] &= static_cast<char>(0xbf);
  }
  return data;
}

class KQuants : public ::testing::Test {
 protected:
  void WriteSource(const BlockType& type) {
    GgufBuilder file;
    file.Text("general.architecture", "llama")
        .Count("llama.block_count", 1)
        .Count("llama.embedding_length", kColumns)
        .Count("llama.feed_forward_length", 5)
        .Count("llama.context_length", 128)
        .Count("llama.attention.head_count", 2)
        .Count("llama.attention.head_count_kv", 2)
        .Count("llama.vocab_size", 4)
        .Count("llama.expert_count", 3)
        .Count("llama.expert_used_count", 2)
        .Real("llama.rope.freq_base", 10000)
        .Real("llama.attention.layer_norm_rms_epsilon", 1e-5F);
    // Rows of q are brought into another order, and back; experts lie in one tensor.
    blocks_ = {RandomBlocks(type, 16, 1), RandomBlocks(type, 15, 2)};
    file.Tensor("blk.0.attn_q.weight", {kColumns, 16}, type.id, blocks_[0]);
    file.Tensor("blk.0.ffn_up_exps.weight", {kColumns, 5, 3}, type.id, blocks_[1]);
    testing::WriteFile(directory_ / "source.gguf", file.Build());
  }

  Status Export(const std::string& source) {
    ConvertCheckpointOptions options;
    options.target = "gguf";
    options.overwrite = true;
    return ConvertCheckpoint(source, out(), options).status();
  }

  /// Exports one module of a directory.
  Status Export(const TestModule& module) {
    const std::string source = directory_ / "directory";
    std::filesystem::remove_all(source);
    const Json config = {{"model_type", "llama"},      {"hidden_size", 512},
                         {"intermediate_size", 40},    {"num_hidden_layers", 1},
                         {"num_attention_heads", 4},   {"num_key_value_heads", 4},
                         {"vocab_size", 16},           {"max_position_embeddings", 512},
                         {"rms_norm_eps", 1e-5},       {"rope_theta", 20000.0},
                         {"tie_word_embeddings", true}};
    testing::WriteQuantizedDirectory(
        source, {module}, {testing::RandomBf16("model.embed_tokens.weight", {16, 512}, 2)}, config);
    return Export(source);
  }

  std::string out() const { return directory_ / "out.gguf"; }

  testing::TemporaryDirectory directory_;
  std::vector<std::string> blocks_;
};

TEST_F(KQuants, BlocksAreWrittenBackAsTheyWere) {
  for (const BlockType& type : BlockTypes()) {
    SCOPED_TRACE(type.name);
    WriteSource(type);
    ImportCheckpointOptions options;
    options.overwrite = true;
    const auto report = ImportCheckpoint(directory_ / "source.gguf", directory_ / "own", options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    for (const ImportedModule& module : report->modules) {
      EXPECT_EQ(FormatName(module.spec.format), FormatName(type.format));
      EXPECT_EQ(module.spec.super_group_size, 256);
    }
    // From the directory, and from the file itself.
    for (const char* const source : {"own", "source.gguf"}) {
      const Status status = Export(directory_ / source);
      ASSERT_TRUE(status.ok()) << status.message();
      const std::string written = testing::ReadFile(out());
      for (const std::string& blocks : blocks_) {
        EXPECT_NE(written.find(blocks), std::string::npos) << source;
      }
    }
  }
}

TEST_F(KQuants, PointsOfGridsHaveNoWayBack) {
  const std::pair<BlockType, const char*> cases[] = {
      {{"IQ2_XXS", 16, 66, {0}, Format::kNf3}, "gguf cannot hold nf3 in groups of 32"},
      {{"IQ3_S", 21, 110, {0}, Format::kCodebook4}, "a codebook other than that of IQ4_NL"}};
  for (const auto& [type, part] : cases) {
    WriteSource(type);
    const Status status = Export(directory_ / "source.gguf");
    EXPECT_EQ(status.code(), Code::kUnsupported) << type.name;
    EXPECT_TRUE(Contains(status.message(), part)) << status.message();
    EXPECT_FALSE(std::filesystem::exists(out()));
  }
}

/// A matrix of u4 with two levels of scales and biases: powers of two times `scale` and `bias`.
TestModule TwoLevels(int64_t group_size, int64_t super_group_size, int8_t scale, int8_t bias) {
  WeightsSpec spec{.format = Format::kU4,
                   .k = 512,
                   .n = 40,
                   .group_size = group_size,
                   .super_group_size = super_group_size,
                   .has_biases = true};
  TestModule module;
  module.record.module = {kUp, spec, LayerClass::kMlpUp};
  Result<WeightsBuffer> buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  std::mt19937 random(7);
  auto* const words = static_cast<uint32_t*>(buffer->codes);
  for (int64_t i = 0; i < buffer->weights.codes.ElementCount(); ++i) {
    words[i] = static_cast<uint32_t>(random());
  }
  for (int64_t i = 0; i < buffer->weights.scales.ElementCount(); ++i) {
    static_cast<int8_t*>(buffer->scales)[i] = static_cast<int8_t>(i % 3 == 0 ? 1 : scale);
    static_cast<int8_t*>(buffer->biases)[i] = static_cast<int8_t>(i % 5 == 0 ? 2 : bias);
  }
  for (int64_t i = 0; i < buffer->weights.super_scales.ElementCount(); ++i) {
    const float power = std::ldexp(1.0F, static_cast<int>(i % 4));
    static_cast<uint16_t*>(buffer->super_scales)[i] = FloatToHalf(power);
    static_cast<uint16_t*>(buffer->super_biases)[i] = FloatToHalf(-power);
  }
  module.weights = buffer->weights;
  return module;
}

TEST_F(KQuants, LargerGroupsAreRepeated) {
  const TestModule module = TwoLevels(64, 512, 63, 63);
  const Status status = Export(module);
  ASSERT_TRUE(status.ok()) << status.message();
  const Checkpoint read = *Checkpoint::Open(out());
  const QuantizedWeights weights = *read.Weights(kUp);
  EXPECT_EQ(weights.spec.group_size, 32);
  EXPECT_EQ(weights.spec.super_group_size, 256);
  EXPECT_EQ(testing::DenseOf(weights), testing::DenseOf(module.weights));
}

TEST_F(KQuants, NumbersThatNoTypeHasBecomeOneLevel) {
  const TestModule cases[] = {TwoLevels(32, 256, 64, 0), TwoLevels(32, 256, -1, 0),
                              TwoLevels(32, 256, 0, 64), TwoLevels(32, 256, 0, -1),
                              TwoLevels(32, 128, 63, 63)};
  for (const TestModule& module : cases) {
    const Status status = Export(module);
    ASSERT_TRUE(status.ok()) << status.message();
    const Checkpoint read = *Checkpoint::Open(out());
    const QuantizedWeights weights = *read.Weights(kUp);  // Q4_1
    EXPECT_EQ(FormatName(weights.spec.format), "u4");
    EXPECT_EQ(weights.spec.super_group_size, 0);
    EXPECT_EQ(testing::DenseOf(weights), testing::DenseOf(module.weights));
  }
}

TEST_F(KQuants, ProductsThatFp16DoesNotHoldAreNamed) {
  const TestModule module = TwoLevels(32, 256, -127, 0);
  auto* const halves = const_cast<uint16_t*>(module.weights.super_scales.As<uint16_t>());
  halves[0] = FloatToHalf(1.0F / 3.0F);
  const Status status = Export(module);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_TRUE(Contains(status.message(), kUp)) << status.message();
  EXPECT_TRUE(Contains(status.message(), "which f16 does not hold")) << status.message();
  EXPECT_FALSE(std::filesystem::exists(out()));
}

}  // namespace
}  // namespace marlin::export_k_quants_test
