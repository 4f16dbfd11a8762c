// What the kernel for few rows is given, and how it divides shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/device_views.h"
#include "backends/cuda/tile_layout.h"

namespace marlin::cuda {

struct GemvArguments {
  TileView weights;
  const void* a = nullptr;  ///< Of the kernel's 16-bit type, rows at multiples of 16 bytes.
  int64_t a_stride = 0;
  EpilogueView epilogue;
  float* partials = nullptr;  ///< [splits, m, n]; null: the epilogue is done here.
  int m = 0;
  int k = 0;
  int tiles = 0;           ///< Of a strip.
  int tiles_of_split = 0;  ///< Of every split but perhaps the last.
  int strips_base = 0;     ///< Strips of a block, one more in the first strips_rest blocks.
  int strips_rest = 0;
  int share = 1;
  int share_log = 0;
  int lanes_log = 0;  ///< Of the strips that a block works on at a time: warps / share.
  int stages = 2;
  int pieces = 1;     ///< Parts of the activations that arrive one after the other.
  int piece_log = 0;  ///< Of the tiles of a piece.
  int tiles_of_piece = 1;
  int row_bytes = 0;           ///< From one row of activations in shared memory to the next.
  int activations_offset = 0;  ///< In shared memory, behind the rings.
  int sums_offset = 0;
  int barriers_offset = 0;
};

inline constexpr int kMaxPieces = 4;

/// Floats between the tokens of a strip's sums: 32 outputs and one to spread the banks.
inline constexpr int kSumStride = kStripOutputs + 1;

/// Floats of one warp's sums.
inline constexpr int kSumFloats = 8 * kSumStride;

}  // namespace marlin::cuda
