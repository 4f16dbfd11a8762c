// The causal convolution of recurrent mixers, and the rows that it runs over.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/recurrent/chunked/chunk_layout.h"
#include "backends/cuda/recurrent/sequence_state.cuh"

namespace marlin::cuda {

/// Where the inputs of a convolution are: rows of this call, or earlier ones in the state.
struct ConvInput {
  const float* rows;  ///< Address in row 0.
  int64_t row_stride;
  const float* window;  ///< Address in the oldest row of the state; null: zeros.
  int64_t channels;

  /// `source`: a row, or ~slot of the state.
  MARLIN_DEVICE float At(int source) const {
    if (source >= 0) return rows[source * row_stride];
    return window == nullptr ? 0.0f : window[~source * channels];
  }
};

/// A channel of the convolution, in the order of the state.
struct Channel {
  int64_t index;
  HeadsView view;
  int head;
  int feature;

  MARLIN_DEVICE ConvInput Input(const RecurrentArguments& args, const SequenceState& state) const {
    return {view.At(0, head) + feature, view.row_stride,
            state.from == nullptr ? nullptr : state.from + index, args.channels()};
  }
};

/// Calls store(t, y) with the convolution of a channel, whose weights are `weights` [width], at
/// each of `count` rows; its sum begins with `bias`. `sources`: ConvInput::At of the width - 1 rows
/// before them, then of the rows. kWidth: width, or 0 for any. The rows are loaded kAtOnce at a
/// time.
template <int kWidth, int kAtOnce, typename Input, typename Store>
MARLIN_DEVICE void ConvolveInput(const Input& input, const float* weights, int width, float bias,
                                 const int* sources, int count, const Store& store) {
  if constexpr (kWidth == 0) {
    for (int t = 0; t < count; ++t) {
      float sum = bias;
      for (int i = 0; i < width; ++i) sum = __fmaf_rn(weights[i], input.At(sources[t + i]), sum);
      store(t, sum);
    }
  } else {
    float w[kWidth];
    float x[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      w[i] = weights[i];
      x[i] = i < kWidth - 1 ? input.At(sources[i]) : 0.0f;
    }
#pragma unroll 2
    for (int first = 0; first < count; first += kAtOnce) {
      float next[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int t = first + j;
        next[j] = t < count ? input.At(sources[kWidth - 1 + t]) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        x[kWidth - 1] = next[j];
        float sum = bias;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum = __fmaf_rn(w[i], x[i], sum);
#pragma unroll
        for (int i = 0; i + 1 < kWidth; ++i) x[i] = x[i + 1];
        if (first + j < count) store(first + j, sum);
      }
    }
  }
}

/// ConvolveInput of a channel of the state; store(t, y) gets SiLU of the sums.
template <int kWidth, int kAtOnce, typename Store>
MARLIN_DEVICE void Convolve(const RecurrentArguments& args, const SequenceState& state,
                            const Channel& channel, const int* sources, int count,
                            const Store& store, float bias = 0.0f) {
  const int width = kWidth == 0 ? args.conv_width : kWidth;
  ConvolveInput<kWidth, kAtOnce>(channel.Input(args, state), args.conv + channel.index * width,
                                 width, bias, sources, count,
                                 [&](int t, float sum) { store(t, TimesSigmoid(sum, sum)); });
}

/// Convolve of one row, whose time is the sum of its latencies, for channels [0, count) that the
/// threads of a CTA share: a thread loads everything of kAtOnce channels at once. channel_of(i) is
/// channel i, bias_of(channel) begins its sum; store(i, y, x) also gets its inputs, x[kWidth].
template <int kWidth, int kAtOnce, typename ChannelOf, typename BiasOf, typename Store>
MARLIN_DEVICE void ConvolveRow(const RecurrentArguments& args, const SequenceState& state,
                               const int* sources, int count, const ChannelOf& channel_of,
                               const BiasOf& bias_of, const Store& store) {
  const auto threads = static_cast<int>(blockDim.x);
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kAtOnce * threads) {
    float w[kAtOnce][kWidth];
    float x[kAtOnce][kWidth];
    float bias[kAtOnce];
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      const Channel channel = channel_of(min(first + c * threads, count - 1));
      const ConvInput input = channel.Input(args, state);
      bias[c] = bias_of(channel);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        w[c][j] = args.conv[channel.index * kWidth + j];
        x[c][j] = input.At(sources[j]);
      }
    }
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      const int i = first + c * threads;
      if (i >= count) break;
      float sum = bias[c];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum = __fmaf_rn(w[c][j], x[c][j], sum);
      store(i, TimesSigmoid(sum, sum), x[c]);
    }
  }
}

/// Finds the convolution's inputs before a row of the sequence: sources of the last conv_width - 1
/// rows that take part. Called by a warp.
MARLIN_DEVICE void FindSourcesBefore(const RecurrentArguments& args, const SequenceState& state,
                                     int row, int* sources) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int wanted = args.conv_width - 1;
  int found = 0;
  for (int end = row; end > state.first_row && found < wanted; end -= 32) {
    const int at = end - 32 + lane;
    const bool joins = at >= state.first_row && args.sequences.positions[at] >= 0;
    const unsigned joining = __ballot_sync(~0u, joins);
    const int place = found + __popc(joining & ~((2u << lane) - 1));
    if (joins && place < wanted) sources[wanted - 1 - place] = at;
    found += __popc(joining);
  }
  // Earlier ones are in the state.
  if (lane < wanted - found) sources[lane] = ~(lane + found);
  __syncwarp();
}

/// Lists which of rows [first, first + most) of a sequence take part; `most` is at most kChunkRows.
/// Called by a warp.
MARLIN_DEVICE void ListRows(const RecurrentArguments& args, const SequenceState& state, int first,
                            int most, ChunkSources* chunk) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  FindSourcesBefore(args, state, first, chunk->sources);
  int* const rows = chunk->sources + args.conv_width - 1;
  const int end = min(first + most, state.end_row);
  int count = 0;
  for (int row = first + lane; row - lane < end; row += 32) {
    const bool joins = row < end && args.sequences.positions[row] >= 0;
    const unsigned joining = __ballot_sync(~0u, joins);
    if (joins) rows[count + __popc(joining & ((1u << lane) - 1))] = row;
    count += __popc(joining);
  }
  if (lane == 0) chunk->count = count;
}

/// Replaces the inputs `to` [width - 1] of a channel of `channels` in a state by the last of
/// `sources`, [width - 1]. In place, every slot is read before it is written: sources ascend.
template <typename Input>
MARLIN_DEVICE void StoreInputs(const Input& input, const int* sources, int width, int64_t channels,
                               float* to) {
  constexpr int kAtOnce = 4;
  for (int first = 0; first < width - 1; first += kAtOnce) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < width - 1) x[i] = input.At(sources[first + i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < width - 1) to[(first + i) * channels] = x[i];
    }
  }
}

MARLIN_DEVICE void StoreWindow(const RecurrentArguments& args, const SequenceState& state,
                               const Channel& channel, const int* sources) {
  StoreInputs(channel.Input(args, state), sources, args.conv_width, args.channels(),
              state.to + channel.index);
}

}  // namespace marlin::cuda
