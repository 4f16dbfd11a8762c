// Weights whose k are moved in runs keep their values.
#include "layout/move_runs.h"

#include <gtest/gtest.h>

#include <vector>

#include "decoded.h"
#include "layout/weights_buffer.h"
#include "marlin/quantize.h"

namespace marlin::move_runs_test {
namespace {

using testing::Decoded;

constexpr int64_t kExperts = 2;
constexpr int64_t kK = 256;
constexpr int64_t kN = 5;

QuantizedWeights Weights(const QuantizeOptions& how) {
  std::vector<float> dense(static_cast<size_t>(kExperts * kK * kN));
  for (size_t i = 0; i < dense.size(); ++i) {
    dense[i] = 0.01f * static_cast<float>((i * 7919) % 201) - 1.0f;
  }
  Result<QuantizedWeights> weights =
      Quantize(TensorView(dense.data(), DType::kF32, {kExperts, kK, kN}), how);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  return *std::move(weights);
}

void ExpectMoved(const QuantizedWeights& weights, int64_t run, const std::vector<int64_t>& from) {
  ASSERT_TRUE(CanMoveRuns(weights.spec, run));
  const Result<QuantizedWeights> moved = MoveRuns(weights, run, from);
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved->spec, MovedRunsSpec(weights.spec, run));
  ASSERT_TRUE(Validate(*moved).ok());
  const std::vector<float> before = Decoded(weights);
  const std::vector<float> after = Decoded(*moved);
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t k = 0; k < kK; ++k) {
      const int64_t source = from[static_cast<size_t>(k / run)] * run + k % run;
      for (int64_t n = 0; n < kN; ++n) {
        const auto at = [&](int64_t row) { return static_cast<size_t>((e * kK + row) * kN + n); };
        ASSERT_EQ(after[at(k)], before[at(source)]) << k;
      }
    }
  }
}

TEST(MoveRuns, EveryWidthOfCodes) {
  const std::vector<int64_t> order = {2, 0, 3, 1};
  for (const Format format : {Format::kU4, Format::kS4, Format::kInt3, Format::kInt5, Format::kInt6,
                              Format::kS8, Format::kFp4E2M1}) {
    QuantizeOptions how;
    how.format = format;
    how.group_size = 32;
    SCOPED_TRACE(std::string(FormatName(format)));
    ExpectMoved(Weights(how), 64, order);
    how.group_size = 0;  // One group is not cut.
    ExpectMoved(Weights(how), 64, order);
  }
}

TEST(MoveRuns, RefusesToCutGroupsAndWords) {
  WeightsSpec spec = {.format = Format::kU4, .k = kK, .n = kN, .group_size = 64};
  EXPECT_TRUE(CanMoveRuns(spec, 64));
  EXPECT_FALSE(CanMoveRuns(spec, 32));
  EXPECT_FALSE(CanMoveRuns(spec, 96));
  spec.group_size = 16;
  EXPECT_FALSE(CanMoveRuns(spec, 16));
  spec.has_permutation = true;
  EXPECT_FALSE(CanMoveRuns(spec, 64));
}

/// Super groups that runs cut become smaller ones, and large ones again when runs come back.
TEST(MoveRuns, SuperGroupsAreCutAndJoined) {
  WeightsSpec spec = {.format = Format::kU4,
                      .experts = kExperts,
                      .k = kK,
                      .n = kN,
                      .group_size = 32,
                      .super_group_size = 256,
                      .has_biases = true};
  Result<WeightsBuffer> buffer = AllocateWeights(spec);
  ASSERT_TRUE(buffer.ok());
  const auto fill = [](const TensorView& view, void* to, auto value) {
    auto* const values = static_cast<decltype(value)*>(to);
    for (int64_t i = 0; i < view.ElementCount(); ++i) {
      values[i] = static_cast<decltype(value)>(value + (i * 37) % 29);
    }
  };
  const QuantizedWeights& weights = buffer->weights;
  fill(weights.codes, buffer->codes, uint32_t{0x12345678});
  fill(weights.scales, buffer->scales, int8_t{1});
  fill(weights.biases, buffer->biases, int8_t{3});
  fill(weights.super_scales, buffer->super_scales, uint16_t{0x2800});
  fill(weights.super_biases, buffer->super_biases, uint16_t{0x2900});
  const std::vector<int64_t> order = {1, 3, 0, 2};
  ExpectMoved(weights, 64, order);
  const Result<QuantizedWeights> moved = MoveRuns(weights, 64, order);
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved->spec.super_group_size, 64);
  const Result<QuantizedWeights> back = MoveRuns(*moved, 64, std::vector<int64_t>{2, 0, 3, 1});
  ASSERT_TRUE(back.ok());
  const Result<QuantizedWeights> joined = WidenSuperGroups(*back, 256);
  ASSERT_TRUE(joined.ok());
  EXPECT_EQ(joined->spec, spec);
  EXPECT_EQ(Decoded(*joined), Decoded(weights));
}

}  // namespace
}  // namespace marlin::move_runs_test
