// Attention of one token in the persistent kernel: split-KV over the CTAs of a KV head, on matrix
// units, over a paged bf16 cache (see decode_attention.cu and matrix_softmax.cuh).
//
//   A CTA has a run of blocks of 16 keys. Two warps have a block together, each half of the value
//   features. The CTA merges its warps and publishes the result; another phase merges the CTAs.
//   Keys and values of earlier positions are requested before the projections are there.
#pragma once

#include "backends/cuda/kernels/decoder/head_math.cuh"
#include "backends/cuda/kernels/decoder/matrix_softmax.cuh"
#include "backends/cuda/kernels/persistent/persistent_exchange.cuh"
#include "backends/cuda/kernels/persistent/persistent_layout.h"
#include "backends/cuda/kernels/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// Pairs of warps, each with a stage of keys and values.
inline constexpr int kWarpPairs = kPersistentWarps / 2;
/// Value tiles of a warp: half of a head's features.
inline constexpr int kHalfTiles = kMostHeadFeatures / 32;
inline constexpr int kMergePadding = 8;  ///< In floats, against bank conflicts.

/// A merge of softmax parts.
struct SoftmaxPart {
  float largest = NoScore();
  float sum = 0.0f;
  float4 values = {0.0f, 0.0f, 0.0f, 0.0f};

  MARLIN_DEVICE void Add(const SoftmaxPart& other) {
    const float together = fmaxf(largest, other.largest);
    const float mine = RescaleFactor(largest, together);
    const float its = RescaleFactor(other.largest, together);
    largest = together;
    sum = __fmaf_rn(other.sum, its, sum * mine);
    values.x = __fmaf_rn(other.values.x, its, values.x * mine);
    values.y = __fmaf_rn(other.values.y, its, values.y * mine);
    values.z = __fmaf_rn(other.values.z, its, values.z * mine);
    values.w = __fmaf_rn(other.values.w, its, values.w * mine);
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

/// The attention of a CTA in a layer.
class TokenAttention {
 public:
  /// `turns`: how often the warp's stage has been filled, over all layers.
  MARLIN_DEVICE TokenAttention(const PersistentArguments& args, const PersistentLayer& layer,
                               int position, int* turns)
      : args_(args),
        layer_(layer),
        turns_(turns),
        position_(position),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        group_(args.group) {
    const Tables tables{args};
    kv_head_ = tables.Scratch().kv_head;
    split_ = tables.Scratch().split;
    const CacheGroup& pages = args.groups[layer.cache_group];
    // A position without a page is recorded as an error, and has no keys.
    visible_.end = position >= 0 && position < pages.blocks * kCachePageTokens ? position + 1 : 0;
    visible_.first = layer.window > 0 ? max(visible_.end - layer.window, 0) : 0;
    const int first = visible_.first / kWarpKeys;
    const int blocks = (visible_.end + kWarpKeys - 1) / kWarpKeys - first;
    const int part = (blocks + args.attention_splits - 1) / args.attention_splits;
    active_splits_ = part == 0 ? 0 : (blocks + part - 1) / part;
    first_block_ = first + split_ * part;
    end_block_ = min(first_block_ + part, first + blocks);
    if (kv_head_ >= args.kv_heads) end_block_ = first_block_;
  }

  /// Requests the keys of earlier positions.
  MARLIN_DEVICE void RequestFirst() const {
    const int block = first_block_ + (warp_ >> 1);
    if ((warp_ & 1) == 0 && block < end_block_) Request(block);
  }

  /// Publishes the CTA's part. `qkv`: the words of the projections. Called by all threads.
  MARLIN_DEVICE void Run(const PhaseGemm& gemm, const uint32_t* qkv, uint32_t* parts,
                         uint32_t tag) {
    if (kv_head_ >= args_.kv_heads) return;
    uint32_t* const mine = parts + (kv_head_ * args_.attention_splits + split_) * PartWords();
    if (first_block_ >= end_block_) {
      PublishNothing(mine, tag);
      return;
    }
    GatherHeads(gemm, qkv, tag);
    __syncthreads();
    PrepareHeads();
    __syncthreads();
    const uint32_t queries = SharedAddress(Memory()) + args_.shared.queries;
    const WarpOperands operands = {queries, queries + kMostGroupHeads * KeyRow(), KeyRow(),
                                   ValueRow()};
    WarpSoftmax<kHalfTiles> softmax(operands, args_.key_dim, args_.value_dim / 2, args_.scale);
    AddKeys(softmax);
    __syncthreads();
    StoreSums(softmax);
    __syncthreads();
    PublishMerged(mine, tag);
    FenceAsyncProxy();
  }

  /// Merges the parts of this CTA's share of the heads' features. Called by all threads.
  MARLIN_DEVICE void Combine(const uint32_t* parts, uint32_t* mixed, PersistentScratch& scratch,
                             uint32_t tag) const {
    const int units = args_.heads * args_.value_dim / 32;
    int head = scratch.head;
    int kv_head = scratch.head_kv_head;
#pragma unroll 1
    for (int unit = static_cast<int>(blockIdx.x); unit < units;
         unit += static_cast<int>(gridDim.x)) {
      if (unit != static_cast<int>(blockIdx.x)) {
        head = unit * 32 / args_.value_dim;
        kv_head = head / group_;
      }
      CombineUnit(parts, {head, kv_head, unit * 32 - head * args_.value_dim}, mixed, scratch, tag);
    }
  }

 private:
  MARLIN_DEVICE int KeyRow() const { return SharedRowBytes(args_.key_dim); }
  MARLIN_DEVICE int ValueRow() const { return SharedRowBytes(args_.value_dim); }
  MARLIN_DEVICE uint32_t Stage() const {
    return SharedAddress(Memory()) + args_.shared.keys +
           (warp_ >> 1) * kWarpKeys * (KeyRow() + ValueRow());
  }
  MARLIN_DEVICE uint32_t Barrier() const {
    return SharedAddress(Memory()) + args_.shared.barriers +
           (kPersistentWarps * kMostSlots + (warp_ >> 1)) * 8;
  }
  MARLIN_DEVICE int PartWords() const { return group_ * (args_.value_dim + 4); }
  MARLIN_DEVICE bool HasNewKey() const {
    return visible_.end > 0 && position_ / kWarpKeys < end_block_ &&
           position_ / kWarpKeys >= first_block_;
  }

  /// The page of a position; null, with a record of why, if there is none.
  MARLIN_DEVICE uint8_t* FindPage(int position) const {
    const CacheGroup& pages = args_.groups[layer_.cache_group];
    const int block = static_cast<int>(static_cast<uint32_t>(position) / kCachePageTokens);
    if (block >= pages.blocks) return nullptr;
    const int page = pages.block_table[block];
    const auto number = static_cast<uint32_t>(page);
    const uint32_t slab = page < 0 ? ~0u : number / pages.slab_pages;
    if (slab >= static_cast<uint32_t>(pages.slab_count) || pages.slabs[slab] == nullptr) {
      RecordError(args_.errors, ValueError::kPage, page, block, 0);
      return nullptr;
    }
    const uint32_t of_slab = number - slab * pages.slab_pages;
    return static_cast<uint8_t*>(pages.slabs[slab]) +
           (of_slab * pages.page_stride + layer_.first_element) * 2;
  }
  /// The first element of a position's key or value in its page.
  MARLIN_DEVICE int64_t ElementOf(int position, bool is_value) const {
    const int64_t place =
        static_cast<int64_t>(kv_head_) * kCachePageTokens + position % kCachePageTokens;
    if (!is_value) return place * args_.key_dim;
    return static_cast<int64_t>(args_.kv_heads) * kCachePageTokens * args_.key_dim +
           place * args_.value_dim;
  }

  MARLIN_DEVICE uint32_t Row(int row, bool is_value) const {
    return is_value ? Stage() + kWarpKeys * KeyRow() + row * ValueRow() : Stage() + row * KeyRow();
  }

  /// Requests a block of earlier keys: a lane has a row of keys or of values, which is one bulk
  /// copy. Rows of others become zeros. Called by one warp.
  MARLIN_DEVICE void Request(int block) const {
    const int first = block * kWarpKeys;
    const uint8_t* const page = FindPage(first);
    const bool is_value = lane_ >= kWarpKeys;
    const int row = lane_ % kWarpKeys;
    const int bytes = (is_value ? args_.value_dim : args_.key_dim) * 2;
    const int key = first + row;
    const bool seen = page != nullptr && key >= visible_.first && key < position_;
    const unsigned rows = __ballot_sync(~0u, seen);
    if (lane_ == 0) {
      constexpr unsigned kKeyLanes = (1u << kWarpKeys) - 1;
      ArriveExpecting(Barrier(), __popc(rows & kKeyLanes) * args_.key_dim * 2 +
                                     __popc(rows & ~kKeyLanes) * args_.value_dim * 2);
    }
    __syncwarp();
    const uint32_t to = Row(row, is_value);
    if (seen) {
      CopyBulk(to, page + ElementOf(key, is_value) * 2, bytes, Barrier());
      return;
    }
#pragma unroll 1
    for (int i = 0; i < bytes; i += 16) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + i), "r"(0) : "memory");
    }
  }

  /// Gathers the projections of the group's heads, and of the new key and value.
  MARLIN_DEVICE void GatherHeads(const PhaseGemm& gemm, const uint32_t* qkv, uint32_t tag) const {
    // Rows of queries that no head has stay zeros.
    auto* const queries = reinterpret_cast<uint4*>(Memory() + args_.shared.queries);
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kMostGroupHeads * KeyRow() / 16;
         i += kPersistentThreads) {
      queries[i] = {0, 0, 0, 0};
    }
    auto* const heads = reinterpret_cast<float*>(Memory() + args_.shared.heads);
    const int query_quads = group_ * args_.key_dim / 4;
    const int key_quads = HasNewKey() ? args_.key_dim / 4 : 0;
    const int value_quads = HasNewKey() ? args_.value_dim / 4 : 0;
    const int first_query = kv_head_ * group_ * args_.key_dim;
    const int first_key = args_.heads * args_.key_dim + kv_head_ * args_.key_dim;
    const int first_value =
        (args_.heads + args_.kv_heads) * args_.key_dim + kv_head_ * args_.value_dim;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < query_quads + key_quads + value_quads;
         i += kPersistentThreads) {
      int from = first_query + 4 * i;
      if (i >= query_quads) from = first_key + 4 * (i - query_quads);
      if (i >= query_quads + key_quads) from = first_value + 4 * (i - query_quads - key_quads);
      *reinterpret_cast<float4*>(heads + 4 * i) =
          GatherSums(qkv + from, gemm.splits, gemm.columns, tag);
    }
  }

  /// Norms and rotates the heads: one warp each. Queries become operands; the new key and value go
  /// to the cache, and to shared memory.
  MARLIN_DEVICE void PrepareHeads() const {
    const int heads = HasNewKey() ? group_ + 2 : group_;
#pragma unroll 1
    for (int number = warp_; number < heads; number += kPersistentWarps) {
      const bool is_value = number == group_ + 1;
      float* const head =
          reinterpret_cast<float*>(Memory() + args_.shared.heads) + number * args_.key_dim;
      if (!is_value) {
        const bool is_key = number == group_;
        Normalize(is_key ? layer_.key_norm : layer_.query_norm,
                  is_key ? layer_.key_epsilon : layer_.query_epsilon, head);
        Rotate(head);
      }
      if (number < group_) {
        StoreQuery(head, number);
      } else {
        Append(head, is_value);
      }
    }
  }

  MARLIN_DEVICE void StoreQuery(const float* head, int number) const {
    uint8_t* const rounded = Memory() + args_.shared.queries + number * KeyRow();
    uint8_t* const rest = rounded + kMostGroupHeads * KeyRow();
#pragma unroll 1
    for (int pair = lane_; pair < args_.key_dim / 2; pair += 32) {
      SplitInTwo(head[2 * pair], head[2 * pair + 1], reinterpret_cast<uint32_t*>(rounded) + pair,
                 reinterpret_cast<uint32_t*>(rest) + pair);
    }
  }

  MARLIN_DEVICE void Normalize(const float* weight, float epsilon, float* head) const {
    if (weight == nullptr) return;
    constexpr int kMost = kMostHeadFeatures / 32;
    float weights[kMost];
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      const int i = lane_ + 32 * j;
      if (i >= args_.key_dim) break;
      weights[j] = weight[i];
      squares = __fmaf_rn(head[i], head[i], squares);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float factor =
        RmsFactor(static_cast<double>(squares / static_cast<float>(args_.key_dim)), epsilon);
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      const int i = lane_ + 32 * j;
      if (i >= args_.key_dim) break;
      head[i] = head[i] * factor * weights[j];
    }
    __syncwarp();
  }

  MARLIN_DEVICE void Rotate(float* head) const {
    const auto* const rotations =
        reinterpret_cast<const float2*>(Memory() + args_.shared.rotations);
    for (int pair = lane_; pair < args_.pairs; pair += 32) {
      const int first = args_.interleaved ? 2 * pair : pair;
      const int second = args_.interleaved ? 2 * pair + 1 : pair + args_.pairs;
      const float2 turn = rotations[pair];
      const float a = head[first];
      const float b = head[second];
      head[first] = a * turn.x - b * turn.y;
      head[second] = b * turn.x + a * turn.y;
    }
    __syncwarp();
  }

  MARLIN_DEVICE void Append(const float* from, bool is_value) const {
    const int features = is_value ? args_.value_dim : args_.key_dim;
    uint8_t* const page = FindPage(position_);
    auto* const fresh = reinterpret_cast<uint32_t*>(Memory() + args_.shared.fresh) +
                        (is_value ? args_.key_dim / 2 : 0);
    auto* const to = reinterpret_cast<uint32_t*>(page + ElementOf(position_, is_value) * 2);
#pragma unroll 1
    for (int pair = lane_; pair < features / 2; pair += 32) {
      const uint32_t rounded = Bf16x2::Pack(from[2 * pair], from[2 * pair + 1]);
      fresh[pair] = rounded;
      if (page != nullptr) to[pair] = rounded;
    }
  }

  /// A barrier of the two warps of a pair.
  MARLIN_DEVICE void SyncPair() const {
    asm volatile("bar.sync %0, 64;" ::"r"((warp_ >> 1) + 1) : "memory");
  }

  /// Puts the new key and value in their rows of the stage. Called by one warp.
  MARLIN_DEVICE void InsertFresh() const {
    const auto* const fresh = reinterpret_cast<const uint32_t*>(Memory() + args_.shared.fresh);
    const int row = position_ % kWarpKeys;
    for (int pair = lane_; pair < (args_.key_dim + args_.value_dim) / 2; pair += 32) {
      const bool is_value = pair >= args_.key_dim / 2;
      const int of_row = is_value ? pair - args_.key_dim / 2 : pair;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(Row(row, is_value) + of_row * 4),
                   "r"(fresh[pair])
                   : "memory");
    }
  }

  template <typename Softmax>
  MARLIN_DEVICE void AddKeys(Softmax& softmax) const {
    const uint32_t half = static_cast<uint32_t>(warp_ & 1) * args_.value_dim;
#pragma unroll 1
    for (int block = first_block_ + (warp_ >> 1); block < end_block_; block += kWarpPairs) {
      Wait(Barrier(), *turns_ & 1);
      ++*turns_;
      if ((warp_ & 1) == 0 && block == position_ / kWarpKeys) InsertFresh();
      SyncPair();
      softmax.Add(Row(0, false), Row(0, true) + half, block * kWarpKeys,
                  [&](int) { return visible_; });
      if (block + kWarpPairs >= end_block_) break;
      FenceAsyncProxy();
      SyncPair();
      if ((warp_ & 1) == 0) Request(block + kWarpPairs);
    }
    softmax.SumLanes();
  }

  /// Sums of the pairs, in place of the keys: [kWarpPairs][group] maxima, as many sums, then
  /// values.
  MARLIN_DEVICE float* Sums() const {
    return reinterpret_cast<float*>(Memory() + args_.shared.keys);
  }
  MARLIN_DEVICE int ValuesAt() const { return (2 * kWarpPairs * group_ + 3) / 4 * 4; }
  MARLIN_DEVICE int ValuesStride() const { return args_.value_dim + kMergePadding; }

  template <typename Softmax>
  MARLIN_DEVICE void StoreSums(const Softmax& softmax) const {
    float* const largest = Sums();
    float* const sums = largest + kWarpPairs * group_;
    float* const values = largest + ValuesAt();
    const int first_feature = (warp_ & 1) * args_.value_dim / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = (lane_ >> 2) + 8 * half;
      if (head >= group_) continue;
      const int at = (warp_ >> 1) * group_ + head;
      if ((lane_ & 3) == 0 && (warp_ & 1) == 0) {
        largest[at] = softmax.largest(half);
        sums[at] = softmax.sum(half);
      }
      softmax.ForPairs(half, [&](int feature, float first, float second) {
        *reinterpret_cast<float2*>(values + at * ValuesStride() + first_feature + feature) = {
            first, second};
      });
    }
  }

  MARLIN_DEVICE void PublishMerged(uint32_t* parts, uint32_t tag) const {
    const float* const largest = Sums();
    const float* const sums = largest + kWarpPairs * group_;
    const float* const values = largest + ValuesAt();
    const int quads = args_.value_dim / 4;
    const int pairs = min(end_block_ - first_block_, kWarpPairs);
#pragma unroll 1
    for (int head = warp_; head < group_; head += kPersistentWarps) {
      const int quad = lane_;
      if (quad >= quads) break;
      SoftmaxPart merged;
#pragma unroll 1
      for (int pair = 0; pair < pairs; ++pair) {
        const int at = pair * group_ + head;
        merged.Add({largest[at], sums[at],
                    *reinterpret_cast<const float4*>(values + at * ValuesStride() + 4 * quad)});
      }
      uint32_t* const to = parts + head * (args_.value_dim + 4);
      PublishQuad(to + 4 * quad, merged.values, tag);
      if (quad == 0) {
        PublishQuad(to + args_.value_dim, {merged.largest, merged.sum, 0.0f, 0.0f}, tag);
      }
    }
  }

  /// Every word is written in every layer, so that its tag is never one of long ago.
  MARLIN_DEVICE void PublishNothing(uint32_t* parts, uint32_t tag) const {
    for (int i = static_cast<int>(threadIdx.x); i < PartWords() / 4; i += kPersistentThreads) {
      PublishQuad(parts + 4 * i, {0.0f, 0.0f, 0.0f, 0.0f}, tag);
    }
  }

  /// 32 features of a head: eight quads, which eight adjacent threads have.
  struct CombinedUnit {
    int head;
    int kv_head;
    int first_feature;
  };
  MARLIN_DEVICE void CombineUnit(const uint32_t* parts, const CombinedUnit& unit, uint32_t* mixed,
                                 PersistentScratch& scratch, uint32_t tag) const {
    const int head = unit.head;
    const int feature = unit.first_feature + (lane_ & 7) * 4;
    const uint32_t* const first = parts + unit.kv_head * args_.attention_splits * PartWords() +
                                  (head - unit.kv_head * group_) * (args_.value_dim + 4);
    SoftmaxPart merged;
#pragma unroll 1
    for (int split = static_cast<int>(threadIdx.x) / 8; split < active_splits_;
         split += kPersistentThreads / 8) {
      const uint32_t* const from = first + split * PartWords();
      const uint4 sums = PollQuad(from + args_.value_dim);
      const uint4 values = PollQuad(from + feature);
      const float4 known = AwaitQuad(from + args_.value_dim, sums, tag);
      merged.Add({known.x, known.y, AwaitQuad(from + feature, values, tag)});
    }
    merged.AddLane(8);
    merged.AddLane(16);
    float* const part = scratch.parts[warp_][lane_ & 7];
    if (lane_ < 8) {
      part[0] = merged.largest;
      part[1] = merged.sum;
      *reinterpret_cast<float4*>(part + 4) = merged.values;
    }
    __syncthreads();
    if (warp_ == 0) {
      merged = {};
      const int warps = (active_splits_ + 3) / 4;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int warp = (lane_ >> 3) * 4 + i;
        if (warp >= warps) break;
        const float* const from = scratch.parts[warp][lane_ & 7];
        merged.Add({from[0], from[1], *reinterpret_cast<const float4*>(from + 4)});
      }
      merged.AddLane(8);
      merged.AddLane(16);
      if (lane_ < 8) {
        const Finish finish(layer_, head, merged);
        PublishQuad(mixed + head * args_.value_dim + feature, finish.Values(merged.values), tag);
      }
    }
    __syncthreads();
  }

  /// The division by the sum of weights, to which a sink adds.
  struct Finish {
    float factor;

    MARLIN_DEVICE Finish(const PersistentLayer& layer, int head, const SoftmaxPart& part) {
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

  const PersistentArguments& args_;
  const PersistentLayer& layer_;
  int* turns_;
  int position_;
  int lane_;
  int warp_;
  int group_;
  int kv_head_;
  int split_;
  KeySpan visible_;
  int active_splits_;  ///< CTAs of a KV head that have keys.
  int first_block_;
  int end_block_;
};

}  // namespace marlin::cuda
