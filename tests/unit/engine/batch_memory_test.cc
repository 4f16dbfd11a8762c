// Batches whose KV caches exceed the memory: texts are put back and go on later, with the same
// tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "marlin/checkpoint.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "random_model.h"
#include "remote_backend.h"

namespace marlin::batch_memory_test {
namespace {

using testing::OpenRemote;
using testing::RemoteOf;

/// A model on a device with so many bytes for its KV cache.
Model OpenWithCache(const std::string& path, const Device& device, int64_t for_cache) {
  const auto checkpoint = Checkpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  int64_t weights = 0;
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    weights += tensor.shape.ElementCount() * 2;
  }
  auto model =
      Model::Open(path, device, {.device_memory = weights + for_cache, .batch_invariant = true});
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *std::move(model);
}

class BatchMemory : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    path_ = SourceDirectory() + "/" + GetParam();
    if (std::string(GetParam()) == "qwen2") {
      path_ = directory_.path();
      testing::WriteQwen2(path_, 300);
    }
  }

  std::vector<std::vector<int32_t>> Prompts(const Model& model, int count, size_t tokens) const {
    const auto vocab = static_cast<int32_t>(model.info().vocab_size);
    const std::vector<int32_t> text = testing::TokensBelow(vocab, 2000);
    std::vector<std::vector<int32_t>> prompts;
    for (int i = 0; i < count; ++i) {
      prompts.emplace_back(text.begin() + 31 * i, text.begin() + 31 * i + std::ssize(text) / 2);
      prompts.back().resize(tokens - static_cast<size_t>(20 * (i % 3)));
    }
    return prompts;
  }

  testing::TemporaryDirectory directory_;
  std::string path_;
};

INSTANTIATE_TEST_SUITE_P(Models, BatchMemory, ::testing::Values("qwen2", "examples/tiny-qwen3-moe"),
                         [](const auto& name) { return "Model" + std::to_string(name.index); });

// Pages are of 256 tokens. A prompt of 250 tokens takes one page of each group of layers, and the
// second one as it decodes.
TEST_P(BatchMemory, TextsThatArePutBackGoOnWithTheSameTokens) {
  const Device device = OpenRemote({.free_memory = int64_t{1} << 30});
  const Model roomy = OpenWithCache(path_, device, int64_t{1} << 28);
  const auto prompts = Prompts(roomy, 6, 250);
  std::vector<GenerateOptions> options(prompts.size());
  for (size_t i = 0; i < options.size(); ++i) {
    options[i].max_tokens = 40;
    options[i].ignore_eos = true;
    options[i].sampling = {.temperature = i % 2 == 0 ? 0.9F : 0.0F, .seed = i};
    options[i].sampling.frequency_penalty = 0.3F;
  }
  std::vector<std::vector<int32_t>> want;
  for (size_t i = 0; i < prompts.size(); ++i) {
    want.push_back(Generate(roomy, prompts[i], options[i])->token_ids);
  }
  const int64_t page = 256 * roomy.info().kv_cache_bytes_per_token;
  for (const int64_t pages : {3, 4, 5}) {
    SCOPED_TRACE(pages);
    const Model model = OpenWithCache(path_, device, pages * page + page / 2);
    std::vector<std::vector<int32_t>> seen(prompts.size());
    std::vector<size_t> ends;
    BatchOptions batch;
    batch.token = [&](size_t index, int32_t token) {
      seen[index].push_back(token);
      return true;
    };
    batch.ended = [&](size_t index, const Generated&) { ends.push_back(index); };
    for (const int64_t prefill : {0, 90}) {
      seen.assign(prompts.size(), {});
      ends.clear();
      batch.prefill_tokens = prefill;
      const auto texts = GenerateBatch(model, prompts, options, batch);
      ASSERT_TRUE(texts.ok()) << texts.status().message();
      EXPECT_EQ(seen, want);
      EXPECT_EQ(ends.size(), prompts.size());
      EXPECT_EQ(ends.front(), 0U);  // The text that started first was never put back.
    }
  }
}

// A text that was put back waits until another has ended: it would be put back again and again.
TEST(BatchMemoryLimit, ATextWaitsUntilAnotherHasEnded) {
  const std::string path = SourceDirectory() + "/examples/tiny-qwen3-moe";
  const Device device = OpenRemote({.free_memory = int64_t{1} << 30});
  const Model roomy = OpenWithCache(path, device, int64_t{1} << 28);
  const int64_t page = 256 * roomy.info().kv_cache_bytes_per_token;
  const Model model = OpenWithCache(path, device, 4 * page + page / 2);
  const std::vector<int32_t> text = testing::TokensBelow(1000, 310);
  const std::vector<std::vector<int32_t>> prompts = {{text.begin(), text.end() - 10},
                                                     {text.begin() + 10, text.end()}};
  const GenerateOptions options{.max_tokens = 260, .ignore_eos = true};
  const int64_t before = RemoteOf(device).remote_decoder().looked_up();
  const auto texts = GenerateBatch(model, prompts, {&options, 1}, {.prefill_tokens = 90});
  ASSERT_TRUE(texts.ok()) << texts.status().message();
  // Both need a third page for their 513th token, where the second text is put back: it feeds its
  // 512 tokens twice. The other rows are of 10 passes with prompts.
  const int64_t fed = RemoteOf(device).remote_decoder().looked_up() - before;
  EXPECT_GT(fed, 560 + 512 + 560 - 10);
  EXPECT_LT(fed, 560 + 512 + 560 + 30);
}

TEST_P(BatchMemory, ATextThatDoesNotFitAloneIsAnError) {
  const Device device = OpenRemote({.free_memory = int64_t{1} << 30});
  const Model model = OpenWithCache(path_, device, int64_t{1} << 28);
  const int64_t page = 256 * model.info().kv_cache_bytes_per_token;
  const Model small = OpenWithCache(path_, device, 2 * page + page / 2);
  auto prompts = Prompts(model, 3, 100);
  prompts[1] = testing::TokensBelow(static_cast<int32_t>(model.info().vocab_size), 1000);
  const GenerateOptions options{
      .max_tokens = 8, .sampling = {}, .stop_token_ids = {}, .ignore_eos = true};
  const auto texts = GenerateBatch(small, prompts, {&options, 1});
  EXPECT_EQ(texts.status().code(), Code::kOutOfMemory);
  EXPECT_EQ(texts.status().message().find("prompts[1]: KV cache: "), 0U)
      << texts.status().message();
  // The pages of all texts were returned.
  prompts[1].resize(5);
  const auto after = GenerateBatch(small, prompts, {&options, 1});
  ASSERT_TRUE(after.ok()) << after.status().message();
  EXPECT_EQ(after->at(1).token_ids, Generate(small, prompts[1], options)->token_ids);
}

// Any allocation may fail, those of activations too: fewer texts run then, or the error names the
// text that was alone.
TEST_P(BatchMemory, AllocationsMayFail) {
  int64_t until = -1;  // Counts down to the allocation that fails.
  const Device device = OpenRemote(
      {.free_memory = int64_t{1} << 30, .refuses = [&](int64_t) { return until-- == 0; }});
  std::vector<std::vector<int32_t>> want;
  int refused = 0;
  int same = 0;
  for (int64_t fails = -1; fails < 40; ++fails) {
    until = -1;
    const Model model = OpenWithCache(path_, device, int64_t{1} << 28);
    auto prompts = Prompts(model, 5, 70);
    for (size_t i = 0; i < prompts.size(); ++i) prompts[i].resize(10 + 60 * i, 3);
    GenerateOptions options{.max_tokens = 12, .ignore_eos = true};
    options.sampling = {.temperature = 0.9F, .seed = 8};
    BatchOptions batch{.max_batch = 4, .prefill_tokens = 40};
    until = fails;
    const auto texts = GenerateBatch(model, prompts, {&options, 1}, batch);
    if (!texts.ok()) {
      EXPECT_EQ(texts.status().code(), Code::kOutOfMemory);
      EXPECT_NE(texts.status().message().find("remote: no memory"), std::string::npos)
          << texts.status().message();
      ++refused;
      continue;
    }
    std::vector<std::vector<int32_t>> got;
    for (const Generated& text : *texts) got.push_back(text.token_ids);
    if (fails == -1) want = got;
    EXPECT_EQ(got, want) << fails;
    same += until < 0 ? 1 : 0;
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(same, 2);
}

}  // namespace
}  // namespace marlin::batch_memory_test
