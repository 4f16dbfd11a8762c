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

/// Elements k to k + 3 of a row, k a multiple of 4.
static inline float4 LoadInput(Input input, int row, int k, Parameters p) {
  float4 values = float4(0.0f);
  if (row >= p.m || k >= p.k) return values;
  const int stored = gathered ? input.gather[row] : row;
  const long at = long(stored) * p.input_stride + k;
  if (aligned_input && k + 4 <= p.k) return LoadQuad(input.data, input_type, at);
  MARLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (k + i < p.k) values[i] = LoadElement(input.data, input_type, at + i);
  }
  return values;
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ACTIVATIONS_H_
