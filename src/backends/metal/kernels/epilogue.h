// The GEMM epilogue: bias, activation, GLU gate, row weight, cast.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_EPILOGUE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_EPILOGUE_H_

#include "backends/metal/kernels/constants.h"
#include "backends/metal/kernels/elements.h"

namespace marlin {
namespace kernels {

/// The output and the operands of the epilogue.
struct Output {
  device uchar* data;
  device const uchar* bias;
  device const float* row_weight;
};

/// x * sigmoid(y), without overflow.
static inline float TimesSigmoid(float x, float y) {
  const float e = metal::precise::exp(-metal::fabs(y));
  return (y < 0.0f ? x * e : x) / (1.0f + e);
}

/// max(x, 0), except that NaNs stay NaNs even if the compiler assumes that there are none.
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

/// Applies the row weight, casts and stores.
static inline void StoreFinished(Output output, int row, int column, float value, Parameters p) {
  if (has_row_weight) value *= output.row_weight[row];
  StoreElement(output.data, output_type, long(row) * p.output_stride + column, value);
}

/// GLU: whether the same threads accumulate gate and up, and so apply the epilogue directly.
static inline bool Paired() { return gated && !partial; }

/// GLU epilogue of the accumulators `gate` and `up`. Drops outputs outside of [m, n / 2].
static inline void StoreGated(Output output, int row, int column, float gate, float up,
                              Parameters p) {
  const int columns = p.n / 2;
  if (row >= p.m || column >= columns) return;
  const float value = Activate(Biased(output, column, gate)) * Biased(output, column + columns, up);
  StoreFinished(output, row, column, value, p);
}

/// Stores the accumulator of (row, column) if that is inside [m, n]: through the epilogue, or raw
/// into the split-K partials of `split`.
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
