// Checks of a view's shape, strides and address, before anything reads or writes its memory.
// Each error names the argument and both numbers.
#pragma once

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// f32, bf16 or f16.
inline bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16;
}

/// Checks that dimensions are not negative, that a view with elements has an address aligned to its
/// element type, and that its extent in bytes does not overflow. Precondition: a known DType.
Status CheckData(const char* name, const TensorView& view);

/// CheckData without the alignment, for code that reads elements at any address.
Status CheckReadable(const char* name, const TensorView& view);

/// Checks that no two elements share memory, as an output requires: dimensions nest in some order
/// without overlapping. Negative strides only with `may_run_backwards`.
Status CheckDistinctElements(const char* name, const TensorView& view, bool may_run_backwards);

/// Whether two views share bytes. Exact for views into the same rows (columns of one matrix); other
/// interleaved views count as overlapping. Precondition: CheckReadable of both.
bool Overlap(const TensorView& a, const TensorView& b);

/// Whether two views have the same elements in the same order.
bool SameElements(const TensorView& a, const TensorView& b);

/// Checks that an output shares no element with an input, or with `or_same` is the input itself.
/// Precondition: CheckReadable of both.
Status CheckNoOverlap(const char* out_name, const TensorView& out, const char* name,
                      const TensorView& view, bool or_same);

}  // namespace marlin
