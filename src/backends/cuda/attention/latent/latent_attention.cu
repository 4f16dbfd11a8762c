// Attention over a paged bf16 or e4m3 cache with wide heads, on matrix units: the latent attention
// of MLA, whose values are the first features of its keys, decode and prefill, and values apart.
//
//   A CTA takes 16 or 32 query rows of one KV head of a sequence (row r is query head r % group of
//   token r / group), and one of `segments` equal parts of their keys, in blocks of 64 (of 32
//   where shared memory is small), which it copies through a ring of two stages. For every block:
//     scores = Q K^T       a warp: 16 rows, all keys, and a part of the features, with queries in
//                          registers
//     weights              an online softmax; a warp adds the parts of two or four rows
//     sums += P V          a warp: all rows and every eighth tile of 16 features
//   so that a block is read from memory once, and twice from shared memory. Values apart have one
//   of the two stages, and the keys the other one. With more than one part of the keys a second
//   kernel merges them in their order.
//
//   Queries and softmax weights are split into two bf16 terms each, so that only fp32 sums round.
//   Rows of shared memory are swizzled: unit u of 16 bytes of row r is at u ^ (r & 7). Codes of
//   e4m3 go through the ring as they are; the CTA widens a block to bf16 beside it, exactly.
//
//   A value that is NaN or Inf would spread through the zero weights of rows that do not see its
//   key: where some rows do not, the CTA looks for such values, and then adds key by key (rare).
#include <algorithm>

#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/latent/latent_layout.h"
#include "backends/cuda/attention/prefill/attention_tile.cuh"
#include "backends/cuda/attention/swizzled_rows.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/warp_matrix.cuh"

namespace marlin::cuda {
namespace {

constexpr int kWarps = kLatentWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = kLatentStages;
constexpr int kFeatureTiles = kMostLatentValueFeatures / 16 / kWarps;  ///< Tiles of a warp.

/// The keys of a CTA: what its rows see, and the blocks of its part.
template <int kKeys>
struct Part {
  KeySpan some;  ///< Keys that some row sees.
  KeySpan all;   ///< Keys that all rows see.
  int first_block;
  int end_block;

  MARLIN_DEVICE Part(const AttentionArguments& args, const Tile& tile) {
    const KeySpan first = VisibleTo(args, tile, 0);
    const KeySpan last = VisibleTo(args, tile, tile.rows - 1);
    some = {first.first, last.end};
    all = {last.first, first.end};
    // A position beyond the pages is an error; there is nothing to read for it.
    const int64_t capacity = static_cast<int64_t>(args.sequences.blocks) * args.pages.page_tokens;
    if (some.end > capacity) {
      if (threadIdx.x == 0) {
        FindPage(args.sequences, args.pages, tile.sequence, some.end - 1, args.errors);
      }
      some.end = static_cast<int>(capacity);
    }
    const int begin = some.first / kKeys;
    const int blocks = max((some.end + kKeys - 1) / kKeys - begin, 0);
    const int share = (blocks + args.segments - 1) / args.segments;
    first_block = begin + min(static_cast<int>(blockIdx.z) * share, blocks);
    end_block = min(first_block + share, begin + blocks);
  }

  /// Whether a row does not see some key of a block that another row sees.
  MARLIN_DEVICE bool IsUneven(int first) const {
    return max(first, some.first) < all.first || min(first + kKeys, some.end) > all.end;
  }
  MARLIN_DEVICE bool IsMasked(int first) const {
    return first < all.first || first + kKeys > all.end;
  }
};

/// The blocks of a CTA's keys, and of values apart, in shared memory. All functions are called by
/// all threads.
template <int kGroups, int kKeys, bool kFp8>
class KeyBlocks {
 public:
  MARLIN_DEVICE KeyBlocks(const AttentionArguments& args, const Tile& tile, const Part<kKeys>& part,
                          uint32_t shared)
      : args_(args), tile_(tile), part_(part), layout_(args.key_dim), shared_(shared) {}

  /// Zeros after the features of the rows that are multiplied.
  MARLIN_DEVICE void ClearPadding() const {
    const int used = layout_.key_dim / 8;
    const int gap = layout_.units - used;
    const int rows = kFp8 ? kKeys : kStages * kKeys;
    for (int i = static_cast<int>(threadIdx.x); i < rows * gap; i += kThreads) {
      const uint32_t to = UnitAt(shared_, layout_.row_bytes, i / gap, used + i % gap);
      StoreShared16(to, make_uint4(0, 0, 0, 0));
    }
  }

  /// Requests a block, if there is one; zeros for keys that no row sees.
  MARLIN_DEVICE void Request(int block) const { Request(block, block, 0, layout_.key_dim); }
  /// The same for the values of a block, apart.
  MARLIN_DEVICE void RequestKeys(int block) const { Request(block, 0, 0, layout_.key_dim); }
  MARLIN_DEVICE void RequestValues(int block) const {
    Request(block, 1, KeyElements(args_.pages), args_.value_dim);
  }

  /// Waits for a block. Returns the address of its rows.
  MARLIN_DEVICE uint32_t Receive(int block) const {
    WaitForCopies<0>();
    __syncthreads();
    return kFp8 ? shared_ : Stage(block);
  }
  /// Waits for the older of two requests, which is in a stage, and widens it. Returns the address
  /// of its rows.
  MARLIN_DEVICE uint32_t ReceiveStage(int stage, int features) const {
    WaitForCopies<1>();
    __syncthreads();
    if constexpr (!kFp8) return Stage(stage);
    WidenStage(stage, features);
    return shared_;
  }
  /// Widens a block that has arrived.
  MARLIN_DEVICE void Widen(int block) const { WidenStage(block, layout_.key_dim); }

 private:
  static constexpr int kElement = kFp8 ? 1 : 2;  ///< Bytes of an element of the cache.

  /// Features of a block, which begin `first_element` elements into a page, to a stage.
  MARLIN_DEVICE void Request(int block, int stage, int64_t first_element, int features) const {
    if (block < part_.end_block) {
      const int first = block * kKeys;
      const uint8_t* const page =
          FindPage(args_.sequences, args_.pages, tile_.sequence, first, args_.errors);
      const int64_t place = static_cast<int64_t>(blockIdx.y) * args_.pages.page_tokens +
                            first % args_.pages.page_tokens;
      const KeySpan seen = {part_.some.first - first, page == nullptr ? 0 : part_.some.end - first};
      CopyRows<kThreads, kKeys, !kFp8>(
          page + (first_element + place * features) * kElement, AnyAlignedAddress(args_.sequences),
          seen, features * kElement / kUnit, Stage(stage), layout_.row_bytes);
    }
    CommitCopies();
  }

  MARLIN_DEVICE void WidenStage(int stage, int features) const {
    WidenToSwizzled<kThreads, kKeys>(Stage(stage), features, shared_, layout_.row_bytes);
    __syncthreads();
  }

  MARLIN_DEVICE uint32_t Stage(int block) const {
    const int stage = block % kStages;
    return kFp8 ? shared_ + layout_.CodesAt() + stage * layout_.CodeBytes()
                : shared_ + stage * layout_.BlockBytes();
  }

  const AttentionArguments& args_;
  const Tile& tile_;
  const Part<kKeys>& part_;
  LatentLayout<kGroups, kKeys, kFp8> layout_;
  uint32_t shared_;
};

/// 16 rows of queries and a part of their features, as MMA operands in two bf16 terms.
template <int kSteps>
class QueryPart {
 public:
  /// Steps of 16 features [first, first + count); zeros past the features and the rows that
  /// exist.
  MARLIN_DEVICE void Load(const AttentionArguments& args, const Tile& tile, int first_row,
                          int first, int count) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    WithType(args.queries.type, [&](auto type) {
      using T = decltype(type);
      const T* rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + (lane >> 2) + 8 * half;
        rows[half] = row < tile.rows ? static_cast<const T*>(args.queries.data) +
                                           tile.ElementOf(args, args.queries, row)
                                     : nullptr;
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const T* const row = rows[i & 1];
          const int feature = (first + step) * 16 + (i >> 1) * 8 + (lane & 3) * 2;
          const bool exists = step < count && row != nullptr && feature < args.key_dim;
          SplitInTwo(exists ? ToFloat(row[feature]) : 0.0f,
                     exists ? ToFloat(row[feature + 1]) : 0.0f, &rounded_[step][i],
                     &rests_[step][i]);
        }
      }
    });
  }

  MARLIN_DEVICE const uint32_t (&rounded(int step) const)[4] { return rounded_[step]; }
  MARLIN_DEVICE const uint32_t (&rests(int step) const)[4] { return rests_[step]; }

 private:
  uint32_t rounded_[kSteps][4];
  uint32_t rests_[kSteps][4];
};

/// The softmax and the sums of a CTA's rows. A warp has 16 rows and some features for parts of
/// scores, two or four rows for weights, all rows and some features for sums. kApart: values are
/// apart, and scores may be capped.
template <int kGroups, int kKeys, bool kFp8, bool kApart>
class TileSoftmax {
 public:
  using Shape = LatentLayout<kGroups, kKeys, kFp8>;
  static constexpr int kRows = Shape::kRows;
  static constexpr int kParts = Shape::kParts;
  /// Steps of 16 features of a warp, at most.
  static constexpr int kMostKeys = kApart ? kMostMatrixFeatures : kMostLatentKeyFeatures;
  static constexpr int kSteps = (kMostKeys / 16 + kParts - 1) / kParts;
  static constexpr int kScoreTiles = kKeys / 8;
  static constexpr int kRowsOfWarp = kRows / kWarps;
  /// With few keys two lanes do the same.
  static constexpr int kLanesOfRow = std::min(32 / kRowsOfWarp, kKeys / 4);
  static constexpr int kQuads = kKeys / 4 / kLanesOfRow;

  MARLIN_DEVICE TileSoftmax(const AttentionArguments& args, const Tile& tile, uint8_t* memory)
      : args_(args),
        tile_(tile),
        layout_(args.key_dim),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        first_row_(warp_ / kParts * kWarpRows),
        own_row_(warp_ * kRowsOfWarp + lane_ / kLanesOfRow % kRowsOfWarp),
        span_(VisibleTo(args, tile, own_row_)),
        weights_(SharedAddress(memory) + layout_.WeightsAt()),
        scores_(reinterpret_cast<float*>(memory + layout_.ScoresAt())),
        factors_(reinterpret_cast<float*>(memory + layout_.StateAt())),
        row_sums_(factors_ + kRows) {
    // Steps of 16 features are dealt in runs, one more to the first parts.
    const int all = layout_.units / 2;
    const int part = warp_ % kParts;
    steps_ = all / kParts + (part < all % kParts ? 1 : 0);
    first_step_ = all / kParts * part + min(part, all % kParts);
    part_.Load(args, tile, first_row_, first_step_, steps_);
  }

  /// Adds a block of keys in shared memory. `masked`: some row does not see all of them. `uneven`:
  /// nor all that other rows see.
  MARLIN_DEVICE void Add(uint32_t keys, int first, bool masked, bool uneven) {
    Score(keys);
    AddScored(keys, first, masked, uneven);
  }

  /// The scores of the warp's rows and all keys, over its features, to shared memory.
  MARLIN_DEVICE void Score(uint32_t keys) const {
    float sums[kScoreTiles][4] = {};
    // Without a branch after every step, loads and products of several steps overlap.
    if (steps_ == kSteps) {
      ScoreSteps<kSteps, true>(keys, sums);
    } else if (steps_ == kSteps - 1) {
      ScoreSteps<kSteps - 1, true>(keys, sums);
    } else {
      ScoreSteps<kSteps - 2, false>(keys, sums);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_ % kParts * kRows + first_row_ + (lane_ >> 2) + 8 * half;
      float* const to = scores_ + row * Shape::kScoreRow + (lane_ & 3) * 2;
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        *reinterpret_cast<float2*>(to + tile * 8) = {sums[tile][2 * half],
                                                     sums[tile][2 * half + 1]};
      }
    }
  }
  /// Adds the block whose scores these are.
  MARLIN_DEVICE void AddScored(uint32_t values, int first, bool masked, bool uneven) {
    // Also settles whether values may be multiplied by zero weights.
    const bool suspect =
        uneven && !UnitsAreFinite<kThreads, kKeys>(values, layout_.row_bytes, args_.value_dim,
                                                   static_cast<int>(threadIdx.x));
    const bool by_key = __syncthreads_or(suspect ? 1 : 0) != 0;
    Weigh(first, masked);
    __syncthreads();
    Rescale();
    if (by_key) {
      AddByKey(values, first);
    } else if (args_.value_dim == kMostLatentValueFeatures) {
      AddValues<true>(values);
    } else {
      AddValues<false>(values);
    }
  }

  /// Puts the sums of weights and the maxima in shared memory. Call it once, at the end.
  MARLIN_DEVICE void SumLanes() {
#pragma unroll
    for (int step = kLanesOfRow / 2; step > 0; step /= 2) {
      sum_ += __shfl_xor_sync(~0u, sum_, step);
    }
    __syncthreads();
    if (lane_ % kLanesOfRow == 0) {
      factors_[own_row_] = largest_;
      row_sums_[own_row_] = sum_;
    }
    __syncthreads();
  }
  MARLIN_DEVICE float Largest(int row) const { return factors_[row]; }
  MARLIN_DEVICE float Sum(int row) const { return row_sums_[row]; }

  /// Calls run(row, feature, first, second) for pairs of adjacent features.
  template <typename Run>
  MARLIN_DEVICE void ForPairs(const Run& run) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = group * kWarpRows + (lane_ >> 2) + 8 * half;
#pragma unroll
        for (int n = 0; n < 2 * kFeatureTiles; ++n) {
          const int feature = FeatureOf(n);
          if (feature >= args_.value_dim) break;
          run(row, feature, values_[group][n][2 * half], values_[group][n][2 * half + 1]);
        }
      }
    }
  }

 private:
  /// The first feature of tile n of 8 features of this lane.
  MARLIN_DEVICE int FeatureOf(int n) const {
    return (warp_ + (n >> 1) * kWarps) * 16 + (n & 1) * 8 + (lane_ & 3) * 2;
  }

  template <int kMost, bool kAll>
  MARLIN_DEVICE void ScoreSteps(uint32_t keys, float (&sums)[kScoreTiles][4]) const {
    const int key = (lane_ & 7) + (lane_ >> 4) * 8;
#pragma unroll
    for (int step = 0; step < kMost; ++step) {
      if (!kAll && step >= steps_) break;
      const int unit = 2 * (first_step_ + step) + (lane_ >> 3 & 1);
      uint32_t k[kScoreTiles / 2][4];
#pragma unroll
      for (int pair = 0; pair < kScoreTiles / 2; ++pair) {
        LoadMatrices(k[pair],
                     UnitAt(keys, layout_.row_bytes, key, unit) + pair * 16 * layout_.row_bytes);
      }
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        const uint32_t* const operand = k[tile >> 1] + 2 * (tile & 1);
        MultiplyAdd<Bf16x2>(sums[tile], part_.rounded(step), operand[0], operand[1]);
      }
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        const uint32_t* const operand = k[tile >> 1] + 2 * (tile & 1);
        MultiplyAdd<Bf16x2>(sums[tile], part_.rests(step), operand[0], operand[1]);
      }
    }
  }

  /// Softmax weights of the lane's row, in two terms, and the factor that rescales its sums, to
  /// shared memory. A lane has four adjacent keys of every 4 * kLanesOfRow.
  MARLIN_DEVICE void Weigh(int first, bool masked) {
    const int lane_key = lane_ % kLanesOfRow * 4;
    float scores[kQuads][4] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float* const from = scores_ + (part * kRows + own_row_) * Shape::kScoreRow + lane_key;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const auto four = *reinterpret_cast<const float4*>(from + quad * 4 * kLanesOfRow);
        scores[quad][0] += four.x;
        scores[quad][1] += four.y;
        scores[quad][2] += four.z;
        scores[quad][3] += four.w;
      }
    }
    const float scale = args_.scale * kLog2E;
    float most = largest_;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (float& score : scores[quad]) score *= scale;
      if constexpr (kApart) CapScores(args_.softcap, scores[quad]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + quad * 4 * kLanesOfRow + lane_key + i;
        const bool hidden = masked && (key < span_.first || key >= span_.end);
        if (hidden) scores[quad][i] = NoScore();
        most = fmaxf(most, scores[quad][i]);
      }
    }
#pragma unroll
    for (int step = kLanesOfRow / 2; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    const float factor = RescaleFactor(largest_, most);
    largest_ = most;
    sum_ *= factor;
    if (lane_ % kLanesOfRow == 0) factors_[own_row_] = factor;
    // A masked key is compared, not subtracted: -Inf - -Inf is NaN.
    const auto weight = [&](float score) { return score == NoScore() ? 0.0f : Exp2(score - most); };
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      uint32_t rounded[2];
      uint32_t rests[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float low = weight(scores[quad][2 * pair]);
        const float high = weight(scores[quad][2 * pair + 1]);
        sum_ += low + high;
        SplitInTwo(low, high, &rounded[pair], &rests[pair]);
      }
      const uint32_t at = WeightAt(own_row_, quad * 4 * kLanesOfRow + lane_key);
      StoreShared8(at, {rounded[0], rounded[1]});
      StoreShared8(at + kRows * Shape::kWeightRowBytes, {rests[0], rests[1]});
    }
  }
  MARLIN_DEVICE uint32_t WeightAt(int row, int key) const {
    return WeightUnitAt(row, key >> 3) + (key & 7) * 2;
  }
  /// A row of 32 keys has 4 units, and two rows 128 bytes.
  MARLIN_DEVICE uint32_t WeightUnitAt(int row, int unit) const {
    if constexpr (kKeys == kLatentKeys) {
      return UnitAt(weights_, Shape::kWeightRowBytes, row, unit);
    } else {
      return weights_ + row * Shape::kWeightRowBytes + (unit ^ (row >> 1 & 3)) * kUnit;
    }
  }

  MARLIN_DEVICE void Rescale() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors_[group * kWarpRows + (lane_ >> 2) + 8 * half];
        if (!__any_sync(~0u, factor != 1.0f)) continue;
#pragma unroll
        for (int n = 0; n < 2 * kFeatureTiles; ++n) {
          values_[group][n][2 * half] *= factor;
          values_[group][n][2 * half + 1] *= factor;
        }
      }
    }
  }

  template <bool kAllTiles>
  MARLIN_DEVICE void AddValues(uint32_t keys) {
#pragma unroll(kAllTiles ? 2 : 1)
    for (int step = 0; step < kKeys / 16; ++step) {
      const int unit = 2 * step + (lane_ >> 4);
      uint32_t weights[kGroups][4];
      uint32_t rests[kGroups][4];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int row = group * kWarpRows + (lane_ & 15);
        const uint32_t at = WeightUnitAt(row, unit);
        LoadMatrices(weights[group], at);
        LoadMatrices(rests[group], at + kRows * Shape::kWeightRowBytes);
      }
      const int key = step * 16 + (lane_ & 15);
      uint32_t v[kFeatureTiles][4];
#pragma unroll
      for (int n = 0; n < kFeatureTiles; ++n) {
        const int tile = warp_ + n * kWarps;
        if (!kAllTiles && tile * 16 >= args_.value_dim) break;
        LoadMatricesTransposed(v[n], UnitAt(keys, layout_.row_bytes, key, 2 * tile + (lane_ >> 4)));
      }
#pragma unroll
      for (int term = 0; term < 2; ++term) {
#pragma unroll
        for (int n = 0; n < kFeatureTiles; ++n) {
          if (!kAllTiles && (warp_ + n * kWarps) * 16 >= args_.value_dim) break;
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const auto& w = term == 0 ? weights[group] : rests[group];
            MultiplyAdd<Bf16x2>(values_[group][2 * n], w, v[n][0], v[n][1]);
            MultiplyAdd<Bf16x2>(values_[group][2 * n + 1], w, v[n][2], v[n][3]);
          }
        }
      }
    }
  }

  /// AddValues in fp32, without the products of keys that a row does not see.
  MARLIN_DEVICE void AddByKey(uint32_t keys, int first) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = group * kWarpRows + (lane_ >> 2) + 8 * half;
        const KeySpan span = VisibleTo(args_, tile_, row);
#pragma unroll 1
        for (int key = max(span.first - first, 0); key < min(span.end - first, kKeys); ++key) {
          const float weight = WeightOf(row, key);
#pragma unroll
          for (int n = 0; n < 2 * kFeatureTiles; ++n) {
            const int feature = FeatureOf(n);
            if (feature >= args_.value_dim) break;
            const uint32_t at =
                UnitAt(keys, layout_.row_bytes, key, feature >> 3) + (feature & 7) * 2;
            const float2 pair = Bf16x2::Unpack(LoadShared4(at));
            float* const sums = values_[group][n];
            sums[2 * half] = __fmaf_rn(weight, pair.x, sums[2 * half]);
            sums[2 * half + 1] = __fmaf_rn(weight, pair.y, sums[2 * half + 1]);
          }
        }
      }
    }
  }
  /// The sum of a weight's terms.
  MARLIN_DEVICE float WeightOf(int row, int key) const {
    const uint32_t at = WeightAt(row, key & ~1);
    const float2 rounded = Bf16x2::Unpack(LoadShared4(at));
    const float2 rest = Bf16x2::Unpack(LoadShared4(at + kRows * Shape::kWeightRowBytes));
    return (key & 1) != 0 ? rounded.y + rest.y : rounded.x + rest.x;
  }

  const AttentionArguments& args_;
  const Tile& tile_;
  Shape layout_;
  int lane_;
  int warp_;
  int first_row_;  ///< First row of the warp's parts of scores.
  int first_step_;
  int steps_;
  QueryPart<kSteps> part_;
  int own_row_;   ///< Row of the lane's weights.
  KeySpan span_;  ///< Keys that this row sees.
  uint32_t weights_;
  float* scores_;
  float* factors_;   ///< [kRows]: factors of a block, at the end the maxima.
  float* row_sums_;  ///< [kRows]: at the end the sums of weights.
  float largest_ = NoScore();
  float sum_ = 0.0f;
  float values_[kGroups][2 * kFeatureTiles][4] = {};
};

/// The sums of a part: maxima and sums of weights of all rows, then weighted values.
MARLIN_DEVICE float* PartialOf(const AttentionArguments& args, int segment) {
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
  return args.partials +
         (tile * args.segments + segment) * PartialFloats(args.tile_rows, args.value_dim);
}

template <int kGroups, int kKeys, bool kFp8, bool kApart>
MARLIN_DEVICE void StoreSums(const AttentionArguments& args, const Tile& tile,
                             const TileSoftmax<kGroups, kKeys, kFp8, kApart>& softmax) {
  constexpr int kRows = kGroups * kWarpRows;
  if (args.segments == 1) {
    softmax.ForPairs([&](int row, int feature, float first, float second) {
      if (row >= tile.rows) return;
      const SoftmaxFinish finish(args, tile.HeadOf(args, row), softmax.Largest(row),
                                 softmax.Sum(row));
      const float values[2] = {finish.Of(first), finish.Of(second)};
      StoreAdjacent(args.out.data, args.out.type, tile.ElementOf(args, args.out, row) + feature,
                    values);
    });
    return;
  }
  float* const partial = PartialOf(args, static_cast<int>(blockIdx.z));
  const int row = static_cast<int>(threadIdx.x);
  if (row < kRows) {
    partial[row] = softmax.Largest(row);
    partial[kRows + row] = softmax.Sum(row);
  }
  softmax.ForPairs([&](int r, int feature, float first, float second) {
    float* const to = partial + 2 * kRows + r * args.value_dim + feature;
    *reinterpret_cast<float2*>(to) = {first, second};
  });
}

/// Adds blocks whose values are the first features of their keys.
template <int kGroups, int kKeys, bool kFp8>
MARLIN_DEVICE void AddLatents(const KeyBlocks<kGroups, kKeys, kFp8>& blocks,
                              const Part<kKeys>& part,
                              TileSoftmax<kGroups, kKeys, kFp8, false>& softmax) {
#pragma unroll 1
  for (int block = part.first_block; block < part.end_block; ++block) {
    const uint32_t keys = blocks.Receive(block);
    // All warps are done with the block before, whose stage is free.
    blocks.Request(block + 1);
    if constexpr (kFp8) blocks.Widen(block);
    const int first = block * kKeys;
    softmax.Add(keys, first, part.IsMasked(first), part.IsUneven(first));
  }
}

/// Adds blocks with values apart, the first of whose keys are requested.
template <int kGroups, int kKeys, bool kFp8>
MARLIN_DEVICE void AddApart(const AttentionArguments& args,
                            const KeyBlocks<kGroups, kKeys, kFp8>& blocks, const Part<kKeys>& part,
                            TileSoftmax<kGroups, kKeys, kFp8, true>& softmax) {
  blocks.RequestValues(part.first_block);
#pragma unroll 1
  for (int block = part.first_block; block < part.end_block; ++block) {
    softmax.Score(blocks.ReceiveStage(0, args.key_dim));
    // All warps are done with the keys.
    __syncthreads();
    blocks.RequestKeys(block + 1);
    const uint32_t values = blocks.ReceiveStage(1, args.value_dim);
    const int first = block * kKeys;
    softmax.AddScored(values, first, part.IsMasked(first), part.IsUneven(first));
    __syncthreads();
    blocks.RequestValues(block + 1);
  }
  WaitForCopies<0>();
}

/// kApart: the cache has values of its own, of no more features than keys.
template <int kGroups, int kKeys, bool kFp8, bool kApart>
__global__ void __launch_bounds__(kThreads, 1)
    LatentAttentionKernel(const __grid_constant__ AttentionArguments args) {
  extern __shared__ __align__(16) uint8_t memory[];
  EnterChain();
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
    CheckFirstRows(args.sequences, args.errors);
  }
  const Tile tile = FindTile(args, kGroups * kWarpRows);
  if (tile.sequence < 0) return;
  if (blockIdx.y == 0 && blockIdx.z == 0) CheckPositions(args, tile);
  const Part<kKeys> part(args, tile);
  const KeyBlocks<kGroups, kKeys, kFp8> blocks(args, tile, part, SharedAddress(memory));
  if constexpr (kApart) {
    blocks.RequestKeys(part.first_block);
  } else {
    blocks.Request(part.first_block);
  }
  blocks.ClearPadding();
  TileSoftmax<kGroups, kKeys, kFp8, kApart> softmax(args, tile, memory);
  if constexpr (kApart) {
    AddApart(args, blocks, part, softmax);
  } else {
    AddLatents(blocks, part, softmax);
  }
  softmax.SumLanes();
  StoreSums(args, tile, softmax);
}

constexpr int kMergeThreads = 512;
constexpr int kMergeParts = 4;
constexpr int kMergeQuads = kMergeThreads / kMergeParts;
static_assert(kMergeQuads * 4 == kMostLatentValueFeatures);
constexpr int kMostSegments = 64;

/// Merges the parts of row blockIdx.z of a tile: a quarter of the threads takes a quarter of the
/// parts, and the quarters are added in order.
__global__ void __launch_bounds__(kMergeThreads)
    MergeLatentKernel(const __grid_constant__ AttentionArguments args) {
  __shared__ float factors[kMostSegments];
  __shared__ float sums_of_weights[kMostSegments];
  __shared__ float4 quarters[kMergeParts][kMergeQuads];
  EnterChain();
  const Tile tile = FindTile(args, args.tile_rows);
  const auto row = static_cast<int>(blockIdx.z);
  if (tile.sequence < 0 || row >= tile.rows) return;
  const int64_t floats = PartialFloats(args.tile_rows, args.value_dim);
  const float* const parts = PartialOf(args, 0);
  const auto thread = static_cast<int>(threadIdx.x);
  float most = NoScore();
  for (int i = thread & 31; i < args.segments; i += 32) most = fmaxf(most, parts[i * floats + row]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  if (thread < args.segments) {
    factors[thread] = RescaleFactor(parts[thread * floats + row], most);
    sums_of_weights[thread] = parts[thread * floats + args.tile_rows + row];
  }
  __syncthreads();
  const int quad = thread % kMergeQuads;
  const int quarter = thread / kMergeQuads;
  const int share = (args.segments + kMergeParts - 1) / kMergeParts;
  const int end = min((quarter + 1) * share, args.segments);
  const bool exists = quad * 4 < args.value_dim;
  float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
  for (int i = quarter * share; i < (exists ? end : 0); ++i) {
    const float* const values = parts + i * floats + 2 * args.tile_rows + row * args.value_dim;
    const auto four = *reinterpret_cast<const float4*>(values + quad * 4);
    sums.x = __fmaf_rn(four.x, factors[i], sums.x);
    sums.y = __fmaf_rn(four.y, factors[i], sums.y);
    sums.z = __fmaf_rn(four.z, factors[i], sums.z);
    sums.w = __fmaf_rn(four.w, factors[i], sums.w);
  }
  quarters[quarter][quad] = sums;
  __syncthreads();
  if (quarter != 0 || !exists) return;
  float total = 0.0f;
  for (int i = 0; i < args.segments; ++i) {
    total = __fmaf_rn(sums_of_weights[i], factors[i], total);
  }
  for (int i = 1; i < kMergeParts; ++i) {
    const float4 other = quarters[i][quad];
    sums = {sums.x + other.x, sums.y + other.y, sums.z + other.z, sums.w + other.w};
  }
  const SoftmaxFinish finish(args, tile.HeadOf(args, row), most, total);
  const float values[4] = {finish.Of(sums.x), finish.Of(sums.y), finish.Of(sums.z),
                           finish.Of(sums.w)};
  StoreAdjacent(args.out.data, args.out.type, tile.ElementOf(args, args.out, row) + quad * 4,
                values);
}

using Kernel = void (*)(AttentionArguments);

template <int kKeys, bool kApart>
Kernel KernelOf(int tile_rows, bool fp8) {
  if (tile_rows == 16) {
    return fp8 ? &LatentAttentionKernel<1, kKeys, true, kApart>
               : &LatentAttentionKernel<1, kKeys, false, kApart>;
  }
  return fp8 ? &LatentAttentionKernel<2, kKeys, true, kApart>
             : &LatentAttentionKernel<2, kKeys, false, kApart>;
}

Kernel KernelFor(int tile_rows, int keys, bool fp8, bool apart) {
  if (keys == kLatentKeys) {
    return apart ? KernelOf<kLatentKeys, true>(tile_rows, fp8)
                 : KernelOf<kLatentKeys, false>(tile_rows, fp8);
  }
  return apart ? KernelOf<kFewLatentKeys, true>(tile_rows, fp8)
               : KernelOf<kFewLatentKeys, false>(tile_rows, fp8);
}

}  // namespace

cudaError_t LoadLatentAttention() {
  for (const int keys : {kLatentKeys, kFewLatentKeys}) {
    for (const bool apart : {false, true}) {
      const cudaError_t error =
          PrepareSharedKernels(KernelFor(16, keys, false, apart), KernelFor(16, keys, true, apart),
                               KernelFor(32, keys, false, apart), KernelFor(32, keys, true, apart));
      if (error != cudaSuccess) return error;
    }
  }
  return PrepareKernels(&MergeLatentKernel);
}

cudaError_t LaunchLatentAttention(const AttentionArguments& args, const DeviceShape& device,
                                  cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(args.tiles);
  const auto heads = static_cast<unsigned>(args.kv_heads);
  const bool fp8 = args.pages.type == Element::kE4M3;
  const dim3 grid(tiles, heads, static_cast<unsigned>(args.segments));
  const int keys = LatentKeysFor(args.tile_rows, args.key_dim, fp8, device.shared_bytes);
  const int bytes = LatentBytes(args.tile_rows, keys, args.key_dim, fp8);
  const Kernel kernel = KernelFor(args.tile_rows, keys, fp8, !args.pages.values_in_keys);
  const cudaError_t error = LaunchInChain(kernel, grid, kThreads, bytes, stream, args);
  if (error != cudaSuccess || args.segments == 1) return error;
  const dim3 rows(tiles, heads, static_cast<unsigned>(args.tile_rows));
  return LaunchInChain(&MergeLatentKernel, rows, kMergeThreads, 0, stream, args);
}

}  // namespace marlin::cuda
