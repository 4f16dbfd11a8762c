// Names of base models, tied matrices, and tensors that no decoder uses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/json.h"
#include "marlin/checkpoint.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::decoder_names_test {
namespace {

using testing::BuildSafetensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RandomBf16;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

class DecoderNames : public ::testing::Test {
 protected:
  Checkpoint Open(const std::vector<TestTensor>& tensors, bool tied,
                  const std::string& type = "llama") {
    const Json config = {{"model_type", type}, {"tie_word_embeddings", tied}};
    WriteFile(directory_ / "config.json", config.dump());
    WriteFile(directory_ / "model.safetensors", BuildSafetensors(tensors));
    Result<Checkpoint> opened = Checkpoint::Open(directory_ / "");
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return *std::move(opened);
  }
  static std::vector<std::string> Names(const Checkpoint& checkpoint) {
    std::vector<std::string> names;
    for (const TensorInfo& tensor : checkpoint.tensors()) names.push_back(tensor.name);
    return names;
  }
  static TestTensor Make(const std::string& name, uint32_t seed = 1) {
    return RandomBf16(name, {8, 4}, seed);
  }
  static bool Ties(const Checkpoint& checkpoint) {
    return Json::parse(checkpoint.config_json())["tie_word_embeddings"];
  }

  TemporaryDirectory directory_;
};

TEST_F(DecoderNames, ABaseModelsNamesGetTheirPrefix) {
  const Checkpoint base = Open({Make("embed_tokens.weight"), Make("layers.0.mlp.up_proj.weight"),
                                Make("lm_head.weight"), Make("norm.weight")},
                               false);
  EXPECT_THAT(Names(base), ElementsAre("lm_head.weight", "model.embed_tokens.weight",
                                       "model.layers.0.mlp.up_proj.weight", "model.norm.weight"));
  EXPECT_THAT(base.notes(), ElementsAre(HasSubstr("embed_tokens.weight as model.embed_tokens")));
  const Checkpoint twice =
      Open({Make("model.model.norm.weight"), Make("model.lm_head.weight")}, false);
  EXPECT_THAT(Names(twice), ElementsAre("lm_head.weight", "model.norm.weight"));
}

TEST_F(DecoderNames, AQuantizedDirectoryHasTheNamesOfItsDequantizedCopy) {
  WeightsSpec spec;
  spec.k = 32;
  spec.n = 8;
  spec.group_size = 32;
  spec.format = Format::kS4;
  const auto names_of = [&](const std::string& module, const std::string& plain) {
    const std::string quantized = directory_ / "quantized";
    std::filesystem::remove_all(quantized);
    std::filesystem::remove_all(directory_ / "plain");
    testing::WriteQuantizedDirectory(quantized, {testing::RandomModule(module, spec, 1)},
                                     {Make(plain)}, {{"model_type", "llama"}});
    const Result<Checkpoint> opened = Checkpoint::Open(quantized);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    std::vector<std::string> names = {opened->modules().front().name};
    for (const TensorInfo& tensor : opened->tensors()) {
      if (!opened->IsModulePart(tensor.name)) names.push_back(tensor.name);
    }
    EXPECT_TRUE(opened->Weights(names.front()).ok());
    std::sort(names.begin(), names.end());
    const std::string output = directory_ / "plain";
    EXPECT_TRUE(DequantizeCheckpoint(quantized, output, DType::kF32, false).ok());
    EXPECT_EQ(Names(*Checkpoint::Open(output)), names);
    return names;
  };
  EXPECT_THAT(names_of("layers.0.mlp.up_proj.weight", "norm.weight"),
              ElementsAre("model.layers.0.mlp.up_proj.weight", "model.norm.weight"));
  EXPECT_THAT(names_of("model.lm_head.weight", "layers.0.input_layernorm.weight"),
              ElementsAre("lm_head.weight", "model.layers.0.input_layernorm.weight"));
  // A name that is taken, by a module or another tensor.
  EXPECT_THAT(names_of("model.norm.weight", "norm.weight"),
              ElementsAre("model.norm.weight", "norm.weight"));
  EXPECT_THAT(names_of("norm.weight", "model.norm.weight"),
              ElementsAre("model.norm.weight", "norm.weight"));
}

TEST_F(DecoderNames, StacksOfUnquantizedExpertsAreCut) {
  for (const auto& [type, stored, read] :
       {std::tuple("mixtral", "block_sparse_moe.switch_mlp.gate_proj",
                   "block_sparse_moe.experts.1.w1"),
        std::tuple("mixtral", "block_sparse_moe.switch_mlp.down_proj",
                   "block_sparse_moe.experts.1.w2"),
        std::tuple("qwen3_moe", "mlp.switch_mlp.up_proj", "mlp.experts.1.up_proj")}) {
    const std::string layer = "model.layers.0.";
    const TestTensor stack = RandomBf16(layer + stored + ".weight", {3, 8, 4}, 5);
    const Checkpoint opened = Open({stack, Make("model.norm.weight")}, false, type);
    ASSERT_EQ(opened.tensors().size(), 4U);
    EXPECT_THAT(opened.notes(), ElementsAre(HasSubstr(std::string(stored) + ".weight as ")));
    const std::string name = layer + read + ".weight";
    const TensorInfo* const matrix = opened.Find(name);
    ASSERT_NE(matrix, nullptr) << name;
    EXPECT_EQ(matrix->shape, (Shape{8, 4}));
    const Result<TensorView> view = opened.Tensor(name);
    EXPECT_EQ(std::string(view->As<char>(), 64), stack.data.substr(64, 64));
  }
}

TEST_F(DecoderNames, OtherStacksStay) {
  const std::string name = "model.layers.0.mlp.switch_mlp.up_proj.weight";
  const TestTensor stack = RandomBf16(name, {3, 8, 4}, 5);
  EXPECT_THAT(Names(Open({stack}, false, "llama")), ElementsAre(name));
  EXPECT_THAT(Names(Open({RandomBf16(name, {0, 8, 4}, 5)}, false, "qwen3_moe")), ElementsAre(name));
  const std::string flat = "model.layers.0.mlp.switch_mlp.up_proj.bias";
  EXPECT_THAT(Names(Open({RandomBf16(flat, {3, 8, 4}, 5)}, false, "qwen3_moe")), ElementsAre(flat));
}

TEST_F(DecoderNames, OtherNamesStay) {
  const Checkpoint both = Open({Make("norm.weight"), Make("model.norm.weight")}, false);
  EXPECT_THAT(Names(both), ElementsAre("model.norm.weight", "norm.weight"));
  EXPECT_THAT(both.notes(), IsEmpty());
  const Checkpoint other = Open({Make("layers.0.weight")}, false, "unknown_type");
  EXPECT_THAT(Names(other), ElementsAre("layers.0.weight"));
}

TEST_F(DecoderNames, ATiedHeadAloneIsTheTable) {
  const Checkpoint alone = Open({Make("lm_head.weight")}, true);
  EXPECT_THAT(Names(alone), ElementsAre("model.embed_tokens.weight"));
  EXPECT_THAT(alone.notes(), ElementsAre(HasSubstr("lm_head is both")));
  EXPECT_THAT(Names(Open({Make("lm_head.weight")}, false)), ElementsAre("lm_head.weight"));
}

TEST_F(DecoderNames, ACopyOfTheTableIsDroppedAndAnotherHeadUntied) {
  const Checkpoint copy = Open({Make("lm_head.weight"), Make("model.embed_tokens.weight")}, true);
  EXPECT_THAT(Names(copy), ElementsAre("model.embed_tokens.weight"));
  EXPECT_THAT(copy.notes(), IsEmpty());
  EXPECT_TRUE(Ties(copy));
  const Checkpoint own = Open({Make("lm_head.weight", 2), Make("model.embed_tokens.weight")}, true);
  EXPECT_THAT(Names(own), ElementsAre("lm_head.weight", "model.embed_tokens.weight"));
  EXPECT_FALSE(Ties(own));
  EXPECT_THAT(own.notes(), ElementsAre(HasSubstr("tie_word_embeddings is taken for false")));
}

TEST_F(DecoderNames, TensorsOfAQuantizedCacheAreDropped) {
  std::vector<TestTensor> tensors = {Make("model.norm.weight")};
  for (const char* name : {"k_scale", "v_scale", "kv_scale", "attn.k_scale", "k_proj.k_scale",
                           "v_proj.v_scale", "k_proj.output_scale", "qkv_proj.kv_scale",
                           "k_zero_point", "q_scale", "rotary_emb.inv_freq"}) {
    tensors.push_back(Make(std::string("model.layers.0.self_attn.") + name));
  }
  EXPECT_THAT(Names(Open(tensors, false)), ElementsAre("model.norm.weight"));
}

TEST_F(DecoderNames, DoublesAreReadAsFloats) {
  const double values[] = {1.5, -2.25, 1e-3, 1e300};
  TestTensor tensor{"model.norm.weight", DType::kF64, {4}, {}};
  tensor.data.assign(reinterpret_cast<const char*>(values), sizeof(values));
  const Checkpoint wide = Open({tensor}, false);
  const TensorInfo* info = wide.Find("model.norm.weight");
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->dtype, DType::kF32);
  EXPECT_EQ(info->bytes, 16);
  const Result<TensorView> view = wide.Tensor("model.norm.weight");
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->As<float>()[1], -2.25F);
  EXPECT_EQ(view->As<float>()[2], 1e-3F);
  EXPECT_TRUE(std::isinf(view->As<float>()[3]));
}

TEST_F(DecoderNames, ATextModelIsTakenOutOfAMultimodalOne) {
  const auto open = [&](const std::vector<TestTensor>& tensors) {
    const Json config = {{"model_type", "qwen3_vl"}, {"text_config", Json::object()}};
    WriteFile(directory_ / "config.json", config.dump());
    WriteFile(directory_ / "model.safetensors", BuildSafetensors(tensors));
    return *Checkpoint::Open(directory_ / "");
  };
  const Checkpoint whole =
      open({Make("lm_head.weight"), Make("model.language_model.embed_tokens.weight"),
            Make("model.language_model.norm.weight"), Make("model.visual.merger.norm.weight")});
  EXPECT_THAT(Names(whole), ElementsAre("lm_head.weight", "model.embed_tokens.weight",
                                        "model.norm.weight", "model.visual.merger.norm.weight"));
  EXPECT_THAT(whole.notes(), ElementsAre(HasSubstr("model.visual (1 tensors)")));
  // In both forms, names mean what they say.
  const Checkpoint both =
      open({Make("model.embed_tokens.weight"), Make("model.language_model.norm.weight")});
  EXPECT_THAT(Names(both),
              ElementsAre("model.embed_tokens.weight", "model.language_model.norm.weight"));
}

}  // namespace
}  // namespace marlin::decoder_names_test
