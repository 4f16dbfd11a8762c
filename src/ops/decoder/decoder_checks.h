// Argument checks shared by the decoder operations.
#pragma once

#include <cstdint>

#include "base/view_checks.h"
#include "marlin/decoder.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "ops/device/checks.h"

namespace marlin {

Status CheckRank(const char* name, const TensorView& view, int rank);

/// Checks for contiguous i32 of a shape.
Status CheckInt32(const char* name, const TensorView& view, const Shape& expected);

/// CheckNoOverlap of an output from index vectors; a byte-range test settles most calls.
inline Status CheckNoOverlapWithIndices(const char* out_name, const TensorView& out,
                                        const char* name, const TensorView& numbers) {
  if (!ByteRange(out).Overlaps(ByteRange(numbers))) return {};
  return CheckNoOverlap(out_name, out, name, numbers, false);
}

/// CheckVector, but required unless it has no elements.
Status CheckRequiredVector(const char* name, const TensorView& view, int64_t count, bool f32_only);

/// Checks that the epsilon of a norm is a number and not negative.
Status CheckEpsilon(float epsilon);

/// Checks the frequencies of RoPE for the heads x [tokens, heads, head_dim].
Status CheckRotary(const char* name, const MutableTensorView& x, const RotaryEmbedding& rotary);

/// Checks the window, and the sinks (one per head) if any.
Status CheckAttentionOptions(const AttentionOptions& options, int64_t heads);

}  // namespace marlin
