// Walks over the sample models: every matrix is shown once with its own input, and a second model
// with the same weights computes what the first one does.
#include "calibrate/layer_walk.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "../engine/random_model.h"
#include "base/scalars.h"
#include "calibrate/walked_matrices.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "model/open_model.h"

namespace marlin::layer_walk_test {
namespace {

/// Matrices by tensor and expert, with how often they were shown.
using Counts = std::map<std::pair<std::string, int64_t>, int>;

class Recorder final : public InputVisitor {
 public:
  explicit Recorder(const LayerWalk& walk) : walk_(walk) {}

  InputSink SinkFor(const MatrixInput& input) override {
    Count(input);
    rows_ = 0;
    return {[this, &input](const HostRows& original, const HostRows& current) {
              EXPECT_EQ(original.width, input.k);
              EXPECT_EQ(original.values, current.values);
              rows_ += current.rows();
              last_ = current.values;
              return Status();
            },
            [this] {
              EXPECT_EQ(std::exchange(rows_, 0), walk_.tokens());
              return Status();
            }};
  }

  Status VisitExpert(const ExpertVisit& visit) override {
    EXPECT_EQ(visit.original.values, visit.current.values);
    if (!visit.shared()) selections_ += static_cast<int64_t>(visit.tokens.size());
    if (!visit.last) return {};
    if (!visit.shared()) Count(visit.matrices.gate_up);
    Count(visit.matrices.down);
    return {};
  }

  const Counts& counts() const { return counts_; }
  /// The rows that the last input got last: the head's.
  const std::vector<float>& last() const { return last_; }
  /// Pairs of a token and an expert, of all layers.
  int64_t selections() const { return selections_; }

 private:
  void Count(const MatrixInput& input) {
    for (const InputMatrix& matrix : input.matrices) ++counts_[{matrix.tensor, matrix.expert}];
  }

  const LayerWalk& walk_;
  int64_t rows_ = 0;
  int64_t selections_ = 0;
  std::vector<float> last_;
  Counts counts_;
};

class SampleModel : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    path_ = SourceDirectory() + GetParam();
    if (!std::string(GetParam()).starts_with("/")) {
      path_ = written_.path();
      testing::WriteRecurrent(GetParam(), path_, 1024);
    }
    auto opened = OpenModelDirectory(path_);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    directory_ = std::make_unique<ModelDirectory>(*std::move(opened));
    for (const size_t count : {200, 120, 7}) texts_.push_back(testing::TokensBelow(1024, count));
  }

  testing::TemporaryDirectory written_;
  std::string path_;
  std::unique_ptr<ModelDirectory> directory_;
  std::vector<std::vector<int32_t>> texts_;
};

TEST_P(SampleModel, ShowsEveryMatrixOnceAndRunsBothModelsAlike) {
  const Device device = *Device::Open("cpu", {.threads = 2});
  const Dimensions& shape = directory_->config.shape;
  const ReplacedMatrices none;
  std::vector<float> head;
  for (const WalkOptions& options :
       {WalkOptions{}, WalkOptions{.replaced = &none}, WalkOptions{.experts_by_pass = true}}) {
    LayerWalk walk(*directory_, device, options);
    ASSERT_TRUE(walk.Start(texts_, 256).ok());
    EXPECT_EQ(walk.tokens(), 327);
    Recorder recorder(walk);
    int64_t layers = 0;
    const Status status = walk.RunAll(recorder, [&](int64_t done, int64_t) { layers = done; });
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(layers, shape.layers);
    for (const auto& [matrix, count] : recorder.counts()) EXPECT_EQ(count, 1) << matrix.first;
    for (const auto& [tensor, layer] : FindWalkedMatrices(walk.source(), shape)) {
      // A stack of experts is shown expert by expert.
      const Counts& counts = recorder.counts();
      EXPECT_TRUE(counts.contains({tensor, -1}) || counts.contains({tensor, 0}))
          << tensor << " of layer " << layer;
    }
    const int64_t top_k = directory_->config.router.top_k;
    EXPECT_EQ(recorder.selections() % (walk.tokens() * top_k), 0);
    EXPECT_GT(recorder.selections(), 0);
    if (head.empty()) head = recorder.last();
    EXPECT_EQ(recorder.last(), head);
  }
}

// Every text begins with an empty cache and states of zeros.
TEST_P(SampleModel, ShowsTheHeadWhatAForwardPassComputes) {
  if (directory_->config.shape.tied) GTEST_SKIP() << "the head is not shown";
  const Device device = *Device::Open("cpu", {.threads = 2});
  LayerWalk walk(*directory_, device, {});
  ASSERT_TRUE(walk.Start(texts_, 256).ok());
  Recorder recorder(walk);
  const Status status = walk.RunAll(recorder, {});
  ASSERT_TRUE(status.ok()) << status.message();
  const auto hidden = static_cast<size_t>(directory_->config.shape.hidden);
  const std::vector<float> last(recorder.last().end() - static_cast<std::ptrdiff_t>(hidden),
                                recorder.last().end());
  const auto head = directory_->checkpoint.Tensor("lm_head.weight");
  ASSERT_TRUE(head.ok()) << head.status().message();
  ASSERT_EQ(head->dtype(), DType::kBf16);
  ModelOptions options;
  options.allow_bf16_activations = false;
  const auto model = Model::Open(path_, device, options);
  ASSERT_TRUE(model.ok()) << model.status().message();
  Sequence sequence = *model->NewSequence();
  std::vector<float> logits(1024);
  const SequenceInput input{&sequence, texts_.back()};
  ASSERT_TRUE(model->Forward({&input, 1}, {logits.data(), DType::kF32, {1, 1024}}).ok());
  for (size_t token = 0; token < logits.size(); ++token) {
    double expected = 0;
    for (size_t i = 0; i < hidden; ++i) {
      const float weight = Bf16ToFloat(head->As<uint16_t>()[token * hidden + i]);
      expected += double{last[i]} * double{weight};
    }
    ASSERT_NEAR(logits[token], expected, 1e-4) << token;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SampleModel,
                         ::testing::Values("/examples/tiny-qwen3-moe", "/tests/data/tiny-glm4-moe",
                                           "qwen3_next", "granitemoehybrid", "nemotron_h"));

}  // namespace
}  // namespace marlin::layer_walk_test
