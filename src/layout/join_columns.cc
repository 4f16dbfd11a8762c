#include "layout/join_columns.h"

#include <algorithm>
#include <cstring>

#include "base/macros.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

/// Copies rows of a [k, n] matrix whose k is contiguous. Takes 32 columns at a time, k outermost,
/// so that source and destination stay in cache.
template <typename T>
void CopyTransposed(const TensorView& source, const WeightColumns& part, const JoinedWindow& window,
                    int64_t to_stride, uint8_t* to) {
  constexpr int64_t kColumns = 32;
  constexpr auto kSize = int64_t{sizeof(T)};
  for (int64_t c0 = 0; c0 < part.count; c0 += kColumns) {
    const int64_t end = std::min(c0 + kColumns, part.count);
    for (int64_t row = 0; row < window.rows; ++row) {
      const int64_t k = (window.first_row + row) * source.stride(1);
      for (int64_t c = c0; c < end; ++c) {
        const int64_t at = k + (part.first + c * part.step) * source.stride(2);
        std::memcpy(to + (row * to_stride + c) * kSize, source.As<uint8_t>() + at * kSize,
                    sizeof(T));
      }
    }
  }
}

/// Copies elements that are `step` elements apart.
template <typename T>
void CopyStrided(const uint8_t* from, int64_t step, int64_t count, uint8_t* to) {
  constexpr auto kSize = int64_t{sizeof(T)};
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * kSize, from + i * step * kSize, sizeof(T));
  }
}

template <typename T>
void CopyPart(const TensorView& source, const WeightColumns& part, const JoinedWindow& window,
              int64_t to_stride, uint8_t* to) {
  if (!source.IsContiguous()) return CopyTransposed<T>(source, part, window, to_stride, to);
  constexpr auto kSize = int64_t{sizeof(T)};
  for (int64_t row = 0; row < window.rows; ++row, to += to_stride * kSize) {
    const auto* from =
        source.As<uint8_t>() + ((window.first_row + row) * source.dim(2) + part.first) * kSize;
    if (part.step == 1) {
      std::memcpy(to, from, static_cast<size_t>(part.count * kSize));
    } else {
      CopyStrided<T>(from, part.step, part.count, to);
    }
  }
}

/// Copies one array, [experts, rows, n] in each part, into the joined array's rows.
void JoinArray(std::span<const WeightColumns> parts, ColumnArray array, int64_t joined_n,
               void* to) {
  const TensorView& model = (*parts.front().weights).*array;
  if (model.empty() || model.ElementCount() == 0) return;
  CopyJoined(parts, array, {0, model.dim(0) * model.dim(1), 0, joined_n}, joined_n, to);
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

void CopyJoined(std::span<const WeightColumns> parts, ColumnArray array, const JoinedWindow& window,
                int64_t to_stride, void* to) {
  ForEachPart(parts, window, [&](const WeightColumns& part, int64_t column) {
    const TensorView& source = (*part.weights).*array;
    auto* const first = static_cast<uint8_t*>(to) + column * DTypeBytes(source.dtype());
    switch (DTypeBytes(source.dtype())) {
      case 1:
        return CopyPart<uint8_t>(source, part, window, to_stride, first);
      case 2:
        return CopyPart<uint16_t>(source, part, window, to_stride, first);
      default:
        return CopyPart<uint32_t>(source, part, window, to_stride, first);
    }
  });
}

Result<QuantizedWeights> JoinColumns(std::span<const WeightColumns> parts) {
  const QuantizedWeights& model = *parts.front().weights;
  WeightsSpec spec = model.spec;
  spec.n = CountColumns(parts);
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
