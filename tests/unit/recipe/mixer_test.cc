// The inputs of a mixer's matrices, and the tensors that produce them.
#include "recipe/mixer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace marlin::mixer_test {
namespace {

using ::testing::ElementsAre;

MixerTensors TensorsOf(const Family& family, const Dimensions& sizes) {
  return ParametersOf(family.mixer).Tensors(family, sizes, LayerNames(3));
}

std::vector<InputSource> SourcesOf(const Family& family, const Dimensions& sizes) {
  return ParametersOf(family.mixer).Sources(sizes, TensorsOf(family, sizes));
}

// Two query heads share the values of a KV head.
TEST(MixerSources, ValuesMakeWhatGroupedAttentionMixes) {
  Dimensions sizes;
  sizes.hidden = 16;
  sizes.heads = 4;
  sizes.kv_heads = 2;
  sizes.head_dim = 3;
  const std::vector<InputSource> separate = SourcesOf(**FindFamily("llama"), sizes);
  ASSERT_EQ(separate.size(), 1U);
  EXPECT_EQ(separate[0].linear.name, "model.layers.3.self_attn.v_proj");
  EXPECT_THAT(separate[0].outputs, ElementsAre(0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5));
  const std::vector<InputSource> fused = SourcesOf(**FindFamily("phi3"), sizes);
  EXPECT_EQ(fused[0].linear.name, "model.layers.3.self_attn.qkv_proj");
  EXPECT_THAT(fused[0].outputs, ElementsAre(18, 19, 20, 18, 19, 20, 21, 22, 23, 21, 22, 23));
}

TEST(MixerSources, NormsMakeTheLowRanksOfLatentAttention) {
  Dimensions sizes;
  sizes.hidden = 16;
  sizes.heads = 2;
  sizes.q_rank = 5;
  sizes.kv_rank = 6;
  sizes.nope_dim = 3;
  sizes.rope_dim = 2;
  sizes.v_dim = 2;
  const Family& family = **FindFamily("deepseek_v3");
  const MixerTensors tensors = TensorsOf(family, sizes);
  const std::vector<InputSource> sources = SourcesOf(family, sizes);
  ASSERT_EQ(sources.size(), 3U);
  std::vector<std::string> of_hidden;
  for (const ProjectionTensors& projection : tensors.projections) {
    if (projection.layers.empty()) continue;
    ASSERT_EQ(projection.layers.size(), 1U);
    const LinearTensors& linear = projection.layers.front();
    if (projection.input == 0) {
      of_hidden.push_back(linear.name);
      continue;
    }
    EXPECT_EQ(sources[projection.input - 1].norm.count, linear.in) << linear.name;
  }
  EXPECT_THAT(of_hidden, ElementsAre("model.layers.3.self_attn.q_a_proj",
                                     "model.layers.3.self_attn.kv_a_proj_with_mqa"));
  EXPECT_EQ(sources[0].norm.name, "model.layers.3.self_attn.q_a_layernorm.weight");
  EXPECT_EQ(sources[1].norm.name, "model.layers.3.self_attn.kv_a_layernorm.weight");
  EXPECT_EQ(sources[2].linear.name, "model.layers.3.self_attn.kv_b_proj");
  EXPECT_THAT(sources[2].outputs, ElementsAre(3, 4, 8, 9));
}

// Every family's mixer has one source per input that it computes, and one for what it mixes.
TEST(MixerSources, AreThereForEveryInput) {
  Dimensions sizes;
  sizes.hidden = sizes.head_dim = sizes.nope_dim = sizes.rope_dim = sizes.v_dim = 8;
  sizes.heads = sizes.kv_heads = sizes.q_rank = sizes.kv_rank = 4;
  for (const Family& family : AllFamilies()) {
    const MixerTensors tensors = TensorsOf(family, sizes);
    const std::vector<InputSource> sources = SourcesOf(family, sizes);
    for (const ProjectionTensors& projection : tensors.projections) {
      EXPECT_LT(projection.input, sources.size()) << family.model_type;
    }
    const InputSource& mixed = sources.back();
    if (!mixed.linear.present()) continue;
    EXPECT_EQ(static_cast<int64_t>(mixed.outputs.size()), tensors.out.in) << family.model_type;
    for (const int64_t output : mixed.outputs) EXPECT_LT(output, mixed.linear.out);
  }
}

}  // namespace
}  // namespace marlin::mixer_test
