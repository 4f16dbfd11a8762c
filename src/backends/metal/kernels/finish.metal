// marlin_finish: out[m, n] = epilogue(sum over splits of partials[split, m, n]), in the order of the
// splits; and marlin_zero_reduction, which clears partial sums that nothing else writes.
//
// One thread an output. Error model: splits - 1 additions in fp32.
#include "backends/metal/kernels/epilogue.h"

using namespace metal;
using namespace marlin::kernels;

static inline float SumOfSplits(device const float* partials, long at, constant Parameters& p) {
  const long stride = long(p.m) * p.n;
  float sum = partials[at];
  for (int split = 1; split < p.splits; ++split) sum += partials[split * stride + at];
  return sum;
}

[[kernel]] void marlin_finish(device const float* partials [[buffer(MARLIN_BUFFER_PARTIALS)]],
                              device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                              device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
                              device const float* row_weight [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
                              constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                              uint2 position [[thread_position_in_grid]]) {
  const int columns = gated ? p.n / 2 : p.n;
  const int column = int(position.x);
  const int row = int(position.y);
  if (column >= columns) return;
  const Output output = {out, bias, row_weight};
  const long at = long(row) * p.n + column;
  float value = Activate(Biased(output, column, SumOfSplits(partials, at, p)));
  if (gated) value *= Biased(output, column + columns, SumOfSplits(partials, at + columns, p));
  StoreFinished(output, row, column, value, p);
}
