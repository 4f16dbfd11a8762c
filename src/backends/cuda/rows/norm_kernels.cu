// RMS norm of rows, with or without a residual addition before it. Squares are added in double, as
// in the CPU's norm.
#include <algorithm>

#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/decoder/views.h"
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

/// out = norm(x), after x += block if there is one.
struct RmsNormArguments {
  RowsView x;
  RowsView block;  ///< Null data: none.
  RowsView out;
  const void* weight = nullptr;
  Element weight_type = Element::kF32;
  int columns = 0;
  float epsilon = 0;
};

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

/// x + block, rounded to the type of x, which receives it.
MARLIN_DEVICE float AddInPlace(const RmsNormArguments& args, int64_t row, int64_t column, float x,
                               float block) {
  Store(args.x, row, column, x + block);
  return args.x.type == Element::kF32 ? x + block : Load(args.x, row, column);
}

template <int kRowThreads, int kThreads, bool kAdds>
__global__ void __launch_bounds__(kThreads)
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
      if (kAdds) value = AddInPlace(args, row, i, value, Load(args.block, row, i));
      squares += static_cast<double>(value) * value;
    }
    const double mean = SumOverRow<kRowThreads>(squares, sums) / args.columns;
    const float factor = RmsFactor(mean, args.epsilon);
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

/// Whether rows of a view begin at multiples of `bytes`.
bool RowsAreAligned(const RowsView& view, int64_t bytes) {
  const int64_t element = view.type == Element::kF32 ? 4 : 2;
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0 &&
         view.stride * element % bytes == 0;
}

bool IsVectorNorm(const RmsNormArguments& args) {
  const bool f32 = args.x.type == Element::kF32 && args.weight_type == Element::kF32 &&
                   (args.block.data == nullptr || args.block.type == Element::kF32);
  const int64_t out_bytes = args.out.type == Element::kF32 ? 16 : 8;
  return f32 && args.x.inner == 1 && args.columns % 4 == 0 && args.columns > kNarrowColumns &&
         args.columns <= kVectorColumns && RowsAreAligned(args.x, 16) &&
         RowsAreAligned(args.block, 16) && RowsAreAligned(args.out, out_bytes) &&
         reinterpret_cast<uintptr_t>(args.weight) % 16 == 0;
}

cudaError_t LaunchNorm(const RmsNormArguments& args, cudaStream_t stream) {
  const bool adds = args.block.data != nullptr;
  if (IsVectorNorm(args)) {
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

RmsNormArguments ArgumentsOf(const TensorView& x, const RowsView& block, const TensorView& weight,
                             float epsilon, const TensorView& out) {
  return {RowsOf(x),
          block,
          RowsOf(out),
          weight.data(),
          ElementOf(weight.dtype()),
          static_cast<int>(weight.dim(0)),
          epsilon};
}

}  // namespace

template <>
cudaError_t Load<RmsNormCall>() {
  return PrepareKernels(
      &RmsNormKernel<kWideThreads, kWideThreads, false>,
      &RmsNormKernel<kWideThreads, kWideThreads, true>, &RmsNormKernel<32, kNarrowThreads, false>,
      &RmsNormKernel<32, kNarrowThreads, true>, &VectorNormKernel<false>, &VectorNormKernel<true>);
}

template <>
cudaError_t Load<CenterRowsCall>() {
  return PrepareKernels(&CenterRowsKernel);
}

Status Run(const CenterRowsCall& call, const CallContext& context) {
  const RowsView x = RowsOf(call.x);
  const auto blocks = static_cast<unsigned>(std::min(x.rows, kMostBlocks));
  return context.Launch("center", &CenterRowsKernel, dim3(blocks), kWideThreads, x,
                        static_cast<int>(call.x.dim(1)));
}

Status Run(const RmsNormCall& call, const CallContext& context) {
  const RmsNormArguments args = ArgumentsOf(call.x, {}, call.weight, call.epsilon, call.out);
  return context.Check(LaunchNorm(args, context.stream), "norm");
}

Status Run(const AddRmsNormCall& call, const CallContext& context) {
  const RmsNormArguments args =
      ArgumentsOf(call.residual, RowsOf(call.block), call.weight, call.epsilon, call.out);
  return context.Check(LaunchNorm(args, context.stream), "norm");
}

}  // namespace marlin::cuda
