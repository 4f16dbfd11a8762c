// The contract between host and marlin_gather_gemv. Compiles as C++20 and as MSL.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_GATHER_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_GATHER_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

struct GatherParameters {
  Parameters product;        ///< A matrix; m: rows of A.
  MARLIN_INT64 codes_bytes;  ///< From matrix to matrix, as the two below.
  MARLIN_INT64 scales_bytes;
  MARLIN_INT64 extras_bytes;
  MARLIN_INT32 matrices;
  MARLIN_INT32 ids_of_row;  ///< Consecutive ids that share a row of A.
};

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_GATHER_PARAMETERS_H_
