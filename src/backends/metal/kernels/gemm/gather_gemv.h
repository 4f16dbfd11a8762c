// GatherGemv: a matrix of its own for each row of the result, for frameworks that have the matrices
// of all experts in one array.
//
//   out[i, n] = sum over k of A[i / ids_of_row, k] * W[ids[i]][k, n]
//
// Grid of threadgroups: [strips][ids]. Main loop, order of additions and error model are as in
// gemv.h, so a row has the bits of a GEMV with its matrix. The result of an id that is none is NaN.
// Threadgroup memory: GemvSums.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_GEMM_GATHER_GEMV_H_
#define MARLIN_BACKENDS_METAL_KERNELS_GEMM_GATHER_GEMV_H_

#include "backends/metal/kernels/gemm/gather_parameters.h"
#include "backends/metal/kernels/gemm/gemv.h"

namespace marlin {
namespace kernels {

/// The matrices of all experts.
struct MatrixStack {
  PackedWeights first;
  device const float* global_scales;
};

static inline PackedWeights MatrixAt(MatrixStack stack, int matrix, GatherParameters p) {
  PackedWeights weights = stack.first;
  weights.codes += matrix * p.codes_bytes;
  weights.scales += matrix * p.scales_bytes;
  weights.extras += matrix * p.extras_bytes;
  return weights;
}

static METAL_FUNC void GatherGemv(MatrixStack stack, device const int* ids, Input input,
                                  device uchar* out, threadgroup float* sums, uint2 group,
                                  SimdgroupPlace place, GatherParameters p) {
  const int row = int(group.y);
  const int id = ids[row];
  const bool is_matrix = id >= 0 && id < p.matrices;  // The same in the whole threadgroup.
  if (is_matrix) {
    p.product.global_scale = stack.global_scales[id];
    GemvStrips<1> strips;
    strips.strip[0] = StripAt(group.x, MatrixAt(stack, id, p), p.product);
    const LaneChunks own = {row / p.ids_of_row, place.simdgroup, place.simdgroups, place.lane};
    SumStrips<1, 1>(strips, input, sums, own, place, p.product);
  }
  const int i = place.simdgroup * kLanes + place.lane;
  const int column = int(group.x) * kStripOutputs + i;
  if (i >= kStripOutputs || column >= p.product.n) return;
  const float sum =
      is_matrix ? SumOverSimdgroups<1, 1>(sums + i, place.simdgroups) : as_type<float>(0x7fc00000u);
  StoreElement(out, output_type, row * p.product.output_stride + column, sum);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_GEMM_GATHER_GEMV_H_
