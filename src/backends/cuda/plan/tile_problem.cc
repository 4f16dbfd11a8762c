#include "backends/cuda/plan/tile_problem.h"

#include "backends/cuda/layout/code_kind.h"
#include "layout/weights_shapes.h"
#include "plan/gemm_desc.h"

namespace marlin::cuda {
namespace {

int TileBytesOf(const GemmDesc& desc) {
  const int bits = CodeBits(KindOf(desc.format));
  if (!GetFormatInfo(desc.format).quantized) return TileCodeBytes(bits);
  const auto groups = static_cast<int>(kTileK / SharedScaleRun(desc.group_size, desc.k, kTileK));
  return TileCodeBytes(bits) + groups * kGroupBytes * (desc.has_zeros || desc.has_biases ? 2 : 1);
}

bool HasNarrowCodes(const GemmDesc& desc) {
  const int bits = CodeBits(KindOf(desc.format));
  return bits <= 4 && TileBytesOf(desc) == TileCodeBytes(bits) + kGroupBytes;
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
  problem.narrow_codes = HasNarrowCodes(desc);
  return problem;
}

}  // namespace marlin::cuda
