// The layout of prepared weights in device memory: tiles of 32 outputs x 128 k in MMA fragment
// order, each followed by its scales.
//
//   [blocks of 128 outputs][tiles of 128 k][n-tiles of 32 outputs: 4] tiles, so that one bulk copy
//   brings the weights of a k-iteration to a CTA of the WGMMA kernel:
//     tile  = [half of 64 k: 2][16 outputs: 2] fragment blocks, then the parameters
//     block = 32 lanes x 32 codes; lane 4 g + t holds, for step j of 16 k, the 8 codes of one
//             m16n8k16 (or wgmma m64) A fragment:
//               pair p = outputs g + 8 (p & 1), k = 16 j + 2 t + 8 (p >> 1) + {0, 1}
//     parameters = [groups in the tile][g: 8][outputs g, g + 8, g + 16, g + 24] of 16 bits: scales,
//             then zeros or biases in the same order where the format has them
//
// A group longer than 128 repeats its scale in every tile. Weights whose group size is not a
// multiple of 16 are not tiled (WeightTraits::tiled is false) and are read in the canonical layout.
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
inline constexpr int kBlockOutputs = 128;  ///< Padding of n: the CTA tile of the WGMMA kernel.
inline constexpr int kGroupBytes = kStripOutputs * 2;

/// How codes are packed into words and decoded; formats of one kind differ in their tables.
enum class CodeKind : uint8_t {
  kFp4,     ///< Bits permuted so that shifts and masks give 16-bit floats.
  kInt4,    ///< Nibbles, value = code - offset.
  kTable4,  ///< Nibbles, 16 values.
  kTable3,  ///< A two-bit plane and a one-bit plane, 8 values.
  kTable2,  ///< 4 values.
  kE4M3,    ///< Bytes.
  kE5M2,
  kInt8,     ///< Bytes, value = (code ^ offset) - offset.
  kDense16,  ///< Unquantized bf16 or fp16.
};

/// A tile's codes, and whether it stores all of them or only those that 2:4 sparsity keeps
/// (sparse_layout.h).
struct TileKind {
  CodeKind codes = CodeKind::kFp4;
  bool sparse = false;

  friend constexpr bool operator==(const TileKind&, const TileKind&) = default;
};

/// A TileKind as a type, by which kernels are instantiated (plan/instances.def).
template <CodeKind kCodesOfTiles, bool kTilesAreSparse>
struct TilesOfKind {
  static constexpr CodeKind kCodes = kCodesOfTiles;
  static constexpr bool kSparse = kTilesAreSparse;
};

/// The weight parameters that a kernel is instantiated for: absent ones cost nothing.
enum class ParameterUse : uint8_t {
  kOneScale,  ///< One group per tile, scales only (or integer zeros of kInt4).
  kScales,    ///< Several groups per tile.
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

/// Bytes of a lane's 32 codes, of a fragment block, and of a tile's codes.
MARLIN_HOST_DEVICE constexpr int LaneBytes(int bits) { return 4 * bits; }
MARLIN_HOST_DEVICE constexpr int BlockBytes(int bits) { return 32 * LaneBytes(bits); }
MARLIN_HOST_DEVICE constexpr int TileCodeBytes(int bits) { return 4 * BlockBytes(bits); }

/// Offset in words of word `word` of lane `lane`'s 32 codes within a fragment block. Lanes read 16
/// bytes at a time (8 for the two-bit plane, 4 for the one-bit plane), each run of lanes
/// contiguous.
MARLIN_HOST_DEVICE constexpr int WordOffset(int bits, int lane, int word) {
  if (bits == 2) return lane * 2 + word;
  if (bits == 3) return word < 2 ? lane * 2 + word : 64 + lane;
  return (word / 4) * 128 + lane * 4 + word % 4;
}

/// The second parameter of a weight: zeros (fp16) are subtracted from codes before scaling, biases
/// (of the scales' type) are added after it.
enum class ZeroKind { kNone, kZeros, kBiases };

/// Tiled weights of one matrix. Plain data, passed by value.
struct TileView {
  const uint8_t* tiles = nullptr;
  int tiles_of_strip = 0;  ///< Tiles along k.
  int tile_bytes = 0;
  int groups_per_tile = 1;  ///< 1, 2, 4 or 8; 0 for kDense16.
  ZeroKind zero_kind = ZeroKind::kNone;
  bool integer_zeros = false;    ///< All zeros are integers from 0 to 127.
  bool bf16_parameters = false;  ///< Scales (and biases) are bf16, not fp16.
  bool bf16_codes = false;       ///< kDense16: the numbers are bf16, not fp16.
  float multiplier = 1;          ///< scale = stored scale x this: stored scales are normalized.
  float divisor = 0;             ///< If not 0: scale = stored scale / this, and multiplier is near.
  const float* values = nullptr;    ///< Exact value of every code; null for kDense16.
  const uint32_t* table = nullptr;  ///< Byte planes for PRMT: [bf16, fp16][low, high][16 bytes].
  int table_exponent = 0;           ///< `table` holds value / 2^this.
  int offset = 0;                   ///< Offset of kInt4 and kInt8 codes; kInt8: 0 or 128.
  int k = 0;
  int n = 0;
};

/// Whether kernels read the tiles of both matrices alike; the matrices may differ in n and values.
inline bool SameTileLayout(const TileView& a, const TileView& b) {
  return a.k == b.k && a.tile_bytes == b.tile_bytes && a.groups_per_tile == b.groups_per_tile &&
         a.zero_kind == b.zero_kind && a.integer_zeros == b.integer_zeros &&
         a.bf16_parameters == b.bf16_parameters && a.bf16_codes == b.bf16_codes &&
         a.table_exponent == b.table_exponent && a.offset == b.offset;
}

inline constexpr int kStripsOfBlock = kBlockOutputs / kStripOutputs;

/// Byte offset of tile `tile` of n-tile `strip`.
MARLIN_HOST_DEVICE int64_t TileOffset(const TileView& view, int strip, int tile) {
  const int64_t before = static_cast<int64_t>(strip / kStripsOfBlock) * view.tiles_of_strip + tile;
  return (before * kStripsOfBlock + strip % kStripsOfBlock) * view.tile_bytes;
}

/// Stored scales are normalized to a largest magnitude in [2^15, 2^16). Decoded weights then carry
/// powers of two, which the epilogue's multiplier undoes:
///   decoded code = value x 2^decode, scale operand = stored x 2^(-decode - shift),
///   weight operand of the MMA = value x stored x 2^-shift
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
/// Codes that decode to tiny numbers are multiplied by activations times 2 to this, so that sums
/// stay in the range of fp32 for activations below 2^63; where every weight is multiplied by its
/// scale (ParameterUse::kAll), the persistent kernel's do below 2^43.
MARLIN_HOST_DEVICE constexpr int ActivationExponentOf(const CodeExponents& exponents) {
  return exponents.decode < -64 ? 64 : 0;
}

}  // namespace marlin::cuda
