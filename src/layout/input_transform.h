// Weights whose products change A first: W = diag(input_scale) * H * P * stored matrix, where P
// moves rows (permutation.h) and H is block diagonal.
#pragma once

#include <cmath>
#include <cstdint>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

inline constexpr int64_t kMaxHadamard = 32768;

/// Whether Hadamard blocks may have this size: a power of two from 2 on.
constexpr bool IsHadamardSize(int64_t size) {
  return size >= 2 && size <= kMaxHadamard && (size & (size - 1)) == 0;
}

/// Checks what a spec says of permutation, input scale and Hadamard blocks. Errors:
/// kInvalidArgument.
Status CheckInputTransform(const WeightsSpec& spec);

/// Checks that input scales are finite. Errors: kMalformedFile with the position. f32 at any
/// address.
Status CheckInputScale(const TensorView& scale);

/// The spec of the same W without a transform: fp32. Precondition: TransformsInput(spec).
WeightsSpec FoldedSpec(const WeightsSpec& spec);

/// Bytes of the arrays of the transform: permutation and input scales of all experts.
int64_t InputTransformBytes(const WeightsSpec& spec);

/// Multiplies blocks of `size` consecutive numbers by the Hadamard matrix in Sylvester's order over
/// sqrt(size). Every device adds in this order, so that all give the same bits.
/// Precondition: size is a power of two that divides count.
template <typename T>
void HadamardInPlace(T* x, int64_t count, int64_t size) {
  for (int64_t half = 1; half < size; half *= 2) {
    for (int64_t first = 0; first < count; first += 2 * half) {
      for (int64_t i = first; i < first + half; ++i) {
        const T a = x[i];
        const T b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const T norm = static_cast<T>(1.0 / std::sqrt(static_cast<double>(size)));
  for (int64_t i = 0; i < count; ++i) x[i] *= norm;
}

}  // namespace marlin
