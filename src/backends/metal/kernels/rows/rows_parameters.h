// The contract between host and kernels for operations on rows. Compiles as C++20 and as Metal
// Shading Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

/// Rows with contiguous columns, of a matrix, or of a tensor of rank 3. Strides count elements.
struct RowStrides {
  MARLIN_INT64 first;  ///< Bytes from the beginning of the buffer.
  MARLIN_INT64 outer;
  MARLIN_INT64 inner;  ///< From row to row of the second of three dimensions.
  /// The buffer is the output's, which has other columns of its rows, or is the same. Then there is
  /// no buffer of its own.
  MARLIN_INT32 in_output;
  MARLIN_INT32 unused;
};

/// Elementwise kernels: threadgroup (x, y, z) has columns of row y of z; the columns of a thread
/// are `step` apart.
struct RowParameters {
  RowStrides x;
  RowStrides other;
  RowStrides out;
  MARLIN_INT32 columns;
  MARLIN_INT32 step;
  float scale;  ///< AddTo and ScaleAndCap.
  float softcap;
  float gate_limit;  ///< GateOptions.
  float gate_alpha;
  MARLIN_INT32 has_sum;  ///< AddRowsCall.
  MARLIN_INT32 has_rows;
};

/// Ids or positions, which are valid from 0 to below `limit`.
struct IndexParameters {
  MARLIN_INT64 limit;
  MARLIN_INT32 count;
  MARLIN_INT32 wide;  ///< i64; otherwise i32.
};

struct LookUpParameters {
  RowParameters rows;
  IndexParameters ids;
};

/// Lookup in prepared weights.
struct LookUpWeightParameters {
  Parameters weights;
  IndexParameters ids;
};

/// Rows that have a simdgroup each or more, whose number depends on the columns alone, so that a
/// row's bits depend on nothing else.
struct NormParameters {
  RowStrides x;
  RowStrides block;
  RowStrides out;
  MARLIN_INT32 rows;
  MARLIN_INT32 of_outer;  ///< Rows of the second of three dimensions; 1 of a matrix.
  MARLIN_INT32 columns;
  MARLIN_INT32 simdgroups;  ///< That have a row. If it is 1, a threadgroup has kNormRows rows.
  float epsilon;
  float one;  ///< 1. Compilers do not know it (rows_norm.h).
};

MARLIN_SHARED int kNormRows = 4;  ///< Rows of a threadgroup, of narrow rows.
/// Rows up to this many columns have one simdgroup. Heads that have more are not normalized by
/// rotate_append.
MARLIN_SHARED int kNarrowColumns = 512;
MARLIN_SHARED int kNormColumns = 128;  ///< Columns that a simdgroup of a wider row has at least.
MARLIN_SHARED int kMostNormSimdgroups = 32;

MARLIN_INLINE MARLIN_INT32 NormSimdgroups(MARLIN_INT32 columns) {
  if (columns <= kNarrowColumns) return 1;
  const MARLIN_INT32 wanted = (columns - 1) / kNormColumns + 1;
  return wanted < kMostNormSimdgroups ? wanted : kMostNormSimdgroups;
}

/// RotaryEmbedding.
struct RotaryParameters {
  MARLIN_INT32 pairs;
  MARLIN_INT32 interleaved;
  float factor;
};

/// Simdgroups of a threadgroup of rows_rotary, each of which has a head of a token.
MARLIN_SHARED int kRotarySimdgroups = 8;

/// ApplyRotary: threadgroup (x, y) has heads of token y.
struct RotateParameters {
  RowStrides x;
  IndexParameters positions;
  RotaryParameters rotary;
  MARLIN_INT32 heads;
};

/// PositionScale, elementwise.
struct PositionParameters {
  RowParameters rows;
  IndexParameters positions;
  MARLIN_INT64 offset;
  MARLIN_INT64 period;
  float beta;
};

/// TransformColumnsCall. Strides count elements.
struct TransformParameters {
  MARLIN_INT64 from_row;
  MARLIN_INT64 from_column;
  MARLIN_INT64 to_row;
  MARLIN_INT64 to_column;
  MARLIN_INT32 columns;
  MARLIN_INT32 step;      ///< Between columns of a thread.
  MARLIN_INT32 hadamard;  ///< The size of the blocks.
  MARLIN_INT32 has_scale;
  MARLIN_INT32 has_permutation;
  MARLIN_INT32 inverse;
  float norm;  ///< 1 / sqrt(hadamard)
};

MARLIN_SHARED int kMostHadamard = 4096;  ///< 16 KiB of threadgroup memory.
MARLIN_SHARED int kTransformThreads = 256;

/// AdvanceTokensCall.
struct AdvanceParameters {
  MARLIN_INT32 rows;
  MARLIN_INT32 steps;
  MARLIN_INT32 stops;
};

MARLIN_SHARED int kAdvanceThreads = 256;

/// The first number of an error of operands: there is none.
MARLIN_SHARED int kNoError = -1;

// Indices of the buffers, besides MARLIN_BUFFER_INPUT, _OUTPUT and _PARAMETERS.
#define MARLIN_BUFFER_INDICES 7      // Ids, positions, slots, or weights of rows.
#define MARLIN_BUFFER_INDEX_ERROR 8  // Four i32, the first of which is kNoError before a launch.
#define MARLIN_BUFFER_ROW_OTHER 6    // The second input.
#define MARLIN_BUFFER_NORM_WEIGHT 3  // Its type: MARLIN_CONSTANT_SCALE_TYPE.
#define MARLIN_BUFFER_FREQUENCIES 3  // f32 [pairs]
#define MARLIN_BUFFER_TRANSFORM_SCALE 3  // f32 [columns]
// AdvanceTokens.
#define MARLIN_BUFFER_SAMPLED 0
#define MARLIN_BUFFER_STOP_IDS 1
#define MARLIN_BUFFER_NEXT_IDS 2
#define MARLIN_BUFFER_NEXT_POSITIONS 3
#define MARLIN_BUFFER_ADVANCED_ROWS 4
#define MARLIN_BUFFER_TOKEN_COUNTS 5
#define MARLIN_BUFFER_STEP_TOKENS 6

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_PARAMETERS_H_
