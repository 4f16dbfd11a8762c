// marlin_batched_finish: marlin_finish of matrix z of a batch (finish.h, batch.h).
#include "backends/metal/kernels/gemm/batch.h"
#include "backends/metal/kernels/gemm/finish.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void marlin_batched_finish(device const float* partials
                                      [[buffer(MARLIN_BUFFER_PARTIALS)]],
                                      device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                      device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
                                      device const float* row_weight
                                      [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
                                      constant BatchParameters& batch
                                      [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                      uint3 position [[thread_position_in_grid]]) {
  const Output output = OutputAt(position.z, {out, bias, row_weight}, batch);
  Finish(FloatsAt(partials, long(position.z) * batch.partials), output, position.xy, batch.product);
}
