// Exporting codes of 5 and 6 bits: each output is read back and keeps formats and values.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/json.h"
#include "marlin/checkpoint.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::wide_export_test {
namespace {

using testing::Contains;
using testing::RandomModule;
using testing::TestModule;

const char kWeight[] = "model.layers.0.self_attn.q_proj.weight";
const char kUp[] = "model.layers.0.mlp.up_proj.weight";
const char kExperts[] = "model.layers.0.mlp.experts.*.up_proj.weight";

WeightsSpec SpecOf(Format format, bool zeros) {
  return {.format = format, .k = 64, .n = 64, .group_size = 32, .has_zeros = zeros};
}

/// The formats of 5 and 6 bits, with zeros and without.
std::vector<WeightsSpec> IntegerSpecs() {
  return {SpecOf(Format::kInt5, false), SpecOf(Format::kInt5, true), SpecOf(Format::kU5, true),
          SpecOf(Format::kInt6, false), SpecOf(Format::kInt6, true), SpecOf(Format::kU6, true)};
}

/// That of a file of the same bits, with zeros or biases and without.
Format FormatOf(const WeightsSpec& spec, bool additive) {
  if (GetFormatInfo(spec.format).bits == 5) return additive ? Format::kU5 : Format::kInt5;
  return additive ? Format::kU6 : Format::kInt6;
}

class WideExport : public ::testing::Test {
 protected:
  Status Convert(const std::vector<TestModule>& modules, const std::string& target) {
    std::filesystem::remove_all(directory_ / "source");
    std::filesystem::remove_all(out());
    testing::WriteQuantizedDirectory(directory_ / "source", modules,
                                     {testing::RandomBf16("model.norm.weight", {64}, 3)},
                                     {{"model_type", "llama"}});
    ConvertCheckpointOptions options;
    options.target = target;
    return ConvertCheckpoint(directory_ / "source", out(), options).status();
  }

  void ExpectSame(const TestModule& module, Format format) {
    const auto read = Checkpoint::Open(out());
    ASSERT_TRUE(read.ok()) << read.status().message();
    ASSERT_EQ(read->modules().size(), 1U);
    const auto weights = read->Weights(module.record.module.name);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(FormatName(weights->spec.format), FormatName(format));
    EXPECT_EQ(testing::DenseOf(*weights), testing::DenseOf(module.weights));
  }

  Json Config() const {
    return Json::parse(testing::ReadFile(out() + "/config.json"))["quantization_config"];
  }
  std::string out() const { return directory_ / "out"; }

  testing::TemporaryDirectory directory_;
};

TEST_F(WideExport, GptqPacksThemInPlanes) {
  uint32_t seed = 1;
  for (const WeightsSpec& spec : IntegerSpecs()) {
    SCOPED_TRACE(FormatName(spec.format));
    const TestModule module = RandomModule(kWeight, spec, seed++);
    const Status status = Convert({module}, "gptq");
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSame(module, FormatOf(spec, spec.has_zeros));
    EXPECT_EQ(Config()["checkpoint_format"], "gptq_p");
    EXPECT_EQ(Config()["bits"], GetFormatInfo(spec.format).bits);
    EXPECT_EQ(Config()["sym"], !spec.has_zeros);
  }
}

TEST_F(WideExport, GptqHasOnePackingPerFile) {
  const TestModule five = RandomModule(kWeight, SpecOf(Format::kU5, true), 1);
  const Status four = Convert({five, RandomModule(kUp, SpecOf(Format::kU4, true), 2)}, "gptq");
  EXPECT_TRUE(four.ok()) << four.message();
  const Status three = Convert({five, RandomModule(kUp, SpecOf(Format::kInt3, true), 2)}, "gptq");
  EXPECT_EQ(three.code(), Code::kUnsupported);
  EXPECT_TRUE(Contains(three.message(),
                       "gptq cannot hold int3 of model.layers.0.mlp.up_proj beside u5 of "
                       "model.layers.0.self_attn.q_proj"))
      << three.message();
  EXPECT_FALSE(std::filesystem::exists(out()));
  const Status narrow = Convert({RandomModule(
                                    kWeight,
                                    [] {
                                      WeightsSpec spec = SpecOf(Format::kInt6, false);
                                      spec.n = 48;
                                      return spec;
                                    }(),
                                    3)},
                                "gptq");
  EXPECT_TRUE(Contains(narrow.message(), "[64, 48], which are no multiples of 32"))
      << narrow.message();
}

TEST_F(WideExport, CompressedTensorsPacksThemDensely) {
  uint32_t seed = 10;
  for (WeightsSpec spec : IntegerSpecs()) {
    SCOPED_TRACE(FormatName(spec.format));
    spec.n = 37;  // Zeros are packed along n with a partial word.
    spec.scale_type = ScaleType::kBf16;
    const TestModule module = RandomModule(kWeight, spec, seed++);
    const Status status = Convert({module}, "compressed-tensors");
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSame(module, FormatOf(spec, spec.has_zeros));
    EXPECT_EQ(Config()["format"], "pack-quantized");
    EXPECT_EQ(Config()["version"], "0.18.0");
    EXPECT_EQ(Config()["config_groups"]["group_0"]["weights"]["num_bits"],
              GetFormatInfo(spec.format).bits);
  }
}

TEST_F(WideExport, CompressedTensorsHoldsMxfp6) {
  WeightsSpec spec = SpecOf(Format::kFp6E2M3, false);
  spec.scale_type = ScaleType::kE8M0;
  const TestModule module = RandomModule(kWeight, spec, 20);
  const Status status = Convert({module}, "compressed-tensors");
  ASSERT_TRUE(status.ok()) << status.message();
  ExpectSame(module, Format::kFp6E2M3);
  EXPECT_EQ(Config()["format"], "mxfp6-pack-quantized");
  const Json weights = Config()["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["num_bits"], 6);
  EXPECT_EQ(weights["type"], "float");
  EXPECT_EQ(weights["group_size"], 32);
  EXPECT_EQ(weights["scale_dtype"], "torch.uint8");
  const Checkpoint read = *Checkpoint::Open(out());
  EXPECT_EQ(read.Find("model.layers.0.self_attn.q_proj.weight_packed")->shape, (Shape{64, 48}));
  spec.scale_type = ScaleType::kF16;
  const Status wide = Convert({RandomModule(kWeight, spec, 20)}, "compressed-tensors");
  EXPECT_EQ(wide.code(), Code::kUnsupported);
  EXPECT_TRUE(Contains(wide.message(), "cannot hold fp6_e2m3 in groups of 32 with fp16 scales"))
      << wide.message();
  for (const char* const target : {"gptq", "mlx", "awq"}) {
    const Status status_of = Convert({module}, target);
    EXPECT_EQ(status_of.code(), Code::kUnsupported) << target;
    EXPECT_TRUE(Contains(status_of.message(), std::string(target) + " cannot hold fp6_e2m3"))
        << status_of.message();
  }
}

TEST_F(WideExport, MlxHoldsThemWithBiases) {
  uint32_t seed = 30;
  std::vector<WeightsSpec> specs = IntegerSpecs();
  specs.push_back(SpecOf(Format::kU6, false));
  specs.back().has_biases = true;
  specs.back().scale_type = ScaleType::kBf16;
  for (WeightsSpec spec : specs) {
    SCOPED_TRACE(FormatName(spec.format));
    spec.n = 37;
    spec.experts = 2;
    const TestModule module = RandomModule(kExperts, spec, seed++);
    const Status status = Convert({module}, "mlx");
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSame(module, FormatOf(spec, true));
    EXPECT_EQ(Config()["bits"], GetFormatInfo(spec.format).bits);
    EXPECT_EQ(Config()["mode"], "affine");
  }
}

}  // namespace
}  // namespace marlin::wide_export_test
