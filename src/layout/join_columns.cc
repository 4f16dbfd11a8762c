#include "layout/join_columns.h"

#include <algorithm>
#include <cstring>

#include "base/macros.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

/// Copies columns of a [k, n] matrix whose k is contiguous. Takes 32 columns at a time, k
/// outermost, so that source and destination stay in cache.
void CopyTransposed(const TensorView& source, const WeightColumns& part, int64_t to_stride,
                    uint8_t* to) {
  constexpr int64_t kColumns = 32;
  const int64_t size = DTypeBytes(source.dtype());
  for (int64_t c0 = 0; c0 < part.count; c0 += kColumns) {
    const int64_t end = std::min(c0 + kColumns, part.count);
    for (int64_t k = 0; k < source.dim(1); ++k) {
      for (int64_t c = c0; c < end; ++c) {
        const int64_t at = k * source.stride(1) + (part.first + c * part.step) * source.stride(2);
        std::memcpy(to + (k * to_stride + c) * size, source.As<uint8_t>() + at * size,
                    static_cast<size_t>(size));
      }
    }
  }
}

/// Copies one array, [experts, rows, n] in each part, into the joined array's rows.
void JoinArray(std::span<const WeightColumns> parts, const TensorView QuantizedWeights::*array,
               int64_t joined_n, void* to) {
  const TensorView& model = (*parts.front().weights).*array;
  if (model.ElementCount() == 0) return;
  const int64_t rows = model.dim(0) * model.dim(1);
  const int64_t size = DTypeBytes(model.dtype());
  int64_t column = 0;
  for (const WeightColumns& part : parts) {
    const TensorView& source = (*part.weights).*array;
    const int64_t n = source.dim(2);
    if (!source.IsContiguous()) {
      CopyTransposed(source, part, joined_n, static_cast<uint8_t*>(to) + column * size);
      column += part.count;
      continue;
    }
    for (int64_t row = 0; row < rows; ++row) {
      const auto* from = source.As<uint8_t>() + (row * n + part.first) * size;
      auto* target = static_cast<uint8_t*>(to) + (row * joined_n + column) * size;
      if (part.step == 1) {
        std::memcpy(target, from, static_cast<size_t>(part.count * size));
        continue;
      }
      for (int64_t i = 0; i < part.count; ++i) {
        std::memcpy(target + i * size, from + i * part.step * size, static_cast<size_t>(size));
      }
    }
    column += part.count;
  }
}

bool SameBytes(const TensorView& a, const TensorView& b) {
  return a.ElementCount() == b.ElementCount() &&
         (a.ElementCount() == 0 ||
          std::memcmp(a.data(), b.data(), static_cast<size_t>(a.ByteCount())) == 0);
}

}  // namespace

bool CanJoinColumns(const QuantizedWeights& a, const QuantizedWeights& b) {
  WeightsSpec spec = b.spec;
  spec.n = a.spec.n;
  return spec == a.spec && a.codebook == b.codebook &&
         (!a.spec.has_global_scale || SameBytes(a.global_scale, b.global_scale)) &&
         (!a.spec.has_permutation || SameBytes(a.permutation, b.permutation)) &&
         (!a.spec.has_input_scale || SameBytes(a.input_scale, b.input_scale));
}

Result<QuantizedWeights> JoinColumns(std::span<const WeightColumns> parts) {
  const QuantizedWeights& model = *parts.front().weights;
  WeightsSpec spec = model.spec;
  spec.n = 0;
  for (const WeightColumns& part : parts) spec.n += part.count;
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  JoinArray(parts, &QuantizedWeights::codes, spec.n, buffer.codes);
  JoinArray(parts, &QuantizedWeights::scales, spec.n, buffer.scales);
  JoinArray(parts, &QuantizedWeights::zeros, spec.n, buffer.zeros);
  JoinArray(parts, &QuantizedWeights::biases, spec.n, buffer.biases);
  JoinArray(parts, &QuantizedWeights::super_scales, spec.n, buffer.super_scales);
  JoinArray(parts, &QuantizedWeights::super_biases, spec.n, buffer.super_biases);
  JoinArray(parts, &QuantizedWeights::metadata, spec.n, buffer.metadata);
  if (spec.has_global_scale) {
    std::memcpy(buffer.global_scale, model.global_scale.data(),
                static_cast<size_t>(model.global_scale.ByteCount()));
  }
  if (spec.has_permutation) {
    std::memcpy(buffer.permutation, model.permutation.data(),
                static_cast<size_t>(model.permutation.ByteCount()));
  }
  if (spec.has_input_scale) {
    std::memcpy(buffer.input_scale, model.input_scale.data(),
                static_cast<size_t>(model.input_scale.ByteCount()));
  }
  buffer.weights.codebook = model.codebook;
  return std::move(buffer.weights);
}

}  // namespace marlin
