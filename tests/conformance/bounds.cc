#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "activation_error.h"
#include "reference/decoder.h"
#include "reference/elements.h"
#include "sum_error.h"

namespace marlin::conformance {
namespace {

double OutputUnit(DType type) { return std::ldexp(1.0, -reference::FloatTypeOf(type).precision); }

// Half the smallest subnormal.
double OutputStep(DType type) {
  const reference::FloatType info = reference::FloatTypeOf(type);
  return std::ldexp(1.0, info.min_exponent - info.precision);
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
  const EpilogueError epilogue(problem);
  // The sums of an exact lattice have no errors.
  const std::vector<double> a = lattice ? std::vector<double>() : reference::Elements(problem.a);
  std::optional<SumErrors> errors;
  if (!lattice) {
    errors.emplace(SumOperands{a, problem.dense, problem.product, c.allow_bf16_activations}, model,
                   grade);
  }
  const auto sum_error = [&](int64_t m, int64_t n) {
    return errors ? errors->At(m, n) : SumError{};
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
