// Single weights in fp32, exactly as numerics.md defines them: for dequantizing and packing.
#pragma once

#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

/// scale * (value - zero) + bias, each step rounded.
MARLIN_DEVICE float ScaledWeight(float value, float scale, float zero, float bias) {
  return scale * (value - zero) + bias;
}

/// A group's parameters in fp32.
struct WeightParameters {
  float scale = 0.0f;
  float second = 0.0f;  ///< A zero or a bias, where the view has those.
};

/// Converts parameters from their bits in tiles or in the marlin_w4 layout.
MARLIN_DEVICE WeightParameters ParametersOf(const TileView& view, uint32_t scale, uint32_t second) {
  WeightParameters parameters;
  const float stored = LoadParameters(scale, view.bf16_parameters).x;
  parameters.scale = view.divisor != 0.0f ? stored / view.divisor : stored * view.multiplier;
  if (view.zero_kind == ZeroKind::kZeros) parameters.second = F16x2::Unpack(second).x;
  if (view.zero_kind == ZeroKind::kBiases) {
    parameters.second = LoadParameters(second, view.bf16_parameters).x * view.multiplier;
  }
  return parameters;
}

/// The weight of a code with value `value`.
MARLIN_DEVICE float WeightOf(const TileView& view, float value,
                             const WeightParameters& parameters) {
  if (view.zero_kind == ZeroKind::kNone) return parameters.scale * value;
  return view.zero_kind == ZeroKind::kZeros
             ? ScaledWeight(value, parameters.scale, parameters.second, 0.0f)
             : ScaledWeight(value, parameters.scale, 0.0f, parameters.second);
}

/// Reads the canonical layout (k-packed words).
struct CanonicalReader {
  CanonicalView view;

  MARLIN_DEVICE float Weight(int k, int n) const {
    const int64_t columns = view.n;
    if (view.bits >= 16) return LoadFloat(view.words, view.dense_type, k * columns + n);
    const float value = view.values[Code(k, n)];
    // The group size may exceed an int; 64-bit divisions take several times as long.
    const int group = view.group_size > k ? 0 : k / static_cast<int>(view.group_size);
    const int64_t at = group * columns + n;
    const float stored = LoadFloat(view.scales, view.scale_type, at);
    const float scale =
        view.global_scale_divides ? stored / view.global_scale : stored * view.global_scale;
    const float zero = view.zeros == nullptr ? 0.0f : LoadFloat(view.zeros, view.zero_type, at);
    if (view.biases == nullptr) return scale * (value - zero);
    return ScaledWeight(value, scale, zero, LoadFloat(view.biases, view.bias_type, at));
  }

  MARLIN_DEVICE uint32_t Code(int k, int n) const {
    const int64_t columns = view.n;
    if (view.bits == 3) {
      // 32 codes in 3 words, as one bit string.
      const int bit = k % 32 * 3;
      const int64_t word = k / 32 * 3 + bit / 32;
      const int shift = bit % 32;
      uint32_t code = view.words[word * columns + n] >> shift;
      if (shift > 29) code |= view.words[(word + 1) * columns + n] << (32 - shift);
      return code & 7u;
    }
    const int per_word = 32 / view.bits;
    const uint32_t word = view.words[k / per_word * columns + n];
    return (word >> (k % per_word * view.bits)) & ((1u << view.bits) - 1u);
  }
};

}  // namespace marlin::cuda
