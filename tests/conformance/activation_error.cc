#include "activation_error.h"

#include <algorithm>
#include <cmath>

#include "reference/decoder.h"
#include "reference/gemm.h"

namespace marlin::conformance {
namespace {

// Upper bound on the second derivatives of SiLU and GELU; it limits how the slope changes.
constexpr double kActivationCurvature = 1.2;
// Upper bound on their slope.
constexpr double kSteepestSlope = 1.13;
// The fp32 evaluation of an activation function is within this many units of its value and of the
// argument of its exponential.
constexpr double kActivationUnits = 16;

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

// Returns the error of a product, which is rounded once.
double AfterProduct(double a, double a_error, double b, double b_error) {
  return std::abs(a) * b_error + std::abs(b) * a_error + a_error * b_error +
         kUnit32 * std::abs(a * b) + 0x1p-149;
}

}  // namespace

double AfterActivation(Activation activation, double x, double error) {
  const bool smooth = activation == Activation::kSilu || activation == Activation::kGeluTanh;
  if (!smooth || !std::isfinite(x)) return error;
  return SlopeNear(activation, x, error) * error + ActivationError(activation, x);
}

double AfterGate(const GateOptions& options, double gate, double gate_error, double up,
                 double up_error) {
  if (options.limit == 0) {
    return AfterProduct(reference::Activate(options.activation, gate),
                        AfterActivation(options.activation, gate, gate_error), up, up_error);
  }
  // x sigmoid(alpha x) is SiLU of alpha x, divided by alpha. Clamping moves no two numbers apart.
  const auto limit = static_cast<double>(options.limit);
  const auto alpha = static_cast<double>(options.alpha);
  const double x = alpha * std::min(gate, limit);
  const double x_error = alpha * gate_error + kUnit32 * std::abs(x);
  const double shifted = std::clamp(up, -limit, limit) + 1;
  return AfterProduct(reference::Activate(Activation::kSilu, x) / alpha,
                      AfterActivation(Activation::kSilu, x, x_error) / alpha, shifted,
                      up_error + kUnit32 * (std::abs(shifted) + up_error));
}

}  // namespace marlin::conformance
