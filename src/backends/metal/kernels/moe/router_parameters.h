// The contract between host and kernels for routers. Compiles as C++20 and as Metal Shading
// Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_ROUTER_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_ROUTER_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

/// The room that threadgroups have: of most routers' kernels, and of those for more experts. Larger
/// routers run on the host.
MARLIN_SHARED int kFewRouterExperts = 1024;
MARLIN_SHARED int kMostRouterExperts = 2560;
MARLIN_SHARED int kMostRouterGroups = 128;
MARLIN_SHARED int kRouterSimdgroups = 8;  ///< In a threadgroup of moe_router_topk_fused.

/// RouterOptions::Scoring.
enum RouterScoring { kScoreSoftmax, kScoreSoftmaxOfChosen, kScoreSigmoid };

struct RouterParameters {
  Parameters product;          ///< x and the router's matrix; read by moe_router_topk_fused.
  MARLIN_INT64 logits_stride;  ///< Elements from row to row.
  MARLIN_INT64 ids_stride;
  MARLIN_INT64 weights_stride;
  MARLIN_INT32 experts;
  MARLIN_INT32 top_k;
  MARLIN_INT32 scoring;
  MARLIN_INT32 normalize;
  MARLIN_INT32 groups;
  MARLIN_INT32 top_groups;
  MARLIN_INT32 best_of_group;
  MARLIN_INT32 has_choice_bias;
  MARLIN_INT32 has_scales;
  float scaling_factor;
  float least_sum;
};

// What a launch reports is the least of its keys: of a choice bias that is NaN, its index; then,
// from `experts` on, RouterKeys per row: of a logit 2 * index, 1 more if it is +Inf and not NaN; of
// a row without a finite logit the last one.
MARLIN_INLINE MARLIN_INT32 RouterKeys(MARLIN_INT32 experts) { return 2 * experts + 1; }

// Indices of the buffers, besides MARLIN_BUFFER_CODES, _INPUT, _BIAS and _PARAMETERS.
#define MARLIN_BUFFER_ROUTER_ERROR 1    // The least key, from the largest number on.
#define MARLIN_BUFFER_ROUTER_SCALES 2   // f32 [experts]; read if has_scales.
#define MARLIN_BUFFER_ROUTER_IDS 5      // i32 [rows][top_k]
#define MARLIN_BUFFER_ROUTER_WEIGHTS 6  // f32 [rows][top_k]
#define MARLIN_BUFFER_CHOICE_BIAS 8     // f32 [experts]; read if has_choice_bias.

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_ROUTER_PARAMETERS_H_
