// Finish, the split-K reduction: out[m, n] = epilogue(sum over splits of partials[split, m, n]),
// added in order of the splits.
//
// One thread per output. Error model: splits - 1 additions in fp32.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_FINISH_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_FINISH_H_

#include "backends/metal/kernels/epilogue.h"

namespace marlin {
namespace kernels {

static inline float SumOfSplits(device const float* partials, long at, Parameters p) {
  const long stride = long(p.m) * p.n;
  float sum = partials[at];
  for (int split = 1; split < p.splits; ++split) sum += partials[split * stride + at];
  return sum;
}

static METAL_FUNC void Finish(device const float* partials, Output output, uint2 position,
                              Parameters p) {
  const int columns = gated ? p.n / 2 : p.n;
  const int column = int(position.x);
  const int row = int(position.y);
  if (column >= columns) return;
  const long at = long(row) * p.n + column;
  const float sum = SumOfSplits(partials, at, p);
  if (gated) {
    StoreGated(output, row, column, sum, SumOfSplits(partials, at + columns, p), p);
  } else {
    StoreFinished(output, row, column, Activate(Biased(output, column, sum)), p);
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_FINISH_H_
