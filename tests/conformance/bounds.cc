#include "bounds.h"

#include <algorithm>
#include <cmath>

#include "reference/elements.h"

namespace marlin::conformance {
namespace {

constexpr double kUnit32 = 0x1p-24;
// Upper bound on the second derivatives of SiLU and GELU; it limits how the slope changes.
constexpr double kActivationCurvature = 1.2;
// Upper bound on their slope.
constexpr double kSteepestSlope = 1.13;
// The fp32 evaluation of an activation function is within this many units of its value and of the
// argument of its exponential.
constexpr double kActivationUnits = 16;

double OutputUnit(DType type) { return std::ldexp(1.0, -reference::FloatTypeOf(type).precision); }

// Half the smallest subnormal.
double OutputStep(DType type) {
  const reference::FloatType info = reference::FloatTypeOf(type);
  return std::ldexp(1.0, info.min_exponent - info.precision);
}

struct SumError {
  double hard = 0;
  double tight = 0;
};

// Error of activations quantized with a step that is a fraction `part` of the block's maximum: per
// (row, column) the sum over the blocks of part * amax(a) * sum |w|, and the same as a random walk.
class StepError {
 public:
  StepError(const Problem& problem, int64_t block, double part) : problem_(problem), block_(block) {
    if (block == 0) return;
    const Case& c = problem.c;
    blocks_ = (c.k + block - 1) / block;
    const auto n = static_cast<size_t>(c.n);
    sums_.resize(static_cast<size_t>(blocks_) * n);
    squares_.resize(sums_.size());
    for (int64_t k = 0; k < c.k; ++k) {
      for (size_t column = 0; column < n; ++column) {
        const double w = problem.dense.magnitude[static_cast<size_t>(k) * n + column];
        sums_[static_cast<size_t>(k / block) * n + column] += w;
        squares_[static_cast<size_t>(k / block) * n + column] += w * w;
      }
    }
    // Scales are clamped to the smallest normal number, however small the activations are.
    steps_.assign(static_cast<size_t>(c.m * blocks_), 0x1p-127);
    for (int64_t m = 0; m < c.m; ++m) {
      for (int64_t k = 0; k < c.k; ++k) {
        const double a = reference::LoadElement(problem.a.data(), problem.a.dtype(),
                                                m * problem.a.stride(0) + k);
        double& step = steps_[static_cast<size_t>(m * blocks_ + k / block)];
        step = std::max(step, std::abs(a) * part);
      }
    }
  }

  SumError At(int64_t m, int64_t n) const {
    SumError error;
    if (block_ == 0) return error;
    double square = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      const double step = steps_[static_cast<size_t>(m * blocks_ + b)];
      const auto at = static_cast<size_t>(b * problem_.c.n + n);
      error.hard += step * sums_[at];
      square += step * step * squares_[at];
    }
    // A rounding error is uniform in +-step: its standard deviation is step / sqrt(3).
    error.tight = std::min(error.hard, 6.0 * std::sqrt(square / 3.0));
    return error;
  }

 private:
  const Problem& problem_;
  int64_t block_;
  int64_t blocks_ = 0;
  std::vector<double> sums_;
  std::vector<double> squares_;
  std::vector<double> steps_;
};

// Error of sums below the normal range: fp32 loses at most half its smallest step per operation;
// bf16 matrix units flush subnormal inputs, weights and sums to zero.
double SumUnderflow(const Problem& problem, Grade grade, double row_sum) {
  const double step = grade == Grade::kBf16Compute ? 0x1p-126 : 0x1p-149;
  return step * (row_sum + 2.0 * static_cast<double>(problem.c.k) + 4.0);
}

double ActivationError(Activation activation, double x) {
  const double value = std::abs(reference::Activate(activation, x));
  // The logistic factor may flush to zero below the normal range.
  const double underflow = (1.0 + std::abs(x)) * 0x1p-126;
  switch (activation) {
    case Activation::kSilu:
      return kActivationUnits * kUnit32 * value * (1.0 + std::abs(x)) + underflow;
    case Activation::kGeluTanh: {
      const double inner = std::abs(1.6 * (x + 0.044715 * x * x * x));
      return kActivationUnits * kUnit32 * value * (1.0 + inner) + underflow;
    }
    default:
      return 0;
  }
}

// Returns the largest slope of a smooth activation function within `error` of x.
double SlopeNear(Activation activation, double x, double error) {
  const double step = 1e-6 * (1.0 + std::abs(x));
  const double slope =
      (reference::Activate(activation, x + step) - reference::Activate(activation, x - step)) /
      (2.0 * step);
  return std::min(kSteepestSlope, std::abs(slope) + kActivationCurvature * (error + step));
}

// Returns the error of act(x + e) with |e| <= error, evaluated in fp32.
double AfterActivation(Activation activation, double x, double error) {
  const bool smooth = activation == Activation::kSilu || activation == Activation::kGeluTanh;
  if (!smooth || !std::isfinite(x)) return error;
  return SlopeNear(activation, x, error) * error + ActivationError(activation, x);
}

class EpilogueError {
 public:
  explicit EpilogueError(const Problem& problem) : problem_(problem) {}

  double Biased(int64_t m, int64_t n) const {
    return problem_.product.sum[static_cast<size_t>(m * problem_.c.n + n)] + Bias(n);
  }

  // `gate_error` and `up_error` are the errors of the sums at columns n and out_n + n.
  double At(int64_t m, int64_t n, double gate_error, double up_error) const {
    const Case& c = problem_.c;
    const double x = Biased(m, n);
    double error = AfterActivation(c.activation, x, AfterBias(x, gate_error));
    double value = reference::Activate(c.activation, x);
    if (c.gated) {
      const double up = Biased(m, problem_.out_n() + n);
      const double up_total = AfterBias(up, up_error);
      error = std::abs(value) * up_total + std::abs(up) * error + error * up_total;
      value *= up;
      error += kUnit32 * std::abs(value) + 0x1p-149;
    }
    if (c.row_weight) {
      const double weight = std::abs(reference::LoadElement(
          problem_.epilogue.row_weight.data(), problem_.epilogue.row_weight.dtype(), m));
      error = error * weight + kUnit32 * std::abs(value) * weight + 0x1p-149;
    }
    return error;
  }

  // Whether fp32 represents every intermediate result of an output whose sums are exact.
  bool IsExact(int64_t m, int64_t n) const {
    const Case& c = problem_.c;
    if (c.activation == Activation::kSilu || c.activation == Activation::kGeluTanh) return false;
    if (!c.gated) return true;
    const double product =
        reference::Activate(c.activation, Biased(m, n)) * Biased(m, problem_.out_n() + n);
    return reference::RoundTo(product, DType::kF32) == product;
  }

 private:
  double Bias(int64_t n) const {
    const TensorView& bias = problem_.epilogue.bias;
    return bias.empty() ? 0.0 : reference::LoadElement(bias.data(), bias.dtype(), n);
  }
  double AfterBias(double x, double error) const {
    if (problem_.epilogue.bias.empty() || error == 0) return error;
    return error + kUnit32 * (std::abs(x) + error);
  }

  const Problem& problem_;
};

}  // namespace

bool LatticeIsExactFor(const Problem& problem, const ErrorModel& model, Grade grade) {
  const Case& c = problem.c;
  if (!IsLattice(c.data)) return false;
  switch (grade) {
    case Grade::kExact:
      return true;
    case Grade::kBf16Compute:
      return problem.weights_fit_bf16 &&
             !(c.data == DataClass::kLatticeWide && c.allow_bf16_activations);
    case Grade::kW4A8:
      // 4-bit values with sums below 2^13 are exact in e4m3 and in the block accumulators.
      return c.data == (model.int8_block != 0 ? DataClass::kLatticeInt8 : DataClass::kLattice);
  }
  return false;
}

std::vector<Allowance> Allowances(const Problem& problem, const ErrorModel& model, Grade grade) {
  const Case& c = problem.c;
  const bool lattice = LatticeIsExactFor(problem, model, grade);
  const bool int8 = model.int8_block != 0;
  const bool steps = !lattice && (int8 || model.activation_floor > 0);
  const StepError step_error(problem,
                             !steps ? 0
                             : int8 ? model.int8_block
                                    : c.k,
                             int8 ? 1 / 254.0 : model.activation_floor);
  const EpilogueError epilogue(problem);

  const auto depth = static_cast<double>((c.k + model.lanes - 1) / model.lanes + model.extra_depth);
  const double u = model.accumulate_unit;
  const auto gamma_of = [](double d, double unit) { return d * unit / (1.0 - d * unit); };
  const auto block_depth = static_cast<double>(model.block_depth);
  const double gamma = gamma_of(depth, u) + gamma_of(block_depth, model.block_unit);
  const double gamma_tight =
      std::min(gamma, 6.0 * (std::sqrt(depth) * u + std::sqrt(block_depth) * model.block_unit));
  // Callers may allow one rounding of the activations to bf16 where they would otherwise be split
  // into two bf16 terms.
  const bool rounds_activations = grade == Grade::kBf16Compute && c.allow_bf16_activations;
  const double activation_unit = rounds_activations ? 0x1p-8 : model.activation_unit;
  const double unit = model.weight_unit + activation_unit;

  std::vector<double> row_sum(static_cast<size_t>(c.m));
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t k = 0; k < c.k; ++k) {
      row_sum[static_cast<size_t>(m)] += std::abs(
          reference::LoadElement(problem.a.data(), problem.a.dtype(), m * problem.a.stride(0) + k));
    }
  }
  const auto sum_error = [&](int64_t m, int64_t n) {
    const auto at = static_cast<size_t>(m * c.n + n);
    if (lattice) return SumError{};
    const double s = problem.product.magnitude[at];
    const double root = problem.product.root_square[at];
    const SumError step = step_error.At(m, n);
    const double underflow = SumUnderflow(problem, grade, row_sum[static_cast<size_t>(m)]);
    return SumError{gamma * s + unit * s + step.hard + underflow,
                    gamma_tight * s + unit * std::min(s, 6.0 * root) + step.tight + underflow};
  };

  const int64_t out_n = problem.out_n();
  std::vector<Allowance> allowances(static_cast<size_t>(c.m * out_n));
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t n = 0; n < out_n; ++n) {
      const SumError gate = sum_error(m, n);
      const SumError up = c.gated ? sum_error(m, out_n + n) : SumError{};
      Allowance& allowance = allowances[static_cast<size_t>(m * out_n + n)];
      allowance.hard = epilogue.At(m, n, gate.hard, up.hard);
      allowance.tight = epilogue.At(m, n, gate.tight, up.tight);
      allowance.exact = lattice && epilogue.IsExact(m, n);
    }
  }
  return allowances;
}

Verdict Judge(double got, double expected, const Allowance& allowance, DType c_type,
              bool lenient_infinity) {
  if (std::isnan(expected)) return {std::isnan(got), 0};
  if (std::isinf(expected)) {
    return {got == expected || (lenient_infinity && !std::isfinite(got)), 0};
  }
  const double rounded = reference::RoundTo(expected, c_type);
  if (allowance.exact) return {got == rounded, got == rounded ? 0.0 : 1e9};

  const double hard = allowance.hard + OutputUnit(c_type) * (std::abs(expected) + allowance.hard) +
                      OutputStep(c_type);
  const double tight = allowance.tight +
                       OutputUnit(c_type) * (std::abs(expected) + allowance.tight) +
                       OutputStep(c_type);
  if (!std::isfinite(got)) {
    // A sum of -Inf may have become NaN; an activation that maps -Inf to 0 propagates the NaN.
    if (lenient_infinity && std::isnan(got) && std::isinf(allowance.hard)) return {true, 0};
    // Overflow of the output type gives Inf, which is correct if a value inside the bound rounds to
    // it.
    const double farthest = expected + std::copysign(allowance.hard, got);
    return {std::isinf(got) && reference::RoundTo(farthest, c_type) == got, 0};
  }
  const double error = std::abs(got - expected);
  // The rounding of a 16-bit output would mask the error of the sum, so only fp32 outputs are
  // measured.
  const bool tells = c_type == DType::kF32 && tight > 0;
  return {error <= hard && error <= tight, tells ? error / tight : 0.0};
}

}  // namespace marlin::conformance
