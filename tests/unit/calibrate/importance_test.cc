// Measured importance matrices: against double precision, invariants, threads, files, wrong calls.
#include "marlin/importance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "../engine/random_model.h"
#include "base/scalars.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/routing.h"

namespace marlin::importance_test {
namespace {

using testing::Contains;

constexpr int64_t kTokens = 600;
constexpr int64_t kUsed = 512;  ///< Whole windows of 256.

Device WithThreads(int threads) { return *Device::Open("cpu", {.threads = threads}); }

std::vector<testing::TestTensor> TensorsOf(const std::string& path) {
  const Checkpoint checkpoint = *Checkpoint::Open(path);
  std::vector<testing::TestTensor> tensors;
  for (const TensorInfo& info : checkpoint.tensors()) {
    const TensorView view = *checkpoint.Tensor(info.name);
    tensors.push_back({info.name, DType::kBf16, info.shape, {}});
    tensors.back().data.assign(static_cast<const char*>(view.data()),
                               static_cast<size_t>(view.ElementCount()) * sizeof(uint16_t));
  }
  return tensors;
}

std::vector<float> ValuesOf(const testing::TestTensor& tensor) {
  std::vector<float> values(tensor.data.size() / sizeof(uint16_t));
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, tensor.data.data() + i * sizeof(bits), sizeof(bits));
    values[i] = Bf16ToFloat(bits);
  }
  return values;
}

class MeasuredImportance : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(directory_ / "model");
    testing::WriteQwen2(directory_ / "model", 8);
    options_.text.text = testing::TokensBelow(128, kTokens);
  }
  Result<ImportanceMatrix> Run(int threads = 2) {
    return MeasureImportance(directory_ / "model", WithThreads(threads), options_);
  }
  /// The values of a tensor of the model.
  std::vector<float> Values(const std::string& name) {
    for (const testing::TestTensor& tensor : TensorsOf(directory_ / "model")) {
      if (tensor.name == name) return ValuesOf(tensor);
    }
    ADD_FAILURE() << name;
    return {};
  }
  /// Multiplies a row (a value of a vector) or a column of a tensor by a power of two.
  void Scale(const std::string& name, int64_t row, int64_t column, float factor) {
    std::vector<testing::TestTensor> tensors = TensorsOf(directory_ / "model");
    for (testing::TestTensor& tensor : tensors) {
      if (tensor.name != name) continue;
      const int64_t width = tensor.shape.rank() == 2 ? tensor.shape[1] : 1;
      std::vector<float> values = ValuesOf(tensor);
      for (int64_t i = 0; i < tensor.shape.ElementCount(); ++i) {
        if (i / width != row && i % width != column) continue;
        const uint16_t bits = FloatToBf16(values[static_cast<size_t>(i)] * factor);
        std::memcpy(tensor.data.data() + i * 2, &bits, sizeof(bits));
      }
    }
    testing::WriteFile(directory_ / "model/model.safetensors", testing::BuildSafetensors(tensors));
  }

  testing::TemporaryDirectory directory_;
  ImportanceOptions options_;
};

/// The inputs of the first layer's q, k and v follow from the embeddings alone.
TEST_F(MeasuredImportance, TheFirstInputsAreThoseOfDoublePrecision) {
  const auto measured = Run();
  ASSERT_TRUE(measured.ok()) << measured.status().message();
  EXPECT_EQ(measured->inputs.size(), 3U * 7U + 1U);
  constexpr size_t kHidden = 64;
  const std::vector<float> table = Values("model.embed_tokens.weight");
  const std::vector<float> norm = Values("model.layers.0.input_layernorm.weight");
  std::vector<double> expected(kHidden);
  for (size_t t = 0; t < kUsed; ++t) {
    const float* const row = table.data() + static_cast<size_t>(options_.text.text[t]) * kHidden;
    double squares = 0;
    for (size_t i = 0; i < kHidden; ++i) squares += std::pow(double{row[i]}, 2);
    const double scale = 1.0 / (squares / kHidden + 1e-6);
    for (size_t i = 0; i < kHidden; ++i) {
      expected[i] += std::pow(double{row[i]} * double{norm[i]}, 2) * scale / kUsed;
    }
  }
  for (const char* const name : {"attn_q", "attn_k", "attn_v"}) {
    const auto& inputs = measured->inputs.at("blk.0." + std::string(name) + ".weight");
    EXPECT_EQ(inputs.counts, std::vector<float>{kUsed});
    ASSERT_EQ(inputs.k, 64);
    for (size_t i = 0; i < kHidden; ++i) {
      EXPECT_NEAR(inputs.mean_squares[i] / expected[i], 1.0, 1e-4) << i;
    }
  }
  EXPECT_EQ(measured->inputs.at("output.weight").k, 64);
  EXPECT_EQ(measured->inputs.at("blk.2.ffn_down.weight").k, 96);
}

/// A row of up is multiplied by 4 and the column of down that reads it divided, likewise v and o:
/// of all inputs only those two change.
TEST_F(MeasuredImportance, LastInputsFollowTheMatrixBefore) {
  ImportanceMatrix expected = *Run();
  Scale("model.layers.1.mlp.up_proj.weight", 5, -1, 4.0F);
  Scale("model.layers.1.mlp.down_proj.weight", -1, 5, 0.25F);
  // Heads 2 and 3 read the second head of v.
  Scale("model.layers.1.self_attn.v_proj.weight", 16 + 3, -1, 4.0F);
  Scale("model.layers.1.self_attn.v_proj.bias", 16 + 3, -1, 4.0F);
  Scale("model.layers.1.self_attn.o_proj.weight", -1, 2 * 16 + 3, 0.25F);
  Scale("model.layers.1.self_attn.o_proj.weight", -1, 3 * 16 + 3, 0.25F);
  expected.inputs.at("blk.1.ffn_down.weight").mean_squares[5] *= 16.0F;
  for (const size_t column : {2U * 16U + 3U, 3U * 16U + 3U}) {
    expected.inputs.at("blk.1.attn_output.weight").mean_squares[column] *= 16.0F;
  }
  const ImportanceMatrix measured = *Run();
  ASSERT_EQ(measured.inputs.size(), expected.inputs.size());
  for (const auto& [name, inputs] : expected.inputs) {
    const auto& other = measured.inputs.at(name);
    for (size_t i = 0; i < inputs.mean_squares.size(); ++i) {
      EXPECT_NEAR(other.mean_squares[i] / inputs.mean_squares[i], 1.0, 1e-5) << name << " " << i;
    }
  }
}

TEST_F(MeasuredImportance, ExpertsSeeTheTokensThatSelectThem) {
  const std::string source = SourceDirectory() + "/tests/data/tiny-glm4-moe";
  const auto measured = MeasureImportance(source, WithThreads(2), options_);
  ASSERT_TRUE(measured.ok()) << measured.status().message();
  const Model model = *Model::Open(source, WithThreads(2), {.allow_bf16_activations = false});
  const auto begin = options_.text.text.begin();
  const std::vector<std::vector<int32_t>> texts = {{begin, begin + 256},
                                                   {begin + 256, begin + kUsed}};
  const RoutingFrequencies routing = *CountRouting(model, texts);
  ASSERT_FALSE(routing.layers.empty());
  for (const RoutingFrequencies::Layer& layer : routing.layers) {
    const std::string prefix = "blk." + std::to_string(layer.layer) + ".ffn_";
    for (const char* const name : {"gate_exps", "up_exps", "down_exps"}) {
      const auto& inputs = measured->inputs.at(prefix + name + ".weight");
      EXPECT_EQ(inputs.counts, std::vector<float>(layer.counts.begin(), layer.counts.end()));
      EXPECT_EQ(inputs.experts * inputs.k, static_cast<int64_t>(inputs.mean_squares.size()));
    }
    // Every token is top_k times among the inputs of experts, and once among the router's.
    const auto& experts = measured->inputs.at(prefix + "gate_exps.weight");
    const auto& router = measured->inputs.at(prefix + "gate_inp.weight");
    EXPECT_EQ(router.counts, std::vector<float>{kUsed});
    for (int64_t i = 0; i < experts.k; ++i) {
      double sum = 0;
      for (int64_t e = 0; e < experts.experts; ++e) {
        sum += double{experts.counts[static_cast<size_t>(e)]} *
               double{experts.mean_squares[static_cast<size_t>(e * experts.k + i)]};
      }
      const double all = double{router.mean_squares[static_cast<size_t>(i)]} * kUsed *
                         static_cast<double>(routing.top_k);
      EXPECT_NEAR(sum / all, 1.0, 1e-5) << prefix << i;
    }
    EXPECT_TRUE(measured->inputs.contains(prefix + "down_shexp.weight"));
  }
}

TEST_F(MeasuredImportance, TheSameBitsWithAnyNumberOfThreads) {
  const auto one = Run(1);
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(*Run(16), *one);
}

TEST_F(MeasuredImportance, TheFileIsReadBackAndCoversWhatIsQuantized) {
  int64_t last = 0;
  options_.progress = [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 3);
    EXPECT_EQ(done, ++last);
  };
  const ImportanceMatrix measured = *Run();
  EXPECT_EQ(last, 3);
  const auto read = ImportanceMatrix::FromBytes(measured.ToGguf("text"), "file");
  ASSERT_TRUE(read.ok()) << read.status().message();
  ASSERT_EQ(read->inputs.size(), measured.inputs.size());
  for (const auto& [name, inputs] : measured.inputs) {
    const auto& other = read->inputs.at(name);
    EXPECT_EQ(other.counts, inputs.counts);
    for (size_t i = 0; i < inputs.mean_squares.size(); ++i) {
      EXPECT_FLOAT_EQ(other.mean_squares[i], inputs.mean_squares[i]) << name;
    }
  }
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::Uniform("nf3/g32");
  options.method = QuantizeMethod::kMse;
  const auto report =
      QuantizeWithImportance(directory_ / "model", directory_ / "out", options, *read);
  ASSERT_TRUE(report.ok()) << report.status().message();
  for (const SkippedTensor& tensor : report->fallbacks) {
    EXPECT_EQ(tensor.name, "model.embed_tokens.weight") << tensor.reason;
  }
}

TEST_F(MeasuredImportance, WrongCallsAreRefused) {
  const auto refused = [this](Code code, const std::string& part) {
    const auto measured = Run();
    ASSERT_FALSE(measured.ok()) << part;
    EXPECT_EQ(measured.status().code(), code) << measured.status().message();
    EXPECT_TRUE(Contains(measured.status().message(), part)) << measured.status().message();
  };
  options_.text.text = {1};
  refused(Code::kInvalidArgument, "expected 2 tokens or more, got 1");
  options_.text.text = {1, 128};
  refused(Code::kInvalidArgument, "token 1 is 128, expected 0..127");
  options_.text.text = testing::TokensBelow(128, kTokens);
  Scale("model.layers.1.input_layernorm.weight", 7, -1, 0x1p100F);
  refused(Code::kNonFiniteInput, "input 7 of \"model.layers.1.self_attn.q_proj.weight\"");
  Scale("model.layers.1.input_layernorm.weight", 7, -1, 0x1p-100F);
  QuantizeCheckpointOptions options;
  options.recipe = *MixedPrecisionConfig::Uniform("u4/g32");
  ASSERT_TRUE(QuantizeCheckpoint(directory_ / "model", directory_ / "quantized", options).ok());
  std::filesystem::remove_all(directory_ / "model");
  std::filesystem::rename(directory_ / "quantized", directory_ / "model");
  refused(Code::kInvalidArgument, "is quantized already, with metal_marlin");
}

}  // namespace
}  // namespace marlin::importance_test
