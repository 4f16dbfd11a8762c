// The finishing steps of a product: bias, activation, gate, row weight, cast.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_EPILOGUE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_EPILOGUE_H_

#include "backends/metal/kernels/constants.h"
#include "backends/metal/kernels/elements.h"

namespace marlin {
namespace kernels {

/// Where finished numbers go, and what finishes them.
struct Output {
  device uchar* data;
  device const uchar* bias;
  device const float* row_weight;
};

/// x times the logistic function of y, without overflow.
static inline float TimesSigmoid(float x, float y) {
  const float e = metal::precise::exp(-metal::fabs(y));
  return (y < 0.0f ? x * e : x) / (1.0f + e);
}

/// 0 for negative numbers; a NaN stays, also where the compiler thinks that there are none.
static inline float Relu(float x) {
  constexpr uint kMinusZero = 0x80000000u;
  constexpr uint kMinusInfinity = 0xff800000u;
  const uint bits = as_type<uint>(x);
  return bits > kMinusZero && bits <= kMinusInfinity ? 0.0f : x;
}

static inline float Activate(float x) {
  switch (activation) {
    case 1:  // kSilu
      return TimesSigmoid(x, x);
    case 2:  // kGeluTanh: x (1 + tanh u) / 2 = x sigmoid(2 u)
      return TimesSigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
    case 3:  // kRelu
      return Relu(x);
    default:
      return x;
  }
}

static inline float Biased(Output output, int column, float sum) {
  return has_bias ? sum + LoadElement(output.bias, bias_type, column) : sum;
}

/// Casts and stores a finished number but for its row's weight.
static inline void StoreFinished(Output output, int row, int column, float value, Parameters p) {
  if (has_row_weight) value *= output.row_weight[row];
  StoreElement(output.data, output_type, long(row) * p.output_stride + column, value);
}

/// Whether the same threads have the sums of a gate and of what it gates, and finish them at once.
static inline bool Paired() { return gated && !partial; }

/// The sums of row and column, and of the column that it gates, finished. What lies outside of the
/// output is dropped.
static inline void StoreGated(Output output, int row, int column, float gate, float up,
                              Parameters p) {
  const int columns = p.n / 2;
  if (row >= p.m || column >= columns) return;
  const float value = Activate(Biased(output, column, gate)) * Biased(output, column + columns, up);
  StoreFinished(output, row, column, value, p);
}

/// The sum of row and column, finished, or as it is among the partial sums of `split`. What lies
/// outside of the product is dropped.
static inline void StoreSum(Output output, int split, int row, int column, float sum,
                            Parameters p) {
  if (row >= p.m || column >= p.n) return;
  if (partial) {
    const long at = (long(split) * p.m + row) * p.n + column;
    ((device float*)output.data)[at] = sum;
    return;
  }
  StoreFinished(output, row, column, Activate(Biased(output, column, sum)), p);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_EPILOGUE_H_
