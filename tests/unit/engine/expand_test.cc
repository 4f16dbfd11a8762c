// When a pass expands latents, in how much memory, and which pages.
#include "engine/mixers/latent_attention/expand.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace marlin::expand_test {
namespace {

using ::testing::ElementsAre;

/// DeepSeek-V2-Lite's attention.
DecoderConfig LatentConfig() {
  DecoderConfig config;
  config.family = *FindFamily("deepseek_v3");
  config.shape.heads = 16;
  config.shape.kv_rank = 512;
  config.shape.nope_dim = 128;
  config.shape.rope_dim = 64;
  config.shape.v_dim = 128;
  config.max_positions = 8192;
  LayerConfig& layer = config.layers.emplace_back();
  layer.mixer = MixerKind::kLatentAttention;
  layer.sizes = config.shape;
  return config;
}

bool Expands(const std::vector<PassSequence>& sequences,
             Determinism determinism = Determinism::kDefault) {
  return ExpandsLatents(*Device::Open("cpu"), LatentConfig(), sequences, determinism);
}

TEST(ExpandsLatents, PromptsDoAndDecodeStepsDoNot) {
  EXPECT_TRUE(Expands({{512, 512}}));
  EXPECT_TRUE(Expands({{4096, 4096}}));
  EXPECT_FALSE(Expands({{1, 1}}));
  EXPECT_FALSE(Expands({{1, 32768}}));
  EXPECT_FALSE(Expands({{16, 16}}));
  EXPECT_FALSE(Expands({}));
}

TEST(ExpandsLatents, CountsTheKeysOfEarlierPasses) {
  EXPECT_TRUE(Expands({{512, 2048}}));
  EXPECT_TRUE(Expands({{4096, 32768}}));
  // As many rows alone pay, but not for so many keys more.
  EXPECT_TRUE(Expands({{200, 200}}));
  EXPECT_FALSE(Expands({{200, 32768}}));
}

TEST(ExpandsLatents, CountsAllSequencesOfAPass) {
  EXPECT_TRUE(Expands({{512, 512}, {1, 100}, {1, 30}}));
  EXPECT_FALSE(Expands({{512, 512}, {1, 32768}, {1, 32768}}));
  EXPECT_FALSE(Expands(std::vector<PassSequence>(64, {8, 512})));
}

TEST(ExpandsLatents, BatchInvariantModeAndOtherAttentionNeverDo) {
  EXPECT_FALSE(Expands({{4096, 4096}}, Determinism::kBatchInvariant));
  const Device device = *Device::Open("cpu");
  const PassSequence sequence{4096, 4096};
  DecoderConfig config = LatentConfig();
  const PassSetting setting{device, config};
  EXPECT_TRUE(MixerOf(config.mixer(0)).Expands(setting, {&sequence, 1}));
  config.layers.front().mixer = MixerKind::kAttention;
  EXPECT_FALSE(MixerOf(config.mixer(0)).Expands(setting, {&sequence, 1}));
}

TEST(ExpandedMemory, IsThatOfTheContextUpToALimit) {
  DecoderConfig config = LatentConfig();
  const auto bytes = [&](DType cache, Accuracy accuracy, bool host) {
    return ExpandedMemory(config, cache, accuracy, host).bytes();
  };
  EXPECT_EQ(bytes(DType::kBf16, Accuracy::kDefault, false), 8192 * 16 * 320 * 2);
  EXPECT_EQ(bytes(DType::kF8E4M3, Accuracy::kDefault, false), 8192 * 16 * 320 * 2);
  EXPECT_EQ(bytes(DType::kF32, Accuracy::kDefault, false), 8192 * 16 * 320 * 4);
  EXPECT_EQ(bytes(DType::kBf16, Accuracy::kExact, false), 8192 * 16 * 320 * 4);
  EXPECT_EQ(bytes(DType::kBf16, Accuracy::kDefault, true), 64 << 20);
  config.max_positions = 1 << 20;
  EXPECT_EQ(bytes(DType::kBf16, Accuracy::kDefault, false), 512 << 20);
  config.max_positions = 10;
  EXPECT_EQ(bytes(DType::kBf16, Accuracy::kDefault, true), 256 * 16 * 320 * 2);
  const Device device = *Device::Open("cpu");
  EXPECT_EQ(MixerOf(config.mixer(0)).ExpandedBytes({device, config}), 256 * 16 * 320 * 4);
  config.layers.front().mixer = MixerKind::kAttention;
  EXPECT_EQ(MixerOf(config.mixer(0)).ExpandedBytes({device, config}), 0);
}

TEST(ExpandedMemory, HoldsEqualPartsOfTheHeads) {
  const ExpandedMemory memory(LatentConfig(), DType::kBf16, Accuracy::kDefault, false);
  EXPECT_EQ(memory.HeadsAtATime(1, 64), 16);
  EXPECT_EQ(memory.HeadsAtATime(128, 64), 16);
  // 15 fit, in two parts.
  EXPECT_EQ(memory.HeadsAtATime(129, 64), 8);
  // 5 fit, in four parts.
  EXPECT_EQ(memory.HeadsAtATime(400, 64), 4);
  EXPECT_EQ(memory.HeadsAtATime(16 * 128, 64), 1);
  EXPECT_EQ(memory.HeadsAtATime(16 * 128 + 1, 64), 0);
}

TEST(ExpandedTables, ListThePagesThatRowsSee) {
  const std::vector<PassSequence> sequences = {{100, 130}, {1, 64}, {0, 0}, {10, 200}};
  // The first block of the last sequence is behind its window.
  const std::vector<int32_t> blocks = {7, 2, 9, 5, 4, -1, -1, -1, 3, -1, -1, -1, -1, 8, 1, 6};
  const ExpandedTables tables = TablesOf(sequences, blocks, 64);
  EXPECT_THAT(tables.pages, ElementsAre(7, 2, 9, 4, 8, 1, 6));
  EXPECT_THAT(tables.tokens, ElementsAre(64, 64, 2, 64, 64, 64, 8));
  EXPECT_THAT(tables.block_tables,
              ElementsAre(0, 1, 2, -1, 3, -1, -1, -1, -1, -1, -1, -1, -1, 4, 5, 6));
}

}  // namespace
}  // namespace marlin::expand_test
