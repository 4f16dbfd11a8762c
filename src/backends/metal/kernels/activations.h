// Loads of A. Elements outside [m, k] are zero and are not read.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ACTIVATIONS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ACTIVATIONS_H_

#include "backends/metal/kernels/constants.h"
#include "backends/metal/kernels/elements.h"

namespace marlin {
namespace kernels {

/// The memory of A.
struct Input {
  device const uchar* data;
  device const int* gather;  ///< If `gathered`: row i of A is row gather[i] of the data.
};

/// The memory of a row of A.
static inline device const uchar* RowOf(Input input, int row, Parameters p) {
  const int stored = gathered ? input.gather[row] : row;
  return input.data + long(stored) * p.input_stride * (input_type == kElementF32 ? 4 : 2);
}

/// Elements 4 quad to 4 quad + 3 of a row.
static inline float4 LoadOfRow(device const uchar* row, int quad, Parameters p) {
  if (aligned_input && whole_k) return QuadAt(row, input_type, uint(quad));
  float4 values = float4(0.0f);
  const int k = 4 * quad;
  if (!whole_k && k >= p.k) return values;
  if (aligned_input && k + 4 <= p.k) return QuadAt(row, input_type, uint(quad));
  MARLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (whole_k || k + i < p.k) values[i] = LoadElement(row, input_type, k + i);
  }
  return values;
}

/// Elements k to k + 3 of a row, k a multiple of 4.
static inline float4 LoadInput(Input input, int row, int k, Parameters p) {
  if (!whole_m && row >= p.m) return float4(0.0f);
  return LoadOfRow(RowOf(input, row, p), k / 4, p);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ACTIVATIONS_H_
