// RMS norm of rows, with or without a residual addition before it. Squares are added in double, as
// in the CPU's norm.
#include <algorithm>

#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/common/chain.cuh"
#include "backends/cuda/kernels/decoder/decoder_launch.h"
#include "backends/cuda/kernels/decoder/typed.cuh"

namespace marlin::cuda {
namespace {

/// CTAs that stride over rows, at most.
constexpr int64_t kMostBlocks = 4096;
/// A CTA of this many threads has a row; of narrow rows one for every warp.
constexpr int kWideThreads = 512;
constexpr int kNarrowThreads = 256;
constexpr int kNarrowColumns = 512;
/// Elements of a row that a thread keeps in registers, so that they are read once and at once.
constexpr int kKept = 16;

MARLIN_DEVICE float Load(const RowsView& view, int64_t row, int64_t column) {
  return LoadFloat(view.data, view.type, view.At(row) + column);
}
MARLIN_DEVICE void Store(const RowsView& view, int64_t row, int64_t column, float value) {
  StoreFloat(view.data, view.type, view.At(row) + column, value);
}

/// The sum over kRowThreads adjacent threads, in all of them. `sums`: shared memory for one double
/// per warp.
template <int kRowThreads>
MARLIN_DEVICE double SumOverRow(double value, double* sums) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if constexpr (kRowThreads > 32) {
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
#pragma unroll
    for (int warp = 0; warp < kRowThreads / 32; ++warp) value += sums[warp];
    __syncthreads();
  }
  return value;
}

/// Loads a thread's elements of the row at `first`, zeros beyond it.
template <int kRowThreads>
MARLIN_DEVICE void LoadKept(const void* data, Element type, int64_t first, int columns, int thread,
                            float (&kept)[kKept]) {
  WithType(type, [&](auto element) {
    const auto* const row = static_cast<const decltype(element)*>(data) + first;
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = thread + j * kRowThreads;
      kept[j] = i < columns ? ToFloat(row[i]) : 0.0f;
    }
  });
}

/// x + block, rounded to the type of x, which receives it.
MARLIN_DEVICE float AddInPlace(const RmsNormArguments& args, int64_t row, int64_t column, float x,
                               float block) {
  Store(args.x, row, column, x + block);
  return args.x.type == Element::kF32 ? x + block : Load(args.x, row, column);
}

template <int kRowThreads, int kThreads>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const __grid_constant__ RmsNormArguments args) {
  __shared__ double sums[kThreads / 32];
  constexpr int kRows = kThreads / kRowThreads;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  const bool adds = args.block.data != nullptr;
  EnterChain();
  float weights[kKept];
  LoadKept<kRowThreads>(args.weight, args.weight_type, 0, args.columns, thread, weights);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads;
       row < args.x.rows; row += step) {
    float kept[kKept];
    LoadKept<kRowThreads>(args.x.data, args.x.type, args.x.At(row), args.columns, thread, kept);
    if (adds) {
      float block[kKept];
      LoadKept<kRowThreads>(args.block.data, args.block.type, args.block.At(row), args.columns,
                            thread, block);
#pragma unroll
      for (int j = 0; j < kKept; ++j) {
        const int i = thread + j * kRowThreads;
        if (i < args.columns) kept[j] = AddInPlace(args, row, i, kept[j], block[j]);
      }
    }
    double squares = 0;
#pragma unroll
    for (int j = 0; j < kKept; ++j) squares += static_cast<double>(kept[j]) * kept[j];
    for (int i = thread + kKept * kRowThreads; i < args.columns; i += kRowThreads) {
      float value = Load(args.x, row, i);
      if (adds) value = AddInPlace(args, row, i, value, Load(args.block, row, i));
      squares += static_cast<double>(value) * value;
    }
    const double mean = SumOverRow<kRowThreads>(squares, sums) / args.columns;
    const auto factor = static_cast<float>(1.0 / sqrt(mean + static_cast<double>(args.epsilon)));
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = thread + j * kRowThreads;
      if (i < args.columns) Store(args.out, row, i, kept[j] * factor * weights[j]);
    }
    for (int i = thread + kKept * kRowThreads; i < args.columns; i += kRowThreads) {
      const float weight = LoadFloat(args.weight, args.weight_type, i);
      Store(args.out, row, i, Load(args.x, row, i) * factor * weight);
    }
  }
}

dim3 GridOf(int64_t rows) {
  return {static_cast<unsigned>(std::clamp<int64_t>(rows, 1, kMostBlocks))};
}

}  // namespace

cudaError_t LoadRmsNorm() {
  const cudaError_t error =
      PreferShared(reinterpret_cast<const void*>(&RmsNormKernel<kWideThreads, kWideThreads>));
  return error != cudaSuccess
             ? error
             : PreferShared(reinterpret_cast<const void*>(&RmsNormKernel<32, kNarrowThreads>));
}

cudaError_t LaunchRmsNorm(const RmsNormArguments& args, cudaStream_t stream) {
  if (args.columns > kNarrowColumns) {
    return LaunchInChain(&RmsNormKernel<kWideThreads, kWideThreads>, GridOf(args.x.rows),
                         kWideThreads, 0, stream, args);
  }
  constexpr int kRows = kNarrowThreads / 32;
  return LaunchInChain(&RmsNormKernel<32, kNarrowThreads>, GridOf((args.x.rows + kRows - 1) / kRows),
                       kNarrowThreads, 0, stream, args);
}

}  // namespace marlin::cuda
