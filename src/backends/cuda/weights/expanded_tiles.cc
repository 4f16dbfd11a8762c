#include "backends/cuda/weights/expanded_tiles.h"

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/weights/weights_launch.h"
#include "base/checked.h"

namespace marlin::cuda {

int64_t ExpandedBytes(const PreparedTiles& weights) {
  if (!weights.traits.sparse) return 0;
  const TileView view = weights.Expanded(0);
  const int64_t strips = RoundUp(int64_t{view.n}, int64_t{kBlockOutputs}) / kStripOutputs;
  return RoundUp(strips * view.tiles_of_strip * view.tile_bytes, kWorkspaceAlignment);
}

cudaError_t ExpandTiles(const PreparedTiles& weights, int64_t expert, void* workspace,
                        cudaStream_t stream, TileView* tiles) {
  *tiles = weights.Tiles(expert);
  if (!weights.traits.sparse) return cudaSuccess;
  const TileView sparse = *tiles;
  *tiles = weights.Expanded(expert);
  auto* const to = static_cast<uint8_t*>(workspace);
  tiles->tiles = to;
  if (sparse.tiles_of_strip == 0) return cudaSuccess;
  return LaunchExpandSparse(sparse, *tiles, weights.kind(), weights.zero_code(), to, stream);
}

}  // namespace marlin::cuda
