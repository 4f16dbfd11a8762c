// tests/golden/checkpoint_v1, _v2, _v3, _levels and _inputs were written by the first
// programs that had these versions of the format. They are never rewritten: every later program
// loads them to the same bits.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "../../source_directory.h"
#include "base/json.h"
#include "checkpoint/files/checksum.h"
#include "marlin/checkpoint.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::golden_test {
namespace {

const std::string kGolden = SourceDirectory() + "/tests/golden/checkpoint_v1";
const std::string kGolden2 = SourceDirectory() + "/tests/golden/checkpoint_v2";
const std::string kGoldenLevels = SourceDirectory() + "/tests/golden/checkpoint_levels";
const std::string kGoldenInputs = SourceDirectory() + "/tests/golden/checkpoint_inputs";

std::string HashOf(const void* data, int64_t bytes) {
  return ChecksumText(ChecksumOf({static_cast<const char*>(data), static_cast<size_t>(bytes)}));
}

// The dense values and everything that they were decoded from.
Json Describe(const Checkpoint& checkpoint, const QuantizedModule& module) {
  const Result<QuantizedWeights> weights = checkpoint.Weights(module.name);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (!weights.ok()) return {};
  const WeightsSpec& spec = weights->spec;
  std::vector<float> dense(static_cast<size_t>(spec.experts * spec.k * spec.n));
  const MutableTensorView out(dense.data(), DType::kF32, {spec.experts, spec.k, spec.n});
  const Status status = Dequantize(*weights, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return {{"format", FormatName(spec.format)},
          {"scale_type", ScaleTypeName(spec.scale_type)},
          {"experts", spec.experts},
          {"k", spec.k},
          {"n", spec.n},
          {"group_size", spec.group_size},
          {"zeros", spec.has_zeros},
          {"layer_class", LayerClassName(module.layer_class)},
          {"codes", HashOf(weights->codes.data(), weights->codes.ByteCount())},
          {"scales", HashOf(weights->scales.data(), weights->scales.ByteCount())},
          {"dense", HashOf(dense.data(), static_cast<int64_t>(dense.size() * sizeof(float)))}};
}

TEST(Golden, Version1LoadsToTheSameBits) {
  const Result<Checkpoint> opened = Checkpoint::Open(kGolden);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->quantized());
  EXPECT_EQ(opened->recipe_name(), "golden");
  const Status intact = opened->VerifyChecksums();
  EXPECT_TRUE(intact.ok()) << intact.message();
  Json modules = Json::object();
  for (const QuantizedModule& module : opened->modules()) {
    modules[module.name] = Describe(*opened, module);
  }
  Json plain = Json::object();
  for (const char* name : {"model.embed_tokens.weight", "model.norm.weight"}) {
    const Result<TensorView> view = opened->Tensor(name);
    ASSERT_TRUE(view.ok()) << view.status().message();
    plain[name] = HashOf(view->data(), view->ByteCount());
  }
  const Json actual = {{"modules", modules}, {"plain", plain}};
  const std::string expected = testing::ReadFile(kGolden + ".json");
  EXPECT_EQ(actual.dump(1) + "\n", expected);
}

/// Additions of version 2: u8, zeros of s8, zeros of other types, global scales that divide.
std::vector<testing::TestModule> Version2Modules() {
  WeightsSpec spec;
  spec.k = 40;
  spec.n = 6;
  spec.group_size = 16;
  spec.format = Format::kU8;
  spec.has_zeros = true;
  spec.zero_type = ScaleType::kF32;
  std::vector<testing::TestModule> modules = {
      testing::RandomModule("model.layers.0.self_attn.q_proj.weight", spec, 1, true)};
  spec.has_zeros = false;
  spec.zero_type = ScaleType::kF16;
  spec.has_biases = true;
  spec.scale_type = ScaleType::kBf16;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.k_proj.weight", spec, 2));
  spec.has_biases = false;
  spec.has_zeros = true;
  spec.format = Format::kS8;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.v_proj.weight", spec, 3));
  spec.zero_type = ScaleType::kBf16;
  spec.format = Format::kInt3;
  spec.experts = 2;
  modules.push_back(
      testing::RandomModule("model.layers.0.mlp.experts.*.up_proj.weight", spec, 4, true));
  spec.has_zeros = false;
  spec.zero_type = ScaleType::kF16;
  spec.format = Format::kFp4E2M1;
  spec.scale_type = ScaleType::kE4M3;
  spec.has_global_scale = true;
  spec.global_scale_divides = true;
  modules.push_back(
      testing::RandomModule("model.layers.0.mlp.experts.*.down_proj.weight", spec, 5));
  return modules;
}

/// Later additions: codes of 5 and 6 bits, two levels of scales.
std::vector<testing::TestModule> LevelsModules() {
  WeightsSpec spec;
  spec.k = 80;
  spec.n = 6;
  spec.group_size = 16;
  spec.format = Format::kInt6;
  spec.super_group_size = 64;
  std::vector<testing::TestModule> modules = {
      testing::RandomModule("model.layers.0.self_attn.q_proj.weight", spec, 1)};
  spec.format = Format::kU5;
  spec.has_biases = true;
  spec.scale_type = ScaleType::kBf16;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.k_proj.weight", spec, 2));
  spec.super_group_size = 0;
  spec.has_biases = false;
  spec.has_zeros = true;
  spec.format = Format::kU6;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.v_proj.weight", spec, 3));
  spec.has_zeros = false;
  spec.format = Format::kFp6E2M3;
  spec.scale_type = ScaleType::kE8M0;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.o_proj.weight", spec, 4));
  spec.experts = 2;
  spec.format = Format::kInt5;
  spec.scale_type = ScaleType::kF32;
  spec.super_group_size = 32;
  modules.push_back(testing::RandomModule("model.layers.0.mlp.experts.*.up_proj.weight", spec, 5));
  spec.k = 64;
  spec.format = Format::kU4;
  spec.scale_type = ScaleType::kF16;
  spec.has_biases = true;
  spec.super_group_size = 256;
  modules.push_back(
      testing::RandomModule("model.layers.0.mlp.experts.*.down_proj.weight", spec, 6));
  return modules;
}

/// Later additions: input scales and Hadamard blocks.
std::vector<testing::TestModule> InputsModules() {
  WeightsSpec spec;
  spec.k = 96;
  spec.n = 6;
  spec.group_size = 32;
  spec.format = Format::kS4;
  spec.has_input_scale = true;
  std::vector<testing::TestModule> modules = {
      testing::RandomModule("model.layers.0.self_attn.q_proj.weight", spec, 1)};
  spec.input_hadamard = 32;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.k_proj.weight", spec, 2));
  spec.has_input_scale = false;
  spec.input_hadamard = 4;
  spec.format = Format::kFp4E2M1;
  spec.scale_type = ScaleType::kE8M0;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.v_proj.weight", spec, 3));
  spec.input_hadamard = 0;
  spec.has_input_scale = true;
  spec.has_permutation = true;
  spec.format = Format::kU4;
  spec.scale_type = ScaleType::kF16;
  spec.has_zeros = true;
  modules.push_back(testing::RandomModule("model.layers.0.self_attn.o_proj.weight", spec, 4));
  spec.has_permutation = false;
  spec.experts = 2;
  spec.input_hadamard = 16;
  modules.push_back(testing::RandomModule("model.layers.0.mlp.experts.*.up_proj.weight", spec, 5));
  return modules;
}

/// With MARLIN_UPDATE_GOLDEN, writes the modules unless they are there; compares every part.
void ExpectSameParts(const std::string& golden, const std::vector<testing::TestModule>& modules) {
  if (std::getenv("MARLIN_UPDATE_GOLDEN") != nullptr && !std::filesystem::exists(golden)) {
    testing::WriteQuantizedDirectory(golden, modules,
                                     {testing::RandomBf16("model.norm.weight", {40}, 6)});
    const testing::TemporaryDirectory directory;
    ASSERT_TRUE(DequantizeCheckpoint(golden, directory / "plain", DType::kF32, false).ok());
    std::filesystem::copy_file(directory / "plain/model.safetensors",
                               golden + "_dense.safetensors");
  }
  const Result<Checkpoint> opened = Checkpoint::Open(golden);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ASSERT_EQ(opened->modules().size(), modules.size());
  for (const testing::TestModule& module : modules) {
    SCOPED_TRACE(module.record.module.name);
    const Result<QuantizedWeights> weights = opened->Weights(module.record.module.name);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(weights->spec, module.weights.spec);
    for (const auto part :
         {&QuantizedWeights::codes, &QuantizedWeights::scales, &QuantizedWeights::zeros,
          &QuantizedWeights::biases, &QuantizedWeights::global_scale,
          &QuantizedWeights::super_scales, &QuantizedWeights::super_biases,
          &QuantizedWeights::permutation, &QuantizedWeights::input_scale}) {
      const TensorView& view = (*weights).*part;
      const TensorView& expected = module.weights.*part;
      ASSERT_EQ(view.empty(), expected.empty());
      if (view.empty()) continue;
      EXPECT_EQ(std::memcmp(view.data(), expected.data(), static_cast<size_t>(view.ByteCount())),
                0);
    }
  }
}

TEST(Golden, Version2LoadsToTheSameBits) { ExpectSameParts(kGolden2, Version2Modules()); }
TEST(Golden, LevelsLoadToTheSameBits) { ExpectSameParts(kGoldenLevels, LevelsModules()); }
TEST(Golden, InputsLoadToTheSameBits) { ExpectSameParts(kGoldenInputs, InputsModules()); }

void ExpectSameBits(const std::string& golden) {
  const testing::TemporaryDirectory directory;
  const Status status =
      DequantizeCheckpoint(golden, directory / "plain", DType::kF32, /*overwrite=*/false);
  ASSERT_TRUE(status.ok()) << status.message();
  const Result<Checkpoint> plain = Checkpoint::Open(directory / "plain");
  const Result<Checkpoint> expected = Checkpoint::Open(golden + "_dense.safetensors");
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_EQ(plain->tensors().size(), expected->tensors().size());
  for (const TensorInfo& tensor : expected->tensors()) {
    const TensorInfo* found = plain->Find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->dtype, tensor.dtype);
    EXPECT_EQ(found->shape, tensor.shape);
    EXPECT_EQ(std::memcmp(plain->Tensor(tensor.name)->data(), expected->Tensor(tensor.name)->data(),
                          static_cast<size_t>(tensor.bytes)),
              0)
        << tensor.name;
  }
}

TEST(Golden, Version1DequantizesToTheSameBits) { ExpectSameBits(kGolden); }
TEST(Golden, Version2DequantizesToTheSameBits) { ExpectSameBits(kGolden2); }
TEST(Golden, Version3DequantizesToTheSameBits) {
  ExpectSameBits(SourceDirectory() + "/tests/golden/checkpoint_v3");
}
TEST(Golden, LevelsDequantizeToTheSameBits) { ExpectSameBits(kGoldenLevels); }
TEST(Golden, InputsDequantizeToTheSameBits) { ExpectSameBits(kGoldenInputs); }
TEST(Golden, PermutedWeightsDequantizeToTheSameBits) {
  ExpectSameBits(SourceDirectory() + "/tests/golden/checkpoint_permuted");
}

}  // namespace
}  // namespace marlin::golden_test
