// RMS norm of rows, with or without a residual addition before it. Squares are added in double, as
// in the CPU's norm. norm_rows.cu is for many rows.
#include <algorithm>

#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/rows/norm_launch.h"
#include "backends/cuda/rows/typed.cuh"

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
    constexpr int kWarps = kRowThreads / 32;
    value = threadIdx.x % 32 < kWarps ? sums[threadIdx.x % 32] : 0.0;
#pragma unroll
    for (int step = kWarps / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    value = __shfl_sync(~0u, value, 0);
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

/// Stores what LoadKept loads.
template <int kRowThreads>
MARLIN_DEVICE void StoreKept(const RowsView& to, int64_t row, int columns, int thread,
                             const float (&kept)[kKept]) {
  WithType(to.type, [&](auto element) {
    using T = decltype(element);
    auto* const data = static_cast<T*>(to.data) + to.At(row);
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = thread + j * kRowThreads;
      if (i < columns) data[i] = FromFloat<T>(kept[j]);
    }
  });
}

template <int kRowThreads, int kThreads, bool kAdds>
__global__ void __launch_bounds__(kThreads, 1)
    RmsNormKernel(const __grid_constant__ RmsNormArguments args) {
  __shared__ double sums[kThreads / 32];
  constexpr int kRows = kThreads / kRowThreads;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  EnterChain();
  float weights[kKept];
  LoadKept<kRowThreads>(args.weight, args.weight_type, 0, args.columns, thread, weights);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads;
       row < args.x.rows; row += step) {
    float kept[kKept];
    LoadKept<kRowThreads>(args.x.data, args.x.type, args.x.At(row), args.columns, thread, kept);
    if constexpr (kAdds) {
      float block[kKept];
      LoadKept<kRowThreads>(args.block.data, args.block.type, args.block.At(row), args.columns,
                            thread, block);
#pragma unroll
      for (int j = 0; j < kKept; ++j) kept[j] = Rounded(kept[j] + block[j], args.x.type);
      StoreKept<kRowThreads>(args.x, row, args.columns, thread, kept);
    }
    double squares = 0;
#pragma unroll
    for (int j = 0; j < kKept; ++j) squares += static_cast<double>(kept[j]) * kept[j];
    for (int i = thread + kKept * kRowThreads; i < args.columns; i += kRowThreads) {
      float value = Load(args.x, row, i);
      if (kAdds) {
        value = Rounded(value + Load(args.block, row, i), args.x.type);
        Store(args.x, row, i, value);
      }
      squares += static_cast<double>(value) * value;
    }
    const double mean = SumOverRow<kRowThreads>(squares, sums) / args.columns;
    const float factor = RmsFactor(mean, args.epsilon);
#pragma unroll
    for (int j = 0; j < kKept; ++j) kept[j] = kept[j] * factor * weights[j];
    StoreKept<kRowThreads>(args.out, row, args.columns, thread, kept);
    for (int i = thread + kKept * kRowThreads; i < args.columns; i += kRowThreads) {
      const float weight = LoadFloat(args.weight, args.weight_type, i);
      Store(args.out, row, i, Load(args.x, row, i) * factor * weight);
    }
  }
}

/// A CTA has a row.
__global__ void __launch_bounds__(kWideThreads)
    CenterRowsKernel(const __grid_constant__ RowsView x, int columns) {
  __shared__ double sums[kWideThreads / 32];
  EnterChain();
  for (int64_t row = blockIdx.x; row < x.rows; row += gridDim.x) {
    double sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += kWideThreads) {
      sum += static_cast<double>(Load(x, row, i));
    }
    const auto mean = static_cast<float>(SumOverRow<kWideThreads>(sum, sums) / columns);
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += kWideThreads) {
      Store(x, row, i, Load(x, row, i) - mean);
    }
  }
}

/// Four adjacent elements at a time in fp32, up to kVectorColumns of them: the norm of a decode
/// step, whose time is the sum of its latencies. One CTA has a row.
constexpr int kVectorThreads = 512;
constexpr int kVectors = 4;
constexpr int kVectorColumns = kVectorThreads * kVectors * 4;

template <bool kAdds>
__global__ void __launch_bounds__(kVectorThreads)
    VectorNormKernel(const __grid_constant__ RmsNormArguments args) {
  __shared__ double sums[kVectorThreads / 32];
  EnterChain();
  const auto* const weights = static_cast<const float4*>(args.weight);
  const int quads = args.columns / 4;
  for (int64_t row = blockIdx.x; row < args.x.rows; row += gridDim.x) {
    auto* const x = reinterpret_cast<float4*>(static_cast<float*>(args.x.data) + args.x.At(row));
    const auto* const block = reinterpret_cast<const float4*>(
        static_cast<const float*>(args.block.data) + (kAdds ? args.block.At(row) : 0));
    float4 kept[kVectors];
    float4 weight[kVectors];
    float4 added[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kVectorThreads;
      kept[j] = weight[j] = added[j] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (i >= quads) break;
      kept[j] = x[i];
      if (kAdds) added[j] = block[i];
      weight[j] = weights[i];
    }
    double squares = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kVectorThreads;
      if (i >= quads) break;
      float4& v = kept[j];
      if (kAdds) {
        v = {v.x + added[j].x, v.y + added[j].y, v.z + added[j].z, v.w + added[j].w};
        x[i] = v;
      }
      const double a = v.x;
      const double b = v.y;
      const double c = v.z;
      const double d = v.w;
      squares += __fma_rn(a, a, b * b) + __fma_rn(c, c, d * d);
    }
    const double mean = SumOverRow<kVectorThreads>(squares, sums) / args.columns;
    const float factor = RmsFactor(mean, args.epsilon);
    const int64_t to = args.out.At(row);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kVectorThreads;
      if (i >= quads) break;
      const float4& v = kept[j];
      const float4& w = weight[j];
      StoreFour(args.out.data, args.out.type, to + 4 * i,
                {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w});
    }
  }
}

dim3 GridOf(int64_t rows) {
  return {static_cast<unsigned>(std::clamp<int64_t>(rows, 1, kMostBlocks))};
}

}  // namespace

cudaError_t LaunchNorm(const RmsNormArguments& args, cudaStream_t stream) {
  const bool adds = args.block.data != nullptr;
  if (args.columns > kNarrowColumns && args.columns <= kVectorColumns && HasVectorRows(args)) {
    const auto kernel = adds ? &VectorNormKernel<true> : &VectorNormKernel<false>;
    return LaunchInChain(kernel, GridOf(args.x.rows), kVectorThreads, 0, stream, args);
  }
  if (args.columns > kNarrowColumns) {
    const auto kernel = adds ? &RmsNormKernel<kWideThreads, kWideThreads, true>
                             : &RmsNormKernel<kWideThreads, kWideThreads, false>;
    return LaunchInChain(kernel, GridOf(args.x.rows), kWideThreads, 0, stream, args);
  }
  constexpr int kRows = kNarrowThreads / 32;
  const auto kernel =
      adds ? &RmsNormKernel<32, kNarrowThreads, true> : &RmsNormKernel<32, kNarrowThreads, false>;
  return LaunchInChain(kernel, GridOf((args.x.rows + kRows - 1) / kRows), kNarrowThreads, 0, stream,
                       args);
}

cudaError_t LoadNorm() {
  return PrepareKernels(
      &RmsNormKernel<kWideThreads, kWideThreads, false>,
      &RmsNormKernel<kWideThreads, kWideThreads, true>, &RmsNormKernel<32, kNarrowThreads, false>,
      &RmsNormKernel<32, kNarrowThreads, true>, &VectorNormKernel<false>, &VectorNormKernel<true>);
}

cudaError_t LoadCenterRows() { return PrepareKernels(&CenterRowsKernel); }

cudaError_t LaunchCenterRows(const RowsView& x, int columns, cudaStream_t stream) {
  return LaunchInChain(&CenterRowsKernel, GridOf(x.rows), kWideThreads, 0, stream, x, columns);
}

}  // namespace marlin::cuda
