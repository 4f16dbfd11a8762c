// Row-wise operations of a decoder: copies, residual addition, RoPE, GLU.
#include <algorithm>

#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/decoder/views.h"
#include "backends/cuda/rows/copy_rows.cuh"
#include "backends/cuda/rows/record_error.cuh"

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

/// blockIdx.x: token; blockIdx.y: head.
dim3 HeadsGridOf(const RowsView& x) {
  return {static_cast<unsigned>(x.rows / x.inner), static_cast<unsigned>(x.inner)};
}
/// Whole warps for `count` elements of a row, at most kThreads.
int ThreadsFor(int64_t count) {
  return static_cast<int>(std::clamp<int64_t>((count + 31) / 32 * 32, 32, kThreads));
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

/// x += scale * y.
struct AddToArguments {
  RowsView y;
  RowsView x;
  int64_t columns = 0;
  float scale = 1;
};

__global__ void __launch_bounds__(kThreads)
    AddToKernel(const __grid_constant__ AddToArguments args) {
  EnterChain();
  ForElements(args.x.rows, args.columns, [&](int64_t row, int64_t column) {
    Store(args.x, row, column, Load(args.x, row, column) + args.scale * Load(args.y, row, column));
  });
}

struct ApplyGateArguments {
  RowsView gate;
  RowsView up;
  RowsView out;
  int64_t columns = 0;
  GateView options;
};

__global__ void __launch_bounds__(kThreads)
    ApplyGateKernel(const __grid_constant__ ApplyGateArguments args) {
  EnterChain();
  ForElements(args.out.rows, args.columns, [&](int64_t row, int64_t column) {
    Store(args.out, row, column,
          GateProduct(args.options, Load(args.gate, row, column), Load(args.up, row, column)));
  });
}

__global__ void __launch_bounds__(kThreads)
    SigmoidKernel(const __grid_constant__ RowsView x, int64_t columns) {
  EnterChain();
  ForElements(x.rows, columns, [&](int64_t row, int64_t column) {
    Store(x, row, column, TimesSigmoid(1.0f, Load(x, row, column)));
  });
}

__global__ void __launch_bounds__(kThreads)
    OutputGateKernel(const __grid_constant__ RowsView gate, const __grid_constant__ RowsView x,
                     int64_t columns) {
  EnterChain();
  ForElements(x.rows, columns, [&](int64_t row, int64_t column) {
    Store(x, row, column, TimesSigmoid(Load(x, row, column), Load(gate, row, column)));
  });
}

__global__ void __launch_bounds__(kThreads)
    ScaleAndCapKernel(const __grid_constant__ RowsView x, int64_t columns, float scale,
                      float softcap) {
  EnterChain();
  ForElements(x.rows, columns, [&](int64_t row, int64_t column) {
    const float scaled = Load(x, row, column) * scale;
    Store(x, row, column, softcap == 0.0f ? scaled : softcap * tanhf(scaled / softcap));
  });
}

/// blockIdx.x: token; threads: columns. Every thread has read the weight before it becomes 1.
__global__ void __launch_bounds__(kThreads)
    ScaleInputsKernel(const __grid_constant__ RowsView x, float* weights, int64_t columns) {
  EnterChain();
  const auto token = static_cast<int64_t>(blockIdx.x);
  const float weight = weights[token];
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
    Store(x, token, column, weight * Load(x, token, column));
  }
  __syncthreads();
  if (threadIdx.x == 0) weights[token] = 1.0f;
}

/// blockIdx.x: token; blockIdx.y: head. The position of the CTA's token, or -1 with a record of
/// why.
MARLIN_DEVICE int64_t PositionOfToken(const IndexView& positions, const ErrorView& errors) {
  const int64_t position = positions.At(blockIdx.x);
  if (position >= 0 && position < int64_t{1} << 31) return position;
  if (threadIdx.x == 0) RecordError(errors, ValueError::kPosition, position, blockIdx.x);
  return -1;
}
/// The row of the CTA's head in `x`, [tokens, heads] rows.
MARLIN_DEVICE int64_t RowOfHead(const RowsView& x) {
  return static_cast<int64_t>(blockIdx.x) * x.inner + blockIdx.y;
}

struct RotaryArguments {
  RowsView x;  ///< [tokens, heads] rows.
  IndexView positions;
  RotaryView rotary;
  ErrorView errors;
};

/// The threads take pairs.
__global__ void __launch_bounds__(kThreads)
    RotaryKernel(const __grid_constant__ RotaryArguments args) {
  EnterChain();
  const int64_t position = PositionOfToken(args.positions, args.errors);
  if (position < 0) return;
  const int64_t row = RowOfHead(args.x);
  for (int pair = static_cast<int>(threadIdx.x); pair < args.rotary.pairs;
       pair += static_cast<int>(blockDim.x)) {
    float cosine;
    float sine;
    RotationOf(args.rotary.frequencies[pair], position, args.rotary.factor, &cosine, &sine);
    const int first = args.rotary.interleaved ? 2 * pair : pair;
    const int second = args.rotary.interleaved ? 2 * pair + 1 : pair + args.rotary.pairs;
    const float a = Load(args.x, row, first);
    const float b = Load(args.x, row, second);
    Store(args.x, row, first, a * cosine - b * sine);
    Store(args.x, row, second, b * cosine + a * sine);
  }
}

struct ScaleByPositionArguments {
  RowsView x;  ///< [tokens, heads] rows.
  IndexView positions;
  int64_t columns;
  float beta;
  int64_t offset;
  int64_t period;
  ErrorView errors;
};

/// The threads take columns.
__global__ void __launch_bounds__(kThreads)
    ScaleByPositionKernel(const __grid_constant__ ScaleByPositionArguments args) {
  EnterChain();
  const int64_t position = PositionOfToken(args.positions, args.errors);
  if (position < 0) return;
  const int64_t periods = (position + args.offset) / args.period;
  const float factor = 1.0f + args.beta * log1pf(static_cast<float>(periods));
  const int64_t row = RowOfHead(args.x);
  for (int64_t column = threadIdx.x; column < args.columns; column += blockDim.x) {
    Store(args.x, row, column, factor * Load(args.x, row, column));
  }
}

Status CopyRows(const CopyRowsArguments& args, const char* name, const CallContext& context) {
  static_assert(kCopyThreads == kThreads);
  constexpr int64_t kManyRows = 64;
  const bool many = args.out.rows >= kManyRows && CopiesQuads(args);
  const dim3 grid = GridOf(args.out.rows, many ? args.columns / 4 : args.columns);
  return context.Launch(name, many ? &CopyRowsKernel<4> : &CopyRowsKernel<1>, grid, kCopyThreads,
                        args);
}

}  // namespace

template <>
cudaError_t Load<LookUpRowsCall>() {
  return PrepareKernels(&CopyRowsKernel<1>, &CopyRowsKernel<4>);
}
template <>
cudaError_t Load<AddToCall>() {
  return PrepareKernels(&AddToKernel);
}
template <>
cudaError_t Load<ApplyGateCall>() {
  return PrepareKernels(&ApplyGateKernel);
}
template <>
cudaError_t Load<ApplySigmoidCall>() {
  return PrepareKernels(&SigmoidKernel);
}
template <>
cudaError_t Load<ApplyOutputGateCall>() {
  return PrepareKernels(&OutputGateKernel);
}
template <>
cudaError_t Load<ScaleAndCapCall>() {
  return PrepareKernels(&ScaleAndCapKernel);
}
template <>
cudaError_t Load<ScaleInputsCall>() {
  return PrepareKernels(&ScaleInputsKernel);
}
template <>
cudaError_t Load<ApplyRotaryCall>() {
  return PrepareKernels(&RotaryKernel);
}

template <>
cudaError_t Load<ScaleByPositionCall>() {
  return PrepareKernels(&ScaleByPositionKernel);
}

Status Run(const LookUpRowsCall& call, const CallContext& context) {
  return CopyRows(
      {RowsOf(call.table), RowsOf(call.out), IndicesOf(call.ids), call.out.dim(1), context.errors},
      "lookup", context);
}

Status Run(const ConvertCall& call, const CallContext& context) {
  return CopyRows({RowsOf(call.x), RowsOf(call.out), {}, call.x.dim(call.x.rank() - 1), {}},
                  "convert", context);
}

Status Run(const AddToCall& call, const CallContext& context) {
  const AddToArguments args = {RowsOf(call.y), RowsOf(call.x), call.x.dim(1), call.scale};
  return context.Launch("residual", &AddToKernel, GridOf(args.x.rows, args.columns), kThreads,
                        args);
}

Status Run(const ApplyGateCall& call, const CallContext& context) {
  const GateOptions& options = call.options;
  const GateView gate = {static_cast<int>(options.activation), options.limit, options.alpha};
  const ApplyGateArguments args = {RowsOf(call.gate), RowsOf(call.up), RowsOf(call.out),
                                   call.out.dim(1), gate};
  return context.Launch("glu", &ApplyGateKernel, GridOf(args.out.rows, args.columns), kThreads,
                        args);
}

Status Run(const ApplySigmoidCall& call, const CallContext& context) {
  const RowsView x = RowsOf(call.x);
  const int64_t columns = call.x.dim(1);
  return context.Launch("sigmoid", &SigmoidKernel, GridOf(x.rows, columns), kThreads, x, columns);
}

Status Run(const ApplyOutputGateCall& call, const CallContext& context) {
  const RowsView x = RowsOf(call.x);
  const int64_t columns = call.x.dim(2);
  return context.Launch("output_gate", &OutputGateKernel, GridOf(x.rows, columns), kThreads,
                        RowsOf(call.gate), x, columns);
}

Status Run(const ScaleAndCapCall& call, const CallContext& context) {
  const RowsView x = RowsOf(call.x);
  const int64_t columns = call.x.dim(1);
  return context.Launch("scale", &ScaleAndCapKernel, GridOf(x.rows, columns), kThreads, x, columns,
                        call.scale, call.softcap);
}

Status Run(const ScaleInputsCall& call, const CallContext& context) {
  const RowsView x = RowsOf(call.x);
  return context.Launch("scale_inputs", &ScaleInputsKernel, dim3(static_cast<unsigned>(x.rows)),
                        kThreads, x, call.weights.As<float>(), call.x.dim(1));
}

Status Run(const ApplyRotaryCall& call, const CallContext& context) {
  const RotaryArguments args = {RowsOf(call.x), IndicesOf(call.positions), RotaryOf(call.rotary),
                                context.errors};
  return context.Launch("rope", &RotaryKernel, HeadsGridOf(args.x), ThreadsFor(args.rotary.pairs),
                        args);
}

Status Run(const ScaleByPositionCall& call, const CallContext& context) {
  const PositionScale& scale = call.scale;
  const ScaleByPositionArguments args = {RowsOf(call.x), IndicesOf(call.positions),
                                         call.x.dim(2),  scale.beta,
                                         scale.offset,   scale.period,
                                         context.errors};
  return context.Launch("scale_by_position", &ScaleByPositionKernel, HeadsGridOf(args.x),
                        ThreadsFor(args.columns), args);
}

}  // namespace marlin::cuda
