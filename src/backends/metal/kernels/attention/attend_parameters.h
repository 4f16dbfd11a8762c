// The contract between host and kernels for attention. Compiles as C++20 and as Metal Shading
// Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

MARLIN_SHARED int kAttendSimdgroups = 8;
MARLIN_SHARED int kAttendThreads = kAttendSimdgroups * kLanes;
MARLIN_SHARED int kMergeThreads = 128;  ///< In a threadgroup of attend_merge.
/// Keys of positions [i * kSegmentKeys, (i + 1) * kSegmentKeys) have sums of their own, which are
/// merged in order: a row's bits depend on nothing else than its position.
MARLIN_SHARED int kSegmentKeys = 512;
/// Keys that are looked up at once. Pages hold a multiple of them.
MARLIN_SHARED int kBlockKeys = 32;
/// The most features of a key or value that attend_H_D has registers for, and attend_tile_D room.
MARLIN_SHARED int kMostAttendFeatures = 1024;
MARLIN_SHARED int kMostTileFeatures = 576;
MARLIN_SHARED int kTileKeys = 64;  ///< Keys of a step of attend_tile_D.
/// A tile of attend_tile_D has 32 rows, tokens x query heads of a KV head, with features up to the
/// first limit, 16 up to the second one, and 8 with more.
MARLIN_SHARED int kTileFeatures32 = 128;
MARLIN_SHARED int kTileFeatures16 = 256;
/// The most slabs of a paged cache: setBytes passes at most 4 KiB.
MARLIN_SHARED int kMostSlabs = 256;

/// Errors of a step's rows, in the order in which a sequence is checked. A report is the
/// first of them: {error, a, b, c}.
enum RowError {
  kRowsAreRight,
  kWrongFirstRows,     ///< a: the value at b.
  kNegativePosition,   ///< a: the position of row b.
  kWrongNextPosition,  ///< a: the position of row b, where c is expected.
  kNoBlock,            ///< a: the position of row b, which is beyond the block table.
  kNoPage,             ///< a: the page of block b of sequence c.
};

/// The rows of a step and the pages of its cache.
struct PagedRows {
  MARLIN_INT64 page_stride;    ///< Elements from page to page of a slab.
  MARLIN_INT64 first_element;  ///< Where this cache begins in a page.
  MARLIN_INT32 rows;
  MARLIN_INT32 sequences;
  MARLIN_INT32 blocks;
  MARLIN_INT32 page_tokens;
  MARLIN_INT32 slab_pages;
  MARLIN_INT32 slab_count;
  MARLIN_INT64 slabs[kMostSlabs];  ///< Addresses; 0: not allocated.
};

struct AttendParameters {
  // Strides in elements.
  MARLIN_INT64 query_stride;
  MARLIN_INT64 query_head_stride;
  MARLIN_INT64 out_stride;
  MARLIN_INT64 out_head_stride;
  MARLIN_INT64 key_stride;  ///< From position to position, of a page or of a tensor.
  MARLIN_INT64 key_head_stride;
  MARLIN_INT64 value_stride;
  MARLIN_INT64 value_head_stride;
  MARLIN_INT64 first_value;  ///< Element of a page where its values begin.
  /// Bytes from the start of MARLIN_BUFFER_ATTENDED. The queries are there, too, if the memory of
  /// both overlaps: otherwise query_offset is negative.
  MARLIN_INT64 query_offset;
  MARLIN_INT64 out_offset;
  MARLIN_INT32 kv_heads;
  MARLIN_INT32 group;  ///< Query heads of a KV head.
  MARLIN_INT32 key_dim;
  MARLIN_INT32 value_dim;
  MARLIN_INT32 window;  ///< 0: none.
  MARLIN_INT32 chunked;
  MARLIN_INT32 has_sinks;
  MARLIN_INT32 checks;  ///< The first threadgroup checks rows and pages.
  MARLIN_INT32 length;  ///< A tensor's positions, of which the rows have the last ones.
  /// The launch takes rows of sequences with at least `least_tokens` and at most `most_tokens`
  /// tokens. rows_of_sequence: index i is row i % rows_of_sequence of sequence i /
  /// rows_of_sequence; 0: it is row i.
  MARLIN_INT32 least_tokens;
  MARLIN_INT32 most_tokens;
  MARLIN_INT32 rows_of_sequence;
  MARLIN_INT32 first_index;  ///< The launch's first index or tile.
  MARLIN_INT32 head_parts;   ///< Threadgroups for the query heads of a KV head.
  MARLIN_INT32 segments;     ///< Threadgroups for the segments of a row; 1: one takes all of them.
  float query_scale;
  float softcap;  ///< 0: none.
  PagedRows pages;
};

/// Floats of a segment's sums of a query head: largest score, sum of weights, weighted values.
MARLIN_INLINE MARLIN_INT64 PartialFloats(MARLIN_INT32 value_dim) { return 2 + value_dim; }

// Indices of the buffers. Absent ones are bound to a buffer that is not read.
#define MARLIN_BUFFER_QUERIES 0
#define MARLIN_BUFFER_KEYS 1  // A tensor's, as MARLIN_BUFFER_VALUES.
#define MARLIN_BUFFER_VALUES 2
#define MARLIN_BUFFER_ATTENDED 3
#define MARLIN_BUFFER_SINKS 4         // f32 [heads]
#define MARLIN_BUFFER_SUMS 5          // f32 [indices][heads][segments][PartialFloats]
#define MARLIN_BUFFER_POSITIONS 6     // i32 [rows]; this and all below: of a paged cache.
#define MARLIN_BUFFER_FIRST_ROWS 7    // i32 [sequences + 1]
#define MARLIN_BUFFER_BLOCK_TABLES 8  // i32 [sequences][blocks]
#define MARLIN_BUFFER_ROW_ERROR 10    // A report, zeros before the launch.

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_ATTEND_PARAMETERS_H_
