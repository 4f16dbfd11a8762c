// What the host and the kernels agree on: the layout of prepared weights, the numbers of function
// constants and buffers, and the parameters. Compiles as C++20 and as Metal Shading Language.
//
// Prepared weights are strips of 8 outputs, cut into chunks of 128 k:
//
//   [strips][chunks] chunks of 128 * bits bytes; a chunk holds 32 codes of every lane of a
//   simdgroup lane = the place of a pair of elements in a fragment of simdgroup_matrix (FragmentRow
//   and FragmentColumn below); its codes are pairs p = 4 s + j (s: blocks of 32 k, j: 0..3) of
//     outputs FragmentColumn + {0, 1},  k = 32 s + 4 FragmentRow + j
//   so that j numbers four fragments whose row r is k = 32 s + 4 r + j, and the 8 elements of A
//   that one lane needs for those four are neighbours in memory.
//
// The two codes of a pair lie 16 bits apart (in two words, for 32 bits), so that masks and logic on
// one word decode both:
//   2 bits   word s / 2, at bit 8 (s % 2) + 2 j           3 bits   the same, and one word more with
//   4 bits   word s, at bit 4 j                                    the highest bits, at bit 4 s + j
//   8 bits   word 2 s + j / 2, at bit 8 (j % 2)           16, 32   word p, words 2 p and 2 p + 1
//
// Words lie [quads of words][32 lanes][4], so a simdgroup reads runs of 512 bytes; those of 2 bits
// [32 lanes][2], the third one of 3 bits behind them as [32 lanes].
// Scales, zeros and biases lie [strips][groups][8 outputs]. Outputs are padded to whole strips and
// k to whole chunks, with code 0 and scale 0; what lies beyond k is multiplied with zeros.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_PARAMETERS_H_

#if defined(__METAL_VERSION__)
#include <metal_stdlib>
#define MARLIN_INT32 int
#define MARLIN_INT64 long
#define MARLIN_SHARED constant constexpr
#define MARLIN_INLINE static inline
// In front of every loop over registers: an index that is not constant moves an array to memory.
#define MARLIN_UNROLL _Pragma("clang loop unroll(full)")
#else
#include <cstdint>
#define MARLIN_INT32 int32_t
#define MARLIN_INT64 int64_t
#define MARLIN_SHARED inline constexpr
#define MARLIN_INLINE constexpr
#endif

namespace marlin {
namespace kernels {

MARLIN_SHARED int kStripOutputs = 8;
MARLIN_SHARED int kChunkK = 128;
MARLIN_SHARED int kBlockK = 32;  ///< Of a chunk: four fragments of 8 k.
MARLIN_SHARED int kLanes = 32;

MARLIN_SHARED int kRooflineVectors = 4;  ///< Of 16 bytes, that a thread reads at once.
MARLIN_SHARED int kRooflineSums = 8;     ///< Fragments that a simdgroup adds products to.

/// Where a lane's pair of elements lies in an 8x8 fragment: observed on Apple's GPUs, documented
/// nowhere; the device's self-test compares it. Elsewhere it is just the order of the layout.
MARLIN_INLINE int FragmentRow(int lane) { return (lane & 16) / 4 + lane / 2 % 4; }
MARLIN_INLINE int FragmentColumn(int lane) { return (lane & 8) / 2 + lane % 2 * 2; }
/// Lanes of one FragmentColumn differ in these bits.
MARLIN_SHARED int kRowBits = 2 | 4 | 16;

/// How the codes of a format become numbers. Formats without a decoder of their own take kTable.
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

/// Types of elements in memory.
enum ElementType { kElementF32, kElementBf16, kElementF16, kElementE8M0, kElementE4M3 };

/// What stands beside scales.
enum GroupExtra { kExtraNone, kExtraZeros, kExtraBiases };

/// How many k surely share a scale.
enum GroupSpan {
  kSpanNone,   ///< No scales.
  kSpanBlock,  ///< Multiples of 16: the 4 k of a lane in a block.
  kSpanChunk,  ///< Multiples of 128, or one group in all.
};

// Numbers of function constants, all of type int. Attributes take literals, hence macros.
#define MARLIN_CONSTANT_CODE_KIND 0
#define MARLIN_CONSTANT_CODE_BITS 1
#define MARLIN_CONSTANT_SCALE_TYPE 2
#define MARLIN_CONSTANT_GROUP_EXTRA 3
#define MARLIN_CONSTANT_GROUP_SPAN 4
#define MARLIN_CONSTANT_INPUT_TYPE 5     // Of activations.
#define MARLIN_CONSTANT_ALIGNED_INPUT 6  // Rows of activations begin at multiples of 16 bytes.
#define MARLIN_CONSTANT_OUTPUT_TYPE 7
#define MARLIN_CONSTANT_PARTIAL 8  // Sums go to the workspace, unfinished.
#define MARLIN_CONSTANT_BIAS_TYPE 9
#define MARLIN_CONSTANT_HAS_BIAS 10
#define MARLIN_CONSTANT_ACTIVATION 11  // marlin::Activation
#define MARLIN_CONSTANT_HAS_ROW_WEIGHT 12
#define MARLIN_CONSTANT_GATED 13
#define MARLIN_CONSTANT_COUNT 14

// Numbers of buffers. What a product does not have is bound to something that is not read.
#define MARLIN_BUFFER_CODES 0
#define MARLIN_BUFFER_SCALES 1
#define MARLIN_BUFFER_EXTRAS \
  2  // Zeros (f16), or biases (of the scales' type, f16 for 8-bit scales).
#define MARLIN_BUFFER_TABLE 3  // f32 [2^bits]
#define MARLIN_BUFFER_INPUT 4
#define MARLIN_BUFFER_OUTPUT 5    // Or partial sums: f32 [splits][m][n].
#define MARLIN_BUFFER_PARTIALS 6  // What finishing reads.
#define MARLIN_BUFFER_BIAS 7
#define MARLIN_BUFFER_ROW_WEIGHT 8
#define MARLIN_BUFFER_PARAMETERS 9

struct Parameters {
  MARLIN_INT64 input_stride;   ///< Elements from row to row.
  MARLIN_INT64 output_stride;  ///< Unused for partial sums.
  /// From column to column: of marlin_dequantize alone, others have contiguous columns.
  MARLIN_INT64 output_column_stride;
  MARLIN_INT32 m;
  MARLIN_INT32 n;
  MARLIN_INT32 k;
  MARLIN_INT32 chunks;  ///< Of k: ceil(k / 128).
  MARLIN_INT32 groups;
  MARLIN_INT32 group_size;
  MARLIN_INT32 code_offset;
  float global_scale;
  MARLIN_INT32 splits;          ///< Parts of k with partial sums of their own.
  MARLIN_INT32 steps_of_split;  ///< Chunks, or blocks of 32 k, of each but the last.
  MARLIN_INT32 units;           ///< Striped: pairs of a tile and a split.
  MARLIN_INT32 units_of_group;  ///< Striped: of each threadgroup but the last.
};

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_PARAMETERS_H_
