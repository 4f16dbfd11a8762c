// Models whose sequences adopt the pages of others: with batch_invariant every bit is as without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "marlin/checkpoint.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "random_model.h"
#include "remote_backend.h"

namespace marlin::prefix_reuse_test {
namespace {

using ::testing::HasSubstr;
using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

struct ReuseCase {
  const char* name;
  const char* model;
  int64_t window;
  ModelOptions options;
};

ModelOptions Invariant(DType cache, bool bf16 = true) {
  ModelOptions options;
  options.batch_invariant = true;
  options.kv_cache = cache;
  options.allow_bf16_activations = bf16;
  return options;
}

ModelOptions WithHostExperts() {
  ModelOptions options = Invariant(DType::kBf16);
  options.host_experts = 3;
  return options;
}

const ReuseCase kCases[] = {
    {"Moe", "examples/tiny-qwen3-moe", 0, Invariant(DType::kBf16)},
    {"MoeFp8", "examples/tiny-qwen3-moe", 0, Invariant(DType::kF8E4M3)},
    {"HostExperts", "examples/tiny-qwen3-moe", 0, WithHostExperts()},
    {"Dense", "qwen2", 0, Invariant(DType::kF32, false)},
    {"ShortWindow", "qwen2", 40, Invariant(DType::kBf16)},
    {"LongWindow", "qwen2", 300, Invariant(DType::kF8E4M3)},
    {"Latent", "deepseek_v3", 0, Invariant(DType::kBf16)},
    {"LatentExact", "deepseek_v3", 0, Invariant(DType::kF32, false)},
};

class PrefixReuse : public ::testing::TestWithParam<ReuseCase> {
 protected:
  void SetUp() override {
    const ReuseCase& c = GetParam();
    std::string path = directory_.path();
    if (c.model == std::string("qwen2")) {
      testing::WriteQwen2(path, c.window);
    } else if (c.model == std::string("deepseek_v3")) {
      testing::WriteDeepseekV3(path, 64, 2048);
    } else {
      path = SourceDirectory() + "/" + c.model;
    }
    auto model = Model::Open(path, *Device::Open(TestDevice(), {.threads = 2}), c.options);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *model;
    text_ = testing::TokensBelow(
        static_cast<int32_t>(vocab()),
        static_cast<size_t>(std::min(model_->info().max_positions, 4 * page() + 40)));
  }

  int64_t vocab() const { return model_->info().vocab_size; }
  PagePool& pool() const { return *Internals::Impl(*model_).pool; }
  int64_t page() const { return pool().page_tokens(); }
  /// The first tokens of the text; with `ends`, others at the end.
  Tokens Text(int64_t count, int32_t ends = -1) const {
    Tokens tokens(text_.begin(), text_.begin() + count);
    if (ends >= 0) std::fill(tokens.end() - 20, tokens.end(), ends);
    return tokens;
  }
  Sequence New() const { return *model_->NewSequence({.truncatable = false}); }

  /// The logits of the tokens up to `end`, which a sequence is fed in one call.
  Logits Feed(Sequence* sequence, const Tokens& tokens, int64_t end) const {
    const auto first = static_cast<size_t>(sequence->length());
    const auto count = static_cast<size_t>(end) - first;
    Logits logits(count * static_cast<size_t>(vocab()));
    const SequenceInput input{sequence, std::span(tokens).subspan(first, count), true};
    const Status status = model_->Forward(
        {&input, 1}, {logits.data(), DType::kF32, {static_cast<int64_t>(count), vocab()}});
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }
  Logits FeedAll(Sequence* sequence, const Tokens& tokens) const {
    return Feed(sequence, tokens, std::ssize(tokens));
  }
  /// The last logits of a text that shares nothing.
  Logits Alone(const Tokens& tokens, size_t rows) const {
    Sequence sequence = New();
    const Logits logits = FeedAll(&sequence, tokens);
    return {logits.end() - static_cast<std::ptrdiff_t>(rows * static_cast<size_t>(vocab())),
            logits.end()};
  }
  /// Feeds a text in pieces and publishes it after each.
  Sequence Publish(const Tokens& tokens) const {
    Sequence sequence = New();
    KvCache& cache = sequence.state()->cache;
    EXPECT_EQ(cache.Adopt(tokens, ""), 0);
    while (cache.length() < std::ssize(tokens)) {
      Feed(&sequence, tokens, std::min(cache.length() + page() - 3, std::ssize(tokens)));
      cache.Publish(tokens);
    }
    return sequence;
  }

  testing::TemporaryDirectory directory_;
  std::optional<Model> model_;
  Tokens text_;
};

INSTANTIATE_TEST_SUITE_P(Models, PrefixReuse, ::testing::ValuesIn(kCases),
                         [](const auto& of) { return std::string(of.param.name); });

TEST_P(PrefixReuse, AdoptedPagesGiveTheSameBits) {
  const Tokens tokens = Text(3 * page() + 30);
  const Tokens other = Text(3 * page() + 25, 3);
  const Logits want = Alone(tokens, 30);
  const Logits of_other = Alone(other, 25);
  std::optional<Sequence> first = Publish(tokens);
  for (const bool owned : {true, false}) {
    if (!owned) first.reset();
    Sequence same = New();
    EXPECT_EQ(same.state()->cache.Adopt(tokens, ""), 3 * page());
    EXPECT_EQ(FeedAll(&same, tokens), want);
    Sequence differs = New();
    EXPECT_EQ(differs.state()->cache.Adopt(other, ""), 3 * page());
    EXPECT_EQ(FeedAll(&differs, other), of_other);
  }
  EXPECT_EQ(pool().statistics().pages_used, 0);
}

// Pages are in the block tables of several sequences of a pass, some of which have others.
TEST_P(PrefixReuse, SequencesOfAPassSharePages) {
  std::vector<Tokens> texts = {Text(2 * page() + 30, 1), Text(2 * page() + 22, 2),
                               Text(page() + 40, 3), Text(2 * page() + 30, 1)};
  std::vector<Logits> want;
  for (const Tokens& tokens : texts) want.push_back(Alone(tokens, 1));
  const Sequence first = Publish(Text(2 * page() + 1));
  std::vector<Sequence> sequences;
  std::vector<SequenceInput> inputs;
  for (size_t i = 0; i < texts.size(); ++i) {
    sequences.push_back(New());
    if (i < 3) {
      EXPECT_GE(sequences[i].state()->cache.Adopt(texts[i], ""), page());
    }
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto fed = static_cast<size_t>(sequences[i].length());
    inputs.push_back({&sequences[i], std::span(texts[i]).subspan(fed), false});
  }
  const auto rows = std::ssize(texts);
  Logits logits(static_cast<size_t>(rows * vocab()));
  const Status status = model_->Forward(inputs, {logits.data(), DType::kF32, {rows, vocab()}});
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t i = 0; i < rows; ++i) {
    EXPECT_TRUE(std::equal(want[static_cast<size_t>(i)].begin(), want[static_cast<size_t>(i)].end(),
                           logits.begin() + i * vocab()))
        << i;
  }
}

// A conversation whose turns are sequences of their own.
TEST_P(PrefixReuse, ConversationsGenerateTheSameText) {
  GenerateOptions options{.max_tokens = page() / 2, .ignore_eos = true};
  options.sampling = {.temperature = 0.8F, .seed = 3};
  Tokens text = Text(page() + 20);
  int64_t adopted = 0;
  for (int turn = 0; turn < 3; ++turn) {
    const auto want = Generate(*model_, text, options);
    ASSERT_TRUE(want.ok()) << want.status().message();
    Sequence sequence = New();
    KvCache& cache = sequence.state()->cache;
    adopted = cache.Adopt(text, "");
    EXPECT_EQ(adopted, turn == 0 ? 0 : (std::ssize(text) - 20 - 1) / page() * page()) << turn;
    const Tokens prompt = text;
    const auto got = Generate(*model_, &sequence, prompt, options, [&](int32_t token) {
      text.push_back(token);
      cache.Publish(text);
      return true;
    });
    ASSERT_TRUE(got.ok()) << got.status().message();
    EXPECT_EQ(got->token_ids, want->token_ids) << turn;
    text.insert(text.end(), 20, 5);
  }
  EXPECT_GT(adopted, page());
}

TEST_P(PrefixReuse, APageIsNotTruncated) {
  const Tokens tokens = Text(2 * page() + 30);
  Sequence sequence = Publish(tokens);
  Status status = sequence.Truncate(2 * page() - 1);
  if (GetParam().window == 0) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("is inside a page that other sequences may share"));
    ASSERT_TRUE(sequence.Truncate(page()).ok());
    const Tokens other = Text(page() + 40, 6);
    EXPECT_EQ(FeedAll(&sequence, other), Alone(other, 40));
    sequence.state()->cache.Publish(other);
  }
  // Others find what was written first.
  Sequence same = New();
  EXPECT_EQ(same.state()->cache.Adopt(tokens, ""), 2 * page());
  EXPECT_EQ(FeedAll(&same, tokens), Alone(tokens, 30));
}

/// A device with memory of its own, of which an allocation may fail.
class PrefixMemory : public ::testing::Test {
 protected:
  Model Open(int64_t window, int64_t for_cache) {
    directory_.emplace();
    testing::WriteQwen2(directory_->path(), window);
    const Device device = testing::OpenRemote(
        {.free_memory = int64_t{1} << 30, .refuses = [this](int64_t) { return until_-- == 0; }});
    const auto checkpoint = Checkpoint::Open(directory_->path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    int64_t weights = 0;
    for (const TensorInfo& tensor : checkpoint->tensors()) {
      weights += tensor.shape.ElementCount() * 2;
    }
    auto model = Model::Open(directory_->path(), device,
                             {.device_memory = weights + for_cache, .batch_invariant = true});
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }

  Status Feed(const Model& model, Sequence* sequence, const Tokens& tokens, Logits* logits) {
    logits->assign(static_cast<size_t>(model.info().vocab_size), 0);
    const SequenceInput input{
        sequence, std::span(tokens).subspan(static_cast<size_t>(sequence->length())), false};
    return model.Forward({&input, 1}, {logits->data(), DType::kF32, {1, model.info().vocab_size}});
  }

  int64_t until_ = -1;  ///< Counts down to the allocation that fails.
  std::optional<testing::TemporaryDirectory> directory_;
};

TEST_F(PrefixMemory, CachedPagesMakeRoomForOtherTexts) {
  const Model roomy = Open(300, int64_t{1} << 24);
  const int64_t page = 256 * roomy.info().kv_cache_bytes_per_token;
  const Model model = Open(300, 5 * page);
  const PagePool& pool = *Internals::Impl(model).pool;
  for (int i = 0; i < 12; ++i) {
    const Tokens all = testing::TokensBelow(128, 900);
    const Tokens tokens(all.begin() + i % 5, all.begin() + i % 5 + 600);
    Logits want;
    Sequence alone = *roomy.NewSequence();
    ASSERT_TRUE(Feed(roomy, &alone, tokens, &want).ok());
    Sequence sequence = *model.NewSequence({.truncatable = false});
    EXPECT_LE(sequence.state()->cache.Adopt(tokens, ""), 512);
    Logits got;
    const Status status = Feed(model, &sequence, tokens, &got);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(got, want);
    sequence.state()->cache.Publish(tokens);
    Sequence again = *model.NewSequence({.truncatable = false});
    EXPECT_EQ(again.state()->cache.Adopt(tokens, ""), 512);
  }
  EXPECT_GT(pool.statistics().evicted_pages, 0);
  EXPECT_EQ(pool.statistics().pages_used, 0);
}

// Cached pages make room for activations, too.
TEST_F(PrefixMemory, CachedPagesMakeRoomForActivations) {
  const Tokens cached = testing::TokensBelow(128, 520);
  const Tokens tokens(400, 9);
  Logits want;
  int dropped = 0;
  for (int64_t fails = -1; fails < 6; ++fails) {
    const Model model = Open(0, int64_t{1} << 28);
    PagePool& pool = *Internals::Impl(model).pool;
    Logits got;
    {
      Sequence sequence = *model.NewSequence();
      sequence.state()->cache.Adopt(cached, "");
      for (size_t fed = 0; fed < 520; fed += 20) {  // With little memory for activations.
        const Tokens part(cached.begin(), cached.begin() + static_cast<std::ptrdiff_t>(fed) + 20);
        ASSERT_TRUE(Feed(model, &sequence, part, &got).ok());
      }
      sequence.state()->cache.Publish(cached);
    }
    ASSERT_EQ(pool.statistics().pages_cached, 2);
    // The next text has pages of another slab.
    std::vector<int32_t> others;
    while (pool.Slabs(0).size() < 2) others.push_back(*pool.Take(0));
    Sequence sequence = *model.NewSequence();
    ASSERT_TRUE(sequence.state()->cache.Reserve(0, 400).ok());
    for (const int32_t page : others) pool.Return(0, page);
    until_ = fails;
    const Status status = Feed(model, &sequence, tokens, &got);
    until_ = -1;
    ASSERT_TRUE(status.ok()) << fails << ": " << status.message();
    if (fails == -1) want = got;
    EXPECT_EQ(got, want) << fails;
    dropped += pool.statistics().pages_cached == 0 ? 1 : 0;
  }
  EXPECT_GT(dropped, 1);
}

}  // namespace
}  // namespace marlin::prefix_reuse_test
