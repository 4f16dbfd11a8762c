// What the kernel for few rows is given, and how it divides shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// What stands between a block's start and its first copy comes first: parameters are fetched by
/// lines, one after the other.
struct GemvArguments {
  int share = 1;
  int share_log2 = 0;
  int lanes_log2 = 0;      ///< Of the units that a block works on at a time: warps / share.
  int stages = 2;          ///< Tiles in flight of every warp.
  int first_stages = 1;    ///< Of them those that are asked for before the activations.
  int tiles = 0;           ///< Of a unit, along k.
  int tiles_of_split = 0;  ///< Of every split but perhaps the last.
  int units_base = 0;      ///< Units of a block, one more in the first units_rest blocks.
  int units_rest = 0;
  int barriers_offset = 0;     ///< In shared memory.
  int activations_offset = 0;  ///< Behind the rings.
  int pieces = 1;              ///< Parts of the activations that arrive one after the other.
  int piece_log2 = 0;          ///< Of the tiles of a piece.
  int m = 0;
  int k = 0;
  int splits = 1;           ///< Blocks that divide k among them: blockIdx.x.
  bool in_cluster = false;  ///< They are a cluster and exchange sums in shared memory.
  bool bulk = false;  ///< Activations come by bulk copies; rows are whole multiples of 16 bytes.
  TileView weights;
  int multicast = 1;  ///< Neighbouring blocks of a cluster that share the copies of activations.
  int row_bytes = 0;  ///< From one row of activations in shared memory to the next.
  int row_mask = 0;   ///< Blocks begin to copy with row (block & row_mask).
  /// Copy i is row i % m of piece i / m = i * piece_factor >> 16; from one copy of a warp to its
  /// next are step_pieces and step_rows.
  int piece_factor = 0;
  int step_pieces = 0;
  int step_rows = 0;
  const void* a = nullptr;  ///< Of the kernel's 16-bit type, rows at multiples of 16 bytes.
  int64_t a_stride = 0;
  int sums_offset = 0;
  int reduction_offset = 0;  ///< in_cluster: a barrier, [strips finished here][splits][m][32] sums.
  int table_offset = 0;      ///< kTable4: kPairTableBytes.
  float* partials = nullptr;  ///< [splits, m, n]; null: the epilogue is done here.
  /// Not null: the blocks that divide k meet in memory (gemv_finish.cuh). A word for every unit and
  /// [strips][splits][m][32] sums, all ones before and after.
  uint32_t* tile_counters = nullptr;
  float* exchange = nullptr;
  bool plain_quads = false;  ///< Four outputs are one store of 16-bit sums and biases.
  EpilogueView epilogue;
};

inline constexpr int kMaxPieces = 4;

/// Warps that share a unit.
inline constexpr int kMaxSharers = 16;

inline constexpr int kReductionBarrierBytes = 16;

/// A table of 16 values in shared memory: pairs of values for all pairs of codes and every lane.
inline constexpr int kPairTableBytes = 256 * 32 * 4;

/// Floats between the tokens of a strip's sums: 32 outputs and some to spread the banks.
inline constexpr int kSumStride = kStripOutputs + 4;

/// Tokens of a matrix instruction.
inline constexpr int kOctet = 8;

/// Floats of one warp's sums of an octet.
inline constexpr int kSumFloats = kOctet * kSumStride;

}  // namespace marlin::cuda
