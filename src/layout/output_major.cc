// Stacked words that are stored by output feature.
#include <fmt/core.h>

#include <cstring>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "base/transpose.h"
#include "layout/weights_buffer.h"
#include "layout/weights_shapes.h"
#include "marlin/layout.h"

namespace marlin {
namespace {

Status CopyAs(const char* name, const TensorView& from, const TensorView& expected, void* to) {
  if (from.dtype() != expected.dtype() || !(from.shape() == expected.shape()) ||
      !from.IsContiguous()) {
    return Invalid(fmt::format("{}: expected contiguous {} {}, got {} {}", name,
                               DTypeName(expected.dtype()), expected.shape().ToString(),
                               DTypeName(from.dtype()), from.shape().ToString()));
  }
  if (from.ElementCount() > 0) {
    std::memcpy(to, from.data(), static_cast<size_t>(from.ByteCount()));
  }
  return {};
}

}  // namespace

Result<QuantizedWeights> FromOutputMajor(const WeightsSpec& spec, const TensorView& words,
                                         const TensorView& scales, const TensorView& zeros) {
  MARLIN_RETURN_IF_ERROR(CheckSpec(spec));
  WeightsSpec made = spec;
  made.has_zeros = !zeros.empty();
  const bool plain = GetFormatInfo(spec.format).quantized && spec.super_group_size == 0 &&
                     !spec.has_biases && !spec.has_global_scale && !TransformsInput(spec) &&
                     spec.sparsity == Sparsity::kDense;
  if (!plain) return Invalid("spec: expected a quantized format with scales, and zeros at most");
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(made));
  const int64_t rows = WordsAlongK(made);
  const Shape expected{made.experts, made.n, rows};
  if (words.dtype() != DType::kU32 || !(words.shape() == expected) || !words.IsContiguous()) {
    return Invalid(fmt::format("words: expected contiguous u32 {}, got {} {}", expected.ToString(),
                               DTypeName(words.dtype()), words.shape().ToString()));
  }
  for (int64_t e = 0; e < made.experts; ++e) {
    const int64_t first = e * made.n * rows;
    TransposeColumns(words.As<uint32_t>() + first, made.n, rows, 0, rows,
                     static_cast<uint32_t*>(buffer.codes) + first);
  }
  MARLIN_RETURN_IF_ERROR(CopyAs("scales", scales, buffer.weights.scales, buffer.scales));
  if (made.has_zeros) {
    MARLIN_RETURN_IF_ERROR(CopyAs("zeros", zeros, buffer.weights.zeros, buffer.zeros));
  }
  MARLIN_RETURN_IF_ERROR(Validate(buffer.weights));
  return std::move(buffer.weights);
}

}  // namespace marlin
