// Checkpoints whose groups lie across k (act-order): read with a permutation, every value as its
// own program computes it, imported in the same size, written back, and refused where malformed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/scalars.h"
#include "checkpoint/module_tensors.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "module_files.h"
#include "test_files.h"

namespace marlin::act_order_test {
namespace {

using testing::Contains;
using testing::DenseOf;
using testing::RandomModule;
using testing::TemporaryDirectory;
using testing::TestModule;
using testing::TestTensor;
using testing::WriteFile;

constexpr int64_t kN = 32;
constexpr int64_t kGroup = 32;
const char kName[] = "model.layers.0.self_attn.q_proj";
const char kWeight[] = "model.layers.0.self_attn.q_proj.weight";

template <typename T>
TestTensor Of(const std::string& suffix, DType dtype, const Shape& shape,
              const std::vector<T>& values) {
  std::string data(values.size() * sizeof(T), 0);
  std::memcpy(data.data(), values.data(), data.size());
  return {kName + suffix, dtype, shape, data};
}

/// A quantized matrix as numbers, [k, n].
struct Numbers {
  Numbers(int code_bits, int64_t rows, bool is_symmetric, uint32_t seed)
      : bits(code_bits), k(rows), groups((rows + kGroup - 1) / kGroup) {
    std::mt19937 random(seed);
    const auto code = [&] { return static_cast<int>(random() % (1U << bits)); };
    for (int64_t i = 0; i < k * kN; ++i) codes.push_back(code());
    for (int64_t i = 0; i < groups * kN; ++i) {
      zeros.push_back(is_symmetric ? 1 << (bits - 1) : code());
      scales.push_back(FloatToHalf(static_cast<float>(random() % 1000 + 1) / 4096));
    }
    for (int64_t i = 0; i < k; ++i) group_of.push_back(static_cast<int32_t>(i / kGroup));
    std::shuffle(group_of.begin(), group_of.end(), random);
  }

  /// Every weight, in fp32, as the packages compute it.
  std::vector<float> Values() const {
    std::vector<float> values;
    for (int64_t i = 0; i < k * kN; ++i) {
      const auto at = static_cast<size_t>(group_of[static_cast<size_t>(i / kN)] * kN + i % kN);
      values.push_back(HalfToFloat(scales[at]) *
                       static_cast<float>(codes[static_cast<size_t>(i)] - zeros[at]));
    }
    return values;
  }

  int bits;
  int64_t k;
  int64_t groups;
  std::vector<int> codes;         // [k, n]
  std::vector<int> zeros;         // [groups, n]
  std::vector<uint16_t> scales;   // [groups, n]
  std::vector<int32_t> group_of;  // [k]
};

/// Packs numbers `step` apart as one dense string of bits, whose words are `word_step` apart.
void PackString(const std::vector<int>& numbers, int64_t first, int64_t step, int64_t count,
                int bits, std::vector<uint32_t>* words, int64_t first_word, int64_t word_step) {
  for (int64_t i = 0; i < count * bits; ++i) {
    const int number = numbers[static_cast<size_t>(first + i / bits * step)];
    const auto bit = static_cast<uint32_t>(number >> (i % bits)) & 1U;
    (*words)[static_cast<size_t>(first_word + i / 32 * word_step)] |= bit << (i % 32);
  }
}

/// The same in planes: of every 32 numbers their low 4 bits (of 3-bit ones 2), then the next 2,
/// then the last, each plane as one dense string.
void PackPlanes(const std::vector<int>& numbers, int64_t first, int64_t step, int64_t count,
                int bits, std::vector<uint32_t>* words, int64_t first_word, int64_t word_step) {
  const std::map<int, std::vector<int>> widths = {
      {3, {2, 1}}, {5, {4, 1}}, {6, {4, 2}}, {7, {4, 2, 1}}};
  for (int64_t run = 0; run < count; run += 32) {
    int shift = 0;
    for (const int width : widths.at(bits)) {
      std::vector<int> plane;
      for (int64_t i = run; i < run + 32; ++i) {
        plane.push_back(numbers[static_cast<size_t>(first + i * step)] >> shift &
                        ((1 << width) - 1));
      }
      const int64_t word = run / 32 * bits + shift;
      PackString(plane, 0, 1, 32, width, words, first_word + word * word_step, word_step);
      shift += width;
    }
  }
}

/// Compares the tensors of the module in two files of GPTQ.
void ExpectSameTensors(const std::string& a, const std::string& b) {
  const Checkpoint before = *Checkpoint::Open(a);
  const Checkpoint after = *Checkpoint::Open(b);
  for (const char* const suffix : {".qweight", ".qzeros", ".scales", ".g_idx"}) {
    const TensorView one = *before.Tensor(kName + std::string(suffix));
    const TensorView other = *after.Tensor(kName + std::string(suffix));
    ASSERT_EQ(one.ByteCount(), other.ByteCount()) << suffix;
    EXPECT_EQ(std::memcmp(one.data(), other.data(), static_cast<size_t>(one.ByteCount())), 0)
        << suffix;
  }
}

class ActOrder : public ::testing::Test {
 protected:
  void Write(std::vector<TestTensor> tensors, const Json& quantization) {
    tensors.push_back(testing::RandomBf16("model.norm.weight", {64}, 2));
    std::filesystem::create_directories(source());
    WriteFile(source() + "/model.safetensors", testing::BuildSafetensors(tensors));
    WriteFile(source() + "/config.json", Json{{"quantization_config", quantization}}.dump());
  }

  void WriteGptq(const Numbers& m, const std::string& format = "gptq_v2") {
    const bool planes = (m.bits > 4 && m.bits < 8) || format == "gptq_p";
    const auto pack = planes ? PackPlanes : PackString;
    std::vector<uint32_t> codes(static_cast<size_t>(m.k * m.bits / 32 * kN));
    for (int64_t n = 0; n < kN; ++n) pack(m.codes, n, kN, m.k, m.bits, &codes, n, kN);
    const int64_t words = kN * m.bits / 32;
    std::vector<uint32_t> zeros(static_cast<size_t>(m.groups * words));
    for (int64_t g = 0; g < m.groups; ++g) {
      pack(m.zeros, g * kN, 1, kN, m.bits, &zeros, g * words, 1);
    }
    Write({Of(".qweight", DType::kI32, {m.k * m.bits / 32, kN}, codes),
           Of(".qzeros", DType::kI32, {m.groups, words}, zeros),
           Of(".scales", DType::kF16, {m.groups, kN}, m.scales),
           Of(".g_idx", DType::kI32, {m.k}, m.group_of)},
          {{"quant_method", "gptq"},
           {"bits", m.bits},
           {"group_size", kGroup},
           {"desc_act", true},
           {"checkpoint_format", format}});
  }

  void WriteCompressedTensors(const Numbers& m, bool zeros) {
    const int64_t words = (m.k * m.bits + 31) / 32;
    std::vector<uint32_t> codes(static_cast<size_t>(kN * words));
    std::vector<uint16_t> scales(m.scales.size());
    for (int64_t n = 0; n < kN; ++n) {
      PackString(m.codes, n, kN, m.k, m.bits, &codes, n * words, 1);
      for (int64_t g = 0; g < m.groups; ++g) {
        scales[static_cast<size_t>(n * m.groups + g)] = m.scales[static_cast<size_t>(g * kN + n)];
      }
    }
    std::vector<TestTensor> tensors = {Of(".weight_packed", DType::kI32, {kN, words}, codes),
                                       Of(".weight_scale", DType::kF16, {kN, m.groups}, scales),
                                       Of(".weight_g_idx", DType::kI32, {m.k}, m.group_of),
                                       Of<int64_t>(".weight_shape", DType::kI64, {2}, {kN, m.k})};
    if (zeros) {
      const int64_t zero_words = (kN * m.bits + 31) / 32;
      std::vector<uint32_t> packed(static_cast<size_t>(zero_words * m.groups));
      for (int64_t g = 0; g < m.groups; ++g) {
        PackString(m.zeros, g * kN, 1, kN, m.bits, &packed, g, m.groups);
      }
      tensors.push_back(Of(".weight_zero_point", DType::kI32, {zero_words, m.groups}, packed));
    }
    const Json weights = {
        {"num_bits", m.bits}, {"strategy", "group"}, {"group_size", kGroup}, {"actorder", "group"}};
    Write(std::move(tensors),
          {{"quant_method", "compressed-tensors"},
           {"format", "pack-quantized"},
           {"version", "0.20.0"},
           {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}}}}}});
  }

  /// Opens a checkpoint and compares its module bit for bit.
  void ExpectValues(const std::string& path, const std::vector<float>& expected, Format format,
                    bool permuted = true) {
    const auto opened = Checkpoint::Open(path);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    const auto weights = opened->Weights(kWeight);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(FormatName(weights->spec.format), FormatName(format));
    EXPECT_EQ(weights->spec.has_permutation, permuted);
    const std::vector<float> values = DenseOf(*weights);
    ASSERT_EQ(values.size(), expected.size());
    EXPECT_EQ(std::memcmp(values.data(), expected.data(), values.size() * 4), 0);
  }

  std::string source() const { return directory_ / "source"; }
  std::string out() const { return directory_ / "out"; }
  TemporaryDirectory directory_;
};

TEST_F(ActOrder, GptqOfEveryWidth) {
  const std::pair<int, std::pair<Format, Format>> widths[] = {
      {2, {Format::kInt2, Format::kInt2}}, {3, {Format::kInt3, Format::kInt3}},
      {4, {Format::kS4, Format::kU4}},     {5, {Format::kInt5, Format::kU5}},
      {6, {Format::kInt6, Format::kU6}},   {7, {Format::kS8, Format::kU8}},
      {8, {Format::kS8, Format::kU8}}};
  for (const auto& [bits, formats] : widths) {
    for (const bool symmetric : {true, false}) {
      for (const int64_t k : {64, 160}) {
        SCOPED_TRACE(std::to_string(bits) + " bits, k " + std::to_string(k));
        const Numbers m(bits, k, symmetric, static_cast<uint32_t>(bits));
        WriteGptq(m);
        ExpectValues(source(), m.Values(), symmetric ? formats.first : formats.second);
      }
    }
  }
}

TEST_F(ActOrder, GptqInPlanesOfBits) {
  const Numbers small(3, 96, false, 5);
  WriteGptq(small, "gptq_p");
  ExpectValues(source(), small.Values(), Format::kInt3);
  // These widths have no other form, and zeros that are not less one, whatever the file says.
  const Numbers six(6, 96, false, 5);
  for (const char* const format : {"gptq", "gptq_v2", "gptq_p"}) {
    WriteGptq(six, format);
    ExpectValues(source(), six.Values(), Format::kU6);
  }
}

TEST_F(ActOrder, GptqWhoseLastGroupIsShort) {
  const Numbers m(4, 176, false, 3);  // Groups of 32 and one of 16.
  WriteGptq(m);
  ExpectValues(source(), m.Values(), Format::kU4);
}

TEST_F(ActOrder, GroupsOfUnequalSizesAreFloats) {
  Numbers m(4, 96, false, 3);
  const auto other = std::find(m.group_of.begin(), m.group_of.end(), 1);
  *other = 2;
  WriteGptq(m);
  ExpectValues(source(), m.Values(), Format::kFp32, false);
  WriteCompressedTensors(m, true);
  ExpectValues(source(), m.Values(), Format::kFp32, false);
  Numbers planes(7, 96, false, 3);
  planes.group_of = m.group_of;
  WriteGptq(planes);
  ExpectValues(source(), planes.Values(), Format::kFp32, false);
}

TEST_F(ActOrder, CompressedTensorsOfEveryWidth) {
  for (const int bits : {2, 3, 4, 5, 6, 7, 8}) {
    for (const bool symmetric : {true, false}) {
      SCOPED_TRACE(std::to_string(bits) + " bits");
      const Numbers m(bits, 96, symmetric, static_cast<uint32_t>(bits));
      WriteCompressedTensors(m, !symmetric);
      const std::map<int, std::pair<Format, Format>> formats = {
          {2, {Format::kInt2, Format::kInt2}}, {3, {Format::kInt3, Format::kInt3}},
          {4, {Format::kS4, Format::kU4}},     {5, {Format::kInt5, Format::kU5}},
          {6, {Format::kInt6, Format::kU6}},   {7, {Format::kS8, Format::kU8}},
          {8, {Format::kS8, Format::kU8}}};
      const auto& [without, with] = formats.at(bits);
      ExpectValues(source(), m.Values(), symmetric ? without : with);
    }
  }
}

TEST_F(ActOrder, IsImportedInItsOwnSizeAndWrittenBack) {
  const Numbers m(4, 160, false, 9);
  WriteGptq(m);
  const auto report = ImportCheckpoint(source(), out(), {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  ASSERT_EQ(report->modules.size(), 1U);
  EXPECT_EQ(report->modules[0].exactness, "exact");
  // 16-bit zeros in place of 4-bit ones are all that grows.
  EXPECT_NEAR(report->modules[0].growth, 1.1, 0.1);
  EXPECT_TRUE(report->skipped.empty());
  const Json config = Json::parse(testing::ReadFile(out() + "/config.json"));
  EXPECT_EQ(config["quantization_config"]["version"], 2);
  EXPECT_EQ(config["quantization_config"]["modules"][kWeight]["permutation"], true);
  const auto opened = Checkpoint::Open(out());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->VerifyChecksums().ok());
  EXPECT_EQ(opened->Find(std::string(kName) + ".permutation")->shape, (Shape{160}));
  ExpectValues(out(), m.Values(), Format::kU4);

  const std::string gptq = directory_ / "gptq";
  ConvertCheckpointOptions options;
  options.target = "gptq";
  const auto converted = ConvertCheckpoint(out(), gptq, options);
  ASSERT_TRUE(converted.ok()) << converted.status().message();
  ExpectValues(gptq, m.Values(), Format::kU4);
  const Json written = Json::parse(testing::ReadFile(gptq + "/config.json"));
  EXPECT_EQ(written["quantization_config"]["desc_act"], true);
  ExpectSameTensors(source(), gptq);

  const std::string dense = directory_ / "dense";
  ASSERT_TRUE(DequantizeCheckpoint(out(), dense, DType::kF32, false).ok());
  const Checkpoint plain = *Checkpoint::Open(dense);
  const TensorView stored = *plain.Tensor(kWeight);
  const std::vector<float> values = m.Values();
  for (int64_t i = 0; i < m.k * kN; ++i) {
    ASSERT_EQ(stored.As<float>()[i % kN * m.k + i / kN], values[static_cast<size_t>(i)]) << i;
  }
}

TEST_F(ActOrder, PlanesOfBitsAreWrittenBack) {
  for (const int bits : {5, 6}) {
    SCOPED_TRACE(bits);
    const Numbers m(bits, 160, false, 9);
    WriteGptq(m, "gptq_p");
    ImportCheckpointOptions own;
    own.overwrite = true;
    const auto report = ImportCheckpoint(source(), out(), own);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules[0].exactness, "exact");
    const std::string gptq = directory_ / "gptq";
    ConvertCheckpointOptions options;
    options.target = "gptq";
    options.overwrite = true;
    const auto converted = ConvertCheckpoint(out(), gptq, options);
    ASSERT_TRUE(converted.ok()) << converted.status().message();
    ExpectSameTensors(source(), gptq);
  }
}

TEST_F(ActOrder, OtherTargetsRefuseItByName) {
  WeightsSpec spec{
      .format = Format::kS4, .k = 64, .n = 32, .group_size = 32, .has_permutation = true};
  testing::WriteQuantizedDirectory(source(), {RandomModule(kWeight, spec, 1)}, {});
  for (const char* const target : {"awq", "compressed-tensors", "mlx"}) {
    ConvertCheckpointOptions options;
    options.target = target;
    const Status status = ConvertCheckpoint(source(), out(), options).status();
    EXPECT_EQ(status.code(), Code::kUnsupported) << target;
    EXPECT_TRUE(Contains(status.message(), std::string("module \"") + kWeight +
                                               "\": its groups lie across k (act-order), which "
                                               "only gptq, plain and, as F32, gguf hold"))
        << status.message();
    EXPECT_FALSE(std::filesystem::exists(out()));
  }
}

TEST_F(ActOrder, StackedExpertsHaveOneEach) {
  WeightsSpec spec{.format = Format::kS8,
                   .experts = 3,
                   .k = 64,
                   .n = 32,
                   .group_size = 32,
                   .has_permutation = true};
  const char experts[] = "model.layers.0.mlp.experts.*.up_proj.weight";
  const TestModule module = RandomModule(experts, spec, 4);
  testing::WriteQuantizedDirectory(source(), {module}, {});
  const auto opened = Checkpoint::Open(source());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->Find("model.layers.0.mlp.experts.up_proj.permutation")->shape, (Shape{3, 64}));
  EXPECT_EQ(DenseOf(*opened->Weights(experts)), DenseOf(module.weights));
  ConvertCheckpointOptions options;
  options.target = "gptq";
  ASSERT_TRUE(ConvertCheckpoint(source(), out(), options).ok());
  const std::vector<float> all = DenseOf(module.weights);
  for (int64_t e = 0; e < 3; ++e) {
    const auto read = Checkpoint::Open(out())->Weights("model.layers.0.mlp.experts." +
                                                       std::to_string(e) + ".up_proj.weight");
    ASSERT_TRUE(read.ok()) << read.status().message();
    const std::vector<float> part = DenseOf(*read);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + e * 64 * 32)) << e;
  }
}

class PermutedDirectory : public ActOrder {
 protected:
  void SetUp() override {
    const WeightsSpec spec{
        .format = Format::kS4, .k = 64, .n = 32, .group_size = 32, .has_permutation = true};
    testing::WriteQuantizedDirectory(source(), {RandomModule(kWeight, spec, 1)}, {});
  }
  void Edit(const std::function<void(Json& config, Json& module)>& edit) {
    Json config = Json::parse(testing::ReadFile(source() + "/config.json"));
    Json& quantization = config["quantization_config"];
    edit(quantization, quantization["modules"][kWeight]);
    quantization["checksum"] = QuantizationConfigChecksum(quantization);
    WriteFile(source() + "/config.json", config.dump());
  }
  void ExpectError(const std::string& part) {
    const Status status = Checkpoint::Open(source()).status();
    EXPECT_EQ(status.code(), Code::kMalformedFile) << status.message();
    EXPECT_TRUE(Contains(status.message(), part)) << status.message();
    EXPECT_FALSE(Contains(status.message(), "\n"));
  }
};

TEST_F(PermutedDirectory, TheKeyIsChecked) {
  ASSERT_TRUE(Checkpoint::Open(source()).ok());
  Edit([](Json& /*config*/, Json& module) { module["permutation"] = 1; });
  ExpectError("\"permutation\": expected true or false, got 1");
  Edit([](Json& /*config*/, Json& module) {
    module["permutation"] = true;
    module["sparsity"] = "2:4";
  });
  ExpectError("permutation: 2:4 weights have none");
  // A program that knows no permutation must not multiply with rows in another order.
  Edit([](Json& config, Json& module) {
    config["version"] = 1;
    for (const char* const added : {"sparsity", "zero_type", "global_scale_divides"}) {
      module.erase(added);
    }
  });
  ExpectError("unknown key \"permutation\"");
}

TEST_F(PermutedDirectory, NumbersThatAreNoPermutationAreMalformed) {
  const std::string file = source() + "/model.safetensors";
  const std::string image = testing::ReadFile(file);
  const Checkpoint opened = *Checkpoint::Open(source());
  const auto at = static_cast<size_t>(opened.Find(std::string(kName) + ".permutation")->offset);
  int32_t first = 0;
  std::memcpy(&first, image.data() + at, 4);
  struct Case {
    int32_t second;
    std::string part;
  };
  const Case cases[] = {{first, std::to_string(first) + " at [0, 1] is there twice"},
                        {64, "64 at [0, 1] is no row of 64"},
                        {-1, "-1 at [0, 1] is no row of 64"},
                        {INT32_MIN, "-2147483648 at [0, 1] is no row of 64"}};
  for (const Case& wrong : cases) {
    std::string changed = image;
    std::memcpy(changed.data() + at + 4, &wrong.second, 4);
    WriteFile(file, changed);
    const Status status = Checkpoint::Open(source())->Weights(kWeight).status();
    EXPECT_EQ(status.code(), Code::kMalformedFile);
    EXPECT_TRUE(Contains(status.message(), std::string("tensor \"") + kName +
                                               ".permutation\" of module \"" + kWeight +
                                               "\": " + wrong.part))
        << status.message();
    EXPECT_FALSE(DequantizeCheckpoint(source(), out(), DType::kF32, false).ok());
  }
}

TEST_F(PermutedDirectory, AnotherShapeIsMalformed) {
  Json config = Json::parse(testing::ReadFile(source() + "/config.json"));
  const Checkpoint opened = *Checkpoint::Open(source());
  std::vector<TestTensor> tensors;
  for (const TensorInfo& tensor : opened.tensors()) {
    const TensorView view = *opened.Tensor(tensor.name);
    tensors.push_back({tensor.name, tensor.dtype, tensor.shape,
                       std::string(view.As<char>(), static_cast<size_t>(view.ByteCount()))});
  }
  for (TestTensor& tensor : tensors) {
    if (!tensor.name.ends_with(".permutation")) continue;
    tensor.shape = {63};
    tensor.data.resize(63 * 4);
  }
  WriteFile(source() + "/model.safetensors", testing::BuildSafetensors(tensors));
  ExpectError("expected i32 [64], got i32 [63]");
  std::erase_if(tensors, [](const TestTensor& t) { return t.name.ends_with(".permutation"); });
  WriteFile(source() + "/model.safetensors", testing::BuildSafetensors(tensors));
  ExpectError("no tensor \"model.layers.0.self_attn.q_proj.permutation\"");
}

}  // namespace
}  // namespace marlin::act_order_test
