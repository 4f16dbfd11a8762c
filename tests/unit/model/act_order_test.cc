// Models whose weights have permutations along k, some of them shared by the matrices of one input
// and some not: the logits and tokens of the same weights in fp32, from every kind of directory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/module_files.h"
#include "../checkpoint/test_files.h"
#include "checkpoint/files/io.h"
#include "marlin/checkpoint.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/prepared.h"
#include "marlin/quantize.h"
#include "model/prepared_file.h"

namespace marlin::act_order_test {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryDirectory;
using testing::TestModule;
using testing::TestTensor;

const std::string kQwen = SourceDirectory() + "/examples/tiny-qwen3-moe";
const std::string kGlm = SourceDirectory() + "/tests/data/tiny-glm4-moe";

/// Queries and keys share a permutation, values have another; so do gates and ups of one expert and
/// of another.
uint32_t SeedOf(const std::string& name) {
  if (name.find("v_proj") != std::string::npos) return 1;
  if (name.find("experts.1.up_proj") != std::string::npos) return 2;
  return 3;
}

/// Quantizes [n, k] in groups of 32 of every 32nd or so k, as act-order does.
TestModule Quantized(const std::string& name, const TensorView& plain) {
  const int64_t n = plain.dim(0);
  const int64_t k = plain.dim(1);
  std::vector<int32_t> order(static_cast<size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(SeedOf(name)));
  const int64_t bytes = DTypeBytes(plain.dtype());
  std::vector<uint8_t> sorted(static_cast<size_t>(n * k * bytes));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      std::memcpy(sorted.data() + (row * k + i) * bytes,
                  plain.As<uint8_t>() + (row * k + order[static_cast<size_t>(i)]) * bytes,
                  static_cast<size_t>(bytes));
    }
  }
  const auto quantized =
      Quantize(TensorView(sorted.data(), plain.dtype(), {n, k}).Transposed(),
               {.format = Format::kS8, .group_size = 32, .scale_type = ScaleType::kF16});
  EXPECT_TRUE(quantized.ok()) << quantized.status().message();
  WeightsSpec spec = quantized->spec;
  spec.has_permutation = true;
  auto buffer = AllocateWeights(spec);
  EXPECT_TRUE(buffer.ok());
  std::memcpy(buffer->codes, quantized->codes.data(),
              static_cast<size_t>(quantized->codes.ByteCount()));
  std::memcpy(buffer->scales, quantized->scales.data(),
              static_cast<size_t>(quantized->scales.ByteCount()));
  std::copy(order.begin(), order.end(), buffer->permutation);
  TestModule module;
  module.record.module = {name, spec, ClassifyTensor(name)};
  module.weights = buffer->weights;
  return module;
}

class ActOrderModel : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    // The error model of fp32 weights: AMX would round them to bf16.
    setenv("MARLIN_CPU", "scalar", 1);
    device_.emplace(*Device::Open("cpu", {.threads = 2}));
    unsetenv("MARLIN_CPU");
    const Checkpoint source = *Checkpoint::Open(GetParam());
    std::vector<TestModule> modules;
    std::vector<TestTensor> plain;
    for (const TensorInfo& tensor : source.tensors()) {
      const TensorView view = *source.Tensor(tensor.name);
      if (tensor.name.ends_with("_proj.weight") && view.dim(1) % 32 == 0) {
        modules.push_back(Quantized(tensor.name, view));
        continue;
      }
      plain.push_back({tensor.name, tensor.dtype, tensor.shape,
                       std::string(view.As<char>(), static_cast<size_t>(tensor.bytes))});
    }
    ASSERT_GT(modules.size(), 10U);
    testing::WriteQuantizedDirectory(own(), modules, plain, Json::parse(source.config_json()));
    for (const char* const name : {"tokenizer.json", "tokenizer_config.json"}) {
      if (fs::exists(GetParam() + "/" + name))
        fs::copy(GetParam() + "/" + name, own() + "/" + name);
    }
    ASSERT_TRUE(DequantizeCheckpoint(own(), dense(), DType::kF32, false).ok());
  }

  std::vector<float> Logits(const Model& model) const {
    std::vector<float> logits(kTokens.size() * static_cast<size_t>(model.info().vocab_size));
    Sequence sequence = *model.NewSequence();
    const SequenceInput input{&sequence, kTokens, true};
    const Shape shape{static_cast<int64_t>(kTokens.size()), model.info().vocab_size};
    const Status status =
        model.Forward({&input, 1}, MutableTensorView(logits.data(), DType::kF32, shape));
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }

  /// The model with fp32 activations.
  Model Open(const std::string& path, const std::string& prepared = "") const {
    auto model =
        Model::Open(path, *device_, {.allow_bf16_activations = false, .prepared = prepared});
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }

  std::vector<int32_t> Tokens(const Model& model) const {
    GenerateOptions options;
    options.max_tokens = 24;
    options.ignore_eos = true;
    const auto generated = Generate(model, kTokens, options);
    EXPECT_TRUE(generated.ok()) << generated.status().message();
    return generated->token_ids;
  }

  std::string own() const { return directory_ / "own"; }
  std::string dense() const { return directory_ / "dense"; }

  const std::vector<int32_t> kTokens = {5, 17, 4, 99, 200, 31, 8};
  TemporaryDirectory directory_;
  std::optional<Device> device_;
};

TEST_P(ActOrderModel, GivesTheTokensOfItsFp32Weights) {
  const Model expected = Open(dense());
  const std::vector<float> logits = Logits(expected);
  const std::vector<int32_t> tokens = Tokens(expected);
  ASSERT_EQ(tokens.size(), 24U);
  float largest = 0;
  for (const float value : logits) largest = std::max(largest, std::abs(value));

  const std::string gptq = directory_ / "gptq";
  ConvertCheckpointOptions options;
  options.target = "gptq";
  const auto converted = ConvertCheckpoint(own(), gptq, options);
  ASSERT_TRUE(converted.ok()) << converted.status().message();
  for (const std::string& path : {own(), gptq}) {
    const Model model = Open(path);
    EXPECT_LT(model.info().bytes, expected.info().bytes);
    const std::vector<float> got = Logits(model);
    ASSERT_EQ(got.size(), logits.size());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], logits[i], 1e-4F * largest) << i;
    EXPECT_EQ(Tokens(model), tokens) << path;
  }
}

TEST_P(ActOrderModel, APreparedFileGivesTheSameBits) {
  const std::string file = directory_ / "m.prepared";
  const auto report = PrepareModel(own(), *device_, file, {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_TRUE(VerifyPreparedModel(file).ok());
  const Model loaded = Open(own());
  const Model mapped = Open(own(), file);
  EXPECT_EQ(Logits(loaded), Logits(mapped));
  EXPECT_EQ(loaded.info().bytes, mapped.info().bytes);
}

TEST_P(ActOrderModel, APreparedFileWithAWrongPermutationIsRefused) {
  const std::string file = directory_ / "m.prepared";
  const auto report = PrepareModel(own(), *device_, file, {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  std::string image = testing::ReadFile(file);
  SystemIo io;
  const auto opened = PreparedFile::Open(io, file);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const auto& parts = (*opened)->parts();
  const auto part = std::find_if(parts.begin(), parts.end(), [](const PreparedPart& candidate) {
    return candidate.spec.has_permutation;
  });
  ASSERT_NE(part, parts.end());
  const int32_t wrong = INT32_MAX;
  std::memcpy(image.data() + part->offset + part->bytes - 4 * part->spec.k, &wrong, sizeof(wrong));
  testing::WriteFile(file, image);
  const Status status = Model::Open(own(), *device_, {.prepared = file}).status();
  EXPECT_EQ(status.code(), Code::kMalformedFile);
  EXPECT_EQ(status.message(), file + ": permutation: 2147483647 at [0, 0] is no row of " +
                                  std::to_string(part->spec.k));
  EXPECT_EQ(VerifyPreparedModel(file).code(), Code::kMalformedFile);
}

INSTANTIATE_TEST_SUITE_P(Models, ActOrderModel, ::testing::Values(kQwen, kGlm),
                         [](const auto& parameter) {
                           return parameter.param == kQwen ? "Qwen3Moe" : "Glm4Moe";
                         });

}  // namespace
}  // namespace marlin::act_order_test
