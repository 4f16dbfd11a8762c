// Columns in the order of weights whose rows are sorted by group, and back:
// to[r, c] = from[r, permutation[c]], or to[r, permutation[c]] = from[r, c].
#include <algorithm>

#include "backends/cuda/kernels/common/launch.h"
#include "backends/cuda/kernels/elementwise/permute_columns.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
/// CTAs that stride over rows, and over columns, at most.
constexpr int64_t kMostBlocks = 1024;

/// Threads along x stride over the columns, blocks along y over the rows; the permutation is read
/// once for all rows of a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    PermuteColumnsKernel(const __grid_constant__ PermuteColumnsArguments args) {
  const auto* const from = static_cast<const T*>(args.from);
  auto* const to = static_cast<T*>(args.to);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       column < args.columns; column += step) {
    const int64_t other = args.permutation[column];
    const int64_t source = (args.scatter ? column : other) * args.from_column;
    const int64_t target = (args.scatter ? other : column) * args.to_column;
    for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
      to[row * args.to_row + target] = from[row * args.from_row + source];
    }
  }
}

}  // namespace

cudaError_t LaunchPermuteColumns(const PermuteColumnsArguments& args, bool wide,
                                 cudaStream_t stream) {
  PermuteColumnsArguments copy = args;
  void* parameters[] = {&copy};
  const int64_t blocks = std::min((args.columns + kThreads - 1) / kThreads, kMostBlocks);
  const LaunchSize size = {
      dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min(args.rows, kMostBlocks))),
      kThreads};
  const auto* const kernel = wide ? reinterpret_cast<const void*>(&PermuteColumnsKernel<uint32_t>)
                                  : reinterpret_cast<const void*>(&PermuteColumnsKernel<uint16_t>);
  return Launch(kernel, size, parameters, stream);
}

}  // namespace marlin::cuda
