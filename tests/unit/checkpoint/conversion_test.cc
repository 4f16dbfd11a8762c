// Quantizing small purpose-made checkpoints: stacks, layouts, refusals, resuming.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>

#include "marlin/checkpoint.h"
#include "test_files.h"

namespace marlin::conversion_test {
namespace {

namespace fs = std::filesystem;
using testing::BuildSafetensors;
using testing::Contains;
using testing::RandomBf16;
using testing::RandomF32;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

const char kQProj[] = "model.layers.0.self_attn.q_proj.weight";
const char kUp[] = "model.layers.0.mlp.experts.*.up_proj.weight";

std::string ExpertName(int64_t expert) {
  return "model.layers.0.mlp.experts." + std::to_string(expert) + ".up_proj.weight";
}

class Conversion : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
    source_ = directory_ / "source";
    output_ = directory_ / "out";
    fs::create_directory(source_);
  }
  void Source(const std::vector<TestTensor>& tensors, const std::string& config = "{}") {
    WriteFile(source_ + "/model.safetensors", BuildSafetensors(tensors));
    WriteFile(source_ + "/config.json", config);
  }
  Result<QuantizeCheckpointReport> Run() const {
    return QuantizeCheckpoint(source_, output_, options_);
  }
  void ExpectOk() {
    const auto report = Run();
    ASSERT_TRUE(report.ok()) << report.status().message();
    report_ = *report;
  }
  void ExpectError(Code code, const std::string& part) {
    const auto report = Run();
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.status().code(), code) << report.status().message();
    EXPECT_TRUE(Contains(report.status().message(), part)) << report.status().message();
    EXPECT_FALSE(Contains(report.status().message(), "\n"));
  }
  void ExpectNothingWritten() const {
    EXPECT_EQ(directory_.Entries(), std::vector<std::string>{"source"});
  }
  Checkpoint Opened() const {
    Result<Checkpoint> opened = Checkpoint::Open(output_);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return std::move(*opened);
  }
  void Override(const std::string& pattern, const std::string& choice) {
    const Result<FormatChoice> parsed = ParseFormatChoice(choice);
    ASSERT_TRUE(parsed.ok());
    ASSERT_TRUE(options_.recipe.AddOverride({pattern, false, *parsed}).ok());
  }

  TemporaryDirectory directory_;
  std::string source_;
  std::string output_;
  QuantizeCheckpointOptions options_;
  QuantizeCheckpointReport report_;
};

// The weights of one expert (or the only matrix) must equal those of quantizing its tensor alone.
void ExpectSameAsAlone(const QuantizedWeights& weights, int64_t expert, const TestTensor& dense,
                       bool transpose) {
  const TensorView view(dense.data.data(), dense.dtype, dense.shape);
  QuantizeOptions options;
  options.format = weights.spec.format;
  options.group_size = weights.spec.group_size;
  options.scale_type = weights.spec.scale_type;
  const auto alone = Quantize(transpose ? view.Transposed() : view, options);
  ASSERT_TRUE(alone.ok()) << alone.status().message();
  ASSERT_EQ(alone->spec.k, weights.spec.k);
  ASSERT_EQ(alone->spec.n, weights.spec.n);
  const auto expect_part = [&](const TensorView& whole, const TensorView& part) {
    ASSERT_EQ(whole.dtype(), part.dtype());
    const auto bytes = static_cast<size_t>(part.ByteCount());
    const auto* data = static_cast<const char*>(whole.data()) + static_cast<size_t>(expert) * bytes;
    EXPECT_EQ(std::memcmp(data, part.data(), bytes), 0);
  };
  expect_part(weights.codes, alone->codes);
  expect_part(weights.scales, alone->scales);
}

TEST_F(Conversion, ExpertsAreStackedUnderOneName) {
  std::vector<TestTensor> tensors = {RandomBf16(kQProj, {32, 64}, 1)};
  for (int64_t e : {2, 0, 1}) {
    tensors.push_back(RandomBf16(ExpertName(e), {16, 64}, static_cast<uint32_t>(10 + e)));
  }
  Source(tensors);
  ExpectOk();
  EXPECT_EQ(report_.quantized_parameters, report_.parameters);
  EXPECT_EQ(report_.coverage, 1.0);
  const Checkpoint opened = Opened();
  ASSERT_EQ(opened.modules().size(), 2u);
  EXPECT_EQ(opened.modules()[0].name, kUp);
  EXPECT_EQ(opened.modules()[0].layer_class, LayerClass::kMoeExpert);
  EXPECT_EQ(opened.modules()[0].spec.experts, 3);
  const TensorInfo* words = opened.Find("model.layers.0.mlp.experts.up_proj.qweight");
  ASSERT_NE(words, nullptr);
  EXPECT_EQ(words->shape, (Shape{3, 8, 16}));
  const auto weights = opened.Weights(kUp);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  for (int64_t e = 0; e < 3; ++e) {
    ExpectSameAsAlone(*weights, e, RandomBf16("", {16, 64}, static_cast<uint32_t>(10 + e)), true);
  }
}

TEST_F(Conversion, ExpertsThatDifferAreStoredUnderTheirOwnNames) {
  Source({RandomBf16(ExpertName(0), {16, 64}, 1), RandomBf16(ExpertName(1), {16, 64}, 2)});
  Override("*.experts.1.*", "s8/g64");
  ExpectOk();
  const Checkpoint opened = Opened();
  ASSERT_EQ(opened.modules().size(), 2u);
  EXPECT_EQ(opened.modules()[0].name, ExpertName(0));
  EXPECT_EQ(opened.modules()[0].spec.format, Format::kFp4E2M1);
  EXPECT_EQ(opened.modules()[1].spec.format, Format::kS8);
}

TEST_F(Conversion, ExpertsOfWhichSomeAreKeptAreNotStacked) {
  Source({RandomBf16(ExpertName(0), {16, 64}, 1), RandomBf16(ExpertName(1), {16, 64}, 2),
          RandomBf16(ExpertName(2), {16, 64}, 3)});
  for (const char* choice : {"keep", "bf16"}) {
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
    options_.overwrite = true;
    Override("*.experts.2.*", choice);
    ExpectOk();
    const Checkpoint opened = Opened();
    ASSERT_EQ(opened.modules().size(), 2u);
    EXPECT_EQ(opened.modules()[0].name, ExpertName(0));
    EXPECT_EQ(opened.modules()[1].name, ExpertName(1));
    EXPECT_NE(opened.Find(ExpertName(2)), nullptr);
  }
}

TEST_F(Conversion, ExpertsWithGapsOrOtherShapesAreNotStacked) {
  Source({RandomBf16(ExpertName(0), {16, 64}, 1), RandomBf16(ExpertName(2), {16, 64}, 2),
          RandomBf16("a.experts.0.w1.weight", {16, 64}, 3),
          RandomBf16("a.experts.1.w1.weight", {32, 64}, 4),
          RandomBf16("b.experts.007.w1.weight", {32, 64}, 5)});
  ExpectOk();
  EXPECT_EQ(Opened().modules().size(), 5u);
  EXPECT_EQ(report_.coverage, 1.0);
}

TEST_F(Conversion, FusedExpertsAreQuantizedAsTheyAre) {
  const char kFused[] = "model.layers.0.mlp.experts.gate_up_proj";
  const TestTensor fused = RandomBf16(kFused, {2, 32, 64}, 9);
  Source({fused});
  ExpectOk();
  const Checkpoint opened = Opened();
  ASSERT_EQ(opened.modules().size(), 1u);
  EXPECT_EQ(opened.modules()[0].name, kFused);
  const auto weights = opened.Weights(kFused);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_EQ(weights->spec.k, 64);
  EXPECT_EQ(weights->spec.n, 32);
  for (size_t e = 0; e < 2; ++e) {
    const TestTensor expert{"", DType::kBf16, {32, 64}, fused.data.substr(e * 4096, 4096)};
    ExpectSameAsAlone(*weights, static_cast<int64_t>(e), expert, true);
  }
  // Converted back, it has the original name and shape.
  ASSERT_TRUE(DequantizeCheckpoint(output_, directory_ / "back", DType::kF16, false).ok());
  const auto back = Checkpoint::Open(directory_ / "back");
  ASSERT_TRUE(back.ok());
  ASSERT_NE(back->Find(kFused), nullptr);
  EXPECT_EQ(back->Find(kFused)->shape, (Shape{2, 32, 64}));
  EXPECT_EQ(back->Find(kFused)->dtype, DType::kF16);
}

TEST_F(Conversion, ArchitecturesThatStoreInOutAreNotTransposed) {
  const char kFused[] = "model.layers.0.mlp.experts.down_proj";
  const TestTensor fused = RandomF32(kFused, {1, 64, 32}, 9);
  Source({fused}, R"({"model_type": "gpt_oss"})");
  ExpectOk();
  const auto weights = Opened().Weights(kFused);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->spec.k, 64);
  EXPECT_EQ(weights->spec.n, 32);
  ExpectSameAsAlone(*weights, 0, {"", DType::kF32, {64, 32}, fused.data}, false);
  ASSERT_TRUE(DequantizeCheckpoint(output_, directory_ / "back", DType::kF32, false).ok());
  const auto back = Checkpoint::Open(directory_ / "back");
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->Find(kFused)->shape, (Shape{1, 64, 32}));
  const float* values = back->Tensor(kFused)->As<float>();
  const float* original = reinterpret_cast<const float*>(fused.data.data());
  for (int i = 0; i < 64 * 32; ++i) EXPECT_NEAR(values[i], original[i], 0.05f);
}

// At most one of two stacks is square, so that the other one tells.
TEST_F(Conversion, StacksOfExpertsHaveTheLayoutThatTheirShapesSay) {
  options_.overwrite = true;
  const std::string up = "model.layers.0.mlp.experts.gate_up_proj";
  const std::string down = "model.layers.0.mlp.experts.down_proj";
  for (const char* const type : {"qwen3_vl_moe_text", "llama4_text", "qwen3_moe", "other"}) {
    for (const int64_t inner : {16, 32, 48}) {
      for (const bool in_out : {false, true}) {
        const Shape up_shape = in_out ? Shape{2, 32, 2 * inner} : Shape{2, 2 * inner, 32};
        const Shape down_shape = in_out ? Shape{2, inner, 32} : Shape{2, 32, inner};
        Source({RandomF32(up, up_shape, 1), RandomF32(down, down_shape, 2)},
               nlohmann::json{{"model_type", type}}.dump());
        ExpectOk();
        const Checkpoint opened = Opened();
        const auto up_weights = opened.Weights(up);
        const auto down_weights = opened.Weights(down);
        ASSERT_TRUE(up_weights.ok() && down_weights.ok());
        EXPECT_EQ(up_weights->spec.k, 32);
        EXPECT_EQ(up_weights->spec.n, 2 * inner);
        EXPECT_EQ(down_weights->spec.k, inner);
        EXPECT_EQ(down_weights->spec.n, 32);
      }
    }
  }
  Source({RandomF32(up, {2, 32, 64}, 1), RandomF32(down, {2, 32, 48}, 2)},
         R"({"model_type": "qwen3_moe"})");
  ExpectOk();
  ASSERT_EQ(report_.skipped.size(), 2U);
  for (const SkippedTensor& tensor : report_.skipped) {
    EXPECT_NE(tensor.reason.find("neither [experts, out, in] nor"), std::string::npos);
  }
}

TEST_F(Conversion, SourcesNeedNotBeAligned) {
  // One byte before the other data.
  Source({{"a", DType::kU8, {1}, "x"}, RandomBf16(kQProj, {32, 64}, 3)});
  ExpectOk();
  const auto weights = Opened().Weights(kQProj);
  ASSERT_TRUE(weights.ok());
  ExpectSameAsAlone(*weights, 0, RandomBf16("", {32, 64}, 3), true);
}

TEST_F(Conversion, KeptTensorsAreCopiedByteForByte) {
  const TestTensor norm = RandomBf16("model.norm.weight", {77}, 4);
  const TestTensor embedding = RandomF32("model.embed_tokens.weight", {5, 64}, 5);
  const TestTensor ids{"model.ids", DType::kI64, {2}, "0123456789abcdef"};
  Source({norm, embedding, ids, {"none", DType::kF32, {0, 4}, ""}});
  Override("*.embed_tokens.*", "keep");
  ExpectOk();
  const Checkpoint opened = Opened();
  for (const TestTensor& tensor : {norm, embedding, ids}) {
    const auto view = opened.Tensor(tensor.name);
    ASSERT_TRUE(view.ok()) << tensor.name;
    EXPECT_EQ(view->dtype(), tensor.dtype);
    EXPECT_EQ(std::string(view->As<char>(), static_cast<size_t>(view->ByteCount())), tensor.data);
  }
  EXPECT_NE(opened.Find("none"), nullptr);
  EXPECT_EQ(report_.coverage, 0.0);
  ASSERT_EQ(report_.skipped.size(), 1u);
  EXPECT_EQ(report_.skipped[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(report_.skipped[0].reason, "the recipe keeps embedding");
}

TEST_F(Conversion, SixteenBitFormatsAreCasts) {
  const TestTensor dense = RandomF32(kQProj, {32, 64}, 3);
  Source({dense});
  Override("*", "bf16");
  ExpectOk();
  const Checkpoint opened = Opened();
  EXPECT_TRUE(opened.modules().empty());
  ASSERT_NE(opened.Find(kQProj), nullptr);
  EXPECT_EQ(opened.Find(kQProj)->dtype, DType::kBf16);
  EXPECT_EQ(opened.Find(kQProj)->shape, (Shape{32, 64}));
  const TestTensor rounded = RandomBf16(kQProj, {32, 64}, 3);
  EXPECT_EQ(std::memcmp(opened.Tensor(kQProj)->data(), rounded.data.data(), 32 * 64 * 2), 0);
}

TEST_F(Conversion, EveryScaleTypeAndPartRoundTrips) {
  const std::map<std::string, std::vector<std::string>> parts = {
      {"fp4_e2m1/g16/e4m3", {"qweight", "scales", "global_scale"}},
      {"fp4_e2m1/g32/e8m0", {"qweight", "scales"}},
      {"u4/g32/bf16", {"qweight", "scales", "zeros"}},
      {"nf3/g64/fp32", {"qweight", "scales", "codebook"}},
      {"int2/g16", {"qweight", "scales", "zeros"}},
      {"int3/g16/sym", {"qweight", "scales"}},
  };
  for (const auto& [choice, expected] : parts) {
    SCOPED_TRACE(choice);
    options_.recipe = MixedPrecisionConfig::DefaultMoe();
    Override("*", choice);
    options_.overwrite = true;
    Source({RandomBf16(ExpertName(0), {17, 50}, 1), RandomBf16(ExpertName(1), {17, 50}, 2)});
    ExpectOk();
    const Checkpoint opened = Opened();
    EXPECT_EQ(opened.tensors().size(), expected.size());
    for (const std::string& part : expected) {
      EXPECT_NE(opened.Find("model.layers.0.mlp.experts.up_proj." + part), nullptr) << part;
    }
    const auto weights = opened.Weights(kUp);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_TRUE(opened.VerifyChecksums().ok());
    fs::remove_all(directory_ / "back");
    const Status back = DequantizeCheckpoint(output_, directory_ / "back", DType::kF32, false);
    ASSERT_TRUE(back.ok()) << back.message();
    const auto plain = Checkpoint::Open(directory_ / "back");
    ASSERT_TRUE(plain.ok());
    EXPECT_TRUE(plain->VerifyChecksums().ok());
    // Expert 1 of the stack, dequantized as a whole, equals the separately written matrix.
    std::vector<float> whole(2 * 50 * 17);
    ASSERT_TRUE(
        Dequantize(*weights, MutableTensorView(whole.data(), DType::kF32, {2, 50, 17})).ok());
    const float* one = plain->Tensor(ExpertName(1))->As<float>();
    for (size_t n = 0; n < 17; ++n) {
      for (size_t k = 0; k < 50; ++k) {
        ASSERT_EQ(one[n * 50 + k], whole[50 * 17 + k * 17 + n]) << k << " " << n;
      }
    }
  }
}

TEST_F(Conversion, ShardsAreCutAndListed) {
  std::vector<TestTensor> tensors;
  for (uint32_t i = 0; i < 6; ++i) {
    tensors.push_back(
        RandomBf16("model.layers." + std::to_string(i) + ".self_attn.q_proj.weight", {32, 64}, i));
  }
  Source(tensors);
  options_.shard_bytes = 3000;  // A module takes 1,088 bytes.
  ExpectOk();
  EXPECT_TRUE(fs::exists(output_ + "/model-00001-of-00003.safetensors"));
  EXPECT_TRUE(fs::exists(output_ + "/model.safetensors.index.json"));
  EXPECT_FALSE(fs::exists(output_ + "/model.safetensors"));
  const Checkpoint opened = Opened();
  EXPECT_EQ(opened.modules().size(), 6u);
  for (const TensorInfo& tensor : opened.tensors()) EXPECT_EQ(tensor.offset % 64, 0) << tensor.name;
  options_.shard_bytes = 0;
  options_.overwrite = true;
  ExpectError(Code::kInvalidArgument, "shard_bytes: expected at least 1, got 0");
}

TEST_F(Conversion, SideFilesAreCopiedAndOtherWeightsAreNot) {
  Source({RandomBf16(kQProj, {32, 64}, 3)}, R"({"model_type": "llama", "hidden_size": 64})");
  for (const char* name : {"tokenizer.json", "merges.txt", "tokenizer.model", "chat.jinja",
                           "LICENSE", "pytorch_model.bin", "x.gguf", "x.pt", ".hidden.json"}) {
    WriteFile(source_ + "/" + name, name);
  }
  ExpectOk();
  for (const char* name :
       {"tokenizer.json", "merges.txt", "tokenizer.model", "chat.jinja", "LICENSE"}) {
    EXPECT_EQ(ReadFile(output_ + "/" + name), name);
  }
  for (const char* name : {"pytorch_model.bin", "x.gguf", "x.pt", ".hidden.json"}) {
    EXPECT_FALSE(fs::exists(output_ + "/" + name)) << name;
  }
  const std::string config = ReadFile(output_ + "/config.json");
  EXPECT_TRUE(Contains(config, "\"hidden_size\": 64"));
  EXPECT_TRUE(Contains(config, "\"quant_method\": \"metal_marlin\""));
}

TEST_F(Conversion, DequantizedConfigIsPlain) {
  Source({RandomBf16(kQProj, {32, 64}, 3)}, R"({"model_type": "llama", "dtype": "bfloat16"})");
  ExpectOk();
  ASSERT_TRUE(DequantizeCheckpoint(output_, directory_ / "back", DType::kF16, false).ok());
  const std::string config = ReadFile(directory_ / "back/config.json");
  EXPECT_FALSE(Contains(config, "quantization_config"));
  EXPECT_TRUE(Contains(config, "\"dtype\": \"float16\""));
  EXPECT_EQ(DequantizeCheckpoint(output_, directory_ / "x", DType::kI32, false).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(DequantizeCheckpoint(source_, directory_ / "x", DType::kF32, false).code(),
            Code::kInvalidArgument);
}

TEST_F(Conversion, NonFiniteWeightsAreNamedAndNothingIsLeft) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    TestTensor dense = RandomF32(kQProj, {32, 64}, 3);
    std::memcpy(dense.data.data() + 4 * (5 * 64 + 7), &bad, 4);
    Source({dense});
    ExpectError(Code::kNonFiniteInput, "[7, 5]");
    ExpectError(Code::kNonFiniteInput, kQProj);
    ExpectError(Code::kNonFiniteInput, source_ + "/model.safetensors");
    ExpectNothingWritten();
    options_.resume = true;  // Nor is anything kept for --resume.
  }
}

TEST_F(Conversion, StrictRefusesWhatCannotBeQuantized) {
  TestTensor integers = RandomBf16(kQProj, {32, 64}, 3);
  integers.dtype = DType::kI16;
  Source({integers});
  ExpectOk();
  ASSERT_EQ(report_.skipped.size(), 1u);
  EXPECT_EQ(report_.skipped[0].reason, "i16 is not f32, bf16 or f16");
  options_.overwrite = true;
  options_.strict = true;
  ExpectError(Code::kUnsupported, "i16 is not f32, bf16 or f16");
}

TEST_F(Conversion, DryRunWritesNothing) {
  Source({RandomBf16(kQProj, {32, 64}, 3), RandomBf16("model.norm.weight", {64}, 1)});
  options_.dry_run = true;
  ExpectOk();
  ExpectNothingWritten();
  const QuantizeCheckpointReport planned = report_;
  options_.dry_run = false;
  ExpectOk();
  EXPECT_EQ(planned.bytes, report_.bytes);
  EXPECT_EQ(planned.parameters, report_.parameters);
  EXPECT_EQ(planned.bits_per_weight, report_.bits_per_weight);
}

TEST_F(Conversion, BadGroupSizesAreRefusedBeforeAnythingIsWritten) {
  Source({RandomBf16(kQProj, {32, 64}, 3)});
  for (const int64_t group_size : {-1, 7, 17}) {
    FormatChoice choice;
    choice.keep = false;
    choice.group_size = group_size;
    options_.recipe.Set(LayerClass::kAttentionQkv, choice);
    ExpectError(Code::kInvalidArgument, std::to_string(group_size));
    ExpectError(Code::kInvalidArgument, kQProj);
    ExpectNothingWritten();
  }
}

TEST_F(Conversion, AnExistingOutputIsKept) {
  Source({RandomBf16(kQProj, {32, 64}, 3)});
  fs::create_directory(output_);
  WriteFile(output_ + "/precious", "x");
  ExpectError(Code::kInvalidArgument, "exists already");
  options_.overwrite = true;
  ExpectError(Code::kInvalidArgument, "exists and is not a checkpoint, so it is not replaced");
  WriteFile(output_ + "/config.json", "{}");
  fs::create_directory(output_ + "/folder");
  ExpectError(Code::kInvalidArgument, "holds the directory folder");
  EXPECT_EQ(ReadFile(output_ + "/precious"), "x");
  fs::remove(output_ + "/folder");
  ExpectOk();
  EXPECT_FALSE(fs::exists(output_ + "/precious"));
  fs::remove_all(output_);
  WriteFile(output_, "a file");
  ExpectError(Code::kInvalidArgument, "is not a directory");
  fs::remove(output_);
  fs::create_symlink("nowhere", output_);
  ExpectError(Code::kInvalidArgument, "is not a directory");
}

TEST_F(Conversion, OutputsThatCannotBe) {
  Source({RandomBf16(kQProj, {32, 64}, 3)});
  output_ = directory_ / "no/such/place";
  ExpectError(Code::kIo, "no such directory");
  for (const char* name : {"", ".", "..", "/"}) {
    output_ = name;
    options_.overwrite = true;
    ExpectError(Code::kInvalidArgument, "is not a name for a new directory");
  }
  output_ = source_;
  ExpectError(Code::kInvalidArgument, "the output would replace the source");
  output_ = directory_ / "out///";
  ExpectOk();
  EXPECT_TRUE(fs::exists(directory_ / "out/config.json"));
}

TEST_F(Conversion, QuantizedSourcesAreRefused) {
  Source({RandomBf16(kQProj, {32, 64}, 3)});
  ExpectOk();
  source_ = output_;
  output_ = directory_ / "again";
  ExpectError(Code::kInvalidArgument, "is quantized already, with metal_marlin");
  source_ = directory_ / "source";
  Source({RandomBf16(kQProj, {32, 64}, 3)}, R"({"quantization_config": {"quant_method": "exl3"}})");
  ExpectError(Code::kUnsupported, "quant_method \"exl3\" is not supported");
}

TEST_F(Conversion, NamesThatCollideAreRefused) {
  Source({RandomBf16(kQProj, {32, 64}, 3),
          {"model.layers.0.self_attn.q_proj.scales", DType::kF16, {1}, "xx"}});
  ExpectError(Code::kMalformedFile,
              "would both be stored as \"model.layers.0.self_attn.q_proj.scales\"");
}

TEST_F(Conversion, ProgressReachesTheTotal) {
  Source({RandomBf16(kQProj, {32, 64}, 3), RandomBf16(ExpertName(0), {16, 64}, 1),
          RandomBf16(ExpertName(1), {16, 64}, 2), RandomBf16("model.norm.weight", {64}, 1)});
  int64_t last = 0;
  int64_t total = 0;
  const Progress progress = [&](int64_t done, int64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  };
  options_.progress = progress;
  ExpectOk();
  EXPECT_EQ(last, 32 * 64 + 2 * 16 * 64 + 64);
  EXPECT_EQ(total, last);
  last = 0;
  ASSERT_TRUE(
      DequantizeCheckpoint(output_, directory_ / "back", DType::kF32, false, progress).ok());
  EXPECT_EQ(last, 32 * 64 + 2 * 16 * 64 + 64);
}

TEST_F(Conversion, ResultsDoNotDependOnSharding) {
  std::vector<TestTensor> tensors;
  for (uint32_t i = 0; i < 4; ++i) {
    tensors.push_back(RandomBf16(ExpertName(i), {32, 64}, i));
  }
  tensors.push_back(RandomBf16(kQProj, {32, 64}, 3));
  Source(tensors);
  ExpectOk();
  const Checkpoint one = Opened();
  output_ = directory_ / "second";
  options_.shard_bytes = 1;
  ExpectOk();
  const Checkpoint many = Opened();
  ASSERT_EQ(one.tensors().size(), many.tensors().size());
  for (const TensorInfo& tensor : one.tensors()) {
    EXPECT_EQ(std::memcmp(one.Tensor(tensor.name)->data(), many.Tensor(tensor.name)->data(),
                          static_cast<size_t>(tensor.bytes)),
              0);
  }
}

}  // namespace
}  // namespace marlin::conversion_test
