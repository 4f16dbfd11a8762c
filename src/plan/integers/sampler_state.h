// The sampler state of a sequence, which host and device share, and its random numbers. Compiles as
// C++20 and as Metal Shading Language.
#ifndef MARLIN_PLAN_INTEGERS_SAMPLER_STATE_H_
#define MARLIN_PLAN_INTEGERS_SAMPLER_STATE_H_

#include "plan/integers/both_languages.h"

namespace marlin {
namespace kernels {

/// SamplingOptions.
struct DrawOptions {
  MARLIN_INT64 top_k;
  ulong seed;
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
};

MARLIN_SHARED ulong kSamplerMagic = 0x6d61726c696e7361ul;  ///< Marks memory that was reset.
MARLIN_SHARED int kRandomWords = 312;

/// One uint per token follows in memory: the lowest bit is set if the prompt has the token, the
/// upper bits count how often it was drawn.
struct SamplerState {
  ulong magic;
  MARLIN_INT64 vocab;
  DrawOptions options;
  ulong random[kRandomWords];  ///< mt19937_64
  MARLIN_INT64 next;           ///< The word that the next number replaces.
};

static inline MARLIN_DEVICE_MEMORY uint* SeenTokens(MARLIN_DEVICE_MEMORY SamplerState* state) {
  return reinterpret_cast<MARLIN_DEVICE_MEMORY uint*>(state + 1);
}

MARLIN_INLINE bool Penalizes(DrawOptions options) {
  return options.repetition_penalty != 1.0f || options.presence_penalty != 0.0f ||
         options.frequency_penalty != 0.0f;
}

/// As std::mt19937_64 is seeded.
MARLIN_INLINE void SeedRandom(MARLIN_DEVICE_MEMORY SamplerState* state, ulong seed) {
  state->random[0] = seed;
  for (int i = 1; i < kRandomWords; ++i) {
    seed = 6364136223846793005ul * (seed ^ (seed >> 62)) + ulong(i);
    state->random[i] = seed;
  }
  state->next = 0;
}

/// The numbers of std::mt19937_64, which makes all words at once. A word depends on words of the
/// last round, at its place and after it, and of this round before it.
MARLIN_INLINE ulong NextRandom(MARLIN_DEVICE_MEMORY SamplerState* state) {
  MARLIN_DEVICE_MEMORY ulong* const words = state->random;
  const int at = int(state->next);
  const int after = at + 1 < kRandomWords ? at + 1 : 0;
  const int middle = kRandomWords / 2;
  const ulong mixed = (words[at] & ~0x7ffffffful) | (words[after] & 0x7ffffffful);
  const ulong twist = (mixed & 1ul) != 0 ? 0xb5026f5aa96619e9ul : 0ul;
  ulong word = words[at < middle ? at + middle : at - middle] ^ (mixed >> 1) ^ twist;
  words[at] = word;
  state->next = after;
  word ^= (word >> 29) & 0x5555555555555555ul;
  word ^= (word << 17) & 0x71d67fffeda60000ul;
  word ^= (word << 37) & 0xfff7eee000000000ul;
  return word ^ (word >> 43);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_PLAN_INTEGERS_SAMPLER_STATE_H_
