// Small-batch GEMV, up to 16 rows: weights stream once through registers; the kernel is bound by
// memory bandwidth.
//
//   C^T = W^T A^T with m16n8k16: the weights are the 16-row operand, tokens the 8 columns, so that
//   a single token wastes no weight traffic. One CTA per multiprocessor, no producer warp:
//
//        k ->        split 0            split 1 ...
//     unit 0    [tile][tile][tile] .. [tile][tile]    a unit is an n-tile of 32 outputs or two
//     unit 1    [tile] ...                            adjacent ones, a tile is 128 k of it;
//        n                                            blockIdx.x: split, blockIdx.y: run of units
//
//   `share` warps take the tiles of a unit in turn (intra-CTA split-K); `lanes` = warps / share
//   units are computed concurrently. Every warp has its own pipeline (gemv_ring.cuh): in flight are
//   warps x stages tiles (16 x 2 x 2.1 KB for FP4 g128). The CTA's activations are in shared memory
//   (gemv_activations.cuh). Sums are reduced in shared memory, then in a cluster or in global
//   memory (gemv_finish.cuh). PDL: weight copies begin before the kernel waits for earlier work on
//   the stream.
//
//   A launch takes the sum of its latencies. So the code before the first copy, between the end of
//   earlier work and the activations' copies, and after the last MMA is straight-line, without
//   divisions, and no barrier there waits for memory.
#pragma once

#include <type_traits>

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/common/tile_loads.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/gemm/gemv/gemv_activations.cuh"
#include "backends/cuda/gemm/gemv/gemv_finish.cuh"
#include "backends/cuda/gemm/gemv/gemv_layout.h"
#include "backends/cuda/gemm/gemv/gemv_ring.cuh"

namespace marlin::cuda {

/// How the scales of a group are applied. Where there are scales alone, the MMAs take unscaled
/// codes, and the group's sums, which are few with few tokens, are scaled in fp32: fewer
/// instructions, no rounding of weights. Else, and with several groups in a tile unless
/// kSeveralGroups, every weight is multiplied by its scale.
template <CodeKind kKind, typename T, ParameterUse kUse, bool kSeveralGroups = true>
struct GroupSums {
  static constexpr bool kUsed =
      kKind != CodeKind::kDense16 &&
      (kUse == ParameterUse::kOneScale || (kSeveralGroups && kUse == ParameterUse::kScales));
  static constexpr CodeExponents kExponents = ExponentsOf(kKind, T::kIsBf16);
  static constexpr int kActivationExponent = ActivationExponentOf(kExponents);

  static MARLIN_DEVICE void ScaleActivations(uint32_t (&tokens)[4]) {
    if constexpr (kActivationExponent != 0) {
      constexpr uint32_t kTwo64 = 0x5f805f80u;
#pragma unroll
      for (int i = 0; i < 4; ++i) tokens[i] = T::Multiply(tokens[i], kTwo64);
    }
  }

  /// Multiplier of the finished sums, because scales are applied as they are stored.
  static constexpr float kUnit =
      kUsed ? PowerOfTwo(-kExponents.decode - kExponents.shift - kActivationExponent) : 1.0f;

  /// Adds part x scale to sums; the scales belong to rows g and g + 8.
  static MARLIN_DEVICE void AddScaled(const float (&part)[4], float2 scale, float (&sums)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] = __fmaf_rn(part[e], e < 2 ? scale.x : scale.y, sums[e]);
  }
};

/// Tables of 16 values use a shared-memory LUT: PRMT takes twice the instructions.
template <CodeKind kKind, typename T>
using GemvTable =
    std::conditional_t<kKind == CodeKind::kTable4, SharedPairTable<T>, DecodeTable<kKind, T>>;

/// A lane, and the offset of its parameters within a group's, pinned to a register: the compiler
/// would recompute it for every tile.
struct TileLane {
  int index;
  uint32_t parameters;

  MARLIN_DEVICE explicit TileLane(int lane) : index(lane), parameters((lane >> 2) * 8) {
    asm volatile("" : "+r"(parameters));
  }
};

/// The parameters of one group in a warp's n-tiles.
template <int kStrips>
struct StripParameters {
  uint2 stored[kStrips];  ///< Scales: rows g, g + 8, g + 16, g + 24 of each n-tile.
  GroupOperands operands[2 * kStrips];
};

/// Adds the sums of a tile whose activations were scaled to the sums of all.
template <typename Group, int kRows, int kOctets, int kStrips>
MARLIN_DEVICE void AddScaledSums(float (&part)[kRows][kOctets][4],
                                 const StripParameters<kStrips>& parameters, bool bf16,
                                 float (&acc)[kRows][kOctets][4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint2 stored = parameters.stored[r / 2];
    const float2 scale = LoadParameters(r % 2 == 0 ? stored.x : stored.y, bf16);
#pragma unroll
    for (int o = 0; o < kOctets; ++o) Group::AddScaled(part[r][o], scale, acc[r][o]);
  }
}

template <int kRows, int kOctets>
MARLIN_DEVICE void Clear(float (&sums)[kRows][kOctets][4]) {
#pragma unroll
  for (int i = 0; i < kRows * kOctets * 4; ++i)
    sums[i / (kOctets * 4)][i / 4 % kOctets][i % 4] = 0.0f;
}

/// One warp's MMAs of a unit's tile with `kOctets` n8 tiles of tokens.
template <CodeKind kKind, typename T, ParameterUse kUse, int kStrips, int kOctets>
struct TileProduct {
  static constexpr int kBits = CodeBits(kKind);
  static constexpr int kCodeBytes = TileCodeBytes(kBits);
  static constexpr bool kOneGroup = kUse == ParameterUse::kOneScale;
  static constexpr bool kScaled = kKind != CodeKind::kDense16;
  static constexpr int kRows = 2 * kStrips;  ///< MMA tiles of 16 outputs.
  using Group = GroupSums<kKind, T, kUse>;
  using Sums = float[kRows][kOctets][4];
  using Table = GemvTable<kKind, T>;
  using Parameters = StripParameters<kStrips>;

  /// Calls `release` once, when the tile has been read: with one group that is before most of the
  /// MMAs, so that the stage is nearly always being refilled. `kGroups`: the tile's groups, if they
  /// are known; 0: they are the view's. `kInRange`: activations are multiplied by
  /// 2^kActivationExponent already.
  template <int kGroups = 0, bool kInRange = false, typename Release>
  static MARLIN_DEVICE void Run(uint32_t tile, const TileView& view,
                                const uint32_t (&activations)[kOctets], const TileLane& lane,
                                const ParameterMode& mode, const Table& table, Sums& acc,
                                const Release& release) {
    const int tile_bytes = view.tile_bytes;
    const int groups = kGroups > 0 ? kGroups : view.groups_per_tile;
    const uint32_t first_parameters = tile + TileCodeBytes(kBits) + lane.parameters;
    uint32_t words[2][kRows][kBits];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        LoadWords<kBits>(tile + (r / 2) * tile_bytes + (half * 2 + r % 2) * BlockBytes(kBits),
                         lane.index, words[half][r]);
      }
    }
    Parameters parameters;
    if (kScaled) LoadOperands(first_parameters, tile_bytes, groups, mode, parameters);
    if (kOneGroup || groups <= 1) release();
    Sums part = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t tokens[kOctets][4];
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        LoadMatrices(tokens[o], activations[o] + pair * 64);
        if constexpr (Group::kUsed && !kInRange) Group::ScaleActivations(tokens[o]);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        // A tile has eight k16 steps; a step begins a group where step x groups / 8 crosses an
        // integer.
        const int place = (pair * 2 + step) * groups;
        if (!kOneGroup && kScaled && place > 0 && (place & 7) < groups) {
          if constexpr (Group::kUsed) {
            AddScaledSums<Group>(part, parameters, mode.bf16, acc);
            Clear(part);
          }
          LoadOperands(first_parameters + (place >> 3) * kGroupBytes, tile_bytes, groups, mode,
                       parameters);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int j = pair % 2 * 2 + step;
          const GroupOperands& operands = parameters.operands[r];
          uint32_t weights[4];
          if constexpr (Group::kUsed) {
            FragmentDecoder<kKind, T>::Decode(words[pair / 2][r], j, table, operands.offset,
                                              weights);
          } else {
            DecodeScaled<kKind, T, kUse>(words[pair / 2][r], j, table, mode, operands, weights);
          }
#pragma unroll
          for (int o = 0; o < kOctets; ++o) {
            MultiplyAdd<T>(Group::kUsed ? part[r][o] : acc[r][o], weights, tokens[o][2 * step],
                           tokens[o][2 * step + 1]);
          }
        }
      }
    }
    if constexpr (Group::kUsed) AddScaledSums<Group>(part, parameters, mode.bf16, acc);
    if (!kOneGroup && groups > 1) release();
  }

 private:
  static MARLIN_DEVICE void LoadOperands(uint32_t address, int tile_bytes, int groups,
                                         const ParameterMode& mode, Parameters& parameters) {
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      parameters.stored[s] = LoadShared8(address + s * tile_bytes);
      uint2 zeros = {0, 0};
      if (mode.integer_zeros || (kUse == ParameterUse::kAll && mode.extra != ZeroKind::kNone)) {
        zeros = LoadShared8(address + s * tile_bytes + groups * kGroupBytes);
      }
      MakeOperands<kKind, T, kUse>(parameters.stored[s].x, zeros.x, mode,
                                   parameters.operands[2 * s]);
      MakeOperands<kKind, T, kUse>(parameters.stored[s].y, zeros.y, mode,
                                   parameters.operands[2 * s + 1]);
    }
  }
};

/// Reduces the sums of a unit's warps, each times `factor`, one n-tile and n8 tile of tokens after
/// another. `ticket`: the tile counter's previous value, in the elected lane of the first warp.
template <int kStrips, int kOctets>
MARLIN_DEVICE void FinishUnit(const GemvArguments& args, const GemvBlock<kStrips>& block,
                              int local_unit, const float (&acc)[2 * kStrips][kOctets][4],
                              float factor, float* sums, uint32_t reduction_buffer,
                              uint32_t ticket) {
  const bool last = local_unit + (1 << args.lanes_log2) >= block.units;
  const int lane = block.lane;
  float* const first = sums + block.unit_lane * args.share * kSumFloats;
  float* const mine = first + block.sharer * kSumFloats;
  // In the padding between the sums of two tokens.
  auto* const finishes = reinterpret_cast<uint32_t*>(first + kStripOutputs);
  if (args.tile_counters != nullptr && block.sharer == 0 && ElectOne()) {
    *finishes = IsLastSplit(args, block.first_unit + local_unit, ticket) ? 1 : 0;
  }
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (o * kOctet >= args.m) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = (lane & 3) * 2 + (e & 1);
          mine[token * kSumStride + r * 16 + (lane >> 2) + 8 * (e >> 1)] =
              acc[2 * s + r][o][e] * factor;
        }
      }
      SyncSharers(args, block.unit_lane);
      FinishOctet(args, block.first_unit * kStrips, local_unit * kStrips + s, o, first,
                  reduction_buffer, args.tile_counters != nullptr && *finishes != 0,
                  block.sharer * 32 + lane);
      // Before the sums are overwritten.
      if (!last || s + 1 < kStrips || o + 1 < kOctets) SyncSharers(args, block.unit_lane);
    }
  }
}

/// Requests the activations and the first tiles without TMA, and so without PDL. A tile for every
/// warp comes first, because device memory answers last; then the activations, for which all warps
/// wait. (Their mbarriers also wait for these tiles, as for all earlier copies of a thread.)
template <CodeKind kKind, typename T, int kStrips, typename Stream>
MARLIN_DEVICE void RequestByLanes(const GemvArguments& args, const GemvBlock<kStrips>& block,
                                  Stream& stream, uint32_t base) {
  stream.Refill(RingStage{block.ring});
  // One lane of a warp: compute-sanitizer takes the addresses of all lanes for mbarriers.
  if (block.lane == 0 && block.warp < args.pieces) {
    InitBarrier(block.arrived + 8 * block.warp, static_cast<int>(blockDim.x));
  }
  __syncthreads();
  CopyActivations(args, block.first_tile * kTileK, block.activations, block.arrived);
#pragma unroll 1
  for (int s = 1; s < args.stages; ++s) {
    stream.Refill(RingStage{block.ring + s * block.slot_bytes});
  }
  if constexpr (kKind == CodeKind::kTable4) {
    SharedPairTable<T>::Fill(base + args.table_offset, args.weights);
    __syncthreads();
  }
}

/// `Product`: TileProduct or another with its interface, for tiles of another layout.
template <CodeKind kKind, typename T, ParameterUse kUse, int kStrips, int kOctets,
          template <CodeKind, typename, ParameterUse, int, int> typename Product = TileProduct>
__global__ void __launch_bounds__(512, 1) GemvKernel(const __grid_constant__ GemvArguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = SharedAddress(shared);
  const GemvBlock<kStrips> block(args, base);
  const int lane = block.lane;
  const int first_k = block.first_tile * kTileK;
  const uint32_t reduction_buffer = base + args.reduction_offset;
  using TileOfProduct = Product<kKind, T, kUse, kStrips, kOctets>;
  auto stream = block.template Stream<TileOfProduct::kCodeBytes>(args);
  if constexpr (kHasTma) {
    if (lane == 0) {
#pragma unroll 1
      for (int s = 0; s < args.stages; ++s) InitBarrier(block.barriers + 8 * s, 1);
      FenceBarrierInit();
    }
#pragma unroll 1
    for (int s = 0; s < args.first_stages && stream.left_in_unit > 0; ++s) {
      stream.Copy(block.ring + s * block.slot_bytes, block.barriers + 8 * s, lane == 0);
    }
    if (lane == 0) {
      if (block.warp < args.pieces) {
        const uint32_t arrived = block.arrived + 8 * block.warp;
        InitBarrier(arrived, args.bulk ? 1 : static_cast<int>(blockDim.x));
        FenceBarrierInit();
        if (args.bulk) ExpectActivations(args, first_k, arrived, block.warp);
      }
      if (args.in_cluster && threadIdx.x + 32 >= blockDim.x) {
        const int strips = StripsFinishedHere(args, block.units * kStrips);
        InitBarrier(reduction_buffer, 1);
        FenceBarrierInit();
        ArriveExpecting(reduction_buffer, strips * args.splits * args.m * kStripOutputs * 4);
      }
    }
    if (args.bulk) ClearBehindK(args, first_k, block.activations);
    if constexpr (kKind == CodeKind::kTable4) {
      SharedPairTable<T>::Fill(base + args.table_offset, args.weights);
    }
    __syncthreads();
    // DSMEM stores and multicast copies need the other CTAs of the cluster to be running and to
    // have initialized their mbarriers.
    const bool in_cluster = args.in_cluster || args.multicast > 1;
    if (in_cluster) ArriveInCluster();
    TriggerDependentLaunch();
    RowCopies copies(args, first_k, block.activations, block.arrived, block.warp);
    WaitForEarlierWork();
    if (in_cluster) WaitForCluster();
    if (!args.bulk) {
      CopyActivations(args, first_k, block.activations, block.arrived);
    } else if (lane == 0) {
      copies.Run();
    }
    // Memory requests are served in order: issued earlier, these would delay the activations.
#pragma unroll 1
    for (int s = args.first_stages; s < args.stages && stream.left_in_unit > 0; ++s) {
      stream.Copy(block.ring + s * block.slot_bytes, block.barriers + 8 * s, lane == 0);
    }
  } else {
    RequestByLanes<kKind, T>(args, block, stream, base);
  }
  __syncwarp();

  const auto table = [&] {
    if constexpr (kKind == CodeKind::kTable4) {
      return SharedPairTable<T>(base + args.table_offset);
    } else {
      return DecodeTable<kKind, T>(args.weights);
    }
  }();
  const ParameterMode mode = ParameterModeOf<kKind, T>(args.weights);
  // Lane l passes ldmatrix the row of token l % 8 in matrix l / 8; tokens beyond m repeat the last.
  uint32_t my_rows[kOctets];
#pragma unroll
  for (int o = 0; o < kOctets; ++o) {
    my_rows[o] = block.activations + (lane >> 3) * 16 + block.sharer * (kTileK * 2) +
                 min(o * kOctet + (lane & 7), args.m - 1) * args.row_bytes;
  }
  auto* sums = reinterpret_cast<float*>(shared + args.sums_offset);
  RingCursor slot(block, args.stages);
  const bool increments_counter = args.tile_counters != nullptr && block.sharer == 0;
  int counter_tile = increments_counter ? block.my_tiles - 1 : -1;
  // As in GemvBlock: so that it is not recomputed for every tile.
  asm volatile("" : "+r"(counter_tile));
  const TileLane tile_lane(lane);
  for (int u = block.unit_lane; u < block.units; u += 1 << args.lanes_log2) {
    float acc[2 * kStrips][kOctets][4] = {};
    uint32_t rows[kOctets];
#pragma unroll
    for (int o = 0; o < kOctets; ++o) rows[o] = my_rows[o];
    uint32_t ticket = 0;
    int is_first = u == block.unit_lane ? 1 : 0;
    asm volatile("" : "+r"(is_first));
#pragma unroll 1
    for (int i = 0; i < block.my_tiles; ++i) {
      if (is_first) {
        const int tile = block.sharer + (i << args.share_log2);
        Wait(block.arrived + 8 * (tile >> args.piece_log2), 0);
      }
      slot.Pin();
#pragma unroll
      for (int o = 0; o < kOctets; ++o) asm volatile("" : "+r"(rows[o]));
      slot.Await();
      const auto release = [&] {
        __syncwarp();
        stream.Refill(slot);
        // As late as its result can still arrive in time: the CTA with the last ticket waits for
        // the others' sums.
        if (i == counter_tile && ElectOne()) {
          ticket = IncrementTileCounter(args.tile_counters + block.first_unit + u);
        }
      };
      TileOfProduct::Run(slot.address, args.weights, rows, tile_lane, mode, table, acc, release);
      slot.Advance();
#pragma unroll
      for (int o = 0; o < kOctets; ++o) rows[o] += args.share * (kTileK * 2);
    }
    FinishUnit<kStrips, kOctets>(args, block, u, acc, TileOfProduct::Group::kUnit, sums,
                                 reduction_buffer, ticket);
  }
  // Multicast copies from the other CTA must have arrived before this CTA exits and its shared
  // memory is freed.
  if (kHasTma && args.multicast > 1) {
    for (int piece = 0; piece < args.pieces; ++piece) Wait(block.arrived + 8 * piece, 0);
  }
  if (kHasTma && args.in_cluster) {
    Wait(reduction_buffer, 0);
    FinishReductionBuffer(
        args, block.first_unit * kStrips, block.units * kStrips,
        reinterpret_cast<const float*>(shared + args.reduction_offset + kReductionBarrierBytes));
  }
}

}  // namespace marlin::cuda
