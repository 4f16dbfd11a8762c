// Every reader accepts the output of `quantize`: random models and recipes through the whole tool.
// MARLIN_PROPERTY_RUNS=5000 for more models, MARLIN_PROPERTY_SEED=17 to start at another one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "../unit/checkpoint/test_files.h"
#include "base/json.h"
#include "base/scalars.h"
#include "cli/commands/verification.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/model.h"
#include "marlin/quantize.h"

namespace marlin::checkpoint_properties_test {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryDirectory;
using testing::TestTensor;

int64_t FromEnvironment(const char* name, int64_t usual) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : usual;
}

struct SourceModel {
  std::vector<TestTensor> tensors;
  Json config = Json::object();
  bool is_decoder = false;
};

// Generates all parameters of a run from one seed.
class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) {}

  int64_t Below(int64_t count) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(count));
  }
  bool Chance(int64_t one_in) { return Below(one_in) == 0; }
  template <typename T>
  T Pick(const std::vector<T>& of) {
    return of[static_cast<size_t>(Below(static_cast<int64_t>(of.size())))];
  }

  SourceModel Model() { return Chance(3) ? Decoder() : Tensors(); }
  MixedPrecisionConfig Recipe(bool decoder);
  std::string Choice();
  TestTensor Float(const std::string& name, const Shape& shape, double size);

 private:
  SourceModel Tensors();
  SourceModel Decoder();
  void AddLayer(const std::string& prefix, const Json& c, SourceModel* model);
  void AddExperts(SourceModel* model);
  std::string Name();
  Shape AnyShape(int64_t rank);

  std::mt19937_64 random_;
};

TestTensor Maker::Float(const std::string& name, const Shape& shape, double size) {
  TestTensor tensor{
      name, Pick<DType>({DType::kBf16, DType::kBf16, DType::kF32, DType::kF16}), shape, {}};
  const bool sparse = Chance(8);
  for (int64_t i = 0; i < shape.ElementCount(); ++i) {
    const double unit = static_cast<double>(Below(1 << 20)) / (1 << 19) - 1.0;
    auto value = static_cast<float>(sparse && !Chance(9) ? 0.0 : unit * unit * unit * size);
    if (tensor.dtype == DType::kF32) {
      tensor.data.append(reinterpret_cast<const char*>(&value), 4);
      continue;
    }
    const uint16_t half = tensor.dtype == DType::kBf16
                              ? FloatToBf16(value)
                              : FloatToHalf(std::clamp(value, -60000.0f, 60000.0f));
    tensor.data.append(reinterpret_cast<const char*>(&half), 2);
  }
  return tensor;
}

Shape Maker::AnyShape(int64_t rank) {
  Shape shape;
  for (int64_t i = 0; i < rank; ++i) {
    shape.Append(Chance(40) ? 0 : Pick<int64_t>({1, 2, 3, 7, 16, 31, 32, 33, 64, 65}));
  }
  return shape;
}

std::string Maker::Name() {
  static const std::vector<std::string> kLeaves = {"q_proj",
                                                   "o_proj",
                                                   "up_proj",
                                                   "down_proj",
                                                   "gate",
                                                   "norm",
                                                   "embed_tokens",
                                                   "lm_head",
                                                   "fc1",
                                                   "a\"quote",
                                                   "tab\there",
                                                   "back\\slash",
                                                   "nul" + std::string(1, '\0'),
                                                   "\xc3\xa9t\xc3\xa9",
                                                   "star*",
                                                   "slash/..",
                                                   "line\nbreak",
                                                   "",
                                                   " ",
                                                   "experts.007.w1",
                                                   "\xe2\x80\xae"};
  std::string name = "model.layers." + std::to_string(Below(3)) + ".";
  if (Chance(3)) name += "self_attn.";
  name += Pick(kLeaves);
  if (Chance(12)) name.insert(0, static_cast<size_t>(900 + Below(90)), 'n');
  if (Chance(20)) name.insert(0, std::min<size_t>(1017 - name.size(), 1017), 'l');
  if (!Chance(5)) name += Pick<std::string>({".weight", ".weight", ".weight", ".bias", ".scales"});
  return name;
}

void Maker::AddExperts(SourceModel* model) {
  const std::string prefix = "model.layers." + std::to_string(Below(2)) + ".mlp.experts.";
  const Shape matrix{Pick<int64_t>({1, 3, 16, 33}), Pick<int64_t>({1, 16, 33, 64})};
  const double size = Pick<double>({1e-3, 0.1, 10.0});
  if (Chance(3)) {
    const Shape stack{1 + Below(5), matrix[0], matrix[1]};
    model->tensors.push_back(Float(prefix + "gate_up_proj", stack, size));
    return;
  }
  const int64_t count = Chance(4) ? 40 : 1 + Below(5);
  const int64_t gap = Chance(5) ? Below(count) : -1;
  for (int64_t e = 0; e < count; ++e) {
    if (e == gap) continue;
    const std::string name = prefix + std::to_string(e) + ".up_proj";
    model->tensors.push_back(Float(name + ".weight", matrix, size));
    if (Chance(6)) model->tensors.push_back(Float(name + ".bias", {matrix[0]}, size));
  }
}

SourceModel Maker::Tensors() {
  SourceModel model;
  if (Chance(2)) AddExperts(&model);
  const std::vector<DType> others = {DType::kBool, DType::kU8,  DType::kI8,    DType::kI16,
                                     DType::kU16,  DType::kI32, DType::kU32,   DType::kI64,
                                     DType::kU64,  DType::kF64, DType::kF8E4M3};
  for (int64_t i = Below(8); i >= 0; --i) {
    const Shape shape = AnyShape(Pick<int64_t>({0, 1, 1, 2, 2, 2, 2, 2, 3, 5}));
    if (shape.ElementCount() > 300000) continue;
    const std::string name = Name();
    if (Chance(6)) {
      const DType dtype = Pick(others);
      const int64_t bytes = shape.ElementCount() * DTypeBytes(dtype);
      model.tensors.push_back({name, dtype, shape, std::string(static_cast<size_t>(bytes), '\1')});
    } else {
      model.tensors.push_back(Float(name, shape, Pick<double>({1e-7, 1e-3, 0.1, 0.1, 100, 1e30})));
    }
  }
  if (Chance(2))
    model.config["model_type"] = Pick<std::string>({"gpt2", "gpt_oss", "new", "llama"});
  if (Chance(3)) model.config["dtype"] = "float32";
  if (Chance(4)) model.config["quantization_config"] = nullptr;
  return model;
}

void Maker::AddLayer(const std::string& prefix, const Json& c, SourceModel* model) {
  const int64_t hidden = c["hidden_size"];
  const int64_t head = c["head_dim"];
  const int64_t queries = c["num_attention_heads"].get<int64_t>() * head;
  const int64_t keys = c["num_key_value_heads"].get<int64_t>() * head;
  const std::string type = c["model_type"];
  const auto add = [&](const std::string& name, const Shape& shape) {
    model->tensors.push_back(Float(prefix + name, shape, 0.2));
  };
  add("input_layernorm.weight", {hidden});
  add("post_attention_layernorm.weight", {hidden});
  const std::map<std::string, Shape> attention = {{"q_proj", {queries, hidden}},
                                                  {"k_proj", {keys, hidden}},
                                                  {"v_proj", {keys, hidden}},
                                                  {"o_proj", {hidden, queries}}};
  for (const auto& [name, shape] : attention) {
    add("self_attn." + name + ".weight", shape);
    if (type == "qwen2" && name != "o_proj") add("self_attn." + name + ".bias", {shape[0]});
  }
  if (type.starts_with("qwen3")) {
    add("self_attn.q_norm.weight", {head});
    add("self_attn.k_norm.weight", {head});
  }
  const auto add_mlp = [&](const std::string& mlp, int64_t width) {
    add(mlp + "gate_proj.weight", {width, hidden});
    add(mlp + "up_proj.weight", {width, hidden});
    add(mlp + "down_proj.weight", {hidden, width});
  };
  if (type != "qwen3_moe") return add_mlp("mlp.", c["intermediate_size"]);
  const int64_t experts = c["num_experts"];
  add("mlp.gate.weight", {experts, hidden});
  for (int64_t e = 0; e < experts; ++e) {
    add_mlp("mlp.experts." + std::to_string(e) + ".", c["moe_intermediate_size"]);
  }
}

SourceModel Maker::Decoder() {
  SourceModel model;
  model.is_decoder = true;
  const int64_t heads = 1 + Below(3);
  const int64_t experts = 2 + Below(5);
  Json& c = model.config;
  c = {{"model_type", Pick<std::string>({"llama", "qwen2", "qwen3", "qwen3_moe"})},
       {"hidden_size", Pick<int64_t>({32, 33, 48, 64, 130})},
       {"num_hidden_layers", 1 + Below(2)},
       {"num_attention_heads", heads},
       {"num_key_value_heads", Chance(2) ? heads : 1},
       {"head_dim", Pick<int64_t>({2, 16, 32})},
       {"intermediate_size", Pick<int64_t>({1, 17, 33, 64, 96})},
       {"moe_intermediate_size", Pick<int64_t>({1, 16, 33, 35})},
       {"num_experts", experts},
       {"num_experts_per_tok", 1 + Below(experts)},
       {"norm_topk_prob", Chance(2)},
       {"vocab_size", Pick<int64_t>({2, 33, 64, 127})},
       {"max_position_embeddings", 64},
       {"rms_norm_eps", 1e-6},
       {"rope_theta", 10000.0},
       {"tie_word_embeddings", Chance(2)},
       {"eos_token_id", 0}};
  const Shape table{c["vocab_size"].get<int64_t>(), c["hidden_size"].get<int64_t>()};
  model.tensors.push_back(Float("model.embed_tokens.weight", table, 0.2));
  for (int64_t i = 0; i < c["num_hidden_layers"]; ++i) {
    AddLayer("model.layers." + std::to_string(i) + ".", c, &model);
  }
  model.tensors.push_back(Float("model.norm.weight", {table[1]}, 0.2));
  if (c["tie_word_embeddings"] == false) {
    model.tensors.push_back(Float("lm_head.weight", table, 0.2));
  }
  return model;
}

std::string Maker::Choice() {
  std::vector<std::string> formats;
  for (const FormatInfo& info : AllFormats()) formats.emplace_back(info.name);
  std::string choice = Pick(formats);
  choice += "/g" + Pick<std::string>({"K", "16", "32", "64", "128"});
  if (Chance(2)) choice += "/" + Pick<std::string>({"fp16", "bf16", "fp32", "e8m0", "e4m3"});
  if (Chance(4)) choice += "/sym";
  return choice;
}

MixedPrecisionConfig Maker::Recipe(bool decoder) {
  for (;;) {
    Result<MixedPrecisionConfig> recipe = MixedPrecisionConfig::Uniform(Choice());
    if (!recipe.ok()) continue;  // Not every format supports every scale type.
    if (Chance(4)) recipe = MixedPrecisionConfig::DefaultMoe();
    if (Chance(6)) recipe = MixedPrecisionConfig::AggressiveMoe();
    for (int64_t i = Below(3); i > 0; --i) {
      // Runnable decoders keep their norms and routers, and with uniform recipes their embeddings.
      const std::string pattern = Pick<std::string>(
          {"*down_proj*", "*experts.1.*", "*q_proj*", decoder ? "*o_proj*" : "*"});
      const Result<FormatChoice> choice = ParseFormatChoice(Chance(4) ? "keep" : Choice());
      EXPECT_TRUE(!choice.ok() || recipe->AddOverride({pattern, false, *choice}).ok());
    }
    return *std::move(recipe);
  }
}

// Takes one random model through every reader.
class Journey {
 public:
  Journey(uint64_t seed, const Device& device) : maker_(seed), device_(device) {
    source_ = directory_ / "source";
    output_ = directory_ / "out";
  }
  /// Whether the model could be quantized.
  bool Run();

 private:
  void WriteSource();
  void WriteIndexed();
  void CheckRefusal(const Status& status, const std::string& path) const;
  void CheckRead(const Checkpoint& quantized);
  void CheckProduct(const QuantizedWeights& weights);
  void CheckBack(DType dtype);
  void CheckDecoder(const std::string& path);

  Maker maker_;
  const Device& device_;
  TemporaryDirectory directory_{testing::MemoryDirectory()};
  std::string source_;
  std::string output_;
  SourceModel model_;
  QuantizeCheckpointOptions options_;
};

void Journey::WriteIndexed() {
  const size_t parts = std::min<size_t>(model_.tensors.size(), 3);
  std::vector<std::vector<TestTensor>> shards(parts);
  Json map = Json::object();
  for (size_t i = 0; i < model_.tensors.size(); ++i) {
    shards[i % parts].push_back(model_.tensors[i]);
    map[model_.tensors[i].name] = "part-" + std::to_string(i % parts) + ".safetensors";
  }
  for (size_t i = 0; i < parts; ++i) {
    testing::WriteFile(source_ + "/part-" + std::to_string(i) + ".safetensors",
                       testing::BuildSafetensors(shards[i]));
  }
  testing::WriteFile(source_ + "/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
}

void Journey::WriteSource() {
  model_ = maker_.Model();
  std::set<std::string> names;
  std::erase_if(model_.tensors, [&](const TestTensor& t) { return !names.insert(t.name).second; });
  fs::create_directory(source_);
  if (maker_.Chance(2) && !model_.tensors.empty()) {
    WriteIndexed();
  } else {
    testing::WriteFile(source_ + "/model.safetensors", testing::BuildSafetensors(model_.tensors));
  }
  testing::WriteFile(source_ + "/config.json", model_.config.dump());
  testing::WriteFile(source_ + "/tokenizer.json", "{}");
  options_.recipe = maker_.Recipe(model_.is_decoder);
  options_.shard_bytes = maker_.Pick<int64_t>({1, 1000, 30000, int64_t{5} << 30});
  if (maker_.Chance(5)) options_.method = QuantizeMethod::kMse;
}

// A refusal gives the reason in one line and leaves no files.
void Journey::CheckRefusal(const Status& status, const std::string& path) const {
  const std::set<Code> allowed = {Code::kUnsupported, Code::kInvalidArgument, Code::kMalformedFile};
  EXPECT_TRUE(allowed.contains(status.code())) << status.message();
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
  EXPECT_FALSE(fs::exists(path));
  for (const std::string& name : directory_.Entries()) {
    EXPECT_EQ(name.find(".partial-"), std::string::npos) << name;
  }
}

void Journey::CheckProduct(const QuantizedWeights& weights) {
  const Result<PreparedWeights> prepared = Prepare(weights, device_);
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  if (weights.spec.experts != 1) return;
  const int64_t rows = 1 + maker_.Below(4);
  std::vector<float> input(static_cast<size_t>(rows * weights.spec.k), 0x1p-6f);
  std::vector<float> output(static_cast<size_t>(rows * weights.spec.n), -1);
  const Status product = Gemm(device_, {input.data(), DType::kF32, {rows, weights.spec.k}},
                              *prepared, {output.data(), DType::kF32, {rows, weights.spec.n}});
  EXPECT_TRUE(product.ok()) << product.message();
}

void Journey::CheckRead(const Checkpoint& quantized) {
  const Status checksums = quantized.VerifyChecksums();
  EXPECT_TRUE(checksums.ok()) << checksums.message();
  for (const QuantizedModule& module : quantized.modules()) {
    const Result<QuantizedWeights> weights = quantized.Weights(module.name);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    CheckProduct(*weights);
  }
  const Result<Checkpoint> source = Checkpoint::Open(source_);
  ASSERT_TRUE(source.ok()) << source.status().message();
  const Result<cli::Comparison> compared = cli::CompareCheckpoints(quantized, *source);
  ASSERT_TRUE(compared.ok()) << compared.status().message();
  // The largest values may overflow only their own sums of squares.
  EXPECT_FALSE(std::isnan(compared->total.max_error));
  EXPECT_EQ(compared->total.parameters, [&] {
    int64_t sum = 0;
    for (const TestTensor& tensor : model_.tensors) {
      const bool floating = tensor.dtype == DType::kF32 || tensor.dtype == DType::kBf16 ||
                            tensor.dtype == DType::kF16 || tensor.dtype == DType::kF64;
      if (floating) sum += tensor.shape.ElementCount();
    }
    return sum;
  }());
}

// The dequantized model has the original names and shapes, and can be quantized again.
void Journey::CheckBack(DType dtype) {
  const std::string back = directory_ / ("back-" + std::string(DTypeName(dtype)));
  const Status status = DequantizeCheckpoint(output_, back, dtype, false);
  if (!status.ok()) {
    EXPECT_NE(dtype, DType::kF32) << status.message();
    return CheckRefusal(status, back);
  }
  const Result<Checkpoint> plain = Checkpoint::Open(back);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  EXPECT_TRUE(plain->VerifyChecksums().ok());
  ASSERT_EQ(plain->tensors().size(), model_.tensors.size());
  for (const TestTensor& tensor : model_.tensors) {
    const TensorInfo* found = plain->Find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->shape, tensor.shape) << tensor.name;
  }
  if (model_.is_decoder) CheckDecoder(back);
  const std::string again = directory_ / "again";
  const Result<QuantizeCheckpointReport> report = QuantizeCheckpoint(back, again, options_);
  if (!report.ok()) return CheckRefusal(report.status(), again);
  const Result<Checkpoint> opened = Checkpoint::Open(again);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_TRUE(opened->VerifyChecksums().ok());
  fs::remove_all(again);
}

void Journey::CheckDecoder(const std::string& path) {
  const Result<Model> model = Model::Open(path, device_);
  ASSERT_TRUE(model.ok()) << model.status().message();
  Result<Sequence> sequence = model->NewSequence();
  ASSERT_TRUE(sequence.ok()) << sequence.status().message();
  const int64_t vocab = model_.config["vocab_size"];
  std::vector<float> logits(static_cast<size_t>(vocab));
  const std::vector<int32_t> tokens = {1, 0, 1};
  const std::vector<SequenceInput> inputs = {{&*sequence, tokens}};
  const Status status = model->Forward(inputs, {logits.data(), DType::kF32, {1, vocab}});
  EXPECT_TRUE(status.ok()) << status.message();
  for (const float logit : logits) EXPECT_TRUE(std::isfinite(logit));
}

bool Journey::Run() {
  WriteSource();
  options_.dry_run = true;
  const Result<QuantizeCheckpointReport> planned = QuantizeCheckpoint(source_, output_, options_);
  EXPECT_FALSE(fs::exists(output_));
  options_.dry_run = false;
  const Result<QuantizeCheckpointReport> report = QuantizeCheckpoint(source_, output_, options_);
  if (!report.ok()) {
    CheckRefusal(report.status(), output_);
    return false;
  }
  EXPECT_TRUE(planned.ok()) << planned.status().message();
  EXPECT_TRUE(!planned.ok() || planned->bytes == report->bytes);
  const Result<Checkpoint> quantized = Checkpoint::Open(output_);
  EXPECT_TRUE(quantized.ok()) << quantized.status().message();
  if (!quantized.ok()) return true;
  CheckRead(*quantized);
  if (model_.is_decoder) CheckDecoder(output_);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) CheckBack(dtype);
  return true;
}

TEST(CheckpointProperties, WhatIsWrittenCanBeRead) {
  const int64_t runs = FromEnvironment("MARLIN_PROPERTY_RUNS", 250);
  const int64_t first = FromEnvironment("MARLIN_PROPERTY_SEED", 1);
  DeviceOptions options;
  options.threads = 2;
  const Result<Device> device = Device::Open("cpu", options);
  ASSERT_TRUE(device.ok()) << device.status().message();
  int64_t written = 0;
  for (int64_t seed = first; seed < first + runs; ++seed) {
    SCOPED_TRACE("MARLIN_PROPERTY_SEED=" + std::to_string(seed));
    written += Journey(static_cast<uint64_t>(seed), *device).Run() ? 1 : 0;
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_TRUE(::testing::Test::HasFailure() || 2 * written > runs) << written << " of " << runs;
}

}  // namespace
}  // namespace marlin::checkpoint_properties_test
