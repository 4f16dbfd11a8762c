#include "calibrate/device_products.h"

#include <algorithm>

#include "base/macros.h"
#include "calibrate/exact_gemm.h"
#include "marlin/decoder.h"

namespace marlin {
namespace {

/// The weights [k, rows] of the GEMMs of each block: its rows as columns.
struct BlockWeights final : PanelProducts::Matrix {
  std::vector<PreparedWeights> blocks;
};

int64_t BytesOf(int64_t numbers) { return numbers * int64_t{sizeof(float)}; }

}  // namespace

Result<std::unique_ptr<PanelProducts::Matrix>> DeviceProducts::Upload(std::span<const float> matrix,
                                                                      int64_t k,
                                                                      int64_t block_rows) {
  auto weights = std::make_unique<BlockWeights>();
  transposed_.resize(static_cast<size_t>(k * std::min(k, block_rows)));
  for (int64_t first = 0; first < k; first += block_rows) {
    const int64_t rows = std::min(block_rows, k - first);
    TransposeFloats(*pool_, matrix.data() + first * k, rows, k, transposed_.data());
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights ready,
                            PrepareFloats(device_, transposed_.data(), k, rows));
    weights->blocks.push_back(std::move(ready));
  }
  return std::unique_ptr<Matrix>(std::move(weights));
}

Status DeviceProducts::SetPanel(std::span<const float> panel, int64_t k) {
  const auto size = static_cast<int64_t>(panel.size());
  k_ = k;
  columns_ = size / k;
  MARLIN_RETURN_IF_ERROR(GrowFloats(device_, size, &panel_));
  return panel_.CopyFrom(panel.data(), BytesOf(size));
}

Status DeviceProducts::ReplaceRows(int64_t first, int64_t count, std::span<const float> rows) {
  MARLIN_RETURN_IF_ERROR(GrowFloats(device_, columns_ * count, &rows_));
  MARLIN_RETURN_IF_ERROR(rows_.CopyFrom(rows.data(), BytesOf(columns_ * count)));
  const MutableTensorView to(static_cast<float*>(panel_.data()) + first, DType::kF32,
                             {columns_, count}, {k_, 1});
  return Convert(device_, {rows_.data(), DType::kF32, {columns_, count}}, to);
}

Status DeviceProducts::Multiply(const Matrix& matrix, int64_t block, std::span<float> out) {
  const PreparedWeights& weights =
      static_cast<const BlockWeights&>(matrix).blocks[static_cast<size_t>(block)];
  const auto size = static_cast<int64_t>(out.size());
  MARLIN_RETURN_IF_ERROR(GrowFloats(device_, size, &out_));
  GemmOptions options;
  options.accuracy = Accuracy::kExact;
  // The codes of a matrix do not depend on the matrices beside it.
  options.determinism = Determinism::kBatchInvariant;
  MARLIN_RETURN_IF_ERROR(Gemm(device_, {panel_.data(), DType::kF32, {columns_, k_}}, weights,
                              {out_.data(), DType::kF32, {columns_, size / columns_}}, options));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  return out_.CopyTo(out.data(), BytesOf(size));
}

}  // namespace marlin
