// The attention loops, in the vector operations of one simd_*.h. Included after it and
// conversions.inl.h inside their namespace.
//
// Tiles keep kDots accumulators in registers: queries x keys in Score, where lanes run along the
// features and SumEach reduces them, and queries x vectors of features in Mix. The order of
// additions is the same for every score and every output feature, whichever tile it falls into.
#pragma once

#include "backends/cpu/attention/softmax_exp.inl.h"
#include "backends/cpu/simd/unroll.inl.h"

template <DType kType>
MARLIN_SIMD_INLINE F LoadAs(const void* from, int64_t i) {
  if constexpr (kType == DType::kF16) {
    return LoadHalf(static_cast<const uint16_t*>(from) + i);
  } else if constexpr (kType == DType::kBf16) {
    return LoadBf16(static_cast<const uint16_t*>(from) + i);
  } else {
    return Load(static_cast<const float*>(from) + i);
  }
}

/// Keys processed for all rows before the next keys, so that they stay in L1.
inline constexpr int32_t kKeyRun = 8;

/// Prefetches `upcoming` memory in equal parts, one per run of keys.
class Prefetcher {
 public:
  Prefetcher(const Upcoming& upcoming, int64_t keys, int64_t run) : next_(upcoming) {
    const int64_t lines = upcoming.rows * ((upcoming.row_bytes + 63) / 64);
    lines_per_step_ = (lines * run + keys - 1) / keys;
  }
  void Step() {
    for (int64_t lines = lines_per_step_; lines > 0 && next_.rows > 0; --lines) {
      Prefetch(next_.data + column_);
      column_ += 64;
      if (column_ < next_.row_bytes) continue;
      column_ = 0;
      next_.data += next_.stride_bytes;
      --next_.rows;
    }
  }

 private:
  Upcoming next_;
  int64_t column_ = 0;
  int64_t lines_per_step_ = 0;
};

static KeyRange Intersection(KeyRange a, KeyRange b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

static KeyRange Union(KeyRange a, KeyRange b) {
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

/// kQ x kK dot products.
template <DType kType, int kQ, int kK>
static void ScoreTile(const float* queries, const void* keys, int64_t stride, int64_t depth,
                      float scale, float* scores) {
  F sums[kDots];
  Unroll<kDots>([&](auto i) { sums[i] = Zero(); });
  for (int64_t d = 0; d < depth; d += kLanes) {
    F query[kQ];
    Unroll<kQ>([&](auto q) { query[q] = Load(queries + q * depth + d); });
    Unroll<kK>([&](auto j) {
      const F key = LoadAs<kType>(keys, j * stride + d);
      Unroll<kQ>([&](auto q) { sums[q * kK + j] = Fma(query[q], key, sums[q * kK + j]); });
    });
  }
  alignas(64) float dots[kDots];
  Unroll<kDots / kLanes>([&](auto i) {
    F group[kLanes];
    Unroll<kLanes>([&](auto lane) { group[lane] = sums[i * kLanes + lane]; });
    Store(dots + i * kLanes, Mul(SumEach(group), Set(scale)));
  });
  for (int q = 0; q < kQ; ++q) {
    for (int j = 0; j < kK; ++j) scores[q * kKeyBlock + j] = dots[q * kK + j];
  }
}

/// Scores of kQ queries with the keys of `range`.
template <DType kType, int kQ>
static void ScoreRun(const float* queries, const KeyRows& keys, KeyRange range, int64_t depth,
                     float scale, float* scores) {
  constexpr int kK = kDots / kQ;
  const int64_t key_bytes = keys.stride * (kType == DType::kF32 ? 4 : 2);
  const auto* data = static_cast<const uint8_t*>(keys.data);
  int64_t j = range.begin;
  for (; j + kK <= range.end; j += kK) {
    ScoreTile<kType, kQ, kK>(queries, data + j * key_bytes, keys.stride, depth, scale, scores + j);
  }
  for (; j < range.end; ++j) {
    ScoreTile<kType, kQ, 1>(queries, data + j * key_bytes, keys.stride, depth, scale, scores + j);
  }
}

/// Processes all whole tiles of kQ rows from row q on; returns the first row after them.
template <DType kType, int kQ>
static int64_t ScoreTiles(const AttentionRows& rows, int64_t q, const KeyRows& keys, KeyRange run,
                          float scale) {
  for (; q + kQ <= rows.count; q += kQ) {
    KeyRange seen = rows.ranges[q];
    for (int i = 1; i < kQ; ++i) seen = Union(seen, rows.ranges[q + i]);
    ScoreRun<kType, kQ>(rows.queries + q * rows.depth, keys, Intersection(run, seen), rows.depth,
                        scale, rows.scores + q * kKeyBlock);
  }
  return q;
}

template <DType kType>
static void ScoreTyped(const AttentionRows& rows, const KeyRows& keys, float scale,
                       const Upcoming& upcoming) {
  Prefetcher prefetcher(upcoming, keys.count, kKeyRun);
  for (int32_t first = 0; first < keys.count; first += kKeyRun) {
    const int32_t left = static_cast<int32_t>(keys.count) - first;
    const KeyRange run = {first, first + (left < kKeyRun ? left : kKeyRun)};
    prefetcher.Step();
    int64_t q = ScoreTiles<kType, 4>(rows, 0, keys, run, scale);
    q = ScoreTiles<kType, 2>(rows, q, keys, run, scale);
    ScoreTiles<kType, 1>(rows, q, keys, run, scale);
  }
}

static void Score(const AttentionRows& rows, const KeyRows& keys, float scale,
                  const Upcoming& upcoming) {
  switch (keys.type) {
    case DType::kF16:
      return ScoreTyped<DType::kF16>(rows, keys, scale, upcoming);
    case DType::kBf16:
      return ScoreTyped<DType::kBf16>(rows, keys, scale, upcoming);
    default:
      return ScoreTyped<DType::kF32>(rows, keys, scale, upcoming);
  }
}

static void Weigh(const AttentionRows& rows) {
  constexpr float kNothing = -__builtin_inff();
  for (int64_t row = 0; row < rows.count; ++row) {
    float* scores = rows.scores + row * kKeyBlock;
    for (int64_t i = 0; i < rows.ranges[row].begin; ++i) scores[i] = kNothing;
    for (int64_t i = rows.ranges[row].end; i < kKeyBlock; ++i) scores[i] = kNothing;
    const float before = rows.largest[row];
    F largest = Set(before);
    for (int64_t i = 0; i < kKeyBlock; i += kLanes) largest = Max(Load(scores + i), largest);
    const float after = Largest(largest);
    // Scores of -Inf have weight 0, even if there are no others yet.
    const F origin = Set(after == kNothing ? 0.0f : after);
    F sum = Zero();
    for (int64_t i = 0; i < kKeyBlock; i += kLanes) {
      const F weight = ExpNotPositive(Sub(Load(scores + i), origin));
      Store(scores + i, weight);
      sum = Add(sum, weight);
    }
    const float factor = before == after ? 1.0f : __builtin_expf(before - after);
    rows.factors[row] = factor;
    rows.sums[row] = rows.sums[row] * factor + Sum(sum);
    rows.largest[row] = after;
  }
}

/// Accumulates kV vectors of features of kQ rows over the keys of `range`.
template <DType kType, int kQ, int kV>
static void MixTile(const float* weights, const KeyRows& values, KeyRange range, int64_t d,
                    float* out, int64_t width) {
  F sums[kQ * kV];
  Unroll<kQ * kV>([&](auto i) { sums[i] = Load(out + i / kV * width + d + i % kV * kLanes); });
  for (int64_t j = range.begin; j < range.end; ++j) {
    F weight[kQ];
    Unroll<kQ>([&](auto q) { weight[q] = Set(weights[q * kKeyBlock + j]); });
    Unroll<kV>([&](auto v) {
      const F value = LoadAs<kType>(values.data, j * values.stride + d + v * kLanes);
      Unroll<kQ>([&](auto q) { sums[q * kV + v] = Fma(weight[q], value, sums[q * kV + v]); });
    });
  }
  Unroll<kQ * kV>([&](auto i) { Store(out + i / kV * width + d + i % kV * kLanes, sums[i]); });
}

template <DType kType, int kQ, int kV>
static void MixColumns(const float* weights, const KeyRows& values, KeyRange range, int64_t d,
                       float* out, int64_t width) {
  for (; d + kV * kLanes <= width; d += kV * kLanes) {
    MixTile<kType, kQ, kV>(weights, values, range, d, out, width);
  }
  if constexpr (kV > 1) MixColumns<kType, kQ, kV / 2>(weights, values, range, d, out, width);
}

/// Rows [q, q + kQ) over the keys of `run` that each of them sees: the common range as one tile,
/// the rest row by row.
template <DType kType, int kQ>
static void MixRows(const AttentionRows& rows, int64_t q, const KeyRows& values, KeyRange run) {
  KeyRange common = run;
  KeyRange all = {run.end, run.begin};
  for (int i = 0; i < kQ; ++i) {
    const KeyRange seen = Intersection(run, rows.ranges[q + i]);
    common = Intersection(common, seen);
    all = Union(all, seen);
  }
  if (common.begin >= common.end) common = {all.end, all.end};
  if constexpr (kQ > 1) {
    for (int i = 0; i < kQ && all.begin < common.begin; ++i) {
      MixRows<kType, 1>(rows, q + i, values, {all.begin, common.begin});
    }
  }
  if (common.begin < common.end) {
    MixColumns<kType, kQ, kDots / kQ>(rows.scores + q * kKeyBlock, values, common, 0,
                                      rows.out + q * rows.width, rows.width);
  }
  if constexpr (kQ > 1) {
    for (int i = 0; i < kQ && common.end < all.end; ++i) {
      MixRows<kType, 1>(rows, q + i, values, {common.end, all.end});
    }
  }
}

template <DType kType, int kQ>
static int64_t MixTiles(const AttentionRows& rows, int64_t q, const KeyRows& values, KeyRange run) {
  for (; q + kQ <= rows.count; q += kQ) MixRows<kType, kQ>(rows, q, values, run);
  return q;
}

template <DType kType>
static void MixTyped(const AttentionRows& rows, const KeyRows& values, const Upcoming& upcoming) {
  // Longer runs than in Score, because each run loads and stores the accumulators.
  constexpr int32_t kMixRun = 2 * kKeyRun;
  Prefetcher prefetcher(upcoming, values.count, kMixRun);
  for (int32_t first = 0; first < values.count; first += kMixRun) {
    const int32_t left = static_cast<int32_t>(values.count) - first;
    const KeyRange run = {first, first + (left < kMixRun ? left : kMixRun)};
    prefetcher.Step();
    int64_t q = MixTiles<kType, 4>(rows, 0, values, run);
    q = MixTiles<kType, 2>(rows, q, values, run);
    MixTiles<kType, 1>(rows, q, values, run);
  }
}

static void Mix(const AttentionRows& rows, const KeyRows& values, const Upcoming& upcoming) {
  for (int64_t q = 0; q < rows.count; ++q) {
    if (rows.factors[q] == 1.0f) continue;
    float* out = rows.out + q * rows.width;
    const F factor = Set(rows.factors[q]);
    for (int64_t d = 0; d < rows.width; d += kLanes) Store(out + d, Mul(Load(out + d), factor));
  }
  switch (values.type) {
    case DType::kF16:
      return MixTyped<DType::kF16>(rows, values, upcoming);
    case DType::kBf16:
      return MixTyped<DType::kBf16>(rows, values, upcoming);
    default:
      return MixTyped<DType::kF32>(rows, values, upcoming);
  }
}
