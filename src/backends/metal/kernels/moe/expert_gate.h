// The gated activation of an MLP.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_GATE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_GATE_H_

#include "backends/metal/kernels/epilogue.h"
#include "backends/metal/kernels/moe/expert_parameters.h"

namespace marlin {
namespace kernels {

/// Clamps from above, except that NaNs stay NaNs even if the compiler assumes that there are none.
static inline float AtMost(float x, float limit) { return !IsNan(x) && x > limit ? limit : x; }

/// activation(gate) * up, or with a limit the clamped form of GateOptions.
static inline float GateProduct(float gate, float up, float limit, float alpha) {
  if (!gate_limited) return Activate(gate) * up;
  const float g = AtMost(gate, limit);
  const float u = AtMost(-AtMost(-up, limit), limit);
  return (u + 1.0f) * TimesSigmoid(g, alpha * g);
}

static inline float GateProduct(float gate, float up, ExpertParameters p) {
  return GateProduct(gate, up, p.gate_limit, p.gate_alpha);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_GATE_H_
