// Argument checks shared by the operations of recurrent.h.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/recurrent.h"
#include "ops/decoder/decoder_checks.h"

namespace marlin {

/// The widest causal convolution.
inline constexpr int64_t kMaxConvWidth = 16;

struct CallView {
  const char* name;
  TensorView view;
};

/// CheckActivations of f32.
Status CheckF32(const char* name, const TensorView& view, const Shape& expected);
/// Checks the weights of a causal convolution.
Status CheckConvolution(const TensorView& conv, int64_t channels, int64_t width);
Status CheckConvWidth(int64_t width, int64_t least);
/// Checks `out`.
Status CheckMixed(const MutableTensorView& out, const Shape& expected);
/// `count`: the rows of the step.
Status CheckRows(const RecurrentRows& rows, int64_t count);
Status CheckStates(const RecurrentStates& states, int64_t elements);
/// Checks that `out` shares no memory with anything else of the call.
Status CheckApart(const MutableTensorView& out, std::span<const CallView> others,
                  const RecurrentRows& rows, const RecurrentStates& states);

}  // namespace marlin
