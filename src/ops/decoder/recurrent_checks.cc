#include "ops/decoder/recurrent_checks.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"

namespace marlin {
namespace {

/// Bytes of a slab; -1 if they overflow.
int64_t SlabBytes(const RecurrentStates& states) {
  return (Checked(states.slab_pages) * Checked(states.page_stride) * Checked(sizeof(float)))
      .Take()
      .value_or(-1);
}

}  // namespace

Status CheckF32(const char* name, const TensorView& view, const Shape& expected) {
  MARLIN_RETURN_IF_ERROR(CheckActivations(name, view, expected));
  if (view.dtype() == DType::kF32) return {};
  return Invalid(fmt::format("{}: expected f32, got {}", name, DTypeName(view.dtype())));
}

Status CheckConvolution(const TensorView& conv, int64_t channels, int64_t width) {
  MARLIN_RETURN_IF_ERROR(CheckF32("conv", conv, {channels, width}));
  return conv.IsContiguous() ? Status() : Invalid("conv: must be contiguous");
}

Status CheckConvWidth(int64_t width, int64_t least) {
  if (width >= least && width <= kMaxConvWidth) return {};
  return Invalid(fmt::format("conv_width: expected {}..{}, got {}", least, kMaxConvWidth, width));
}

Status CheckMixed(const MutableTensorView& out, const Shape& expected) {
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, expected));
  return out.dtype() == DType::kF16 ? Invalid("out: expected f32 or bf16, got f16") : Status();
}

Status CheckRows(const RecurrentRows& rows, int64_t count) {
  MARLIN_RETURN_IF_ERROR(CheckRank("first_rows", rows.first_rows, 1));
  const int64_t sequences = rows.first_rows.dim(0) - 1;
  if (sequences < 0 || (sequences == 0 && count > 0)) {
    return Invalid(fmt::format("first_rows: {} sequences have no {} rows", sequences, count));
  }
  MARLIN_RETURN_IF_ERROR(CheckInt32("positions", rows.positions, {count}));
  MARLIN_RETURN_IF_ERROR(CheckInt32("first_rows", rows.first_rows, {sequences + 1}));
  return CheckInt32("pages", rows.pages, {sequences, 2});
}

Status CheckStates(const RecurrentStates& states, int64_t elements) {
  if (states.slab_pages < 1 || states.first_element < 0 || SlabBytes(states) < 0 ||
      elements > states.page_stride || states.first_element > states.page_stride - elements) {
    return Invalid(fmt::format("states: {} elements from {} on do not fit in {} pages of {}",
                               elements, states.first_element, states.slab_pages,
                               states.page_stride));
  }
  if (states.first_element % 32 != 0) {
    return Invalid(
        fmt::format("first_element: expected a multiple of 32, got {}", states.first_element));
  }
  return {};
}

Status CheckApart(const MutableTensorView& out, std::span<const CallView> others,
                  const RecurrentRows& rows, const RecurrentStates& states) {
  const CallView indices[] = {
      {"positions", rows.positions}, {"first_rows", rows.first_rows}, {"pages", rows.pages}};
  for (const std::span<const CallView> views : {others, std::span<const CallView>(indices)}) {
    for (const auto& [name, view] : views) {
      MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("out", out, name, view));
    }
  }
  const ByteRange written(out);
  const int64_t bytes = SlabBytes(states);
  const bool overlaps = std::ranges::any_of(states.slabs, [&](const void* slab) {
    return slab != nullptr && written.Overlaps(ByteRange({slab, DType::kU8, {bytes}}));
  });
  return overlaps ? Invalid("out: overlaps the states") : Status();
}

}  // namespace marlin
