// Products of rows with a matrix of each head, on matrix fragments, in fp32: HeadProduct, and the
// keys and values of heads from the latents of MLA.
//
//   out[row, output] = sum over i of rows[row, i] * weights[output, i], or * weights[i, output]
//
//   A threadgroup takes 8 or 32 rows x 64 outputs, a simdgroup all rows x 8 outputs: a weight is
//   loaded once per threadgroup, straight into a fragment. No threadgroup memory, no barriers.
//
// Fragments take every fourth input, as in gemm_direct.h. The order of additions depends on neither
// the rows nor their number. Depends on the element layout of fragments (FragmentRow).
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_HEAD_PRODUCT_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_HEAD_PRODUCT_H_

#include "backends/metal/kernels/attention/cache_elements.h"
#include "backends/metal/kernels/attention/head_product_parameters.h"
#include "backends/metal/kernels/constants.h"
#include "backends/metal/kernels/fragments.h"

namespace marlin {
namespace kernels {

/// Rows of `inputs` elements of input_type.
struct ProductRows {
  device const uchar* data;
  long stride;
  int rows;
  int inputs;
};

/// A head's matrix.
struct ProductWeights {
  device const uchar* data;
  int type;
  long stride;
  int outputs;
  bool by_input;  ///< [inputs][outputs] instead of [outputs][inputs].
};

template <int kRowFragments>
struct ProductSums {
  simdgroup_float8x8 row[kRowFragments];
};

/// Four adjacent inputs of a row, zeros beyond the last one.
static inline float4 LoadProductRow(ProductRows rows, int row, int input) {
  float4 quad = float4(0.0f);
  if (row >= rows.rows || input >= rows.inputs) return quad;
  const long at = row * rows.stride + input;
  if (aligned_input) return LoadCacheQuad(rows.data, input_type, at);
  MARLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (input + i < rows.inputs) quad[i] = LoadCacheElement(rows.data, input_type, at + i);
  }
  return quad;
}

/// The weight of an output and an input, zero beyond the last ones.
static inline float LoadWeight(ProductWeights weights, int output, int input, int inputs) {
  if (output >= weights.outputs || input >= inputs) return 0.0f;
  const long at =
      weights.by_input ? input * weights.stride + output : output * weights.stride + input;
  return LoadElement(weights.data, weights.type, at);
}

/// Four adjacent inputs of an output.
static inline float4 LoadWeights(ProductWeights weights, int output, int input, int inputs) {
  if (aligned_keys && !weights.by_input && output < weights.outputs && input < inputs) {
    return LoadQuad(weights.data, weights.type, output * weights.stride + input);
  }
  float4 quad;
  MARLIN_UNROLL
  for (int i = 0; i < 4; ++i) quad[i] = LoadWeight(weights, output, input + i, inputs);
  return quad;
}

/// Rows from `first_row` on times outputs `first_output` to `first_output` + 7.
template <int kRowFragments>
static METAL_FUNC void MultiplyHead(thread ProductSums<kRowFragments>& sums, ProductRows rows,
                                    int first_row, ProductWeights weights, int first_output,
                                    ushort lane) {
  const int row = FragmentRow(lane);
  const int column = FragmentColumn(lane);
  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    sums.row[i] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int input = 0; input < rows.inputs; input += 4 * kSide) {
    const float4 first = LoadWeights(weights, first_output + column, input + 4 * row, rows.inputs);
    const float4 second =
        LoadWeights(weights, first_output + column + 1, input + 4 * row, rows.inputs);
    float4 low[kRowFragments];
    float4 high[kRowFragments];
    MARLIN_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const int at = first_row + i * kSide + row;
      low[i] = LoadProductRow(rows, at, input + 4 * column);
      high[i] = LoadProductRow(rows, at, input + 4 * column + 4);
    }
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const simdgroup_float8x8 b = FragmentOf(float2(first[j], second[j]));
      MARLIN_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        metal::simdgroup_multiply_accumulate(sums.row[i], FragmentOf(float2(low[i][j], high[i][j])),
                                             b, sums.row[i]);
      }
    }
  }
}

/// Where results go: element 0 is of row 0 and output 0. Others than these are not stored.
struct ProductTarget {
  device uchar* data;
  long first;
  long stride;
  int rows;
  int outputs;
};

template <int kRowFragments>
static METAL_FUNC void StoreProducts(thread ProductSums<kRowFragments>& sums, ProductTarget target,
                                     int first_row, int first_output, ushort lane) {
  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const int row = first_row + i * kSide + FragmentRow(lane);
    const int output = first_output + FragmentColumn(lane);
    if (row >= target.rows) continue;
    const float2 elements = ElementsOf(sums.row[i]);
    const long at = target.first + row * target.stride + output;
    if (output < target.outputs) StoreElement(target.data, output_type, at, elements.x);
    if (output + 1 < target.outputs) StoreElement(target.data, output_type, at + 1, elements.y);
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_HEAD_PRODUCT_H_
