// Query rows of a tile, between memory and the warps of prefill.
#pragma once

#include "backends/cuda/attention/exact/softmax_rows.cuh"
#include "backends/cuda/attention/prefill/attention_tile.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {

/// Finds the tile of a CTA of a grid of tiles from the last to the first, and the KV heads of each:
/// tiles with most keys begin first. Checks the values in device memory.
MARLIN_DEVICE Tile FindTileFromLast(const AttentionArguments& args, int tile_rows) {
  const int from_last = static_cast<int>(blockIdx.x) / args.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) - from_last * args.kv_heads;
  if (blockIdx.x == 0) CheckFirstRows(args.sequences, args.errors);
  const Tile tile = FindTile(args, tile_rows, args.tiles - 1 - from_last, kv_head);
  if (tile.sequence >= 0 && kv_head == 0) CheckPositions(args, tile);
  return tile;
}

/// The blocks of `keys` keys that `count` rows see.
struct SeenBlocks {
  KeySpan seen;   ///< Some row sees a key of them ...
  KeySpan whole;  ///< ... and all rows all of their keys.

  MARLIN_DEVICE SeenBlocks(const AttentionArguments& args, const Tile& tile, int first_row,
                           int count, int keys) {
    const KeySpan first = VisibleTo(args, tile, first_row);
    const KeySpan last = VisibleTo(args, tile, first_row + count - 1);
    seen = {first.first / keys, first_row < tile.rows ? (last.end + keys - 1) / keys : 0};
    whole = {(last.first + keys - 1) / keys, first.end / keys};
  }
  MARLIN_DEVICE bool Sees(int block) const { return block >= seen.first && block < seen.end; }
  MARLIN_DEVICE bool IsMasked(int block) const { return block < whole.first || block >= whole.end; }
};

MARLIN_DEVICE void StoreShared4(uint32_t to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

/// Loads a warp's rows of queries, from row `first` on, times `scale`: calls
/// store(row of the warp, pair, low, high); zeros for rows that do not exist.
template <typename T, typename Store>
MARLIN_DEVICE void LoadQueryRows(const AttentionArguments& args, const Tile& tile, int first,
                                 float scale, const Store& store) {
  const auto* const queries = static_cast<const T*>(args.queries.data);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int64_t at[kWarpRows];
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    at[i] = tile.ElementOf(args, args.queries, min(first + i, tile.rows - 1));
  }
#pragma unroll 1
  for (int pair = lane; pair < args.key_dim / 2; pair += 32) {
    // All rows are in flight together.
    T loaded[kWarpRows][2];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      loaded[i][0] = queries[at[i] + 2 * pair];
      loaded[i][1] = queries[at[i] + 2 * pair + 1];
    }
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const float exists = first + i < tile.rows ? scale : 0.0f;
      store(i, pair, exists * ToFloat(loaded[i][0]), exists * ToFloat(loaded[i][1]));
    }
  }
}

/// Divides the sums of a warp's rows and stores them. `row`: the first of the lane's two rows.
template <typename T, typename Rows>
MARLIN_DEVICE void StoreRows(const AttentionArguments& args, const Tile& tile, int row,
                             Rows& rows) {
  rows.SumLanes();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_half = row + 8 * half;
    if (of_half >= tile.rows) continue;
    const SoftmaxFinish finish(args, tile.HeadOf(args, of_half), rows.largest(half),
                               rows.sum(half));
    const float factor = finish.Of(1.0f);
    T* const to = static_cast<T*>(args.out.data) + tile.ElementOf(args, args.out, of_half);
    if (reinterpret_cast<uintptr_t>(to) % (2 * sizeof(T)) == 0) {
      rows.ForPairs(half, args.value_dim, [&](int feature, float low, float high) {
        StorePair(to + feature, low * factor, high * factor);
      });
    } else {
      rows.ForPairs(half, args.value_dim, [&](int feature, float low, float high) {
        to[feature] = FromFloat<T>(low * factor);
        to[feature + 1] = FromFloat<T>(high * factor);
      });
    }
  }
}

}  // namespace marlin::cuda
