// Attention of tiles of 64 query rows on matrix units, over a paged bf16 or e4m3 cache: prefill.
//
//   A CTA takes 64 query rows of one KV head of a sequence (row r is query head r % group of token
//   r / group) and all of their keys, in blocks of 64, which it copies through a ring of two
//   stages. A warp has 16 rows and their softmax (matrix_softmax.cuh), of a block at a time where
//   its registers suffice. Codes of e4m3 go through the ring as they are; the CTA widens a block to
//   bf16 beside it, exactly, before the warps add it.
//
//   A value that is NaN or Inf would spread through the zero weights of rows that do not see its
//   key: where some rows of a warp do not, the warp looks for such values, and then adds key by
//   key (rare).
#include <algorithm>

#include "backends/cuda/kernels/common/chain.cuh"
#include "backends/cuda/kernels/decoder/attention_tile.cuh"
#include "backends/cuda/kernels/decoder/decoder_launch.h"
#include "backends/cuda/kernels/decoder/matrix_softmax.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = kPrefillRows;
static_assert(kRows == kWarps * kWarpRows);
constexpr int kBlockKeys = kCachePageTokens;  // A block lies in one page.
constexpr int kStages = 2;

MARLIN_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
MARLIN_DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// The keys or values of one head in a page, from a block's first key on.
struct PageRows {
  const uint8_t* first = nullptr;  ///< Null: there is no page.
  int bytes = 0;                   ///< Bytes of a row, a multiple of 16.
  int shared_bytes = 0;            ///< Bytes from row to row of the copy in shared memory.
};

/// Copies `rows` keys or values, the first of which is key `first_key`, to shared memory; zeros for
/// keys outside of `visible`. Thread `thread` of `threads`, a multiple of 32, takes its part.
MARLIN_DEVICE void CopyKeyRows(const PageRows& from, const KeySpan& visible, int first_key,
                               int rows, uint32_t to, int thread, int threads,
                               const void* anywhere) {
  const int units = from.bytes / 16;
  // 8, 16 or 32 lanes copy a row.
  const int width = units <= 8 ? 8 : (units <= 16 ? 16 : 32);
  const int unit = thread & (width - 1);
  if (unit >= units) return;
  const int first_row = thread / width;
  const int step = threads / width;
  // Keys [begin, end) of the block exist and are seen.
  const int begin = visible.first - first_key;
  const int end = from.first == nullptr ? 0 : visible.end - first_key;
  const uint8_t* source = from.first + first_row * from.bytes + unit * 16;
  uint32_t target = to + first_row * from.shared_bytes + unit * 16;
#pragma unroll 4
  for (int row = first_row; row < rows; row += step) {
    const bool seen = row >= begin && row < end;
    // Where nothing is read, any valid, aligned address will do.
    CopyAsync16(target, seen ? source : anywhere, seen ? 16 : 0);
    source += step * from.bytes;
    target += step * from.shared_bytes;
  }
}

/// A valid address, aligned to 16 bytes, in device memory.
MARLIN_DEVICE const void* AnyAlignedAddress(const SequencesView& sequences) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(sequences.positions) &
                                       ~uintptr_t{15});
}

struct Layout : CachedRows {
  using CachedRows::CachedRows;
  MARLIN_HOST_DEVICE int StageBytes() const {
    return kBlockKeys * (copied_key_row + copied_value_row);
  }
  /// The widened block, if there is one.
  MARLIN_HOST_DEVICE int WidenedAt() const { return kStages * StageBytes(); }
  MARLIN_HOST_DEVICE int QueriesAt() const {
    return WidenedAt() + (widens ? kBlockKeys * (key_row + value_row) : 0);
  }
  MARLIN_HOST_DEVICE int Bytes() const { return QueriesAt() + 2 * kRows * key_row; }
};

/// The keys that a row of a tile sees.
MARLIN_DEVICE KeySpan VisibleTo(const AttentionArguments& args, const Tile& tile, int row) {
  const int position = tile.PositionOf(args, min(row, tile.rows - 1));
  return {KeyRange::FirstKey(args, position), position + 1};
}

template <bool kFp8>
class TileKeys {
 public:
  MARLIN_DEVICE TileKeys(const AttentionArguments& args, const Tile& tile, const KeySpan& visible,
                         uint32_t shared)
      : args_(args),
        tile_(tile),
        visible_(visible),
        layout_(args.key_dim, args.value_dim, kFp8),
        ring_(shared) {}

  MARLIN_DEVICE int first_block() const { return visible_.first / kBlockKeys; }
  MARLIN_DEVICE int end_block() const { return (visible_.end + kBlockKeys - 1) / kBlockKeys; }

  /// Requests a block with all threads.
  MARLIN_DEVICE void Request(int block) const {
    if (block < end_block()) {
      const int first = block * kBlockKeys;
      const uint8_t* const page =
          FindPage(args_.sequences, args_.pages, tile_.sequence, first, args_.errors);
      const int64_t place = static_cast<int64_t>(blockIdx.y) * args_.pages.page_tokens +
                            first % args_.pages.page_tokens;
      const auto rows = [&](int64_t first_element, int features, int shared_bytes) {
        const int64_t element = first_element + place * features;
        return PageRows{page == nullptr ? nullptr : page + element * kElement, features * kElement,
                        shared_bytes};
      };
      const auto thread = static_cast<int>(threadIdx.x);
      const void* const anywhere = AnyAlignedAddress(args_.sequences);
      CopyKeyRows(rows(0, args_.key_dim, layout_.copied_key_row), visible_, first, kBlockKeys,
                  CopiedKeys(block), thread, kThreads, anywhere);
      CopyKeyRows(rows(KeyElements(args_.pages), args_.value_dim, layout_.copied_value_row),
                  visible_, first, kBlockKeys, CopiedValues(block), thread, kThreads, anywhere);
    }
    CommitCopies();
  }

  /// Widens the codes of a block that has arrived, with all threads.
  MARLIN_DEVICE void Widen(int block) const {
    const auto thread = static_cast<int>(threadIdx.x);
    WidenRows(CopiedKeys(block), kBlockKeys, args_.key_dim, Keys(block), layout_.key_row, thread,
              kThreads);
    WidenRows(CopiedValues(block), kBlockKeys, args_.value_dim, Values(block), layout_.value_row,
              thread, kThreads);
    __syncthreads();
  }

  MARLIN_DEVICE uint32_t Keys(int block) const {
    return kFp8 ? ring_ + layout_.WidenedAt() : CopiedKeys(block);
  }
  MARLIN_DEVICE uint32_t Values(int block) const {
    return Keys(block) + kBlockKeys * layout_.key_row;
  }
  MARLIN_DEVICE const Layout& layout() const { return layout_; }

 private:
  static constexpr int kElement = kFp8 ? 1 : 2;  ///< Bytes of an element of the cache.

  MARLIN_DEVICE uint32_t CopiedKeys(int block) const {
    return ring_ + (block - first_block()) % kStages * layout_.StageBytes();
  }
  MARLIN_DEVICE uint32_t CopiedValues(int block) const {
    return CopiedKeys(block) + kBlockKeys * layout_.copied_key_row;
  }

  const AttentionArguments& args_;
  const Tile& tile_;
  KeySpan visible_;
  Layout layout_;
  uint32_t ring_;
};

/// Whether rows of values in shared memory are all finite, in all lanes.
MARLIN_DEVICE bool AreFinite(uint32_t values, int rows, int value_row, int features) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  bool finite = true;
  for (int row = lane >> 1; row < rows; row += 16) {
    for (int i = (lane & 1) * 16; i < features * 2; i += 32) {
      const uint4 pairs = LoadShared16(values + row * value_row + i);
      for (const uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w}) {
        finite = finite && (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
      }
    }
  }
  return __all_sync(~0u, finite);
}

/// Called by all threads.
MARLIN_DEVICE void LoadQueries(const AttentionArguments& args, const Tile& tile, uint8_t* queries) {
  const int row_bytes = SharedRowBytes(args.key_dim);
#pragma unroll 4
  for (int i = 0; i < kRows / kWarps; ++i) {
    const int row = i * kWarps + (static_cast<int>(threadIdx.x) >> 5);
    const bool exists = row < tile.rows;
    LoadQueryRow(args.queries, exists ? tile.ElementOf(args, args.queries, row) : 0, exists,
                 args.key_dim, queries + row * row_bytes, queries + (kRows + row) * row_bytes);
  }
}

/// Groups of 16 keys that a warp adds at a time.
MARLIN_HOST_DEVICE constexpr int GroupsFor(int tiles) { return tiles > 8 ? 2 : 4; }

template <int kTiles, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    PrefillAttentionKernel(const __grid_constant__ AttentionArguments args) {
  extern __shared__ __align__(16) uint8_t memory[];
  EnterChain();
  if (blockIdx.x == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  const Tile tile = FindTile(args, kRows);
  if (tile.sequence < 0) return;
  if (blockIdx.y == 0) CheckPositions(args, tile);
  const KeySpan visible = {VisibleTo(args, tile, 0).first, VisibleTo(args, tile, kRows).end};
  const TileKeys<kFp8> keys(args, tile, visible, SharedAddress(memory));
  const Layout& layout = keys.layout();
  keys.Request(keys.first_block());
  uint8_t* const queries = memory + layout.QueriesAt();
  LoadQueries(args, tile, queries);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int first_row = (static_cast<int>(threadIdx.x) >> 5) * kWarpRows;
  const uint32_t mine = SharedAddress(queries) + first_row * layout.key_row;
  const WarpOperands operands = {mine, mine + kRows * layout.key_row, layout.key_row,
                                 layout.value_row};
  WarpSoftmax<kTiles, GroupsFor(kTiles)> softmax(operands, args.key_dim, args.value_dim,
                                                 args.scale);
  constexpr int kKeys = softmax.kKeys;
  const KeySpan spans[2] = {VisibleTo(args, tile, first_row + (lane >> 2)),
                            VisibleTo(args, tile, first_row + (lane >> 2) + 8)};
  // Keys that some row of the warp sees, and keys that all of its rows see.
  const KeySpan some = {VisibleTo(args, tile, first_row).first,
                        VisibleTo(args, tile, first_row + kWarpRows - 1).end};
  const KeySpan all = {VisibleTo(args, tile, first_row + kWarpRows - 1).first,
                       VisibleTo(args, tile, first_row).end};
  for (int block = keys.first_block(); block < keys.end_block(); ++block) {
    keys.Request(block + 1);
    WaitForCopies<1>();
    __syncthreads();
    if constexpr (kFp8) keys.Widen(block);
#pragma unroll 1
    for (int part = 0; part < kBlockKeys / kKeys; ++part) {
      const int first = block * kBlockKeys + part * kKeys;
      if (first >= some.end || first + kKeys <= some.first) continue;
      const uint32_t values = keys.Values(block) + part * kKeys * layout.value_row;
      const bool masked = first < all.first || first + kKeys > all.end;
      const bool by_key = masked && !AreFinite(values, kKeys, layout.value_row, args.value_dim);
      softmax.Add(
          keys.Keys(block) + part * kKeys * layout.key_row, values, first, masked,
          [&](int half) { return spans[half]; }, by_key);
    }
    __syncthreads();
  }
  WaitForCopies<0>();
  softmax.SumLanes();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + (lane >> 2) + 8 * half;
    if (row >= tile.rows) continue;
    const SoftmaxFinish finish(args, tile.HeadOf(args, row), softmax.largest(half),
                               softmax.sum(half));
    const int64_t at = tile.ElementOf(args, args.out, row);
    softmax.ForPairs(half, [&](int feature, float first, float second) {
      const float values[2] = {finish.Of(first), finish.Of(second)};
      StoreAdjacent(args.out.data, args.out.type, at + feature, values);
    });
  }
}

using Kernel = void (*)(AttentionArguments);

/// The kernel for so many value features.
template <bool kFp8>
Kernel KernelFor(int value_dim) {
  if (value_dim <= 64) return &PrefillAttentionKernel<4, kFp8>;
  return value_dim <= 128 ? &PrefillAttentionKernel<8, kFp8> : &PrefillAttentionKernel<16, kFp8>;
}

}  // namespace

cudaError_t LoadPrefillAttention() {
  for (const int value_dim : {64, 128, kMostMatrixFeatures}) {
    for (const Kernel kernel : {KernelFor<false>(value_dim), KernelFor<true>(value_dim)}) {
      const auto* const function = reinterpret_cast<const void*>(kernel);
      cudaError_t error = AllowAllShared(function);
      if (error == cudaSuccess) error = PreferShared(function);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchPrefillAttention(const AttentionArguments& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.tiles), static_cast<unsigned>(args.kv_heads));
  const bool fp8 = args.pages.type == Element::kE4M3;
  const Kernel kernel = fp8 ? KernelFor<true>(args.value_dim) : KernelFor<false>(args.value_dim);
  const int bytes = Layout(args.key_dim, args.value_dim, fp8).Bytes();
  return LaunchInChain(kernel, grid, kThreads, bytes, stream, args);
}

}  // namespace marlin::cuda
