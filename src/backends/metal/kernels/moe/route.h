// RouteRow: top-k expert selection of one row of logits, by one simdgroup.
//
//   lane l has experts l, l + 32, ...
//   check    a NaN, +Inf, or no finite logit: report it and return
//   keys     per expert, the bits of its choice in double precision: score plus choice bias
//   groups   keys of experts outside of the best groups become 0
//   select   top_k times: the largest key, ties to the lower expert
//   weigh    scores of the selected experts, normalized and scaled, rounded once to fp32
//
// Ids and weights equal a double-precision router's (soft_double.h) under every compiler
// option. Reads of keys per lane: experts / 32, and again for each selection of its own.
// Threadgroup memory: 12 bytes per expert that there is room for, and 1,024.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_ROUTE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_ROUTE_H_

#include <metal_atomic>

#include "backends/metal/kernels/elements.h"
#include "backends/metal/kernels/moe/router_parameters.h"
#include "backends/metal/kernels/shuffle.h"
#include "plan/integers/soft_double.h"

namespace marlin {
namespace kernels {

constant constexpr uint kNoKey = 0xffffffffu;
/// OrderedOf the least finite double: an expert that may be selected is above those that may not.
constant constexpr ulong kLeastChoice = 0x0010000000000000ul;

/// Buffers of a row; ids and weights begin at it.
struct RouterRow {
  device const float* choice_bias;
  device const uint* scales;  ///< Bits of floats.
  device int* ids;
  device float* weights;
  device metal::atomic_uint* error;
  int row;
};

/// Threadgroup memory of a row.
struct RouterScratch {
  threadgroup float* logits;
  threadgroup ulong* keys;
  threadgroup ulong* group_sums;  ///< [kMostRouterGroups]
};

/// Integers that are ordered as floats are; its own inverse.
static inline int OrderedInt(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

static inline float LargestOfLanes(int ordered) {
  return as_type<float>(OrderedInt(metal::simd_max(ordered)));
}

/// Reports the least key of a simdgroup's lanes; whether there is one.
static METAL_FUNC bool Reported(RouterRow row, uint key, ushort lane) {
  const uint least = metal::simd_min(key);
  if (least == kNoKey) return false;
  if (lane == 0) {
    metal::atomic_fetch_min_explicit(row.error, least, metal::memory_order_relaxed);
  }
  return true;
}

/// Whether the first row's threadgroup finds a choice bias that is NaN.
static METAL_FUNC bool HasNanBias(RouterRow row, ushort lane, RouterParameters p) {
  uint key = kNoKey;
  for (int e = lane; e < p.experts; e += kLanes) {
    if (IsNan(row.choice_bias[e])) key = metal::min(key, uint(e));
  }
  return Reported(row, key, lane);
}

/// Whether a row has no softmax or sigmoid.
static METAL_FUNC bool HasBadLogit(RouterScratch scratch, RouterRow row, ushort lane,
                                   RouterParameters p) {
  const uint first_key = uint(p.experts) + uint(row.row) * uint(RouterKeys(p.experts));
  uint key = kNoKey;
  bool is_finite = false;
  for (int e = lane; e < p.experts; e += kLanes) {
    const uint bits = as_type<uint>(scratch.logits[e]);
    const uint magnitude = bits & 0x7fffffffu;
    is_finite = is_finite || magnitude < kFloatInfinity;
    if (bits != kFloatInfinity && magnitude <= kFloatInfinity) continue;
    key = metal::min(key, first_key + 2 * uint(e) + (bits == kFloatInfinity ? 1u : 0u));
  }
  if (!metal::simd_any(is_finite)) key = metal::min(key, first_key + 2 * uint(p.experts));
  return Reported(row, key, lane);
}

/// largest - logit as a fixed-point number: exact, or far beyond what has an exponential.
static inline ulong Distance(float largest, float logit) {
  constexpr ulong kFar = 0xfffffffffffffffful;
  constexpr uint kSmall = 0x45000000u;  // 2048
  const uint bits = as_type<uint>(logit);
  if (bits == kMinusInfinityBits) return kFar;
  const uint of_largest = as_type<uint>(largest);
  if ((bits & 0x7fffffffu) < kSmall && (of_largest & 0x7fffffffu) < kSmall) {
    const ulong from = FixedOf(largest);
    const ulong to = FixedOf(logit);
    return ((of_largest >> 31) != 0 ? 0ul - from : from) - ((bits >> 31) != 0 ? 0ul - to : to);
  }
  // One of them is large, so that the difference is exact if it is small.
  const float distance = largest - logit;
  return distance < 1024.0f ? FixedOf(distance) : kFar;
}

/// 1 / (1 + e^-x), of which 1 + e^-x is a double for x >= 0: large logits are ties, as on a CPU.
static METAL_FUNC Wide SigmoidOf(float x) {
  constexpr ulong kLargestExponent = 0x162e42fefa39ef00ul;  // e^y is infinite for a larger double.
  constexpr uint kLimit = 0x44800000u;                      // 1024
  const uint bits = as_type<uint>(x);
  const bool is_negative = (bits >> 31) != 0;
  const bool is_large = (bits & 0x7fffffffu) >= kLimit;
  const ulong y = is_large ? ulong(1024) << kFixedBits : FixedOf(x);
  if (is_negative && y > kLargestExponent) return Wide{0, 0};
  const Wide power = ExpOfMinus(y);
  const Wide sum = Add(Wide{kTopBit, 0}, power);
  if (is_negative) return Multiply(power, Reciprocal(sum));
  constexpr int kDropped = 64 - kDoubleDigits;
  return Reciprocal(Normalized(RoundedShift(sum.mantissa, kDropped), sum.exponent + kDropped));
}

/// A softmax: the largest logit, and the factor of e^(logit - largest).
struct Softmax {
  float largest;
  Wide factor;
};

static METAL_FUNC Softmax SoftmaxOf(RouterScratch scratch, ushort lane, RouterParameters p) {
  int ordered = OrderedInt(int(kMinusInfinityBits));
  for (int e = lane; e < p.experts; e += kLanes) {
    ordered = metal::max(ordered, OrderedInt(as_type<int>(scratch.logits[e])));
  }
  Softmax softmax;
  softmax.largest = LargestOfLanes(ordered);
  // 1 to 1,024 with 53 fraction bits, so that the order of the sum does not matter.
  constexpr int kIntegerBits = 10;
  ulong sum = 0;
  for (int e = lane; e < p.experts; e += kLanes) {
    const Wide power = ExpOfMinus(Distance(softmax.largest, scratch.logits[e]));
    const int shift = kIntegerBits - power.exponent;
    if (shift < 64) sum += power.mantissa >> shift;
  }
  softmax.factor = Reciprocal(Normalized(SumOfLanes(sum), kIntegerBits));
  return softmax;
}

static METAL_FUNC Wide ScoreOf(float logit, Softmax softmax, RouterParameters p) {
  if (p.scoring == kScoreSigmoid) return SigmoidOf(logit);
  return Multiply(ExpOfMinus(Distance(softmax.largest, logit)), softmax.factor);
}

static METAL_FUNC void FillKeys(RouterScratch scratch, RouterRow row, Softmax softmax, ushort lane,
                                RouterParameters p) {
  for (int e = lane; e < p.experts; e += kLanes) {
    const float logit = scratch.logits[e];
    ulong choice = p.scoring == kScoreSoftmaxOfChosen ? DoubleOfFloat(logit)
                                                      : DoubleOf(ScoreOf(logit, softmax, p));
    if (p.has_choice_bias) choice = AddDoubles(choice, DoubleOfFloat(row.choice_bias[e]));
    scratch.keys[e] = LargerOf(OrderedOf(choice), kLeastChoice);
  }
}

/// A group's key: the key of its best expert, or of the sum of its two best ones.
static METAL_FUNC ulong KeyOfGroup(threadgroup const ulong* keys, int size, int best_of_group) {
  ulong best = 0;
  ulong second = 0;
  for (int i = 0; i < size; ++i) {
    const ulong key = keys[i];
    second = LargerOf(second, SmallerOf(best, key));
    best = LargerOf(best, key);
  }
  if (size == 1 || best_of_group == 1) return best;
  return OrderedOf(AddDoubles(DoubleOfOrdered(best), DoubleOfOrdered(second)));
}

/// Group-limited routing: excludes the experts of all but the top_groups groups. Ties keep the
/// lower group.
static METAL_FUNC void DropGroups(RouterScratch scratch, ushort lane, RouterParameters p) {
  const int size = p.experts / p.groups;
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int group = lane; group < p.groups; group += kLanes) {
    scratch.group_sums[group] = KeyOfGroup(scratch.keys + group * size, size, p.best_of_group);
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int group = lane; group < p.groups; group += kLanes) {
    const ulong mine = scratch.group_sums[group];
    int before = 0;
    for (int other = 0; other < p.groups; ++other) {
      const ulong sum = scratch.group_sums[other];
      if (sum > mine || (sum == mine && other < group)) ++before;
    }
    if (before < p.top_groups) continue;
    for (int i = 0; i < size; ++i) scratch.keys[group * size + i] = 0;
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
}

/// An expert that may be selected, and its key.
struct Candidate {
  ulong key;
  int expert;
};

/// The better one; ties go to the lower expert.
static inline Candidate BetterOf(Candidate a, Candidate b) {
  const bool second = b.key > a.key || (b.key == a.key && b.expert < a.expert);
  return second ? b : a;
}

static METAL_FUNC Candidate BestOfLane(RouterScratch scratch, ushort lane, RouterParameters p) {
  Candidate best = {0, p.experts};
  for (int e = lane; e < p.experts; e += kLanes) best = BetterOf(best, {scratch.keys[e], e});
  return best;
}

/// Lane i % 32 writes selection i, and reads it again in Weigh.
static METAL_FUNC void SelectExperts(RouterScratch scratch, RouterRow row, ushort lane,
                                     RouterParameters p) {
  Candidate of_lane = BestOfLane(scratch, lane, p);
  for (int i = 0; i < p.top_k; ++i) {
    Candidate best = of_lane;
    for (ushort step = kLanes / 2; step > 0; step /= 2) {
      const Candidate other = {ShuffleXor(best.key, step),
                               metal::simd_shuffle_xor(best.expert, step)};
      best = BetterOf(best, other);
    }
    if (lane == i % kLanes) row.ids[i] = best.expert;
    if (lane == best.expert % kLanes) {
      scratch.keys[best.expert] = 0;
      of_lane = BestOfLane(scratch, lane, p);
    }
  }
}

/// The largest logit of the selected experts. Without a finite one all have equal weights: they are
/// at no distance from it.
static METAL_FUNC float LargestOfSelected(RouterScratch scratch, RouterRow row, ushort lane,
                                          RouterParameters p) {
  int ordered = OrderedInt(int(kMinusInfinityBits));
  for (int i = lane; i < p.top_k; i += kLanes) {
    ordered = metal::max(ordered, OrderedInt(as_type<int>(scratch.logits[row.ids[i]])));
  }
  return LargestOfLanes(ordered);
}

static METAL_FUNC Wide SelectedScore(float logit, Softmax softmax, RouterParameters p) {
  if (p.scoring != kScoreSoftmaxOfChosen) return ScoreOf(logit, softmax, p);
  const bool none_finite = as_type<uint>(softmax.largest) == kMinusInfinityBits;
  return ExpOfMinus(none_finite ? 0ul : Distance(softmax.largest, logit));
}

static inline Wide LargerWide(Wide a, Wide b) {
  const bool larger = a.mantissa == 0 ||
                      (b.mantissa != 0 && (b.exponent > a.exponent ||
                                           (b.exponent == a.exponent && b.mantissa > a.mantissa)));
  return larger ? b : a;
}

/// The bits of a weight times a scale, which may be any number.
static METAL_FUNC uint ScaledBits(Wide weight, uint scale) {
  constexpr uint kNan = 0x7fc00000u;
  const uint magnitude = scale & 0x7fffffffu;
  const Wide product = Multiply(weight, WideOfBits(magnitude));
  uint bits = uint(RoundedBits(product, kFloatDigits, kFloatLeast));
  if (magnitude == kFloatInfinity && weight.mantissa != 0) bits = kFloatInfinity;
  if (magnitude > kFloatInfinity || (magnitude == kFloatInfinity && weight.mantissa == 0)) {
    bits = kNan;
  }
  return bits ^ (scale & 0x80000000u);
}

static METAL_FUNC void Weigh(RouterScratch scratch, RouterRow row, Softmax softmax, ushort lane,
                             RouterParameters p) {
  const bool of_chosen = p.scoring == kScoreSoftmaxOfChosen;
  if (of_chosen) softmax.largest = LargestOfSelected(scratch, row, lane, p);
  Wide factor = WideOfFloat(p.scaling_factor);
  if (p.normalize || of_chosen) {
    Wide sum = {0, 0};
    for (int i = lane; i < p.top_k; i += kLanes) {
      sum = Add(sum, SelectedScore(scratch.logits[row.ids[i]], softmax, p));
    }
    for (ushort step = kLanes / 2; step > 0; step /= 2) {
      const Wide other = {ShuffleXor(sum.mantissa, step),
                          metal::simd_shuffle_xor(sum.exponent, step)};
      sum = Add(sum, other);
    }
    // 1e-20: all scores may be 0, which must not become 0 / 0.
    sum = Add(sum, Wide{0xbce5086492111800ul, -67});
    if (!of_chosen) sum = LargerWide(sum, WideOfFloat(p.least_sum));
    factor = Multiply(factor, Reciprocal(sum));
  }
  const uint sign = as_type<uint>(p.scaling_factor) & 0x80000000u;
  for (int i = lane; i < p.top_k; i += kLanes) {
    const Wide score = SelectedScore(scratch.logits[row.ids[i]], softmax, p);
    const uint scale = p.has_scales ? row.scales[row.ids[i]] : as_type<uint>(1.0f);
    row.weights[i] = as_type<float>(ScaledBits(Multiply(score, factor), scale) ^ sign);
  }
}

/// Routes the logits in *scratch, of which every lane has written its own.
static METAL_FUNC void RouteRow(RouterScratch scratch, RouterRow row, ushort lane,
                                RouterParameters p) {
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (row.row == 0 && p.has_choice_bias && HasNanBias(row, lane, p)) return;
  if (HasBadLogit(scratch, row, lane, p)) return;
  Softmax softmax = {0.0f, {0, 0}};
  if (p.scoring == kScoreSoftmax) softmax = SoftmaxOf(scratch, lane, p);
  FillKeys(scratch, row, softmax, lane, p);
  if (p.top_groups < p.groups) DropGroups(scratch, lane, p);
  SelectExperts(scratch, row, lane, p);
  Weigh(scratch, row, softmax, lane, p);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_ROUTE_H_
