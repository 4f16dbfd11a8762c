// Kernel parameters: plain structs that pass from host to device by value.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Largest portable cluster: its CTAs split k or share multicast copies.
inline constexpr int kMaxSplits = 8;

/// Element types of activations, outputs, biases and scales, as kernels switch over them.
enum class Element : uint8_t { kF32, kBf16, kF16, kE8M0, kE4M3 };

/// Weights in the canonical layout of checkpoints (docs/formats): those that cannot be tiled.
struct CanonicalView {
  const uint32_t* words = nullptr;  ///< [words along k, n]; dense formats: numbers [k, n].
  const void* scales = nullptr;     ///< [groups, n], null for dense formats.
  const void* zeros = nullptr;      ///< [groups, n] or null.
  const void* biases = nullptr;     ///< [groups, n] or null.
  const float* values = nullptr;    ///< Value of every code.
  int64_t group_size = 1;
  float global_scale = 1;
  bool global_scale_divides = false;
  int bits = 4;  ///< 16 and 32 are dense formats.
  Element scale_type = Element::kF16;
  Element zero_type = Element::kF16;
  Element bias_type = Element::kF16;
  Element dense_type = Element::kBf16;
  int k = 0;
  int n = 0;
};

/// Weights in the marlin_w4 layout (docs/formats/marlin_w4.md), with their parameters.
struct MarlinW4View {
  /// tiles: the words [K/32][N/32][32 lanes][4]; groups_per_tile: as if they were tiles.
  TileView codes;
  /// [groups][N/32][g: 8][outputs g, g + 8, g + 16, g + 24] of 16 bits as in tiles: scales, then
  /// zeros or biases where the format has them.
  const uint8_t* parameters = nullptr;
  int group_size = 1;
  int groups = 0;
};

/// Rows of activations; columns are contiguous, strides count elements.
struct ActivationView {
  const void* data = nullptr;
  int64_t stride = 0;
  Element type = Element::kBf16;
  int m = 0;
  int k = 0;
};

/// Destination of dense weights W[k, n]; strides count elements.
struct DenseView {
  void* data = nullptr;
  Element type = Element::kF32;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
};

/// The epilogue, from fp32 sums to the output.
struct EpilogueView {
  void* out = nullptr;
  int64_t stride = 0;
  Element type = Element::kBf16;
  float multiplier = 1;  ///< Scales every sum, before all else.
  const void* bias = nullptr;
  Element bias_type = Element::kF32;
  int activation = 0;  ///< marlin::Activation.
  bool gated = false;
  const float* row_weight = nullptr;
  int n = 0;  ///< Columns of the sums; the output has half of them when gated.
};

/// The gated activation, as GateOptions.
struct GateView {
  int activation = 0;
  float limit = 0;
  float alpha = 0;

  bool operator==(const GateView&) const = default;
};

}  // namespace marlin::cuda
