// Checks of a view's shape, strides and address, before anything reads or writes its memory.
// Each error names the argument and both numbers.
#pragma once

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// Dimensions that are not negative, an address where there are elements, aligned to the element,
/// and strides whose reach in bytes can be counted. Precondition: a DType that is known.
Status CheckData(const char* name, const TensorView& view);

/// CheckData without the alignment, for code that reads elements at any address.
Status CheckReadable(const char* name, const TensorView& view);

/// Strides that give every element a place of its own, as an output needs: dimensions nest in some
/// order, and none reaches into the next. Negative strides only where `may_run_backwards`.
Status CheckDistinctElements(const char* name, const TensorView& view, bool may_run_backwards);

/// Whether two views share bytes. Knows views into the same rows (columns of one matrix); other
/// interleaved views count as overlapping. Precondition: CheckReadable of both.
bool Overlap(const TensorView& a, const TensorView& b);

/// Whether two views are the same elements in the same order.
bool SameElements(const TensorView& a, const TensorView& b);

/// An output that shares no element with an input; with `or_same` it may be the input itself.
/// Precondition: CheckReadable of both.
Status CheckApart(const char* out_name, const TensorView& out, const char* name,
                  const TensorView& view, bool or_same);

}  // namespace marlin
