// Double-precision reference of an expert of an MoE layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/decoder.h"
#include "reference/dequantize.h"
#include "reference/gemm.h"

namespace marlin::reference {

/// x W + bias.
struct LinearMap {
  const DenseWeights* weights = nullptr;  ///< Null: there is none.
  std::span<const float> bias = {};       ///< [n], or empty.

  double bias_at(int64_t n) const {
    return bias.empty() ? 0.0 : double{bias[static_cast<size_t>(n)]};
  }
};

/// down(activation(gate(x)) * up(x)); without `up`, `gate` is gate | up along n.
struct Mlp {
  LinearMap gate;
  LinearMap up;
  LinearMap down;

  int64_t inner() const { return down.weights->k; }
};

/// The results of an MLP for some rows, and the sums that lead to them.
struct MlpRun {
  Product gate;               ///< Without biases; with `up` beside, if the MLP has it so.
  Product up;                 ///< Empty, if it is beside.
  std::vector<double> inner;  ///< [rows, inner]: activation(gate) * up.
  Product down;               ///< Without biases.

  /// The argument of the activation, with its bias, and its factor.
  double GateAt(const Mlp& mlp, int64_t row, int64_t i) const;
  double UpAt(const Mlp& mlp, int64_t row, int64_t i) const;
  /// The result, with its bias.
  double DownAt(const Mlp& mlp, int64_t row, int64_t n) const;
};

/// x is [rows, hidden] in C order.
MlpRun RunMlp(const Mlp& mlp, std::span<const double> x, int64_t rows, const GateOptions& options);

}  // namespace marlin::reference
