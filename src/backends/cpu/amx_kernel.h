// The bf16 product on AMX tiles.
//
// Weights are the A tiles (one output column n per tile row, 32 k), activations the B tiles (pairs
// of k, 16 rows m), so that a group's scale, zero and codebook fold into one look-up per 32
// weights:
//
//        32 k                16 m                       16 m
//   n  +------+        k/2 +------+                n  +------+
//   16 |  A0  |  x         |B0 B1 |  accumulates   16 |C0 C1 |  in four fp32 tiles,
//   16 |  A1  |            +------+                16 |C2 C3 |  two blocks of n by two of m
//      +------+                                       +------+
//
// The next panel of weights (2 blocks x kPanelK) is decoded between the tile products of this one.
#pragma once

#include <cstdint>

#include "backends/cpu/panels.h"
#include "marlin/tensor.h"

namespace marlin::cpu::amx {

/// k per decoded panel: 2 blocks x 256 k x 2 bytes = 16 KiB, twice, stay in L1 beside the B tiles.
inline constexpr int64_t kPanelK = 256;
inline constexpr int64_t kPanelBytes = 2 * kBlockRows * kPanelK * 2;
inline constexpr int64_t kTileM = 16;
inline constexpr int64_t kTileBytes = 1024;
/// Two panels, aligned to 64 bytes.
inline constexpr int64_t kScratchBytes = 2 * kPanelBytes;

/// Activations as B tiles [m tile][k / 32][16 pairs][16 m][2] of bf16, and what is left of each
/// after rounding, or null when nothing is wanted of it.
struct ActivationTiles {
  const uint16_t* high;
  const uint16_t* low;
  int64_t m_tiles;
};

/// Packs 16 rows (fewer at the end: the rest is zero) of k activations for one m tile; `low` may be
/// null. k is padded with zeros to a multiple of 128.
void PackTiles(const void* a, DType type, int64_t a_stride, int64_t rows, int64_t k, uint16_t* high,
               uint16_t* low);

/// sums[s][m tile][2][16 n][16 m] = products of the strips s = pairs of blocks. `blocks` holds
/// 2 * strips block numbers.
struct StripJob {
  const PanelView* weights;
  const int64_t* blocks;
  int64_t strips;
  ActivationTiles activations;
  float* sums;
  void* scratch;
};
void MultiplyStrips(const StripJob& job);

/// Copies one C tile [16 n][16 m] to rows [16 m] of `stride` floats.
void TransposeTile(const float* tile, float* rows, int64_t stride);

}  // namespace marlin::cpu::amx
