#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "../../source_directory.h"
#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::quantize_checkpoint_test {
namespace {

using testing::Contains;
using testing::TemporaryDirectory;

const std::string kGlm = SourceDirectory() + "/tests/data/tiny-glm4-moe";
const std::string kQwen = SourceDirectory() + "/examples/tiny-qwen3-moe";

QuantizeCheckpointOptions WithRecipe(const std::string& name) {
  QuantizeCheckpointOptions options;
  const Result<MixedPrecisionConfig> recipe = MixedPrecisionConfig::FromNameOrFile(name);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  if (recipe.ok()) options.recipe = *recipe;
  return options;
}

std::string Bytes(const Checkpoint& checkpoint, const std::string& name) {
  const Result<TensorView> view = checkpoint.Tensor(name);
  if (!view.ok()) return {};
  return {static_cast<const char*>(view->data()), static_cast<size_t>(view->ByteCount())};
}

// Expects equal code tensors in both; returns how many there are.
size_t ExpectSameTensors(const std::string& a_path, const std::string& b_path,
                         const std::string& suffix) {
  const Result<Checkpoint> a = Checkpoint::Open(a_path);
  const Result<Checkpoint> b = Checkpoint::Open(b_path);
  EXPECT_TRUE(a.ok()) << a.status().message();
  EXPECT_TRUE(b.ok()) << b.status().message();
  if (!a.ok() || !b.ok()) return 0;
  size_t count = 0;
  EXPECT_EQ(a->tensors().size(), b->tensors().size());
  for (const TensorInfo& tensor : a->tensors()) {
    if (!tensor.name.ends_with(suffix)) continue;
    ++count;
    EXPECT_TRUE(Bytes(*a, tensor.name) == Bytes(*b, tensor.name)) << tensor.name;
  }
  return count;
}

class RoundTrip : public ::testing::TestWithParam<const char*> {};

TEST_P(RoundTrip, QuantizingTheDequantizedGivesTheSameCodes) {
  TemporaryDirectory directory;
  const QuantizeCheckpointOptions options = WithRecipe(GetParam());
  const auto first = QuantizeCheckpoint(kGlm, directory / "first", options);
  ASSERT_TRUE(first.ok()) << first.status().message();
  const Status back =
      DequantizeCheckpoint(directory / "first", directory / "plain", DType::kF32, false);
  ASSERT_TRUE(back.ok()) << back.message();
  const auto second = QuantizeCheckpoint(directory / "plain", directory / "second", options);
  ASSERT_TRUE(second.ok()) << second.status().message();
  EXPECT_GT(ExpectSameTensors(directory / "first", directory / "second", ".qweight"), 10u);
  EXPECT_GT(ExpectSameTensors(directory / "first", directory / "second", ".scales"), 10u);
}
INSTANTIATE_TEST_SUITE_P(Recipes, RoundTrip,
                         ::testing::Values("default_moe", "aggressive_moe", "uniform:fp4_e2m1/g32",
                                           "uniform:fp4_e2m1/g32/e8m0", "uniform:fp4_e2m1/g16/e4m3",
                                           "uniform:nf4/g64/bf16", "uniform:s8/g128/fp32",
                                           "uniform:fp8_e4m3/g128", "uniform:int3/g32/sym"));

TEST(QuantizeCheckpoint, ReportsCoverageAndWritesAValidDirectory) {
  TemporaryDirectory directory;
  const auto report = QuantizeCheckpoint(kGlm, directory / "out", WithRecipe("default_moe"));
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->tensors, 88);
  EXPECT_EQ(report->parameters, 2314768);
  EXPECT_GT(report->coverage, 0.8);
  EXPECT_GT(report->skipped.size(), 0u);
  const Result<Checkpoint> opened = Checkpoint::Open(directory / "out");
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->quantized());
  EXPECT_EQ(opened->recipe_name(), "default_moe");
  EXPECT_TRUE(opened->VerifyChecksums().ok());
  int64_t bytes = 0;
  for (const TensorInfo& tensor : opened->tensors()) bytes += tensor.bytes;
  EXPECT_EQ(bytes, report->bytes);
  int64_t quantized = 0;
  for (const QuantizedModule& module : opened->modules()) {
    const Result<QuantizedWeights> weights = opened->Weights(module.name);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(weights->spec, module.spec);
    quantized += module.spec.experts * module.spec.k * module.spec.n;
  }
  EXPECT_EQ(quantized, report->quantized_parameters);
  EXPECT_EQ(directory.Entries(), std::vector<std::string>{"out"});
}

}  // namespace
}  // namespace marlin::quantize_checkpoint_test
