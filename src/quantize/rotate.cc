#include "quantize/rotate.h"

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/input_transform.h"
#include "quantize/column_tile.h"

namespace marlin {

int64_t HadamardSizeFor(int64_t k, int64_t wanted) {
  int64_t size = wanted;
  while (size >= 2 && k % size != 0) size /= 2;
  return k > 0 && size >= 2 ? size : 0;
}

Result<AlignedBuffer> RotateRows(ThreadPool& pool, const TensorView& dense, int64_t size) {
  const int64_t k = dense.dim(0);
  const int64_t n = dense.dim(1);
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer rotated,
                          AlignedBuffer::Allocate(k * n * int64_t{sizeof(float)}));
  auto* const out = rotated.As<float>(0);
  const MatrixView matrix = MatrixOfExpert(dense, 0);
  pool.Run(CeilDivide(n, kTileColumns), [&](int64_t tile, int) {
    const TileRange range{0, k, tile * kTileColumns,
                          std::min(kTileColumns, n - tile * kTileColumns)};
    std::vector<float> columns(static_cast<size_t>(range.columns * k));
    LoadColumns(matrix, range, columns.data(), k);
    HadamardInPlace(columns.data(), range.columns * k, size);
    for (int64_t row = 0; row < k; ++row) {
      for (int64_t c = 0; c < range.columns; ++c) {
        out[row * n + range.n0 + c] = columns[static_cast<size_t>(c * k + row)];
      }
    }
  });
  return rotated;
}

void RotateGram(ThreadPool& pool, int64_t k, int64_t size, std::vector<double>* matrix) {
  double* const data = matrix->data();
  pool.Run(k, [&](int64_t row, int) { HadamardInPlace(data + row * k, k, size); });
  // Columns, several together, so that rows are read in runs.
  pool.Run(CeilDivide(k, kTileColumns), [&](int64_t tile, int) {
    const int64_t first = tile * kTileColumns;
    const int64_t count = std::min(kTileColumns, k - first);
    std::vector<double> columns(static_cast<size_t>(count * k));
    for (int64_t row = 0; row < k; ++row) {
      for (int64_t c = 0; c < count; ++c) {
        columns[static_cast<size_t>(c * k + row)] = data[row * k + first + c];
      }
    }
    HadamardInPlace(columns.data(), count * k, size);
    for (int64_t row = 0; row < k; ++row) {
      for (int64_t c = 0; c < count; ++c) {
        data[row * k + first + c] = columns[static_cast<size_t>(c * k + row)];
      }
    }
  });
}

}  // namespace marlin
