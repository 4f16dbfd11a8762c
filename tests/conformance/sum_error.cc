#include "sum_error.h"

#include <algorithm>
#include <cmath>

namespace marlin::conformance {

SumErrors::SumErrors(const SumOperands& operands, const ErrorModel& model, Grade grade)
    : operands_(operands) {
  const int64_t k_count = operands.weights.k;
  const int64_t steps = (k_count + model.lanes - 1) / model.lanes;
  const auto depth = static_cast<double>(steps + model.extra_depth);
  const double u = model.accumulate_unit;
  const auto gamma_of = [](double d, double unit) { return d * unit / (1.0 - d * unit); };
  const auto block_depth = static_cast<double>(model.block_depth);
  gamma_ = gamma_of(depth, u) + gamma_of(block_depth, model.block_unit);
  gamma_tight_ =
      std::min(gamma_, 6.0 * (std::sqrt(depth) * u + std::sqrt(block_depth) * model.block_unit));
  // Callers may allow one rounding of the activations to bf16 where they would otherwise be split
  // into two bf16 terms.
  const bool rounds_activations = grade == Grade::kBf16Compute && operands.allow_bf16_activations;
  unit_ = model.weight_unit + (rounds_activations ? 0x1p-8 : model.activation_unit);

  // Below the normal range fp32 loses at most half its smallest step per operation; bf16 matrix
  // units flush subnormal inputs, weights and sums to zero.
  const double step = grade == Grade::kBf16Compute ? 0x1p-126 : 0x1p-149;
  for (int64_t m = 0; m < operands.product.m; ++m) {
    double sum = 2.0 * static_cast<double>(k_count) + 4.0;
    for (const double a :
         operands.a.subspan(static_cast<size_t>(m * k_count), static_cast<size_t>(k_count))) {
      sum += std::abs(a);
    }
    underflow_.push_back(step * sum);
  }
  if (model.int8_block != 0 || model.activation_floor > 0) AddSteps(model);
}

// Activations are quantized with a step that is a fraction of their block's maximum.
void SumErrors::AddSteps(const ErrorModel& model) {
  const bool int8 = model.int8_block != 0;
  const int64_t k_count = operands_.weights.k;
  const int64_t m_count = operands_.product.m;
  const double part = int8 ? 1 / 254.0 : model.activation_floor;
  block_ = int8 ? model.int8_block : k_count;
  blocks_ = (k_count + block_ - 1) / block_;
  const auto n = static_cast<size_t>(operands_.weights.n);
  block_sums_.resize(static_cast<size_t>(blocks_) * n);
  block_squares_.resize(block_sums_.size());
  for (int64_t k = 0; k < k_count; ++k) {
    for (size_t column = 0; column < n; ++column) {
      const double w = operands_.weights.magnitude[static_cast<size_t>(k) * n + column];
      block_sums_[static_cast<size_t>(k / block_) * n + column] += w;
      block_squares_[static_cast<size_t>(k / block_) * n + column] += w * w;
    }
  }
  // Scales are clamped to the smallest normal number, however small the activations are.
  steps_.assign(static_cast<size_t>(m_count * blocks_), 0x1p-127);
  for (int64_t m = 0; m < m_count; ++m) {
    for (int64_t k = 0; k < k_count; ++k) {
      double& step = steps_[static_cast<size_t>(m * blocks_ + k / block_)];
      step = std::max(step, std::abs(operands_.a[static_cast<size_t>(m * k_count + k)]) * part);
    }
  }
}

SumError SumErrors::StepError(int64_t m, int64_t n) const {
  SumError error;
  double square = 0;
  for (int64_t b = 0; b < blocks_; ++b) {
    const double step = steps_[static_cast<size_t>(m * blocks_ + b)];
    const auto at = static_cast<size_t>(b * operands_.weights.n + n);
    error.hard += step * block_sums_[at];
    square += step * step * block_squares_[at];
  }
  // A rounding error is uniform in +-step: its standard deviation is step / sqrt(3).
  error.tight = std::min(error.hard, 6.0 * std::sqrt(square / 3.0));
  return error;
}

SumError SumErrors::At(int64_t m, int64_t n) const {
  const auto at = static_cast<size_t>(m * operands_.weights.n + n);
  const double s = operands_.product.magnitude[at];
  const double root = operands_.product.root_square[at];
  const double underflow = underflow_[static_cast<size_t>(m)];
  const SumError step = StepError(m, n);
  return {gamma_ * s + unit_ * s + step.hard + underflow,
          gamma_tight_ * s + unit_ * std::min(s, 6.0 * root) + step.tight + underflow};
}

}  // namespace marlin::conformance
