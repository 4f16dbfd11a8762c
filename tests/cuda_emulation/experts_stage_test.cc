// The kernels around the GEMMs of experts, on the host: the sort of selections, rows in the order
// of the slots, and the sum of the results.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "backends/cuda/moe/experts/experts_kernels.h"
#include "base/scalars.h"
#include "cuda_emulation/emulate.h"

namespace marlin::cuda {
namespace {

using enum Element;

/// Random selections, sorted by the host: stable, without experts that are not here.
class Sorted {
 public:
  Sorted(int given_tokens, int given_top_k, int experts, bool has_shared)
      : tokens(given_tokens),
        top_k(given_top_k),
        shared(has_shared),
        present(static_cast<size_t>(experts), 1) {
    std::mt19937 random(static_cast<unsigned>(tokens + experts));
    if (experts > 2) present[2] = 0;
    for (int i = 0; i < tokens * top_k; ++i) {
      // Few experts have most rows.
      const auto most = random() % 3 == 0 ? experts : (experts + 3) / 4;
      ids.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(most)));
    }
    std::vector<int32_t> order;
    for (int32_t i = 0; i < tokens * top_k; ++i) {
      if (present[IdOf(i)] != 0) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [this](int32_t a, int32_t b) { return IdOf(a) < IdOf(b); });
    slot_of.assign(ids.size(), -1);
    begin.assign(present.size() + 2, static_cast<int32_t>(order.size()));
    for (size_t slot = order.size(); slot-- > 0;) {
      slot_of[static_cast<size_t>(order[slot])] = static_cast<int32_t>(slot);
      for (size_t e = 0; e <= IdOf(order[slot]); ++e) begin[e] = static_cast<int32_t>(slot);
    }
    // An expert without rows begins where the next one does.
    for (size_t e = 0, at = 0; e < present.size(); ++e) {
      while (at < order.size() && IdOf(order[at]) < e) ++at;
      begin[e] = static_cast<int32_t>(at);
    }
    for (const int32_t selection : order) token.push_back(selection / top_k);
    for (int t = 0; shared && t < tokens; ++t) token.push_back(t);
    begin.back() = static_cast<int32_t>(token.size());
  }

  int experts() const { return static_cast<int>(present.size()); }
  size_t IdOf(int32_t selection) const {
    return static_cast<size_t>(ids[static_cast<size_t>(selection)]);
  }
  SlotsView View() { return {experts(), begin.data(), token.data(), slot_of.data()}; }
  int ExpertOf(int slot) const {
    return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), slot) - begin.begin()) - 1;
  }

  int tokens;
  int top_k;
  bool shared;
  std::vector<uint8_t> present;
  std::vector<int32_t> ids;
  std::vector<int32_t> begin;
  std::vector<int32_t> token;
  std::vector<int32_t> slot_of;
};

void ExpectSorted(int tokens, int top_k, int experts, int parts, int warps, bool shared) {
  Sorted want(tokens, top_k, experts, shared);
  Sorted got = want;
  std::ranges::fill(got.begin, -7);
  std::ranges::fill(got.token, -7);
  std::ranges::fill(got.slot_of, -7);
  std::vector<int32_t> counts(static_cast<size_t>(parts * (experts + 1)), -7);
  SortArguments args;
  args.ids = want.ids.data();
  args.tokens = tokens;
  args.top_k = top_k;
  args.present = want.present.data();
  args.shared = shared;
  args.parts = parts;
  args.warps = warps;
  args.part_counts = counts.data();
  args.slots = got.View();
  ValueRecord record;
  int any = 0;
  args.errors = {&record, &any};
  ASSERT_EQ(LaunchSort(args, nullptr), cudaSuccess);
  ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  EXPECT_EQ(any, 0);
  EXPECT_EQ(got.slot_of, want.slot_of) << experts << " experts, " << parts << " parts";
  EXPECT_EQ(got.token, want.token) << experts << " experts, " << parts << " parts";
  EXPECT_EQ(got.begin, want.begin) << experts << " experts, " << parts << " parts";
}

TEST(SortKernel, IsStable) {
  ExpectSorted(9, 2, 4, 1, 1, true);
  ExpectSorted(100, 3, 40, 1, 5, false);
  ExpectSorted(300, 4, 128, 3, 8, true);
  ExpectSorted(500, 8, 60, 17, 4, false);
  ExpectSorted(640, 2, 300, 9, 3, true);
  ExpectSorted(120, 1, 1030, 2, 6, false);
}

TEST(SortKernel, RecordsTheFirstSelectionOfNoExpert) {
  for (const int parts : {1, 4}) {
    Sorted sorted(200, 4, 16, false);
    std::vector<int32_t> counts(static_cast<size_t>(parts * 17));
    sorted.ids[701] = 16;
    sorted.ids[351] = -1;
    sorted.ids[790] = 99;
    ValueRecord record;
    int any = 0;
    SortArguments args;
    args.ids = sorted.ids.data();
    args.tokens = 200;
    args.top_k = 4;
    args.present = sorted.present.data();
    args.parts = parts;
    args.warps = 4;
    args.part_counts = counts.data();
    args.slots = sorted.View();
    args.errors = {&record, &any};
    ASSERT_EQ(LaunchSort(args, nullptr), cudaSuccess);
    EXPECT_EQ(cuda_emulation::TakeFindings(), "");
    EXPECT_EQ(any, 1);
    EXPECT_EQ(record.token, 87);
    EXPECT_EQ(record.selection, 3);
    EXPECT_EQ(record.id, -1);
    EXPECT_EQ(sorted.slot_of[351], -1);
  }
}

float Number(int row, int column) { return static_cast<float>((row * 37 + column * 11) % 509) / 8; }

struct StageCase {
  Element from;
  Element to;
  int k;
  int padding = 0;  ///< Elements between rows.
  int first = 0;    ///< Elements before the first row.
};

uint32_t BitsOf(float value, Element type) {
  if (type == kF32) return std::bit_cast<uint32_t>(value);
  return type == kBf16 ? FloatToBf16(value) : FloatToHalf(value);
}
void SetBits(std::vector<uint32_t>& words, size_t i, float value, Element type) {
  if (type == kF32) {
    words[i] = BitsOf(value, type);
  } else {
    reinterpret_cast<uint16_t*>(words.data())[i] = static_cast<uint16_t>(BitsOf(value, type));
  }
}
uint32_t GetBits(const std::vector<uint32_t>& words, size_t i, Element type) {
  return type == kF32 ? words[i] : reinterpret_cast<const uint16_t*>(words.data())[i];
}

void ExpectStaged(const StageCase& c, bool shared) {
  Sorted sorted(21, 3, 7, shared);
  const auto stride = static_cast<size_t>(c.k) + static_cast<size_t>(c.padding);
  std::vector<uint32_t> from(static_cast<size_t>(c.first) + 21 * stride);
  for (int t = 0; t < 21; ++t) {
    for (int k = 0; k < c.k; ++k) {
      const size_t at =
          static_cast<size_t>(c.first) + static_cast<size_t>(k) + static_cast<size_t>(t) * stride;
      SetBits(from, at, Number(t, k), c.from);
    }
  }
  // Expert 4 is in another launch.
  std::vector<uint8_t> members(sorted.present);
  members.push_back(1);
  members[4] = 0;
  const auto out_stride = static_cast<size_t>(StagedStride(c.k));
  constexpr uint32_t kUntouched = 0x7f817f81;
  std::vector<uint32_t> out(sorted.token.size() * out_stride, kUntouched);
  StageRowsArguments args;
  args.rows.data =
      reinterpret_cast<const uint8_t*>(from.data()) + c.first * (c.from == kF32 ? 4 : 2);
  args.rows.stride = static_cast<int64_t>(stride);
  args.rows.type = c.from;
  args.slots = sorted.View();
  args.ids = sorted.ids.data();
  args.tokens = 21;
  args.top_k = 3;
  args.shared = shared;
  args.members = members.data();
  args.k = c.k;
  args.out = out.data();
  args.type = c.to;
  ASSERT_EQ(LaunchStageRows(args, 1, nullptr), cudaSuccess);
  ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  for (int slot = 0; slot < static_cast<int>(sorted.token.size()); ++slot) {
    const bool here = members[static_cast<size_t>(sorted.ExpertOf(slot))] != 0;
    for (int k = 0; k < static_cast<int>(out_stride); ++k) {
      const float number = k < c.k ? Number(sorted.token[static_cast<size_t>(slot)], k) : 0.0f;
      const uint32_t want = here           ? BitsOf(number, c.to)
                            : c.to == kF32 ? kUntouched
                                           : kUntouched & 0xffffu;
      const size_t at = static_cast<size_t>(slot) * out_stride + static_cast<size_t>(k);
      ASSERT_EQ(GetBits(out, at, c.to), want) << slot << " " << k;
    }
  }
}

TEST(StageTokensKernel, CopiesRowsToTheirSlots) {
  ExpectStaged({kF32, kBf16, 256}, true);
  ExpectStaged({kF32, kBf16, 2100, 4}, false);
  ExpectStaged({kF32, kF16, 99, 3, 1}, true);
  ExpectStaged({kBf16, kBf16, 104}, true);
  ExpectStaged({kBf16, kBf16, 100, 5, 3}, false);
  ExpectStaged({kF16, kBf16, 64}, true);
  ExpectStaged({kF32, kF32, 77, 2}, true);
  ExpectStaged({kF16, kF16, 4104}, false);
}

void ExpectGated(Element to, size_t k) {
  Sorted sorted(15, 2, 5, true);
  const std::vector<uint8_t> members = {1, 0, 0, 1, 1, 1};
  const size_t stride = 2 * k + 3;
  const auto out_stride = static_cast<size_t>(StagedStride(static_cast<int64_t>(k)));
  std::vector<float> from(sorted.token.size() * stride);
  for (size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<float>(static_cast<int>(i % 61) - 30);
  }
  std::vector<uint32_t> out(sorted.token.size() * out_stride);
  StageRowsArguments args;
  args.rows = {from.data(), static_cast<int64_t>(stride), kF32, true, {}};
  args.rows.gate.activation = 3;  // Relu.
  args.slots = sorted.View();
  args.members = members.data();
  args.k = static_cast<int>(k);
  args.out = out.data();
  args.type = to;
  ASSERT_EQ(LaunchStageRows(args, 5, nullptr), cudaSuccess);
  ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  for (size_t slot = 0; slot < sorted.token.size(); ++slot) {
    const auto expert = static_cast<size_t>(sorted.ExpertOf(static_cast<int>(slot)));
    for (size_t i = 0; i < k; ++i) {
      const float* const row = from.data() + slot * stride;
      const float want = members[expert] != 0 ? std::max(row[i], 0.0f) * row[k + i] : 0.0f;
      ASSERT_EQ(GetBits(out, slot * out_stride + i, to), BitsOf(want, to)) << slot << " " << i;
    }
  }
}

TEST(StageRowsKernel, ActivatesGates) {
  for (const Element to : {kF32, kBf16, kF16}) {
    ExpectGated(to, 40);
    ExpectGated(to, 83);
  }
}

void ExpectSums(int hidden, int padding, Element type, int top_k, bool shared) {
  Sorted sorted(19, top_k, 9, shared);
  const auto width = static_cast<size_t>(hidden);
  std::vector<float> results(sorted.token.size() * width + 4);
  for (size_t i = 0; i < results.size(); ++i) {
    results[i] = static_cast<float>(static_cast<int>(i * 7 % 41) - 20);
  }
  std::vector<float> weights;
  for (size_t i = 0; i < sorted.ids.size(); ++i) weights.push_back(static_cast<float>(i % 5) / 4);
  const auto stride = width + static_cast<size_t>(padding);
  std::vector<uint32_t> out(19 * stride + 1, 0x12345678);
  SumArguments args;
  args.slots = sorted.View();
  args.results = results.data();
  args.weights = weights.data();
  args.shared = shared;
  args.tokens = 19;
  args.top_k = top_k;
  args.hidden = hidden;
  args.out = out.data();
  args.out_stride = static_cast<int64_t>(stride);
  args.out_type = type;
  ASSERT_EQ(LaunchSum(args, nullptr), cudaSuccess);
  ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  const auto routed = static_cast<size_t>(sorted.begin[9]);
  for (size_t t = 0; t < 19; ++t) {
    for (size_t i = 0; i < width; ++i) {
      float sum = 0;
      bool empty = true;  // A term alone keeps its sign.
      const auto add = [&](float term) {
        sum = empty ? term : sum + term;
        empty = false;
      };
      for (size_t s = 0; s < static_cast<size_t>(top_k); ++s) {
        const size_t at = t * static_cast<size_t>(top_k) + s;
        if (sorted.slot_of[at] < 0) continue;
        add(weights[at] * results[static_cast<size_t>(sorted.slot_of[at]) * width + i]);
      }
      if (shared) add(results[(routed + t) * width + i]);
      ASSERT_EQ(GetBits(out, t * stride + i, type), BitsOf(sum, type)) << t << " " << i;
    }
  }
  EXPECT_EQ(out.back(), 0x12345678u);
}

TEST(SumKernel, AddsTheResultsOfTokens) {
  ExpectSums(64, 0, kF32, 2, true);
  ExpectSums(1100, 4, kBf16, 8, false);
  ExpectSums(1030, 0, kF32, 3, true);
  ExpectSums(64, 3, kF16, 11, true);
  ExpectSums(64, 4, kF16, 1, false);
}

}  // namespace
}  // namespace marlin::cuda
