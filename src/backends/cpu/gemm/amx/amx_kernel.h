// The bf16 GEMM on AMX tiles.
//
// Weights are the A tiles (one output column n per tile row, 32 k), activations the B tiles (pairs
// of k, 16 rows m), so that a group's scale, zero point and codebook fold into one table lookup per
// 32 weights:
//
//        32 k                16 m                       16 m
//   n  +------+        k/2 +------+                n  +------+
//   16 |  A0  |  x         |B0 B1 |  accumulates   16 |C0 C1 |  in four fp32 tiles,
//   16 |  A1  |            +------+                16 |C2 C3 |  two blocks of n by two of m
//      +------+                                       +------+
//
// A panel of weights (a strip of 2 blocks x a KC block of kMaxPanelK) is decoded to L1 and
// multiplied with all rows.
#pragma once

#include <cstdint>

#include "backends/cpu/pack/panels.h"
#include "marlin/tensor.h"

namespace marlin::cpu::amx {

/// KC: k per decoded panel. 2 blocks x 256 k x 2 bytes = 16 KiB stay in L1 with the B tiles.
inline constexpr int64_t kMaxPanelK = 256;
inline constexpr int64_t kPanelBytes = 2 * kBlockRows * kMaxPanelK * 2;
inline constexpr int64_t kTileM = 16;
inline constexpr int64_t kTileBytes = 1024;
/// Per-worker scratch: a panel, aligned to 64 bytes.
inline constexpr int64_t kScratchBytes = kPanelBytes;

/// All eight tiles are 16 rows of 64 bytes. Kept in read-only memory: g++ 12 drops stores to a
/// configuration on the stack, because its intrinsic declares only the first eight bytes as input.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr TileConfiguration kTiles;

/// Activations packed as bf16 B tiles [k / 256][m tile][8 steps of 32 k][16 pairs][16 m][2]: the
/// rounded values (`high`) and their rounding errors (`low`, or null if not needed). A KC block of
/// all m tiles is contiguous: m tiles k apart, often a power of two, would conflict in L2 sets.
struct ActivationTiles {
  const uint16_t* high;
  const uint16_t* low;
  int64_t m_tiles;
};

/// Source rows of one m tile: at most 16 of those that are a_stride elements apart.
struct TileSource {
  const void* a;
  DType type;
  int64_t a_stride;
  int64_t rows;
  int64_t k;
  const int32_t* gather = nullptr;  ///< [rows] numbers of rows of a; null: the first ones.
};

/// Elements from one KC block to the next.
constexpr int64_t KBlockStride(int64_t m_tiles) { return m_tiles * kTileM * kMaxPanelK; }

/// Packs m tile `tile` of m_tiles; `low` may be null. Missing rows are zero; k is zero-padded to a
/// multiple of 256.
void PackTiles(const TileSource& source, int64_t tile, int64_t m_tiles, uint16_t* high,
               uint16_t* low);

/// sums[s][m tile][2][16 n][16 m] = strip s of W^T times the activations. A strip is a pair of
/// blocks; `blocks` holds 2 * strips block indices.
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
