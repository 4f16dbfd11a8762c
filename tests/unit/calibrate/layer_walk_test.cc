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
#include "../engine/random_model.h"
#include "calibrate/walked_matrices.h"
#include "marlin/device.h"
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
    auto opened = OpenModelDirectory(SourceDirectory() + GetParam());
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    directory_ = std::make_unique<ModelDirectory>(*std::move(opened));
    for (const size_t count : {200, 120, 7}) texts_.push_back(testing::TokensBelow(1024, count));
  }

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
      EXPECT_TRUE(recorder.counts().contains({tensor, -1})) << tensor << " of layer " << layer;
    }
    const int64_t top_k = directory_->config.router.top_k;
    EXPECT_EQ(recorder.selections() % (walk.tokens() * top_k), 0);
    EXPECT_GT(recorder.selections(), 0);
    if (head.empty()) head = recorder.last();
    EXPECT_EQ(recorder.last(), head);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SampleModel,
                         ::testing::Values("/examples/tiny-qwen3-moe",
                                           "/tests/data/tiny-glm4-moe"));

}  // namespace
}  // namespace marlin::layer_walk_test
