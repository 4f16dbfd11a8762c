// Checks of arguments that the decoder operations share.
#pragma once

#include "marlin/decoder.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

Status CheckRank(const char* name, const TensorView& view, int rank);

/// Contiguous i32 of this shape.
Status CheckNumbers(const char* name, const TensorView& view, const Shape& expected);

/// The window, and sinks for so many heads where there are any.
Status CheckAttentionOptions(const AttentionOptions& options, int64_t heads);

}  // namespace marlin
