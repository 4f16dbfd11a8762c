#include "layout/plain_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/packing.h"
#include "layout/parameters.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"

namespace marlin {
namespace {

constexpr int64_t kTileColumns = 16;

bool HasWholeValues(const FormatInfo& info) {
  bool whole = true;
  for (const float value : FormatValues(info.format)) whole = whole && value == std::trunc(value);
  return whole;
}

/// The code of every code's value in another format. Precondition: it holds them all.
std::array<uint8_t, 256> TranslationOf(Format from, Format to) {
  std::array<uint8_t, 256> translation{};
  const std::span<const float> values = FormatValues(to);
  size_t code = 0;
  for (const float value : FormatValues(from)) {
    size_t found = 0;
    // The signs of zeros differ, too.
    while (!(values[found] == value && std::signbit(values[found]) == std::signbit(value))) ++found;
    translation[code++] = static_cast<uint8_t>(found);
  }
  return translation;
}

void Copy(const TensorView& from, void* to) {
  if (from.empty()) return;
  std::memcpy(to, from.data(), static_cast<size_t>(from.ByteCount()));
}

/// Everything but codes, scales and biases.
void CopyOthers(const QuantizedWeights& from, WeightsBuffer* to) {
  Copy(from.zeros, to->zeros);
  Copy(from.global_scale, to->global_scale);
  Copy(from.metadata, to->metadata);
  Copy(from.permutation, to->permutation);
  Copy(from.input_scale, to->input_scale);
  to->weights.codebook = from.codebook;
}

/// fp32 products of i8 [experts, groups, n] and super scales [experts, super groups, n].
void Multiply(const WeightsSpec& spec, const TensorView& scales, const TensorView& super_scales,
              void* to) {
  const int64_t groups_per_super_group = spec.super_group_size / spec.group_size;
  const int64_t groups = GroupCount(spec);
  auto* out = static_cast<float*>(to);
  for (int64_t row = 0; row < spec.experts * groups; ++row) {
    const int64_t super_row =
        row / groups * SuperGroupCount(spec) + row % groups / groups_per_super_group;
    for (int64_t n = 0; n < spec.n; ++n) {
      *out++ =
          ParameterAt(super_scales, super_row * spec.n + n) * ParameterAt(scales, row * spec.n + n);
    }
  }
}

}  // namespace

Format WiderFormat(Format format) {
  const FormatInfo& info = GetFormatInfo(format);
  if (info.bits != 5 && info.bits != 6) return format;
  if (!HasWholeValues(info)) return Format::kFp8E4M3;
  return info.min_value < 0 ? Format::kS8 : Format::kU8;
}

WeightsSpec FlatSpec(WeightsSpec spec) {
  if (spec.super_group_size == 0) return spec;
  spec.super_group_size = 0;
  spec.scale_type = ScaleType::kF32;
  return spec;
}

WeightsSpec PlainSpec(WeightsSpec spec) {
  spec.sparsity = Sparsity::kDense;
  return FlatSpec(spec);
}

Result<QuantizedWeights> FlattenScales(const QuantizedWeights& weights) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  const WeightsSpec& spec = weights.spec;
  if (spec.super_group_size == 0) return weights;
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, AllocateWeights(FlatSpec(spec)));
  Copy(weights.codes, to.codes);
  CopyOthers(weights, &to);
  Multiply(spec, weights.scales, weights.super_scales, to.scales);
  if (spec.has_biases) Multiply(spec, weights.biases, weights.super_biases, to.biases);
  return std::move(to.weights);
}

Result<QuantizedWeights> WidenCodes(const QuantizedWeights& weights) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  WeightsSpec spec = weights.spec;
  spec.format = WiderFormat(spec.format);
  if (spec.format == weights.spec.format) return weights;
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, AllocateWeights(spec));
  const std::array<uint8_t, 256> translation = TranslationOf(weights.spec.format, spec.format);
  const int bits = GetFormatInfo(weights.spec.format).bits;
  const int64_t from_words = WordsAlongK(weights.spec.format, spec.k) * spec.n;
  const int64_t to_words = WordsAlongK(spec.format, spec.k) * spec.n;
  const int64_t stride = RoundUp(spec.k, kPackRun);
  std::vector<uint8_t> codes(static_cast<size_t>(spec.n > 0 ? kTileColumns * stride : 0));
  for (int64_t expert = 0; expert < spec.experts; ++expert) {
    for (int64_t first = 0; first < spec.n; first += kTileColumns) {
      const CodeColumns columns{codes.data(), stride, spec.k,
                                std::min(kTileColumns, spec.n - first)};
      UnpackColumns(bits, weights.codes.As<uint32_t>() + expert * from_words + first, spec.n,
                    columns);
      for (int64_t c = 0; c < columns.columns; ++c) {
        uint8_t* const column = codes.data() + c * stride;
        for (int64_t k = 0; k < spec.k; ++k) column[k] = translation[column[k]];
        std::fill(column + spec.k, column + stride, uint8_t{0});
      }
      PackColumns(8, columns, static_cast<uint32_t*>(to.codes) + expert * to_words + first, spec.n);
    }
  }
  CopyOthers(weights, &to);
  Copy(weights.scales, to.scales);
  Copy(weights.biases, to.biases);
  Copy(weights.super_scales, to.super_scales);
  Copy(weights.super_biases, to.super_biases);
  return std::move(to.weights);
}

Result<QuantizedWeights> ConvertTo(const WeightsSpec& spec, const QuantizedWeights& weights) {
  QuantizedWeights converted = weights;
  if (spec.sparsity != converted.spec.sparsity) {
    MARLIN_ASSIGN_OR_RETURN(converted, Expand24(converted));
  }
  if (spec.format != converted.spec.format) {
    MARLIN_ASSIGN_OR_RETURN(converted, WidenCodes(converted));
  }
  if (spec.super_group_size != converted.spec.super_group_size) {
    MARLIN_ASSIGN_OR_RETURN(converted, FlattenScales(converted));
  }
  return converted;
}

}  // namespace marlin
