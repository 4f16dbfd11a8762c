// Prefill of MLA: a prompt whose latents expand to heads gives what it gives in pieces, which
// attend to latents, whatever the sequences that share a pass and the tokens before.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "engine/mixers/latent_attention/expand.h"
#include "engine/model_impl.h"
#include "marlin/model.h"
#include "random_model.h"

namespace marlin::latent_prefill_test {
namespace {

using testing::TemporaryDirectory;
using testing::TokensBelow;

constexpr int64_t kVocab = 64;

struct Mode {
  const char* name;
  ModelOptions options;
  double tolerance;  ///< Relative to the largest logit.
};

std::vector<Mode> Modes() {
  std::vector<Mode> modes(4);
  modes[0] = {"default", {}, 3e-2};
  modes[1] = {"fp8 cache", {}, 3e-2};
  modes[1].options.kv_cache = DType::kF8E4M3;
  modes[2] = {"exact", {}, 1e-4};
  modes[2].options.allow_bf16_activations = false;
  modes[3] = {"exact, bf16 cache", {}, 1e-4};
  modes[3].options.allow_bf16_activations = false;
  modes[3].options.kv_cache = DType::kBf16;
  return modes;
}

class LatentPrefill : public ::testing::Test {
 protected:
  void SetUp() override {
    device_.emplace(*Device::Open(TestDevice(), {.threads = 2}));
    testing::WriteDeepseekV3(directory_.path(), kVocab, 512);
  }

  Model Open(const ModelOptions& options) {
    Result<Model> model = Model::Open(directory_ / "", *device_, options);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }

  /// The logits of all tokens of a sequence, fed `piece` at a time after `before` tokens of it.
  static std::vector<float> Feed(const Model& model, Sequence* sequence,
                                 const std::vector<int32_t>& tokens, size_t piece) {
    std::vector<float> logits(tokens.size() * kVocab);
    for (size_t first = 0; first < tokens.size(); first += piece) {
      const size_t count = std::min(piece, tokens.size() - first);
      const SequenceInput input{sequence, {tokens.data() + first, count}, true};
      const MutableTensorView out(logits.data() + first * kVocab, DType::kF32,
                                  {static_cast<int64_t>(count), kVocab});
      const Status status = model.Forward({&input, 1}, out);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    return logits;
  }
  static std::vector<float> FeedAll(const Model& model, const std::vector<int32_t>& tokens,
                                    size_t piece) {
    Sequence sequence = *model.NewSequence();
    return Feed(model, &sequence, tokens, piece);
  }

  static bool Expands(const Model& model, const std::vector<PassSequence>& sequences) {
    return ExpandsLatents(model.device(), Internals::Impl(model).decoder.config, sequences,
                          Internals::Impl(model).products.determinism);
  }

  static void ExpectNear(const std::vector<float>& got, const std::vector<float>& want,
                         double tolerance) {
    ASSERT_EQ(got.size(), want.size());
    float largest = 0;
    for (const float logit : want) largest = std::max(largest, std::abs(logit));
    ASSERT_GT(largest, 0.0F);
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << i;
      worst = std::max(worst, std::abs(double{got[i]} - double{want[i]}));
    }
    EXPECT_LE(worst / largest, tolerance);
    // The same bits would mean that both had one form.
    EXPECT_GT(worst, 0.0);
  }

  TemporaryDirectory directory_;
  std::optional<Device> device_;
};

constexpr size_t kPiece = 20;

TEST_F(LatentPrefill, APromptIsItsPieces) {
  const std::vector<int32_t> tokens = TokensBelow(kVocab, 330);
  for (const Mode& mode : Modes()) {
    SCOPED_TRACE(mode.name);
    const Model model = Open(mode.options);
    ASSERT_TRUE(Expands(model, {{330, 330}}));
    ASSERT_FALSE(Expands(model, {{kPiece, kPiece}}));
    ASSERT_FALSE(Expands(model, {{kPiece, 330}}));
    ExpectNear(FeedAll(model, tokens, 330), FeedAll(model, tokens, kPiece), mode.tolerance);
  }
}

TEST_F(LatentPrefill, KeysOfEarlierPassesAreSeen) {
  const std::vector<int32_t> tokens = TokensBelow(kVocab, 400);
  const std::vector<int32_t> more(tokens.begin() + 170, tokens.end());
  for (const Mode& mode : Modes()) {
    SCOPED_TRACE(mode.name);
    const Model model = Open(mode.options);
    ASSERT_TRUE(Expands(model, {{230, 400}}));
    Sequence expanded = *model.NewSequence();
    Sequence pieces = *model.NewSequence();
    // The same cache before: the second pass alone differs.
    for (Sequence* const sequence : {&expanded, &pieces}) {
      Feed(model, sequence, {tokens.begin(), tokens.begin() + 170}, kPiece);
    }
    ExpectNear(Feed(model, &expanded, more, 230), Feed(model, &pieces, more, kPiece),
               mode.tolerance);
    // A token after it attends to latents, which expansion leaves as they were.
    const std::vector<float> next = Feed(model, &expanded, {5}, 1);
    const std::vector<float> want = Feed(model, &pieces, {5}, 1);
    float largest = 0;
    for (const float logit : want) largest = std::max(largest, std::abs(logit));
    for (size_t i = 0; i < next.size(); ++i) {
      EXPECT_NEAR(next[i], want[i], mode.tolerance * double{largest}) << i;
    }
  }
}

TEST_F(LatentPrefill, SequencesOfAPassDoNotMix) {
  // Three prompts of other lengths, one of them behind a prefix and one of a few tokens; the memory
  // holds one sequence of 512 tokens, so that some heads are expanded at a time.
  const std::vector<int32_t> tokens = TokensBelow(kVocab, 500);
  const size_t lengths[] = {210, 3, 260};
  for (const Mode& mode : Modes()) {
    SCOPED_TRACE(mode.name);
    const Model model = Open(mode.options);
    ASSERT_TRUE(Expands(model, {{210, 250}, {3, 3}, {260, 260}}));
    std::vector<Sequence> sequences;
    std::vector<float> want;
    for (size_t s = 0; s < 3; ++s) {
      const std::vector<int32_t> own(tokens.begin() + static_cast<int64_t>(s) * 40,
                                     tokens.begin() + static_cast<int64_t>(s * 40 + lengths[s]));
      Sequence alone = *model.NewSequence();
      sequences.push_back(*model.NewSequence());
      if (s == 0) {
        Feed(model, &alone, {tokens.end() - 40, tokens.end()}, kPiece);
        Feed(model, &sequences.back(), {tokens.end() - 40, tokens.end()}, kPiece);
      }
      const std::vector<float> logits = Feed(model, &alone, own, kPiece);
      want.insert(want.end(), logits.begin(), logits.end());
    }
    std::vector<SequenceInput> inputs;
    for (size_t s = 0; s < 3; ++s) {
      inputs.push_back({&sequences[s], {tokens.data() + s * 40, lengths[s]}, true});
    }
    std::vector<float> got(want.size());
    const Status status = model.Forward(
        inputs, {got.data(), DType::kF32, {static_cast<int64_t>(got.size()) / kVocab, kVocab}});
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectNear(got, want, mode.tolerance);
  }
}

TEST_F(LatentPrefill, BatchInvariantModeKeepsTheBitsOfPieces) {
  ModelOptions options;
  options.batch_invariant = true;
  const Model model = Open(options);
  ASSERT_FALSE(Expands(model, {{330, 330}}));
  const std::vector<int32_t> tokens = TokensBelow(kVocab, 330);
  EXPECT_EQ(FeedAll(model, tokens, 330), FeedAll(model, tokens, kPiece));
}

}  // namespace
}  // namespace marlin::latent_prefill_test
