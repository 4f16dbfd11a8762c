// Causal softmax attention in fp32 with a running maximum (online softmax), grouped queries,
// windows and sinks, over pages or a strided tensor.
//
//   A CTA takes a tile of query rows of one KV head: row r is query head r % group of token
//   r / group of a sequence. For every segment of 128 keys, for every block of 32 keys in it:
//     scores = queries . keys           a warp: 32 keys for a quarter of the rows
//     weights = e^(scores - maximum)    a warp: its rows
//     sums += weights . values          a thread: its features for all rows
//   then the segment is merged into the total, in order.
//
//   Split-KV: the CTAs of a tile take a segment each, and a second kernel merges. Blocks and
//   segments are aligned to their size and merged in the same order by the same operations, so that
//   the bits of a row depend neither on the other rows nor on the split.
#include <algorithm>
#include <cmath>

#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/exact/exact_attention_layout.h"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/attention/prefill/attention_tile.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
static_assert(kKeyBlock == 32);  // A lane for each key.

MARLIN_DEVICE float Nothing() { return -INFINITY; }

/// The weight of a masked key, which no other weight is. NaN values of such keys must not spread.
constexpr float kMasked = -1.0f;

/// The factor that rescales sums from maximum `before` to maximum `after`.
MARLIN_DEVICE float FactorOf(float before, float after) {
  return before == after ? 1.0f : expf(before - after);
}

/// A row's merge of a segment's sums into the total; the same operations wherever it is done.
struct Merge {
  bool skip;
  float largest;
  float old_factor;
  float new_factor;

  /// A segment without a visible key is skipped. A NaN score gives a NaN sum, which is not.
  MARLIN_DEVICE Merge(float total_largest, float part_largest, float part_sum)
      : skip(part_largest == Nothing() && part_sum == 0.0f),
        largest(fmaxf(total_largest, part_largest)),
        old_factor(FactorOf(total_largest, largest)),
        new_factor(FactorOf(part_largest, largest)) {}

  MARLIN_DEVICE float Of(float total, float part) const {
    return __fmaf_rn(part, new_factor, __fmul_rn(total, old_factor));
  }
};

/// Divides by the sum of weights, to which a sink adds.
struct Finish {
  float factor = 1.0f;
  float sum;

  MARLIN_DEVICE Finish(const AttentionArguments& args, int head, float largest, float total)
      : sum(total) {
    if (args.sinks == nullptr) return;
    const float with_sink = fmaxf(largest, args.sinks[head]);
    factor = FactorOf(largest, with_sink);
    sum = __fmaf_rn(total, factor, FactorOf(args.sinks[head], with_sink));
  }
  MARLIN_DEVICE float Of(float value) const { return __fdiv_rn(__fmul_rn(value, factor), sum); }
};

/// Where the keys and the values of a block are. Null: there is no page.
struct Block {
  const uint8_t* keys = nullptr;
  const uint8_t* values = nullptr;
  int64_t key_stride = 0;  ///< Elements from one key to the next.
  int64_t value_stride = 0;
  Element key_type = Element::kF32;
  Element value_type = Element::kF32;
};

MARLIN_DEVICE int64_t Bytes(Element type, int64_t elements) {
  return elements * CacheElementBytes(type);
}

MARLIN_DEVICE Block FindBlock(const AttentionArguments& args, const Tile& tile, int first_key) {
  const auto head = static_cast<int64_t>(blockIdx.y);
  Block block;
  if (args.sequences.block_tables == nullptr) {
    const auto at = [&](const KeysView& view) {
      return static_cast<const uint8_t*>(view.data) +
             Bytes(view.type, first_key * view.position_stride + head * view.head_stride);
    };
    return {at(args.keys),  at(args.values), args.keys.position_stride, args.values.position_stride,
            args.keys.type, args.values.type};
  }
  const PagesView& pages = args.pages;
  const uint8_t* const page =
      FindPage(args.sequences, pages, tile.sequence, first_key, args.errors);
  if (page == nullptr) return block;
  const int64_t place = head * pages.page_tokens + first_key % pages.page_tokens;
  block.key_type = block.value_type = pages.type;
  block.key_stride = pages.key_dim;
  block.keys = page + Bytes(pages.type, place * pages.key_dim);
  block.value_stride = pages.values_in_keys ? pages.key_dim : pages.value_dim;
  block.values = pages.values_in_keys
                     ? block.keys
                     : page + Bytes(pages.type, KeyElements(pages) + place * pages.value_dim);
  return block;
}

/// The shared memory of a CTA, in floats.
template <int kRows>
struct Shared {
  float* queries;  ///< [kRows][padded]
  float* keys;     ///< [kKeyBlock][key_width]
  float* weights;  ///< [kKeyBlock][kRows]
  float* factors;  ///< [kRows]
  float* largest;  ///< [kRows], in the segment
  float* sums;
  float* total_largest;
  float* total_sums;

  MARLIN_DEVICE Shared(float* memory, int padded, int key_width)
      : queries(memory),
        keys(queries + kRows * padded),
        weights(keys + kKeyBlock * key_width),
        factors(weights + kKeyBlock * kRows),
        largest(factors + kRows),
        sums(largest + kRows),
        total_largest(sums + kRows),
        total_sums(total_largest + kRows) {}
};

/// Four adjacent features, zeros from feature `left` on.
template <typename T>
MARLIN_DEVICE float4 LoadFour(const T* from, int left, bool aligned) {
  if (aligned) {
    if constexpr (sizeof(T) == 4) {
      return *reinterpret_cast<const float4*>(from);
    } else if constexpr (sizeof(T) == 1) {
      const auto codes = *reinterpret_cast<const uint32_t*>(from);
      const float2 low = F16x2::Unpack(HalvesOfCodes(codes));
      const float2 high = F16x2::Unpack(HalvesOfCodes(codes >> 16));
      return {low.x, low.y, high.x, high.y};
    } else {
      const auto bits = *reinterpret_cast<const uint2*>(from);
      T four[4];
      memcpy(four, &bits, sizeof(four));
      return {ToFloat(four[0]), ToFloat(four[1]), ToFloat(four[2]), ToFloat(four[3])};
    }
  }
  const auto at = [&](int i) { return i < left ? ToFloat(from[i]) : 0.0f; };
  return {at(0), at(1), at(2), at(3)};
}

/// kRows query rows of one KV head. A thread has features thread + 128 i, i < kFeatures. kInParts:
/// shared memory has parts of keys, of kKeyPartFeatures features.
template <int kRows, int kFeatures, bool kInParts>
class TileAttention {
 public:
  MARLIN_DEVICE TileAttention(const AttentionArguments& args, const Tile& tile, float* memory)
      : args_(args),
        tile_(tile),
        padded_(PaddedFeatures(args.key_dim)),
        key_width_(kInParts ? PaddedFeatures(kKeyPartFeatures) : padded_),
        shared_(memory, padded_, key_width_),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ & 31),
        warp_(thread_ >> 5) {}

  /// All segments, in order.
  MARLIN_DEVICE void RunAll() {
    LoadQueries();
    const KeyRange range(args_, tile_);
    float total[kRows][kFeatures] = {};
    for (int row = thread_; row < kRows; row += kThreads) {
      shared_.total_largest[row] = Nothing();
      shared_.total_sums[row] = 0.0f;
    }
    for (int segment = range.first / kSegmentKeys; segment * kSegmentKeys < range.end; ++segment) {
      float part[kRows][kFeatures];
      RunSegment(range, segment, part);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const Merge merge(shared_.total_largest[row], shared_.largest[row], shared_.sums[row]);
        if (merge.skip) continue;
#pragma unroll
        for (int i = 0; i < kFeatures; ++i) total[row][i] = merge.Of(total[row][i], part[row][i]);
      }
      __syncthreads();
      for (int row = thread_; row < kRows; row += kThreads) {
        const Merge merge(shared_.total_largest[row], shared_.largest[row], shared_.sums[row]);
        if (merge.skip) continue;
        shared_.total_largest[row] = merge.largest;
        shared_.total_sums[row] = merge.Of(shared_.total_sums[row], shared_.sums[row]);
      }
      __syncthreads();
    }
    Store(total);
  }

  /// Split-KV: one segment, whose sums go to `partial`.
  MARLIN_DEVICE void RunOne(int segment, float* partial) {
    const KeyRange range(args_, tile_);
    const bool seen =
        segment * kSegmentKeys < range.end && (segment + 1) * kSegmentKeys > range.first;
    float part[kRows][kFeatures];
    if (seen) {
      LoadQueries();
      RunSegment(range, segment, part);
    }
    for (int row = thread_; row < kRows; row += kThreads) {
      partial[row] = seen ? shared_.largest[row] : Nothing();
      partial[kRows + row] = seen ? shared_.sums[row] : 0.0f;
    }
    if (!seen) return;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kFeatures; ++i) {
        const int feature = thread_ + i * kThreads;
        if (feature < args_.value_dim) {
          partial[2 * kRows + row * args_.value_dim + feature] = part[row][i];
        }
      }
    }
  }

 private:
  MARLIN_DEVICE void LoadQueries() const {
    WithType(args_.queries.type, [&](auto type) {
      const auto* const queries = static_cast<const decltype(type)*>(args_.queries.data);
      for (int row = warp_; row < kRows; row += kWarps) {
        float* const to = shared_.queries + row * padded_;
        const bool inside = row < tile_.rows;
        const auto* const from =
            queries + (inside ? tile_.ElementOf(args_, args_.queries, row) : 0);
#pragma unroll 4
        for (int i = lane_; i < padded_; i += 32) {
          to[i] = inside && i < args_.key_dim ? ToFloat(from[i]) : 0.0f;
        }
      }
    });
    __syncthreads();
  }

  MARLIN_DEVICE void RunSegment(const KeyRange& range, int segment,
                                float (&part)[kRows][kFeatures]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kFeatures; ++i) part[row][i] = 0.0f;
    }
    for (int row = thread_; row < kRows; row += kThreads) {
      shared_.largest[row] = Nothing();
      shared_.sums[row] = 0.0f;
    }
    const int begin = max(segment * kSegmentKeys, range.first / kKeyBlock * kKeyBlock);
    const int end = min((segment + 1) * kSegmentKeys, range.end);
    for (int key = begin; key < end; key += kKeyBlock) {
      const Block block = FindBlock(args_, tile_, key);
      if (block.keys == nullptr) continue;
      const int count = min(kKeyBlock, end - key);
      float scores[kRows / kWarps] = {};
      Score(block, count, scores);
      Weigh(key, count, scores);
      __syncthreads();
      WithCacheType(block.value_type, [&](auto type) { AddValues(type, block, count, part); });
    }
    __syncthreads();
  }

  /// The products of a warp's rows, which are adjacent, and a lane's key.
  MARLIN_DEVICE void Score(const Block& block, int count, float (&scores)[kRows / kWarps]) const {
    if constexpr (kInParts) {
      for (int first = 0; first < args_.key_dim; first += kKeyPartFeatures) {
        // All are done with the part before.
        __syncthreads();
        LoadKeys(block, count, first, min(padded_ - 4 - first, kKeyPartFeatures));
        __syncthreads();
        AddProducts(first, min(args_.key_dim - first, kKeyPartFeatures), scores);
      }
    } else {
      LoadKeys(block, count, 0, padded_ - 4);
      __syncthreads();
      AddProducts(0, args_.key_dim, scores);
    }
  }

  /// A lane loads four adjacent features, of `features` from `first_feature` on, of several of its
  /// warp's keys at once.
  MARLIN_DEVICE void LoadKeys(const Block& block, int count, int first_feature,
                              int features) const {
    constexpr int kAtOnce = kRows == 4 ? kKeyBlock / kWarps : 2;
    WithCacheType(block.key_type, [&](auto type) {
      using T = decltype(type);
      const auto* const keys = reinterpret_cast<const T*>(block.keys) + first_feature;
      const int left = args_.key_dim - first_feature;
      const bool aligned = reinterpret_cast<uintptr_t>(keys) % (4 * sizeof(T)) == 0 &&
                           block.key_stride % 4 == 0 && args_.key_dim % 4 == 0;
      for (int i = lane_ * 4; i < features; i += 128) {
#pragma unroll 1
        for (int first = warp_; first < kKeyBlock; first += kAtOnce * kWarps) {
          float4 loaded[kAtOnce];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const int key = first + j * kWarps;
            loaded[j] = {};
            if (key < count) {
              loaded[j] = LoadFour(keys + key * block.key_stride + i, left - i, aligned);
            }
          }
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            float* const to = shared_.keys + (first + j * kWarps) * key_width_ + i;
            *reinterpret_cast<float4*>(to) = loaded[j];
          }
        }
      }
    });
  }

  /// Adds the products of `features` features from `first_feature` on.
  MARLIN_DEVICE void AddProducts(int first_feature, int features,
                                 float (&scores)[kRows / kWarps]) const {
    constexpr int kRowsOfWarp = kRows / kWarps;
    const float* const key = shared_.keys + lane_ * key_width_;
    const int first = warp_ * kRowsOfWarp;
    for (int i = 0; i < features; i += 4) {
      const auto k = *reinterpret_cast<const float4*>(key + i);
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const auto q = *reinterpret_cast<const float4*>(shared_.queries + (first + r) * padded_ +
                                                        first_feature + i);
        scores[r] = __fmaf_rn(q.x, k.x, scores[r]);
        scores[r] = __fmaf_rn(q.y, k.y, scores[r]);
        scores[r] = __fmaf_rn(q.z, k.z, scores[r]);
        scores[r] = __fmaf_rn(q.w, k.w, scores[r]);
      }
    }
  }

  /// The weights of scores relative to the running maximum.
  MARLIN_DEVICE void Weigh(int first_key, int count, const float (&scores)[kRows / kWarps]) const {
    constexpr int kRowsOfWarp = kRows / kWarps;
    const int first = warp_ * kRowsOfWarp;
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int row = first + r;
      const int position = tile_.PositionOf(args_, row);
      const int at = first_key + lane_;
      const bool visible = row < tile_.rows && lane_ < count && at <= position &&
                           at >= KeyRange::FirstKey(args_, position);
      float score = __fmul_rn(scores[r], args_.scale);
      if (args_.softcap != 0.0f) score = args_.softcap * tanhf(score / args_.softcap);
      WeighRow(row, visible, score);
    }
  }

  MARLIN_DEVICE void WeighRow(int row, bool visible, float score) const {
    float largest = visible ? score : Nothing();
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const float before = shared_.largest[row];
    const float after = fmaxf(before, largest);
    float weight = kMasked;
    if (visible) {
      // Scores of minus infinity weigh nothing, also before any other.
      weight = after == Nothing() && score == Nothing() ? 0.0f : expf(score - after);
    }
    float sum = visible ? weight : 0.0f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    shared_.weights[lane_ * kRows + row] = weight;
    __syncwarp();
    if (lane_ == 0) {
      const float factor = FactorOf(before, after);
      shared_.factors[row] = factor;
      shared_.largest[row] = after;
      shared_.sums[row] = __fmaf_rn(shared_.sums[row], factor, sum);
    }
  }

  template <typename T>
  MARLIN_DEVICE void AddValues(T /*type*/, const Block& block, int count,
                               float (&part)[kRows][kFeatures]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float factor = shared_.factors[row];
#pragma unroll
      for (int i = 0; i < kFeatures; ++i) part[row][i] = __fmul_rn(part[row][i], factor);
    }
    const T* const values = reinterpret_cast<const T*>(block.values);
    constexpr int kAtOnce = (kRows == 4 ? 16 : 4) / kFeatures;  // More would spill.
    for (int first = 0; first < count; first += kAtOnce) {
      float loaded[kAtOnce][kFeatures];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kFeatures; ++i) {
          const int feature = thread_ + i * kThreads;
          loaded[j][i] = 0.0f;
          if (first + j < count && feature < args_.value_dim) {
            loaded[j][i] = ToFloat(values[(first + j) * block.value_stride + feature]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j < count) AddValue(loaded[j], first + j, part);
      }
    }
    // The next block overwrites keys and weights.
    __syncthreads();
  }

  MARLIN_DEVICE void AddValue(const float (&value)[kFeatures], int key,
                              float (&part)[kRows][kFeatures]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float weight = shared_.weights[key * kRows + row];
      if (weight == kMasked) continue;
#pragma unroll
      for (int i = 0; i < kFeatures; ++i) {
        part[row][i] = __fmaf_rn(weight, value[i], part[row][i]);
      }
    }
  }

  MARLIN_DEVICE void Store(const float (&total)[kRows][kFeatures]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= tile_.rows) break;
      const Finish finish(args_, tile_.HeadOf(args_, row), shared_.total_largest[row],
                          shared_.total_sums[row]);
      const int64_t to = tile_.ElementOf(args_, args_.out, row);
#pragma unroll
      for (int i = 0; i < kFeatures; ++i) {
        const int feature = thread_ + i * kThreads;
        if (feature < args_.value_dim) {
          StoreFloat(args_.out.data, args_.out.type, to + feature, finish.Of(total[row][i]));
        }
      }
    }
  }

  const AttentionArguments& args_;
  const Tile tile_;
  int padded_;
  int key_width_;
  Shared<kRows> shared_;
  int thread_;
  int lane_;
  int warp_;
};

MARLIN_DEVICE float* PartialOf(const AttentionArguments& args, int tile_rows, int segment) {
  const int64_t index =
      (static_cast<int64_t>(blockIdx.x) * args.kv_heads + blockIdx.y) * args.segments + segment;
  return args.partials + index * PartialFloats(tile_rows, args.value_dim);
}

/// blockIdx: tile, KV head, segment (or 0).
template <int kRows, int kFeatures, bool kInParts>
__global__ void __launch_bounds__(kThreads)
    AttentionKernel(const __grid_constant__ AttentionArguments args) {
  extern __shared__ __align__(16) float memory[];
  EnterChain();
  const bool checks = args.sequences.block_tables != nullptr && blockIdx.y == 0 && blockIdx.z == 0;
  if (checks && blockIdx.x == 0) CheckFirstRows(args.sequences, args.errors);
  const Tile tile = FindTile(args, kRows);
  if (tile.sequence < 0) return;
  if (checks) CheckPositions(args, tile);
  TileAttention<kRows, kFeatures, kInParts> attention(args, tile, memory);
  if (args.segments == 0) {
    attention.RunAll();
  } else {
    const auto segment = static_cast<int>(blockIdx.z);
    attention.RunOne(segment, PartialOf(args, kRows, segment));
  }
}

/// Merges the segments of a tile. blockIdx: tile, KV head.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    MergeKernel(const __grid_constant__ AttentionArguments args) {
  EnterChain();
  const Tile tile = FindTile(args, kRows);
  if (tile.sequence < 0) return;
  const KeyRange range(args, tile);
  const int begin = range.first / kSegmentKeys;
  const int end = min((range.end + kSegmentKeys - 1) / kSegmentKeys, args.segments);
  for (int row = 0; row < tile.rows; ++row) {
    for (int feature = static_cast<int>(threadIdx.x); feature < args.value_dim;
         feature += kThreads) {
      float largest = Nothing();
      float sum = 0.0f;
      float value = 0.0f;
      for (int segment = begin; segment < end; ++segment) {
        const float* const partial = PartialOf(args, kRows, segment);
        const Merge merge(largest, partial[row], partial[kRows + row]);
        if (merge.skip) continue;
        value = merge.Of(value, partial[2 * kRows + row * args.value_dim + feature]);
        sum = merge.Of(sum, partial[kRows + row]);
        largest = merge.largest;
      }
      const Finish finish(args, tile.HeadOf(args, row), largest, sum);
      StoreFloat(args.out.data, args.out.type, tile.ElementOf(args, args.out, row) + feature,
                 finish.Of(value));
    }
  }
}

using Kernel = void (*)(AttentionArguments);

template <int kRows, bool kInParts = false>
Kernel KernelFor(int value_dim) {
  if (value_dim <= kThreads) return &AttentionKernel<kRows, 1, kInParts>;
  if (value_dim <= 2 * kThreads) return &AttentionKernel<kRows, 2, kInParts>;
  return &AttentionKernel<kRows, kMostValueFeatures / kThreads, kInParts>;
}

Kernel KernelFor(const ExactTile& tile, int value_dim) {
  if (tile.in_parts) return KernelFor<4, true>(value_dim);
  return tile.rows == 4 ? KernelFor<4>(value_dim) : KernelFor<16>(value_dim);
}

}  // namespace

cudaError_t LoadAttention() {
  for (const int width : {1, 2 * kThreads, kMostValueFeatures}) {
    for (const ExactTile tile : {ExactTile{4}, ExactTile{16}, ExactTile{4, true}}) {
      const Kernel kernel = KernelFor(tile, width);
      const cudaError_t error = AllowAllShared(reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchAttention(const AttentionArguments& args, const DeviceShape& device,
                            cudaStream_t stream) {
  const ExactTile tile = ExactTileFor(args.tile_rows, args.key_dim, device.shared_bytes);
  const dim3 tiles(static_cast<unsigned>(args.tiles), static_cast<unsigned>(args.kv_heads));
  const dim3 grid(tiles.x, tiles.y, static_cast<unsigned>(std::max(args.segments, 1)));
  const cudaError_t error = LaunchInChain(KernelFor(tile, args.value_dim), grid, kThreads,
                                          tile.Bytes(args.key_dim), stream, args);
  if (error != cudaSuccess || args.segments == 0) return error;
  return LaunchInChain(tile.rows == 4 ? &MergeKernel<4> : &MergeKernel<16>, tiles, kThreads, 0,
                       stream, args);
}

}  // namespace marlin::cuda
