// Dense weights from prepared ones, each rounded once.
#include "backends/cuda/block_gemm.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/marlin_w4.cuh"
#include "backends/cuda/weight_reader.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfBlock = 32;  ///< k of a thread block; the threads run along n.

template <typename Reader>
__global__ void __launch_bounds__(kThreads)
    DequantizeKernel(Reader reader, void* out, int64_t stride, Element type) {
  const int n = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (n >= reader.view.n) return;
  const int first = static_cast<int>(blockIdx.x) * kRowsOfBlock;
  const int last = min(first + kRowsOfBlock, reader.view.k);
  for (int k = first; k < last; ++k) {
    StoreFloat(out, type, k * stride + n, reader.Weight(k, n));
  }
}

template <typename Reader>
cudaError_t Launch(const Reader& reader, void* out, int64_t stride, Element type,
                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((reader.view.k + kRowsOfBlock - 1) / kRowsOfBlock),
                  static_cast<unsigned>((reader.view.n + kThreads - 1) / kThreads));
  DequantizeKernel<<<grid, kThreads, 0, stream>>>(reader, out, stride, type);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDequantizeTiles(const TileView& weights, CodeKind kind, void* out, int64_t stride,
                                  Element type, cudaStream_t stream) {
  return Launch(TileReader{weights, kind}, out, stride, type, stream);
}

cudaError_t LaunchDequantizeCanonical(const CanonicalView& weights, void* out, int64_t stride,
                                      Element type, cudaStream_t stream) {
  return Launch(CanonicalReader{weights}, out, stride, type, stream);
}

cudaError_t LaunchDequantizeMarlinW4(const MarlinW4View& weights, void* out, int64_t stride,
                                     Element type, cudaStream_t stream) {
  return Launch(MarlinW4Reader{weights, weights.codes}, out, stride, type, stream);
}

}  // namespace marlin::cuda
