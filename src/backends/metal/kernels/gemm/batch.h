// MatrixAt: the operands of one matrix of a batch, which a launch has along its grid's z.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_BATCH_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_BATCH_H_

#include "backends/metal/kernels/activations.h"
#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/epilogue.h"
#include "backends/metal/kernels/gemm/batch_parameters.h"

namespace marlin {
namespace kernels {

struct BatchedMatrix {
  PackedWeights weights;
  Input input;
  Output output;
  Parameters product;
};

static inline device const float* FloatsAt(device const float* first, long bytes) {
  return (device const float*)((device const uchar*)first + bytes);
}

static METAL_FUNC Output OutputAt(uint matrix, Output first, constant BatchParameters& batch) {
  const long i = long(matrix);
  const Output output = {first.data + i * batch.output, first.bias + i * batch.bias,
                         FloatsAt(first.row_weight, i * batch.row_weight)};
  return output;
}

/// `weights`, `input` and `output`: of the first matrix.
static METAL_FUNC BatchedMatrix MatrixAt(uint matrix, PackedWeights weights,
                                         device const uchar* input, Output output,
                                         constant BatchParameters& batch) {
  const long i = long(matrix);
  BatchedMatrix made;
  made.weights = {weights.codes + i * batch.codes, weights.scales + i * batch.scales,
                  weights.extras + i * batch.extras, weights.table};
  made.input = {input + i * batch.input, nullptr};
  made.output = OutputAt(matrix, output, batch);
  made.product = batch.product;
  made.product.global_scale = batch.global_scales[matrix];
  return made;
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_BATCH_H_
