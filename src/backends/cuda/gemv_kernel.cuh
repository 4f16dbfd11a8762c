// Products of up to 8 rows: the weights stream once through registers, memory bandwidth is the
// floor.
//
//   C^T = W^T A^T with m16n8k16: the weights are the 16-row operand, tokens the 8 columns, so that
//   a single token wastes no weight traffic. One thread block per multiprocessor, no producer warp:
//
//        k ->        split 0            split 1 ...
//     strip 0   [tile][tile][tile] .. [tile][tile]    a strip is 32 outputs, a tile 128 k of it;
//     strip 1   [tile] ...                            blockIdx.x is the split, blockIdx.y a run of
//        n                                            strips
//
//   `share` warps take the tiles of a strip in turn, `lanes` = warps / share strips are worked on
//   at a time. Every warp has a ring of its own, filled by its lane 0 with bulk copies: in flight
//   are warps x stages tiles (16 x 2 x 2.1 KB for FP4 g128). The block's activations lie in shared
//   memory, where they arrive in pieces. Sums of a strip's warps meet in shared memory and are
//   added in the order of the warps; sums of splits in the workspace and in the order of the
//   splits. Weight copies begin before the kernel waits for earlier work on the stream.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/decode_fragment.cuh"
#include "backends/cuda/epilogue.cuh"
#include "backends/cuda/gemv_layout.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/tile_loads.cuh"

namespace marlin::cuda {

MARLIN_DEVICE void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

template <typename T>
MARLIN_DEVICE void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (T::kIsBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// The tiles that a warp copies, in the order that it multiplies them in.
struct TileStream {
  const TileView& view;
  const uint8_t* next;
  int64_t to_next_tile;  ///< Of this warp in the strip.
  int strip;
  int first_tile;
  int lanes;  ///< From one of this warp's strips to the next.
  int tiles_of_strip;
  int left_in_strip;
  int left;

  MARLIN_DEVICE void Copy(uint32_t slot, uint32_t barrier) {
    ArriveExpecting(barrier, view.tile_bytes);
    CopyBulk(slot, next, view.tile_bytes, barrier);
    next += to_next_tile;
    --left;
    if (--left_in_strip == 0) {
      left_in_strip = tiles_of_strip;
      strip += lanes;
      next = view.tiles + TileOffset(view, strip, first_tile);
    }
  }
};

template <CodeKind kKind, typename T, ParameterUse kUse>
struct TileProduct {
  static constexpr int kBits = CodeBits(kKind);
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;

  /// acc[16 outputs][register], 8 tokens. Calls `release` once, when the tile has been read: with
  /// one group that is before the products, so that the slot is being filled again nearly always.
  template <typename Release>
  static MARLIN_DEVICE void Run(uint32_t tile, uint32_t activations, int lane, int groups,
                                const ParameterMode& mode, const DecodeTable<kKind, T>& table,
                                float (&acc)[2][4], const Release& release) {
    const uint32_t first_parameters = tile + TileCodeBytes(kBits) + (lane >> 2) * 8;
    uint32_t words[4][kBits];
#pragma unroll
    for (int i = 0; i < 4; ++i) LoadWords<kBits>(tile + i * BlockBytes(kBits), lane, words[i]);
    GroupOperands operands[2];
    if (kKind != CodeKind::kDense16) LoadOperands(first_parameters, groups, mode, operands);
    if (kOneGroup || groups <= 1) release();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t tokens[4];
        LoadMatrices(tokens, activations + (half * 2 + pair) * 64);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const int j = pair * 2 + step;
          // Eight steps to a tile: this one begins a group where its multiple of `groups` / 8 does.
          const int place = (half * 4 + j) * groups;
          if (!kOneGroup && kKind != CodeKind::kDense16 && place > 0 && (place & 7) < groups) {
            LoadOperands(first_parameters + (place >> 3) * kGroupBytes, groups, mode, operands);
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            uint32_t weights[4];
            DecodeScaled<kKind, T, kUse>(words[half * 2 + r], j, table, mode, operands[r], weights);
            MultiplyAdd<T>(acc[r], weights, tokens[2 * step], tokens[2 * step + 1]);
          }
        }
      }
    }
    if (!kOneGroup && groups > 1) release();
  }

 private:
  static MARLIN_DEVICE void LoadOperands(uint32_t address, int groups, const ParameterMode& mode,
                                         GroupOperands (&operands)[2]) {
    const uint2 scales = LoadShared8(address);
    uint2 zeros = {0, 0};
    if (mode.integer_zeros || (kUse == ParameterUse::kAll && mode.extra != 0)) {
      zeros = LoadShared8(address + groups * kGroupBytes);
    }
    MakeOperands<kKind, T, kUse>(scales.x, zeros.x, mode, operands[0]);
    MakeOperands<kKind, T, kUse>(scales.y, zeros.y, mode, operands[1]);
  }
};

/// Copies 8 numbers of a row of A; what lies behind k becomes zero.
MARLIN_DEVICE void CopyEight(const GemvArguments& args, int m, int k, uint32_t to) {
  const int bytes = min(max(args.k - k, 0), 8) * 2;
  // An address in range even where nothing is read.
  const uint8_t* from =
      static_cast<const uint8_t*>(args.a) + (m * args.a_stride + (bytes > 0 ? k : 0)) * 2;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// Copies this split's columns of all rows of A, a piece of the columns after the other, so that
/// products can begin when the first has come. All threads arrive at the barrier of every piece.
MARLIN_DEVICE void CopyActivations(const GemvArguments& args, int first_k, uint32_t to,
                                   uint32_t barriers) {
  const int chunks = args.tiles_of_piece * (kTileK / 8);  // Of a row's piece, 8 numbers each.
  for (int piece = 0; piece < args.pieces; ++piece) {
    const int first = piece * chunks;
    const int count = min(chunks, args.tiles_of_split * (kTileK / 8) - first);
    int m = 0;
    // Rows are counted up, not divided out: this is on the way to the first product.
    for (int i = static_cast<int>(threadIdx.x);; i += static_cast<int>(blockDim.x)) {
      while (i >= count && m < args.m) {
        i -= count;
        ++m;
      }
      if (m >= args.m) break;
      CopyEight(args, m, first_k + (first + i) * 8, to + m * args.row_bytes + (first + i) * 16);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barriers + 8 * piece)
                 : "memory");
  }
}

/// Adds the sums of a strip's warps in order and finishes or stores them. `sums` holds, for every
/// warp of the strip, [tokens][33] floats.
MARLIN_DEVICE void FinishStrip(const GemvArguments& args, int strip, const float* sums,
                               int thread) {
  const int threads = args.share * 32;
  for (int i = thread; i < args.m * kStripOutputs; i += threads) {
    const int m = i / kStripOutputs;
    const int row = i % kStripOutputs;
    const int n = strip * kStripOutputs + row;
    float sum = 0.0f;
#pragma unroll 4
    for (int w = 0; w < args.share; ++w) sum += sums[w * kSumFloats + m * kSumStride + row];
    if (n >= args.epilogue.n) continue;
    if (args.partials == nullptr) {
      Finish(args.epilogue, m, n, sum);
    } else {
      const int64_t at = static_cast<int64_t>(blockIdx.x) * args.m + m;
      __stcg(args.partials + at * args.epilogue.n + n, sum);
    }
  }
}

/// A barrier among the warps that share a strip.
MARLIN_DEVICE void SyncSharers(const GemvArguments& args, int lane_of_strips) {
  if (args.share == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(lane_of_strips + 1), "r"(args.share * 32) : "memory");
  }
}

template <CodeKind kKind, typename T, ParameterUse kUse>
__global__ void __launch_bounds__(512, 1) GemvKernel(const __grid_constant__ GemvArguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int strip_lane = warp >> args.share_log;
  const int sharer = warp & (args.share - 1);
  const int lanes = 1 << args.lanes_log;
  const int group = static_cast<int>(blockIdx.y);
  const int first_strip = group * args.strips_base + min(group, args.strips_rest);
  const int strips = args.strips_base + (group < args.strips_rest ? 1 : 0);
  const int first_tile = static_cast<int>(blockIdx.x) * args.tiles_of_split;
  const int tiles = min(args.tiles_of_split, args.tiles - first_tile);

  const int tile_bytes = args.weights.tile_bytes;
  const uint32_t base = SharedAddress(shared);
  const uint32_t ring = base + warp * args.stages * tile_bytes;
  const uint32_t activations = base + args.activations_offset;
  const uint32_t arrived = base + args.barriers_offset;  // Of the pieces of activations.
  const uint32_t barriers = arrived + (kMaxPieces + warp * args.stages) * 8;
  auto* sums = reinterpret_cast<float*>(shared + args.sums_offset);

  const int my_strips =
      strips > strip_lane ? (strips - strip_lane + lanes - 1) >> args.lanes_log : 0;
  const int my_tiles = tiles > sharer ? (tiles - sharer + args.share - 1) >> args.share_log : 0;
  TileStream stream{args.weights};
  stream.strip = first_strip + strip_lane;
  stream.first_tile = first_tile + sharer;
  stream.lanes = lanes;
  stream.to_next_tile = (static_cast<int64_t>(tile_bytes) * kStripsOfBlock) << args.share_log;
  stream.next = args.weights.tiles + TileOffset(args.weights, stream.strip, stream.first_tile);
  stream.tiles_of_strip = stream.left_in_strip = my_tiles;
  stream.left = my_strips * my_tiles;
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < args.stages; ++s) InitBarrier(barriers + 8 * s, 1);
    if (warp < args.pieces) InitBarrier(arrived + 8 * warp, static_cast<int>(blockDim.x));
    FenceBarrierInit();
#pragma unroll 1
    for (int s = 0; s < args.stages && stream.left > 0; ++s) {
      stream.Copy(ring + s * tile_bytes, barriers + 8 * s);
    }
  }
  __syncthreads();
  LetNextBegin();
  WaitForEarlierWork();
  CopyActivations(args, first_tile * kTileK, activations, arrived);

  const DecodeTable<kKind, T> table(args.weights);
  const ParameterMode mode = ParameterModeOf<kKind, T>(args.weights);
  // Lane l gives ldmatrix the row of token l % 8 in matrix l / 8; tokens beyond m repeat the last.
  const uint32_t my_row =
      activations + (lane >> 3) * 16 + min(lane & 7, args.m - 1) * args.row_bytes;
  int slot = 0;
  int parity = 0;
  for (int s = strip_lane; s < strips; s += lanes) {
    float acc[2][4] = {};
#pragma unroll 1
    for (int i = 0; i < my_tiles; ++i) {
      const int tile = i * args.share + sharer;
      if (s == strip_lane) Wait(arrived + 8 * (tile >> args.piece_log), 0);
      Wait(barriers + 8 * slot, parity);
      const auto release = [&] {
        __syncwarp();
        if (lane == 0 && stream.left > 0) {
          stream.Copy(ring + slot * tile_bytes, barriers + 8 * slot);
        }
      };
      TileProduct<kKind, T, kUse>::Run(ring + slot * tile_bytes, my_row + tile * (kTileK * 2), lane,
                                       args.weights.groups_per_tile, mode, table, acc, release);
      if (++slot == args.stages) {
        slot = 0;
        parity ^= 1;
      }
    }
    float* mine = sums + warp * kSumFloats;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = (lane & 3) * 2 + (e & 1);
        mine[m * kSumStride + r * 16 + (lane >> 2) + 8 * (e >> 1)] = acc[r][e];
      }
    }
    SyncSharers(args, strip_lane);
    FinishStrip(args, first_strip + s, sums + strip_lane * args.share * kSumFloats,
                sharer * 32 + lane);
    SyncSharers(args, strip_lane);
  }
}

}  // namespace marlin::cuda
