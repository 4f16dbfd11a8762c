#include "model/gram_sums.h"

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "base/transpose.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"
#include "model/placement.h"

namespace marlin {
namespace {

constexpr int64_t kRowsPerProduct = 512;
constexpr int64_t kRowsPerCopiedProduct = 4096;
constexpr int64_t kColumnsPerTask = 32;

}  // namespace

Status GramSums::Add(const float* y, const float* x, int64_t rows) {
  const int64_t bytes = k_ * k_ * int64_t{sizeof(float)};
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer product, DeviceBuffer::Allocate(device_, bytes));
  std::vector<float> host(static_cast<size_t>(k_ * k_));
  std::vector<float> transposed;
  const int64_t most = ReadsHostMemory(device_) ? kRowsPerProduct : kRowsPerCopiedProduct;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    // y^T is the GEMM's left operand, of which rows are contiguous.
    transposed.resize(static_cast<size_t>(k_ * count));
    pool_->Run(CeilDivide(k_, kColumnsPerTask), [&](int64_t task, int) {
      const int64_t column = task * kColumnsPerTask;
      TransposeColumns(y + first * k_, count, k_, column, std::min(k_, column + kColumnsPerTask),
                       transposed.data());
    });
    const int64_t left_bytes = k_ * count * int64_t{sizeof(float)};
    MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer left, DeviceBuffer::Allocate(device_, left_bytes));
    MARLIN_RETURN_IF_ERROR(left.CopyFrom(transposed.data(), left_bytes));
    QuantizedWeights right;
    right.spec.format = Format::kFp32;
    right.spec.k = count;
    right.spec.n = k_;
    right.spec.group_size = count;
    right.codes = TensorView(x + first * k_, DType::kF32, {1, count, k_});
    MARLIN_ASSIGN_OR_RETURN(const PreparedWeights ready, Prepare(right, device_));
    GemmOptions options;
    options.accuracy = Accuracy::kExact;
    options.allow_bf16_activations = false;
    MARLIN_RETURN_IF_ERROR(Gemm(device_, {left.data(), DType::kF32, {k_, count}}, ready,
                                {product.data(), DType::kF32, {k_, k_}}, options));
    MARLIN_RETURN_IF_ERROR(device_.Synchronize());
    MARLIN_RETURN_IF_ERROR(product.CopyTo(host.data(), bytes));
    pool_->Run(k_, [&](int64_t row, int) {
      for (int64_t i = row * k_; i < (row + 1) * k_; ++i) {
        sums_[static_cast<size_t>(i)] += static_cast<double>(host[static_cast<size_t>(i)]);
      }
    });
  }
  rows_ += rows;
  return {};
}

std::vector<double> GramSums::Mean() const { return MeanWith({}, 0.0); }

std::vector<double> GramSums::MeanWith(const std::vector<double>& other, double weight) const {
  std::vector<double> mean(sums_.size());
  const double total = static_cast<double>(rows_) + weight;
  if (total == 0.0) return mean;
  for (size_t i = 0; i < mean.size(); ++i) {
    mean[i] = (sums_[i] + (weight == 0.0 ? 0.0 : weight * other[i])) / total;
  }
  return mean;
}

}  // namespace marlin
