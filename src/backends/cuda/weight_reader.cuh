// Single weights in fp32, exactly as numerics.md defines them: for dequantizing and packing.
#pragma once

#include "backends/cuda/decode_fragment.cuh"
#include "backends/cuda/device_views.h"
#include "backends/cuda/epilogue.cuh"

namespace marlin::cuda {

/// scale * (value - zero) + bias, each step rounded.
MARLIN_DEVICE float ScaledWeight(float value, float scale, float zero, float bias) {
  return scale * (value - zero) + bias;
}

/// Reads tiles. `kind` is a run-time value: these kernels are not the fast ones.
struct TileReader {
  TileView view;
  CodeKind kind;

  MARLIN_DEVICE float Weight(int k, int n) const {
    const uint8_t* tile = view.tiles + TileOffset(view, n / kStripOutputs, k / kTileK);
    const int bits = CodeBits(kind);
    const int row = n % kStripOutputs;
    const int inside = k % kTileK;
    const auto* block =
        reinterpret_cast<const uint32_t*>(tile + (inside / 64 * 2 + row / 16) * BlockBytes(bits));
    const int lane = row % 8 * 4 + inside % 8 / 2;
    const int pair = row % 16 / 8 + inside % 16 / 8 * 2;
    const int code_index = inside % 64 / 16 * 8 + pair * 2 + inside % 2;
    if (kind == CodeKind::kDense16) {
      const uint32_t word = block[WordOffset(16, lane, code_index / 2)];
      const uint32_t half = code_index % 2 == 0 ? word & 0xffffu : word >> 16;
      return view.bf16_codes ? __uint_as_float(half << 16) : F16x2::Unpack(half).x;
    }
    uint32_t words[8];
    for (int i = 0; i < bits; ++i) words[i] = block[WordOffset(bits, lane, i)];
    const float value = view.values[CodeOf(kind, words, code_index)];

    const int group = inside / (kTileK / view.groups_per_tile);
    const int place = (group * 8 + row % 8) * 4 + row / 8;
    const auto* parameters = reinterpret_cast<const uint16_t*>(tile + TileCodeBytes(bits)) + place;
    const uint16_t* second = parameters + view.groups_per_tile * kStripOutputs;
    return Combine(view, value, parameters, second);
  }

  /// A weight from its code's value and stored parameters; `second` is of zeros or biases.
  static MARLIN_DEVICE float Combine(const TileView& view, float value, const uint16_t* parameters,
                                     const uint16_t* second) {
    const float scale = Parameter(*parameters, view.bf16_parameters) * view.multiplier;
    if (view.zero_kind == 0) return scale * value;
    if (view.zero_kind == 1) {
      return ScaledWeight(value, scale, Parameter(*second, false), 0.0f);
    }
    return ScaledWeight(value, scale, 0.0f,
                        Parameter(*second, view.bf16_parameters) * view.multiplier);
  }

 private:
  static MARLIN_DEVICE float Parameter(uint16_t bits, bool bf16) {
    return bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : F16x2::Unpack(bits).x;
  }
};

/// Reads the canonical layout.
struct CanonicalReader {
  CanonicalView view;

  MARLIN_DEVICE float Weight(int k, int n) const {
    const int64_t columns = view.n;
    if (view.bits >= 16) return LoadFloat(view.words, view.dense_type, k * columns + n);
    const float value = view.values[Code(k, n)];
    const int64_t at = k / view.group_size * columns + n;
    const float scale = LoadFloat(view.scales, view.scale_type, at) * view.global_scale;
    const float zero = view.zeros == nullptr ? 0.0f : LoadFloat(view.zeros, Element::kF16, at);
    if (view.biases == nullptr) return scale * (value - zero);
    return ScaledWeight(value, scale, zero, LoadFloat(view.biases, view.bias_type, at));
  }

  MARLIN_DEVICE uint32_t Code(int k, int n) const {
    const int64_t columns = view.n;
    if (view.bits == 3) {
      // 32 codes in 3 words, as one string of bits.
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
