// The CPU's packed weight layout: one copy, shared by all instruction sets.
//
// n is divided into blocks of 16 rows (a panel row is one output column n), k into chunks of 128. A
// chunk of a block is a sequence of 64-byte vectors of 32 16-bit words. Word w of a row holds the
// codes of k = w + 32 j (slices j = 0..3) of the chunk at bits `bits * j`, so that
//   - shifting words right by bits * j leaves 32 consecutive k of one output (an AMX A row),
//   - shifting 32-bit lanes by bits * j, or 16 + bits * j, leaves 16 even, or odd, k.
// Bits above a code need no masking: lookup tables are replicated over the unused index bits.
//
//   bits  vectors per chunk  row r of the block
//    4    16                 vector r
//    3    12                 r % 4 < 3: vector 3 (r / 4) + r % 4, low 12 bits of each word;
//                            r % 4 == 3: the top 4 bits of those three vectors, first one lowest
//    2    8                  vector r / 2, low byte of each word for even r, high byte for odd r
//    6    24                 bits 0..3 as a chunk of 4 bits, then bits 4 and 5 as one of 2 bits
//    5    20                 vector r: slices 0 to 2, and at bit 15 bit 4 of slice 3, whose bits
//                            0..3 are at bit 4 (r % 4) of vector 16 + r / 4
//    8    32                 vectors 2r, 2r + 1 of 64 k each; word w: k = w low byte, w + 32 high
//    16   64                 vectors 4r .. 4r + 3 of 32 k each; word w: k = w
//    32   128                vectors 8r .. 8r + 7: the even k of a slice of 32, then its odd k
//
// 2:4 weights of 4 bits take 3/4 of that: 16 rows of 32 bytes of kept codes, then 16 rows of 16
// bytes of metadata. Byte i of a row of codes has kept code i of the first 64 k in its low nibble
// and kept code i of the other 64 k in its high one; the metadata is as in
// docs/formats/sparse_24.md. A code is stored XORed with the format's code of value 0, and the
// value table is permuted to match, so that a pruned weight is code 0 in every format.
//
// k is padded to a multiple of 128 and n to a multiple of 16, with code 0 and scale 0. Scales, zero
// points and biases are [block][group][16] in their stored types; groups cover the padded k. With
// two levels of scales, super scales and super biases are [block][super group][16].
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned_buffer.h"
#include "marlin/weights.h"

namespace marlin::cpu {

inline constexpr int kBlockRows = 16;
inline constexpr int kChunkK = 128;
inline constexpr int kSliceK = 32;
inline constexpr int kVectorBytes = 64;
/// KC: k whose group parameters are widened at a time; a decoded fp32 panel of 8 rows is 32 KiB.
inline constexpr int64_t kPassK = 1024;

/// PanelView::bits of 2:4 weights of 4 bits.
inline constexpr int kSparse4 = -4;
constexpr bool IsSparse(int panel_bits) { return panel_bits < 0; }
inline bool HasSparsePanels(Format format) { return GetFormatInfo(format).bits == -kSparse4; }
/// The bits of a code, and those that a weight takes on average.
constexpr int CodeBits(int panel_bits) { return IsSparse(panel_bits) ? -panel_bits : panel_bits; }
constexpr int StoredBits(int panel_bits) {
  return IsSparse(panel_bits) ? CodeBits(panel_bits) / 2 + 1 : panel_bits;
}

/// Whether the codes of a format of 5 or 6 bits are kept as they are: integers, which need
/// no table.
inline bool HasSplitPanels(Format format) {
  return format == Format::kInt6 || format == Format::kU6 || format == Format::kInt5 ||
         format == Format::kU5;
}
/// Whether the codes of a row lie in several vectors.
constexpr bool IsSplit(int panel_bits) { return panel_bits == 5 || panel_bits == 6; }

/// Bytes of one (block, chunk) of codes.
constexpr int64_t ChunkBytes(int panel_bits) {
  return int64_t{kBlockRows} * kChunkK * StoredBits(panel_bits) / 8;
}

/// Bytes of the vectors that a split row has to itself, which come before those that rows share.
inline constexpr int64_t kRestOffset = ChunkBytes(4);

/// Bytes of the kept codes of a row of a chunk, which come before the metadata of all rows.
inline constexpr int64_t kKeptBytes = 32;
inline constexpr int64_t kMetadataBytes = 16;
inline constexpr int64_t kMetadataOffset = kBlockRows * kKeptBytes;
static_assert(kMetadataOffset + kBlockRows * kMetadataBytes == ChunkBytes(kSparse4));

/// The panels of one expert, as passed to kernels. Padding is readable: blocks * 16 rows and
/// chunks * 128 k.
struct PanelView {
  const uint8_t* codes;
  const void* scales;        ///< Null for unquantized formats.
  const void* zeros;         ///< Or null.
  const void* biases;        ///< Or null.
  const void* super_scales;  ///< Null with one level of scales.
  const void* super_biases;  ///< Or null.
  const float* table;        ///< [256] values of the codes, replicated over the unused index bits.
  float global_scale;
  bool global_scale_divides;
  Format format;
  ScaleType scale_type;
  ScaleType zero_type;
  int bits;            ///< Bits of a code, or kSparse4.
  int64_t group_size;  ///< A multiple of 16, or >= chunks * 128 for one group.
  int64_t groups;      ///< Padded.
  int64_t groups_per_super_group;
  int64_t super_groups;  ///< Padded; 0 with one level of scales.
  int64_t blocks;
  int64_t chunks;
};

}  // namespace marlin::cpu
