#include <fmt/core.h>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/recurrent.h"
#include "ops/decoder/recurrent_checks.h"
#include "ops/device/device.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
namespace {

/// The elements of a state; -1 if they overflow.
int64_t StateElements(const GatedDeltaSizes& s) {
  const Checked channels = Checked(2) * Checked(s.key_heads) * Checked(s.key_dim) +
                           Checked(s.value_heads) * Checked(s.value_dim);
  const Checked kept = Checked(s.conv_width - 1) * channels + Checked(31);
  const Checked state = Checked(s.value_heads) * Checked(s.key_dim) * Checked(s.value_dim);
  return (kept + state).Take() ? s.state_elements() : -1;
}

Status CheckSizes(const GatedDeltaSizes& s) {
  if (s.key_heads < 1 || s.value_heads < 1 || s.value_heads % s.key_heads != 0) {
    return Invalid(fmt::format("sizes: {} value heads are not a multiple of {} key heads",
                               s.value_heads, s.key_heads));
  }
  if (s.key_dim < 1 || s.value_dim < 1) {
    return Invalid(fmt::format("sizes: heads of {} and {} features", s.key_dim, s.value_dim));
  }
  MARLIN_RETURN_IF_ERROR(CheckConvWidth(s.conv_width, 1));
  return StateElements(s) < 0 ? Invalid("sizes: a state is too large") : Status();
}

Status CheckInputs(const GatedDeltaInputs& inputs, const GatedDeltaSizes& s, int64_t rows) {
  const int64_t heads = s.value_heads / s.key_heads;
  const Shape keys{rows, s.key_heads, s.key_dim};
  const Shape values{rows, s.key_heads, heads * s.value_dim};
  const Shape factors{rows, s.key_heads, heads};
  MARLIN_RETURN_IF_ERROR(CheckF32("queries", inputs.queries, keys));
  MARLIN_RETURN_IF_ERROR(CheckF32("keys", inputs.keys, keys));
  MARLIN_RETURN_IF_ERROR(CheckF32("values", inputs.values, values));
  MARLIN_RETURN_IF_ERROR(CheckF32("gates", inputs.gates, values));
  MARLIN_RETURN_IF_ERROR(CheckF32("writes", inputs.writes, factors));
  return CheckF32("decays", inputs.decays, factors);
}

Status CheckParameters(const GatedDeltaWeights& weights, const GatedDeltaSizes& s) {
  MARLIN_RETURN_IF_ERROR(CheckConvolution(weights.conv, s.channels(), s.conv_width));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("log_decay", weights.log_decay, s.value_heads, true));
  MARLIN_RETURN_IF_ERROR(
      CheckRequiredVector("decay_bias", weights.decay_bias, s.value_heads, true));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("norm", weights.norm, s.value_dim, true));
  return CheckEpsilon(weights.epsilon);
}

Status CheckApart(const MutableTensorView& out, const GatedDeltaInputs& inputs,
                  const GatedDeltaWeights& weights, const RecurrentRows& rows,
                  const RecurrentStates& states) {
  const CallView others[] = {{"queries", inputs.queries},
                             {"keys", inputs.keys},
                             {"values", inputs.values},
                             {"gates", inputs.gates},
                             {"writes", inputs.writes},
                             {"decays", inputs.decays},
                             {"conv", weights.conv},
                             {"log_decay", weights.log_decay},
                             {"decay_bias", weights.decay_bias},
                             {"norm", weights.norm}};
  return CheckApart(out, others, rows, states);
}

}  // namespace

Status GatedDelta(const Device& device, const GatedDeltaInputs& inputs,
                  const GatedDeltaWeights& weights, const RecurrentRows& rows,
                  const RecurrentStates& states, const MutableTensorView& out,
                  Determinism determinism, void* stream) {
  const GatedDeltaSizes& sizes = weights.sizes;
  MARLIN_RETURN_IF_ERROR(CheckSizes(sizes));
  MARLIN_RETURN_IF_ERROR(CheckRank("out", out, 3));
  const int64_t count = out.dim(0);
  MARLIN_RETURN_IF_ERROR(CheckMixed(out, {count, sizes.value_heads, sizes.value_dim}));
  MARLIN_RETURN_IF_ERROR(CheckInputs(inputs, sizes, count));
  MARLIN_RETURN_IF_ERROR(CheckParameters(weights, sizes));
  MARLIN_RETURN_IF_ERROR(CheckRows(rows, count));
  MARLIN_RETURN_IF_ERROR(CheckStates(states, sizes.state_elements()));
  MARLIN_RETURN_IF_ERROR(CheckKnown(determinism));
  MARLIN_RETURN_IF_ERROR(CheckApart(out, inputs, weights, rows, states));
  if (rows.pages.dim(0) == 0) return {};
  return RunOperation(
      device, GatedDeltaCall{inputs, weights, sizes, rows, states, out, determinism}, stream);
}

}  // namespace marlin
