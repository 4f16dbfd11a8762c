// Dequantizes canonical, marlin_w4 and 2:4 weights, rounding each once; other tiles:
// dequantize_tiles.cu.
#include "backends/cuda/common/marlin_w4.cuh"
#include "backends/cuda/common/sparse_reader.cuh"
#include "backends/cuda/common/weight_reader.cuh"
#include "backends/cuda/weights/weights_launch.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfBlock = 32;  ///< k of a CTA; its threads run along n.

template <typename Reader>
__global__ void __launch_bounds__(kThreads) DequantizeKernel(Reader reader, DenseView out) {
  const int n = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (n >= reader.view.n) return;
  const int first = static_cast<int>(blockIdx.x) * kRowsOfBlock;
  const int last = min(first + kRowsOfBlock, reader.view.k);
  for (int k = first; k < last; ++k) {
    StoreFloat(out.data, out.type, k * out.row_stride + n * out.column_stride, reader.Weight(k, n));
  }
}

template <typename Reader>
cudaError_t Launch(const Reader& reader, const DenseView& out, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((reader.view.k + kRowsOfBlock - 1) / kRowsOfBlock),
                  static_cast<unsigned>((reader.view.n + kThreads - 1) / kThreads));
  DequantizeKernel<<<grid, kThreads, 0, stream>>>(reader, out);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDequantizeCanonical(const CanonicalView& weights, const DenseView& out,
                                      cudaStream_t stream) {
  return Launch(CanonicalReader{weights}, out, stream);
}

cudaError_t LaunchDequantizeSparse(const TileView& weights, CodeKind kind, const DenseView& out,
                                   cudaStream_t stream) {
  return Launch(SparseTileReader{weights, kind}, out, stream);
}

cudaError_t LaunchDequantizeMarlinW4(const MarlinW4View& weights, const DenseView& out,
                                     cudaStream_t stream) {
  return Launch(MarlinW4Reader{weights, weights.codes}, out, stream);
}

}  // namespace marlin::cuda
