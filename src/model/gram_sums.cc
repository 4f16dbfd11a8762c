#include "model/gram_sums.h"

#include <algorithm>
#include <array>

#include "base/macros.h"
#include "model/exact_gemm.h"
#include "model/placement.h"

namespace marlin {
namespace {

constexpr int64_t kRowsPerProduct = 512;
constexpr int64_t kRowsPerCopiedProduct = 4096;

}  // namespace

Status GramProducts::TransposeOnHost(const float* y, int64_t rows, int64_t k) {
  TransposeFloats(*pool_, y, rows, k, static_cast<float*>(left_.data()));
  return {};
}

Status GramProducts::Transpose(const PreparedWeights& y, int64_t rows, int64_t k) {
  return Dequantize(device_, y, {left_.data(), DType::kF32, {rows, k}, {1, rows}});
}

Status GramProducts::UploadTransposed(const float* y, int64_t rows, int64_t k) {
  MARLIN_ASSIGN_OR_RETURN(const PreparedWeights prepared, PrepareFloats(device_, y, rows, k));
  MARLIN_RETURN_IF_ERROR(Transpose(prepared, rows, k));
  return device_.Synchronize();  // Before the weights go.
}

Status GramProducts::Add(const float* x, int64_t rows, int64_t k, std::span<const Term> terms) {
  const bool on_host = ReadsHostMemory(device_);
  const int64_t most = on_host ? kRowsPerProduct : kRowsPerCopiedProduct;
  MARLIN_RETURN_IF_ERROR(GrowFloats(device_, k * std::min(rows, most), &left_));
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    const float* const right = x + first * k;
    MARLIN_ASSIGN_OR_RETURN(const PreparedWeights ready, PrepareFloats(device_, right, count, k));
    for (const Term& term : terms) {
      const float* const left = term.y + first * k;
      MARLIN_RETURN_IF_ERROR(on_host         ? TransposeOnHost(left, count, k)
                             : left == right ? Transpose(ready, count, k)
                                             : UploadTransposed(left, count, k));
      MARLIN_RETURN_IF_ERROR(AddProduct(ready, count, k, term.sums));
    }
  }
  return {};
}

Status GramProducts::AddProduct(const PreparedWeights& right, int64_t rows, int64_t k,
                                double* sums) {
  on_host_.resize(std::max(on_host_.size(), static_cast<size_t>(k * k)));
  MARLIN_RETURN_IF_ERROR(GrowFloats(device_, k * k, &product_));
  GemmOptions options;
  options.accuracy = Accuracy::kExact;
  MARLIN_RETURN_IF_ERROR(Gemm(device_, {left_.data(), DType::kF32, {k, rows}}, right,
                              {product_.data(), DType::kF32, {k, k}}, options));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  MARLIN_RETURN_IF_ERROR(product_.CopyTo(on_host_.data(), k * k * int64_t{sizeof(float)}));
  pool_->Run(k, [&](int64_t row, int) {
    const float* const from = on_host_.data() + row * k;
    double* const to = sums + row * k;
    for (int64_t i = 0; i < k; ++i) to[i] += static_cast<double>(from[i]);
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
