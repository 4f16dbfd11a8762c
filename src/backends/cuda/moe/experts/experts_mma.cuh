// The GEMMs of a layer's experts with many rows on mma.sync and cp.async, for code of every
// capability from 8.0 on: one launch for all experts of one kind of codes.
//
//   output tile: 4 or 8 n-tiles of 32 outputs of a matrix, or half as many n-tiles of gates and
//   as many of their ups, one for each warp, x up to 32, 64 or 128 rows of its expert
//
//     expert 0                 expert 3              experts without rows have no tiles
//     [rows   0..127: blocks]  [rows 0..31: blocks]
//     [rows 128..140: blocks]  a tile of few rows has half of the columns
//
//   The mainloop is the dense kernel's (mma_kernel.cuh tells what bounds it), the tile scheduler
//   the WGMMA kernel's (experts_schedule.cuh). CTAs are persistent, since every
//   one counts the tiles; several on a multiprocessor hide how each begins and ends its tiles. Rows
//   are read where they lie, through a list of the tile's rows in shared memory: rows of tokens
//   need no copy in the order of the slots unless their type or alignment differs.
//
//   A row's sums depend on k and the row alone: k is not split, and columns of an MMA are apart.
#pragma once

#include "backends/cuda/common/instances.cuh"
#include "backends/cuda/gemm/mma/mma_kernel.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"
#include "backends/cuda/moe/experts/experts_schedule.cuh"

namespace marlin::cuda {

/// A CTA's output tile in shared memory, so that registers are left for sums.
struct MmaExpertTile {
  ExpertTile tile;
  int rows[kMostMmaRows];  ///< In ExpertMmaArguments::rows; -1: none.

  /// Lists the rows. Called by all threads; __syncthreads() has to follow.
  MARLIN_DEVICE void ListRows(const ExpertMmaArguments& args) {
    for (int i = static_cast<int>(threadIdx.x); i < kMostMmaRows; i += args.Threads()) {
      const int slot = tile.first_slot + i;
      rows[i] = i >= tile.rows ? -1 : args.gathered ? args.slots.token[slot] : slot;
    }
  }
};
static_assert(sizeof(MmaExpertTile) <= kMmaExpertTileBytes);

/// The rows of an output tile, for the mainloop.
struct ListedRows {
  const ExpertMmaArguments& args;
  uint32_t list;  ///< MmaExpertTile::rows; an address of 32 bits leaves a register for sums.

  MARLIN_DEVICE const uint8_t* operator()(int token) const {
    const int row = static_cast<int>(LoadShared4(list + static_cast<uint32_t>(token) * 4));
    return row < 0 ? nullptr : static_cast<const uint8_t*>(args.rows) + row * args.row_stride * 2;
  }
};

/// The weights of this warp's n-tile: after the last one another, whose sums no thread stores.
MARLIN_DEVICE const uint8_t* WarpWeights(const ExpertMmaArguments& args, const ExpertTile& tile) {
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int of_matrix = args.gated ? args.warps / 2 : args.warps;
  const bool is_up = warp >= of_matrix;
  const TileExpert& matrix = tile.matrix[is_up ? 1 : 0];
  const int strip = tile.block * of_matrix + warp - (is_up ? of_matrix : 0);
  const int last = (matrix.n + kStripOutputs - 1) / kStripOutputs - 1;
  return matrix.tiles + TileOffset(args.weights, matrix.strip + min(strip, last), 0);
}

/// Scales a sum and adds its bias.
struct ExpertColumn {
  float multiplier;
  float bias;

  MARLIN_DEVICE ExpertColumn(const TileExpert& matrix, int n)
      : multiplier(matrix.multiplier),
        bias(matrix.bias != nullptr && n < matrix.n ? matrix.bias[n] : 0.0f) {}

  MARLIN_DEVICE float Of(float sum) const { return sum * multiplier + bias; }
};

/// Stores an output tile's sums, kMmaExchangeTokens rows at a time, or their gated activation.
struct ExpertMmaEpilogue {
  const ExpertMmaArguments& args;
  const ExpertTile& tile;
  float* exchange;  ///< MmaExchangeBytes of shared memory.

  template <int kOctets>
  MARLIN_DEVICE void Run(const float (&acc)[kOctets][2][4]) const {
    // After the last barrier the tile is another.
    const int rows = tile.rows;
#pragma unroll 1
    for (int row = 0; row < rows; row += kMmaExchangeTokens) {
      PutSums(acc, row / kMmaExchangeTokens, args.warps, exchange);
      __syncthreads();
      if (args.gated) {
        StoreActivated(row);
      } else {
        StoreSums(row);
      }
      __syncthreads();
    }
  }

 private:
  static MARLIN_DEVICE int Thread() { return static_cast<int>(threadIdx.x); }

  /// One column for every thread.
  MARLIN_DEVICE void StoreSums(int first_row) const {
    const TileExpert& matrix = *tile.matrix;
    const int n = tile.block * args.BlockOutputs() + Thread();
    if (n >= matrix.n) return;
    const ExpertColumn column(matrix, n);
    const int rows = min(tile.rows - first_row, kMmaExchangeTokens);
    const float* from = exchange + Thread();
    float* to = static_cast<float*>(args.out) + (tile.first_slot + first_row) * args.out_stride +
                matrix.column + n;
#pragma unroll 4
    for (int row = 0; row < rows; ++row) {
      __stcg(to, column.Of(*from));
      from += MmaExchangeStride(args.warps);
      to += args.out_stride;
    }
  }

  /// Two columns for every thread, of every fourth row. A column after the last one is padding of
  /// the rows of `out`.
  MARLIN_DEVICE void StoreActivated(int first_row) const {
    const int columns = args.BlockOutputs() / 2;
    const int pairs = columns / 2;
    const int at = Thread() % pairs * 2;
    const int n = tile.block * columns + at;
    const TileExpert& gate = tile.matrix[0];
    if (n >= gate.n) return;
    const ExpertColumn gates[2] = {{gate, n}, {gate, n + 1}};
    const ExpertColumn ups[2] = {{tile.matrix[1], n}, {tile.matrix[1], n + 1}};
    const int end = min(tile.rows - first_row, kMmaExchangeTokens);
#pragma unroll 1
    for (int row = Thread() / pairs; row < end; row += 4) {
      const float* const sums = exchange + row * MmaExchangeStride(args.warps) + at;
      const float2 g = *reinterpret_cast<const float2*>(sums);
      const float2 u = *reinterpret_cast<const float2*>(sums + columns);
      auto* const to = static_cast<uint16_t*>(args.out) +
                       (tile.first_slot + first_row + row) * args.out_stride + n;
      float products[2] = {gates[0].Of(g.x), gates[1].Of(g.y)};
      ReplaceByProducts<true>(args.gate, products, {ups[0].Of(u.x), ups[1].Of(u.y)});
      *reinterpret_cast<uint32_t*>(to) = Bf16x2::Pack(products[0], products[1]);
    }
  }
};

/// The sums of an output tile of up to kTokens rows, and its results.
template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Strip>
MARLIN_DEVICE void RunExpertTile(const ExpertMmaArguments& args, int stages, uint8_t* memory,
                                 const MmaExpertTile& shared) {
  const TileView& view = args.weights;
  const MmaRun run = {{stages, args.warps, view.tile_bytes},
                      SharedAddress(memory),
                      WarpWeights(args, shared.tile),
                      int64_t{kStripsOfBlock} * view.tile_bytes,
                      view.groups_per_tile,
                      0,
                      view.k,
                      view.tiles_of_strip};
  const ListedRows rows = {args, SharedAddress(shared.rows)};
  float acc[kTokens / 8][2][4] = {};
  MmaMainloop<kKind, T, kTokens, kUse, Strip>(view).Run(run, rows, acc);
  __syncthreads();
  ExpertMmaEpilogue{args, shared.tile, reinterpret_cast<float*>(memory)}.Run(acc);
}

/// CTAs of tiles of up to kRows rows.
template <CodeKind kKind, typename T, int kRows, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Strip = StripTile>
__global__ void __launch_bounds__(kMostMmaWarps * 32, MmaResidentBlocks(kRows))
    ExpertMmaKernel(const __grid_constant__ ExpertMmaArguments args) {
  extern __shared__ __align__(256) uint8_t memory[];
  EnterChain();
  auto* const schedule = reinterpret_cast<int*>(memory + args.schedule_offset);
  auto& shared = *reinterpret_cast<MmaExpertTile*>(memory + args.tile_offset);
  using Tiles = ExpertTiles<ExpertMmaArguments>;
  Tiles::Count(args, schedule);
  for (Tiles tiles(args, schedule); tiles.item() < tiles.total(); tiles.Next()) {
    if (threadIdx.x == 0) shared.tile = tiles.Get();
    __syncthreads();
    shared.ListRows(args);
    __syncthreads();
    constexpr int kFewRows = kRows / 2;
    if constexpr (kFewRows >= kLeastMmaRows) {
      if (shared.tile.rows <= kFewRows) {
        RunExpertTile<kKind, T, kFewRows, kUse, Strip>(args, args.stages_of_few, memory, shared);
        continue;
      }
    }
    RunExpertTile<kKind, T, kRows, kUse, Strip>(args, args.stages, memory, shared);
  }
}

template <typename Tiles, typename T, ParameterUse kUse, int kRows>
const void* ExpertMmaFunction() {
  if constexpr (Tiles::kSparse) {
    return reinterpret_cast<const void*>(
        &ExpertMmaKernel<Tiles::kCodes, T, kRows, kUse, SparseStripTile>);
  } else {
    return reinterpret_cast<const void*>(&ExpertMmaKernel<Tiles::kCodes, T, kRows, kUse>);
  }
}

template <typename Tiles>
const void* ExpertMmaKernels::Function(const Variant& variant) {
  const auto function = [&]<typename T, ParameterUse kUse>() {
    switch (variant.rows) {
      case kLeastMmaRows:
        return ExpertMmaFunction<Tiles, T, kUse, kLeastMmaRows>();
      case kMostMmaRows:
        return ExpertMmaFunction<Tiles, T, kUse, MostMmaRows(kUse)>();
      default:
        return ExpertMmaFunction<Tiles, T, kUse, 2 * kLeastMmaRows>();
    }
  };
  return WithOperands<Tiles>(variant.bf16, variant.use, function);
}

}  // namespace marlin::cuda
