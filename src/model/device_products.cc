#include "model/device_products.h"

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "base/transpose.h"
#include "marlin/decoder.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

constexpr int64_t kColumnsPerTask = 32;

/// The weights [k, rows] of the GEMMs of each block: its rows as columns.
struct BlockWeights final : PanelProducts::Matrix {
  std::vector<PreparedWeights> blocks;
};

int64_t BytesOf(int64_t numbers) { return numbers * int64_t{sizeof(float)}; }

}  // namespace

Status DeviceProducts::Grow(DeviceBuffer* buffer, int64_t bytes) const {
  if (buffer->bytes() >= bytes) return {};
  *buffer = {};
  MARLIN_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(device_, bytes));
  return {};
}

Result<std::unique_ptr<PanelProducts::Matrix>> DeviceProducts::Upload(std::span<const float> matrix,
                                                                      int64_t k,
                                                                      int64_t block_rows) {
  auto weights = std::make_unique<BlockWeights>();
  transposed_.resize(static_cast<size_t>(k * std::min(k, block_rows)));
  for (int64_t first = 0; first < k; first += block_rows) {
    const int64_t rows = std::min(block_rows, k - first);
    pool_->Run(CeilDivide(k, kColumnsPerTask), [&](int64_t task, int) {
      const int64_t column = task * kColumnsPerTask;
      TransposeColumns(matrix.data() + first * k, rows, k, column,
                       std::min(k, column + kColumnsPerTask), transposed_.data());
    });
    QuantizedWeights block;
    block.spec.format = Format::kFp32;
    block.spec.k = k;
    block.spec.n = rows;
    block.spec.group_size = k;
    block.codes = TensorView(transposed_.data(), DType::kF32, {1, k, rows});
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights ready, Prepare(block, device_));
    weights->blocks.push_back(std::move(ready));
  }
  return std::unique_ptr<Matrix>(std::move(weights));
}

Status DeviceProducts::SetPanel(std::span<const float> panel, int64_t k) {
  const auto size = static_cast<int64_t>(panel.size());
  k_ = k;
  columns_ = size / k;
  MARLIN_RETURN_IF_ERROR(Grow(&panel_, BytesOf(size)));
  return panel_.CopyFrom(panel.data(), BytesOf(size));
}

Status DeviceProducts::ReplaceRows(int64_t first, int64_t count, std::span<const float> rows) {
  MARLIN_RETURN_IF_ERROR(Grow(&rows_, BytesOf(columns_ * count)));
  MARLIN_RETURN_IF_ERROR(rows_.CopyFrom(rows.data(), BytesOf(columns_ * count)));
  const MutableTensorView to(static_cast<float*>(panel_.data()) + first, DType::kF32,
                             {columns_, count}, {k_, 1});
  return Convert(device_, {rows_.data(), DType::kF32, {columns_, count}}, to);
}

Status DeviceProducts::Multiply(const Matrix& matrix, int64_t block, std::span<float> out) {
  const PreparedWeights& weights =
      static_cast<const BlockWeights&>(matrix).blocks[static_cast<size_t>(block)];
  const auto size = static_cast<int64_t>(out.size());
  MARLIN_RETURN_IF_ERROR(Grow(&out_, BytesOf(size)));
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
