// The columns of activations as weights with an input transform read them, and back: moved, scaled,
// rotated.
#include <algorithm>
#include <cmath>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/rows/transform_columns.h"
#include "layout/input_transform.h"
#include "plan/gemm/transform_columns.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostThreads = 1024;
static_assert(kMaxHadamard % (2 * kMostThreads) == 0);
/// CTAs that stride over rows, and over columns, at most.
constexpr int64_t kMostBlocks = 1024;

/// The arguments of the kernels, TransformColumnsCall. Strides count elements.
struct TransformColumnsArguments {
  const void* from = nullptr;
  int64_t from_row = 0;
  int64_t from_column = 0;
  Element from_type = Element::kF32;
  void* to = nullptr;
  int64_t to_row = 0;
  int64_t to_column = 0;
  Element to_type = Element::kF32;
  const float* scale = nullptr;          ///< Null: ones.
  const int32_t* permutation = nullptr;  ///< Null: the identity. Not with Hadamard blocks.
  int64_t hadamard = 0;                  ///< The size of the blocks; 0: none.
  int64_t rows = 0;
  int64_t columns = 0;
  bool inverse = false;
};

/// Moves bits. Threads along x stride over the columns, blocks along y over the rows; the
/// permutation is read once for all rows of a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    MoveColumnsKernel(const __grid_constant__ TransformColumnsArguments args) {
  const auto* const from = static_cast<const T*>(args.from);
  auto* const to = static_cast<T*>(args.to);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       column < args.columns; column += step) {
    const int64_t other = args.permutation[column];
    const int64_t source = (args.inverse ? column : other) * args.from_column;
    const int64_t target = (args.inverse ? other : column) * args.to_column;
    for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
      to[row * args.to_row + target] = from[row * args.from_row + source];
    }
  }
}

/// Moves columns and scales them in fp32. The grid is as in MoveColumnsKernel.
__global__ void __launch_bounds__(kThreads)
    ScaleColumnsKernel(const __grid_constant__ TransformColumnsArguments args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       column < args.columns; column += step) {
    // The column of W; the scales have its order.
    const int64_t other = args.permutation == nullptr ? column : args.permutation[column];
    const int64_t source = (args.inverse ? column : other) * args.from_column;
    const int64_t target = (args.inverse ? other : column) * args.to_column;
    const float scale = args.scale[other];
    for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
      const float value = LoadFloat(args.from, args.from_type, row * args.from_row + source);
      StoreFloat(args.to, args.to_type, row * args.to_row + target, value * scale);
    }
  }
}

/// Rotates one Hadamard block per CTA and step: blockIdx.x strides over the blocks of a row,
/// blockIdx.y over the rows. Adds in the order of the host's HadamardInPlace.
///
/// kHalves: shared memory holds half of a block. The first half waits in registers for the sums of
/// both, which come last.
template <bool kHalves>
class BlockRotation {
 public:
  MARLIN_DEVICE BlockRotation(const TransformColumnsArguments& args, float norm, float* shared)
      : args_(args),
        norm_(norm),
        shared_(shared),
        size_(static_cast<int>(args.hadamard) / (kHalves ? 2 : 1)),
        thread_(static_cast<int>(threadIdx.x)),
        threads_(static_cast<int>(blockDim.x)) {}

  /// The block of a row that begins with column `first`.
  MARLIN_DEVICE void Run(int64_t row, int64_t first) const {
    constexpr int kKept = kHalves ? kMaxHadamard / 2 / kMostThreads : 1;
    float kept[kKept];
    if constexpr (kHalves) {
      RotateHalf(row, first);
#pragma unroll
      for (int i = 0; i < kKept; ++i) kept[i] = shared_[thread_ + i * kMostThreads];
      __syncthreads();  // The next half overwrites this one.
    }
    RotateHalf(row, first + (kHalves ? size_ : 0));
    if constexpr (kHalves) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int at = thread_ + i * kMostThreads;
        Store(row, first + at, kept[i] + shared_[at]);
        Store(row, first + size_ + at, kept[i] - shared_[at]);
      }
    } else {
      for (int i = thread_; i < size_; i += threads_) Store(row, first + i, shared_[i]);
    }
    __syncthreads();  // The next block overwrites this one.
  }

 private:
  /// The sums of shared memory's columns, which begin with `first`.
  MARLIN_DEVICE void RotateHalf(int64_t row, int64_t first) const {
    for (int i = thread_; i < size_; i += threads_) {
      const int64_t at = row * args_.from_row + (first + i) * args_.from_column;
      float value = LoadFloat(args_.from, args_.from_type, at);
      if (args_.scale != nullptr && !args_.inverse) value *= args_.scale[first + i];
      shared_[i] = value;
    }
    for (int half = 1; half < size_; half *= 2) {
      __syncthreads();
      for (int pair = thread_; pair < size_ / 2; pair += threads_) {
        const int i = pair / half * 2 * half + pair % half;
        const float x = shared_[i];
        const float y = shared_[i + half];
        shared_[i] = x + y;
        shared_[i + half] = x - y;
      }
    }
    __syncthreads();
  }

  MARLIN_DEVICE void Store(int64_t row, int64_t column, float value) const {
    value *= norm_;
    if (args_.scale != nullptr && args_.inverse) value *= args_.scale[column];
    StoreFloat(args_.to, args_.to_type, row * args_.to_row + column * args_.to_column, value);
  }

  const TransformColumnsArguments& args_;
  float norm_;
  float* shared_;
  int size_;  ///< Columns in shared memory.
  int thread_;
  int threads_;
};

template <bool kHalves>
__global__ void __launch_bounds__(kMostThreads)
    RotateColumnsKernel(const __grid_constant__ TransformColumnsArguments args, float norm) {
  extern __shared__ float block[];
  const BlockRotation<kHalves> rotation(args, norm, block);
  const int64_t blocks = args.columns / args.hadamard;
  for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
    for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) rotation.Run(row, b * args.hadamard);
  }
}

cudaError_t LaunchRotate(TransformColumnsArguments args, cudaStream_t stream) {
  auto norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(args.hadamard)));
  void* parameters[] = {&args, &norm};
  const int64_t pairs = args.hadamard / 2;
  const int64_t warps = (pairs + 31) / 32;
  LaunchSize size;
  size.grid = dim3(static_cast<unsigned>(std::min(args.columns / args.hadamard, kMostBlocks)),
                   static_cast<unsigned>(std::min(args.rows, kMostBlocks)));
  size.threads = static_cast<int>(std::min<int64_t>(warps * 32, kMostThreads));
  size.shared_bytes = static_cast<int>(args.hadamard * sizeof(float));
  const auto* kernel = reinterpret_cast<const void*>(&RotateColumnsKernel<false>);
  constexpr int kSharedOfAnyKernel = 48 << 10;
  if (size.shared_bytes > kSharedOfAnyKernel) {
    int most = 0;
    cudaError_t error = MostShared(&most);
    // Only the largest blocks, of kMaxHadamard, do not fit every device.
    if (size.shared_bytes > most) {
      kernel = reinterpret_cast<const void*>(&RotateColumnsKernel<true>);
      size.shared_bytes /= 2;
    }
    if (error == cudaSuccess) error = AllowAllShared(kernel);
    if (error != cudaSuccess) return error;
  }
  return Launch(kernel, size, parameters, stream);
}

const void* ElementwiseKernel(const TransformColumnsArguments& args) {
  if (args.scale != nullptr) return reinterpret_cast<const void*>(&ScaleColumnsKernel);
  if (args.from_type == Element::kF32) {
    return reinterpret_cast<const void*>(&MoveColumnsKernel<uint32_t>);
  }
  return reinterpret_cast<const void*>(&MoveColumnsKernel<uint16_t>);
}

}  // namespace

cudaError_t LaunchTransformColumns(const TransformColumnsCall& call, cudaStream_t stream) {
  TransformColumnsArguments args = {call.from.data(),        call.from.stride(0),
                                    call.from.stride(1),     ElementOf(call.from.dtype()),
                                    call.to.data(),          call.to.stride(0),
                                    call.to.stride(1),       ElementOf(call.to.dtype()),
                                    call.transform.scale,    call.transform.permutation,
                                    call.transform.hadamard, call.from.dim(0),
                                    call.from.dim(1),        call.inverse};
  if (args.rows == 0 || args.columns == 0) return cudaSuccess;
  if (args.hadamard > 0) return LaunchRotate(args, stream);
  void* parameters[] = {&args};
  const int64_t blocks = std::min((args.columns + kThreads - 1) / kThreads, kMostBlocks);
  const LaunchSize size = {
      dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min(args.rows, kMostBlocks))),
      kThreads};
  return Launch(ElementwiseKernel(args), size, parameters, stream);
}

}  // namespace marlin::cuda
