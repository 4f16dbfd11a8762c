// How prepared weights lie in device memory: tiles of 32 outputs x 128 k in the order of the matrix
// instructions' registers, scales beside them.
//
//   [blocks of 128 outputs][tiles of 128 k][strips of 32 outputs: 4] tiles, so that one copy brings
//   what a thread block of many rows multiplies with next:
//     tile  = [half of 64 k: 2][16 outputs: 2] fragment blocks, then the parameters
//     block = 32 lanes x 32 codes; lane 4 g + t holds, for step j of 16 k, the 8 codes of one
//             m16n8k16 (or wgmma m64) A fragment:
//               pair p = outputs g + 8 (p & 1), k = 16 j + 2 t + 8 (p >> 1) + {0, 1}
//     parameters = [groups in the tile][g: 8][outputs g, g + 8, g + 16, g + 24] of 16 bits: scales,
//             then zeros or biases in the same order where the format has them
//
// A group longer than 128 repeats its scale in every tile; one that is no multiple of a power of
// two from 16 up has no tiles (PreparedTiles::tiled is false) and is read in the canonical layout.
// Outputs are padded to whole blocks of 128, k to whole tiles, with code 0 and scale 0.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MARLIN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MARLIN_HOST_DEVICE inline
#endif

namespace marlin::cuda {

inline constexpr int kStripOutputs = 32;
inline constexpr int kTileK = 128;
inline constexpr int kBlockOutputs = 128;  ///< What n is padded to: a thread block's of wgmma.
inline constexpr int kGroupBytes = kStripOutputs * 2;

/// How the codes of a format lie in words and are decoded; formats of one kind differ in tables.
enum class CodeKind : uint8_t {
  kFp4,     ///< Bits placed so that shifts and masks give 16-bit floats.
  kInt4,    ///< Nibbles, value = code - offset.
  kTable4,  ///< Nibbles, 16 values.
  kTable3,  ///< Planes of two bits and of one bit, 8 values.
  kTable2,  ///< 4 values.
  kE4M3,    ///< Bytes.
  kE5M2,
  kInt8,     ///< Bytes, value = code - 128.
  kDense16,  ///< bf16 or fp16 numbers themselves.
};

/// Which parameters a kernel is compiled for: what it does not know of costs it nothing.
enum class ParameterUse : uint8_t {
  kOneScale,  ///< One group in a tile and nothing beside scales (but integer zeros of kInt4).
  kScales,    ///< Several groups.
  kAll,       ///< Zeros or biases too.
};

/// Bits of one code in a tile.
MARLIN_HOST_DEVICE constexpr int CodeBits(CodeKind kind) {
  switch (kind) {
    case CodeKind::kTable3:
      return 3;
    case CodeKind::kTable2:
      return 2;
    case CodeKind::kE4M3:
    case CodeKind::kE5M2:
    case CodeKind::kInt8:
      return 8;
    case CodeKind::kDense16:
      return 16;
    default:
      return 4;
  }
}

/// Bytes of one lane's 32 codes, of a fragment block, of a tile's codes.
MARLIN_HOST_DEVICE constexpr int LaneBytes(int bits) { return 4 * bits; }
MARLIN_HOST_DEVICE constexpr int BlockBytes(int bits) { return 32 * LaneBytes(bits); }
MARLIN_HOST_DEVICE constexpr int TileCodeBytes(int bits) { return 4 * BlockBytes(bits); }

/// Word `word` of lane `lane`'s 32 codes within a fragment block, in words. Lanes read 16 bytes at
/// a time (8 for the two-bit plane, 4 for the one-bit plane), each run of lanes contiguous.
MARLIN_HOST_DEVICE constexpr int WordOffset(int bits, int lane, int word) {
  if (bits == 2) return lane * 2 + word;
  if (bits == 3) return word < 2 ? lane * 2 + word : 64 + lane;
  return (word / 4) * 128 + lane * 4 + word % 4;
}

/// What a weight needs beside its scale: zeros (fp16) are subtracted from codes before scaling,
/// biases (of the scales' type) are added after it.
enum class ZeroKind { kNone, kZeros, kBiases };

/// Everything that a kernel needs to find a weight. Plain data, passed by value.
struct TileView {
  const uint8_t* tiles = nullptr;
  int tiles_of_strip = 0;  ///< Along k.
  int tile_bytes = 0;
  int groups_per_tile = 1;  ///< 1, 2, 4 or 8; 0 for kDense16.
  ZeroKind zero_kind = ZeroKind::kNone;
  bool integer_zeros = false;       ///< All zeros are integers from 0 to 127.
  bool bf16_parameters = false;     ///< Scales (and biases) are bf16; else fp16.
  bool bf16_codes = false;          ///< kDense16: the numbers are bf16; else fp16.
  float multiplier = 1;             ///< scale = stored scale x this: stored ones are normalised.
  const float* values = nullptr;    ///< Of all codes, exactly; null for kDense16.
  const uint32_t* table = nullptr;  ///< Byte planes for PRMT: [bf16, fp16][low, high][16 bytes].
  int table_exponent = 0;           ///< The table's values are those of the codes / 2^this.
  int offset = 0;                   ///< kInt4: value = code - offset.
  int k = 0;
  int n = 0;
};

inline constexpr int kStripsOfBlock = kBlockOutputs / kStripOutputs;

/// Bytes from the first tile to tile `tile` of strip `strip`.
MARLIN_HOST_DEVICE int64_t TileOffset(const TileView& view, int strip, int tile) {
  const int64_t before = static_cast<int64_t>(strip / kStripsOfBlock) * view.tiles_of_strip + tile;
  return (before * kStripsOfBlock + strip % kStripsOfBlock) * view.tile_bytes;
}

/// Stored scales are normalised to a largest magnitude of [2^15, 2^16). Decoded weights then carry
/// powers of two that the finished sum is multiplied with:
///   decoded code = value x 2^decode, scale operand = stored x 2^(-decode - shift),
///   weight in the matrix unit = value x stored x 2^-shift
/// The shifts keep every operand in range: |stored| < 2^16, fp16 < 2^16, bf16 < 2^128.
struct CodeExponents {
  int decode;
  int shift;
};
MARLIN_HOST_DEVICE constexpr CodeExponents ExponentsOf(CodeKind kind, bool bf16) {
  switch (kind) {
    case CodeKind::kFp4:
      return bf16 ? CodeExponents{-126, 16} : CodeExponents{-14, 14};
    case CodeKind::kE4M3:
      return bf16 ? CodeExponents{-120, 16} : CodeExponents{-8, 9};
    case CodeKind::kE5M2:
      return bf16 ? CodeExponents{-112, 16} : CodeExponents{0, 16};
    case CodeKind::kInt4:
      return bf16 ? CodeExponents{0, 16} : CodeExponents{0, 5};
    case CodeKind::kInt8:
      return bf16 ? CodeExponents{0, 16} : CodeExponents{0, 9};
    case CodeKind::kDense16:
      return {0, 0};
    default:
      return bf16 ? CodeExponents{0, 16} : CodeExponents{0, 1};
  }
}

}  // namespace marlin::cuda
