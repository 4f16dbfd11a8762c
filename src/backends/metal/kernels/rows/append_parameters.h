// The contract between host and kernels for writes to a paged KV cache. Compiles as C++20 and as
// Metal Shading Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ROWS_APPEND_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ROWS_APPEND_PARAMETERS_H_

#include "backends/metal/kernels/attention/attend_parameters.h"
#include "backends/metal/kernels/rows/rows_parameters.h"

namespace marlin {
namespace kernels {

/// The RMS norm of every head; `has` is 0 where there is none.
struct HeadNorm {
  MARLIN_INT32 has;
  MARLIN_INT32 type;  ///< ElementType of the weight.
};

/// RotateAndAppendCall, or without query heads AppendToCacheCall. Threadgroup (x, y) has heads of
/// row y - 1: queries, then keys, then values. The first one of y = 0 checks all rows.
struct AppendParameters {
  AttendParameters cache;  ///< The pages, and where heads are in them; window 1.
  RowStrides queries;
  RowStrides keys;
  RowStrides values;
  RotaryParameters rotary;
  MARLIN_INT32 heads;        ///< Query heads.
  MARLIN_INT32 value_heads;  ///< 0: values are a part of the keys.
  HeadNorm query_norm;
  HeadNorm key_norm;
  float epsilon;
  float one;  ///< As NormParameters::one.
};

// Indices of the buffers, besides MARLIN_BUFFER_OUTPUT, which has the queries, and the buffers of a
// paged cache.
#define MARLIN_BUFFER_NEW_KEYS 0
#define MARLIN_BUFFER_NEW_VALUES 1
#define MARLIN_BUFFER_QUERY_NORM 2
// MARLIN_BUFFER_FREQUENCIES is 3.
#define MARLIN_BUFFER_KEY_NORM 4

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ROWS_APPEND_PARAMETERS_H_
