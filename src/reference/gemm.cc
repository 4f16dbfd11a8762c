#include "reference/gemm.h"

#include <cmath>

#include "reference/elements.h"

namespace marlin::reference {

Product Multiply(std::span<const double> a, int64_t rows, const DenseWeights& weights) {
  const int64_t n_count = weights.n;
  Product product{rows, n_count, {}, {}, {}};
  const auto count = static_cast<size_t>(product.m * n_count);
  product.sum.resize(count);
  product.magnitude.resize(count);
  product.root_square.resize(count);
  for (int64_t m = 0; m < product.m; ++m) {
    double* sum = product.sum.data() + m * n_count;
    double* magnitude = product.magnitude.data() + m * n_count;
    double* square = product.root_square.data() + m * n_count;
    for (int64_t k = 0; k < weights.k; ++k) {
      const double x = a[static_cast<size_t>(m * weights.k + k)];
      const double* value = weights.value.data() + k * n_count;
      const double* bound = weights.magnitude.data() + k * n_count;
      for (int64_t n = 0; n < n_count; ++n) {
        const double term = std::abs(x) * bound[n];
        sum[n] += x * value[n];
        magnitude[n] += term;
        square[n] += term * term;
      }
    }
    for (int64_t n = 0; n < n_count; ++n) square[n] = std::sqrt(square[n]);
  }
  return product;
}

Product Multiply(const TensorView& a, const DenseWeights& weights) {
  return Multiply(Elements(a), a.dim(0), weights);
}

double Activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
    case Activation::kGeluTanh: {
      const double inner = 0.7978845608028654 * (x + 0.044715 * x * x * x);  // sqrt(2 / pi)
      // x (1 + tanh u) / 2 without the cancellation for u near -1.
      return x / (1.0 + std::exp(-2.0 * inner));
    }
    case Activation::kRelu:
      return x < 0 ? 0.0 : x;
  }
  return x;
}

std::vector<double> Finish(const Product& product, const Epilogue& epilogue) {
  const int64_t out_n = epilogue.gated ? product.n / 2 : product.n;
  std::vector<double> out(static_cast<size_t>(product.m * out_n));
  const auto before = [&](int64_t m, int64_t n) {
    const double bias =
        epilogue.bias.empty()
            ? 0.0
            : LoadElement(epilogue.bias.data(), epilogue.bias.dtype(), n * epilogue.bias.stride(0));
    return product.sum[static_cast<size_t>(m * product.n + n)] + bias;
  };
  for (int64_t m = 0; m < product.m; ++m) {
    const double row_weight =
        epilogue.row_weight.empty()
            ? 1.0
            : LoadElement(epilogue.row_weight.data(), epilogue.row_weight.dtype(),
                          m * epilogue.row_weight.stride(0));
    for (int64_t n = 0; n < out_n; ++n) {
      double value = Activate(epilogue.activation, before(m, n));
      if (epilogue.gated) value *= before(m, out_n + n);
      out[static_cast<size_t>(m * out_n + n)] = value * row_weight;
    }
  }
  return out;
}

}  // namespace marlin::reference
