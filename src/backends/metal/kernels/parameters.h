// The contract between host and kernels: the layout of prepared weights, the indices of function
// constants and buffers, and the parameters. Compiles as C++20 and as Metal Shading Language.
//
// Prepared weights are strips (n8 tiles) of 8 outputs x all k, divided into chunks of 128 k:
//
//   [strips][chunks] chunks of 128 * bits bytes; a chunk holds 32 codes per lane of a simdgroup.
//   A lane owns a pair of elements in every simdgroup_matrix fragment (FragmentRow and
//   FragmentColumn below); its codes are pairs p = 4 s + j (s: blocks of 32 k, j: 0..3) of
//     outputs FragmentColumn + {0, 1},  k = 32 s + 4 FragmentRow + j
//   so j numbers four fragments whose row r is k = 32 s + 4 r + j, and the 8 elements of A that a
//   lane needs for those four are consecutive in memory.
//
// The two codes of a pair are 16 bits apart (32-bit codes: in two words), so that masks and logic
// on one word decode both:
//   2 bits   word s / 2, at bit 8 (s % 2) + 2 j           3 bits   the same, and a third word with
//   4 bits   word s, at bit 4 j                                    the high bits, at bit 4 s + j
//   8 bits   word 2 s + j / 2, at bit 8 (j % 2)           16, 32   word p, words 2 p and 2 p + 1
//   fp4      word s: exponent and mantissa of a code at bit 9 - 3 j, its sign at bit 15 - j, so
//            that the first pair is two halves, and the others are one or two shifts away from it
//   tables   of 4 bits: word s, at bit 8 j, and the second code at bit 8 j + 4
//
// 2:4 weights of 4 bits (kSparse4) take 3 bits each, and are stored as 3-bit words are. The pairs
// of a block s are one block of four k of each output: half a word of kept codes,
//   word s / 2, from bit 16 (s % 2) on: first and second of the one output, then of the other
// and 8 bits of metadata (docs/formats/sparse_24.md), one nibble per output,
//   third word, from bit 8 s on
// Codes are stored XORed with the format's code of value 0, and the table is permuted to match.
//
// Words are stored [vectors of 4 words][32 lanes][4], so a simdgroup loads 512 contiguous bytes;
// 2-bit words as [32 lanes][2], followed by the third words of 3-bit codes as [32 lanes].
// Scales, zero points and biases are [strips][groups][8 outputs]. n is padded to whole strips and k
// to whole chunks, with code 0 and scale 0; A counts as zero beyond k.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_PARAMETERS_H_

#include "plan/integers/both_languages.h"

namespace marlin {
namespace kernels {

MARLIN_SHARED int kStripOutputs = 8;
MARLIN_SHARED int kChunkK = 128;
MARLIN_SHARED int kBlockK = 32;  ///< A quarter of a chunk: four fragments of 8 k.
MARLIN_SHARED int kLanes = 32;

/// MARLIN_CONSTANT_CODE_BITS of 2:4 weights of 4 bits.
MARLIN_SHARED int kSparse4 = 24;
/// The bits of a code, and those that a weight takes on average.
MARLIN_INLINE int CodeBits(int constant_bits) {
  return constant_bits == kSparse4 ? 4 : constant_bits;
}
MARLIN_INLINE int StoredBits(int constant_bits) {
  return constant_bits == kSparse4 ? 3 : constant_bits;
}

MARLIN_SHARED int kRooflineVectors = 4;  ///< 16-byte loads in flight per thread.
MARLIN_SHARED int kRooflineSums = 8;     ///< Accumulator fragments per simdgroup.

/// Row and first column of a lane's pair of elements in an 8x8 fragment. Observed on Apple GPUs but
/// undocumented, so the device's self-test verifies it. Kernels without fragments use it only as
/// the order of the packed layout.
MARLIN_INLINE int FragmentRow(int lane) { return (lane & 16) / 4 + lane / 2 % 4; }
MARLIN_INLINE int FragmentColumn(int lane) { return (lane & 8) / 2 + lane % 2 * 2; }
/// The bits in which lanes of one FragmentColumn differ.
MARLIN_SHARED int kRowBits = 2 | 4 | 16;

/// How codes are decoded. Formats without a decoder of their own use kCodesTable.
enum CodeKind {
  kCodesTable,    ///< table[code]; up to 8 bits.
  kCodesFp4,      ///< e2m1
  kCodesInteger,  ///< code - Parameters::code_offset
  kCodesE4M3,
  kCodesE5M2,
  kCodesBf16,
  kCodesF16,
  kCodesF32,
};

/// Element types in memory.
enum ElementType { kElementF32, kElementBf16, kElementF16, kElementE8M0, kElementE4M3 };

/// The second parameter of a group, in addition to its scale.
enum GroupExtra { kExtraNone, kExtraZeros, kExtraBiases };

/// MARLIN_CONSTANT_GROUP_LOG2 of matrices with one group: k >> kOneGroup is 0.
MARLIN_SHARED int kOneGroup = 31;

/// The run of k that is known to share a scale.
enum GroupSpan {
  kSpanNone,   ///< No scales.
  kSpanBlock,  ///< group_size is a multiple of 16: the 4 k of a lane in a block share a scale.
  kSpanChunk,  ///< group_size is a multiple of 128, or there is one group: whole chunks do.
};

// Indices of the function constants, all of type int. Attributes take literals, hence macros.
#define MARLIN_CONSTANT_CODE_KIND 0
#define MARLIN_CONSTANT_CODE_BITS 1
#define MARLIN_CONSTANT_SCALE_TYPE 2
#define MARLIN_CONSTANT_GROUP_EXTRA 3
#define MARLIN_CONSTANT_GROUP_SPAN 4
#define MARLIN_CONSTANT_INPUT_TYPE 5     // Activation type.
#define MARLIN_CONSTANT_ALIGNED_INPUT 6  // Rows of A are 16-byte aligned.
#define MARLIN_CONSTANT_OUTPUT_TYPE 7
#define MARLIN_CONSTANT_PARTIAL 8  // Raw sums go to the workspace (split-K partials).
#define MARLIN_CONSTANT_BIAS_TYPE 9
#define MARLIN_CONSTANT_HAS_BIAS 10
#define MARLIN_CONSTANT_ACTIVATION 11  // marlin::Activation
#define MARLIN_CONSTANT_HAS_ROW_WEIGHT 12
#define MARLIN_CONSTANT_GATED 13
#define MARLIN_CONSTANT_GATHERED 14        // Rows of A are gathered (Input::gather).
#define MARLIN_CONSTANT_GATE_LIMITED 15    // GateOptions::limit is not 0; kernels of experts only.
#define MARLIN_CONSTANT_EXTRA_TYPE 16      // Type of zero points or biases.
#define MARLIN_CONSTANT_GLOBAL_DIVIDES 17  // Scales are divided by the global scale.
#define MARLIN_CONSTANT_KEY_TYPE 18        // For attention, as the three below.
#define MARLIN_CONSTANT_VALUE_TYPE 19
#define MARLIN_CONSTANT_PAGED_KEYS 20     // Keys and values are in pages, not in tensors.
#define MARLIN_CONSTANT_ALIGNED_KEYS 21   // Every four features of keys and values are aligned.
#define MARLIN_CONSTANT_GROUP_LOG2 22     // log2 of group_size; 0: no power of two; kOneGroup.
#define MARLIN_CONSTANT_WHOLE_K 23        // k is a multiple of 128.
#define MARLIN_CONSTANT_WHOLE_M 24        // m is a multiple of the rows of a threadgroup.
#define MARLIN_CONSTANT_INTEGER_ZEROS 25  // Codes and zero points are integers.
#define MARLIN_CONSTANT_COUNT 26

// Indices of the buffers. Absent operands are bound to a buffer that is not read.
#define MARLIN_BUFFER_CODES 0
#define MARLIN_BUFFER_SCALES 1
#define MARLIN_BUFFER_EXTRAS 2  // Zero points or biases, of type MARLIN_CONSTANT_EXTRA_TYPE.
#define MARLIN_BUFFER_TABLE 3   // f32 [2^bits]
#define MARLIN_BUFFER_INPUT 4
#define MARLIN_BUFFER_OUTPUT 5    // Or split-K partials: f32 [splits][m][n].
#define MARLIN_BUFFER_PARTIALS 6  // Input of marlin_finish.
#define MARLIN_BUFFER_BIAS 7
#define MARLIN_BUFFER_ROW_WEIGHT 8
#define MARLIN_BUFFER_PARAMETERS 9
// marlin_gather_gemv: the matrix of each row, and the global scale of each matrix.
#define MARLIN_BUFFER_MATRIX_IDS 10
#define MARLIN_BUFFER_GLOBAL_SCALES 11

struct Parameters {
  MARLIN_INT64 input_stride;   ///< Elements from row to row.
  MARLIN_INT64 output_stride;  ///< Unused for split-K partials.
  /// From column to column. Only marlin_dequantize uses it; other outputs have contiguous columns.
  MARLIN_INT64 output_column_stride;
  MARLIN_INT32 m;
  MARLIN_INT32 n;
  MARLIN_INT32 k;
  MARLIN_INT32 chunks;  ///< ceil(k / 128)
  MARLIN_INT32 groups;
  MARLIN_INT32 group_size;
  MARLIN_INT32 code_offset;
  float global_scale;
  MARLIN_INT32 splits;          ///< Splits of k (split-K).
  MARLIN_INT32 steps_of_split;  ///< Chunks, or blocks of 32 k, per split but the last.
  MARLIN_INT32 units;           ///< Staged: work units, each one split of one tile.
  MARLIN_INT32 units_of_group;  ///< Staged: work units per threadgroup but the last.
};

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_PARAMETERS_H_
