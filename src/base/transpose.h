// Transposition of matrices in host memory.
#pragma once

#include <algorithm>
#include <cstdint>

namespace marlin {

/// Writes columns [first, end) of a matrix [rows, columns] as rows of its transpose [columns,
/// rows], by blocks whose cache lines stay in the cache.
template <typename T>
void TransposeColumns(const T* in, int64_t rows, int64_t columns, int64_t first, int64_t end,
                      T* out) {
  constexpr int64_t kBlock = 32;
  for (int64_t row = 0; row < rows; row += kBlock) {
    const int64_t last = std::min(rows, row + kBlock);
    for (int64_t column = first; column < end; ++column) {
      for (int64_t i = row; i < last; ++i) out[column * rows + i] = in[i * columns + column];
    }
  }
}

}  // namespace marlin
