// Products of a panel of columns with square matrices, computed by a device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "marlin/status.h"

namespace marlin {

/// Multiplies matrices [k, k] with a panel [k, columns], a block of rows at a time, in fp32. Of the
/// panel, every column is contiguous. The same calls always have the same results.
class PanelProducts {
 public:
  /// A matrix where products are computed.
  class Matrix {
   public:
    virtual ~Matrix() = default;
  };
  virtual ~PanelProducts() = default;

  /// Copies a row-major matrix [k, k], to be multiplied by blocks of `block_rows` rows; the last
  /// one may be shorter. Errors: kOutOfMemory, kDeviceLost, and as Gemm.
  virtual Result<std::unique_ptr<Matrix>> Upload(std::span<const float> matrix, int64_t k,
                                                 int64_t block_rows) = 0;
  /// Copies a panel of `panel.size()` / k columns. Errors: kOutOfMemory, kDeviceLost.
  virtual Status SetPanel(std::span<const float> panel, int64_t k) = 0;
  /// Replaces rows [first, first + count) of the panel, of which `rows` holds every column's
  /// contiguously. Errors: as SetPanel.
  virtual Status ReplaceRows(int64_t first, int64_t count, std::span<const float> rows) = 0;
  /// out = block number `block` of the matrix times the panel: every column's products
  /// contiguously. Errors: as Gemm.
  virtual Status Multiply(const Matrix& matrix, int64_t block, std::span<float> out) = 0;
};

}  // namespace marlin
