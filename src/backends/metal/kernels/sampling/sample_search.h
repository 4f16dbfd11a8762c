// The token of a cumulative weight: a radix search over the bits of the logits, with a histogram of
// weights per level. It needs no sort, and the sums are of integers
// (plan/integers/sample_weights.h) and so do not depend on an order.
//
//   fill     bins of the tokens that are kept and begin with the bits found so far
//   find     the first simdgroup: from the top, the bin at which the sum exceeds the target
//   ties     of the tokens with the logit that was found, the one that the rest of the target says
//
// A search reads the logits three times for bins, which compute the weights of tokens that still
// match, and twice for ties. Threadgroup memory: 16,792 bytes.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_SEARCH_H_
#define MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_SEARCH_H_

#include <metal_atomic>

#include "backends/metal/kernels/sampling/sample_keys.h"

namespace marlin {
namespace kernels {

constant constexpr int kDigitBits = 11;  ///< Bits of a level.
constant constexpr int kBins = 1 << kDigitBits;
constant constexpr int kBinsOfLane = kBins / kLanes;
constant constexpr int kLevels = 3;

struct SampleScratch {
  metal::atomic_uint low[kBins];  ///< The weights of bins: lower and upper halves.
  metal::atomic_uint high[kBins];
  ulong words[kSampleSimdgroups];
  int ties[kSampleSimdgroups];
  ulong found;
  uint digit;
  int id;
};

/// The logits of a row after penalties and its mask.
struct RowLogits {
  device const uint* logits;  ///< Bits of floats.
  device const uint* seen;
  device const uint* allowed;  ///< The words of the mask, if `masked`.
  DrawOptions options;
  bool penalizes;
  bool masked;
  int vocab;
};

/// Logits that are no numbers stay so: they are an error.
static METAL_FUNC uint LogitAt(RowLogits row, int id) {
  uint logit = row.logits[id];
  if (row.penalizes) logit = PenalizedLogit(logit, row.seen[id], row.options);
  if (!row.masked || (row.allowed[id / 32] >> (id % 32) & 1u) != 0 || !IsLogit(logit)) return logit;
  return kMinusInfinityBits;
}

/// The last token that is kept.
struct Cut {
  uint key;
  int id;
};

static inline bool Keeps(Cut cut, uint key, int id) {
  return key > cut.key || (key == cut.key && id <= cut.id);
}

/// The terms of a sum: the number of tokens, or weights from `least` on.
struct Measure {
  bool counts;
  ulong least;
  WeightScale scale;
};

static METAL_FUNC ulong MassOf(uint logit, Measure measure) {
  if (measure.counts) return 1;
  const ulong weight = WeightOf(logit, measure.scale);
  return weight < measure.least ? 0ul : weight;
}

/// Adds 64 bits, of which no other half has a carry yet.
static METAL_FUNC void AddToBin(threadgroup SampleScratch* scratch, uint bin, ulong mass) {
  const uint low = uint(mass);
  const uint before =
      metal::atomic_fetch_add_explicit(scratch->low + bin, low, metal::memory_order_relaxed);
  const uint high = uint(mass >> 32) + (before + low < before ? 1u : 0u);
  if (high == 0) return;
  metal::atomic_fetch_add_explicit(scratch->high + bin, high, metal::memory_order_relaxed);
}

static METAL_FUNC ulong BinAt(threadgroup SampleScratch* scratch, int bin) {
  const uint low = metal::atomic_load_explicit(scratch->low + bin, metal::memory_order_relaxed);
  const uint high = metal::atomic_load_explicit(scratch->high + bin, metal::memory_order_relaxed);
  return ulong(high) << 32 | low;
}

/// Bits of a key below those that a level finds, and below those found before it.
static inline int BitsBelow(int level) { return metal::max(32 - kDigitBits * (level + 1), 0); }
static inline int BitsLeft(int level) { return 32 - kDigitBits * level; }

/// The bins of a level for tokens whose keys begin with `prefix`.
static METAL_FUNC void FillBins(threadgroup SampleScratch* scratch, RowLogits row, Cut cut,
                                Measure measure, int level, uint prefix, SamplePlace place) {
  for (int bin = place.index; bin < kBins; bin += kSampleThreads) {
    metal::atomic_store_explicit(scratch->low + bin, 0u, metal::memory_order_relaxed);
    metal::atomic_store_explicit(scratch->high + bin, 0u, metal::memory_order_relaxed);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int left = BitsLeft(level);
  const uint digits = (1u << (left - BitsBelow(level))) - 1u;
  for (int id = place.index; id < row.vocab; id += kSampleThreads) {
    const uint logit = LogitAt(row, id);
    const uint key = KeyOf(logit);
    if (!Keeps(cut, key, id) || (level > 0 && key >> left != prefix)) continue;
    const ulong mass = MassOf(logit, measure);
    if (mass != 0) AddToBin(scratch, key >> BitsBelow(level) & digits, mass);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

/// The sum of a lane's bins, the lanes descending.
static METAL_FUNC ulong SumOfBins(threadgroup SampleScratch* scratch, ushort lane) {
  const int top = kBins - 1 - lane * kBinsOfLane;
  ulong sum = 0;
  for (int i = 0; i < kBinsOfLane; ++i) sum += BinAt(scratch, top - i);
  return sum;
}

/// The sum of all bins, for all threads.
static METAL_FUNC ulong TotalOfBins(threadgroup SampleScratch* scratch, SamplePlace place) {
  if (place.simdgroup == 0) {
    const ulong total = SumOfLanes(SumOfBins(scratch, place.lane));
    if (place.lane == 0) scratch->found = total;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const ulong total = scratch->found;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return total;
}

/// Finds the bin from the top at which the sum exceeds `target`, and what is left of the target in
/// it. The first simdgroup.
static METAL_FUNC void FindBin(threadgroup SampleScratch* scratch, ulong target, ushort lane) {
  const ulong sum = SumOfBins(scratch, lane);
  const ulong through = SumThrough(sum, lane);
  ulong before = through - sum;
  if (target < before || target >= through) return;
  int bin = kBins - 1 - lane * kBinsOfLane;
  while (target - before >= BinAt(scratch, bin)) before += BinAt(scratch, bin--);
  scratch->digit = uint(bin);
  scratch->found = target - before;
}

static METAL_FUNC bool IsTie(RowLogits row, Cut cut, uint key, int id, int end) {
  return id < end && KeyOf(LogitAt(row, id)) == key && Keeps(cut, key, id);
}

/// The id of kept token `number` of those with a key, by id. A simdgroup has adjacent ids.
static METAL_FUNC int TieAt(threadgroup SampleScratch* scratch, RowLogits row, Cut cut, uint key,
                            int number, SamplePlace place) {
  const int vectors = (row.vocab + kSampleThreads - 1) / kSampleThreads;
  const int begin = metal::min(place.simdgroup * vectors * kLanes, row.vocab);
  const int end = metal::min(begin + vectors * kLanes, row.vocab);
  int count = 0;
  for (int first = begin; first < end; first += kLanes) {
    count += IsTie(row, cut, key, first + place.lane, end) ? 1 : 0;
  }
  count = metal::simd_sum(count);
  if (place.lane == 0) scratch->ties[place.simdgroup] = count;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int ties_before = place.lane < place.simdgroup ? scratch->ties[place.lane] : 0;
  int left = number - metal::simd_sum(ties_before);
  if (left >= 0 && left < count) {
    for (int first = begin; first < end; first += kLanes) {
      const int tie = IsTie(row, cut, key, first + place.lane, end) ? 1 : 0;
      const int before = metal::simd_prefix_exclusive_sum(tie);
      if (tie != 0 && before == left) scratch->id = first + place.lane;
      left -= metal::simd_sum(tie);
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int id = scratch->id;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return id;
}

/// The first kept token at which the sum of the masses exceeds `target`, which is less than all of
/// them. Precondition: the bins of level 0 are filled.
static METAL_FUNC Cut Find(threadgroup SampleScratch* scratch, RowLogits row, Cut cut,
                           Measure measure, ulong target, SamplePlace place) {
  uint prefix = 0;
  for (int level = 0; level < kLevels; ++level) {
    if (level > 0) FillBins(scratch, row, cut, measure, level, prefix, place);
    if (place.simdgroup == 0) FindBin(scratch, target, place.lane);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    prefix = prefix << (BitsLeft(level) - BitsBelow(level)) | scratch->digit;
    target = scratch->found;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  const ulong each = LargerOf(MassOf(LogitOf(prefix), measure), 1ul);
  const int number = int(target / each);
  const Cut found = {prefix, TieAt(scratch, row, cut, prefix, number, place)};
  return found;
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_SEARCH_H_
