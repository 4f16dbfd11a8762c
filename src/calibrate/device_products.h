// The products of gptq by a device's exact GEMM.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "marlin/device.h"
#include "quantize/panel_products.h"

namespace marlin {

/// Keeps the panel in device memory; only a block's rows cross the bus.
class DeviceProducts final : public PanelProducts {
 public:
  /// `pool` outlives the products. It transposes matrices.
  DeviceProducts(const Device& device, ThreadPool& pool) : device_(device), pool_(&pool) {}

  Result<std::unique_ptr<Matrix>> Upload(std::span<const float> matrix, int64_t k,
                                         int64_t block_rows) override;
  Status SetPanel(std::span<const float> panel, int64_t k) override;
  Status ReplaceRows(int64_t first, int64_t count, std::span<const float> rows) override;
  Status Multiply(const Matrix& matrix, int64_t block, std::span<float> out) override;

 private:
  Device device_;
  ThreadPool* pool_;
  int64_t k_ = 0;
  int64_t columns_ = 0;
  DeviceBuffer panel_;  ///< f32 [columns, k]
  DeviceBuffer rows_;   ///< f32 [columns, rows of a block]: replacements,
  DeviceBuffer out_;    ///< and products.
  std::vector<float> transposed_;
};

}  // namespace marlin
