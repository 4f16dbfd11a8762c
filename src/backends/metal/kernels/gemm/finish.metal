// marlin_finish: split-K reduction and epilogue (finish.h).
#include "backends/metal/kernels/gemm/finish.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void marlin_finish(device const float* partials [[buffer(MARLIN_BUFFER_PARTIALS)]],
                              device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                              device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
                              device const float* row_weight [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
                              constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                              uint2 position [[thread_position_in_grid]]) {
  const Output output = {out, bias, row_weight};
  Finish(partials, output, position, p);
}
