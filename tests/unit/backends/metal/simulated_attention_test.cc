// The kernels of attention in the simulator: every head size and option against the reference, what
// is launched, what is read, and errors.
#include "simulated_attention.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <limits>
#include <tuple>

namespace marlin::metal::simulated_attention_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using SimulatedAttention = SimulatedDecoderTest;

constexpr DType kCacheTypes[] = {DType::kF32, DType::kBf16, DType::kF16, DType::kF8E4M3};

TEST_F(SimulatedAttention, EveryHeadSizeGivesTheReference) {
  size_t next = 0;
  for (const auto& [dim, group] : {std::pair<int64_t, int64_t>{64, 8},
                                   {80, 1},
                                   {96, 3},
                                   {112, 5},
                                   {128, 4},
                                   {192, 2},
                                   {256, 4},
                                   {512, 2},
                                   {576, 1},
                                   {33, 7}}) {
    const AttentionSizes sizes{.type = kCacheTypes[next++ % std::size(kCacheTypes)],
                               .heads = 2 * group,
                               .kv_heads = 2,
                               .key_dim = dim,
                               .value_dim = dim == 192 ? 128 : std::min<int64_t>(dim, 512),
                               .sequences = {{1, 70}, {0, 0}, {2, 33}}};
    PagedProblem problem(sizes);
    const Status status = decoder_.Run(problem);
    ASSERT_TRUE(status.ok()) << dim << ": " << status.message();
    ExpectClose(problem.Results(), problem.Reference(), 2e-5, fmt::format("{} features", dim));
  }
}

TEST_F(SimulatedAttention, OptionsGiveTheReference) {
  const std::vector<SequenceSize> lengths = {{1, 130}, {2, 64}, {0, 0}, {3, 65}, {1, 1}};
  for (const AttentionSizes& sizes : {
           AttentionSizes{.type = DType::kBf16, .heads = 4, .sequences = lengths, .sinks = true},
           AttentionSizes{.type = DType::kF16, .heads = 2, .sequences = lengths, .window = 50},
           AttentionSizes{
               .type = DType::kBf16, .sequences = lengths, .window = 48, .chunked = true},
           AttentionSizes{.type = DType::kF8E4M3,
           .heads = 6,
           .kv_heads = 2,
           .sequences = lengths,
           .page_tokens = 32,
           .softcap = 2.0F},
           AttentionSizes{.type = DType::kF32, .sequences = lengths, .window = 1, .sinks = true},
           AttentionSizes{.type = DType::kBf16,
           .key_dim = 72,
           .value_dim = 40,
           .sequences = lengths,
           .values_in_keys = true},
           AttentionSizes{.type = DType::kBf16, .sequences = lengths, .io = DType::kBf16},
           AttentionSizes{.type = DType::kBf16, .sequences = lengths, .io = DType::kF16},
       }) {
    PagedProblem problem(sizes);
    const Status status = decoder_.Run(problem);
    ASSERT_TRUE(status.ok()) << status.message();
    const double bound = sizes.io == DType::kF32 ? 2e-5 : (sizes.io == DType::kF16 ? 1e-3 : 8e-3);
    ExpectClose(problem.Results(), problem.Reference(), bound, fmt::format("{}", sizes.window));
  }
}

// The rows of a batch decide how many threadgroups a row has, and whether its segments are merged
// by a second kernel: not its bits.
TEST_F(SimulatedAttention, SegmentsHaveTheSameBitsHoweverManyRowsThereAre) {
  AttentionSizes sizes{.type = DType::kBf16,
                       .heads = 4,
                       .sequences = {{1, 1300}, {1, 512}, {1, 513}, {1, 40}},
                       .sinks = true};
  PagedProblem alone(sizes);
  ASSERT_TRUE(decoder_.Run(alone).ok());
  EXPECT_THAT(decoder_.Functions(), ElementsAre("attend_4_64", "attend_merge"));
  ExpectClose(alone.Results(), alone.Reference(), 2e-5, "segments");
  // Enough rows that each takes all of its segments itself.
  for (int i = 0; i < 6; ++i) sizes.sequences.push_back({1, 3});
  PagedProblem many(sizes);
  ASSERT_TRUE(decoder_.Run(many).ok());
  EXPECT_THAT(decoder_.Functions(), ElementsAre("attend_tile_64", "attend_4_64"));
  ExpectClose(many.Results(), many.Reference(), 2e-5, "many");
  // The problems have other queries: the rows of the first one alone, and among others.
  const auto rows_of = [&](PagedProblem& problem) {
    for (int64_t i = 0; i < 4 * 4 * 64; ++i) {
      static_cast<float*>(problem.queries().data())[i] = static_cast<float>(i * 37 % 64) / 32 - 1;
    }
    for (int64_t s = 0; s < 4; ++s) {
      for (int64_t at = 0; at < sizes.sequences[static_cast<size_t>(s)].length; ++at) {
        for (int64_t i = 0; i < 64; ++i) {
          problem.SetKey(s, at, 0, i, static_cast<float>((at * 31 + i * 17) % 61) / 30 - 1);
          problem.SetValue(s, at, 0, i, static_cast<float>((at * 13 + i * 29) % 59) / 29 - 1);
        }
      }
    }
    EXPECT_TRUE(decoder_.Run(problem).ok());
    std::vector<double> results = problem.Results();
    results.resize(4 * 4 * 64);
    return results;
  };
  EXPECT_EQ(rows_of(alone), rows_of(many));
}

// Bytes of keys and values are read once per KV head, whatever the number of query heads.
TEST_F(SimulatedAttention, KeysAndValuesAreReadOnce) {
  for (const auto& [group, dim, threadgroup_bytes] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 128, 4 * 1024 + 64 + 32},
        {8, 128, 16 * 1024 + 512 + 32},
        {8, 64, 16 * 1024 + 512 + 32},
        {4, 256, 16 * 1024 + 256 + 32}}) {
    PagedProblem problem({.type = DType::kBf16,
                          .heads = group,
                          .key_dim = dim,
                          .value_dim = dim,
                          .sequences = {{1, 600}}});
    ASSERT_TRUE(decoder_.Run(problem).ok());
    const metal_sim::Counters& counters = decoder_.launches().front().counters;
    EXPECT_EQ(counters.addressed_bytes_read, 600 * 2 * dim * 2) << group << " " << dim;
    EXPECT_EQ(counters.threadgroup_bytes, threadgroup_bytes) << group << " " << dim;
    // Two threadgroups with a segment each; the first one checks the rows.
    const int64_t rounds = group * dim > 512 ? 2 : 1;
    EXPECT_EQ(counters.threadgroup_barriers, 2 * 2 * rounds + 6) << group << " " << dim;
  }
}

TEST_F(SimulatedAttention, TakesKeysOfOneHeadPairThroughManyPages) {
  PagedProblem problem({.type = DType::kBf16, .sequences = {{1, 4096}}, .page_tokens = 128});
  ASSERT_TRUE(decoder_.Run(problem).ok());
  EXPECT_EQ(decoder_.launches().front().counters.addressed_bytes_read, 4096 * 2 * 64 * 2);
  ExpectClose(problem.Results(), problem.Reference(), 2e-5, "4096 keys");
}

TEST_F(SimulatedAttention, TensorsGiveTheBitsOfPages) {
  PagedProblem problem({.type = DType::kBf16,
                        .heads = 6,
                        .kv_heads = 2,
                        .key_dim = 80,
                        .value_dim = 48,
                        .sequences = {{1, 600}, {3, 70}}});
  ASSERT_TRUE(decoder_.Run(problem).ok());
  const std::vector<double> want = problem.Results();
  std::vector<PagedProblem::Tensors> tensors;
  std::vector<AttentionInput> inputs;
  for (int64_t s = 0; s < 2; ++s) tensors.push_back(problem.TensorsOf(s));
  for (const PagedProblem::Tensors& each : tensors) inputs.push_back(each.input);
  std::fill_n(static_cast<float*>(problem.out().data()), want.size(), 0.0F);
  const AttentionOptions options = problem.options();
  const Status status = decoder_.Run(AttentionCall{inputs, options});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(problem.Results(), want);
}

// Features that no vector load can take, in rows of any stride.
TEST_F(SimulatedAttention, UnalignedFeaturesGiveTheReference) {
  PagedProblem problem({.type = DType::kBf16,
                        .heads = 2,
                        .key_dim = 39,
                        .value_dim = 35,
                        .sequences = {{1, 40}, {2, 9}}});
  ASSERT_TRUE(decoder_.Run(problem).ok());
  ExpectClose(problem.Results(), problem.Reference(), 2e-5, "unaligned");
}

TEST_F(SimulatedAttention, WrongRowsAreErrorsAndAreNotFollowed) {
  const AttentionSizes sizes{.heads = 2, .sequences = {{1, 65}, {2, 130}, {1, 5}}, .window = 100};
  const auto message = [&](const auto& spoil) {
    PagedProblem problem(sizes);
    spoil(problem);
    const Status status = decoder_.Run(problem);
    EXPECT_TRUE(status.ok() || status.code() == Code::kInvalidArgument) << status.message();
    // The next call has nothing to complain about.
    PagedProblem right(sizes);
    EXPECT_TRUE(decoder_.Run(right).ok());
    return status.message();
  };
  // Block 0 of the second sequence is before the window of its rows.
  EXPECT_EQ(message([](PagedProblem& p) { p.tables()[3] = 1 << 30; }),
            "block_tables: no page 1073741824 for block 0 of sequence 1");
  EXPECT_EQ(message([](PagedProblem& p) { p.tables()[7] = -1; }), "");
  EXPECT_EQ(message([](PagedProblem& p) { p.tables()[5] = -1; }),
            "block_tables: no page -1 for block 2 of sequence 1");
  EXPECT_EQ(message([](PagedProblem& p) { p.positions()[0] = -3; }),
            "positions: expected 0 or more, got -3 at 0");
  EXPECT_EQ(
      message([](PagedProblem& p) { p.positions()[2] = std::numeric_limits<int32_t>::max(); }),
      "positions: expected 129, got 2147483647 at 2");
  EXPECT_EQ(message([](PagedProblem& p) { p.positions()[3] = 1 << 20; }),
            "block_tables: position 1048576 is in block 16384 of 3");
  EXPECT_EQ(message([](PagedProblem& p) { p.first_rows()[1] = 5; }),
            "first_rows: expected to ascend from 0 to 4, got 5 at 1");
  EXPECT_EQ(
      message([](PagedProblem& p) { p.first_rows()[0] = std::numeric_limits<int32_t>::min(); }),
      "first_rows: expected to ascend from 0 to 4, got -2147483648 at 0");
  EXPECT_EQ(message([](PagedProblem& p) { p.first_rows()[3] = 3; }),
            "first_rows: expected to ascend from 0 to 4, got 3 at 3");
  // The first sequence's error comes first, whichever thread sees it.
  EXPECT_EQ(message([](PagedProblem& p) {
              p.tables()[5] = -1;
              p.tables()[4] = -2;
              p.positions()[3] = -1;
            }),
            "block_tables: no page -2 for block 1 of sequence 1");
}

TEST_F(SimulatedAttention, ManyTokensAreTiles) {
  size_t next = 0;
  for (const auto& [dim, group] : {std::pair<int64_t, int64_t>{64, 8},
                                   {80, 1},
                                   {96, 3},
                                   {112, 5},
                                   {128, 4},
                                   {192, 2},
                                   {256, 4},
                                   {33, 7}}) {
    const AttentionSizes sizes{.type = kCacheTypes[next++ % std::size(kCacheTypes)],
                               .heads = 2 * group,
                               .kv_heads = 2,
                               .key_dim = dim,
                               .value_dim = dim == 192 ? 128 : dim,
                               .sequences = {{9, 70}, {0, 0}, {2, 33}, {6, 6}}};
    PagedProblem problem(sizes);
    const Status status = decoder_.Run(problem);
    ASSERT_TRUE(status.ok()) << dim << ": " << status.message();
    ExpectClose(problem.Results(), problem.Reference(), 2e-5, fmt::format("{} features", dim));
  }
}

TEST_F(SimulatedAttention, TilesHaveEveryOption) {
  const std::vector<SequenceSize> lengths = {{40, 190}, {1, 64}, {0, 0}, {5, 65}};
  for (const AttentionSizes& sizes : {
           AttentionSizes{.type = DType::kBf16, .heads = 4, .sequences = lengths, .sinks = true},
           AttentionSizes{.type = DType::kF16, .heads = 2, .sequences = lengths, .window = 50},
           AttentionSizes{
               .type = DType::kBf16, .sequences = lengths, .window = 48, .chunked = true},
           AttentionSizes{.type = DType::kF8E4M3,
           .heads = 6,
           .kv_heads = 2,
           .sequences = lengths,
           .page_tokens = 32,
           .softcap = 2.0F},
           AttentionSizes{.type = DType::kF32, .sequences = lengths, .window = 1, .sinks = true},
           AttentionSizes{.type = DType::kBf16,
           .key_dim = 72,
           .value_dim = 40,
           .sequences = lengths,
           .values_in_keys = true},
           AttentionSizes{.type = DType::kBf16,
           .heads = 40,
           .key_dim = 37,
           .value_dim = 29,
           .sequences = {{6, 6}},
           .io = DType::kBf16},
       }) {
    PagedProblem problem(sizes);
    const Status status = decoder_.Run(problem);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_THAT(decoder_.Functions().front(), HasSubstr("attend_tile"));
    ExpectClose(problem.Results(), problem.Reference(), sizes.io == DType::kF32 ? 2e-5 : 8e-3,
                fmt::format("{}", sizes.window));
  }
}

// One launch, in which every tile reads the keys that its rows see once.
TEST_F(SimulatedAttention, TilesReadKeysOnce) {
  for (const auto& [dim, rows, bytes] : {std::tuple<int64_t, int64_t, int64_t>{64, 32, 17824},
                                         {128, 32, 26016},
                                         {256, 16, 21216},
                                         {576, 8, 20864}}) {
    constexpr int64_t kTokens = 16;
    PagedProblem problem({.type = DType::kBf16,
                          .heads = 4,
                          .key_dim = dim,
                          .value_dim = dim,
                          .sequences = {{kTokens, 150}}});
    ASSERT_TRUE(decoder_.Run(problem).ok());
    EXPECT_THAT(decoder_.Functions(), ElementsAre(fmt::format("attend_tile_{}", dim)));
    const metal_sim::Counters& counters = decoder_.launches().front().counters;
    const int64_t tiles = 4 * kTokens / rows;
    int64_t keys = 0;
    for (int64_t i = 0; i < tiles; ++i) keys += 150 - kTokens + (i + 1) * rows / 4;
    EXPECT_EQ(counters.addressed_bytes_read, keys * 2 * dim * 2) << dim;
    EXPECT_EQ(counters.threadgroup_bytes, bytes) << dim;
    // Three steps of 64 keys; the first threadgroup checks the rows.
    EXPECT_EQ(counters.threadgroup_barriers, tiles * (3 * 3 + 4) + 6) << dim;
    // Values of 32 keys that no row sees are left out.
    EXPECT_EQ(counters.matrix_operations, tiles * rows * (3 * 64 + 5 * 32) * dim / 512) << dim;
  }
}

// The latents of MLA: one KV head with many query heads, whose values are in its keys.
TEST_F(SimulatedAttention, LatentsAreTilesForAnyNumberOfTokens) {
  for (const AttentionSizes& sizes : {
           AttentionSizes{.type = DType::kBf16,
          .heads = 16,
          .key_dim = 576,
          .value_dim = 512,
          .sequences = {{1, 40}, {0, 0}, {3, 9}},
          .values_in_keys = true},
           AttentionSizes{.type = DType::kF8E4M3,
           .heads = 20,
           .key_dim = 320,
           .value_dim = 256,
           .sequences = {{2, 70}},
           .window = 33,
           .sinks = true,
           .values_in_keys = true},
       }) {
    PagedProblem problem(sizes);
    const Status status = decoder_.Run(problem);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_THAT(decoder_.Functions(), ElementsAre("attend_tile_576"));
    ExpectClose(problem.Results(), problem.Reference(), 2e-5, "latents");
  }
}

// A prompt alone, whose segments have threadgroups of their own, and among other rows.
TEST_F(SimulatedAttention, SegmentsOfTilesHaveTheSameBitsHoweverManyRowsThereAre) {
  AttentionSizes sizes{
      .type = DType::kBf16, .heads = 2, .sequences = {{6, 1030}}, .window = 515, .sinks = true};
  PagedProblem alone(sizes);
  ASSERT_TRUE(decoder_.Run(alone).ok());
  EXPECT_THAT(decoder_.Functions(), ElementsAre("attend_tile_64", "attend_merge"));
  ExpectClose(alone.Results(), alone.Reference(), 2e-5, "segments");
  const std::vector<double> want = alone.Results();
  // With the rows of a second sequence, of the same queries, the tiles take all segments.
  sizes.sequences.push_back({1, 3});
  PagedProblem both(sizes);
  std::copy_n(static_cast<float*>(alone.queries().data()), want.size(),
              static_cast<float*>(both.queries().data()));
  for (int64_t at = 510; at < 1030; ++at) {
    for (int64_t i = 0; i < 64; ++i) {
      both.SetKey(0, at, 0, i, alone.Key(0, at, 0, i));
      both.SetValue(0, at, 0, i, alone.Value(0, at, 0, i));
    }
  }
  ASSERT_TRUE(decoder_.Run(both).ok());
  EXPECT_THAT(decoder_.Functions(), ElementsAre("attend_tile_64", "attend_4_64", "attend_merge"));
  std::vector<double> got = both.Results();
  got.resize(want.size());
  EXPECT_EQ(got, want);
}

TEST_F(SimulatedAttention, TilesOfTensorsHaveTheBitsOfPages) {
  PagedProblem problem({.type = DType::kBf16,
                        .heads = 6,
                        .kv_heads = 2,
                        .key_dim = 80,
                        .value_dim = 48,
                        .sequences = {{13, 100}, {3, 70}},
                        .window = 70});
  ASSERT_TRUE(decoder_.Run(problem).ok());
  const std::vector<double> want = problem.Results();
  std::vector<PagedProblem::Tensors> tensors;
  std::vector<AttentionInput> inputs;
  for (int64_t s = 0; s < 2; ++s) tensors.push_back(problem.TensorsOf(s));
  for (const PagedProblem::Tensors& each : tensors) inputs.push_back(each.input);
  std::fill_n(static_cast<float*>(problem.out().data()), want.size(), 0.0F);
  const AttentionOptions options = problem.options();
  const Status status = decoder_.Run(AttentionCall{inputs, options});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_THAT(decoder_.Functions(), ElementsAre("attend_tile_128", "attend_4_128"));
  EXPECT_EQ(problem.Results(), want);
}

// In tiles masked weights are multiplied with values, too.
TEST_F(SimulatedAttention, NanAndInfinityStayInTheirRowsOfTiles) {
  if (decoder_.fast_math()) GTEST_SKIP() << "fast math";
  PagedProblem problem({.heads = 4, .sequences = {{20, 140}}, .window = 100});
  ASSERT_TRUE(decoder_.Run(problem).ok());
  const std::vector<double> before = problem.Results();
  problem.SetValue(0, 130, 0, 5, std::nanf(""));                          // Rows from 10 on see it.
  problem.SetValue(0, 24, 0, 6, std::numeric_limits<float>::infinity());  // Rows up to 3.
  ASSERT_TRUE(decoder_.Run(problem).ok());
  const std::vector<double> after = problem.Results();
  for (size_t i = 0; i < after.size(); ++i) {
    const size_t row = i / (4 * 64);
    if (row >= 10 && i % 64 == 5) {
      ASSERT_TRUE(std::isnan(after[i])) << i;
    } else if (row <= 3 && i % 64 == 6) {
      ASSERT_TRUE(std::isinf(after[i])) << i;
    } else {
      ASSERT_EQ(after[i], before[i]) << i;
    }
  }
}

// However a prompt is cut.
TEST_F(SimulatedAttention, BatchInvariantRowsHaveTheSameBits) {
  const auto results = [](std::vector<SequenceSize> sequences, int64_t rows) {
    PagedProblem problem({.heads = 2, .sequences = std::move(sequences)});
    auto* const queries = static_cast<float*>(problem.queries().data());
    for (int64_t row = 0; row < problem.Rows(); ++row) {
      for (int64_t i = 0; i < 2 * 64; ++i) {
        queries[row * 2 * 64 + i] =
            static_cast<float>((problem.positions()[static_cast<size_t>(row)] * 7 + i) % 31) / 16;
      }
    }
    for (int64_t at = 0; at < 60; ++at) {
      for (int64_t i = 0; i < 64; ++i) {
        problem.SetKey(0, at, 0, i, static_cast<float>((at * 31 + i * 17) % 61) / 30 - 1);
        problem.SetValue(0, at, 0, i, static_cast<float>((at * 13 + i * 29) % 59) / 29 - 1);
      }
    }
    AttentionOptions options = problem.options();
    options.determinism = Determinism::kBatchInvariant;
    EXPECT_TRUE(decoder_.Run(problem, options).ok());
    std::vector<double> all = problem.Results();
    all.resize(static_cast<size_t>(problem.Rows()) * 2 * 64);
    return std::vector<double>(all.end() - rows * 2 * 64, all.end());
  };
  const std::vector<double> whole = results({{20, 60}}, 3);
  EXPECT_EQ(results({{3, 60}}, 3), whole);
  EXPECT_EQ(results({{1, 60}}, 1), std::vector<double>(whole.end() - 2 * 64, whole.end()));
}

TEST_F(SimulatedAttention, ResultsMayReplaceQueries) {
  for (const int64_t tokens : {1, 9}) {
    PagedProblem problem({.heads = 4, .sequences = {{tokens, 70}}});
    ASSERT_TRUE(decoder_.Run(problem).ok());
    const std::vector<double> want = problem.Results();
    const SequenceRows rows = problem.rows();
    const PagedCache cache = problem.cache();
    const AttentionOptions options = problem.options();
    const Status status = decoder_.Run(
        PagedAttentionCall{problem.queries(), rows, cache, problem.queries(), options});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(reference::Elements(problem.queries()), want) << tokens;
  }
}

TEST_F(SimulatedAttention, LeavesToTheHostWhatItHasNoRegistersFor) {
  const auto takes = [&](AttentionSizes sizes) {
    PagedProblem problem(sizes);
    const SequenceRows rows = problem.rows();
    const PagedCache cache = problem.cache();
    const AttentionOptions options = problem.options();
    return decoder_.decoder().Takes(
        PagedAttentionCall{problem.queries(), rows, cache, problem.out(), options});
  };
  EXPECT_TRUE(takes({.key_dim = 1024, .value_dim = 1024}));
  EXPECT_FALSE(takes({.key_dim = 1025}));
  EXPECT_FALSE(takes({.value_dim = 1025}));
  EXPECT_FALSE(takes({.page_tokens = 48}));
}

// A value that is NaN belongs to the rows that see its key, and to no other.
TEST_F(SimulatedAttention, NanStaysInItsRows) {
  PagedProblem problem({.heads = 4, .sequences = {{3, 40}}, .window = 38});
  ASSERT_TRUE(decoder_.Run(problem).ok());
  const std::vector<double> before = problem.Results();
  problem.SetValue(0, 38, 0, 5, std::nanf(""));  // Rows 1 and 2 see it.
  ASSERT_TRUE(decoder_.Run(problem).ok());
  const std::vector<double> after = problem.Results();
  for (size_t i = 0; i < after.size(); ++i) {
    const bool seen = i / (4 * 64) >= 1 && i % 64 == 5;
    ASSERT_EQ(std::isnan(after[i]), seen) << i;
    if (seen) continue;
    ASSERT_EQ(after[i], before[i]) << i;
  }
}

}  // namespace
}  // namespace marlin::metal::simulated_attention_test
