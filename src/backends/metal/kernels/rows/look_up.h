// Rows of a table that is stored as GEMM weights.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ROWS_LOOK_UP_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ROWS_LOOK_UP_H_

#include "backends/metal/kernels/decode.h"
#include "backends/metal/kernels/rows/rows_elements.h"

namespace marlin {
namespace kernels {

/// Where a simdgroup writes.
struct LookUpPlace {
  int row;
  int chunk;
  ushort lane;
};

/// Without a column, writes NaN.
static METAL_FUNC void LookUpChunk(PackedWeights packed, int column, bool has_column,
                                   LookUpPlace at, device uchar* out, Parameters p) {
  const int place = column % kStripOutputs - FragmentColumn(at.lane);
  if (at.chunk >= p.chunks || place < 0 || place > 1) return;
  const Strip strip = StripAt(column / kStripOutputs, packed, p);
  const ChunkCodes codes = LoadCodes(strip, at.chunk, at.lane);
  const GroupPair group = LoadChunkGroup(strip, at.chunk, at.lane);
  MARLIN_UNROLL
  for (int s = 0; s < kChunkK / kBlockK; ++s) {
    const BlockWeights w = DecodeBlock(strip, codes, group, at.chunk, s, at.lane);
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int k = at.chunk * kChunkK + s * kBlockK + 4 * FragmentRow(at.lane) + j;
      if (k >= p.k) continue;
      const float value = place == 0 ? w.pair[j].x : w.pair[j].y;
      StoreElement(out, output_type, long(at.row) * p.output_stride + k,
                   has_column ? value : as_type<float>(0x7fc00000u));
    }
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ROWS_LOOK_UP_H_
