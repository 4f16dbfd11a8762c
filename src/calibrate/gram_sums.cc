#include "calibrate/gram_sums.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/macros.h"
#include "calibrate/exact_gemm.h"
#include "model/placement.h"

namespace marlin {
namespace {

/// Rows of a product: their sums are fp32, and every product's sums are added in fp64.
constexpr int64_t kRowsPerProduct = 4096;
/// Columns of a block in host memory: of a symmetric product, blocks below the diagonal are left
/// out. On a device products take less time than the copies, and blocks would need more of these.
constexpr int64_t kBlockColumns = 512;

}  // namespace

Result<std::vector<GramProducts::Block>> GramProducts::Prepare(const float* x, int64_t rows,
                                                               int64_t k) {
  std::vector<Block> blocks;
  const int64_t most = ReadsHostMemory(device_) ? kBlockColumns : k;
  for (int64_t first = 0; first < k; first += most) {
    const int64_t count = std::min(most, k - first);
    const float* columns = x;
    if (count < k) {
      columns_.resize(static_cast<size_t>(rows * count));
      pool_->Run(rows, [&](int64_t row, int) {
        std::copy_n(x + row * k + first, count, columns_.data() + row * count);
      });
      columns = columns_.data();
    }
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights prepared, PrepareFloats(device_, columns, rows, count));
    blocks.push_back({first, count, std::move(prepared)});
  }
  return blocks;
}

Status GramProducts::TransposeOnHost(const float* y, int64_t rows, int64_t k) {
  TransposeFloats(*pool_, y, rows, k, static_cast<float*>(left_.data()));
  return {};
}

Status GramProducts::Transpose(std::span<const Block> y, int64_t rows) {
  for (const Block& block : y) {
    auto* const out = static_cast<float*>(left_.data()) + block.first * rows;
    MARLIN_RETURN_IF_ERROR(
        Dequantize(device_, block.columns, {out, DType::kF32, {rows, block.count}, {1, rows}}));
  }
  return device_.Synchronize();  // Before the blocks may go.
}

Status GramProducts::Add(const float* x, int64_t rows, int64_t k, std::span<const Term> terms) {
  MARLIN_RETURN_IF_ERROR(GrowFloats(device_, k * std::min(rows, kRowsPerProduct), &left_));
  for (int64_t first = 0; first < rows; first += kRowsPerProduct) {
    const int64_t count = std::min(kRowsPerProduct, rows - first);
    const float* const right = x + first * k;
    MARLIN_ASSIGN_OR_RETURN(const std::vector<Block> blocks, Prepare(right, count, k));
    for (const Term& term : terms) {
      MARLIN_RETURN_IF_ERROR(AddTerm({term.y + first * k, term.sums}, right, blocks, count, k));
    }
  }
  return {};
}

Status GramProducts::AddTerm(const Term& term, const float* x, std::span<const Block> blocks,
                             int64_t rows, int64_t k) {
  const bool symmetric = term.y == x;
  if (ReadsHostMemory(device_)) {
    MARLIN_RETURN_IF_ERROR(TransposeOnHost(term.y, rows, k));
  } else if (symmetric) {
    MARLIN_RETURN_IF_ERROR(Transpose(blocks, rows));
  } else {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<Block> others, Prepare(term.y, rows, k));
    MARLIN_RETURN_IF_ERROR(Transpose(others, rows));
  }
  for (const Block& block : blocks) {
    const int64_t height = symmetric ? block.end() : k;
    MARLIN_RETURN_IF_ERROR(AddProduct(block, height, rows, k, term.sums));
  }
  return {};
}

Status GramProducts::AddProduct(const Block& right, int64_t height, int64_t rows, int64_t k,
                                double* sums) {
  const int64_t width = right.count;
  on_host_.resize(std::max(on_host_.size(), static_cast<size_t>(height * width)));
  MARLIN_RETURN_IF_ERROR(GrowFloats(device_, height * width, &product_));
  GemmOptions options;
  options.accuracy = Accuracy::kExact;
  MARLIN_RETURN_IF_ERROR(Gemm(device_, {left_.data(), DType::kF32, {height, rows}}, right.columns,
                              {product_.data(), DType::kF32, {height, width}}, options));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  MARLIN_RETURN_IF_ERROR(product_.CopyTo(on_host_.data(), height * width * int64_t{sizeof(float)}));
  pool_->Run(height, [&](int64_t row, int) {
    const float* const from = on_host_.data() + row * width;
    double* const to = sums + row * k + right.first;
    for (int64_t i = 0; i < width; ++i) to[i] += static_cast<double>(from[i]);
  });
  return {};
}

Status GramSums::Add(const float* y, const float* x, int64_t rows) {
  const GramProducts::Term term{y, sums_.data()};
  MARLIN_RETURN_IF_ERROR(products_->Add(x, rows, k_, {&term, 1}));
  Count(rows, y == x);
  return {};
}

Status GramSums::AddBoth(const float* y, const float* x, int64_t rows, GramSums* gram,
                         GramSums* cross) {
  const std::array<GramProducts::Term, 2> terms = {
      {{x, gram->sums_.data()}, {y, cross->sums_.data()}}};
  MARLIN_RETURN_IF_ERROR(gram->products_->Add(x, rows, gram->k_, terms));
  gram->Count(rows, true);
  cross->Count(rows, y == x);
  return {};
}

void GramSums::Count(int64_t rows, bool symmetric) {
  if (rows == 0) return;
  rows_ += rows;
  symmetric_ = symmetric;
}

double GramSums::SumOf(int64_t row, int64_t column) const {
  if (symmetric_ && column < row) std::swap(row, column);
  return sums_[static_cast<size_t>(row * k_ + column)];
}

std::vector<double> GramSums::Mean() const { return MeanWith({}, 0.0); }

std::vector<double> GramSums::MeanWith(const std::vector<double>& other, double weight) const {
  std::vector<double> mean(sums_.size());
  const double total = static_cast<double>(rows_) + weight;
  if (total == 0.0) return mean;
  products_->pool().Run(k_, [&](int64_t row, int) {
    for (int64_t column = 0; column < k_; ++column) {
      const auto i = static_cast<size_t>(row * k_ + column);
      mean[i] = (SumOf(row, column) + (weight == 0.0 ? 0.0 : weight * other[i])) / total;
    }
  });
  return mean;
}

}  // namespace marlin
