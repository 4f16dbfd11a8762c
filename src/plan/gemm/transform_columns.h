// The columns of activations as weights with an input transform read them, and back.
#pragma once

#include <cstdint>

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// A change that weights [k, n] make to A, in device memory: A * diag(scale) * H, whose columns are
/// then taken in the order of `permutation`.
struct InputTransform {
  const float* scale = nullptr;          ///< [k]; null: ones.
  int64_t hadamard = 0;                  ///< The size of H's blocks; 0: H is the identity.
  const int32_t* permutation = nullptr;  ///< [k], every column once; null: the identity.

  bool any() const { return scale != nullptr || hadamard > 0 || permutation != nullptr; }
  /// Whether elements only move.
  bool keeps_values() const { return scale == nullptr && hadamard == 0; }
};

/// Transforms rows from A to what the stored matrix reads, or with `inverse` columns of the stored
/// matrix, which are rows here, to W: moved back by the permutation, times H, times the scale.
/// Computed in fp32, rounded once; a permutation alone keeps the bits, NaN payloads too.
struct TransformColumnsCall {
  TensorView from;       ///< f32, f16 or bf16 [rows, k], any strides that are not negative.
  MutableTensorView to;  ///< The same shape; the same type where elements only move.
  InputTransform transform;
  bool inverse = false;
};

/// Does rows [first, first + count) of a call whose memory is the host's. Errors: kOutOfMemory.
Status TransformRows(const TransformColumnsCall& call, int64_t first, int64_t count);

}  // namespace marlin
