// Matrix fragments of simdgroups: 8x8 elements, two of each lane.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_

#include <metal_simdgroup_matrix>

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

constant constexpr int kSide = 8;

using metal::simdgroup_float8x8;

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_
