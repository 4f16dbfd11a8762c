// Readers of third-party checkpoints: hand-made files with known values, and mutations of a valid
// file per reader, each of which opens and loads or gets a typed error of one line.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/scalars.h"
#include "foreign_files.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "test_files.h"

namespace marlin::foreign_readers_test {
namespace {

using testing::CodeOfFill;
using testing::Contains;
using testing::CtMxfp6;
using testing::CtPacked;
using testing::Directory;
using testing::Files;
using testing::Filled;
using testing::Hqq;
using testing::HqqBytes;
using testing::kFill;
using testing::MlxAffine;
using testing::Of;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::Text;
using ::testing::Values;

Files Gptq(int bits, const std::string& version, uint32_t zero_word) {
  const int64_t words = bits;  // Words of 32 codes.
  Files files{"gptq" + std::to_string(bits), {}, {}};
  files.tensors = {
      Filled("m.qweight", DType::kI32, {words, 32}),
      Of<uint32_t>("m.qzeros", DType::kI32, {1, words},
                   std::vector<uint32_t>(static_cast<size_t>(words), zero_word)),
      Filled("m.scales", DType::kF16, {1, 32}),
      Filled("m.g_idx", DType::kI32, {32}, 0),
  };
  files.config = {{"quant_method", "gptq"},
                  {"bits", bits},
                  {"group_size", 32},
                  {"desc_act", false},
                  {"checkpoint_format", version}};
  return files;
}

TEST(ForeignReaders, ZerosOfGptqAreOneAdditionWithCarries) {
  // 0xffffffff + 0x55555555 = 0x55555554: the first zero is 0 and the others are 1. Field by field
  // all would be 0.
  const Files files = Gptq(2, "gptq", 0xffffffffu);
  const std::vector<float> values = ValuesOf(files, "m.weight", Format::kInt2);
  const float scale = HalfToFloat(0x2c2c);
  const uint32_t word = 0x2c2c2c2cu;
  for (int k = 0; k < 32; ++k) {
    for (int n = 0; n < 32; ++n) {
      const auto code = static_cast<int>((word >> (2 * (k % 16))) & 3u);
      const int zero = n % 16 == 0 ? 0 : 1;
      ASSERT_EQ(values[static_cast<size_t>(k * 32 + n)], scale * static_cast<float>(code - zero))
          << k << " " << n;
    }
  }
}

TEST(ForeignReaders, ZerosOfGptqVersion2AreStoredAsTheyAre) {
  const float scale = HalfToFloat(0x2c2c);
  const std::vector<float> first =
      ValuesOf(Gptq(4, "gptq_v2", 0x33333333u), "m.weight", Format::kU4);
  const std::vector<float> middle =
      ValuesOf(Gptq(4, "gptq_v2", 0x88888888u), "m.weight", Format::kS4);
  EXPECT_EQ(first[0], scale * (0xc - 3));
  EXPECT_EQ(middle[0], scale * (0xc - 8));
  // Version 1 stores 7 for 8.
  EXPECT_EQ(ValuesOf(Gptq(4, "gptq", 0x77777777u), "m.weight", Format::kS4), middle);
}

TEST(ForeignReaders, GroupsOfGptqMayBeOutOfOrder) {
  Files files = Gptq(4, "gptq_v2", 0x88888888u);
  files.config["group_size"] = 16;
  std::vector<int32_t> index(32);
  for (size_t k = 0; k < index.size(); ++k) index[k] = static_cast<int32_t>(k % 2);
  files.tensors[1] = Filled("m.qzeros", DType::kI32, {2, 4}, static_cast<char>(0x88));
  files.tensors[2] = Of<uint16_t>("m.scales", DType::kF16, {2, 32}, [] {
    std::vector<uint16_t> scales(64, FloatToHalf(1.0f));
    std::fill(scales.begin() + 32, scales.end(), FloatToHalf(2.0f));
    return scales;
  }());
  files.tensors[3] = Of<int32_t>("m.g_idx", DType::kI32, {32}, index);
  const std::vector<float> values = ValuesOf(files, "m.weight", Format::kS4);
  // Nibbles of 0x2c2c2c2c: c, 2, c, 2 ...
  EXPECT_EQ(values[0], 1.0f * (12 - 8));
  EXPECT_EQ(values[32], 2.0f * (2 - 8));
  // -1 is the last group, and an index of nothing else is none.
  std::replace(index.begin(), index.end(), 1, -1);
  files.tensors[3] = Of<int32_t>("m.g_idx", DType::kI32, {32}, index);
  EXPECT_EQ(ValuesOf(files, "m.weight", Format::kS4), values);
  files.tensors[3] = Of<int32_t>("m.g_idx", DType::kI32, {32}, std::vector<int32_t>(32, -1));
  const std::vector<float> in_order = ValuesOf(files, "m.weight", Format::kS4);
  EXPECT_EQ(in_order[15 * 32], 1.0f * (2 - 8));
  EXPECT_EQ(in_order[16 * 32], 2.0f * (12 - 8));
}

Files AwqGemm() {
  return {
      "awq",
      {Of<uint32_t>("m.qweight", DType::kI32, {16, 1}, std::vector<uint32_t>(16, 0x76543210u)),
       Of<uint32_t>("m.qzeros", DType::kI32, {1, 1}, {0x00000001u}),
       Of<uint16_t>("m.scales", DType::kBf16, {1, 8}, std::vector<uint16_t>(8, FloatToBf16(1.0f)))},
      {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 16}, {"version", "gemm"}}};
}

TEST(ForeignReaders, NibblesOfAwqAreColumns02461357) {
  const std::vector<float> values = ValuesOf(AwqGemm(), "m.weight", Format::kU4);
  const std::vector<float> row(values.begin(), values.begin() + 8);
  // Nibble i holds i, and column order[i]; the zero of column 0 is 1.
  EXPECT_EQ(row, (std::vector<float>{-1, 4, 1, 5, 2, 6, 3, 7}));
}

TEST(ForeignReaders, AnIndexOfCompressedTensorsWithMinusOneIsNone) {
  Files files = CtPacked();
  const std::vector<float> values = ValuesOf(files, "m.weight", Format::kU4);
  const int64_t k = static_cast<int64_t>(values.size()) / 16;
  std::vector<int32_t> index(static_cast<size_t>(k), -1);
  files.tensors.push_back(Of<int32_t>("m.weight_g_idx", DType::kI32, {k}, index));
  EXPECT_EQ(ValuesOf(files, "m.weight", Format::kU4), values);
}

TEST(ForeignReaders, CodesOfOldCompressedTensorsDoNotCrossWords) {
  Files files = CtPacked();
  files.config["config_groups"]["group_0"]["weights"]["num_bits"] = 3;
  files.tensors = {Filled("m.weight_packed", DType::kI32, {16, 4}),  // 32 codes, 10 a word.
                   Filled("m.weight_scale", DType::kBf16, {16, 2}),
                   Of<int64_t>("m.weight_shape", DType::kI64, {2}, {16, 32})};
  const std::vector<float> old = ValuesOf(files, "m.weight", Format::kInt3);
  const float scale = Bf16ToFloat(0x2c2c);
  const uint32_t word = 0x2c2c2c2cu;
  for (size_t k = 0; k < 32; ++k) {
    const auto code = static_cast<int>((word >> (3 * (k % 10))) & 7u);
    ASSERT_EQ(old[k * 16], scale * static_cast<float>(code - 4)) << k;
  }
  // 40 codes fill four words either way: the version tells.
  files.tensors = {Filled("m.weight_packed", DType::kI32, {16, 4}),
                   Filled("m.weight_scale", DType::kBf16, {16, 1}),
                   Of<int64_t>("m.weight_shape", DType::kI64, {2}, {16, 40})};
  for (const auto& [version, bit] : {std::pair("0.17.1", 32), {"0.18.0", 30}}) {
    files.config["version"] = version;
    const uint64_t twice = uint64_t{word} << 32 | word;
    const auto code = static_cast<int>((twice >> bit) & 7u);
    EXPECT_EQ(ValuesOf(files, "m.weight", Format::kInt3)[size_t{10} * 16],
              scale * static_cast<float>(code - 4))
        << version;
  }
}

TEST(ForeignReaders, ZerosOfCompressedTensorsCountFromTheLowestCode) {
  const std::map<int, Format> formats = {{2, Format::kInt2}, {3, Format::kInt3}, {4, Format::kU4},
                                         {5, Format::kU5},   {6, Format::kU6},   {7, Format::kU8},
                                         {8, Format::kU8}};
  const float scale = Bf16ToFloat(0x2c2c);
  for (const auto& [bits, format] : formats) {
    SCOPED_TRACE(bits);
    Files files = CtPacked();
    files.config["config_groups"]["group_0"]["weights"]["num_bits"] = bits;
    files.tensors = {Filled("m.weight_packed", DType::kI32, {32, bits}),
                     Filled("m.weight_scale", DType::kBf16, {32, 2}),
                     Filled("m.weight_zero_point", DType::kI32, {bits, 2}),
                     Of<int64_t>("m.weight_shape", DType::kI64, {2}, {32, 32})};
    const std::vector<float> values = ValuesOf(files, "m.weight", format);
    for (int64_t k = 0; k < 32; ++k) {
      for (int64_t n = 0; n < 32; ++n) {
        const int code = CodeOfFill(bits, k) - CodeOfFill(bits, n);
        ASSERT_EQ(values[static_cast<size_t>(k * 32 + n)], scale * static_cast<float>(code))
            << k << " " << n;
      }
    }
  }
}

TEST(ForeignReaders, OtherSparsityOfCompressedTensorsIsRefused) {
  const Directory directory;
  Files files = CtPacked();
  files.config["sparsity_config"] = {{"format", "sparse-hash"}};
  directory.Write(files);
  EXPECT_TRUE(Contains(directory.Open().status().message(), "\"sparse-hash\" is not supported"));
  // Packed integers are not compressed once more.
  files.config["sparsity_config"] = {{"format", "sparse-24-bitmask"}};
  directory.Write(files);
  EXPECT_TRUE(directory.Open().ok()) << directory.Open().status().message();
}

/// A transform_config of one scheme, "v", that applies at one location.
Json Transforms(const std::string& type, const std::string& location, const Json& more = {}) {
  Json entry = {{"location", location}, {"targets", {"re:m$"}}};
  Json scheme = {{"type", type}, {"apply", {entry}}};
  if (more.is_object()) scheme.update(more);
  return {{"config_groups", {{"v", scheme}}}};
}

TEST(ForeignReaders, RotatedInputsOfCompressedTensorsAreHadamardBlocks) {
  Files files = CtPacked();
  const std::vector<float> stored = ValuesOf(files, "m.weight", Format::kU4);
  files.config["transform_config"] = Transforms("hadamard", "input", {{"head_dim", 4}});
  files.tensors.push_back(Filled("m.v_input.weight", DType::kF32, {4, 4}));
  const std::vector<float> values = ValuesOf(files, "m.weight", Format::kU4);
  const size_t n = values.size() / 32;
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t k = i / n;
    float sum = 0;
    for (size_t j = 0; j < 4; ++j) {
      const bool odd = std::popcount(k % 4 & j) % 2 != 0;
      sum += (odd ? -0.5F : 0.5F) * stored[(k / 4 * 4 + j) * n + i % n];
    }
    ASSERT_NEAR(values[i], sum, 1e-6) << i;
  }
  const Directory directory;
  directory.Write(files);
  const auto opened = directory.Open();
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->modules().front().spec.input_hadamard, 4);
  EXPECT_EQ(opened->Find("m.v_input.weight"), nullptr);
}

TEST(ForeignReaders, RotationsOfCompressedTensorsThatChangeNothingAreLeftOut) {
  Files files = CtPacked();
  for (const Json& transforms :
       {Json::object(), Transforms("random-hadamard", "weight_input"),
        Transforms("hadamard", "input", {{"apply", Json::array()}}),
        Json{{"config_groups",
              {{"R3",
                {{"type", "random-hadamard"},
                 {"apply", {{{"location", "q_attn"}}, {{"location", "k_cache"}}}}}}}}}}) {
    files.config["transform_config"] = transforms;
    const Directory directory;
    directory.Write(files);
    const auto opened = directory.Open();
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    EXPECT_EQ(opened->modules().front().spec.input_hadamard, 0);
  }
}

TEST(ForeignReaders, OtherRotationsOfCompressedTensorsAreRefusedByName) {
  const auto message = [](const Json& transforms) {
    Files files = CtPacked();
    files.config["transform_config"] = transforms;
    files.tensors.push_back(Filled("lm_head.weight", DType::kF16, {8, 32}));
    const Directory directory;
    directory.Write(files);
    return std::string(directory.Open().status().message());
  };
  const std::pair<Json, const char*> cases[] = {
      {Transforms("hadamard", "output"), "transform_config: \"v\": location \"output\""},
      {Transforms("random-hadamard", "input"), "type \"random-hadamard\" are not supported"},
      {Transforms("hadamard", "input", {{"randomize", true}}), "randomized, are not supported"},
      {Transforms("hadamard", "k_cache"), "q_attn and k_cache do not cancel"},
      {Transforms("hadamard", "input", {{"head_dim", 24}}),
       "module \"m\": Hadamard blocks of 24 for 32 inputs are not supported"},
      {Transforms("hadamard", "input", {{"head_dim", -1}}), "head_dim is no size"},
      {Transforms("hadamard", "input", {{"head_dim", 99999999}}), "head_dim is no size"},
      {Transforms("hadamard", "input", {{"apply", {1}}}), "an entry of apply is no object"},
      {Transforms("hadamard", "input",
                  {{"apply", {{{"location", "input"}, {"targets", "Linear"}}}}}),
       "module \"lm_head\": is not quantized, but its inputs are rotated"},
      {Json{{"config_groups", 3}}, "transform_config: config_groups is no object"},
      {Json{{"config_groups", {{"v", 3}}}}, "transform_config: \"v\" is no object"},
      {Json::array({1}), "transform_config: it is no object"},
  };
  for (const auto& [transforms, expected] : cases) {
    EXPECT_TRUE(Contains(message(transforms), expected)) << message(transforms);
  }
}

Files CtMarlin24(int bits) {
  Files files = CtPacked();
  files.name = "marlin-24";
  files.config["format"] = "marlin-24";
  files.config["config_groups"]["group_0"]["weights"] = {
      {"num_bits", bits}, {"strategy", "group"}, {"group_size", 128}};
  files.tensors = {Filled("m.weight_packed", DType::kI32, {8, 32 * bits}),
                   Filled("m.meta", DType::kI16, {8, 128}, 0x4e),
                   Filled("m.scale_packed", DType::kF16, {2, 64})};
  return files;
}

TEST(ForeignReaders, BitsAndNibblesOfMarlin24AreChecked) {
  const Directory directory;
  Files files = CtMarlin24(4);
  files.config["config_groups"]["group_0"]["weights"]["num_bits"] = 8;
  directory.Write(files);
  EXPECT_TRUE(Contains(directory.Open().status().message(),
                       "holds codes of 4 bits, the configuration says 8"))
      << directory.Open().status().message();
  files = CtMarlin24(8);
  files.tensors[1].data[40] = 0x45;  // Both positions are 1.
  directory.Write(files);
  const Result<Checkpoint> opened = directory.Open();
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const Status status = opened->Weights("m.weight").status();
  EXPECT_EQ(status.code(), Code::kMalformedFile);
  EXPECT_TRUE(Contains(status.message(), "m.meta")) << status.message();
}

Files CtSparse(const std::string& format, DType dtype) {
  const bool sparse24 = format == "sparse-24-bitmask";
  Files files{format,
              {Filled("m.bitmask", DType::kU8, {16, 5}, 0x35),
               Filled("m.compressed", dtype, sparse24 ? Shape{16, 20} : Shape{320}),
               Of<int64_t>("m.shape", DType::kI64, {2}, {16, 40})},
              {{"quant_method", "compressed-tensors"},
               {"version", "0.12.2"},
               {"sparsity_config", {{"format", format}}}}};
  if (!sparse24) {
    std::vector<int64_t> offsets;
    for (int64_t row = 0; row < 16; ++row) offsets.push_back(20 * row);
    files.tensors.push_back(Of<int64_t>("m.row_offsets", DType::kI64, {16}, offsets));
  }
  if (DTypeBytes(dtype) == 1) {
    files.tensors.push_back(Filled("m.weight_scale", DType::kBf16, {16, 1}));
    files.config["format"] = "float-quantized";
  }
  return files;
}

Files CtNvfp4() {
  Files files = CtPacked();
  files.name = "compressed-tensors nvfp4";
  files.tensors = {Filled("m.weight_packed", DType::kU8, {16, 16}),
                   Filled("m.weight_scale", DType::kF8E4M3, {16, 2}),
                   Of<float>("m.weight_global_scale", DType::kF32, {1}, {3.0f})};
  return files;
}

TEST(ForeignReaders, GlobalScaleOfCompressedTensorsDivides) {
  const std::vector<float> values = ValuesOf(CtNvfp4(), "m.weight", Format::kFp4E2M1);
  const float scale = Fp8E4M3ToFloat(0x2c) / 3.0f;
  EXPECT_EQ(values[0], -2.0f * scale);  // Low nibble c.
  EXPECT_EQ(values[16], 1.0f * scale);  // High nibble 2: k = 1.
}

Files ModelOptNvfp4() {
  return {
      "modelopt",
      {Filled("m.weight", DType::kU8, {16, 16}), Filled("m.weight_scale", DType::kF8E4M3, {16, 2}),
       Of<float>("m.weight_scale_2", DType::kF32, {}, {3.0f}),
       Of<float>("m.input_scale", DType::kF32, {}, {1.0f})},
      {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}}};
}

TEST(ForeignReaders, GlobalScaleOfModelOptMultiplies) {
  const std::vector<float> values = ValuesOf(ModelOptNvfp4(), "m.weight", Format::kFp4E2M1);
  EXPECT_EQ(values[0], -2.0f * (Fp8E4M3ToFloat(0x2c) * 3.0f));
}

/// The scales of 32 inputs: 1, 1.5, 2, ...
std::vector<float> InputScales() {
  std::vector<float> scales(32);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = 1.0f + 0.5f * static_cast<float>(i);
  return scales;
}

TEST(ForeignReaders, WeightsOfModelOptAreMultipliedByTheScalesOfInputs) {
  Files files = ModelOptNvfp4();
  files.tensors.push_back(Of<float>("m.pre_quant_scale", DType::kF32, {32}, InputScales()));
  const std::vector<float> values = ValuesOf(files, "m.weight", Format::kFp4E2M1);
  const float scale = Fp8E4M3ToFloat(0x2c) * 3.0f;
  for (size_t k = 0; k < 32; ++k) {
    const float code = k % 2 == 0 ? -2.0f : 1.0f;  // Low nibble c, high nibble 2.
    EXPECT_EQ(values[k * 16], scale * code * InputScales()[k]) << k;
  }
  files.tensors[0] = Filled("m.weight", DType::kU8, {8, 32});
  files.tensors[1] = Of<float>("m.weight_scale", DType::kF32, {16, 1}, std::vector(16, 0.25f));
  files.tensors.erase(files.tensors.begin() + 2);
  const std::vector<float> four_bits = ValuesOf(files, "m.weight", Format::kS4);
  for (size_t k = 0; k < 32; ++k) {
    EXPECT_EQ(four_bits[k * 16], -1.0f * InputScales()[k]);  // c is -4.
    EXPECT_EQ(four_bits[k * 16 + 1], 0.25f * 2.0f * InputScales()[k]);
  }
}

TEST(ForeignReaders, WrongScalesOfInputsAreNamed) {
  const auto message = [](const TestTensor& scales, bool fp8) {
    Files files = ModelOptNvfp4();
    if (fp8) {
      files.tensors = {Filled("m.weight", DType::kF8E4M3, {16, 32}),
                       Of<float>("m.weight_scale", DType::kF32, {}, {1.0f})};
    }
    files.tensors.push_back(scales);
    const Directory directory;
    directory.Write(files);
    return std::string(directory.Open().status().message());
  };
  const std::vector<float> wrong(31, 1.0f);
  EXPECT_TRUE(Contains(message(Of<float>("m.pre_quant_scale", DType::kF32, {31}, wrong), false),
                       "pre_quant_scale\": expected 32 numbers, one for each input, got [31]"));
  std::vector<float> infinite = InputScales();
  infinite[5] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(Contains(message(Of<float>("m.pre_quant_scale", DType::kF32, {32}, infinite), false),
                       "value 5 is NaN or Inf"));
  EXPECT_TRUE(
      Contains(message(Of<float>("m.pre_quant_scale", DType::kF32, {32}, InputScales()), true),
               "pre_quant_scale beside weights of f8_e4m3"));
}

Files Mlx(const std::string& mode) {
  if (mode == "affine") {
    return {"mlx",
            {Filled("m.switch_mlp.up_proj.weight", DType::kU32, {2, 4, 8}),
             Filled("m.switch_mlp.up_proj.scales", DType::kF16, {2, 4, 1}, static_cast<char>(0xac)),
             Filled("m.switch_mlp.up_proj.biases", DType::kF16, {2, 4, 1})},
            {{"group_size", 64}, {"bits", 4}, {"mode", "affine"}},
            "quantization"};
  }
  return {"mlx " + mode,
          {Filled("m.weight", DType::kU32, {4, 8}), Filled("m.scales", DType::kU8, {4, 2})},
          {{"group_size", 32}, {"bits", 4}, {"mode", mode}},
          "quantization"};
}

TEST(ForeignReaders, ScalesOfMlxMayBeNegative) {
  const std::vector<float> values =
      ValuesOf(Mlx("affine"), "m.experts.*.up_proj.weight", Format::kU4);
  const float bias = HalfToFloat(0x2c2c);
  EXPECT_EQ(values[0], HalfToFloat(0xacac) * 12.0f + bias);
}

TEST(ForeignReaders, OverridesOfMlxDoNotInheritTheMode) {
  Files files = Mlx("mxfp4");
  files.config["m"] = {{"group_size", 32}, {"bits", 4}};
  const Directory directory;
  directory.Write(files);
  EXPECT_TRUE(
      Contains(directory.Open().status().message(), "is mxfp4, the configuration says affine"))
      << directory.Open().status().message();
  files.config["m"]["mode"] = "mxfp4";
  directory.Write(files);
  EXPECT_TRUE(directory.Open().ok()) << directory.Open().status().message();
}

Files GptOss() {
  return {"mxfp4",
          {Filled("e.gate_up_proj_blocks", DType::kU8, {2, 6, 1, 16}),
           Filled("e.gate_up_proj_scales", DType::kU8, {2, 6, 1}, 127)},
          {{"quant_method", "mxfp4"}}};
}

TEST(ForeignReaders, FusedExpertsKeepTheirRows) {
  const std::vector<float> values = ValuesOf(GptOss(), "e.gate_up_proj", Format::kFp4E2M1);
  ASSERT_EQ(values.size(), size_t{2 * 32 * 6});
  EXPECT_EQ(values[0], -2.0f);
  EXPECT_EQ(values[6], 1.0f);
}

Files Bitsandbytes(int64_t n, int64_t k, bool nested) {
  const std::string prefix = "m.weight.";
  Json state = {{"quant_type", "nf4"}, {"blocksize", 64}, {"dtype", "bfloat16"}, {"shape", {n, k}}};
  const int64_t blocks = (n * k + 63) / 64;
  std::vector<float> table(16);
  const std::span<const float> built_in = FormatValues(Format::kNf4);
  std::copy(built_in.begin(), built_in.end(), table.begin());
  Files files{"bitsandbytes", {}, {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}}};
  files.tensors = {Filled("m.weight", DType::kU8, {(n * k + 1) / 2, 1}),
                   Of<float>(prefix + "quant_map", DType::kF32, {16}, table)};
  if (nested) {
    state["nested_blocksize"] = 256;
    state["nested_offset"] = 0.25;
    files.tensors.push_back(Filled(prefix + "absmax", DType::kU8, {blocks}));
    files.tensors.push_back(Filled(prefix + "nested_absmax", DType::kF32, {(blocks + 255) / 256}));
    files.tensors.push_back(Filled(prefix + "nested_quant_map", DType::kF32, {256}));
  } else {
    std::vector<float> scales;
    for (int64_t i = 0; i < blocks; ++i) scales.push_back(static_cast<float>(i + 1));
    files.tensors.push_back(Of<float>(prefix + "absmax", DType::kF32, {blocks}, scales));
  }
  files.tensors.push_back(Text(prefix + "quant_state.bitsandbytes__nf4", state.dump()));
  return files;
}

TEST(ForeignReaders, BlocksOfBitsandbytesCrossRows) {
  // The first code of a byte is the high nibble, 2, the second one the low nibble, 12.
  const std::span<const float> nf4 = FormatValues(Format::kNf4);
  for (const int64_t k : {int64_t{64}, int64_t{96}, int64_t{34}, int64_t{33}}) {
    const int64_t n = 3;
    const Format format = k == 64 || k == 96 ? Format::kNf4 : Format::kFp32;
    const std::vector<float> values = ValuesOf(Bitsandbytes(n, k, false), "m.weight", format);
    for (int64_t i = 0; i < n * k; ++i) {
      const float scale = static_cast<float>(i / 64 + 1);
      const float expected = nf4[i % 2 == 0 ? 2 : 12] * scale;
      ASSERT_EQ(values[static_cast<size_t>(i % k * n + i / k)], expected) << k << " " << i;
    }
  }
}

TEST(ForeignReaders, NestedScalesAreRoundedTwice) {
  const std::vector<float> values = ValuesOf(Bitsandbytes(2, 64, true), "m.weight", Format::kNf4);
  float part = 0;
  const uint32_t bits = 0x2c2c2c2cu;
  std::memcpy(&part, &bits, sizeof(part));
  const float product = part * part;
  EXPECT_EQ(values[0], FormatValues(Format::kNf4)[2] * (product + 0.25f));
}

Files Fp8() {
  return {"fp8",
          {Filled("m.weight", DType::kF8E4M3, {20, 48}),
           Of<float>("m.weight_scale_inv", DType::kF32, {2, 3}, {1, 2, 3, 4, 5, 6}),
           // FP4 in bytes, as in the routed experts of DeepSeek-V4.
           Filled("e.weight", DType::kI8, {4, 16}), Filled("e.scale", DType::kF8E8M0, {4, 1}, 127)},
          {{"quant_method", "fp8"}, {"weight_block_size", {16, 16}}}};
}

TEST(ForeignReaders, InverseScalesMultiply) {
  const std::vector<float> values = ValuesOf(Fp8(), "m.weight", Format::kFp8E4M3);
  const float code = Fp8E4M3ToFloat(0x2c);
  EXPECT_EQ(values[0], code * 1.0f);
  EXPECT_EQ(values[size_t{47} * 20 + 19], code * 6.0f);
  EXPECT_EQ(values[size_t{16} * 20 + 15], code * 2.0f);
  EXPECT_EQ(ValuesOf(Fp8(), "e.weight", Format::kFp4E2M1)[0], -2.0f);
}

TEST(ForeignReaders, HqqPacksHalvesOfTheGroups) {
  // Four groups of 16 in two rows: groups 0 and 1 are high nibbles (2), 2 and 3 low ones (12).
  const std::vector<float> groups = ValuesOf(Hqq(1), "m.weight", Format::kU4);
  EXPECT_EQ(groups[0], 2.0f);
  EXPECT_EQ(groups[size_t{16} * 2], 4.0f);
  EXPECT_EQ(groups[1], 36.0f);
  EXPECT_EQ(groups[size_t{16} * 2 + 1], (12.0f - 0.5f) * 4.0f);
  // 16 rows of 4: the second row of the matrix begins at row 8, in the low nibbles.
  const std::vector<float> rows = ValuesOf(Hqq(0), "m.weight", Format::kFp32);
  EXPECT_EQ(rows[0], 2.0f);
  EXPECT_EQ(rows[1], 12.0f);
  EXPECT_EQ(rows[size_t{3} * 2], (2.0f - 0.5f) * 4.0f);
}

TEST(ForeignReaders, ValuesThatNoFormatHoldsAreFloatsOrRoundedWithTheirError) {
  const Directory source;
  source.Write(Hqq(0));
  const TemporaryDirectory out;
  ImportCheckpointOptions options;
  Result<ImportCheckpointReport> report = ImportCheckpoint(source.path(), out / "floats", options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->modules[0].spec.format, Format::kFp32);
  EXPECT_EQ(report->modules[0].exactness, "exact");
  EXPECT_EQ(report->coverage, 0);
  options.allow_requantize = true;
  report = ImportCheckpoint(source.path(), out / "codes", options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const ImportedModule& module = report->modules[0];
  EXPECT_EQ(module.spec.format, Format::kS8);
  EXPECT_EQ(module.exactness, "re-rounded");
  EXPECT_EQ(report->coverage, 1);
  const Result<Checkpoint> codes = Checkpoint::Open(out / "codes");
  ASSERT_TRUE(codes.ok()) << codes.status().message();
  const Result<QuantizedWeights> weights = codes->Weights("m.weight");
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_TRUE(weights->spec == module.spec);
  const std::vector<float> exact = ValuesOf(Hqq(0), "m.weight", Format::kFp32);
  std::vector<float> rounded(exact.size());
  ASSERT_TRUE(Dequantize(*weights, MutableTensorView(rounded.data(), DType::kF32,
                                                     {weights->spec.k, weights->spec.n}))
                  .ok());
  double squares = 0;
  double errors = 0;
  double largest = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double error = std::abs(static_cast<double>(rounded[i]) - exact[i]);
    largest = std::max(largest, error);
    errors += error * error;
    squares += static_cast<double>(exact[i]) * exact[i];
  }
  EXPECT_GT(largest, 0);
  EXPECT_EQ(module.max_error, largest);
  EXPECT_DOUBLE_EQ(module.relative_error, std::sqrt(errors / squares));
}

// --- Malformed files
// ------------------------------------------------------------------------------

constexpr DType kAllTypes[] = {DType::kBool,   DType::kU8,     DType::kI8,  DType::kF8E4M3,
                               DType::kF8E5M2, DType::kF8E8M0, DType::kI16, DType::kU16,
                               DType::kF16,    DType::kBf16,   DType::kI32, DType::kU32,
                               DType::kF32,    DType::kI64,    DType::kU64, DType::kF64};

TestTensor Resized(const TestTensor& tensor, DType dtype, const Shape& shape) {
  TestTensor resized{tensor.name, dtype, shape, tensor.data};
  resized.data.resize(static_cast<size_t>(shape.ElementCount() * DTypeBytes(dtype)), kFill);
  return resized;
}

std::vector<TestTensor> MutationsOf(const TestTensor& tensor) {
  std::vector<TestTensor> mutations;
  for (const DType dtype : kAllTypes) {
    if (dtype != tensor.dtype) mutations.push_back(Resized(tensor, dtype, tensor.shape));
  }
  for (int i = 0; i < tensor.shape.rank(); ++i) {
    const int64_t dim = tensor.shape[i];
    for (const int64_t changed : {int64_t{0}, dim - 1, dim + 1, dim + 2, dim + 3, dim + 5, dim * 2,
                                  dim * 3, dim * 5, dim * 7}) {
      Shape shape = tensor.shape;
      shape[i] = changed;
      mutations.push_back(Resized(tensor, tensor.dtype, shape));
    }
  }
  Shape more = tensor.shape;
  more.Append(2);
  mutations.push_back(Resized(tensor, tensor.dtype, more));
  Shape less;
  for (int i = 1; i < tensor.shape.rank(); ++i) less.Append(tensor.shape[i]);
  mutations.push_back(Resized(tensor, tensor.dtype, less));
  // Content: numbers out of range, NaN, negative dimensions.
  for (const char fill : {'\xff', '\x7f', '\x00', '\x80'}) {
    mutations.push_back(tensor);
    std::fill(mutations.back().data.begin(), mutations.back().data.end(), fill);
  }
  return mutations;
}

/// The same configuration with one value at any depth replaced.
void MutateConfig(const Json& json, const std::function<void(const Json&)>& visit) {
  const Json values[] = {
      nullptr,       true,           -1,        0,         7, 1e300, uint64_t{1} << 63, "x",
      Json::array(), Json::object(), {1, 2, 3}, {{"a", 1}}};
  for (const auto& [key, child] : json.items()) {
    Json changed = json;
    changed.erase(key);
    visit(changed);
    for (const Json& value : values) {
      changed = json;
      changed[key] = value;
      visit(changed);
    }
    if (!child.is_object()) continue;
    const std::string name = key;
    MutateConfig(child, [&](const Json& inner) {
      Json outer = json;
      outer[name] = inner;
      visit(outer);
    });
  }
}

class MalformedForeignFiles : public ::testing::TestWithParam<Files> {
 protected:
  void Try(const Files& files) {
    directory_.Write(files);
    const Result<Checkpoint> opened = directory_.Open();
    Status status = opened.status();
    if (opened.ok()) {
      for (const QuantizedModule& module : opened->modules()) {
        if (status.ok()) status = opened->Weights(module.name).status();
      }
      for (const TensorInfo& tensor : opened->tensors()) {
        if (status.ok()) status = opened->Tensor(tensor.name).status();
      }
    }
    if (status.ok()) return;
    ++errors_;
    EXPECT_TRUE(status.code() == Code::kMalformedFile || status.code() == Code::kUnsupported)
        << status.message();
    EXPECT_TRUE(Contains(status.message(), directory_.path())) << status.message();
    EXPECT_FALSE(Contains(status.message(), "\n")) << status.message();
  }

  Directory directory_;
  int errors_ = 0;
};

TEST_P(MalformedForeignFiles, GetTypedErrors) {
  const Files& good = GetParam();
  Try(good);
  ASSERT_EQ(errors_, 0) << good.name;
  for (size_t i = 0; i < good.tensors.size(); ++i) {
    Files files = good;
    files.tensors.erase(files.tensors.begin() + static_cast<int64_t>(i));
    Try(files);
    for (TestTensor& mutation : MutationsOf(good.tensors[i])) {
      files = good;
      files.tensors[i] = std::move(mutation);
      Try(files);
    }
  }
  MutateConfig(good.config, [&](const Json& config) {
    Files files = good;
    files.config = config;
    Try(files);
  });
  RecordProperty("errors", errors_);
  EXPECT_GE(errors_, 100) << good.name;
}

TEST_P(MalformedForeignFiles, ModuleNamesAreUnique) {
  // A plain tensor of the module's name, which is not one of its parts.
  Files files = GetParam();
  directory_.Write(files);
  const Result<Checkpoint> opened = directory_.Open();
  ASSERT_TRUE(opened.ok());
  const bool plain = opened->modules().empty();
  const std::string name = plain ? "m.weight" : opened->modules().front().name;
  if (!plain && opened->Find(name) != nullptr) return;
  files.tensors.push_back(Filled(name, DType::kF32, {2, 2}));
  directory_.Write(files);
  const Status status = directory_.Open().status();
  EXPECT_EQ(status.code(), Code::kMalformedFile);
  EXPECT_TRUE(
      Contains(status.message(), plain ? "both plain and compressed" : "both plain and quantized"))
      << status.message();
}

INSTANTIATE_TEST_SUITE_P(Readers, MalformedForeignFiles,
                         ::testing::Values(Gptq(4, "gptq", 0x77777777u),
                                           Gptq(3, "gptq_v2", 0x12345678u),
                                           Gptq(6, "gptq_p", 0x12345678u), AwqGemm(), CtPacked(),
                                           CtMxfp6(), MlxAffine(5), HqqBytes(5), CtNvfp4(),
                                           ModelOptNvfp4(), Mlx("affine"), Mlx("mxfp4"), GptOss(),
                                           Bitsandbytes(4, 64, true), Bitsandbytes(3, 33, false),
                                           Fp8(), Hqq(0), Hqq(1), CtMarlin24(4), CtMarlin24(8),
                                           CtSparse("sparse-24-bitmask", DType::kF16),
                                           CtSparse("sparse-24-bitmask", DType::kF8E4M3),
                                           CtSparse("sparse-24-bitmask", DType::kI8),
                                           CtSparse("sparse-bitmask", DType::kF32),
                                           CtSparse("sparse-bitmask", DType::kF8E4M3)),
                         [](const auto& made) { return "Case" + std::to_string(made.index); });

}  // namespace
}  // namespace marlin::foreign_readers_test
