// The merge of attention's parts in the persistent kernel: a KV head's keys may be dealt to several
// CTAs, each of which publishes a part of the softmax. Few parts are merged by all of their
// readers; otherwise every CTA merges a share of the heads' features, and publishes the results.
#pragma once

#include "backends/cuda/attention/exact/softmax_rows.cuh"
#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_layout.h"
#include "backends/cuda/persistent/persistent_rows_part.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// A merge of softmax parts.
struct SoftmaxPart {
  float largest = NoScore();
  float sum = 0.0f;
  float4 values = {0.0f, 0.0f, 0.0f, 0.0f};

  /// values += v x factor.
  MARLIN_DEVICE void AddValues(const float4& v, float factor) {
    values.x = __fmaf_rn(v.x, factor, values.x);
    values.y = __fmaf_rn(v.y, factor, values.y);
    values.z = __fmaf_rn(v.z, factor, values.z);
    values.w = __fmaf_rn(v.w, factor, values.w);
  }
  MARLIN_DEVICE void Add(const SoftmaxPart& other) {
    const float together = fmaxf(largest, other.largest);
    const float mine = RescaleFactor(largest, together);
    const float its = RescaleFactor(other.largest, together);
    largest = together;
    sum = __fmaf_rn(other.sum, its, sum * mine);
    values = {values.x * mine, values.y * mine, values.z * mine, values.w * mine};
    AddValues(other.values, its);
  }
  /// The part of the lane `distance` away comes second in the lower lane, first in the upper one.
  MARLIN_DEVICE void AddLane(int distance) {
    // Lanes differ in which part they own, and agree on which comes first.
    const bool is_lower = (threadIdx.x & distance) == 0;
    SoftmaxPart second;
    const auto exchange = [&](float& mine, float& other) {
      const float its = __shfl_xor_sync(~0u, mine, distance);
      other = is_lower ? its : mine;
      mine = is_lower ? mine : its;
    };
    exchange(largest, second.largest);
    exchange(sum, second.sum);
    exchange(values.x, second.values.x);
    exchange(values.y, second.values.y);
    exchange(values.z, second.values.z);
    exchange(values.w, second.values.w);
    Add(second);
  }
};

/// The projections of a row in a layer: the words of their sums, of `rows` together, and their tag.
struct ProjectedWords {
  const PhaseGemm& gemm;
  int rows;
  const uint32_t* words;
  uint32_t tag;

  MARLIN_DEVICE float4 Gather(int column) const {
    return GatherSums(words + column, gemm.splits, rows * gemm.columns, tag);
  }
};

/// The division by the sum of weights, to which a sink adds.
struct MergedFinish {
  float factor;

  MARLIN_DEVICE MergedFinish(const PersistentLayer& layer, int head, const SoftmaxPart& part) {
    if (layer.sinks == nullptr) {
      factor = __fdiv_rn(1.0f, part.sum);
      return;
    }
    const float sink = layer.sinks[head] * kLog2E;
    const float together = fmaxf(part.largest, sink);
    const float rescale = RescaleFactor(part.largest, together);
    factor = __fdiv_rn(rescale, __fmaf_rn(part.sum, rescale, RescaleFactor(sink, together)));
  }
  MARLIN_DEVICE float4 Values(const float4& v) const {
    return {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  }
};

/// The keys and heads of a CTA in a layer, and their places.
class PartOfAttention {
 protected:
  MARLIN_DEVICE PartOfAttention(const PersistentArguments& args, const PersistentLayer& layer,
                                const ProjectedWords& projected)
      : args_(args),
        layer_(layer),
        projected_(projected),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5) {}

  // Read again after every barrier: fields would take registers that are short.
  MARLIN_DEVICE const AttentionPart& Part() const {
    return Tables{args_}.Scratch().attention[layer_.cache_group];
  }
  MARLIN_DEVICE int Position() const { return Tables{args_}.Scratch().position; }
  MARLIN_DEVICE bool HasCodes() const { return args_.cache_bytes == 1; }
  MARLIN_DEVICE int KvHead() const { return Tables{args_}.Scratch().kv_head; }

  MARLIN_DEVICE int KeyRow() const { return SharedRowBytes(args_.key_dim); }
  MARLIN_DEVICE int ValueRow() const { return SharedRowBytes(args_.value_dim); }
  MARLIN_DEVICE int PartWords() const { return args_.group * (args_.value_dim + 4); }
  MARLIN_DEVICE bool HasNewKey() const {
    return Position() / kWarpKeys < Part().end_block &&
           Position() / kWarpKeys >= Part().first_block;
  }

  /// With several rows.
  MARLIN_DEVICE const NewKeys& New() const { return FixedRows().new_keys[layer_.cache_group]; }
  /// The new key and value of the row `back` rows before the CTA's, in shared memory.
  MARLIN_DEVICE uint8_t* Fresh(int back) const {
    return Memory() + args_.shared.fresh + back * (args_.key_dim + args_.value_dim) * 2;
  }

  /// Where a position's key or value begins in its page, in bytes.
  MARLIN_DEVICE int64_t PlaceOf(int position, bool is_value) const {
    const int place = KvHead() * kCachePageTokens +
                      static_cast<int>(static_cast<uint32_t>(position) % kCachePageTokens);
    const int element =
        is_value ? args_.kv_heads * kCachePageTokens * args_.key_dim + place * args_.value_dim
                 : place * args_.key_dim;
    return (layer_.first_element + element) * args_.cache_bytes;
  }

  /// The column of the projections with which a query head begins.
  template <bool kHybrid>
  MARLIN_DEVICE int QueryAt(int head) const {
    return head * args_.key_dim << (kHybrid && args_.output_gate ? 1 : 0);
  }
  /// Attention's result of four features of a head, with its gate.
  template <bool kHybrid>
  MARLIN_DEVICE float4 Result(int head, int feature, const SoftmaxPart& part) const {
    const float4 v = MergedFinish(layer_, head, part).Values(part.values);
    if (!kHybrid || !args_.output_gate) return v;
    const float4 gate = projected_.Gather(QueryAt<kHybrid>(head) + args_.key_dim + feature);
    return {TimesSigmoid(v.x, gate.x), TimesSigmoid(v.y, gate.y), TimesSigmoid(v.z, gate.z),
            TimesSigmoid(v.w, gate.w)};
  }

  const PersistentArguments& args_;
  const PersistentLayer& layer_;
  const ProjectedWords projected_;
  int lane_;
  int warp_;
};

/// The merge of a layer's parts.
template <PersistentForm kForm>
class AttentionMerge : private PartOfAttention {
 public:
  MARLIN_DEVICE AttentionMerge(const PersistentArguments& args, const PersistentLayer& layer,
                               const ProjectedWords& projected)
      : PartOfAttention(args, layer, projected) {}

  MARLIN_DEVICE bool ReadersMerge() const {
    return Part().active_splits > 1 && Part().active_splits <= kMostMerged;
  }

  /// Merges the parts of this CTA's share of the heads' features. Where a KV head has one part, Run
  /// has published the result.
  MARLIN_DEVICE void Combine(const uint32_t* parts, uint32_t* mixed, uint32_t tag) const {
    if (ReadersMerge()) return PublishNoResults(mixed, tag);
    CombineRows(parts, 1, &Part().active_splits, mixed, tag);
  }

  /// The merged result of a head's four features from `feature` on, of parts that ReadersMerge.
  MARLIN_DEVICE float4 GatherMerged(const uint32_t* parts, int head, int feature,
                                    uint32_t tag) const {
    constexpr int kMost = kMostMerged;
    const int kv_head = QuotientOf(head, args_.group);
    const int words = PartWords();
    const AwaitedQuads<2 * kMost> quads(
        parts + kv_head * args_.attention_splits * words +
            (head - kv_head * args_.group) * (args_.value_dim + 4),
        tag, [&](int i) { return i / 2 * words + (i % 2 == 0 ? args_.value_dim : feature); },
        [&](int i) { return i / 2 < Part().active_splits; });
    SoftmaxPart merged;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < Part().active_splits) merged.largest = fmaxf(merged.largest, quads.Value(2 * i).x);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= Part().active_splits) break;
      const float4 known = quads.Value(2 * i);
      const float factor = RescaleFactor(known.x, merged.largest);
      merged.sum = __fmaf_rn(known.y, factor, merged.sum);
      merged.AddValues(quads.Value(2 * i + 1), factor);
    }
    return Result<kHybrid>(head, feature, merged);
  }

  /// Combine of `rows` rows, from the first one's parts on; `active_splits`: every row's. A warp
  /// has kCombined features of a head.
  MARLIN_DEVICE void CombineRows(const uint32_t* parts, int rows, const int* active_splits,
                                 uint32_t* mixed, uint32_t tag) const {
    const int features = args_.heads * args_.value_dim;
#pragma unroll 1
    for (int first = (blockIdx.x + warp_ * gridDim.x) * kCombined; first < rows * features;
         first += kPersistentWarps * gridDim.x * kCombined) {
      const int row = QuotientOf(first, features);
      if (active_splits[row] == 1) continue;
      const int head = QuotientOf(first - row * features, args_.value_dim);
      const int feature = first - row * features - head * args_.value_dim;
      CombineUnit(parts + row * args_.kv_heads * args_.attention_splits * PartWords(),
                  active_splits[row], {head, QuotientOf(head, args_.group), feature},
                  mixed + row * features, tag);
    }
  }

 private:
  static constexpr bool kHybrid = kForm == PersistentForm::kHybrid;
  static constexpr int kMostMerged = MostMergedByReaders(kForm);

  /// Zeros for this CTA's share of the results: every word is written in every layer, so that its
  /// tag is never one of long ago.
  MARLIN_DEVICE void PublishNoResults(uint32_t* mixed, uint32_t tag) const {
    for (int i = static_cast<int>(blockIdx.x) * kPersistentThreads + static_cast<int>(threadIdx.x);
         i < args_.heads * args_.value_dim / 4;
         i += static_cast<int>(gridDim.x) * kPersistentThreads) {
      PublishQuad(mixed + 4 * i, {0.0f, 0.0f, 0.0f, 0.0f}, tag);
    }
  }

  /// Features of a head: eight quads, which eight adjacent lanes have, of every fourth part.
  static constexpr int kCombined = 32;
  struct CombinedUnit {
    int head;
    int kv_head;
    int first_feature;
  };
  MARLIN_DEVICE void CombineUnit(const uint32_t* parts, int splits, const CombinedUnit& unit,
                                 uint32_t* mixed, uint32_t tag) const {
    constexpr int kQuadsOfUnit = kCombined / 4;
    constexpr int kLanes = 32 / kQuadsOfUnit;
    constexpr int kMost = 4;  // Splits of a lane that are requested at once.
    const int feature = unit.first_feature + lane_ % kQuadsOfUnit * 4;
    const uint32_t* const first = parts + unit.kv_head * args_.attention_splits * PartWords() +
                                  (unit.head - unit.kv_head * args_.group) * (args_.value_dim + 4);
    SoftmaxPart merged;
#pragma unroll 1
    for (int split = lane_ / kQuadsOfUnit; split < splits; split += kLanes * kMost) {
      const int words = PartWords();
      const AwaitedQuads<2 * kMost> quads(
          first + split * words, tag,
          [&](int i) { return i / 2 * kLanes * words + (i % 2 == 0 ? args_.value_dim : feature); },
          [&](int i) { return split + i / 2 * kLanes < splits; });
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (split + i * kLanes >= splits) break;
        const float4 known = quads.Value(2 * i);
        merged.Add({known.x, known.y, quads.Value(2 * i + 1)});
      }
    }
    __syncwarp();
#pragma unroll
    for (int distance = kQuadsOfUnit; distance < 32; distance *= 2) merged.AddLane(distance);
    if (lane_ < kQuadsOfUnit) {
      PublishQuad(mixed + unit.head * args_.value_dim + feature,
                  Result<kHybrid>(unit.head, feature, merged), tag);
    }
  }
};

}  // namespace marlin::cuda
