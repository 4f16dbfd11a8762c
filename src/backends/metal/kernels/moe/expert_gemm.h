// ExpertGemv and ExpertGemm: the GEMMs of a layer's experts, as Gemv and GemmDirect with tiles that
// were sorted on the device.
//
//   out[slot, n] = sum over k of A[row of slot, k] * W[k, n] + bias[n], or the gated activation of
//   two such sums, of the gate and the up matrix
//
// Grid of threadgroups: [strips, or tiles of n][tiles of rows][matrices of an expert]. Grids have
// room for the largest n and the most tiles; a threadgroup beyond those that there are returns at
// once, as one whose matrix is of another kind than the launch's. A row of A is the x of the slot's
// token (`gathered`) or the slot's own row.
// Main loops, order of additions and error models are as in gemv.h and gemm_direct.h, with one
// split of k: a row of ExpertGemv has the same bits however many rows there are.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_GEMM_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_GEMM_H_

#include "backends/metal/kernels/gemm/gemm_direct.h"
#include "backends/metal/kernels/gemm/gemv.h"
#include "backends/metal/kernels/moe/expert_gate.h"

namespace marlin {
namespace kernels {

/// The buffers of a launch.
struct ExpertBuffers {
  device const ExpertMatrix* experts;
  device const int* begin;
  device const int2* tiles;
  device const int* tokens;
  device const uchar* input;
  device float* out;
};

/// The matrices of a threadgroup's tile, and where its rows are.
struct ExpertTile {
  device const ExpertMatrix* matrix;  ///< Null: nothing to do.
  device const ExpertMatrix* up;      ///< Computed with `matrix` if gated.
  Input input;
  device float* out;  ///< Row and column 0 of the matrix's part of the expert's results.
  int row;            ///< The tile's first row of the expert.
  int rows;           ///< Rows of the expert.
};

static inline int OwnKind() {
  return WeightKind(code_kind, code_bits, scale_type, group_extra, group_span, has_bias, gated,
                    GroupTypes(extra_type, global_divides, group_log2, whole_k, integer_zeros));
}

static inline ExpertTile TileOf(ExpertBuffers buffers, uint3 group, ExpertParameters p) {
  ExpertTile tile;
  const int2 place = buffers.tiles[p.first_tile + int(group.y)];
  device const ExpertMatrix* const parts = buffers.experts + metal::max(place.x, 0) * kExpertParts;
  tile.matrix = parts + p.first_part + group.z;
  tile.up = parts + kPartUp;
  if (place.x < 0 || tile.matrix->kind != OwnKind()) tile.matrix = nullptr;
  if (tile.matrix == nullptr) return tile;
  const int first_slot = buffers.begin[place.x];
  const long first = gathered ? 0 : first_slot * p.input_stride;
  tile.input.data = buffers.input + first * (input_type == kElementF32 ? 4 : 2);
  tile.input.gather = buffers.tokens + first_slot;
  // The second matrix of an expert, up, writes next to the first.
  tile.out = buffers.out + first_slot * p.output_stride + long(group.z) * parts[kPartDown].k;
  tile.row = place.y;
  tile.rows = buffers.begin[place.x + 1] - first_slot;
  return tile;
}

static inline Parameters ParametersOf(ExpertMatrix matrix, int rows, ExpertParameters p) {
  Parameters q;
  q.input_stride = p.input_stride;
  q.output_stride = p.output_stride;
  q.m = rows;
  q.n = matrix.n;
  q.k = matrix.k;
  q.chunks = matrix.chunks;
  q.groups = matrix.groups;
  q.group_size = matrix.group_size;
  q.code_offset = matrix.code_offset;
  q.global_scale = matrix.global_scale;
  return q;
}

static inline Strip StripOf(ExpertMatrix matrix, int strip, ExpertParameters p) {
  const PackedWeights weights = {matrix.codes, matrix.scales, matrix.extras, matrix.table};
  return StripAt(strip, weights, ParametersOf(matrix, 0, p));
}

static inline float WithBias(device const ExpertMatrix* matrix, int column, float sum) {
  return has_bias ? sum + matrix->bias[column] : sum;
}

/// Stores the accumulator of (row, column), and if gated the one of up, unless it is outside of the
/// expert's results.
static inline void StoreExpert(ExpertTile tile, int row, int column, float sum, float up,
                               ExpertParameters p) {
  if (row >= tile.rows || column >= tile.matrix->n) return;
  float value = WithBias(tile.matrix, column, sum);
  if (gated) value = GateProduct(value, WithBias(tile.up, column, up), p);
  tile.out[row * p.output_stride + column] = value;
}

template <int kRows>
static METAL_FUNC void ExpertGemv(ExpertBuffers buffers, threadgroup float* sums, uint3 group,
                                  SimdgroupPlace place, ExpertParameters p) {
  const ExpertTile tile = TileOf(buffers, group, p);
  const int first_column = int(group.x) * kStripOutputs;
  if (tile.matrix == nullptr || first_column >= tile.matrix->n) return;
  const int simdgroups = gated ? place.simdgroups / 2 : place.simdgroups;  // Per strip.
  const bool is_first = place.simdgroup < simdgroups;  // Always true if not gated.
  const ExpertMatrix matrix = is_first ? *tile.matrix : *tile.up;
  GemvStrips<1> strips;
  strips.strip[0] = StripOf(matrix, int(group.x), p);
  const int first_chunk = is_first ? place.simdgroup : place.simdgroup - simdgroups;
  const LaneChunks own = {tile.row, first_chunk, simdgroups, place.lane};
  SumStrips<kRows, 1>(strips, tile.input, sums, own, place, ParametersOf(matrix, tile.rows, p));
  constexpr int kStride = kRows * kStripOutputs;
  for (int i = place.simdgroup * kLanes + place.lane; i < kStride; i += place.simdgroups * kLanes) {
    const float sum = SumOverSimdgroups<kRows, 1>(sums + i, simdgroups);
    float up = 0.0f;
    if (gated) up = SumOverSimdgroups<kRows, 1>(sums + i + simdgroups * kStride, simdgroups);
    StoreExpert(tile, tile.row + i / kStripOutputs, first_column + i % kStripOutputs, sum, up, p);
  }
}

template <int kRowFragments, int kStrips, int kSimdgroupColumns>
static METAL_FUNC void ExpertGemm(ExpertBuffers buffers, uint3 group, ushort simdgroup, ushort lane,
                                  ExpertParameters p) {
  const ExpertTile tile = TileOf(buffers, group, p);
  if (tile.matrix == nullptr) return;
  const int row = tile.row + simdgroup / kSimdgroupColumns * (kRowFragments * kSide);
  const int run = gated ? kStrips / 2 : kStrips;  // Adjacent strips of each matrix.
  const int strip = (int(group.x) * kSimdgroupColumns + simdgroup % kSimdgroupColumns) * run;
  const int last_strip = (tile.matrix->n - 1) / kStripOutputs;
  if (row >= tile.rows || strip > last_strip) return;

  DirectStrips<kStrips> strips;
  MARLIN_UNROLL
  for (int j = 0; j < kStrips; ++j) {
    // Strips beyond the last one repeat it; their accumulators are not stored.
    const int of_run = metal::min(strip + j % run, last_strip);
    strips.strip[j] = StripOf(j < run ? *tile.matrix : *tile.up, of_run, p);
  }
  DirectSums<kRowFragments, kStrips> sums;
  ClearSums<kRowFragments, kStrips>(sums);
  const Parameters q = ParametersOf(*tile.matrix, tile.rows, p);
  AddChunks<kRowFragments, kStrips>(sums, strips, tile.input, row, 0, q.chunks, lane, q);

  MARLIN_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const int m = row + i * kSide + FragmentRow(lane);
    MARLIN_UNROLL
    for (int j = 0; j < kStrips; ++j) {
      if (gated && j >= kStrips / 2) continue;
      const int column = (strip + j) * kStripOutputs + FragmentColumn(lane);
      const float2 sum = ElementsOf(sums.fragment[i][j]);
      // Not gated: the same fragment, and unused.
      const float2 up = ElementsOf(sums.fragment[i][gated ? (j + kStrips / 2) % kStrips : j]);
      StoreExpert(tile, m, column, sum.x, up.x, p);
      StoreExpert(tile, m, column + 1, sum.y, up.y, p);
    }
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_EXPERT_GEMM_H_
