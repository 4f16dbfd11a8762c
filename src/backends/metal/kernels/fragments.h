// Matrix fragments of simdgroups: 8x8 elements, two of each lane.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_FRAGMENTS_H_

#include <metal_simdgroup_matrix>

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

constant constexpr int kSide = 8;

using metal::simdgroup_float8x8;

// A lane's two elements. What thread_elements() returns is no vector of two: Apple's header has a
// vector of all 64 elements of the matrix there, of which a lane holds the first two.

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
