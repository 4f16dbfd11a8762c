// RankTokens: the log-probability of an id, and the most likely tokens of a row of logits, by one
// threadgroup. Sums are of integers and so have the same bits in any order; logarithms are too
// (plan/integers/soft_double.h).
//
//   The most likely tokens are found one by one, as in a tournament: each thread holds the best of
//   its ids (index, index + kSampleThreads, ...), and once it has won, the whole threadgroup finds
//   the next best of its ids.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_LOG_PROBABILITIES_H_
#define MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_LOG_PROBABILITIES_H_

#include "backends/metal/kernels/sampling/sample_keys.h"

namespace marlin {
namespace kernels {

constant constexpr uint kNanBits = 0x7fc00000u;

/// Buffers of a row; the results begin at it.
struct RankedRow {
  device const uint* logits;
  int id;
  device uint* of_id;
  device int* likely_ids;
  device uint* of_likely;
};

/// The logits of a row that has probabilities: the largest, and ln of the sum of e^(logit -
/// largest).
struct LogSoftmax {
  bool valid;
  uint largest;
  Wide log_sum;
};

/// 64 fraction bits do not fit with the integer part, so that both halves have sums.
static METAL_FUNC Wide SumOfPowers(threadgroup ulong* words, RankedRow row, uint largest,
                                   SamplePlace place, LogProbabilityParameters p) {
  const WeightScale scale = ScaleOf(largest, Wide{kTopBit, 0}, 63);
  ulong high = 0;
  ulong low = 0;
  for (int id = place.index; id < p.vocab; id += kSampleThreads) {
    const ulong weight = WeightOf(row.logits[id], scale);
    high += weight >> 32;
    low += weight & 0xfffffffful;
  }
  high = SumOfThreads(words, high, place);
  low = SumOfThreads(words, low, place);
  high += low >> 32;
  low &= 0xfffffffful;
  const int zeros = LeadingZeros(high);  // At most 32: the largest logit has 2^63.
  return Wide{high << zeros | low << zeros >> 32, 32 - zeros};
}

static METAL_FUNC uint LogProbability(LogSoftmax softmax, uint logit) {
  if (!softmax.valid) return kNanBits;
  if (logit == kMinusInfinityBits) return logit;
  const Wide below = Add(DistanceFrom(softmax.largest, logit), softmax.log_sum);
  const uint bits = uint(RoundedBits(below, kFloatDigits, kFloatLeast));
  return bits == 0 ? 0u : bits | 0x80000000u;
}

/// Gives the thread of the winner the best of its ids after it.
static METAL_FUNC ulong NextOfThread(threadgroup ulong* words, RankedRow row, ulong winner,
                                     ulong mine, SamplePlace place, LogProbabilityParameters p) {
  const int owner = IdOfToken(winner) % kSampleThreads;
  ulong next = 0;
  for (long id = owner + long(place.index) * kSampleThreads; id < p.vocab;
       id += long(kSampleThreads) * kSampleThreads) {
    const ulong key = TokenKey(row.logits[id], int(id));
    if (key < winner) next = LargerOf(next, key);
  }
  next = LargestOfThreads(words, next, place);
  return place.index == owner ? next : mine;
}

static METAL_FUNC void RankTokens(threadgroup ulong* words, RankedRow row, SamplePlace place,
                                  LogProbabilityParameters p) {
  ulong mine = 0;
  int bad = kNoId;
  for (int id = place.index; id < p.vocab; id += kSampleThreads) {
    const uint logit = row.logits[id];
    if (IsLogit(logit)) {
      mine = LargerOf(mine, TokenKey(logit, id));
    } else {
      bad = metal::min(bad, id);
    }
  }
  LogSoftmax softmax = {LeastIdOfThreads(words, bad, place) == kNoId, 0, {0, 0}};
  ulong winner = LargestOfThreads(words, mine, place);
  softmax.largest = LogitOfToken(winner);
  softmax.valid = softmax.valid && softmax.largest != kMinusInfinityBits;
  if (softmax.valid) softmax.log_sum = LogOf(SumOfPowers(words, row, softmax.largest, place, p));
  const bool writes = place.index == 0;
  if (writes) {
    const bool has_id = row.id >= 0 && row.id < p.vocab;
    *row.of_id = has_id ? LogProbability(softmax, row.logits[row.id]) : kNanBits;
  }
  for (int rank = 0; rank < p.likely; ++rank) {
    if (writes) {
      row.likely_ids[rank] = softmax.valid ? IdOfToken(winner) : -1;
      row.of_likely[rank] = LogProbability(softmax, LogitOfToken(winner));
    }
    if (!softmax.valid || rank + 1 == p.likely) continue;
    mine = NextOfThread(words, row, winner, mine, place, p);
    winner = LargestOfThreads(words, mine, place);
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_LOG_PROBABILITIES_H_
