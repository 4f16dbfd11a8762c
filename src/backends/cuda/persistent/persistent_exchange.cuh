// The exchange of values between the CTAs of the persistent kernel, through global memory.
//
//   Every word is an fp32 number whose two lowest bits are a tag, 1 to 3, which changes whenever
//   the word is written again. A reader polls until the tags are those that it waits for: no flags,
//   no fences, no resets. Words of even and of odd layers are in two buffers. A CTA writes a buffer
//   again only after every other one has arrived at the layer between (Route), or, in forms between
//   attentions, in another launch, so that no thread waits for a tag that is gone already.
//
//   The reader uses all words that it loads, tags included: else the compiler would split the load,
//   and parts of it could be older than the rest.
#pragma once

#include "backends/cuda/common/async_copy.cuh"

namespace marlin::cuda {

inline constexpr uint32_t kTagMask = 3;

/// The tag of a buffer's words in layer `clock`; buffers alternate.
MARLIN_DEVICE uint32_t TagOf(uint32_t clock) { return clock / 2 % 3 + 1; }

/// Truncated: a NaN stays a NaN, and infinity is restored by ValueOf.
MARLIN_DEVICE uint32_t Tagged(float value, uint32_t tag) {
  return (__float_as_uint(value) & ~kTagMask) | tag;
}
MARLIN_DEVICE float ValueOf(uint32_t word) { return __uint_as_float(word & ~kTagMask); }

MARLIN_DEVICE bool IsFresh(const uint4& v, uint32_t tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & kTagMask) == 0;
}

MARLIN_DEVICE void PublishWord(uint32_t* to, float value, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(Tagged(value, tag)) : "memory");
}
MARLIN_DEVICE void PublishQuad(uint32_t* to, const float4& v, uint32_t tag) {
  const uint4 words = {Tagged(v.x, tag), Tagged(v.y, tag), Tagged(v.z, tag), Tagged(v.w, tag)};
  PublishSums(reinterpret_cast<float*>(to), words);
}

MARLIN_DEVICE uint4 PollQuad(const uint32_t* from) {
  return PollSums(reinterpret_cast<const float*>(from));
}
/// Polls until `v`, read from there, has the tag.
MARLIN_DEVICE float4 AwaitQuad(const uint32_t* from, uint4 v, uint32_t tag) {
  while (!IsFresh(v, tag)) v = PollQuad(from);
  return {ValueOf(v.x), ValueOf(v.y), ValueOf(v.z), ValueOf(v.w)};
}
MARLIN_DEVICE uint32_t PollWord(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
/// Polls until `word`, read from there, has the tag.
MARLIN_DEVICE float AwaitWord(const uint32_t* from, uint32_t word, uint32_t tag) {
  while (((word ^ tag) & kTagMask) != 0) word = PollWord(from);
  return ValueOf(word);
}

/// Requests a quad again if `polls`: without a branch, so that the requests of several quads are in
/// flight together.
MARLIN_DEVICE void PollQuadIf(bool polls, const uint32_t* from, uint4& v) {
  asm volatile(
      "{\n"
      ".reg .pred polls;\n"
      "setp.ne.s32 polls, %5, 0;\n"
      "@polls ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "r"(polls ? 1 : 0)
      : "memory");
}

/// Which of the missing quads a round of polls requests: all, or the first one until it is there
/// and then all. Polls of many rows would take what L2 delivers from the weights.
enum class Polls : uint8_t { kAll, kFirst };

/// Work of a thread while its first requests are in flight: none.
struct Nothing {
  MARLIN_DEVICE void operator()() const {}
};

/// Quads that a thread awaits together. One after another, each would cost a round trip to L2.
template <int kCount, Polls kPolls = Polls::kAll>
struct AwaitedQuads {
  const uint32_t* from;
  uint4 words[kCount];

  /// `place(i)`: where quad i is, from `from` on; `wanted(i)`: whether there is one.
  template <typename Place, typename Wanted, typename Meanwhile = Nothing>
  MARLIN_DEVICE AwaitedQuads(const uint32_t* first, uint32_t tag, const Place& place,
                             const Wanted& wanted, const Meanwhile& meanwhile = {})
      : from(first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i] = {tag, tag, tag, tag};
      PollQuadIf(wanted(i), from + place(i), words[i]);
    }
    meanwhile();
    bool all = kPolls == Polls::kAll;
    int missing = kCount + 1;
#pragma unroll 1
    while (true) {
      const int before = missing;
      missing = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) missing += IsFresh(words[i], tag) ? 0 : 1;
      if (missing == 0) break;
      // Once the first one has arrived, the next round requests all others.
      if (kPolls == Polls::kFirst) all = !all && missing < before && before <= kCount;
      bool requests = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const bool polls = requests && !IsFresh(words[i], tag);
        requests = requests && (all || !polls);
        PollQuadIf(polls, from + place(i), words[i]);
      }
    }
  }

  /// Zeros, where there is none.
  MARLIN_DEVICE float4 Value(int i) const {
    return {ValueOf(words[i].x), ValueOf(words[i].y), ValueOf(words[i].z), ValueOf(words[i].w)};
  }
};

/// The sums over `splits` rows of words, `stride` apart, of several quads, in the order of the
/// rows. `places`: where each quad is, from `from` on; negative: there is none. kSplits: rows whose
/// words are awaited together. Calls meanwhile() once.
template <int kSplits, int kCount, typename Meanwhile = Nothing>
MARLIN_DEVICE void GatherSums(const uint32_t* from, const int (&places)[kCount], int splits,
                              int stride, uint32_t tag, float4 (&sums)[kCount],
                              const Meanwhile& meanwhile = {}) {
#pragma unroll
  for (float4& sum : sums) sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int first = 0; first < splits; first += kSplits) {
    const AwaitedQuads<kSplits * kCount> quads(
        from + first * stride, tag,
        [&](int i) { return (i / kCount) * stride + places[i % kCount]; },
        [&](int i) { return first + i / kCount < splits && places[i % kCount] >= 0; },
        [&] {
          if (first == 0) meanwhile();
        });
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      if (first + i >= splits) break;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const float4 v = quads.Value(i * kCount + c);
        sums[c] = {sums[c].x + v.x, sums[c].y + v.y, sums[c].z + v.z, sums[c].w + v.w};
      }
    }
  }
}
/// The same of one quad.
MARLIN_DEVICE float4 GatherSums(const uint32_t* from, int splits, int stride, uint32_t tag) {
  float4 sums[1];
  GatherSums<4>(from, {0}, splits, stride, tag, sums);
  return sums[0];
}

}  // namespace marlin::cuda
