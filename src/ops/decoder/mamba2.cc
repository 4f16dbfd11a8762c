#include <fmt/core.h>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/recurrent.h"
#include "ops/decoder/recurrent_checks.h"
#include "ops/device/device.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
namespace {

/// Whether the elements of a state fit in an int64_t.
bool FitsState(const Mamba2Sizes& s) {
  const Checked features = Checked(s.heads) * Checked(s.head_dim);
  const Checked channels = features + Checked(2) * Checked(s.groups) * Checked(s.state_size);
  const Checked kept = Checked(s.conv_width - 1) * channels + Checked(31);
  return (kept + features * Checked(s.state_size)).Take().has_value();
}

Status CheckSizes(const Mamba2Sizes& s) {
  if (s.groups < 1 || s.heads < 1 || s.heads % s.groups != 0) {
    return Invalid(
        fmt::format("sizes: {} heads are not a multiple of {} groups", s.heads, s.groups));
  }
  if (s.head_dim < 1 || s.state_size < 1) {
    return Invalid(
        fmt::format("sizes: heads of {} features and states of {}", s.head_dim, s.state_size));
  }
  MARLIN_RETURN_IF_ERROR(CheckConvWidth(s.conv_width, 1));
  return FitsState(s) ? Status() : Invalid("sizes: a state is too large");
}

Status CheckInputs(const Mamba2Inputs& inputs, const Mamba2Sizes& s, int64_t rows) {
  const Shape heads{rows, s.heads, s.head_dim};
  const Shape groups{rows, s.groups, s.state_size};
  MARLIN_RETURN_IF_ERROR(CheckF32("gates", inputs.gates, heads));
  MARLIN_RETURN_IF_ERROR(CheckF32("values", inputs.values, heads));
  MARLIN_RETURN_IF_ERROR(CheckF32("keys", inputs.keys, groups));
  MARLIN_RETURN_IF_ERROR(CheckF32("queries", inputs.queries, groups));
  return CheckF32("steps", inputs.steps, {rows, s.heads});
}

Status CheckParameters(const Mamba2Weights& weights, const Mamba2Sizes& s) {
  MARLIN_RETURN_IF_ERROR(CheckConvolution(weights.conv, s.channels(), s.conv_width));
  MARLIN_RETURN_IF_ERROR(CheckVector("conv_bias", weights.conv_bias, s.channels(), true));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("log_decay", weights.log_decay, s.heads, true));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("step_bias", weights.step_bias, s.heads, true));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("skip", weights.skip, s.heads, true));
  MARLIN_RETURN_IF_ERROR(CheckVector("norm", weights.norm, s.features(), true));
  // Neither limit is NaN.
  if (!(weights.min_step >= 0 && weights.max_step >= weights.min_step)) {
    return Invalid(fmt::format("min_step, max_step: expected 0 <= {} <= {}", weights.min_step,
                               weights.max_step));
  }
  return CheckEpsilon(weights.epsilon);
}

Status CheckApart(const MutableTensorView& out, const Mamba2Inputs& inputs,
                  const Mamba2Weights& weights, const RecurrentRows& rows,
                  const RecurrentStates& states) {
  const CallView others[] = {{"gates", inputs.gates},
                             {"values", inputs.values},
                             {"keys", inputs.keys},
                             {"queries", inputs.queries},
                             {"steps", inputs.steps},
                             {"conv", weights.conv},
                             {"conv_bias", weights.conv_bias},
                             {"log_decay", weights.log_decay},
                             {"step_bias", weights.step_bias},
                             {"skip", weights.skip},
                             {"norm", weights.norm}};
  return CheckApart(out, others, rows, states);
}

}  // namespace

Status Mamba2(const Device& device, const Mamba2Inputs& inputs, const Mamba2Weights& weights,
              const RecurrentRows& rows, const RecurrentStates& states,
              const MutableTensorView& out, Determinism determinism, void* stream) {
  const Mamba2Sizes& sizes = weights.sizes;
  MARLIN_RETURN_IF_ERROR(CheckSizes(sizes));
  MARLIN_RETURN_IF_ERROR(CheckRank("out", out, 3));
  const int64_t count = out.dim(0);
  MARLIN_RETURN_IF_ERROR(CheckMixed(out, {count, sizes.heads, sizes.head_dim}));
  MARLIN_RETURN_IF_ERROR(CheckInputs(inputs, sizes, count));
  MARLIN_RETURN_IF_ERROR(CheckParameters(weights, sizes));
  MARLIN_RETURN_IF_ERROR(CheckRows(rows, count));
  MARLIN_RETURN_IF_ERROR(CheckStates(states, sizes.state_elements()));
  MARLIN_RETURN_IF_ERROR(CheckKnown(determinism));
  MARLIN_RETURN_IF_ERROR(CheckApart(out, inputs, weights, rows, states));
  if (rows.pages.dim(0) == 0) return {};
  return RunOperation(device, Mamba2Call{inputs, weights, sizes, rows, states, out, determinism},
                      stream);
}

}  // namespace marlin
