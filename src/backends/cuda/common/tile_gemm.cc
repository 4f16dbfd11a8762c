#include "backends/cuda/common/tile_gemm.h"

namespace marlin::cuda {

ParameterUse UseOf(const TileView& view, CodeKind kind) {
  // Integer zeros are subtracted together with the offset of the codes, at no cost.
  const bool free_zeros =
      view.zero_kind == ZeroKind::kZeros && view.integer_zeros && kind == CodeKind::kInt4;
  if (view.zero_kind != ZeroKind::kNone && !free_zeros) return ParameterUse::kAll;
  return view.groups_per_tile <= 1 ? ParameterUse::kOneScale : ParameterUse::kScales;
}

cudaError_t AddPartials(const TileGemm& gemm, int splits, cudaError_t launched,
                        cudaStream_t stream) {
  if (launched != cudaSuccess) return launched;
  return LaunchReducePartials(gemm.partials, splits, gemm.a.m, gemm.epilogue, true, stream);
}

}  // namespace marlin::cuda
