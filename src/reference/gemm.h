// GEMM and its epilogue in double precision, with the sums from which error bounds are built.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/gemm.h"
#include "marlin/tensor.h"
#include "reference/dequantize.h"

namespace marlin::reference {

/// A x W of [m, k] x [k, n], before any epilogue; all [m, n].
struct Product {
  int64_t m = 0;
  int64_t n = 0;
  std::vector<double> sum;          ///< sum_k a w
  std::vector<double> magnitude;    ///< S = sum_k |a| * magnitude(w), at least sum |a w|
  std::vector<double> root_square;  ///< sqrt(sum_k (a * magnitude(w))^2)
};

/// Multiplies A [m, k] (f32, bf16, f16, any strides) with W. NaN and Inf propagate as IEEE says.
/// Precondition: a.dim(1) == weights.k.
Product Multiply(const TensorView& a, const DenseWeights& weights);
/// The same with A [rows, weights.k] in C order.
Product Multiply(std::span<const double> a, int64_t rows, const DenseWeights& weights);

/// none, SiLU x / (1 + e^-x), GELU by tanh, ReLU; NaN stays NaN.
double Activate(Activation activation, double x);

/// The epilogue's operands; views as in GemmOptions.
struct Epilogue {
  TensorView bias;
  Activation activation = Activation::kNone;
  bool gated = false;
  TensorView row_weight;
};

/// The final output, [m, n] or [m, n / 2] when gated, before rounding to an output type.
std::vector<double> Finish(const Product& product, const Epilogue& epilogue);

}  // namespace marlin::reference
