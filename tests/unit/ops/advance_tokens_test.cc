// The operations between two steps: sampling of some rows, and the tokens of the next step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../test_device.h"
#include "marlin/device.h"
#include "marlin/sampling.h"
#include "ops/decoder/sampling.h"
#include "plan/step/sample_marks.h"

namespace marlin::advance_tokens_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The vectors of `rows` sequences of a pass of `steps` steps.
struct Rows {
  Rows(std::vector<int32_t> samples, int64_t number, std::vector<int32_t> stop_ids)
      : sampled(std::move(samples)),
        stops(std::move(stop_ids)),
        ids(sampled.size(), 50),
        positions(sampled.size(), 7),
        state_rows(sampled.size(), 3),
        counts(sampled.size(), 0),
        tokens(sampled.size() * static_cast<size_t>(number), -9),
        steps(number) {}

  StepAdvance view() {
    const auto vector = [](std::vector<int32_t>& of) {
      return MutableTensorView(of.data(), DType::kI32, {static_cast<int64_t>(of.size())});
    };
    return {vector(stops),      vector(ids),    vector(positions),
            vector(state_rows), vector(counts), {tokens.data(), DType::kI32, {rows(), steps}}};
  }
  int64_t rows() const { return static_cast<int64_t>(sampled.size()); }
  Status Advance(const Device& device) {
    const TensorView from(sampled.data(), DType::kI32, {rows()});
    const Status status = AdvanceTokens(device, from, view());
    return status.ok() ? device.Synchronize() : status;
  }

  std::vector<int32_t> sampled;
  std::vector<int32_t> stops;
  std::vector<int32_t> ids;
  std::vector<int32_t> positions;
  std::vector<int32_t> state_rows;
  std::vector<int32_t> counts;
  std::vector<int32_t> tokens;
  int64_t steps;
};

Device Open() { return *Device::Open(TestDevice(), {.threads = 2}); }

TEST(AdvanceTokens, StoresTokensUntilAStop) {
  const Device device = Open();
  Rows rows({11, 12, 13}, 3, {99, 21});
  ASSERT_TRUE(rows.Advance(device).ok());
  EXPECT_THAT(rows.ids, ElementsAre(11, 12, 13));
  EXPECT_THAT(rows.positions, Each(8));
  EXPECT_THAT(rows.state_rows, Each(3));
  EXPECT_THAT(rows.counts, Each(1));
  // The second row stops, behind its token; the third could not be sampled.
  rows.sampled = {31, 21, -1};
  ASSERT_TRUE(rows.Advance(device).ok());
  EXPECT_THAT(rows.ids, ElementsAre(31, 12, 13));
  EXPECT_THAT(rows.positions, ElementsAre(9, 9, 8));
  EXPECT_THAT(rows.state_rows, ElementsAre(3, -1, -1));
  EXPECT_THAT(rows.counts, ElementsAre(2, 2, 1));
  // A mark tells why.
  Rows marked({-77, 11}, 3, {});
  ASSERT_TRUE(marked.Advance(device).ok());
  EXPECT_THAT(marked.state_rows, ElementsAre(-77, 3));
  EXPECT_THAT(marked.counts, ElementsAre(0, 1));
  // A row that has ended keeps its values, whatever it has sampled before.
  rows.sampled = {99, 40, 41};
  ASSERT_TRUE(rows.Advance(device).ok());
  EXPECT_THAT(rows.ids, ElementsAre(31, 12, 13));
  EXPECT_THAT(rows.positions, ElementsAre(10, 9, 8));
  EXPECT_THAT(rows.state_rows, Each(-1));
  EXPECT_THAT(rows.counts, ElementsAre(3, 2, 1));
  EXPECT_THAT(rows.tokens, ElementsAre(11, 31, 99, 12, 21, -9, 13, -9, -9));
}

TEST(AdvanceTokens, AnyNumberOfRowsAndStops) {
  const Device device = Open();
  for (const size_t count : {0U, 1U, 127U, 129U, 1000U}) {
    std::vector<int32_t> sampled(count);
    for (size_t i = 0; i < count; ++i) sampled[i] = static_cast<int32_t>(i * 7 % 500);
    for (const int32_t stops : {0, 1, 300}) {
      std::vector<int32_t> stop_ids;
      for (int32_t i = 0; i < stops; ++i) stop_ids.push_back(i);
      Rows rows(sampled, 1, stop_ids);
      ASSERT_TRUE(rows.Advance(device).ok());
      EXPECT_EQ(rows.tokens, sampled);
      for (size_t i = 0; i < count; ++i) {
        EXPECT_EQ(rows.state_rows[i], sampled[i] < stops ? -1 : 3) << i;
        EXPECT_EQ(rows.ids[i], sampled[i] < stops ? 50 : sampled[i]) << i;
      }
    }
  }
}

TEST(AdvanceTokens, CountsBelowTheSteps) {
  for (const int32_t count : {2, -1}) {
    const Device device = Open();
    Rows rows({11, 12}, 2, {});
    rows.counts = {0, count};
    EXPECT_EQ(rows.Advance(device).message(),
              "counts: expected 0..1, got " + std::to_string(count) + " at 1");
    EXPECT_THAT(rows.tokens, ElementsAre(::testing::_, -9, -9, -9));
  }
}

TEST(AdvanceTokens, RefusesWrongViews) {
  const Device device = Open();
  Rows rows({11, 12}, 2, {5});
  const TensorView sampled(rows.sampled.data(), DType::kI32, {2});
  const auto message = [&](auto&& change) {
    StepAdvance views = rows.view();
    change(views);
    return AdvanceTokens(device, sampled, views).message();
  };
  EXPECT_EQ(message([](StepAdvance& v) {
              v.ids = {v.ids.data(), DType::kI32, {1}};
            }),
            "ids: expected i32 [2], got i32 [1]");
  EXPECT_THAT(message([](StepAdvance& v) {
                v.counts = {v.counts.data(), DType::kI64, {2}};
              }),
              HasSubstr("counts: expected i32 [2]"));
  EXPECT_THAT(message([](StepAdvance& v) {
                v.tokens = {v.tokens.data(), DType::kI32, {4}};
              }),
              HasSubstr("tokens: "));
  EXPECT_THAT(message([](StepAdvance& v) { v.positions = v.ids; }), HasSubstr("overlap"));
  EXPECT_THAT(message([&](StepAdvance& v) {
                v.ids = {rows.sampled.data(), DType::kI32, {2}};
              }),
              HasSubstr("overlap"));
  EXPECT_EQ(AdvanceTokens(device, {rows.sampled.data(), DType::kI32, {1, 2}}, rows.view()).ok(),
            false);
}

/// Rows of logits, whose largest is at column `row`, and the states of three samplers.
class SampledRows : public ::testing::Test {
 protected:
  static constexpr int64_t kVocab = 40;
  SampledRows() : bytes_(*SamplerStateBytes(device_, kVocab)) {
    memory_ = *DeviceBuffer::Allocate(device_, 3 * bytes_);
    for (int64_t i = 0; i < 3; ++i) {
      auto* const state = static_cast<uint8_t*>(memory_.data()) + i * bytes_;
      // Each token may be sampled once.
      const SamplingOptions options{.presence_penalty = 100.0F * static_cast<float>(i)};
      EXPECT_TRUE(ResetSampler(device_, options, kVocab, {nullptr, DType::kI32, {0}},
                               {state, DType::kU8, {bytes_}})
                      .ok());
    }
    EXPECT_TRUE(device_.Synchronize().ok());
    for (size_t row = 0; row < 2; ++row) logits_[row * kVocab + row + 20] = 5;
  }
  static TensorView Two(const std::vector<int32_t>& of) { return {of.data(), DType::kI32, {2}}; }
  Status Sample(std::vector<int32_t> state_rows, bool marks = false) {
    state_rows_ = std::move(state_rows);
    tokens_ = {-5, -5};
    const MutableTensorView tokens(tokens_.data(), DType::kI32, {2});
    const Status status = SampleRows(
        device_, {{logits_.data(), DType::kF32, {2, kVocab}},
                  {memory_.data(), DType::kU8, {3, bytes_}},
                  tokens,
                  {state_rows_.data(), DType::kI32, {static_cast<int64_t>(state_rows_.size())}},
                  marks,
                  masks_,
                  mask_rows_.empty() ? TensorView() : Two(mask_rows_),
                  drafts_.empty() ? TensorView() : Two(drafts_)});
    return status.ok() ? device_.Synchronize() : status;
  }

  Device device_ = Open();
  int64_t bytes_;
  DeviceBuffer memory_;
  std::vector<float> logits_ = std::vector<float>(2 * kVocab);
  std::vector<int32_t> state_rows_;
  std::vector<int32_t> tokens_;
  TensorView masks_;
  std::vector<int32_t> mask_rows_;
  std::vector<int32_t> drafts_;
};

TEST_F(SampledRows, UseTheirStates) {
  ASSERT_TRUE(Sample({2, 0}).ok());
  EXPECT_THAT(tokens_, ElementsAre(20, 21));
  ASSERT_TRUE(Sample({2, 0}).ok());
  EXPECT_THAT(tokens_, ElementsAre(0, 21));
  ASSERT_TRUE(Sample({1, 2}).ok());
  EXPECT_THAT(tokens_, ElementsAre(20, 21));
}

TEST_F(SampledRows, ThatHaveNoneAreLeftAlone) {
  logits_[kVocab + 3] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(Sample({1, -1}).ok());
  EXPECT_THAT(tokens_, ElementsAre(20, -5));
  ASSERT_TRUE(Sample({-1, -1}).ok());
  EXPECT_EQ(Sample({0, 1}).message(), "row 1: logits: nan for token 3");
  EXPECT_EQ(Sample({-1, 2}).message(), "row 2: logits: nan for token 3");
}

// With marks, the error of a row is its own: the others have tokens, and their states advance.
TEST_F(SampledRows, AreMarkedWhereTheyCannotBeSampled) {
  const auto infinity = std::numeric_limits<float>::infinity();
  const auto error = [&] { return SampleError(tokens_[1]).message(); };
  EXPECT_TRUE(SampleError(0).ok());
  logits_[kVocab + 3] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(Sample({2, 1}, true).ok());
  EXPECT_EQ(tokens_[0], 20);
  EXPECT_EQ(error(), "logits: nan for token 3");
  EXPECT_EQ(SampleError(tokens_[1]).code(), Code::kNonFiniteInput);
  logits_[kVocab] = infinity;
  ASSERT_TRUE(Sample({2, 1}, true).ok());
  EXPECT_EQ(tokens_[0], 0);
  EXPECT_EQ(error(), "logits: inf for token 0");
  std::fill(logits_.begin() + kVocab, logits_.end(), -infinity);
  ASSERT_TRUE(Sample({2, 1}, true).ok());
  EXPECT_EQ(tokens_[0], 1);
  EXPECT_EQ(error(), "logits: minus infinity for every token");
  // The state of the marked row has not advanced: its token is not penalized.
  std::fill(logits_.begin() + kVocab, logits_.end(), 0.0F);
  logits_[kVocab + 21] = 5;
  ASSERT_TRUE(Sample({2, 1}, true).ok());
  EXPECT_THAT(tokens_, ElementsAre(2, 21));
  EXPECT_EQ(SampleError(LogitMark(kMostVocab - 1, true)).message(),
            "logits: inf for token 536870911");
}

TEST_F(SampledRows, TakeOnlyAllowedTokens) {
  // The first mask allows 3 and 33, the second all but the last word's, the third nothing.
  const std::vector<uint32_t> words = {8, 2, ~0U, 0, 0, 0};
  masks_ = {words.data(), DType::kU32, {3, 2}};
  mask_rows_ = {0, -1};
  logits_[33] = 2;
  ASSERT_TRUE(Sample({1, 0}).ok());
  EXPECT_THAT(tokens_, ElementsAre(33, 21));
  // Penalties are applied first: 33 has been sampled.
  ASSERT_TRUE(Sample({1, 0}).ok());
  EXPECT_THAT(tokens_, ElementsAre(3, 21));
  mask_rows_ = {1, 0};
  ASSERT_TRUE(Sample({0, 2}).ok());
  EXPECT_THAT(tokens_, ElementsAre(20, 3));
  mask_rows_ = {2, 1};
  ASSERT_TRUE(Sample({1, 0}, true).ok());
  EXPECT_EQ(SampleError(tokens_[0]).message(), "allowed: no token whose logit is a number");
  EXPECT_EQ(tokens_[1], 21);
  EXPECT_EQ(Sample({1, 0}).message(), "row 1: allowed: no token whose logit is a number");
  // A logit that is no number is an error although its token is not allowed.
  logits_[5] = std::numeric_limits<float>::quiet_NaN();
  mask_rows_ = {0, -1};
  EXPECT_EQ(Sample({1, 0}).message(), "row 1: logits: nan for token 5");
  mask_rows_ = {3, -1};
  EXPECT_EQ(Sample({1, 0}).message(),
            "row 1: allowed_rows: expected less than the number of masks");
  masks_ = {words.data(), DType::kU32, {2, 3}};
  EXPECT_EQ(Sample({1, 0}).message(), "allowed: expected u32 [2, 2], got u32 [2, 3]");
}

// With temperature, top-k and top-p, too.
TEST_F(SampledRows, DrawOnlyAllowedTokens) {
  const std::vector<uint32_t> words = {(1U << 3) | (1U << 7), 1U << 1};
  masks_ = {words.data(), DType::kU32, {1, 2}};
  mask_rows_ = {0, 0};
  for (const SamplingOptions& options :
       {SamplingOptions{.temperature = 1}, SamplingOptions{.temperature = 1, .top_k = 2},
        SamplingOptions{.temperature = 1, .top_p = 0.5F},
        SamplingOptions{.temperature = 2, .min_p = 0.2F}}) {
    ASSERT_TRUE(ResetSampler(device_, options, kVocab, {nullptr, DType::kI32, {0}},
                             {memory_.data(), DType::kU8, {bytes_}})
                    .ok());
    std::vector<int32_t> drawn;
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(Sample({0, -1}).ok());
      drawn.push_back(tokens_[0]);
    }
    EXPECT_THAT(drawn, Each(::testing::AnyOf(3, 7, 33)));
    EXPECT_NE(std::count(drawn.begin(), drawn.end(), 3), 0);
    EXPECT_NE(std::count(drawn.begin(), drawn.end(), 7), 0);
  }
}

// The second row has the state of the first and is sampled only after the draft.
TEST_F(SampledRows, FollowTheirDrafts) {
  drafts_ = {20, -1};
  ASSERT_TRUE(Sample({2, 2}).ok());
  EXPECT_THAT(tokens_, ElementsAre(20, 21));
  // Both tokens have been counted, and are penalized: 0 and 1 follow.
  drafts_ = {0, -1};
  ASSERT_TRUE(Sample({2, 2}).ok());
  EXPECT_THAT(tokens_, ElementsAre(0, 1));
  drafts_ = {3, -1};
  ASSERT_TRUE(Sample({2, 2}).ok());
  EXPECT_THAT(tokens_, ElementsAre(2, kSkippedMark));
  // The row that was skipped has not been counted.
  drafts_ = {-1, -1};
  ASSERT_TRUE(Sample({2, 0}).ok());
  EXPECT_THAT(tokens_, ElementsAre(3, 21));
  logits_[7] = std::numeric_limits<float>::quiet_NaN();
  drafts_ = {4, -1};
  ASSERT_TRUE(Sample({2, 2}, true).ok());
  EXPECT_THAT(tokens_, ElementsAre(LogitMark(7, false), kSkippedMark));
  EXPECT_EQ(CountSampled(tokens_), 0);
}

TEST_F(SampledRows, RefuseStatesThatAreNone) {
  EXPECT_EQ(Sample({1, 3}).message(), "state_rows: expected less than 3, got 3 at 1");
  EXPECT_EQ(Sample({1}).message(), "state_rows: expected i32 [2], got i32 [1]");
}

}  // namespace
}  // namespace marlin::advance_tokens_test
