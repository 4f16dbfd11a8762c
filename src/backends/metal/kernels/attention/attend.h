// Attend: causal softmax attention of one row at a time, in fp32 with a running maximum, over the
// pages of a cache or over a tensor.
//
//   A threadgroup takes kHeads query heads of a KV head of one row. For every segment of 512 keys,
//   for every block of 32 keys in it:
//     simdgroup s has keys 4 s to 4 s + 3, a lane has features of them and of all query heads
//     scores = queries . keys: a transposing butterfly adds 4 x kHeads products over the lanes,
//       after which lane l has the sum of key l / 8 and head l % 8 / (8 / kHeads)
//     weights = e^(scores - maximum); out += weights . values
//   then the simdgroups' sums are added in order, and the segment to the total.
//
//   Grid of threadgroups: [KV heads x parts of their query heads][segments][rows]. With one segment
//   in the grid a threadgroup takes all of its row; otherwise the segments of a row go to memory,
//   and attend_merge adds them in the same order by the same operations, unless there is only one.
//
// A row's bits depend neither on the other rows nor on the grid. Masked keys are not read. Every
// key and value is read once per threadgroup. Barriers per segment: 2, or 4 if a lane has more than
// 16 sums; one more between segments.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_H_

#include "backends/metal/kernels/attention/attend_rows.h"

namespace marlin {
namespace kernels {

constant constexpr int kKeysAtOnce = 4;

/// A lane's features of a vector: two adjacent ones, or adjacent four of every 128.
template <int kFeatures>
struct Features {
  float value[kFeatures];
};

/// A lane's i-th feature.
template <int kFeatures>
static inline int FeatureOf(int lane, int i) {
  return kFeatures == 2 ? 2 * lane + i : i / 4 * 128 + 4 * lane + i % 4;
}

/// Features beyond `count` are zero and are not read.
template <int kFeatures>
static METAL_FUNC Features<kFeatures> LoadFeatures(device const uchar* data, int type, bool aligned,
                                                   int count, ushort lane) {
  Features<kFeatures> features;
  constexpr int kRun = kFeatures == 2 ? 2 : 4;
  MARLIN_UNROLL
  for (int i = 0; i < kFeatures; i += kRun) {
    const int first = FeatureOf<kFeatures>(lane, i);
    float4 run = float4(0.0f);
    if (aligned) {
      if (first < count) {
        if (kRun == 2) {
          run.xy = LoadCachePair(data, type, first);
        } else {
          run = LoadCacheQuad(data, type, first);
        }
      }
    } else {
      MARLIN_UNROLL
      for (int j = 0; j < kRun; ++j) {
        if (first + j < count) run[j] = LoadCacheElement(data, type, first + j);
      }
    }
    MARLIN_UNROLL
    for (int j = 0; j < kRun; ++j) features.value[i + j] = run[j];
  }
  return features;
}

template <int kHeads, int kFeatures>
struct HeadFeatures {
  Features<kFeatures> head[kHeads];
};

/// A lane's sums of a segment: weighted values of all heads, the rest of head HeadOfLane.
template <int kHeads, int kFeatures>
struct LaneSums {
  HeadFeatures<kHeads, kFeatures> values;
  float largest;
  float weights;
};

/// Lanes per head of a key: 8 lanes have a key.
template <int kHeads>
static inline int HeadOfLane(int lane) {
  return lane % 8 / (8 / kHeads);
}
template <int kHeads>
static inline ushort LaneOf(int key, int head) {
  return ushort(key * 8 + head * (8 / kHeads));
}

/// One step of the transposing butterfly: lanes whose bit `kOffset` is set keep the upper half of
/// the sums, the others the lower.
template <int kCount, int kOffset, int kSums>
static METAL_FUNC void HalveSums(thread Features<kSums>& sums, ushort lane) {
  const bool upper = (lane & kOffset) != 0;
  if (kCount == 1) {
    sums.value[0] += metal::simd_shuffle_xor(sums.value[0], kOffset);
    return;
  }
  MARLIN_UNROLL
  for (int i = 0; i < kCount / 2; ++i) {
    const float low = sums.value[i];
    const float high = sums.value[i + kCount / 2];
    sums.value[i] = (upper ? high : low) + metal::simd_shuffle_xor(upper ? low : high, kOffset);
  }
}

/// The sum over the lanes of sum `lane / (32 / kSums)`.
template <int kSums>
static METAL_FUNC float TransposeSums(thread Features<kSums>& sums, ushort lane) {
  HalveSums<kSums, 16, kSums>(sums, lane);
  HalveSums<(kSums > 2 ? kSums / 2 : 1), 8, kSums>(sums, lane);
  HalveSums<(kSums > 4 ? kSums / 4 : 1), 4, kSums>(sums, lane);
  HalveSums<(kSums > 8 ? kSums / 8 : 1), 2, kSums>(sums, lane);
  HalveSums<(kSums > 16 ? kSums / 16 : 1), 1, kSums>(sums, lane);
  return sums.value[0];
}

/// Whether a row sees a key.
static inline bool Sees(VisibleRow row, int key) { return key >= row.first && key < row.end; }

/// The products of keys first to first + 3 of a row, as far as it sees them, with a lane's features
/// of its queries.
template <int kHeads, int kFeatures>
static METAL_FUNC void MultiplyKeys(thread Features<kKeysAtOnce * kHeads>& products,
                                    thread HeadFeatures<kHeads, kFeatures>& queries, KeyBlock block,
                                    int first, VisibleRow row, ushort lane,
                                    constant AttendParameters& p) {
  MARLIN_UNROLL
  for (int k = 0; k < kKeysAtOnce; ++k) {
    const long at = k * p.key_stride * CacheElementBytes(key_type);
    const Features<kFeatures> key = LoadFeatures<kFeatures>(
        block.keys + at, key_type, aligned_keys, Sees(row, first + k) ? p.key_dim : 0, lane);
    MARLIN_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      float product = 0.0f;
      MARLIN_UNROLL
      for (int i = 0; i < kFeatures; ++i) {
        product = metal::fma(queries.head[h].value[i], key.value[i], product);
      }
      products.value[k * kHeads + h] = product;
    }
  }
}

/// Adds the values of the same keys, times the weights that the lanes have.
template <int kHeads, int kFeatures>
static METAL_FUNC void AddWeightedValues(thread HeadFeatures<kHeads, kFeatures>& sums, float weight,
                                         KeyBlock block, int first, VisibleRow row, ushort lane,
                                         constant AttendParameters& p) {
  MARLIN_UNROLL
  for (int k = 0; k < kKeysAtOnce; ++k) {
    const long at = k * p.value_stride * CacheElementBytes(value_type);
    const Features<kFeatures> value = LoadFeatures<kFeatures>(
        block.values + at, value_type, aligned_keys, Sees(row, first + k) ? p.value_dim : 0, lane);
    MARLIN_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const float of_key = metal::simd_shuffle(weight, LaneOf<kHeads>(k, h));
      MARLIN_UNROLL
      for (int i = 0; i < kFeatures; ++i) {
        sums.head[h].value[i] = metal::fma(of_key, value.value[i], sums.head[h].value[i]);
      }
    }
  }
}

/// Adds keys first to first + 3 of a row, as far as it sees them; called by a whole simdgroup.
template <int kHeads, int kFeatures>
static METAL_FUNC void AddKeys(thread LaneSums<kHeads, kFeatures>& sums,
                               thread HeadFeatures<kHeads, kFeatures>& queries, KeyBlock block,
                               int first, VisibleRow row, ushort lane,
                               constant AttendParameters& p) {
  Features<kKeysAtOnce * kHeads> products;
  MultiplyKeys<kHeads, kFeatures>(products, queries, block, first, row, lane, p);
  float score = ScoreOf(TransposeSums<kKeysAtOnce * kHeads>(products, lane), p);
  if (!Sees(row, first + lane / 8)) score = NoScore();

  float largest = metal::fmax(score, metal::simd_shuffle_xor(score, 8));
  largest = metal::fmax(largest, metal::simd_shuffle_xor(largest, 16));
  largest = metal::fmax(largest, sums.largest);
  const float factor = RescaleFactor(sums.largest, largest);
  // Scores of -Inf have weight 0, even if there are no others yet.
  const float weight = WeightOf(score, largest == NoScore() ? 0.0f : largest);
  float weights = weight + metal::simd_shuffle_xor(weight, 8);
  weights += metal::simd_shuffle_xor(weights, 16);
  sums.largest = largest;
  sums.weights = metal::fma(sums.weights, factor, weights);
  if (!metal::simd_all(factor == 1.0f)) {
    MARLIN_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const float of_head = metal::simd_shuffle(factor, LaneOf<kHeads>(0, h));
      MARLIN_UNROLL
      for (int i = 0; i < kFeatures; ++i) sums.values.head[h].value[i] *= of_head;
    }
  }
  AddWeightedValues<kHeads, kFeatures>(sums.values, weight, block, first, row, lane, p);
}

/// A simdgroup's keys of a segment.
template <int kHeads, int kFeatures>
static METAL_FUNC void AddSegmentKeys(thread LaneSums<kHeads, kFeatures>& sums,
                                      thread HeadFeatures<kHeads, kFeatures>& queries,
                                      AttendMemory memory, int kv_head, int segment, VisibleRow row,
                                      LanePlace place, constant AttendParameters& p) {
  sums.largest = NoScore();
  sums.weights = 0.0f;
  MARLIN_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    MARLIN_UNROLL
    for (int i = 0; i < kFeatures; ++i) sums.values.head[h].value[i] = 0.0f;
  }
  const int begin = metal::max(segment * kSegmentKeys, row.first / kBlockKeys * kBlockKeys);
  const int end = metal::min((segment + 1) * kSegmentKeys, row.end);
  for (int key = begin + kKeysAtOnce * place.simdgroup; key < end; key += kBlockKeys) {
    if (key + kKeysAtOnce <= row.first) continue;
    const KeyBlock block = FindKeys(memory, row.sequence, kv_head, key, p);
    if (block.keys == nullptr) continue;
    AddKeys<kHeads, kFeatures>(sums, queries, block, key, row, place.lane, p);
  }
}

/// Memory in which simdgroups add their sums.
template <int kHeads, int kFeatures>
struct AttendScratch {
  static constant constexpr int kValues = kHeads * kFeatures * kLanes;
  /// Simdgroups whose values there is room for.
  static constant constexpr int kRoom =
      kHeads * kFeatures > 16 ? kAttendSimdgroups / 2 : kAttendSimdgroups;
  float largest[kAttendSimdgroups][kHeads];
  float weights[kAttendSimdgroups][kHeads];
  float values[kRoom][kValues];
};

/// A thread's values of the results: value t, t + 256, ... of [heads][32 kFeatures].
template <int kHeads, int kFeatures>
struct ThreadSums {
  static constant constexpr int kCount =
      (AttendScratch<kHeads, kFeatures>::kValues + kAttendThreads - 1) / kAttendThreads;
  HeadSums sum[kCount];
};

/// Adds the simdgroups' sums in order. The scratch is free after the next barrier.
template <int kHeads, int kFeatures>
static METAL_FUNC void AddSimdgroups(thread ThreadSums<kHeads, kFeatures>& part,
                                     threadgroup AttendScratch<kHeads, kFeatures>* scratch,
                                     thread LaneSums<kHeads, kFeatures>& sums, ushort simdgroup,
                                     ushort lane) {
  using Scratch = AttendScratch<kHeads, kFeatures>;
  const int own_head = HeadOfLane<kHeads>(lane);
  if (lane == LaneOf<kHeads>(0, own_head)) {
    scratch->largest[simdgroup][own_head] = sums.largest;
    scratch->weights[simdgroup][own_head] = sums.weights;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  MARLIN_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    float largest = scratch->largest[0][h];
    for (int s = 1; s < kAttendSimdgroups; ++s) {
      largest = metal::fmax(largest, scratch->largest[s][h]);
    }
    const float factor = RescaleFactor(scratch->largest[simdgroup][h], largest);
    MARLIN_UNROLL
    for (int i = 0; i < kFeatures; ++i) sums.values.head[h].value[i] *= factor;
  }
  MARLIN_UNROLL
  for (int first = 0; first < kAttendSimdgroups; first += Scratch::kRoom) {
    if (first > 0) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (simdgroup >= first && simdgroup < first + Scratch::kRoom) {
      threadgroup float* const to = scratch->values[simdgroup - first];
      MARLIN_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        MARLIN_UNROLL
        for (int i = 0; i < kFeatures; ++i) {
          to[h * kFeatures * kLanes + FeatureOf<kFeatures>(lane, i)] = sums.values.head[h].value[i];
        }
      }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    MARLIN_UNROLL
    for (int j = 0; j < ThreadSums<kHeads, kFeatures>::kCount; ++j) {
      const int at = j * kAttendThreads + simdgroup * kLanes + lane;
      if (first == 0) part.sum[j] = NoSums();
      if (at >= Scratch::kValues) continue;
      const int head = at / (kFeatures * kLanes);
      float largest = scratch->largest[0][head];
      for (int s = 1; s < kAttendSimdgroups; ++s) {
        largest = metal::fmax(largest, scratch->largest[s][head]);
      }
      part.sum[j].largest = largest;
      for (int s = 0; s < Scratch::kRoom; ++s) {
        const float factor = RescaleFactor(scratch->largest[first + s][head], largest);
        part.sum[j].weights =
            metal::fma(scratch->weights[first + s][head], factor, part.sum[j].weights);
        part.sum[j].value += scratch->values[s][at];
      }
    }
  }
}

template <int kHeads, int kFeatures>
static METAL_FUNC void LoadQueries(thread HeadFeatures<kHeads, kFeatures>& queries,
                                   device const uchar* data, int row, int first_head, int heads,
                                   ushort lane, constant AttendParameters& p) {
  MARLIN_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    const long at = row * p.query_stride + (first_head + h) * p.query_head_stride;
    queries.head[h] = LoadFeatures<kFeatures>(data + at * CacheElementBytes(input_type), input_type,
                                              aligned_input, h < heads ? p.key_dim : 0, lane);
    MARLIN_UNROLL
    for (int i = 0; i < kFeatures; ++i) queries.head[h].value[i] *= p.query_scale;
  }
}

template <int kHeads, int kFeatures>
static METAL_FUNC void Attend(threadgroup AttendScratch<kHeads, kFeatures>* scratch,
                              AttendMemory memory, uint3 group, ushort simdgroup, ushort lane,
                              constant AttendParameters& p) {
  const VisibleRow row = RowOfIndex(memory, p.first_index + int(group.z), p);
  if (row.row < 0) return;
  const int kv_head = int(group.x) / p.head_parts;
  const int first_of_group = int(group.x) % p.head_parts * kHeads;
  const int first_head = kv_head * p.group + first_of_group;
  const int heads = metal::min(kHeads, p.group - first_of_group);
  const int first_segment = row.first / kSegmentKeys;
  const int last_segment = metal::max(row.end - 1, row.first) / kSegmentKeys;
  const bool all = p.segments == 1;
  const int begin = all ? first_segment : first_segment + int(group.y);
  const int end = all ? last_segment : begin;
  if (begin > last_segment) return;

  HeadFeatures<kHeads, kFeatures> queries;
  LoadQueries<kHeads, kFeatures>(queries, memory.queries, row.row, first_head, heads, lane, p);
  KeepQueries(p);
  ThreadSums<kHeads, kFeatures> total;
  MARLIN_UNROLL
  for (int j = 0; j < ThreadSums<kHeads, kFeatures>::kCount; ++j) total.sum[j] = NoSums();
  for (int segment = begin; segment <= end; ++segment) {
    LaneSums<kHeads, kFeatures> sums;
    AddSegmentKeys<kHeads, kFeatures>(sums, queries, memory, kv_head, segment, row,
                                      {simdgroup, lane}, p);
    ThreadSums<kHeads, kFeatures> part;
    AddSimdgroups<kHeads, kFeatures>(part, scratch, sums, simdgroup, lane);
    MARLIN_UNROLL
    for (int j = 0; j < ThreadSums<kHeads, kFeatures>::kCount; ++j) {
      total.sum[j] = AddSegment(total.sum[j], part.sum[j]);
    }
    if (segment < end) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  MARLIN_UNROLL
  for (int j = 0; j < ThreadSums<kHeads, kFeatures>::kCount; ++j) {
    const int at = j * kAttendThreads + simdgroup * kLanes + lane;
    const int head = at / (kFeatures * kLanes);
    const int feature = at % (kFeatures * kLanes);
    if (head >= heads || feature >= p.value_dim) continue;
    const HeadSums sum = total.sum[j];
    if (all || first_segment == last_segment) {
      const float value = FinishHead(sum, first_head + head, memory.sinks, p);
      StoreAttended(memory.out, row.row, first_head + head, feature, value, p);
      continue;
    }
    device float* const to =
        SumsOf(memory.sums, int(group.z), first_head + head, begin - first_segment, p);
    StoreSums(to, feature, sum);
  }
}

/// A query head of a row: adds its segments. Grid of threadgroups: [heads][1][rows].
static METAL_FUNC void MergeSegments(AttendMemory memory, uint3 group, uint thread_index,
                                     constant AttendParameters& p) {
  const VisibleRow row = RowOfIndex(memory, p.first_index + int(group.z), p);
  if (row.row < 0) return;
  const int segments =
      metal::max(row.end - 1, row.first) / kSegmentKeys - row.first / kSegmentKeys + 1;
  if (segments == 1) return;
  const int head = int(group.x);
  for (int feature = int(thread_index); feature < p.value_dim; feature += kMergeThreads) {
    HeadSums total = NoSums();
    for (int i = 0; i < segments; ++i) {
      total = AddSegment(total, LoadSums(SumsOf(memory.sums, int(group.z), head, i, p), feature));
    }
    StoreAttended(memory.out, row.row, head, feature, FinishHead(total, head, memory.sinks, p), p);
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_H_
