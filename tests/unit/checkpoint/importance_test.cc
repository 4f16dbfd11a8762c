// Importance matrices of llama.cpp: both forms of files, and quantization with them.
#include "marlin/importance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "../../source_directory.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"
#include "test_files.h"

namespace marlin::importance_test {
namespace {

using testing::Contains;
using testing::TemporaryDirectory;

const std::string kQwen = SourceDirectory() + "/examples/tiny-qwen3-moe";
const std::string kQuery = "model.layers.0.self_attn.q_proj.weight";

std::string Int(int32_t value) { return {reinterpret_cast<const char*>(&value), sizeof(value)}; }

/// One entry of the older form.
std::string Entry(const std::string& name, int32_t calls, const std::vector<float>& values) {
  std::string text = Int(static_cast<int32_t>(name.size())) + name + Int(calls) +
                     Int(static_cast<int32_t>(values.size()));
  text.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  return text;
}

void ExpectMalformed(const std::string& bytes, const std::string& part) {
  const auto read = ImportanceMatrix::FromBytes(bytes, "file");
  ASSERT_FALSE(read.ok()) << part;
  EXPECT_EQ(read.status().code(), Code::kMalformedFile) << read.status().message();
  EXPECT_TRUE(Contains(read.status().message(), part)) << read.status().message();
  EXPECT_TRUE(read.status().message().starts_with("file")) << read.status().message();
}

TEST(Importance, TheOlderFormHoldsMeansTimesCalls) {
  const auto read =
      ImportanceMatrix::FromBytes(Int(2) + Entry("a.weight", 2, {1.0f, 0.5f}) +
                                      Entry("b.weight", 1, {3.0f}) + Int(7) + Int(4) + "text",
                                  "file");
  ASSERT_TRUE(read.ok()) << read.status().message();
  ASSERT_EQ(read->inputs.size(), 2u);
  const ImportanceMatrix::Inputs& a = read->inputs.at("a.weight");
  EXPECT_EQ(a.k, 2);
  EXPECT_EQ(a.mean_squares, (std::vector<float>{0.5f, 0.25f}));
  EXPECT_EQ(a.counts, (std::vector<float>{2.0f}));
}

TEST(Importance, GgufKeepsWhatItIsGiven) {
  ImportanceMatrix written;
  written.inputs["blk.0.attn_q.weight"] = {1, 3, {0.5f, 0.0f, 2.0f}, {4.0f}};
  written.inputs["blk.0.ffn_up_exps.weight"] = {2, 2, {1.0f, 2.0f, 0.0f, 0.0f}, {8.0f, 0.0f}};
  const std::string file = written.ToGguf("text");
  const auto read = ImportanceMatrix::FromBytes(file, "file");
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(*read, written);
  // llama.cpp refuses a file without these.
  EXPECT_TRUE(Contains(file, "imatrix.datasets"));
  EXPECT_TRUE(Contains(file, "imatrix.chunk_count"));
  EXPECT_TRUE(Contains(file, "imatrix.chunk_size"));
  EXPECT_EQ(written.SummaryJson(),
            R"({"inputs":[{"name":"blk.0.attn_q.weight","experts":1,"k":3,"counts":[4.0],)"
            R"("mean_square":0.8333333333333334},{"name":"blk.0.ffn_up_exps.weight","experts":2,)"
            R"("k":2,"counts":[8.0,0.0],"mean_square":1.5}]})");
}

TEST(Importance, MalformedFilesAreRefused) {
  const std::string entry = Entry("a", 1, {1.0f, 2.0f});
  ExpectMalformed("", "ends at byte 0, before the number of entries");
  ExpectMalformed(Int(0), "number of entries: expected at least 1, got 0");
  ExpectMalformed(Int(2) + entry, "ends at byte");
  ExpectMalformed(Int(2) + entry + entry, "is there twice");
  ExpectMalformed(Int(1) + Int(1 << 30), "a name of 1073741824, but 0 bytes are left");
  ExpectMalformed(Int(1) + entry.substr(0, entry.size() - 1), "values of 2");
  ExpectMalformed(Int(1) + Entry("a", -1, {1.0f}), "number of calls: expected at least 0, got -1");
  ExpectMalformed(Int(1) + Entry("a", 1, {-1.0f}), "a sum of squares of -1");
  ExpectMalformed(Int(1) + Entry("a", 1, {NAN}), "a sum of squares of nan");

  ImportanceMatrix matrix;
  matrix.inputs["a"] = {1, 1, {1.0f}, {2.0f}};
  const std::string file = matrix.ToGguf("text");
  const auto with = [&file](const std::string& from, const std::string& to) {
    std::string changed = file;
    return changed.replace(changed.find(from), from.size(), to);
  };
  ExpectMalformed(with("imatrix", "model__"), "general.type: expected imatrix");
  ExpectMalformed(with("a.counts", "b.counts"), "\"a.counts\" is missing");
  ExpectMalformed(with("a.in_sum2", "b.in_sum2"), "\"a.in_sum2\" is missing");
  ExpectMalformed(with("a.counts", "a.countx"), "expected names that end in");
  ExpectMalformed(file.substr(0, file.size() - 40), "file");
}

QuantizeCheckpointOptions Options(const std::string& choice) {
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::Uniform(choice);
  options.method = QuantizeMethod::kMse;
  return options;
}

std::vector<float> Values(const std::string& path, const std::string& name) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok());
  if (!checkpoint.ok()) return {};
  const Result<QuantizedWeights> weights = checkpoint->Weights(name);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (!weights.ok()) return {};
  const WeightsSpec& spec = weights->spec;
  const Shape shape =
      spec.experts > 1 ? Shape{spec.experts, spec.k, spec.n} : Shape{spec.k, spec.n};
  std::vector<float> values(static_cast<size_t>(shape.ElementCount()));
  EXPECT_TRUE(Dequantize(*weights, {values.data(), DType::kF32, shape}).ok());
  return values;
}

/// sum(importance * (original - decoded)^2) of the query projection.
double WeightedError(const std::string& path, const std::vector<float>& importance) {
  const Result<Checkpoint> source = Checkpoint::Open(kQwen);
  const Result<TensorView> view = source->Tensor(kQuery);
  const int64_t n = view->dim(0);
  const int64_t k = view->dim(1);
  const std::vector<float> decoded = Values(path, kQuery);
  double error = 0;
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t i = 0; i < k; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, view->As<uint16_t>() + column * k + i, sizeof(bits));
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      float original = 0;
      std::memcpy(&original, &wide, sizeof(original));
      const double d = double{original} - decoded[static_cast<size_t>(i * n + column)];
      error += importance[static_cast<size_t>(i)] * d * d;
    }
  }
  return error;
}

TEST(Importance, WeighsErrorsAndReportsWhatIsNotInTheFile) {
  TemporaryDirectory directory;
  ImportanceMatrix importance;
  ImportanceMatrix::Inputs inputs{1, 128, std::vector<float>(128, 1e-3f), {64.0f}};
  for (size_t i = 0; i < 128; i += 8) inputs.mean_squares[i] = 100.0f;
  importance.inputs["blk.0.attn_q.weight"] = inputs;
  const QuantizeCheckpointOptions options = Options("int3/g64");
  ASSERT_TRUE(QuantizeCheckpoint(kQwen, directory / "plain", options).ok());
  const auto report = QuantizeWithImportance(kQwen, directory / "weighted", options, importance);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_LT(WeightedError(directory / "weighted", inputs.mean_squares),
            0.8 * WeightedError(directory / "plain", inputs.mean_squares));
  // All other matrices are as without importances, and are listed.
  const std::string key = "model.layers.0.self_attn.k_proj.weight";
  EXPECT_EQ(Values(directory / "weighted", key), Values(directory / "plain", key));
  std::map<std::string, std::string> reasons;
  for (const SkippedTensor& tensor : report->fallbacks) reasons[tensor.name] = tensor.reason;
  EXPECT_FALSE(reasons.contains(kQuery));
  EXPECT_EQ(reasons[key], "unweighted: it is not in the importance matrix");
}

TEST(Importance, EveryExpertHasItsOwn) {
  TemporaryDirectory directory;
  const std::string gate = "model.layers.0.mlp.experts.*.gate_proj.weight";
  const Result<Checkpoint> source = Checkpoint::Open(kQwen);
  ASSERT_TRUE(source.ok());
  int64_t experts = 0;
  while (source->Find("model.layers.0.mlp.experts." + std::to_string(experts) +
                      ".gate_proj.weight") != nullptr) {
    ++experts;
  }
  ASSERT_GT(experts, 2);
  // Only the second expert has uneven inputs; the third saw no token.
  ImportanceMatrix::Inputs inputs{experts, 128,
                                  std::vector<float>(static_cast<size_t>(experts * 128), 1.0f),
                                  std::vector<float>(static_cast<size_t>(experts), 8.0f)};
  for (size_t i = 0; i < 128; ++i) inputs.mean_squares[128 + i] = i % 8 == 0 ? 100.0f : 1e-3f;
  inputs.counts[2] = 0;
  ImportanceMatrix importance;
  importance.inputs["blk.0.ffn_gate_exps.weight"] = inputs;
  const QuantizeCheckpointOptions options = Options("int3/g64");
  const auto report = QuantizeWithImportance(kQwen, directory / "a", options, importance);
  ASSERT_TRUE(report.ok()) << report.status().message();
  bool unseen = false;
  for (const SkippedTensor& tensor : report->fallbacks) {
    unseen |= tensor.name == "model.layers.0.mlp.experts.2.gate_proj.weight" &&
              tensor.reason == "unweighted: no token was seen";
  }
  EXPECT_TRUE(unseen);

  // The older form joins the experts; its one count is that of all.
  ImportanceMatrix joined;
  joined.inputs["blk.0.ffn_gate_exps.weight"] = {1, experts * 128, inputs.mean_squares, {8.0f}};
  ASSERT_TRUE(QuantizeWithImportance(kQwen, directory / "b", options, joined).ok());
  const std::vector<float> a = Values(directory / "a", gate);
  const std::vector<float> b = Values(directory / "b", gate);
  ASSERT_EQ(a.size(), b.size());
  const size_t each = a.size() / static_cast<size_t>(experts);
  EXPECT_TRUE(std::equal(a.begin() + static_cast<long>(each),
                         a.begin() + 2 * static_cast<long>(each),
                         b.begin() + static_cast<long>(each)));

  importance.inputs["blk.0.ffn_gate_exps.weight"].experts = experts / 2;
  importance.inputs["blk.0.ffn_gate_exps.weight"].k = 256;
  const auto other = QuantizeWithImportance(kQwen, directory / "c", options, importance);
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Contains(other.status().message(), "importance of another model"));
}

TEST(Importance, OnlyMseUsesIt) {
  QuantizeCheckpointOptions options = Options("int3/g64");
  options.method = QuantizeMethod::kRtn;
  const auto report = QuantizeWithImportance(kQwen, "unused", options, {});
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().message(), "method rtn: uses no importance matrix; mse does");
}

}  // namespace
}  // namespace marlin::importance_test
