#include "model/gram_sums.h"

#include <algorithm>
#include <array>

#include "base/checked.h"
#include "base/macros.h"
#include "base/transpose.h"
#include "marlin/gemm.h"
#include "model/placement.h"

namespace marlin {
namespace {

constexpr int64_t kRowsPerProduct = 512;
constexpr int64_t kRowsPerCopiedProduct = 4096;
constexpr int64_t kColumnsPerTask = 32;

Status Grow(const Device& device, int64_t numbers, DeviceBuffer* buffer) {
  const int64_t bytes = numbers * int64_t{sizeof(float)};
  if (buffer->bytes() >= bytes) return {};
  *buffer = {};
  MARLIN_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(device, bytes));
  return {};
}

}  // namespace

Status GramProducts::Add(const float* x, int64_t rows, int64_t k, std::span<const Term> terms) {
  const int64_t most = ReadsHostMemory(device_) ? kRowsPerProduct : kRowsPerCopiedProduct;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    QuantizedWeights right;
    right.spec.format = Format::kFp32;
    right.spec.k = count;
    right.spec.n = k;
    right.spec.group_size = count;
    right.codes = TensorView(x + first * k, DType::kF32, {1, count, k});
    MARLIN_ASSIGN_OR_RETURN(const PreparedWeights ready, Prepare(right, device_));
    for (const Term& term : terms) {
      MARLIN_RETURN_IF_ERROR(AddProduct(ready, count, k, {term.y + first * k, term.sums}));
    }
  }
  return {};
}

Status GramProducts::AddProduct(const PreparedWeights& right, int64_t rows, int64_t k,
                                const Term& term) {
  // y^T is the GEMM's left operand, of which rows are contiguous.
  transposed_.resize(std::max(transposed_.size(), static_cast<size_t>(k * rows)));
  on_host_.resize(std::max(on_host_.size(), static_cast<size_t>(k * k)));
  MARLIN_RETURN_IF_ERROR(Grow(device_, k * rows, &left_));
  MARLIN_RETURN_IF_ERROR(Grow(device_, k * k, &product_));
  pool_->Run(CeilDivide(k, kColumnsPerTask), [&](int64_t task, int) {
    const int64_t column = task * kColumnsPerTask;
    TransposeColumns(term.y, rows, k, column, std::min(k, column + kColumnsPerTask),
                     transposed_.data());
  });
  MARLIN_RETURN_IF_ERROR(left_.CopyFrom(transposed_.data(), k * rows * int64_t{sizeof(float)}));
  GemmOptions options;
  options.accuracy = Accuracy::kExact;
  MARLIN_RETURN_IF_ERROR(Gemm(device_, {left_.data(), DType::kF32, {k, rows}}, right,
                              {product_.data(), DType::kF32, {k, k}}, options));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  MARLIN_RETURN_IF_ERROR(product_.CopyTo(on_host_.data(), k * k * int64_t{sizeof(float)}));
  pool_->Run(k, [&](int64_t row, int) {
    const float* const from = on_host_.data() + row * k;
    double* const sums = term.sums + row * k;
    for (int64_t i = 0; i < k; ++i) sums[i] += static_cast<double>(from[i]);
  });
  return {};
}

Status GramSums::Add(const float* y, const float* x, int64_t rows) {
  const GramProducts::Term term{y, sums_.data()};
  MARLIN_RETURN_IF_ERROR(products_->Add(x, rows, k_, {&term, 1}));
  rows_ += rows;
  return {};
}

Status GramSums::AddBoth(const float* y, const float* x, int64_t rows, GramSums* gram,
                         GramSums* cross) {
  const std::array<GramProducts::Term, 2> terms = {
      {{x, gram->sums_.data()}, {y, cross->sums_.data()}}};
  MARLIN_RETURN_IF_ERROR(gram->products_->Add(x, rows, gram->k_, terms));
  gram->rows_ += rows;
  cross->rows_ += rows;
  return {};
}

std::vector<double> GramSums::Mean() const { return MeanWith({}, 0.0); }

std::vector<double> GramSums::MeanWith(const std::vector<double>& other, double weight) const {
  std::vector<double> mean(sums_.size());
  const double total = static_cast<double>(rows_) + weight;
  if (total == 0.0) return mean;
  products_->pool().Run(k_, [&](int64_t row, int) {
    for (auto i = static_cast<size_t>(row * k_); i < static_cast<size_t>((row + 1) * k_); ++i) {
      mean[i] = (sums_[i] + (weight == 0.0 ? 0.0 : weight * other[i])) / total;
    }
  });
  return mean;
}

}  // namespace marlin
