// The gated activation of an MLP.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_EXPERT_GATE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_EXPERT_GATE_H_

#include "backends/metal/kernels/epilogue.h"
#include "backends/metal/kernels/expert_parameters.h"

namespace marlin {
namespace kernels {

/// Clamps from above, except that NaNs stay NaNs even if the compiler assumes that there are none.
static inline float AtMost(float x, float limit) {
  const bool is_nan = (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u;
  return !is_nan && x > limit ? limit : x;
}

/// activation(gate) * up, or with a limit the clamped form of GateOptions.
static inline float GateProduct(float gate, float up, ExpertParameters p) {
  if (!gate_limited) return Activate(gate) * up;
  const float g = AtMost(gate, p.gate_limit);
  const float u = AtMost(-AtMost(-up, p.gate_limit), p.gate_limit);
  return (u + 1.0f) * TimesSigmoid(g, p.gate_alpha * g);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_EXPERT_GATE_H_
