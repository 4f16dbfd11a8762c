// Attention of tiles of query rows on mma.sync, over a paged bf16 or e4m3 cache: prefill on GPUs
// without asynchronous products (wgmma).
//
//   A CTA takes 64 or 128 query rows of one KV head of a sequence (row r is query head r % group of
//   token r / group) and all of their keys; a warp has 16 rows and their softmax. All threads copy
//   blocks of keys and values through a ring of two stages (cp.async): a block is requested before
//   the previous one is multiplied. Codes of e4m3 go through the ring as they are; the CTA widens a
//   block to bf16 next to it, exactly.
//
//     scores[16 rows, keys] = Q K^T         K: ldmatrix of [key][feature]
//     sums[16 rows, features] += P V        V: ldmatrix.trans of [key][feature]; P in registers
//
//   Queries and softmax weights are split into two bf16 terms each, so that only fp32 sums round,
//   or rounded to one, where that is allowed. Queries of bf16 are one term, and the scale comes
//   after the product.
//
//   A value that is NaN or Inf would spread through the zero weights of rows that do not see its
//   key: where some rows of a warp do not, it looks for such values, and then adds key by key
//   (rare).
#include <iterator>
#include <utility>

#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/prefill/mma_layout.h"
#include "backends/cuda/attention/prefill/tile_rows.cuh"
#include "backends/cuda/attention/swizzled_rows.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/warp_matrix.cuh"

namespace marlin::cuda {
namespace {

MARLIN_HOST_DEVICE MmaHeads HeadsOf(const AttentionArguments& args) {
  const bool one_term = args.one_term || args.queries.type == Element::kBf16;
  return {args.key_dim, args.value_dim, one_term ? 1 : 2, args.pages.type == Element::kE4M3};
}

/// The keys that some row of a tile sees, and that have a page. A position beyond the pages is
/// recorded as an error.
MARLIN_DEVICE KeySpan VisibleKeys(const AttentionArguments& args, const Tile& tile, int rows) {
  const int end = VisibleTo(args, tile, rows).end;
  const int64_t capacity = static_cast<int64_t>(args.sequences.blocks) * args.pages.page_tokens;
  if (end > capacity && threadIdx.x == 0) {
    FindPage(args.sequences, args.pages, tile.sequence, end - 1, args.errors);
  }
  return {VisibleTo(args, tile, 0).first,
          static_cast<int>(min(static_cast<int64_t>(end), capacity))};
}

/// A block of keys and values in shared memory, as it is multiplied.
struct Block {
  uint32_t keys;
  uint32_t values;
};

/// The blocks of a CTA's keys, and the stages through which they go. All functions are called by
/// all threads.
template <int kThreads, int kKeys, bool kFp8>
class BlockRing {
 public:
  MARLIN_DEVICE BlockRing(const AttentionArguments& args, const Tile& tile, const MmaLayout& layout,
                          const KeySpan& visible, uint32_t shared)
      : args_(args), tile_(tile), layout_(layout), visible_(visible), shared_(shared) {}

  MARLIN_DEVICE int first_block() const { return visible_.first / kKeys; }
  MARLIN_DEVICE int end_block() const { return (visible_.end + kKeys - 1) / kKeys; }

  /// Requests a block, if there is one; zeros for keys that no row of the tile sees.
  MARLIN_DEVICE void Request(int block) const {
    if (block < end_block()) {
      const int first = block * kKeys;
      const uint8_t* const page =
          FindPage(args_.sequences, args_.pages, tile_.sequence, first, args_.errors);
      const int64_t place = static_cast<int64_t>(tile_.kv_head) * args_.pages.page_tokens +
                            first % args_.pages.page_tokens;
      const int64_t values = KeyElements(args_.pages) + place * args_.value_dim;
      const KeySpan seen = {visible_.first - first, page == nullptr ? 0 : visible_.end - first};
      const uint32_t stage = Stage(block);
      Copy(page + place * args_.key_dim * kElement, args_.key_dim, seen, stage, layout_.key_row);
      Copy(page + values * kElement, args_.value_dim, seen, ValuesIn(stage, kFp8),
           layout_.value_row);
    }
    CommitCopies();
  }

  /// Waits for a block, all of whose predecessors are done, and requests the next one.
  MARLIN_DEVICE Block Receive(int block) const {
    WaitForCopies<0>();
    __syncthreads();
    Request(block + 1);
    const uint32_t stage = Stage(block);
    if constexpr (!kFp8) return {stage, ValuesIn(stage, false)};
    const uint32_t wide = shared_ + layout_.queries;
    const Block widened = {wide, ValuesIn(wide, false)};
    WidenToSwizzled<kThreads, kKeys>(stage, args_.key_dim, widened.keys, layout_.key_row);
    WidenToSwizzled<kThreads, kKeys>(ValuesIn(stage, true), args_.value_dim, widened.values,
                                     layout_.value_row);
    __syncthreads();
    return widened;
  }

 private:
  static constexpr int kElement = kFp8 ? 1 : 2;  ///< Bytes of an element of the cache.

  MARLIN_DEVICE uint32_t Stage(int block) const {
    return shared_ + layout_.stages_at + block % kMmaStages * layout_.stage_bytes;
  }
  /// Where the values of a block of keys or codes begin.
  MARLIN_DEVICE uint32_t ValuesIn(uint32_t block, bool codes) const {
    return block + kKeys * (codes ? args_.key_dim : layout_.key_row);
  }
  MARLIN_DEVICE void Copy(const uint8_t* from, int features, const KeySpan& seen, uint32_t to,
                          int row_bytes) const {
    CopyRows<kThreads, kKeys, !kFp8>(from, AnyAlignedAddress(args_.sequences), seen,
                                     features * kElement / kUnit, to, row_bytes);
  }

  const AttentionArguments& args_;
  const Tile& tile_;
  const MmaLayout& layout_;
  KeySpan visible_;
  uint32_t shared_;
};

/// A lane's address in every fourth 16-feature step of a row that ldmatrix reads: steps of a panel
/// of 64 features differ by bits of the swizzle.
class LanePlace {
 public:
  /// `row`: of the lane; `unit`: 0 or 1, of the 16 features.
  MARLIN_DEVICE LanePlace(int row, int unit) : row_(row), swizzle_((unit ^ (row & 7)) * kUnit) {}

  MARLIN_DEVICE uint32_t In(uint32_t rows, int row_bytes) const { return rows + row_ * row_bytes; }
  /// Bytes from In to a step.
  MARLIN_DEVICE uint32_t Step(int step) const {
    return (step >> 2) * 128 + (swizzle_ ^ ((step & 3) * 2 * kUnit));
  }

 private:
  int row_;
  uint32_t swizzle_;
};

/// A warp's 16 query rows.
template <int kKeys, int kFeatures>
class WarpAttention {
 public:
  /// `queries`: in shared memory, of the tile. `first_row`: of the warp.
  MARLIN_DEVICE WarpAttention(const AttentionArguments& args, const Tile& tile,
                              const MmaLayout& layout, uint32_t queries, int first_row)
      : args_(args),
        tile_(tile),
        layout_(layout),
        lane_(static_cast<int>(threadIdx.x) & 31),
        first_row_(first_row),
        queries_(queries + first_row * layout.key_row),
        blocks_(args, tile, first_row, kWarpRows, kKeys) {}

  /// Loads the warp's rows to shared memory.
  MARLIN_DEVICE void LoadQueries() const {
    WithType(args_.queries.type, [&](auto zero) {
      using T = decltype(zero);
      LoadQueryRows<T>(
          args_, tile_, first_row_, 1.0f, [&](int row, int pair, float low, float high) {
            uint32_t rounded;
            uint32_t rest;
            SplitInTwo(low, high, &rounded, &rest);
            const uint32_t to = UnitAt(queries_, layout_.key_row, row, pair >> 2) + (pair & 3) * 4;
            StoreShared4(to, rounded);
            if (QueryTerms() == 2) StoreShared4(to + layout_.query_bytes, rest);
          });
    });
  }

  MARLIN_DEVICE void Add(int number, const Block& block) {
    if (!blocks_.Sees(number)) return;
    Scores scores = {};
    if (QueryTerms() == 1) {
      Score<1>(block.keys, scores);
    } else {
      Score<2>(block.keys, scores);
    }
    const float scale = args_.scale * kLog2E;
#pragma unroll
    for (float& score : scores) score *= scale;
    CapScores(args_.softcap, scores);
    bool by_key = false;
    if (blocks_.IsMasked(number)) {
      rows_.Mask(
          number * kKeys, [&](int half) { return VisibleTo(args_, tile_, Row() + 8 * half); },
          scores);
      by_key = __any_sync(
          ~0u, !UnitsAreFinite<32, kKeys>(block.values, layout_.value_row, args_.value_dim, lane_));
    }
    if (args_.one_term) {
      AddWeighted<1>(block.values, scores, by_key);
    } else {
      AddWeighted<2>(block.values, scores, by_key);
    }
  }

  MARLIN_DEVICE void Store() {
    WithType(args_.out.type,
             [&](auto zero) { StoreRows<decltype(zero)>(args_, tile_, Row(), rows_); });
  }

 private:
  using Rows = SoftmaxRows<kKeys / 8, kFeatures / 8>;
  using Scores = typename Rows::Scores;

  /// The first of the lane's two rows.
  MARLIN_DEVICE int Row() const { return first_row_ + (lane_ >> 2); }
  MARLIN_DEVICE int QueryTerms() const { return HeadsOf(args_).query_terms; }

  /// Adds the values of a block with the weights of its scores.
  template <int kTerms>
  MARLIN_DEVICE void AddWeighted(uint32_t values, const Scores& scores, bool by_key) {
    typename Rows::template Weights<kTerms> weights;
    rows_.Weigh(scores, weights);
    if (by_key) {
      AddByKey(values, scores);
    } else if (args_.value_dim == kFeatures) {
      AddValues<true, kTerms>(values, weights);
    } else {
      AddValues<false, kTerms>(values, weights);
    }
  }

  template <int kTerms>
  MARLIN_DEVICE void Score(uint32_t keys, Scores& scores) const {
    const int steps = args_.key_dim / 16;
#pragma unroll 1
    for (int panel = 0; panel < steps / 4; ++panel) ScoreSteps<kTerms, 4>(keys, panel * 4, scores);
#pragma unroll 1
    for (int step = steps & ~3; step < steps; ++step) ScoreSteps<kTerms, 1>(keys, step, scores);
  }

  template <int kTerms, int kSteps>
  MARLIN_DEVICE void ScoreSteps(uint32_t keys, int first, Scores& scores) const {
    const LanePlace row(lane_ & 15, lane_ >> 4);
    const LanePlace key((lane_ & 7) + (lane_ >> 4) * 8, lane_ >> 3 & 1);
    const uint32_t query = row.In(queries_, layout_.key_row);
    const uint32_t first_key = key.In(keys, layout_.key_row);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t q[kTerms][4];
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        LoadMatrices(q[term], query + term * layout_.query_bytes + row.Step(first + i));
      }
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t k[4];
        LoadMatrices(k, first_key + pair * 16 * layout_.key_row + key.Step(first + i));
        float(&low)[4] = reinterpret_cast<float(&)[4]>(scores[8 * pair]);
        float(&high)[4] = reinterpret_cast<float(&)[4]>(scores[8 * pair + 4]);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          MultiplyAdd<Bf16x2>(low, q[term], k[0], k[1]);
          MultiplyAdd<Bf16x2>(high, q[term], k[2], k[3]);
        }
      }
    }
  }

  /// kAll: all features exist. Without a branch after every tile, loads and products overlap.
  template <bool kAll, int kTerms>
  MARLIN_DEVICE void AddValues(uint32_t values,
                               const typename Rows::template Weights<kTerms>& weights) {
    const LanePlace key(lane_ & 15, lane_ >> 4);
    const uint32_t first = key.In(values, layout_.value_row);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kFeatures / 16; ++n) {
        if (!kAll && n * 16 >= args_.value_dim) break;
        uint32_t v[4];
        LoadMatricesTransposed(v, first + step * 16 * layout_.value_row + key.Step(n));
        float(&low)[4] = reinterpret_cast<float(&)[4]>(rows_.values()[8 * n]);
        float(&high)[4] = reinterpret_cast<float(&)[4]>(rows_.values()[8 * n + 4]);
#pragma unroll
        for (const auto& term : weights[step].terms) {
          MultiplyAdd<Bf16x2>(low, term, v[0], v[1]);
          MultiplyAdd<Bf16x2>(high, term, v[2], v[3]);
        }
      }
    }
  }

  /// Adds the values of a block, but none of keys that a row does not see.
  MARLIN_DEVICE void AddByKey(uint32_t values, const Scores& scores) {
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
      rows_.AddKey(key, scores, args_.value_dim, [&](int feature) {
        return LoadShared4(UnitAt(values, layout_.value_row, key, feature >> 3) +
                           (feature & 7) * 2);
      });
    }
  }

  const AttentionArguments& args_;
  const Tile& tile_;
  const MmaLayout& layout_;
  int lane_;
  int first_row_;
  uint32_t queries_;
  SeenBlocks blocks_;
  Rows rows_;
};

/// blockIdx.x: as FindTileFromLast.
template <int kWarps, int kKeys, int kFeatures, bool kFp8>
__global__ void __launch_bounds__(kWarps * 32, 1)
    MmaAttentionKernel(const __grid_constant__ AttentionArguments args) {
  static_assert(kCachePageTokens % kKeys == 0);  // A block is in one page.
  constexpr int kRows = kWarps * kWarpRows;
  extern __shared__ __align__(128) uint8_t memory[];
  EnterChain();
  const Tile tile = FindTileFromLast(args, kRows);
  if (tile.sequence < 0) return;
  const KeySpan visible = VisibleKeys(args, tile, kRows);
  const MmaLayout layout(HeadsOf(args), kRows, kKeys);
  const uint32_t shared = SharedAddress(memory);
  const BlockRing<kWarps * 32, kKeys, kFp8> ring(args, tile, layout, visible, shared);
  ring.Request(ring.first_block());
  WarpAttention<kKeys, kFeatures> attention(args, tile, layout, shared,
                                            static_cast<int>(threadIdx.x) / 32 * kWarpRows);
  attention.LoadQueries();
#pragma unroll 1
  for (int block = ring.first_block(); block < ring.end_block(); ++block) {
    attention.Add(block, ring.Receive(block));
  }
  attention.Store();
}

using Kernel = void (*)(AttentionArguments);

template <int kIndex>
Kernel KernelOf(bool fp8) {
  constexpr MmaAttentionShape kShape = kMmaShapes[kIndex];
  return fp8 ? &MmaAttentionKernel<kShape.warps, kShape.keys, kShape.features, true>
             : &MmaAttentionKernel<kShape.warps, kShape.keys, kShape.features, false>;
}

template <size_t... kIndices>
Kernel KernelFor(const MmaAttentionShape& shape, bool fp8,
                 std::index_sequence<kIndices...> /*all*/) {
  Kernel kernel = nullptr;
  ((kMmaShapes[kIndices] == shape ? void(kernel = KernelOf<kIndices>(fp8)) : void()), ...);
  return kernel;
}
Kernel KernelFor(const MmaAttentionShape& shape, bool fp8) {
  return KernelFor(shape, fp8, std::make_index_sequence<std::size(kMmaShapes)>());
}

}  // namespace

cudaError_t LoadMmaAttention() {
  for (const MmaAttentionShape& shape : kMmaShapes) {
    const cudaError_t error = PrepareSharedKernels(KernelFor(shape, false), KernelFor(shape, true));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchMmaAttention(const AttentionArguments& args, const DeviceShape& device,
                               cudaStream_t stream) {
  const MmaHeads heads = HeadsOf(args);
  const MmaAttentionShape shape = MmaShapeFor(heads, device.shared_bytes);
  const auto ctas = static_cast<unsigned>(args.tiles) * static_cast<unsigned>(args.kv_heads);
  return LaunchInChain(KernelFor(shape, heads.fp8), dim3(ctas), shape.warps * 32,
                       shape.Bytes(heads), stream, args);
}

}  // namespace marlin::cuda
