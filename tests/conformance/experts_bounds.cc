#include "experts_bounds.h"

#include <algorithm>
#include <cmath>

#include "activation_error.h"
#include "sum_error.h"

namespace marlin::conformance {
namespace {

/// The errors of the sums of a GEMM that any of some kernels runs.
class AnyKernelErrors {
 public:
  AnyKernelErrors(const SumOperands& operands, const std::vector<KernelModel>& models) {
    for (const KernelModel& model : models) {
      errors_.emplace_back(operands, model.error, model.grade);
    }
  }
  SumError At(int64_t m, int64_t n) const {
    SumError worst;
    for (const SumErrors& errors : errors_) {
      const SumError error = errors.At(m, n);
      worst.hard = std::max(worst.hard, error.hard);
      worst.tight = std::max(worst.tight, error.tight);
    }
    return worst;
  }

 private:
  std::vector<SumErrors> errors_;
};

// The error of x + bias.
double AfterBias(const reference::LinearMap& map, double biased, double error) {
  return map.bias.empty() ? error : error + kUnit32 * (std::abs(biased) + error);
}

/// The chain of the rows of one expert. The sums of gate and up have the errors of their GEMMs;
/// those pass through the activation and the product (AfterGate), and become errors of the
/// activations of the down projection. There they add sum_i e_i |w_in| to the errors that the GEMM
/// itself has, or as independent errors the root of the sum of the squares. The routing weight
/// multiplies both and rounds once.
class ChainErrors {
 public:
  ChainErrors(const ExpertsData& data, const ExpertRows& rows,
              const std::vector<KernelModel>& models)
      : data_(data), rows_(rows), models_(models), mlp_(rows.expert->mlp()) {}

  // Adds the errors of the rows' results to those of their tokens, and the results to `magnitude`.
  void AddTo(std::vector<Allowance>* allowances, std::vector<double>* magnitude) {
    BoundInner();
    std::vector<double> reach(rows_.run.inner);
    for (size_t i = 0; i < reach.size(); ++i) reach[i] = std::abs(reach[i]) + inner_[i].hard;
    const AnyKernelErrors down(
        SumOperands{reach, *mlp_.down.weights, rows_.run.down, data_.c.allow_bf16}, models_);
    const std::vector<SumError> weights = WeightErrors();
    const int64_t hidden = data_.c.hidden;
    for (size_t row = 0; row < rows_.tokens.size(); ++row) {
      const std::vector<SumError> passed = PassThroughDown(row);
      for (int64_t n = 0; n < hidden; ++n) {
        const auto m = static_cast<int64_t>(row);
        const SumError own = down.At(m, n);
        const SumError from_inner = passed[static_cast<size_t>(n)];
        const double y = rows_.run.DownAt(mlp_, m, n);
        const auto weighted = [&](double error, double weight_error) {
          error = AfterBias(mlp_.down, y, error);
          const double weight = std::abs(rows_.weights[row]);
          return weight * error + std::abs(y) * weight_error + error * weight_error +
                 kUnit32 * weight * std::abs(y) + 0x1p-149;
        };
        const auto at = static_cast<size_t>(rows_.tokens[row] * hidden + n);
        Allowance& allowance = (*allowances)[at];
        allowance.hard += weighted(own.hard + from_inner.hard, weights[row].hard);
        allowance.tight += weighted(own.tight + from_inner.tight, weights[row].tight);
        (*magnitude)[at] += std::abs(rows_.weights[row] * y) + allowance.hard;
      }
    }
  }

 private:
  // x may be rounded to bf16 unless it is.
  bool rounds_x() const { return data_.c.allow_bf16 && data_.c.x_type != DType::kBf16; }

  void BoundInner() {
    const AnyKernelErrors gate(SumOperands{rows_.x, *mlp_.gate.weights, rows_.run.gate, rounds_x()},
                               models_);
    const bool beside = mlp_.up.weights == nullptr;
    const AnyKernelErrors apart(SumOperands{rows_.x, beside ? *mlp_.gate.weights : *mlp_.up.weights,
                                            beside ? rows_.run.gate : rows_.run.up, rounds_x()},
                                beside ? std::vector<KernelModel>() : models_);
    const GateOptions options = GateOf(data_.c);
    const int64_t inner = mlp_.inner();
    for (int64_t m = 0; m < static_cast<int64_t>(rows_.tokens.size()); ++m) {
      for (int64_t i = 0; i < inner; ++i) {
        const SumError gate_error = gate.At(m, i);
        const SumError up_error = beside ? gate.At(m, inner + i) : apart.At(m, i);
        const double g = rows_.run.GateAt(mlp_, m, i);
        const double u = rows_.run.UpAt(mlp_, m, i);
        const auto after = [&](double of_gate, double of_up) {
          return AfterGate(options, g, AfterBias(mlp_.gate, g, of_gate), u,
                           AfterBias(beside ? mlp_.gate : mlp_.up, u, of_up));
        };
        inner_.push_back(
            {after(gate_error.hard, up_error.hard), after(gate_error.tight, up_error.tight)});
      }
    }
  }

  // The errors of the results of a row that errors of its inner values cause. They are 1/16 larger
  // than to first order: no kernel rounds by more.
  std::vector<SumError> PassThroughDown(size_t row) const {
    const reference::DenseWeights& weights = *mlp_.down.weights;
    const auto columns = static_cast<size_t>(weights.n);
    std::vector<SumError> passed(columns);
    for (size_t i = 0; i < static_cast<size_t>(weights.k); ++i) {
      const SumError error = inner_[row * static_cast<size_t>(weights.k) + i];
      for (size_t n = 0; n < columns; ++n) {
        const double w = std::abs(weights.value[i * columns + n]);
        passed[n].hard += error.hard * w;
        passed[n].tight += error.tight * w * error.tight * w;
      }
    }
    for (SumError& each : passed) {
      each.hard *= 0x1.1p0;
      each.tight = std::min(each.hard, 0x1.1p0 * std::sqrt(each.tight));
    }
    return passed;
  }

  // The errors of the rows' factors: a gated shared expert computes its own.
  std::vector<SumError> WeightErrors() const {
    std::vector<SumError> errors(rows_.tokens.size());
    if (rows_.shared_score.sum.empty()) return errors;
    const AnyKernelErrors score(
        SumOperands{rows_.x, data_.shared_gate.dense, rows_.shared_score, rounds_x()}, models_);
    for (size_t row = 0; row < errors.size(); ++row) {
      const SumError error = score.At(static_cast<int64_t>(row), 0);
      const double x = std::abs(rows_.shared_score.sum[row]);
      // The logistic function's slope is at most 1/4; it is evaluated like SiLU.
      const double own = 16 * kUnit32 * rows_.weights[row] * (1.0 + x) + 0x1p-126;
      errors[row] = {0.25 * error.hard + own, 0.25 * error.tight + own};
    }
    return errors;
  }

  const ExpertsData& data_;
  const ExpertRows& rows_;
  const std::vector<KernelModel>& models_;
  const reference::Mlp mlp_;
  std::vector<SumError> inner_;  ///< [rows, inner]
};

}  // namespace

std::vector<Allowance> ExpertsAllowances(const ExpertsData& data,
                                         const std::vector<KernelModel>& models) {
  std::vector<Allowance> allowances(data.expected.size());
  for (size_t i = 0; i < data.exact.size(); ++i) allowances[i].exact = data.exact[i];
  const auto is_exact = [](const Allowance& allowance) { return allowance.exact; };
  if (std::all_of(allowances.begin(), allowances.end(), is_exact)) return allowances;
  std::vector<double> magnitude(data.expected.size(), 0.0);
  for (const ExpertRows& rows : data.rows) {
    ChainErrors(data, rows, models).AddTo(&allowances, &magnitude);
  }
  // Additions of the results of a token in fp32.
  const double gamma = static_cast<double>(data.c.top_k + 1) * kUnit32;
  for (size_t i = 0; i < allowances.size(); ++i) {
    allowances[i].hard += gamma * magnitude[i];
    allowances[i].tight += gamma * magnitude[i];
  }
  return allowances;
}

}  // namespace marlin::conformance
