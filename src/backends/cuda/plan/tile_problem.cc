#include "backends/cuda/plan/tile_problem.h"

#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/layout/sparse_layout.h"
#include "layout/weights_shapes.h"
#include "plan/gemm/gemm_desc.h"

namespace marlin::cuda {
namespace {

TileKind KindOfTiles(const GemmDesc& desc) { return {KindOf(desc.format), desc.weights.sparse}; }

int TileBytesOf(const GemmDesc& desc) {
  const int code_bytes = TileCodeBytes(KindOfTiles(desc));
  if (!GetFormatInfo(desc.format).quantized) return code_bytes;
  const auto groups = static_cast<int>(kTileK / SharedScaleRun(desc.group_size, desc.k, kTileK));
  return code_bytes + groups * kGroupBytes * (desc.has_zeros || desc.has_biases ? 2 : 1);
}

bool HasNarrowCodes(const GemmDesc& desc) {
  return CodeBits(KindOf(desc.format)) <= 4 &&
         TileBytesOf(desc) == TileCodeBytes(KindOfTiles(desc)) + kGroupBytes;
}

}  // namespace

TileProblem TileProblemOf(const GemmDesc& desc) {
  TileProblem problem;
  problem.m = static_cast<int>(desc.m);
  problem.n = static_cast<int>(desc.n);
  problem.k = static_cast<int>(desc.k);
  problem.gated = desc.gated;
  problem.batch_invariant = desc.determinism == Determinism::kBatchInvariant;
  problem.tile_bytes = TileBytesOf(desc);
  problem.pair_table = KindOf(desc.format) == CodeKind::kTable4;
  problem.sparse = desc.weights.sparse;
  problem.narrow_codes = HasNarrowCodes(desc);
  return problem;
}

}  // namespace marlin::cuda
