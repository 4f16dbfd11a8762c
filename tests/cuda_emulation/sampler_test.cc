// The sampler of code without clusters on the host: the tokens of the definition.
#include "backends/cuda/sampling/sampler.cu"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda_emulation/emulate.h"

namespace marlin::cuda {
namespace {

constexpr int kVocab = 3001;
constexpr int kThreadsOfRow = 512;

struct Token {
  float logit;
  int id;
  uint64_t weight;
  double likelihood;
};

/// The prefix of tokens that ends where the cumulative weight exceeds `target`.
template <typename Weight>
size_t PrefixOf(const std::vector<Token>& tokens, uint64_t target, const Weight& weight) {
  uint64_t sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    sum += weight(tokens[i]);
    if (sum > target) return i + 1;
  }
  ADD_FAILURE() << "a target beyond the sum";
  return 0;
}

/// Token by token, as sampler.cu begins.
int Draw(const std::vector<float>& logits, const SamplingView& options, uint64_t random) {
  std::vector<Token> tokens;
  for (int id = 0; id < kVocab; ++id) {
    tokens.push_back({logits[static_cast<size_t>(id)], id, 0, 0});
  }
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const Token& a, const Token& b) { return a.logit > b.logit; });
  const auto best = static_cast<double>(tokens[0].logit);
  if (options.temperature == 0.0f) return tokens[0].id;
  for (Token& token : tokens) {
    token.likelihood = std::exp((static_cast<double>(token.logit) - best) /
                                static_cast<double>(options.temperature));
    token.weight = static_cast<uint64_t>(std::ldexp(token.likelihood, 62 - 12));
  }
  const auto weight = [](const Token& token) { return token.weight; };
  const auto sum_of = [&](const auto& of) {
    uint64_t sum = 0;
    for (const Token& token : tokens) sum += of(token);
    return sum;
  };
  if (options.top_k > 0) tokens.resize(static_cast<size_t>(options.top_k));
  if (options.top_p != 1.0f) {
    const double wanted =
        std::ceil(static_cast<double>(options.top_p) * static_cast<double>(sum_of(weight)));
    tokens.resize(PrefixOf(tokens, static_cast<uint64_t>(std::max(wanted, 1.0)) - 1, weight));
  }
  const auto likely = [&](const Token& token) {
    return token.likelihood >= static_cast<double>(options.min_p) ? token.weight : 0;
  };
  const uint64_t total = sum_of(likely);
  const double uniform = std::ldexp(static_cast<double>(random >> 11), -53);
  const auto target = static_cast<uint64_t>(uniform * static_cast<double>(total));
  return tokens[PrefixOf(tokens, std::min(target, total - 1), likely) - 1].id;
}

TEST(EmulatedSampler, DrawsTheTokensOfTheDefinition) {
  if constexpr (kHasTma) GTEST_SKIP() << "clusters are not emulated";
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> logits(kVocab);
  // Ties, and tokens that nothing draws.
  for (float& logit : logits) logit = std::rint(normal(random) * 8) / 8;
  for (size_t i = 0; i < logits.size(); i += 7) logits[i] -= 200.0f;
  for (SamplingView options : {SamplingView{}, SamplingView{.temperature = 1},
                               SamplingView{.temperature = 0.3f, .top_p = 0.8f},
                               SamplingView{.temperature = 2, .min_p = 0.02f},
                               SamplingView{.temperature = 1.5f, .top_p = 0.95f, .top_k = 40}}) {
    options.seed = 11;
    std::vector<uint64_t> memory(static_cast<size_t>(SamplerStateBytes(kVocab)) / 8);
    auto* const state = reinterpret_cast<SamplerState*>(memory.data());
    ValueRecord record;
    int any = 0;
    const ErrorView errors = {&record, &any};
    ASSERT_EQ(cuda_emulation::Emulate(&ResetKernel, {1, kResetThreads},
                                      {options, state, kVocab, nullptr, 0, errors}),
              "");
    std::mt19937_64 words(options.seed);
    for (int round = 0; round < 4; ++round) {
      int32_t token = 0;
      SampleArguments args;
      args.logits = logits.data();
      args.states = reinterpret_cast<uint8_t*>(state);
      args.tokens = &token;
      args.rows = 1;
      args.states_count = 1;
      args.vocab = kVocab;
      args.errors = errors;
      const auto seed = static_cast<uint32_t>(round);
      ASSERT_EQ(cuda_emulation::Emulate(&SampleKernel<1, kThreadsOfRow>,
                                        {1, kThreadsOfRow, 0, seed}, args),
                "");
      const uint64_t word = options.temperature == 0.0f ? 0 : words();
      EXPECT_EQ(token, Draw(logits, options, word)) << options.temperature << ", " << round;
    }
  }
}

}  // namespace
}  // namespace marlin::cuda
