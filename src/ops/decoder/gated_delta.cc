#include "marlin/recurrent.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "ops/decoder/decoder_checks.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
namespace {

constexpr int64_t kMaxConvWidth = 16;

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
  if (s.conv_width < 1 || s.conv_width > kMaxConvWidth) {
    return Invalid(fmt::format("conv_width: expected 1..{}, got {}", kMaxConvWidth, s.conv_width));
  }
  return StateElements(s) < 0 ? Invalid("sizes: a state is too large") : Status();
}

Status CheckF32(const char* name, const TensorView& view, const Shape& expected) {
  MARLIN_RETURN_IF_ERROR(CheckActivations(name, view, expected));
  if (view.dtype() == DType::kF32) return {};
  return Invalid(fmt::format("{}: expected f32, got {}", name, DTypeName(view.dtype())));
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
  MARLIN_RETURN_IF_ERROR(CheckF32("conv", weights.conv, {s.channels(), s.conv_width}));
  if (!weights.conv.IsContiguous()) return Invalid("conv: must be contiguous");
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("log_decay", weights.log_decay, s.value_heads, true));
  MARLIN_RETURN_IF_ERROR(
      CheckRequiredVector("decay_bias", weights.decay_bias, s.value_heads, true));
  MARLIN_RETURN_IF_ERROR(CheckRequiredVector("norm", weights.norm, s.value_dim, true));
  return CheckEpsilon(weights.epsilon);
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

/// Bytes of a slab; -1 if they overflow.
int64_t SlabBytes(const RecurrentStates& states) {
  return (Checked(states.slab_pages) * Checked(states.page_stride) * Checked(sizeof(float)))
      .Take()
      .value_or(-1);
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

/// Checks that `out` shares no memory with anything else of the call.
Status CheckApart(const MutableTensorView& out, const GatedDeltaInputs& inputs,
                  const GatedDeltaWeights& weights, const RecurrentRows& rows,
                  const RecurrentStates& states) {
  const std::pair<const char*, TensorView> others[] = {
      {"queries", inputs.queries},
      {"keys", inputs.keys},
      {"values", inputs.values},
      {"gates", inputs.gates},
      {"writes", inputs.writes},
      {"decays", inputs.decays},
      {"conv", weights.conv},
      {"log_decay", weights.log_decay},
      {"decay_bias", weights.decay_bias},
      {"norm", weights.norm},
      {"positions", rows.positions},
      {"first_rows", rows.first_rows},
      {"pages", rows.pages},
  };
  for (const auto& [name, view] : others) {
    MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("out", out, name, view));
  }
  const ByteRange written(out);
  const int64_t bytes = SlabBytes(states);
  const bool overlaps = std::ranges::any_of(states.slabs, [&](const void* slab) {
    return slab != nullptr && written.Overlaps(ByteRange({slab, DType::kU8, {bytes}}));
  });
  return overlaps ? Invalid("out: overlaps the states") : Status();
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
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, {count, sizes.value_heads, sizes.value_dim}));
  if (out.dtype() == DType::kF16) return Invalid("out: expected f32 or bf16, got f16");
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
