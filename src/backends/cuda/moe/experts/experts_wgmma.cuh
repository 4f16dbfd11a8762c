// The GEMMs of a layer's experts with many rows, with Hopper's warpgroup MMA (WGMMA): one launch
// for all experts of one kind of codes.
//
//   output tile: 128 outputs of a matrix, or 64 gates and their 64 ups, for up to 16, 32, 64, 128
//   or 192 rows of its expert: with fewer rows more pipeline stages fit in shared memory. The last
//   tile of an expert has as few of these rows as fit.
//
//     expert 0                 expert 3              experts without rows have no tiles
//     [rows   0..191: blocks]  [rows 0..31: blocks]
//     [rows 192..207: blocks]
//
//   The pipeline, the decoding of weights and the products are as in the kernel of dense layers
//   (wgmma_kernel.cuh); the tile scheduler counts tiles from the sorted slots, and the producers
//   find weights and rows through the table of descriptors. Rows lie in the order of the slots, so
//   that a TMA tile has the rows of one expert; rows after them belong to other experts, or are
//   zero, and their sums are dropped.
#pragma once

#include "backends/cuda/common/instances.cuh"
#include "backends/cuda/gemm/wgmma/sparse_warp_tile.cuh"
#include "backends/cuda/moe/experts/experts_rows.cuh"
#include "backends/cuda/moe/experts/experts_schedule.cuh"

namespace marlin::cuda {

/// The tensor maps of the rows.
struct ExpertMaps {
  CUtensorMap of_width[kExpertWidths];
};

/// A value that is the same for all lanes, in a form that the compiler knows to be uniform.
MARLIN_DEVICE int Uniform(int value) {
  return static_cast<int>(__reduce_or_sync(~0u, static_cast<unsigned>(value)));
}

/// Where the weights of a tile begin, of a gate or an up, or of all outputs.
MARLIN_DEVICE const uint8_t* WeightsOf(const ExpertWgmmaArguments& args, const ExpertTile& tile,
                                       int side) {
  const TileExpert& matrix = tile.matrix[side];
  const int strips = args.gated ? kStripsOfBlock / 2 : kStripsOfBlock;
  return matrix.tiles + TileOffset(args.gemm.weights, matrix.strip + tile.block * strips, 0);
}

/// The weight producer, one thread.
MARLIN_DEVICE void ProduceExpertWeights(const ExpertWgmmaArguments& args, const WgmmaShared& shared,
                                        const int* schedule) {
  const int bytes = kStripsOfBlock * args.gemm.weights.tile_bytes;
  const int copy = args.gated ? bytes / 2 : bytes;
  SlotCursor cursor;
  ExpertTiles<ExpertWgmmaArguments> tiles(args, schedule);
  const int total = tiles.total();
  for (; tiles.item() < total; tiles.Next()) {
    const ExpertTile tile = tiles.Get();
    const uint8_t* from = WeightsOf(args, tile, 0);
    const uint8_t* from_up = args.gated ? WeightsOf(args, tile, 1) : nullptr;
    const int slot_bytes = StepActivationBytes(RowsOfWidth(WidthOf(tile.rows))) + bytes;
#pragma unroll 1
    for (int step = 0; step < args.gemm.tiles; ++step) {
      const uint32_t full = shared.full + 8 * cursor.slot;
      const uint32_t to = shared.weights + cursor.slot * bytes;
      Wait(shared.empty + 8 * cursor.slot, cursor.parity ^ 1);
      ArriveExpecting(full, slot_bytes);
      CopyBulk(to, from, copy, full);
      from += bytes;
      if (args.gated) {
        CopyBulk(to + copy, from_up, copy, full);
        from_up += bytes;
      }
      cursor.Advance(args.gemm.slots);
    }
  }
}

/// The activation producer, one thread of another warp.
MARLIN_DEVICE void ProduceExpertRows(const ExpertWgmmaArguments& args, const ExpertMaps& maps,
                                     const WgmmaShared& shared, const int* schedule) {
  const int half_bytes = StepActivationBytes(args.tile_rows) / 2;
  SlotCursor cursor;
  ExpertTiles<ExpertWgmmaArguments> tiles(args, schedule);
  const int total = tiles.total();
  for (; tiles.item() < total; tiles.Next()) {
    const ExpertTile tile = tiles.Get();
    const CUtensorMap* const map = &maps.of_width[WidthOf(tile.rows)];
    int k = 0;
#pragma unroll 1
    for (int step = 0; step < args.gemm.tiles; ++step, k += kTileK) {
      const uint32_t full = shared.full + 8 * cursor.slot;
      const uint32_t to = shared.activations + cursor.slot * (2 * half_bytes);
      Wait(shared.empty + 8 * cursor.slot, cursor.parity ^ 1);
      CopyBox(to, map, k, tile.first_slot, full);
      CopyBox(to + half_bytes, map, k + kTileK / 2, tile.first_slot, full);
      cursor.Advance(args.gemm.slots);
    }
  }
}

/// Sums of 16 outputs and 16 rows: a lane's part of a warp's accumulators.
using SumGroup = float[8];

/// The gated activation of an output tile. Lane l of a warp of gates and lane l of the warp of
/// their ups have the sums of the same outputs and rows, so they exchange sums as they lie: of
/// every 32 rows the gates' warp finishes the first 16, the ups' warp the others.
template <int kTokens>
class GatedEpilogue {
 public:
  MARLIN_DEVICE GatedEpilogue(const ExpertWgmmaArguments& args, const ConsumerPlace& place,
                              const ExpertTile& tile, uint8_t* memory)
      : args_(args),
        tile_(tile),
        lane_(place.lane),
        of_ups_((place.strip & 1) != 0),
        pair_(place.strip / 2 * 2 + place.rows),
        first_n_((tile.block * 2 + place.strip / 2) * kStripOutputs + place.rows * 16),
        pair_memory_(memory + args.exchange_offset + pair_ * kPairBytes),
        vectors_(SharedAddress(memory) + args.gemm.exchange_offset +
                 (pair_ * 2 + (of_ups_ ? 1 : 0)) * kVectorBytes) {
    Load(tile.matrix[0], 0);
    Load(tile.matrix[1], 1);
  }

  /// `turn`: which of a pair's two buffers is next, so that one barrier for each is enough.
  MARLIN_DEVICE void Run(const float (&acc)[kTokens / 2], int* turn) const {
#pragma unroll
    for (int c = 0; c < kTokens / 16; c += 2) {
      if (c * 16 >= tile_.rows) break;
      constexpr int kLast = kTokens / 16 - 1;
      const auto group = [&](int i) -> const float* { return acc + 8 * (i < kLast ? i : kLast); };
      auto* const buffer = reinterpret_cast<float4*>(pair_memory_ + *turn * (kPairBytes / 2));
      *turn ^= 1;
      SumGroup mine;
      SumGroup other;
      Choose(of_ups_, group(c + 1), group(c), mine);
      Choose(of_ups_, group(c), group(c + 1), other);
      Exchange(buffer, other);
      uint32_t packed[4];
      Activate(mine, other, packed);
      Store((c + (of_ups_ ? 1 : 0)) * 16, packed);
    }
  }

 private:
  static MARLIN_DEVICE void Choose(bool first, const float* a, const float* b, SumGroup& to) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = first ? a[i] : b[i];
  }

  /// Outputs g and g + 8 of the warp's 16.
  MARLIN_DEVICE void Load(const TileExpert& matrix, int side) {
    multipliers_[side] = matrix.multiplier;
    if (matrix.bias == nullptr) return;
    const int n = first_n_ + (lane_ >> 2);
    if (n < matrix.n) biases_[side][0] = matrix.bias[n];
    if (n + 8 < matrix.n) biases_[side][1] = matrix.bias[n + 8];
  }

  /// Sends sums to the same lane of the pair's other warp, and receives its sums.
  MARLIN_DEVICE void Exchange(float4* buffer, SumGroup& sums) const {
    float4* const to = buffer + (of_ups_ ? 0 : 64) + lane_;
    const float4* const from = buffer + (of_ups_ ? 64 : 0) + lane_;
    to[0] = {sums[0], sums[1], sums[2], sums[3]};
    to[32] = {sums[4], sums[5], sums[6], sums[7]};
    asm volatile("bar.sync %0, 64;" ::"r"(1 + pair_) : "memory");
    const float4 low = from[0];
    const float4 high = from[32];
    sums[0] = low.x, sums[1] = low.y, sums[2] = low.z, sums[3] = low.w;
    sums[4] = high.x, sums[5] = high.y, sums[6] = high.z, sums[7] = high.w;
  }

  MARLIN_DEVICE void Activate(const SumGroup& mine, const SumGroup& other,
                              uint32_t (&packed)[4]) const {
    float gates[8];
    float ups[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float own = mine[i];
      const float received = other[i];
      gates[i] = (of_ups_ ? received : own) * multipliers_[0] + biases_[0][i / 2 % 2];
      ups[i] = (of_ups_ ? own : received) * multipliers_[1] + biases_[1][i / 2 % 2];
    }
    ReplaceByProducts<true>(args_.gate, gates, ups);
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = Bf16x2::Pack(gates[2 * i], gates[2 * i + 1]);
  }

  /// Eight adjacent outputs of a row for each lane, transposed through the warp's two buffers.
  /// Columns beyond the matrix are padding of the rows of `out`.
  MARLIN_DEVICE void Store(int first_row, const uint32_t (&packed)[4]) const {
    const uint32_t buffer = vectors_ + (first_row / 32 & 1) * (kVectorBytes / 2);
    StoreTurned(buffer + VectorAt((lane_ >> 4) * 8 + (lane_ & 7), lane_ >> 3 & 1), packed);
    __syncwarp();
    const uint4 outputs = LoadShared16(buffer + VectorAt(lane_ >> 1, lane_ & 1));
    const int row = first_row + (lane_ >> 1);
    const int n = first_n_ + (lane_ & 1) * 8;
    if (row >= tile_.rows || n >= tile_.matrix->n) return;
    auto* const to =
        static_cast<uint16_t*>(args_.out) + (tile_.first_slot + row) * args_.out_stride;
    *reinterpret_cast<uint4*>(to + n) = outputs;
  }

  static constexpr int kPairBytes = kGatedExchangeBytes / 4;
  static constexpr int kVectorBytes = 2 * 16 * 16 * 2;
  static_assert(8 * kVectorBytes <= kExchangeBytes);

  const ExpertWgmmaArguments& args_;
  const ExpertTile& tile_;
  int lane_;
  bool of_ups_;
  int pair_;     ///< Which of the CTA's four pairs of warps.
  int first_n_;  ///< The pair's first gate.
  uint8_t* pair_memory_;
  uint32_t vectors_;
  float multipliers_[2];
  float biases_[2][2] = {};
};

/// The epilogue of an output tile of f32 sums with their biases. Eight lanes store eight adjacent
/// floats: whole sectors. `acc` has the layout that WgmmaEpilogue reads.
template <int kTokens>
MARLIN_DEVICE void StoreSums(const ExpertWgmmaArguments& args, const ConsumerPlace& place,
                             const ExpertTile& tile, const float (&acc)[kTokens / 2]) {
  const TileExpert& matrix = *tile.matrix;
  const int n = tile.block * kBlockOutputs + place.strip * kStripOutputs + place.rows * 16 +
                (place.lane >> 2);
  const int row = (place.lane & 3) * 2;
  const bool inside[2] = {n < matrix.n, n + 8 < matrix.n};
  float biases[2] = {};
  if (matrix.bias != nullptr && inside[0]) biases[0] = matrix.bias[n];
  if (matrix.bias != nullptr && inside[1]) biases[1] = matrix.bias[n + 8];
  const float multiplier = matrix.multiplier;
  float* const to = static_cast<float*>(args.out) +
                    static_cast<int64_t>(tile.first_slot + row) * args.out_stride + matrix.column +
                    n;
#pragma unroll
  for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = i * 8 + (e & 1);
      if (row + at < tile.rows && inside[e >> 1]) {
        __stcg(to + at * args.out_stride + 8 * (e >> 1),
               acc[4 * i + e] * multiplier + biases[e >> 1]);
      }
    }
  }
}

/// Stages hold the rows of a whole tile, which the plan chooses.
struct PlannedStages {
  int half_bytes;
  MARLIN_DEVICE int HalfBytes() const { return half_bytes; }
};

/// `Tile`: as in WgmmaConsumer.
template <CodeKind kKind, typename T, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Tile>
struct ExpertConsumer {
  static constexpr bool kUniformPlaces = true;
  using Cursor = ConsumerCursor<PlannedStages, 1, kUniformPlaces>;

  const ExpertWgmmaArguments& args;
  ConsumerPlace place;
  uint8_t* memory;
  DecodeTable<kKind, T> table;
  ParameterMode mode;

  template <int kTokens>
  MARLIN_DEVICE void RunTile(const ExpertTile& tile, Cursor& cursor, int* turn) const {
    // Without a value the sums of all widths would be live throughout the loop over tiles.
    float acc[kTokens / 2] = {};
    WgmmaConsumer<kKind, T, kTokens, kUse, Tile>{args.gemm, place, table, mode}.Run(args.gemm.tiles,
                                                                                    cursor, acc);
    if (args.gated) {
      GatedEpilogue<kTokens>(args, place, tile, memory).Run(acc, turn);
    } else {
      StoreSums<kTokens>(args, place, tile, acc);
    }
  }

  MARLIN_DEVICE void Run(const WgmmaShared& shared, const int* schedule) const {
    Cursor cursor(args.gemm, shared, place, {StepActivationBytes(args.tile_rows) / 2});
    int turn = 0;
    ExpertTiles<ExpertWgmmaArguments> tiles(args, schedule);
    // Read anew for every tile: a register less in the products.
    for (; tiles.item() < Uniform(tiles.total()); tiles.Next()) {
      const ExpertTile tile = tiles.Get();
      switch (Uniform(WidthOf(tile.rows))) {
        case 0:
          RunTile<RowsOfWidth(0)>(tile, cursor, &turn);
          break;
        case 1:
          RunTile<RowsOfWidth(1)>(tile, cursor, &turn);
          break;
        case 2:
          RunTile<RowsOfWidth(2)>(tile, cursor, &turn);
          break;
        case 3:
          RunTile<RowsOfWidth(3)>(tile, cursor, &turn);
          break;
        default:
          if constexpr (MaxTileRows(CodeBits(kKind)) == RowsOfWidth(4)) {
            RunTile<RowsOfWidth(4)>(tile, cursor, &turn);
          }
      }
    }
  }
};

template <CodeKind kKind, typename T, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Tile = WarpTile>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    ExpertWgmmaKernel(const __grid_constant__ ExpertMaps maps,
                      const __grid_constant__ ExpertWgmmaArguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const WgmmaShared shared = BeginSlots(args.gemm, memory);
  int* const schedule = reinterpret_cast<int*>(memory + args.schedule_offset);
  WaitForEarlierWork();
  ExpertTiles<ExpertWgmmaArguments>::Count(args, schedule);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) ProduceExpertWeights(args, shared, schedule);
    if (threadIdx.x == 32) ProduceExpertRows(args, maps, shared, schedule);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const ExpertConsumer<kKind, T, kUse, Tile> consumer{
        args, PlaceOf(args.gemm, WarpOfBlock() - 4), memory,
        DecodeTable<kKind, T>(args.gemm.weights), ParameterModeOf<kKind, T>(args.gemm.weights)};
    consumer.Run(shared, schedule);
  }
}

template <typename Tiles>
const void* ExpertWgmmaKernels::Function(const Variant& variant) {
  const auto function = [&]<typename T, ParameterUse kUse>() {
    if constexpr (Tiles::kSparse) {
      return reinterpret_cast<const void*>(
          &ExpertWgmmaKernel<Tiles::kCodes, T, kUse, SparseWarpTile>);
    } else {
      return reinterpret_cast<const void*>(&ExpertWgmmaKernel<Tiles::kCodes, T, kUse>);
    }
  };
  return WithOperands<Tiles>(variant.bf16, variant.use, function);
}

}  // namespace marlin::cuda
