// Row-wise operations of a decoder: copies, norm, residual addition, RoPE, GLU.
#include <algorithm>

#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/decoder/decoder_launch.h"
#include "backends/cuda/kernels/decoder/record_error.cuh"
#include "backends/cuda/kernels/decoder/typed.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
/// CTAs that stride over rows, at most.
constexpr int64_t kMostBlocks = 4096;

/// blockIdx.x strides over rows; blockIdx.y and the threads over columns.
dim3 GridOf(int64_t rows, int64_t columns) {
  const int64_t of_columns = std::clamp<int64_t>((columns + kThreads - 1) / kThreads, 1, 64);
  return {static_cast<unsigned>(std::clamp<int64_t>(rows, 1, kMostBlocks)),
          static_cast<unsigned>(of_columns)};
}

/// Calls run(row, column) for every element of a grid of GridOf.
template <typename Run>
MARLIN_DEVICE void ForElements(int64_t rows, int64_t columns, const Run& run) {
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t column = first; column < columns; column += step) run(row, column);
  }
}

MARLIN_DEVICE float Load(const RowsView& view, int64_t row, int64_t column) {
  return LoadFloat(view.data, view.type, view.At(row) + column);
}
MARLIN_DEVICE void Store(const RowsView& view, int64_t row, int64_t column, float value) {
  StoreFloat(view.data, view.type, view.At(row) + column, value);
}

__global__ void __launch_bounds__(kThreads)
    CopyRowsKernel(const __grid_constant__ CopyRowsArguments args) {
  ForElements(args.out.rows, args.columns, [&](int64_t row, int64_t column) {
    int64_t from = row;
    if (args.ids.data != nullptr) {
      from = args.ids.At(row);
      if (from < 0 || from >= args.from.rows) {
        RecordError(args.errors, ValueError::kIds, from, row, args.from.rows);
        return;
      }
    }
    Store(args.out, row, column, Load(args.from, from, column));
  });
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

/// Elements of a row that a thread keeps in registers, so that they are read once and at once.
constexpr int kKept = 16;

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

/// Squares are added in double, as in the CPU's norm.
template <int kRowThreads>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const __grid_constant__ RmsNormArguments args) {
  __shared__ double sums[kThreads / 32];
  constexpr int kRows = kThreads / kRowThreads;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  float weights[kKept];
  LoadKept<kRowThreads>(args.weight, args.weight_type, 0, args.columns, thread, weights);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads;
       row < args.x.rows; row += step) {
    float kept[kKept];
    LoadKept<kRowThreads>(args.x.data, args.x.type, args.x.At(row), args.columns, thread, kept);
    double squares = 0;
#pragma unroll
    for (int j = 0; j < kKept; ++j) squares += static_cast<double>(kept[j]) * kept[j];
    for (int i = thread + kKept * kRowThreads; i < args.columns; i += kRowThreads) {
      const double value = Load(args.x, row, i);
      squares += value * value;
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

__global__ void __launch_bounds__(kThreads)
    AddToKernel(const __grid_constant__ AddToArguments args) {
  ForElements(args.x.rows, args.columns, [&](int64_t row, int64_t column) {
    Store(args.x, row, column, Load(args.x, row, column) + args.scale * Load(args.y, row, column));
  });
}

__global__ void __launch_bounds__(kThreads)
    ApplyGateKernel(const __grid_constant__ ApplyGateArguments args) {
  ForElements(args.out.rows, args.columns, [&](int64_t row, int64_t column) {
    Store(args.out, row, column,
          GateProduct(args.options, Load(args.gate, row, column), Load(args.up, row, column)));
  });
}

__global__ void __launch_bounds__(kThreads)
    SigmoidKernel(const __grid_constant__ RowsView x, int64_t columns) {
  ForElements(x.rows, columns, [&](int64_t row, int64_t column) {
    Store(x, row, column, TimesSigmoid(1.0f, Load(x, row, column)));
  });
}

/// The angle is reduced in double, so that large positions keep their precision.
MARLIN_DEVICE void RotationOf(float frequency, int64_t position, float factor, float* cosine,
                              float* sine) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.57079632679489661923;
  const double angle = static_cast<double>(frequency) * static_cast<double>(position);
  const double quarters = rint(angle * kTwoOverPi);
  const auto rest = static_cast<float>(angle - quarters * kHalfPi);
  const auto quadrant = static_cast<int>(static_cast<int64_t>(quarters) & 3);
  const float s = sinf(rest);
  const float c = cosf(rest);
  const float first = (quadrant & 1) != 0 ? s : c;
  const float second = (quadrant & 1) != 0 ? c : s;
  *cosine = factor * (quadrant == 1 || quadrant == 2 ? -first : first);
  *sine = factor * (quadrant >= 2 ? -second : second);
}

/// blockIdx.x: token; blockIdx.y: head; threads: pairs.
__global__ void __launch_bounds__(kThreads)
    RotaryKernel(const __grid_constant__ RotaryArguments args) {
  const auto token = static_cast<int64_t>(blockIdx.x);
  const int64_t position = args.positions.At(token);
  if (position < 0 || position >= int64_t{1} << 31) {
    if (threadIdx.x == 0) RecordError(args.errors, ValueError::kPosition, position, token);
    return;
  }
  const int64_t row = token * args.x.inner + blockIdx.y;
  for (int pair = static_cast<int>(threadIdx.x); pair < args.pairs;
       pair += static_cast<int>(blockDim.x)) {
    float cosine;
    float sine;
    RotationOf(args.frequencies[pair], position, args.factor, &cosine, &sine);
    const int first = args.interleaved ? 2 * pair : pair;
    const int second = args.interleaved ? 2 * pair + 1 : pair + args.pairs;
    const float a = Load(args.x, row, first);
    const float b = Load(args.x, row, second);
    Store(args.x, row, first, a * cosine - b * sine);
    Store(args.x, row, second, b * cosine + a * sine);
  }
}

template <typename... Parameters>
cudaError_t Start(void (*kernel)(Parameters...), dim3 grid, cudaStream_t stream,
                  Parameters... parameters) {
  kernel<<<grid, kThreads, 0, stream>>>(parameters...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchCopyRows(const CopyRowsArguments& args, cudaStream_t stream) {
  return Start(CopyRowsKernel, GridOf(args.out.rows, args.columns), stream, args);
}

cudaError_t LaunchRmsNorm(const RmsNormArguments& args, cudaStream_t stream) {
  constexpr int kFewColumns = 512;
  if (args.columns > kFewColumns) {
    return Start(RmsNormKernel<kThreads>, GridOf(args.x.rows, 1), stream, args);
  }
  constexpr int kRows = kThreads / 32;
  return Start(RmsNormKernel<32>, GridOf((args.x.rows + kRows - 1) / kRows, 1), stream, args);
}

cudaError_t LaunchAddTo(const AddToArguments& args, cudaStream_t stream) {
  return Start(AddToKernel, GridOf(args.x.rows, args.columns), stream, args);
}

cudaError_t LaunchApplyGate(const ApplyGateArguments& args, cudaStream_t stream) {
  return Start(ApplyGateKernel, GridOf(args.out.rows, args.columns), stream, args);
}

cudaError_t LaunchSigmoid(const RowsView& x, int64_t columns, cudaStream_t stream) {
  return Start(SigmoidKernel, GridOf(x.rows, columns), stream, x, columns);
}

cudaError_t LaunchRotary(const RotaryArguments& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.x.rows / args.x.inner),
                  static_cast<unsigned>(args.x.inner));
  const int threads = std::clamp((args.pairs + 31) / 32 * 32, 32, kThreads);
  RotaryKernel<<<grid, threads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace marlin::cuda
