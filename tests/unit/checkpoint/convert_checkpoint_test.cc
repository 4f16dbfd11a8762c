// Converting to the formats of other programs: each file is decoded here by the format's own rules,
// and every weight compared with the source's in fp32.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "base/json.h"
#include "marlin/checkpoint.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::convert_checkpoint_test {
namespace {

using testing::Contains;
using testing::RandomModule;
using testing::TestModule;

const char kName[] = "model.layers.0.self_attn.q_proj";
const std::string kWeight = std::string(kName) + ".weight";
const char kExperts[] = "model.layers.0.mlp.experts.*.up_proj.weight";

/// The tensors of a directory's only shard.
class Written {
 public:
  explicit Written(const std::string& directory)
      : file_(*Checkpoint::Open(directory + "/model.safetensors")),
        config_(Json::parse(testing::ReadFile(directory + "/config.json"))) {}

  bool Has(const std::string& name) const { return file_.Find(name) != nullptr; }
  const Json& config() const { return config_; }
  Shape ShapeOf(const std::string& name) const { return file_.Find(name)->shape; }
  DType TypeOf(const std::string& name) const { return file_.Find(name)->dtype; }
  /// Element `index` of a tensor of integers.
  template <typename T>
  T Number(const std::string& name, int64_t index) const {
    T value;
    const std::byte* data = file_.Tensor(name)->As<std::byte>();
    std::memcpy(&value, data + index * int64_t{sizeof(T)}, sizeof(T));
    return value;
  }
  /// Element `index` of a tensor of floats.
  double Float(const std::string& name, int64_t index) const {
    switch (TypeOf(name)) {
      case DType::kF16:
        return HalfToFloat(Number<uint16_t>(name, index));
      case DType::kBf16:
        return Bf16ToFloat(Number<uint16_t>(name, index));
      case DType::kU8:
        return std::ldexp(1.0, Number<uint8_t>(name, index) - 127);
      case DType::kF8E4M3:
        return Fp8E4M3ToFloat(Number<uint8_t>(name, index));
      default:
        return Number<float>(name, index);
    }
  }
  /// Code `index` of row `row` of packed words; codes do not straddle words.
  int Code(const std::string& name, int64_t row, int64_t row_words, int64_t index, int bits) const {
    const int64_t per_word = 32 / bits;
    const auto word = Number<uint32_t>(name, row * row_words + index / per_word);
    return static_cast<int>(word >> (index % per_word * bits) & ((1u << bits) - 1));
  }

 private:
  Checkpoint file_;
  Json config_;
};

/// The weight at (k, n) of a matrix.
using WeightAt = std::function<double(int64_t k, int64_t n)>;

void ExpectWeights(const std::vector<float>& dense, int64_t first, int64_t k_count, int64_t n_count,
                   const WeightAt& weight) {
  for (int64_t k = 0; k < k_count; ++k) {
    for (int64_t n = 0; n < n_count; ++n) {
      const float expected = dense[static_cast<size_t>(first + k * n_count + n)];
      ASSERT_EQ(static_cast<float>(weight(k, n)), expected) << k << " " << n;
    }
  }
}

WeightsSpec SpecOf(Format format, int64_t group_size = 32) {
  WeightsSpec spec;
  spec.format = format;
  spec.k = 64;
  spec.n = 40;
  spec.group_size = group_size;
  spec.has_zeros = GetFormatInfo(format).zero_point == ZeroPoint::kRequired;
  return spec;
}

class ConvertTest : public ::testing::Test {
 protected:
  Status Convert(const std::vector<TestModule>& modules, const std::string& target,
                 const Json& config = {{"model_type", "llama"}}) {
    testing::WriteQuantizedDirectory(
        directory_ / "source", modules,
        {testing::RandomBf16("lm_head.weight", {16, 64}, 1),
         testing::RandomBf16("model.embed_tokens.weight", {16, 64}, 2),
         testing::RandomBf16("model.layers.0.input_layernorm.weight", {64}, 3)},
        config);
    ConvertCheckpointOptions options;
    options.target = target;
    options.overwrite = true;
    return ConvertCheckpoint(directory_ / "source", out(), options).status();
  }
  std::string out() const { return directory_ / "out"; }
  void ExpectLoss(const TestModule& module, const std::string& target, const std::string& part) {
    const Status status = Convert({module}, target);
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_TRUE(Contains(status.message(), part)) << status.message();
    EXPECT_TRUE(Contains(status.message(), module.record.module.name)) << status.message();
    EXPECT_FALSE(std::filesystem::exists(out()));
  }
  testing::TemporaryDirectory directory_;
};

TEST_F(ConvertTest, GptqKeepsEveryWeight) {
  std::vector<WeightsSpec> specs = {SpecOf(Format::kU4), SpecOf(Format::kS4), SpecOf(Format::kInt2),
                                    SpecOf(Format::kU8), SpecOf(Format::kS8, 64)};
  specs.push_back(SpecOf(Format::kS8));
  specs.back().has_zeros = true;
  specs.push_back(SpecOf(Format::kInt2));
  specs.back().has_zeros = true;
  specs.back().zero_type = ScaleType::kF32;
  specs.back().n = 48;
  for (size_t i = 0; i < specs.size(); ++i) {
    WeightsSpec& spec = specs[i];
    if (GetFormatInfo(spec.format).bits == 2) spec.n = 48;
    SCOPED_TRACE(FormatName(spec.format));
    const TestModule module = RandomModule(kWeight, spec, static_cast<uint32_t>(i + 1));
    const Status status = Convert({module}, "gptq");
    ASSERT_TRUE(status.ok()) << status.message();
    const Written written(out());
    const std::string name = kName;
    const int bits = GetFormatInfo(spec.format).bits;
    EXPECT_EQ(written.TypeOf(name + ".scales"), DType::kF16);
    const auto weight = [&](int64_t k, int64_t n) {
      const auto group = written.Number<int32_t>(name + ".g_idx", k);
      const auto word = written.Number<uint32_t>(name + ".qweight", k * bits / 32 * spec.n + n);
      const auto code = static_cast<int>(word >> (k * bits % 32) & ((1u << bits) - 1));
      const int zero = written.Code(name + ".qzeros", group, spec.n * bits / 32, n, bits);
      return written.Float(name + ".scales", group * spec.n + n) * (code - zero);
    };
    ExpectWeights(testing::DenseOf(module.weights), 0, spec.k, spec.n, weight);
    const Json& config = written.config()["quantization_config"];
    EXPECT_EQ(config["quant_method"], "gptq");
    EXPECT_EQ(config["checkpoint_format"], "gptq_v2");
    EXPECT_EQ(config["bits"], bits);
    EXPECT_EQ(config["group_size"], spec.group_size == spec.k ? -1 : 32);
    EXPECT_EQ(config["sym"], !spec.has_zeros);
    EXPECT_EQ(config["dynamic"], Json({{"-:^lm_head$", Json::object()}}));
    EXPECT_EQ(written.config()["model_type"], "llama");
    EXPECT_TRUE(written.Has("model.layers.0.input_layernorm.weight"));
  }
}

/// Code `at` of 3 bits in a string of bits, whose words begin at `begin` and are `step` apart.
int ThreeBits(const Written& written, const std::string& tensor, int64_t at, int64_t begin,
              int64_t step) {
  int code = 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t bit = 3 * at + i;
    const auto word = written.Number<uint32_t>(tensor, begin + bit / 32 * step);
    code |= static_cast<int>(word >> (bit % 32) & 1u) << i;
  }
  return code;
}

TEST_F(ConvertTest, GptqOf3BitsStraddlesWords) {
  WeightsSpec spec = SpecOf(Format::kInt3);
  spec.n = 64;
  spec.has_zeros = true;
  const TestModule module = RandomModule(kWeight, spec, 7);
  ASSERT_TRUE(Convert({module}, "gptq").ok());
  const Written written(out());
  const std::string name = kName;
  ExpectWeights(testing::DenseOf(module.weights), 0, spec.k, spec.n, [&](int64_t k, int64_t n) {
    const int code = ThreeBits(written, name + ".qweight", k, n, spec.n);
    const int zero = ThreeBits(written, name + ".qzeros", n, k / 32 * (spec.n * 3 / 32), 1);
    return written.Float(name + ".scales", k / 32 * spec.n + n) * (code - zero);
  });
}

TEST_F(ConvertTest, GptqNamesModulesThatDifferAndSplitsExperts) {
  WeightsSpec spec = SpecOf(Format::kU8);
  spec.experts = 3;
  const TestModule experts = RandomModule(kExperts, spec, 2);
  const TestModule plain = RandomModule(kWeight, SpecOf(Format::kU4), 3);
  ASSERT_TRUE(Convert({experts, plain}, "gptq").ok());
  const Written written(out());
  const Json& config = written.config()["quantization_config"];
  EXPECT_EQ(config["bits"], 8);
  EXPECT_EQ(config["dynamic"]["+:^model\\.layers\\.0\\.self_attn\\.q_proj$"]["bits"], 4);
  const std::vector<float> dense = testing::DenseOf(experts.weights);
  for (int e = 0; e < 3; ++e) {
    const std::string name = "model.layers.0.mlp.experts." + std::to_string(e) + ".up_proj";
    ExpectWeights(dense, e * spec.k * spec.n, spec.k, spec.n, [&](int64_t k, int64_t n) {
      const auto word = written.Number<uint32_t>(name + ".qweight", k / 4 * spec.n + n);
      const int code = static_cast<int>(word >> (k % 4 * 8) & 255u);
      const int zero = written.Code(name + ".qzeros", k / 32, spec.n / 4, n, 8);
      return written.Float(name + ".scales", k / 32 * spec.n + n) * (code - zero);
    });
  }
}

TEST_F(ConvertTest, AwqKeepsEveryWeight) {
  constexpr std::array<int, 8> kNibbleOf = {0, 4, 1, 5, 2, 6, 3, 7};  // The nibble of column n % 8.
  for (const ScaleType scales : {ScaleType::kF16, ScaleType::kBf16}) {
    for (const Format format : {Format::kU4, Format::kS4}) {
      WeightsSpec spec = SpecOf(format);
      spec.scale_type = scales;
      const TestModule module = RandomModule(kWeight, spec, 11);
      const Status status = Convert({module}, "awq");
      ASSERT_TRUE(status.ok()) << status.message();
      const Written written(out());
      const std::string name = kName;
      EXPECT_EQ(written.TypeOf(name + ".scales"), ScaleDType(scales));
      const auto nibble = [&](const std::string& tensor, int64_t row, int64_t n) {
        const auto word = written.Number<uint32_t>(name + tensor, row * (spec.n / 8) + n / 8);
        return static_cast<int>(word >> (4 * kNibbleOf[static_cast<size_t>(n % 8)]) & 15u);
      };
      ExpectWeights(testing::DenseOf(module.weights), 0, spec.k, spec.n, [&](int64_t k, int64_t n) {
        return written.Float(name + ".scales", k / 32 * spec.n + n) *
               (nibble(".qweight", k, n) - nibble(".qzeros", k / 32, n));
      });
      const Json& config = written.config()["quantization_config"];
      EXPECT_EQ(config["quant_method"], "awq");
      EXPECT_EQ(config["group_size"], 32);
      EXPECT_EQ(config["modules_to_not_convert"], Json({"lm_head"}));
    }
  }
}

TEST_F(ConvertTest, CompressedTensorsKeepsPackedWeights) {
  std::vector<WeightsSpec> specs = {SpecOf(Format::kU4),   SpecOf(Format::kS4),
                                    SpecOf(Format::kInt2), SpecOf(Format::kU8),
                                    SpecOf(Format::kS8),   SpecOf(Format::kS4, 64)};
  specs[0].n = 37;  // Zeros are packed along n with a partial word.
  specs[1].scale_type = ScaleType::kBf16;
  specs[3].zero_type = ScaleType::kBf16;
  specs[4].has_zeros = true;
  specs[4].scale_type = ScaleType::kF32;
  for (size_t i = 0; i < specs.size(); ++i) {
    const WeightsSpec& spec = specs[i];
    SCOPED_TRACE(FormatName(spec.format));
    const TestModule module = RandomModule(kWeight, spec, static_cast<uint32_t>(20 + i));
    const Status status = Convert({module}, "compressed-tensors");
    ASSERT_TRUE(status.ok()) << status.message();
    const Written written(out());
    const std::string name = kName;
    const int bits = GetFormatInfo(spec.format).bits;
    const int64_t groups = GroupCount(spec);
    EXPECT_EQ(written.Number<int64_t>(name + ".weight_shape", 0), spec.n);
    EXPECT_EQ(written.Number<int64_t>(name + ".weight_shape", 1), spec.k);
    EXPECT_EQ(written.TypeOf(name + ".weight_scale"), ScaleDType(spec.scale_type));
    EXPECT_EQ(written.Has(name + ".weight_zero_point"), spec.has_zeros);
    ExpectWeights(testing::DenseOf(module.weights), 0, spec.k, spec.n, [&](int64_t k, int64_t n) {
      const int64_t group = k / spec.group_size;
      // Signed codes are stored with the offset 2^(bits - 1), which cancels out of code - zero.
      const int code = written.Code(name + ".weight_packed", n, spec.k * bits / 32, k, bits);
      int zero = 1 << (bits - 1);
      if (spec.has_zeros) {
        const auto word =
            written.Number<uint32_t>(name + ".weight_zero_point", n / (32 / bits) * groups + group);
        zero = static_cast<int>(word >> (n % (32 / bits) * bits) & ((1u << bits) - 1));
      }
      return written.Float(name + ".weight_scale", n * groups + group) * (code - zero);
    });
    const Json& config = written.config()["quantization_config"];
    EXPECT_EQ(config["format"], "pack-quantized");
    EXPECT_EQ(config["ignore"], Json({"lm_head"}));
    const Json& weights = config["config_groups"]["group_0"]["weights"];
    EXPECT_EQ(config["config_groups"]["group_0"]["targets"], Json({name}));
    EXPECT_EQ(weights["num_bits"], bits);
    EXPECT_EQ(weights["symmetric"], !spec.has_zeros);
    EXPECT_EQ(weights["strategy"], spec.group_size == spec.k ? "channel" : "group");
  }
}

/// transformers finds the scheme of experts by an expression, and lists of thousands of names are
/// refused by readers.
TEST_F(ConvertTest, CompressedTensorsNamesExpertsOfOneSchemeByAnExpression) {
  WeightsSpec spec = SpecOf(Format::kS4);
  spec.experts = 3;
  const TestModule up = RandomModule(kExperts, spec, 2);
  const std::string down_name = "model.layers.0.mlp.experts.*.down_proj.weight";
  const TestModule down = RandomModule(down_name, spec, 3);
  const TestModule plain = RandomModule(kWeight, SpecOf(Format::kS8), 4);
  const TestModule shared =
      RandomModule("model.layers.0.mlp.shared_experts.up_proj.weight", SpecOf(Format::kS8), 5);
  ASSERT_TRUE(Convert({up, down, plain, shared}, "compressed-tensors").ok());
  const auto groups = [this] {
    std::map<int, Json> targets;  // By bits.
    const Json config = Written(out()).config();
    for (const Json& group : config["quantization_config"]["config_groups"]) {
      targets[group["weights"]["num_bits"].get<int>()] = group["targets"];
    }
    return targets;
  };
  EXPECT_EQ(groups()[4], Json::array({"re:.*\\.experts\\.\\d+\\..*"}));
  EXPECT_EQ(groups()[8], Json::array({"model.layers.0.mlp.shared_experts.up_proj", kName}));
  const auto again = Checkpoint::Open(out());
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->modules().size(), 2U * 3U + 2U);
  EXPECT_EQ(testing::DenseOf(*again->Weights(kWeight)), testing::DenseOf(plain.weights));
  // Experts of several schemes keep their names.
  WeightsSpec other = SpecOf(Format::kS8);
  other.experts = 3;
  ASSERT_TRUE(Convert({up, RandomModule(down_name, other, 6)}, "compressed-tensors").ok());
  EXPECT_EQ(groups()[4].size(), 3U);
  EXPECT_EQ(groups()[8].front(), "model.layers.0.mlp.experts.0.down_proj");
}

TEST_F(ConvertTest, CompressedTensorsOf3BitsCrossWords) {
  // In the older packing, 10 codes a word, 40 k take as many words.
  for (const int64_t k : {64, 40}) {
    for (const bool zeros : {false, true}) {
      SCOPED_TRACE(k);
      WeightsSpec spec = SpecOf(Format::kInt3, k == 40 ? 40 : 32);
      spec.k = k;
      spec.n = 37;
      spec.has_zeros = zeros;
      const TestModule module = RandomModule(kWeight, spec, 25);
      const Status status = Convert({module}, "compressed-tensors");
      ASSERT_TRUE(status.ok()) << status.message();
      const Written written(out());
      const std::string name = kName;
      const int64_t groups = GroupCount(spec);
      EXPECT_EQ(written.ShapeOf(name + ".weight_packed"), (Shape{37, (k * 3 + 31) / 32}));
      ExpectWeights(testing::DenseOf(module.weights), 0, k, 37, [&](int64_t at, int64_t n) {
        const int64_t group = at / spec.group_size;
        const int code =
            ThreeBits(written, name + ".weight_packed", at, n * ((k * 3 + 31) / 32), 1);
        const int zero =
            zeros ? ThreeBits(written, name + ".weight_zero_point", n, group, groups) : 4;
        return written.Float(name + ".weight_scale", n * groups + group) * (code - zero);
      });
      EXPECT_EQ(written.config()["quantization_config"]["version"], "0.18.0");
      const auto again = Checkpoint::Open(out());
      ASSERT_TRUE(again.ok()) << again.status().message();
      EXPECT_EQ(testing::DenseOf(*again->Weights(kWeight)), testing::DenseOf(module.weights));
    }
  }
}

TEST_F(ConvertTest, CompressedTensorsKeepsFp8) {
  struct Case {
    int64_t group_size;
    ScaleType scale_type;
    const char* format;
    const char* strategy;
  };
  for (const Case& test : {Case{64, ScaleType::kBf16, "float-quantized", "channel"},
                           Case{32, ScaleType::kF32, "float-quantized", "group"},
                           Case{32, ScaleType::kE8M0, "mxfp8-quantized", "group"}}) {
    SCOPED_TRACE(test.format);
    WeightsSpec spec = SpecOf(Format::kFp8E4M3, test.group_size);
    spec.scale_type = test.scale_type;
    TestModule module = RandomModule(kWeight, spec, 26);
    auto* const words = static_cast<uint32_t*>(
        const_cast<void*>(static_cast<const void*>(module.weights.codes.data())));
    for (int64_t i = 0; i < 16 * 40; ++i) words[i] &= 0xf7f7f7f7u;  // No NaN.
    const Status status = Convert({module}, "compressed-tensors");
    ASSERT_TRUE(status.ok()) << status.message();
    const Written written(out());
    const std::string name = kName;
    EXPECT_EQ(written.TypeOf(name + ".weight"), DType::kF8E4M3);
    const int64_t groups = GroupCount(spec);
    ExpectWeights(testing::DenseOf(module.weights), 0, 64, 40, [&](int64_t k, int64_t n) {
      return written.Float(name + ".weight", n * 64 + k) *
             written.Float(name + ".weight_scale", n * groups + k / test.group_size);
    });
    const Json& config = written.config()["quantization_config"];
    EXPECT_EQ(config["format"], test.format);
    const Json& weights = config["config_groups"]["group_0"]["weights"];
    EXPECT_EQ(weights["type"], "float");
    EXPECT_EQ(weights["num_bits"], 8);
    EXPECT_EQ(weights["strategy"], test.strategy);
    const auto again = Checkpoint::Open(out());
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(testing::DenseOf(*again->Weights(kWeight)), testing::DenseOf(module.weights));
  }
}

TEST_F(ConvertTest, CompressedTensorsKeepsFp4) {
  WeightsSpec nvfp4 = SpecOf(Format::kFp4E2M1, 16);
  nvfp4.scale_type = ScaleType::kE4M3;
  nvfp4.has_global_scale = true;
  nvfp4.global_scale_divides = true;
  nvfp4.experts = 2;
  WeightsSpec mxfp4 = SpecOf(Format::kFp4E2M1);
  mxfp4.scale_type = ScaleType::kE8M0;
  const TestModule divided = RandomModule(kExperts, nvfp4, 31);
  const TestModule powers = RandomModule(kWeight, mxfp4, 32);
  const Status status = Convert({divided, powers}, "compressed-tensors");
  ASSERT_TRUE(status.ok()) << status.message();
  const Written written(out());
  const auto value = [&](const std::string& name, int64_t k, int64_t n) {
    const auto byte = written.Number<uint8_t>(name + ".weight_packed", n * 32 + k / 2);
    return double{FormatValues(Format::kFp4E2M1)[byte >> (k % 2 * 4) & 15]};
  };
  for (int e = 0; e < 2; ++e) {
    const std::string name = "model.layers.0.mlp.experts." + std::to_string(e) + ".up_proj";
    const auto global = written.Number<float>(name + ".weight_global_scale", 0);
    ExpectWeights(testing::DenseOf(divided.weights), e * 64 * 40, 64, 40,
                  [&](int64_t k, int64_t n) {
                    const auto scale =
                        static_cast<float>(written.Float(name + ".weight_scale", n * 4 + k / 16));
                    return value(name, k, n) * double{scale / global};
                  });
  }
  ExpectWeights(testing::DenseOf(powers.weights), 0, 64, 40, [&](int64_t k, int64_t n) {
    return value(kName, k, n) * written.Float(std::string(kName) + ".weight_scale", n * 2 + k / 32);
  });
  EXPECT_EQ(written.config()["quantization_config"]["format"], "mixed-precision");
}

TEST_F(ConvertTest, CompressedTensorsTakesGlobalScalesWhoseInverseIsExact) {
  WeightsSpec spec = SpecOf(Format::kFp4E2M1, 16);
  spec.scale_type = ScaleType::kE4M3;
  spec.has_global_scale = true;
  TestModule module = RandomModule(kWeight, spec, 33);
  auto* const global = const_cast<float*>(module.weights.global_scale.As<float>());
  *global = 0.125f;
  ASSERT_TRUE(Convert({module}, "compressed-tensors").ok());
  EXPECT_EQ(Written(out()).Number<float>(std::string(kName) + ".weight_global_scale", 0), 8.0f);
  std::filesystem::remove_all(out());
  *global = 0.37f;
  ExpectLoss(module, "compressed-tensors", "cannot hold the global scale 0.37");
}

TEST_F(ConvertTest, MlxKeepsEveryWeight) {
  std::vector<WeightsSpec> specs = {SpecOf(Format::kU4),   SpecOf(Format::kS4),
                                    SpecOf(Format::kU8),   SpecOf(Format::kS8),
                                    SpecOf(Format::kInt2), SpecOf(Format::kU4, 64)};
  specs[2].has_zeros = false;
  specs[2].has_biases = true;
  specs[2].scale_type = ScaleType::kBf16;
  specs[0].scale_type = ScaleType::kF32;
  for (size_t i = 0; i < specs.size(); ++i) {
    WeightsSpec& spec = specs[i];
    spec.experts = 2;
    SCOPED_TRACE(FormatName(spec.format));
    const TestModule module = RandomModule(kExperts, spec, static_cast<uint32_t>(40 + i));
    const Status status = Convert({module}, "mlx");
    ASSERT_TRUE(status.ok()) << status.message();
    const Written written(out());
    const std::string name = "model.layers.0.mlp.switch_mlp.up_proj";
    const int bits = GetFormatInfo(spec.format).bits;
    const int64_t groups = GroupCount(spec);
    EXPECT_EQ(written.ShapeOf(name + ".weight"), (Shape{2, 40, 64 * bits / 32}));
    for (int e = 0; e < 2; ++e) {
      ExpectWeights(
          testing::DenseOf(module.weights), e * 64 * 40, 64, 40, [&](int64_t k, int64_t n) {
            const int64_t row = e * 40 + n;
            const int code = written.Code(name + ".weight", row, 64 * bits / 32, k, bits);
            const int64_t at = row * groups + k / spec.group_size;
            return written.Float(name + ".scales", at) * code + written.Float(name + ".biases", at);
          });
    }
    const Json expected = {{"group_size", spec.group_size}, {"bits", bits}, {"mode", "affine"}};
    EXPECT_EQ(written.config()["quantization"][name], expected);
    EXPECT_EQ(written.config()["quantization"]["bits"], bits);
  }
}

TEST_F(ConvertTest, MlxKeepsCountingTablesAndMicroscaledFloats) {
  WeightsSpec table = SpecOf(Format::kNf3);
  table.has_biases = true;
  TestModule module = RandomModule(kWeight, table, 50);
  ExpectLoss(module, "mlx", "cannot hold the codebook of nf3");
  for (int i = 0; i < 8; ++i) module.weights.codebook.push_back(static_cast<float>(i));
  ASSERT_TRUE(Convert({module}, "mlx").ok());
  const std::string name = kName;
  const Written written(out());
  ExpectWeights(testing::DenseOf(module.weights), 0, 64, 40, [&](int64_t k, int64_t n) {
    int code = 0;
    for (int i = 0; i < 3; ++i) {
      const int64_t bit = 3 * k + i;
      const auto word = written.Number<uint32_t>(name + ".weight", n * 6 + bit / 32);
      code |= static_cast<int>(word >> (bit % 32) & 1u) << i;
    }
    return written.Float(name + ".scales", n * 2 + k / 32) * code +
           written.Float(name + ".biases", n * 2 + k / 32);
  });
  WeightsSpec floats = SpecOf(Format::kFp8E4M3);
  floats.scale_type = ScaleType::kE8M0;
  TestModule eight = RandomModule(kWeight, floats, 51);
  auto* const words = static_cast<uint32_t*>(
      const_cast<void*>(static_cast<const void*>(eight.weights.codes.data())));
  for (int64_t i = 0; i < 16 * 40; ++i) words[i] &= 0xf7f7f7f7u;  // No NaN.
  std::filesystem::remove_all(out());
  const Status status = Convert({eight}, "mlx");
  ASSERT_TRUE(status.ok()) << status.message();
  const Written mxfp8(out());
  EXPECT_EQ(mxfp8.config()["quantization"]["mode"], "mxfp8");
  EXPECT_FALSE(mxfp8.Has(name + ".biases"));
  ExpectWeights(testing::DenseOf(eight.weights), 0, 64, 40, [&](int64_t k, int64_t n) {
    const auto code = mxfp8.Number<uint8_t>(name + ".weight", n * 64 + k);
    return double{Fp8E4M3ToFloat(code)} * mxfp8.Float(name + ".scales", n * 2 + k / 32);
  });
}

TEST_F(ConvertTest, MlxTakesGlobalScalesThatItsScalesHold) {
  WeightsSpec spec = SpecOf(Format::kFp4E2M1, 16);
  spec.scale_type = ScaleType::kE4M3;
  spec.has_global_scale = true;
  spec.experts = 2;
  for (const bool divides : {false, true}) {
    spec.global_scale_divides = divides;
    TestModule module = RandomModule(kExperts, spec, 52);
    auto* const global = const_cast<float*>(module.weights.global_scale.As<float>());
    global[0] = 1.0f;
    global[1] = divides ? 2.0f : 0.5f;
    std::filesystem::remove_all(out());
    const Status status = Convert({module}, "mlx");
    ASSERT_TRUE(status.ok()) << status.message();
    const Written written(out());
    const std::string name = "model.layers.0.mlp.switch_mlp.up_proj";
    EXPECT_FALSE(written.Has(name + ".biases"));
    EXPECT_FALSE(written.Has(name + ".global_scale"));
    EXPECT_EQ(written.TypeOf(name + ".scales"), DType::kU8);
    EXPECT_EQ(written.config()["quantization"][name],
              Json({{"group_size", 16}, {"bits", 4}, {"mode", "nvfp4"}}));
    for (int e = 0; e < 2; ++e) {
      ExpectWeights(
          testing::DenseOf(module.weights), e * 64 * 40, 64, 40, [&](int64_t k, int64_t n) {
            const int64_t row = e * 40 + n;
            const int code = written.Code(name + ".weight", row, 8, k, 4);
            const auto scale = written.Number<uint8_t>(name + ".scales", row * 4 + k / 16);
            return double{FormatValues(Format::kFp4E2M1)[static_cast<size_t>(code)]} *
                   double{Fp8E4M3ToFloat(scale)};
          });
    }
    const auto again = Checkpoint::Open(out());
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(testing::DenseOf(*again->Weights(kExperts)), testing::DenseOf(module.weights));
    global[1] = 0.37f;
    std::filesystem::remove_all(out());
    ExpectLoss(module, "mlx", "mlx cannot hold the global scale 0.37");
  }
}

TEST_F(ConvertTest, MlxConfigsHaveTheNamesOfMlxLm) {
  const TestModule module = RandomModule(kWeight, SpecOf(Format::kS8), 53);
  const auto converted = [&](const Json& config) {
    std::filesystem::remove_all(out());
    const Status status = Convert({module}, "mlx", config);
    EXPECT_TRUE(status.ok()) << status.message();
    return status.ok() ? Written(out()).config() : Json::object();
  };
  const Json rope = {{"rope_type", "default"}, {"rope_theta", 5e5}, {"partial_rotary_factor", 0.5}};
  Json config =
      converted({{"model_type", "qwen3_moe"}, {"num_local_experts", 8}, {"rope_parameters", rope}});
  EXPECT_EQ(config["num_experts"], 8);
  EXPECT_EQ(config["num_local_experts"], 8);
  EXPECT_EQ(config["rope_theta"], 5e5);
  EXPECT_EQ(config["partial_rotary_factor"], 0.5);
  EXPECT_EQ(config["rope_parameters"], rope);
  EXPECT_TRUE(config["rope_scaling"].is_null());
  EXPECT_EQ(config["tie_word_embeddings"], false);
  const Json llama3 = {{"rope_type", "llama3"}, {"rope_theta", 1e4}, {"factor", 8.0}};
  config = converted({{"model_type", "llama"},
                      {"tie_word_embeddings", true},
                      {"rope_parameters", {{"full_attention", llama3}}}});
  EXPECT_EQ(config["rope_theta"], 1e4);
  EXPECT_EQ(config["rope_scaling"],
            Json({{"rope_type", "llama3"}, {"type", "llama3"}, {"factor", 8.0}}));
  // The file has a head of its own.
  EXPECT_EQ(config["tie_word_embeddings"], false);
  config = converted(
      {{"model_type", "mistral"}, {"max_position_embeddings", 16}, {"sliding_window", 16}});
  EXPECT_EQ(config["sliding_window"], 16);
  config = converted({{"model_type", "glm4_moe_lite"},
                      {"n_routed_experts", 4},
                      {"mlp_layer_types", {"dense", "dense", "sparse"}}});
  EXPECT_EQ(config["first_k_dense_replace"], 2);
  // Missing keys get the defaults of the type, where mlx_lm has others.
  config = converted({{"model_type", "qwen2"}});
  EXPECT_EQ(config["rope_theta"], 1e4);
  EXPECT_EQ(config["tie_word_embeddings"], false);
  EXPECT_EQ(converted({{"model_type", "mixtral"}})["rms_norm_eps"], 1e-5);
  config = converted({{"model_type", "mistral"}, {"sliding_window", nullptr}});
  EXPECT_TRUE(config["sliding_window"].is_null());
  EXPECT_FALSE(config.contains("layer_types"));
  // A type that is not known keeps its keys.
  EXPECT_EQ(converted({{"model_type", "other"}, {"hidden_act", "relu"}})["hidden_act"], "relu");

  for (const auto& [key, refused] : std::map<std::string, Json>{
           {"hidden_act", {{"model_type", "llama"}, {"hidden_act", "gelu"}}},
           {"rope_scaling",
            {{"model_type", "mixtral"}, {"rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}}}},
           {"attention_bias", {{"model_type", "qwen3"}, {"attention_bias", true}}},
           {"use_sliding_window", {{"model_type", "qwen2"}, {"use_sliding_window", true}}},
           {"sliding_window", {{"model_type", "mixtral"}, {"sliding_window", 8}}},
           {"sliding_window: mlx_lm's mistral", {{"model_type", "mistral"}, {"sliding_window", 8}}},
           {"norm_topk_prob", {{"model_type", "qwen2_moe"}, {"norm_topk_prob", true}}},
           {"mlp_only_layers",
            {{"model_type", "qwen2_moe"}, {"mlp_only_layers", Json::array({1})}}},
           {"rope_interleave", {{"model_type", "deepseek_v3"}, {"rope_interleave", false}}},
           {"mlp_layer_types",
            {{"model_type", "glm4_moe_lite"}, {"mlp_layer_types", {"sparse", "dense"}}}}}) {
    std::filesystem::remove_all(out());
    const Status status = Convert({module}, "mlx", refused);
    EXPECT_EQ(status.code(), Code::kUnsupported) << key;
    EXPECT_TRUE(Contains(status.message(), "config.json: " + key)) << status.message();
  }
}

TEST_F(ConvertTest, MixtralsExpertsHaveTheNamesOfMlxLm) {
  WeightsSpec spec = SpecOf(Format::kS8);
  spec.experts = 2;
  const std::string prefix = "model.layers.0.block_sparse_moe.";
  std::vector<TestModule> modules;
  for (const char* const name : {"w1", "w2", "w3"}) {
    modules.push_back(RandomModule(prefix + "experts.*." + name + ".weight", spec, 54));
  }
  ASSERT_TRUE(Convert(modules, "mlx", {{"model_type", "mixtral"}}).ok());
  const Written written(out());
  for (const char* const name : {"gate_proj", "down_proj", "up_proj"}) {
    EXPECT_TRUE(written.Has(prefix + "switch_mlp." + name + ".weight")) << name;
  }
}

TEST_F(ConvertTest, RefusalsNameARecipeThatFits) {
  for (const char* const target : {"gptq", "awq", "compressed-tensors", "mlx"}) {
    SCOPED_TRACE(target);
    WeightsSpec spec = SpecOf(Format::kNf4);
    ExpectLoss(RandomModule(kWeight, spec, 55), target, "uniform:s4/g32");
    spec.format = Format::kS4;
    const Status status = Convert({RandomModule(kWeight, spec, 56)}, target);
    EXPECT_TRUE(status.ok()) << status.message();
    std::filesystem::remove_all(out());
  }
}

TEST_F(ConvertTest, PlainIsTheExactFp32) {
  const TestModule module = RandomModule(kWeight, SpecOf(Format::kU8), 60);
  ASSERT_TRUE(Convert({module}, "plain").ok());
  const Written written(out());
  ExpectWeights(testing::DenseOf(module.weights), 0, 64, 40,
                [&](int64_t k, int64_t n) { return written.Float(kWeight, n * 64 + k); });
}

TEST_F(ConvertTest, WhatWouldBeLostIsNamed) {
  struct Case {
    const char* target;
    std::function<void(WeightsSpec&)> change;
    const char* part;
  };
  const auto fp4 = [](WeightsSpec& s) { s.format = Format::kFp4E2M1, s.has_zeros = false; };
  const auto biases = [](WeightsSpec& s) { s.has_zeros = false, s.has_biases = true; };
  const auto bytes = [](WeightsSpec& s) { s.scale_type = ScaleType::kE8M0; };
  const auto tail = [](WeightsSpec& s) { s.k = 72; };
  const Case cases[] = {
      {"gptq", fp4, "gptq cannot hold fp4_e2m1"},
      {"gptq", biases, "gptq cannot hold biases"},
      {"gptq", bytes, "gptq cannot hold e8m0 scales"},
      {"gptq", tail, "gptq cannot hold a last group of 8 k in groups of 32"},
      {"gptq", [](WeightsSpec& s) { s.n = 41; },
       "gptq cannot hold [64, 41], which are no multiple"},
      {"awq", fp4, "awq cannot hold fp4_e2m1"},
      {"awq", [](WeightsSpec& s) { s.format = Format::kU8; }, "awq cannot hold u8"},
      {"awq", biases, "awq cannot hold biases"},
      {"awq", bytes, "awq cannot hold e8m0 scales"},
      {"awq", tail, "awq cannot hold a last group of 8 k in groups of 32"},
      {"awq", [](WeightsSpec& s) { s.n = 41; }, "awq cannot hold 41 outputs"},
      {"compressed-tensors", fp4, "cannot hold fp4_e2m1 in groups of 32 with fp16 scales"},
      {"compressed-tensors", biases, "cannot hold u4 in groups of 32 with fp16 scales and biases"},
      {"compressed-tensors", tail, "cannot hold a last group of 8 k"},
      {"mlx", fp4, "mlx cannot hold fp4_e2m1 in groups of 32 with fp16 scales"},
      {"mlx", [](WeightsSpec& s) { s.group_size = 16; }, "mlx cannot hold 64 k in groups of 16"},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(std::string(test.target) + ": " + test.part);
    WeightsSpec spec = SpecOf(Format::kU4);
    test.change(spec);
    ExpectLoss(RandomModule(kWeight, spec, 70), test.target, test.part);
  }
}

TEST_F(ConvertTest, NumbersThatWouldBeRoundedAreNamed) {
  TestModule module = RandomModule(kWeight, SpecOf(Format::kU4), 80);
  auto* const zeros = const_cast<uint16_t*>(module.weights.zeros.As<uint16_t>());
  zeros[41] = FloatToHalf(7.25f);
  for (const char* target : {"gptq", "awq", "compressed-tensors"}) {
    ExpectLoss(module, target,
               "cannot hold the zero 7.25 at [1, 1], which is no code from 0 to 15");
  }
  WeightsSpec wide = SpecOf(Format::kS4);
  wide.scale_type = ScaleType::kF32;
  module = RandomModule(kWeight, wide, 81);
  const_cast<float*>(module.weights.scales.As<float>())[2] = 0.1f;
  for (const char* target : {"gptq", "awq"}) {
    ExpectLoss(module, target, "the scale 0.100000001 at [0, 2], which f16 does not hold");
  }
  WeightsSpec narrow = SpecOf(Format::kU8);
  narrow.zero_type = ScaleType::kF32;
  narrow.scale_type = ScaleType::kBf16;
  module = RandomModule(kWeight, narrow, 82);
  const_cast<float*>(module.weights.zeros.As<float>())[0] = 201.0f;
  static_cast<uint16_t*>(const_cast<void*>(module.weights.scales.data()))[0] = FloatToBf16(0.6875f);
  ExpectLoss(module, "mlx", "the bias -138.1875 at [0, 0], which bf16 does not hold");
}

TEST_F(ConvertTest, SourcesAndTargetsThatCannotBe) {
  const TestModule module = RandomModule(kWeight, SpecOf(Format::kU4), 90);
  Status status = Convert({module}, "exl3");
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(
      status.message(),
      "target: unknown format \"exl3\"; known: plain, compressed-tensors, gptq, awq, mlx, gguf");
  testing::WriteFile(directory_ / "dense.safetensors",
                     testing::BuildSafetensors({testing::RandomBf16("a.weight", {8, 8}, 1)}));
  ConvertCheckpointOptions options;
  options.target = "gptq";
  status = ConvertCheckpoint(directory_ / "dense.safetensors", out(), options).status();
  EXPECT_TRUE(Contains(status.message(), "has no quantized modules")) << status.message();
  TestModule turned = module;
  turned.record.layout = SourceLayout::kInOut;
  ExpectLoss(turned, "gptq", "as [in, out]");
  WeightsSpec stack = SpecOf(Format::kU4);
  stack.experts = 2;
  ExpectLoss(RandomModule("model.layers.0.mlp.experts.gate_up_proj", stack, 91), "mlx",
             "one tensor holds 2 experts");
  WeightsSpec wide = SpecOf(Format::kU4, 64);
  status = Convert({RandomModule("model.layers.0.mlp.up_proj.weight", wide, 92), module}, "awq");
  EXPECT_TRUE(Contains(status.message(), "awq cannot hold groups of")) << status.message();
}

}  // namespace
}  // namespace marlin::convert_checkpoint_test
