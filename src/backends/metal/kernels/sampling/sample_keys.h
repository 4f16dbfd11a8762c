// Logits as integers of the same order, and reductions over the threadgroup of a row.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_KEYS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_KEYS_H_

#include "backends/metal/kernels/sampling/sample_parameters.h"
#include "backends/metal/kernels/shuffle.h"
#include "plan/integers/sample_weights.h"

namespace marlin {
namespace kernels {

/// Keys ascend with the logit; 0 and -0 have the same.
static inline uint KeyOf(uint logit) {
  if (logit << 1 == 0) return 0x80000000u;
  return (logit >> 31) != 0 ? ~logit : logit | 0x80000000u;
}

static inline uint LogitOf(uint key) { return (key >> 31) != 0 ? key & 0x7fffffffu : ~key; }

/// A token with its logit: the largest is the most likely one, ties by the lower id. Not 0.
static inline ulong TokenKey(uint logit, int id) { return ulong(KeyOf(logit)) << 32 | uint(~id); }
static inline uint LogitOfToken(ulong key) { return LogitOf(uint(key >> 32)); }
static inline int IdOfToken(ulong key) { return int(~uint(key)); }

/// A thread's place in the threadgroup.
struct SamplePlace {
  int index;
  ushort simdgroup;
  ushort lane;
};

/// All threads call these with memory of a word per simdgroup, and get the same result.
static METAL_FUNC ulong LargestOfThreads(threadgroup ulong* words, ulong value, SamplePlace place) {
  for (ushort step = kLanes / 2; step > 0; step /= 2) {
    value = LargerOf(value, ShuffleXor(value, step));
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // The last call's words are read.
  if (place.lane == 0) words[place.simdgroup] = value;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  value = words[place.lane % kSampleSimdgroups];
  for (ushort step = kLanes / 2; step > 0; step /= 2) {
    value = LargerOf(value, ShuffleXor(value, step));
  }
  return value;
}

static METAL_FUNC ulong SumOfThreads(threadgroup ulong* words, ulong value, SamplePlace place) {
  const ulong sum = SumOfLanes(value);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (place.lane == 0) words[place.simdgroup] = sum;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return SumOfLanes(place.lane < kSampleSimdgroups ? words[place.lane] : 0ul);
}

/// The least of some ids, of which each thread has one or the largest integer.
static METAL_FUNC int LeastIdOfThreads(threadgroup ulong* words, int id, SamplePlace place) {
  return int(~uint(LargestOfThreads(words, ulong(~uint(id)), place)));
}

/// No id.
constant constexpr int kNoId = 0x7fffffff;

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_KEYS_H_
