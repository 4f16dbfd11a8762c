// simdgroup_matrix fragments: 8x8 elements, two per lane.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_

#include <metal_simdgroup_matrix>

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

constant constexpr int kSide = 8;

using metal::simdgroup_float8x8;

// Access to a lane's two elements. thread_elements() does not return a vector of two: in Apple's
// header it is a vector of all 64 elements of the matrix, of which a lane holds the first two.

template <typename T>
static inline float2 ElementsOf(metal::simdgroup_matrix<T, 8, 8> fragment) {
  return float2(float(fragment.thread_elements()[0]), float(fragment.thread_elements()[1]));
}

static inline simdgroup_float8x8 FragmentOf(float2 elements) {
  simdgroup_float8x8 fragment;
  fragment.thread_elements()[0] = elements.x;
  fragment.thread_elements()[1] = elements.y;
  return fragment;
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_
