// The causal convolution of a gated delta net's queries, keys and values.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
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

  MARLIN_DEVICE ConvInput Input(const GatedDeltaArguments& args, const SequenceState& state) const {
    return {view.At(0, head) + feature, view.row_stride,
            state.from == nullptr ? nullptr : state.from + index, args.channels()};
  }
};

MARLIN_DEVICE Channel QueryChannel(const GatedDeltaArguments& args, int head, int feature) {
  return {int64_t{head} * args.key_dim + feature, args.queries, head, feature};
}
MARLIN_DEVICE Channel KeyChannel(const GatedDeltaArguments& args, int head, int feature) {
  const int64_t queries = int64_t{args.key_heads} * args.key_dim;
  return {queries + int64_t{head} * args.key_dim + feature, args.keys, head, feature};
}
/// `head`: a value head.
MARLIN_DEVICE Channel ValueChannel(const GatedDeltaArguments& args, int head, int feature) {
  const int64_t keys = int64_t{2} * args.key_heads * args.key_dim;
  const int group = args.group();
  return {keys + int64_t{head} * args.value_dim + feature, args.values, head / group,
          head % group * args.value_dim + feature};
}

/// Calls store(t, y) with SiLU of the convolution of a channel at each of `count` rows. `sources`:
/// ConvInput::At of the conv_width - 1 rows before them, then of the rows. kWidth: conv_width, or 0
/// for any. The rows are loaded kAtOnce at a time.
template <int kWidth, int kAtOnce, typename Store>
MARLIN_DEVICE void Convolve(const GatedDeltaArguments& args, const SequenceState& state,
                            const Channel& channel, const int* sources, int count,
                            const Store& store) {
  const ConvInput input = channel.Input(args, state);
  if constexpr (kWidth == 0) {
    const float* const weights = args.conv + channel.index * args.conv_width;
    for (int t = 0; t < count; ++t) {
      float sum = 0.0f;
      for (int i = 0; i < args.conv_width; ++i) {
        sum = __fmaf_rn(weights[i], input.At(sources[t + i]), sum);
      }
      store(t, TimesSigmoid(sum, sum));
    }
  } else {
    float w[kWidth];
    float x[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      w[i] = args.conv[channel.index * kWidth + i];
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
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum = __fmaf_rn(w[i], x[i], sum);
#pragma unroll
        for (int i = 0; i + 1 < kWidth; ++i) x[i] = x[i + 1];
        if (first + j < count) store(first + j, TimesSigmoid(sum, sum));
      }
    }
  }
}

/// Finds the convolution's inputs before a row of the sequence: sources of the last conv_width - 1
/// rows that take part. Called by a warp.
MARLIN_DEVICE void FindSourcesBefore(const GatedDeltaArguments& args, const SequenceState& state,
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

/// Replaces a channel's inputs in the state by the last of `sources`, [conv_width - 1]. In place,
/// every slot is read before it is written: sources ascend.
MARLIN_DEVICE void StoreWindow(const GatedDeltaArguments& args, const SequenceState& state,
                               const Channel& channel, const int* sources) {
  constexpr int kAtOnce = 4;
  const ConvInput input = channel.Input(args, state);
  float* const to = state.to + channel.index;
  for (int first = 0; first < args.conv_width - 1; first += kAtOnce) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < args.conv_width - 1) x[i] = input.At(sources[first + i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < args.conv_width - 1) to[(first + i) * input.channels] = x[i];
    }
  }
}

}  // namespace marlin::cuda
