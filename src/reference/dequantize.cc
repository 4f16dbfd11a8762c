#include "reference/dequantize.h"

#include <bit>
#include <cmath>
#include <string>

#include "base/macros.h"
#include "reference/elements.h"

namespace marlin::reference {
namespace {

// Codes run along k: 32 of them fill `bits` consecutive words of a column, lowest bits first. A
// code of 3, 5 or 6 bits may straddle two words.
uint32_t ReadCode(const uint32_t* words, int64_t n_count, int bits, int64_t k, int64_t n) {
  const int64_t bit = (k % 32) * bits;
  const int64_t word = (k / 32) * bits + bit / 32;
  const int shift = static_cast<int>(bit % 32);
  uint64_t window = words[word * n_count + n];
  if (shift + bits > 32) window |= static_cast<uint64_t>(words[(word + 1) * n_count + n]) << 32;
  return static_cast<uint32_t>(window >> shift) & ((1u << bits) - 1u);
}

/// The value of weight k of a 2:4 matrix: 0, or that of one of the two codes of its block.
double SparseValue(const QuantizedWeights& weights, std::span<const float> table, int64_t expert,
                   int64_t k, int64_t n) {
  const WeightsSpec& spec = weights.spec;
  const int bits = GetFormatInfo(spec.format).bits;
  const int64_t runs = (spec.k + 31) / 32;
  const uint32_t* values = weights.codes.As<uint32_t>() + expert * runs * (bits / 2) * spec.n;
  const uint32_t* metadata = weights.metadata.As<uint32_t>() + expert * runs * spec.n;
  const int64_t block = k / 4;
  const uint32_t nibble = metadata[block / 8 * spec.n + n] >> (block % 8 * 4) & 15u;
  const auto position = static_cast<uint32_t>(k % 4);
  if (position == (nibble & 3u)) return table[ReadCode(values, spec.n, bits, block * 2, n)];
  if (position == nibble >> 2) return table[ReadCode(values, spec.n, bits, block * 2 + 1, n)];
  return 0.0;
}

Status CheckCount(const char* name, const TensorView& view, int64_t expected) {
  if (view.ElementCount() >= expected && (expected == 0 || !view.empty())) return Status();
  return Status(Code::kInvalidArgument, std::string(name) + ": expected " +
                                            std::to_string(expected) + " elements, got shape " +
                                            view.shape().ToString());
}

Status CheckViews(const QuantizedWeights& weights, int64_t expert, int64_t groups) {
  const WeightsSpec& spec = weights.spec;
  if (expert < 0 || expert >= spec.experts) {
    return Status(Code::kInvalidArgument, "expert: expected below " + std::to_string(spec.experts) +
                                              ", got " + std::to_string(expert));
  }
  const bool quantized = GetFormatInfo(spec.format).quantized;
  const int64_t rows = quantized ? WordsAlongK(spec) : spec.k;
  const int64_t scales = spec.experts * groups * spec.n;
  MARLIN_RETURN_IF_ERROR(CheckCount("codes", weights.codes, spec.experts * rows * spec.n));
  MARLIN_RETURN_IF_ERROR(CheckCount("scales", weights.scales, scales));
  MARLIN_RETURN_IF_ERROR(CheckCount("zeros", weights.zeros, spec.has_zeros ? scales : 0));
  MARLIN_RETURN_IF_ERROR(CheckCount("biases", weights.biases, spec.has_biases ? scales : 0));
  const bool sparse = spec.sparsity == Sparsity::k24;
  MARLIN_RETURN_IF_ERROR(
      CheckCount("metadata", weights.metadata,
                 sparse ? spec.experts * MetadataWordsAlongK(spec.k) * spec.n : 0));
  MARLIN_RETURN_IF_ERROR(CheckCount("permutation", weights.permutation,
                                    spec.has_permutation ? spec.experts * spec.k : 0));
  MARLIN_RETURN_IF_ERROR(CheckCount("input_scale", weights.input_scale,
                                    spec.has_input_scale ? spec.experts * spec.k : 0));
  const int64_t super_scales = spec.experts * SuperGroupCount(spec) * spec.n;
  MARLIN_RETURN_IF_ERROR(CheckCount("super_scales", weights.super_scales, super_scales));
  MARLIN_RETURN_IF_ERROR(
      CheckCount("super_biases", weights.super_biases, spec.has_biases ? super_scales : 0));
  return CheckCount("global_scale", weights.global_scale, spec.has_global_scale ? spec.experts : 0);
}

void DecodeUnquantized(const QuantizedWeights& weights, int64_t expert, DenseWeights* dense) {
  const int64_t count = dense->k * dense->n;
  for (int64_t i = 0; i < count; ++i) {
    const double value =
        LoadElement(weights.codes.data(), weights.codes.dtype(), expert * count + i);
    dense->value[static_cast<size_t>(i)] = value;
    dense->magnitude[static_cast<size_t>(i)] = std::abs(value);
  }
}

/// The element of Sylvester's Hadamard matrix: rows and columns have the sign of the parity of the
/// bits that they share.
double HadamardSign(int64_t row, int64_t column) {
  return std::popcount(static_cast<uint64_t>(row & column)) % 2 == 0 ? 1.0 : -1.0;
}

/// diag(input_scale) * H * dense. Magnitudes add, as the terms of a sum do.
void TransformRows(const QuantizedWeights& weights, int64_t expert, DenseWeights* dense) {
  const WeightsSpec& spec = weights.spec;
  const auto k = static_cast<size_t>(spec.k);
  const auto n = static_cast<size_t>(spec.n);
  if (spec.input_hadamard > 0) {
    const double norm = 1.0 / std::sqrt(static_cast<double>(spec.input_hadamard));
    const DenseWeights stored = *dense;
    for (size_t i = 0; i < k * n; ++i) {
      const auto row = static_cast<int64_t>(i / n);
      const int64_t first = row / spec.input_hadamard * spec.input_hadamard;
      double value = 0;
      double magnitude = 0;
      for (int64_t j = 0; j < spec.input_hadamard; ++j) {
        const size_t from = static_cast<size_t>(first + j) * n + i % n;
        value += HadamardSign(row - first, j) * stored.value[from];
        magnitude += stored.magnitude[from];
      }
      dense->value[i] = value * norm;
      dense->magnitude[i] = magnitude * norm;
    }
  }
  if (!spec.has_input_scale) return;
  const float* const scale = weights.input_scale.As<float>() + expert * spec.k;
  for (size_t i = 0; i < k * n; ++i) {
    dense->value[i] *= scale[i / n];
    dense->magnitude[i] *= std::abs(scale[i / n]);
  }
}

}  // namespace

Result<DenseWeights> Dequantize(const QuantizedWeights& weights, int64_t expert) {
  const WeightsSpec& spec = weights.spec;
  const FormatInfo& info = GetFormatInfo(spec.format);
  const int64_t groups =
      info.quantized && spec.k > 0 ? (spec.k + spec.group_size - 1) / spec.group_size : 0;
  MARLIN_RETURN_IF_ERROR(CheckViews(weights, expert, groups));

  DenseWeights dense{spec.k, spec.n, {}, {}};
  dense.value.resize(static_cast<size_t>(spec.k * spec.n));
  dense.magnitude.resize(dense.value.size());
  if (!info.quantized) {
    DecodeUnquantized(weights, expert, &dense);
    return dense;
  }

  const std::span<const float> table =
      weights.codebook.empty() ? FormatValues(spec.format) : std::span(weights.codebook);
  const double global = spec.has_global_scale ? weights.global_scale.As<float>()[expert] : 1.0;
  const uint32_t* words =
      weights.codes.As<uint32_t>() + expert * WordsAlongK(spec.format, spec.k) * spec.n;
  for (int64_t k = 0; k < spec.k; ++k) {
    const int64_t row =
        spec.has_permutation ? weights.permutation.As<int32_t>()[expert * spec.k + k] : k;
    if (row < 0 || row >= spec.k) {
      return Status(
          Code::kInvalidArgument,
          "permutation: expected below " + std::to_string(spec.k) + ", got " + std::to_string(row));
    }
    for (int64_t n = 0; n < spec.n; ++n) {
      const int64_t at = (expert * groups + k / spec.group_size) * spec.n + n;
      const double value = spec.sparsity == Sparsity::k24
                               ? SparseValue(weights, table, expert, k, n)
                               : table[ReadCode(words, spec.n, info.bits, k, n)];
      const auto super_of = [&](const TensorView& super_scales) {
        if (spec.super_group_size == 0) return 1.0;
        const int64_t super_group = expert * SuperGroupCount(spec) + k / spec.super_group_size;
        return LoadElement(super_scales.data(), super_scales.dtype(), super_group * spec.n + n);
      };
      const double stored = LoadElement(weights.scales.data(), weights.scales.dtype(), at) *
                            super_of(weights.super_scales);
      const double scale = spec.global_scale_divides ? stored / global : stored * global;
      const double zero =
          spec.has_zeros ? LoadElement(weights.zeros.data(), weights.zeros.dtype(), at) : 0.0;
      const double bias = spec.has_biases
                              ? LoadElement(weights.biases.data(), weights.biases.dtype(), at) *
                                    super_of(weights.super_biases)
                              : 0.0;
      const auto i = static_cast<size_t>(row * spec.n + n);
      dense.value[i] = scale * (value - zero) + bias;
      dense.magnitude[i] = std::abs(scale) * (std::abs(value) + std::abs(zero)) + std::abs(bias);
    }
  }
  TransformRows(weights, expert, &dense);
  return dense;
}

}  // namespace marlin::reference
