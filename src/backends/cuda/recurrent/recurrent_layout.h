// The parameters of the kernels of recurrent states: plain structs that pass from host to device by
// value.
#pragma once

#include <cstdint>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

/// f32 [rows, heads, features] with contiguous features. Strides count elements.
struct HeadsView {
  const float* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  MARLIN_HOST_DEVICE const float* At(int64_t row, int head) const {
    return data + row * row_stride + head * head_stride;
  }
};

/// Rows of a sequence that the recurrent kernel prepares together.
inline constexpr int kGroupRows = 16;
/// Value features of a CTA of the recurrent kernel, at most; a warp has kWarpColumns of them.
inline constexpr int kSliceColumns = 128;
inline constexpr int kWarpColumns = 16;
inline constexpr int kMostConvWidth = 16;
inline constexpr int kMostRecurrentKeys = 256;
inline constexpr int kMostRecurrentValues = 1024;

/// The shape of LaunchDecode.
inline constexpr int kDecodedFeatures = 128;
inline constexpr int kDecodedConvWidth = 4;

/// The parameters that kernels of all recurrent states have: sequences, their pages, and a
/// convolution of queries and keys of key heads and values of value heads.
struct RecurrentArguments {
  RowsView out;             ///< [rows, value_heads] rows.
  SequencesView sequences;  ///< Block tables: RecurrentRows::pages, two blocks.
  PagesView states;
  const float* conv = nullptr;
  int key_heads = 1;
  int value_heads = 1;
  int key_dim = 0;
  int value_dim = 0;
  int conv_width = 1;
  /// Sequences with more rows run in chunks; negative: none does.
  int most_rows = -1;
  /// Results of rows before the norm, [rows][value_heads][value_dim].
  float* sums = nullptr;
  ErrorView errors;

  MARLIN_HOST_DEVICE int group() const { return value_heads / key_heads; }
  MARLIN_HOST_DEVICE int64_t channels() const {
    return 2 * int64_t{key_heads} * key_dim + int64_t{value_heads} * value_dim;
  }
  /// The first element of a state's matrices.
  MARLIN_HOST_DEVICE int64_t conv_elements() const {
    return ((conv_width - 1) * channels() + 31) / 32 * 32;
  }
};

/// GatedDeltaCall. With norms_apart, `sums` is S^T q.
struct GatedDeltaArguments : RecurrentArguments {
  HeadsView queries;
  HeadsView keys;
  HeadsView values;  ///< As gates, writes and decays: of key heads, value heads as features.
  HeadsView gates;
  HeadsView writes;
  HeadsView decays;
  const float* log_decay = nullptr;
  const float* decay_bias = nullptr;
  const float* norm = nullptr;
  float epsilon = 0;
  bool norms_apart = false;  ///< GatedNormKernel takes `sums`.
  int slices = 1;            ///< Parts of a head's value features that CTAs have of their own.
  /// [sequences][key_heads], all ones before and after: CTAs that have read a convolution's old
  /// inputs. Null if a kernel of its own replaces them.
  uint32_t* counters = nullptr;

  /// The CTAs that read the same inputs of queries and keys from a state.
  MARLIN_HOST_DEVICE int readers() const { return group() * slices; }
  /// Whether RecurrentKernel can tell when all of them have, and replaces those inputs.
  MARLIN_HOST_DEVICE bool counts_readers() const { return readers() == 1 || counters != nullptr; }
};

/// A group of rows of the recurrent kernel.
struct GroupRows {
  float decays[kGroupRows];
  float writes[kGroupRows];
  float products[kGroupRows];                    ///< q . k
  int sources[kMostConvWidth - 1 + kGroupRows];  ///< As Convolve takes them.
  int count;
  int is_last;  ///< Not 0: the CTA replaces the inputs of queries and keys in the state.
};

/// Shared memory of a CTA of the recurrent kernel, in floats; then GroupRows. All of it is dynamic,
/// so that a kernel may ask for as much as there is.
struct RecurrentShared {
  int key_row;    ///< Floats of a query or a key, with zeros after key_dim.
  int value_row;  ///< Floats of a row's values.

  MARLIN_HOST_DEVICE int Queries() const { return 0; }
  MARLIN_HOST_DEVICE int Keys() const { return kGroupRows * key_row; }
  MARLIN_HOST_DEVICE int Values() const { return 2 * kGroupRows * key_row; }
  MARLIN_HOST_DEVICE int Factors() const { return Values() + kGroupRows * value_row; }
  MARLIN_HOST_DEVICE int Rows() const { return Factors() + kGroupRows * value_row; }
  MARLIN_HOST_DEVICE int Bytes() const { return Rows() * 4 + static_cast<int>(sizeof(GroupRows)); }
};

}  // namespace marlin::cuda
