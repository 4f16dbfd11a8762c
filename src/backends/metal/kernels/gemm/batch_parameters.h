// The contract between host and kernels for batches: products of one shape in one launch. Compiles
// as C++20 and as Metal Shading Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_BATCH_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_BATCH_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

MARLIN_SHARED int kMostMatrices = 16;  ///< In one launch.

/// Strides are the bytes from matrix to matrix.
struct BatchParameters {
  Parameters product;  ///< The same for every matrix except its global scale.
  MARLIN_INT64 codes;
  MARLIN_INT64 scales;
  MARLIN_INT64 extras;
  MARLIN_INT64 input;
  MARLIN_INT64 output;  ///< The partials' if the launch writes them.
  MARLIN_INT64 bias;
  MARLIN_INT64 row_weight;
  MARLIN_INT64 partials;
  float global_scales[kMostMatrices];
};

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_BATCH_PARAMETERS_H_
