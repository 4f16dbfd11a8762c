#include "backends/cuda/weights/dequantize_prepared.h"

#include "backends/cuda/weights/weights_launch.h"

namespace marlin::cuda {

cudaError_t LaunchDequantizePrepared(const PreparedTiles& weights, int64_t expert,
                                     const DenseView& out, cudaStream_t stream) {
  if (weights.traits.marlin_w4) {
    return LaunchDequantizeMarlinW4(weights.MarlinW4(expert), out, stream);
  }
  if (!weights.traits.tiled) {
    return LaunchDequantizeCanonical(weights.Canonical(expert), out, stream);
  }
  if (weights.traits.sparse) {
    return LaunchDequantizeSparse(weights.Tiles(expert), weights.kind(), out, stream);
  }
  return LaunchDequantizeTiles(weights.Tiles(expert), weights.kind(), out, stream);
}

}  // namespace marlin::cuda
