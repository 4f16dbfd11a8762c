// Gated short convolutions.
//
//   A thread has a channel of a sequence. Where sequences have few rows, it takes all of them, and
//   then replaces the channel's inputs in the state. Otherwise CTAs take chunks of 64 rows, and a
//   second kernel replaces the inputs, which the first one no longer reads. A row has the same bits
//   either way.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/chunked/chunk_tiles.cuh"
#include "backends/cuda/recurrent/convolution.cuh"
#include "backends/cuda/recurrent/recurrent_views.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsAtOnce = 8;  ///< Rows whose inputs are loaded together.
/// Sequences with more rows on average run in chunks.
constexpr int64_t kMostRows = 8;

/// f32 [rows, channels] with contiguous channels.
struct ChannelsView {
  const float* data = nullptr;
  int64_t row_stride = 0;

  MARLIN_DEVICE float At(int64_t row, int channel) const {
    return data[row * row_stride + channel];
  }
};

/// ShortConvolutionCall: one head, whose values are the channels.
struct ShortConvolutionArguments : RecurrentArguments {
  ChannelsView values;
  ChannelsView in_gates;
  ChannelsView out_gates;
  const float* conv_bias = nullptr;
};

/// As ConvInput, of gated values.
struct GatedInput {
  const ShortConvolutionArguments& args;
  const float* window;  ///< Null: zeros.
  int channel;

  MARLIN_DEVICE float At(int source) const {
    if (source >= 0) return args.values.At(source, channel) * args.in_gates.At(source, channel);
    return window == nullptr ? 0.0f : window[int64_t{~source} * args.value_dim + channel];
  }
};

/// The rows of a chunk, and zeros for those that take no part.
template <int kWidth>
MARLIN_DEVICE void ConvolveRows(const ShortConvolutionArguments& args, const GatedInput& input,
                                const ChunkSources& chunk, int first, int end) {
  const int channel = input.channel;
  const int width = kWidth == 0 ? args.conv_width : kWidth;
  const int* const rows = chunk.sources + width - 1;
  const float bias = args.conv_bias == nullptr ? 0.0f : args.conv_bias[channel];
  ConvolveInput<kWidth, kRowsAtOnce>(input, args.conv + int64_t{channel} * width, width, bias,
                                     chunk.sources, chunk.count, [&](int t, float sum) {
                                       StoreFloat(args.out.data, args.out.type,
                                                  args.out.At(rows[t]) + channel,
                                                  args.out_gates.At(rows[t], channel) * sum);
                                     });
  if (chunk.count == end - first) return;
  for (int row = first; row < end; ++row) {
    if (args.sequences.positions[row] >= 0) continue;
    StoreFloat(args.out.data, args.out.type, args.out.At(row) + channel, 0.0f);
  }
}

/// blockIdx.x: channels; blockIdx.y: sequence, or chunk of all sequences'.
template <int kWidth, bool kChunks>
__global__ void __launch_bounds__(kThreads, 8)
    ShortConvolutionKernel(const __grid_constant__ ShortConvolutionArguments args) {
  __shared__ ChunkSources chunk;
  EnterChain();
  if (blockIdx.x == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  auto sequence = static_cast<int>(blockIdx.y);
  int skipped = 0;
  if constexpr (kChunks) {
    const ChunkPlace place = FindChunk(args, sequence);
    if (place.sequence < 0) return;
    sequence = place.sequence;
    skipped = place.chunk * kChunkRows;
  }
  const SequenceState state(args, sequence);
  const int channel = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const bool exists = channel < args.value_dim;
  const GatedInput input = {args, state.from, channel};
  const int begin = state.first_row + skipped;
  const int end = kChunks ? min(begin + kChunkRows, state.end_row) : state.end_row;
  int first = begin;
  // Without rows, too: the state may have to be copied.
  do {
    const int next = min(first + kChunkRows, end);
    if (threadIdx.x < 32) ListRows(args, state, first, kChunkRows, &chunk);
    __syncthreads();
    if (exists) ConvolveRows<kWidth>(args, input, chunk, first, next);
    first = next;
    if (first < end) __syncthreads();
  } while (first < end);
  if (kChunks || !exists || state.to == nullptr) return;
  StoreInputs(input, chunk.sources + chunk.count, args.conv_width, args.value_dim,
              state.to + channel);
}

/// After chunks. blockIdx.x: channels; blockIdx.y: sequence.
__global__ void __launch_bounds__(kThreads)
    ShortWindowKernel(const __grid_constant__ ShortConvolutionArguments args) {
  __shared__ int sources[kMostConvWidth];
  EnterChain();
  const SequenceState state(args, static_cast<int>(blockIdx.y));
  if (state.to == nullptr) return;
  if (threadIdx.x < 32) FindSourcesBefore(args, state, state.end_row, sources);
  __syncthreads();
  const int channel = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (channel >= args.value_dim) return;
  StoreInputs(GatedInput{args, state.from, channel}, sources, args.conv_width, args.value_dim,
              state.to + channel);
}

template <bool kChunks>
auto KernelFor(int conv_width) {
  constexpr int kUsualWidth = 3;
  return conv_width == kUsualWidth ? &ShortConvolutionKernel<kUsualWidth, kChunks>
                                   : &ShortConvolutionKernel<0, kChunks>;
}

ChannelsView ChannelsOf(const TensorView& view) { return {view.As<float>(), view.stride(0)}; }

ShortConvolutionArguments ArgumentsOf(const ShortConvolutionCall& call,
                                      const CallContext& context) {
  ShortConvolutionArguments args;
  SetRows(call.rows, call.out, context.errors, &args);
  args.values = ChannelsOf(call.inputs.values);
  args.in_gates = ChannelsOf(call.inputs.in_gates);
  args.out_gates = ChannelsOf(call.inputs.out_gates);
  args.conv = call.weights.conv.As<float>();
  args.conv_bias = call.weights.conv_bias.As<float>();
  args.key_heads = 0;
  args.value_dim = static_cast<int>(call.sizes.channels);
  args.conv_width = static_cast<int>(call.sizes.conv_width);
  args.most_rows = 0;
  return args;
}

cudaError_t LaunchShortConvolution(const ShortConvolutionArguments& args, cudaStream_t stream) {
  const int64_t rows = args.sequences.rows;
  const int64_t sequences = args.sequences.count;
  const auto blocks = static_cast<unsigned>(CeilDivide(args.value_dim, kThreads));
  const dim3 grid(blocks, static_cast<unsigned>(sequences));
  if (rows <= kMostRows * sequences) {
    return LaunchInChain(KernelFor<false>(args.conv_width), grid, kThreads, 0, stream, args);
  }
  // Every sequence may have a chunk that is not full.
  const dim3 chunks(blocks, static_cast<unsigned>(rows / kChunkRows + sequences));
  const cudaError_t error =
      LaunchInChain(KernelFor<true>(args.conv_width), chunks, kThreads, 0, stream, args);
  if (error != cudaSuccess) return error;
  return LaunchInChain(&ShortWindowKernel, grid, kThreads, 0, stream, args);
}

}  // namespace

template <>
cudaError_t Load<ShortConvolutionCall>() {
  return PrepareKernels(KernelFor<false>(0), KernelFor<false>(3), KernelFor<true>(0),
                        KernelFor<true>(3), &ShortWindowKernel);
}

int64_t WorkspaceBytes(const ShortConvolutionCall& call, const DeviceShape& /*device*/) {
  return SlabTableBytes(CacheOf(call.states));
}

Status Run(const ShortConvolutionCall& call, const CallContext& context) {
  ShortConvolutionArguments args = ArgumentsOf(call, context);
  if (args.sequences.count == 0) return {};
  MARLIN_RETURN_IF_ERROR(
      CheckLimits({"short convolution", 0, 0, call.sizes.conv_width, args.sequences.count}));
  cudaError_t error = PagesOf(CacheOf(call.states), context, &args.states);
  if (error == cudaSuccess) error = LaunchShortConvolution(args, context.stream);
  return context.Check(error, "short_convolution");
}

}  // namespace marlin::cuda
