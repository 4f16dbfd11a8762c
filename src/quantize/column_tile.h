// Loads a tile of columns of a strided matrix as fp32, and stores one.
#pragma once

#include <cstdint>

#include "marlin/tensor.h"

namespace marlin {

/// Columns per task: a row of packed words is then one cache line.
inline constexpr int64_t kTileColumns = 16;
/// Rows of a tile that is decoded or rounded at a time.
inline constexpr int64_t kTileRows = 512;

/// One matrix [k, n] inside a view [k, n] or [experts, k, n].
struct MatrixView {
  const void* data;
  DType dtype;
  int64_t k_stride;  ///< In elements, like n_stride.
  int64_t n_stride;
};

/// Precondition: rank 2 (expert must be 0) or 3.
MatrixView MatrixOfExpert(const TensorView& view, int64_t expert);

/// A rectangle of a matrix: `rows` along k from k0, `columns` <= kTileColumns along n from n0.
struct TileRange {
  int64_t k0;
  int64_t rows;
  int64_t n0;
  int64_t columns;
};

/// Converts a rectangle of f32, bf16 or f16 to fp32, exactly; column c goes to
/// out[c * column_stride + r].
void LoadColumns(const MatrixView& matrix, const TileRange& range, float* out,
                 int64_t column_stride);

}  // namespace marlin
