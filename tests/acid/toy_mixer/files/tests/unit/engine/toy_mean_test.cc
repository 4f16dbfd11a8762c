// A model with the toy mixer computes what its definition says, in one pass and token by token.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "../checkpoint/test_files.h"
#include "base/scalars.h"
#include "marlin/model.h"
#include "random_model.h"
#include "recipe/architecture.h"

namespace marlin::toy_mean_test {
namespace {

using Rows = std::vector<std::vector<double>>;

constexpr char kConfig[] = R"({"model_type": "toy_mean", "hidden_size": 32, "vocab_size": 48,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1})";

/// The model in fp64.
class Reference {
 public:
  explicit Reference(const std::vector<testing::TestTensor>& tensors) {
    for (const testing::TestTensor& tensor : tensors) {
      std::vector<double>& values = tensors_[tensor.name];
      for (size_t i = 0; i < tensor.data.size(); i += 2) {
        uint16_t bits = 0;
        std::memcpy(&bits, tensor.data.data() + i, sizeof(bits));
        values.push_back(Bf16ToFloat(bits));
      }
    }
  }

  Rows Logits(const std::vector<int32_t>& tokens) const {
    Rows hidden;
    const std::vector<double>& table = tensors_.at("model.embed_tokens.weight");
    for (const int32_t token : tokens) {
      hidden.emplace_back(table.begin() + token * 32, table.begin() + (token + 1) * 32);
    }
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      Rows x = Norm(hidden, prefix + "input_layernorm.weight");
      std::vector<double> sum(32);
      for (size_t row = 0; row < x.size(); ++row) {
        for (size_t i = 0; i < 32; ++i) {
          sum[i] += x[row][i];
          x[row][i] = sum[i] / static_cast<double>(row + 1);
        }
      }
      Add(Times(x, prefix + "mixer.out_proj.weight"), &hidden);
      x = Norm(hidden, prefix + "post_attention_layernorm.weight");
      Rows inner = Times(x, prefix + "mlp.gate_proj.weight");
      const Rows up = Times(x, prefix + "mlp.up_proj.weight");
      for (size_t row = 0; row < inner.size(); ++row) {
        for (size_t i = 0; i < inner[row].size(); ++i) {
          inner[row][i] *= up[row][i] / (1 + std::exp(-inner[row][i]));
        }
      }
      Add(Times(inner, prefix + "mlp.down_proj.weight"), &hidden);
    }
    return Times(Norm(hidden, "model.norm.weight"), "lm_head.weight");
  }

 private:
  Rows Norm(Rows rows, const std::string& name) const {
    for (std::vector<double>& row : rows) {
      double squares = 0;
      for (const double value : row) squares += value * value;
      const double factor = 1 / std::sqrt(squares / static_cast<double>(row.size()) + 1e-6);
      for (size_t i = 0; i < row.size(); ++i) row[i] *= factor * tensors_.at(name)[i];
    }
    return rows;
  }
  Rows Times(const Rows& rows, const std::string& name) const {
    const std::vector<double>& matrix = tensors_.at(name);
    const size_t in = rows.front().size();
    Rows out(rows.size(), std::vector<double>(matrix.size() / in));
    for (size_t row = 0; row < rows.size(); ++row) {
      for (size_t i = 0; i < matrix.size(); ++i) out[row][i / in] += rows[row][i % in] * matrix[i];
    }
    return out;
  }
  static void Add(const Rows& block, Rows* hidden) {
    for (size_t row = 0; row < block.size(); ++row) {
      for (size_t i = 0; i < block[row].size(); ++i) (*hidden)[row][i] += block[row][i];
    }
  }

  std::map<std::string, std::vector<double>> tensors_;
};

TEST(ToyMean, ComputesItsDefinition) {
  const testing::TemporaryDirectory directory;
  const auto architecture = DescribeModel(kConfig);
  ASSERT_TRUE(architecture.ok()) << architecture.status().message();
  std::vector<testing::TestTensor> tensors;
  for (const ModelTensor& tensor : architecture->tensors) {
    const auto seed = static_cast<uint32_t>(tensors.size());
    tensors.push_back(testing::RandomBf16(tensor.name, tensor.shape, seed, 0.3F));
  }
  testing::WriteFile(directory / "config.json", kConfig);
  testing::WriteFile(directory / "model.safetensors", testing::BuildSafetensors(tensors));
  ModelOptions options;
  options.allow_bf16_activations = false;
  const Result<Model> model = Model::Open(directory / "", *Device::Open("cpu"), options);
  ASSERT_TRUE(model.ok()) << model.status().message();
  const std::vector<int32_t> tokens = testing::TokensBelow(48, 300);
  const Rows expected = Reference(tensors).Logits(tokens);
  for (const size_t piece : {tokens.size(), size_t{7}, size_t{1}}) {
    Sequence sequence = *model->NewSequence();
    std::vector<float> logits(tokens.size() * 48);
    for (size_t first = 0; first < tokens.size(); first += piece) {
      const size_t count = std::min(piece, tokens.size() - first);
      const SequenceInput input{&sequence, {tokens.data() + first, count}, true};
      const Status status = model->Forward(
          {&input, 1},
          {logits.data() + first * 48, DType::kF32, {static_cast<int64_t>(count), 48}});
      ASSERT_TRUE(status.ok()) << status.message();
    }
    for (size_t i = 0; i < logits.size(); ++i) {
      ASSERT_NEAR(logits[i], expected[i / 48][i % 48], 1e-3) << "piece " << piece << ", " << i;
    }
  }
}

}  // namespace
}  // namespace marlin::toy_mean_test
