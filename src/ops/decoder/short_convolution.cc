#include <fmt/core.h>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/recurrent.h"
#include "ops/decoder/recurrent_checks.h"
#include "ops/device/device.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
namespace {

Status CheckSizes(const ShortConvolutionSizes& s) {
  if (s.channels < 1) return Invalid(fmt::format("sizes: {} channels", s.channels));
  MARLIN_RETURN_IF_ERROR(CheckConvWidth(s.conv_width, 2));
  const Checked kept = Checked(s.conv_width - 1) * Checked(s.channels) + Checked(31);
  return kept.Take() ? Status() : Invalid("sizes: a state is too large");
}

Status CheckApart(const MutableTensorView& out, const ShortConvolutionInputs& inputs,
                  const ShortConvolutionWeights& weights, const RecurrentRows& rows,
                  const RecurrentStates& states) {
  const CallView others[] = {{"values", inputs.values},
                             {"in_gates", inputs.in_gates},
                             {"out_gates", inputs.out_gates},
                             {"conv", weights.conv},
                             {"conv_bias", weights.conv_bias}};
  return CheckApart(out, others, rows, states);
}

}  // namespace

Status ShortConvolution(const Device& device, const ShortConvolutionInputs& inputs,
                        const ShortConvolutionWeights& weights, const RecurrentRows& rows,
                        const RecurrentStates& states, const MutableTensorView& out, void* stream) {
  const ShortConvolutionSizes& sizes = weights.sizes;
  MARLIN_RETURN_IF_ERROR(CheckSizes(sizes));
  MARLIN_RETURN_IF_ERROR(CheckRank("out", out, 2));
  const int64_t count = out.dim(0);
  const Shape shape{count, sizes.channels};
  MARLIN_RETURN_IF_ERROR(CheckMixed(out, shape));
  MARLIN_RETURN_IF_ERROR(CheckF32("values", inputs.values, shape));
  MARLIN_RETURN_IF_ERROR(CheckF32("in_gates", inputs.in_gates, shape));
  MARLIN_RETURN_IF_ERROR(CheckF32("out_gates", inputs.out_gates, shape));
  MARLIN_RETURN_IF_ERROR(CheckConvolution(weights.conv, sizes.channels, sizes.conv_width));
  MARLIN_RETURN_IF_ERROR(CheckVector("conv_bias", weights.conv_bias, sizes.channels, true));
  MARLIN_RETURN_IF_ERROR(CheckRows(rows, count));
  MARLIN_RETURN_IF_ERROR(CheckStates(states, sizes.state_elements()));
  MARLIN_RETURN_IF_ERROR(CheckApart(out, inputs, weights, rows, states));
  if (rows.pages.dim(0) == 0) return {};
  return RunOperation(device, ShortConvolutionCall{inputs, weights, sizes, rows, states, out},
                      stream);
}

}  // namespace marlin
