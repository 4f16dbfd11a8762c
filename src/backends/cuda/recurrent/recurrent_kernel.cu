// The gated delta rule row by row.
//
//   A CTA takes up to 128 value features of a value head of a sequence, and keeps their part of the
//   state in registers: a warp has 16 columns, a lane 4 of them in an eighth of the rows. Rows of
//   the sequence come in groups: the CTA computes their convolutions and norms, then every warp
//   runs through them without a barrier, then the CTA stores the group's outputs.
//
//   Both products with the state are taken before a row's update: S'^T q = decay S^T q +
//   (k . q) delta. So a row adds over the warp once.
//
//   The arithmetic of a row depends on nothing but the shape: a row has the same bits with any
//   other rows in the call, and however its sequence is divided into calls.
#include <algorithm>

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/delta_channels.cuh"
#include "backends/cuda/recurrent/gated_norm.cuh"
#include "backends/cuda/recurrent/lane_state.cuh"
#include "backends/cuda/recurrent/recurrent_launch.h"

namespace marlin::cuda {
namespace {

/// The value features of a CTA.
struct Slice {
  int head;  ///< Value head.
  int key_head;
  int first;  ///< Its first feature.
  int columns;
  bool is_first;  ///< The first slice of all with this key head.

  MARLIN_DEVICE explicit Slice(const GatedDeltaArguments& args) {
    const int index = static_cast<int>(blockIdx.x);
    head = index / args.slices;
    key_head = head / args.group();
    first = (index - head * args.slices) * kSliceColumns;
    columns = min(args.value_dim - first, kSliceColumns);
    is_first = head == key_head * args.group() && first == 0;
  }

  /// Channel i of those that the slice needs: its key head's queries and keys, then its values.
  MARLIN_DEVICE Channel ChannelOf(const GatedDeltaArguments& args, int i) const {
    const int key_dim = args.key_dim;
    if (i < key_dim) return QueryChannel(args, key_head, i);
    if (i < 2 * key_dim) return KeyChannel(args, key_head, i - key_dim);
    return ValueChannel(args, head, first + i - 2 * key_dim);
  }
};

/// The rows of a group that take part, and the inputs of their convolutions before them.
struct Group {
  int* sources;  ///< ConvInput::At: [conv_width - 1] of earlier rows, then the group's.
  int* rows;     ///< Where the group's begin.
  int count = 0;

  MARLIN_DEVICE Group(int* memory, int conv_width)
      : sources(memory), rows(memory + conv_width - 1) {}

  /// Called by the first warp.
  MARLIN_DEVICE void Begin(int conv_width) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    if (lane < conv_width - 1) sources[lane] = ~lane;
    __syncwarp();
  }
  /// Replaces the group of `before` rows by the group of rows [first, end). Called by the first
  /// warp.
  MARLIN_DEVICE int Advance(const int32_t* positions, int first, int end, int conv_width,
                            int before) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int kept = lane < conv_width - 1 ? sources[before + lane] : 0;
    __syncwarp();
    if (lane < conv_width - 1) sources[lane] = kept;
    const bool joins = first + lane < end && lane < kGroupRows && positions[first + lane] >= 0;
    const unsigned joining = __ballot_sync(~0u, joins);
    if (joins) rows[__popc(joining & ((1u << lane) - 1))] = first + lane;
    __syncwarp();
    return __popc(joining);
  }
};

/// Queries, keys, values and factors of a group in shared memory, as RecurrentShared.
struct Inputs {
  RecurrentShared layout;
  float* queries;
  float* keys;
  float* values;   ///< Replaced by S^T q.
  float* factors;  ///< norm * SiLU(gate), unless norms_apart.
  float* decays;   ///< [kGroupRows] as the following.
  float* writes;
  float* products;  ///< q . k

  /// After a group of one row: [conv_width - 1][channels of the slice], in place of other values.
  MARLIN_DEVICE float* Kept() const { return Value(1); }
  /// Where channel i of a slice's begins.
  MARLIN_DEVICE float* PlaceOf(const GatedDeltaArguments& args, int i) const {
    const int key_dim = args.key_dim;
    if (i < key_dim) return queries + i;
    return i < 2 * key_dim ? keys + i - key_dim : values + i - 2 * key_dim;
  }
  MARLIN_DEVICE float* Query(int t) const { return queries + t * layout.key_row; }
  MARLIN_DEVICE float* Key(int t) const { return keys + t * layout.key_row; }
  MARLIN_DEVICE float* Value(int t) const { return values + t * layout.value_row; }
  MARLIN_DEVICE float* Factor(int t) const { return factors + t * layout.value_row; }
};

/// The numbers of a value head's row.
struct RowScalars {
  float write = 0.0f;
  float decay = 0.0f;
  float bias = 0.0f;
  float log_decay = 0.0f;

  RowScalars() = default;
  MARLIN_DEVICE RowScalars(const GatedDeltaArguments& args, const Slice& slice, int row) {
    const int of_group = slice.head % args.group();
    write = args.writes.At(row, slice.key_head)[of_group];
    decay = args.decays.At(row, slice.key_head)[of_group];
    bias = args.decay_bias[slice.head];
    log_decay = args.log_decay[slice.head];
  }

  MARLIN_DEVICE void Store(const Inputs& inputs, int t) const {
    inputs.decays[t] = expf(-expf(log_decay) * SoftPlus(decay + bias));
    inputs.writes[t] = TimesSigmoid(1.0f, write);
  }
};

/// The queries, keys and values of a group, before their norms, and its decays and writes.
template <int kWidth>
MARLIN_DEVICE void PrepareGroup(const GatedDeltaArguments& args, const SequenceState& state,
                                const Slice& slice, const Group& group, const Inputs& inputs) {
  const int key_dim = args.key_dim;
  const int channels = 2 * key_dim + slice.columns;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += static_cast<int>(blockDim.x)) {
    const Channel channel = slice.ChannelOf(args, i);
    float* const to = inputs.PlaceOf(args, i);
    const int stride = i < 2 * key_dim ? inputs.layout.key_row : inputs.layout.value_row;
    Convolve<kWidth, 1>(args, state, channel, group.sources, group.count,
                        [&](int t, float y) { to[t * stride] = y; });
  }
  if (!args.norms_apart) {
    for (int i = static_cast<int>(threadIdx.x); i < slice.columns * group.count;
         i += static_cast<int>(blockDim.x)) {
      const int t = i / slice.columns;
      const int column = i - t * slice.columns;
      const float gate = GatesOf(args, group.rows[t], slice.head)[column];
      inputs.Factor(t)[column] = args.norm[column] * TimesSigmoid(gate, gate);
    }
  }
  // The last threads have the fewest channels.
  const int t = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  if (t < group.count) RowScalars(args, slice, group.rows[t]).Store(inputs, t);
}

/// PrepareGroup of one row, whose time is the sum of its latencies: everything is loaded at once.
/// Keeps the inputs of the next row's convolution.
template <int kWidth>
MARLIN_DEVICE void PrepareRow(const GatedDeltaArguments& args, const SequenceState& state,
                              const Slice& slice, const Group& group, const Inputs& inputs) {
  constexpr int kChannels = 2;  ///< Channels of a thread at a time.
  const int row = group.rows[0];
  const auto thread = static_cast<int>(threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x);
  const int channels = 2 * args.key_dim + slice.columns;
  const bool has_scalars = thread == threads - 1;
  const bool has_gate = !args.norms_apart && thread < slice.columns;
  RowScalars scalars;
  if (has_scalars) scalars = RowScalars(args, slice, row);
  const float gate = has_gate ? GatesOf(args, row, slice.head)[thread] : 0.0f;
  const float norm = has_gate ? args.norm[thread] : 0.0f;
  ConvolveRow<kWidth, kChannels>(
      args, state, group.sources, channels, [&](int i) { return slice.ChannelOf(args, i); },
      [](const Channel& /*channel*/) { return 0.0f; },
      [&](int i, float y, const float(&x)[kWidth]) {
        *inputs.PlaceOf(args, i) = y;
#pragma unroll
        for (int j = 0; j + 1 < kWidth; ++j) inputs.Kept()[j * channels + i] = x[j + 1];
      });
  if (has_gate) inputs.Factor(0)[thread] = norm * TimesSigmoid(gate, gate);
  if (has_scalars) scalars.Store(inputs, 0);
}

template <int kWidth>
MARLIN_DEVICE void PrepareRows(const GatedDeltaArguments& args, const SequenceState& state,
                               const Slice& slice, const Group& group, const Inputs& inputs) {
  if constexpr (kWidth != 0) {
    if (group.count == 1) {
      PrepareRow<kWidth>(args, state, slice, group, inputs);
      return;
    }
  }
  PrepareGroup<kWidth>(args, state, slice, group, inputs);
}

/// Norms of the queries and keys of a group; a warp takes a row.
MARLIN_DEVICE void NormGroup(const GatedDeltaArguments& args, const Group& group,
                             const Inputs& inputs) {
  constexpr float kEpsilon = 1e-6f;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float depth = sqrtf(static_cast<float>(args.key_dim));
  for (int t = static_cast<int>(threadIdx.x) >> 5; t < group.count;
       t += static_cast<int>(blockDim.x) >> 5) {
    float* const query = inputs.Query(t);
    float* const key = inputs.Key(t);
    float queries = 0.0f;
    float keys = 0.0f;
    float product = 0.0f;
    for (int i = lane; i < args.key_dim; i += 32) {
      queries = __fmaf_rn(query[i], query[i], queries);
      keys = __fmaf_rn(key[i], key[i], keys);
      product = __fmaf_rn(query[i], key[i], product);
    }
    const float query_factor = 1.0f / sqrtf(SumOverLanes(queries) + kEpsilon) / depth;
    const float key_factor = 1.0f / sqrtf(SumOverLanes(keys) + kEpsilon);
    product = SumOverLanes(product);
    for (int i = lane; i < args.key_dim; i += 32) {
      query[i] *= query_factor;
      key[i] *= key_factor;
    }
    if (lane == 0) inputs.products[t] = product * query_factor * key_factor;
  }
}

/// The gated delta rule of a lane's part of the state.
template <int kRows, bool kVector>
class DeltaState : public LaneState<kRows, kVector> {
 public:
  MARLIN_DEVICE DeltaState(const GatedDeltaArguments& args, const Slice& slice)
      : LaneState<kRows, kVector>(args, slice.head, slice.first, slice.columns) {}

  /// Row t of a group: updates the state, and replaces the values by S^T q.
  MARLIN_DEVICE void Step(const Inputs& inputs, int t) {
    float keys[kRows];
    float sums[8];  // S^T k of the columns, then S^T q.
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    LoadRows(inputs.Key(t), keys);
    {
      float queries[kRows];
      LoadRows(inputs.Query(t), queries);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sums[c] = __fmaf_rn(state_[r][c], keys[r], sums[c]);
          sums[4 + c] = __fmaf_rn(state_[r][c], queries[r], sums[4 + c]);
        }
      }
    }
    const float decay = inputs.decays[t];
    const float sum = decay * SumOverRows(sums);
    // A lane has the sum of one column: of the first 16 lanes S^T k, of the others S^T q.
    const int owner = lane_ / kColumnLanes % 4;
    float* const value = inputs.Value(t) + column_ + owner;
    const bool exists = column_ + owner < columns_;
    const float own_delta = exists ? inputs.writes[t] * (*value - sum) : 0.0f;
    float delta[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      delta[c] = __shfl_sync(~0u, own_delta, c * kColumnLanes + lane_ % kColumnLanes);
    }
    // Every value has been read before the first is replaced.
    const float low = (owner & 1) != 0 ? delta[1] : delta[0];
    const float high = (owner & 1) != 0 ? delta[3] : delta[2];
    if (lane_ >= 16 && exists) {
      *value = __fmaf_rn(inputs.products[t], (owner & 2) != 0 ? high : low, sum);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        state_[r][c] = __fmaf_rn(keys[r], delta[c], decay * state_[r][c]);
      }
    }
  }

 private:
  using Base = LaneState<kRows, kVector>;
  using Base::column_;
  using Base::columns_;
  using Base::lane_;
  using Base::LoadRows;
  using Base::state_;

  /// Adds over the lanes of a column; lane 4 i + j gets sum i of column lane j.
  MARLIN_DEVICE float SumOverRows(const float (&sums)[8]) const {
    float four[4];
    float two[2];
    const bool third = (lane_ & 16) != 0;
    const bool second = (lane_ & 8) != 0;
    const bool first = (lane_ & 4) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float given = third ? sums[i] : sums[4 + i];
      four[i] = (third ? sums[4 + i] : sums[i]) + __shfl_xor_sync(~0u, given, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float given = second ? four[i] : four[2 + i];
      two[i] = (second ? four[2 + i] : four[i]) + __shfl_xor_sync(~0u, given, 8);
    }
    const float given = first ? two[0] : two[1];
    return (first ? two[1] : two[0]) + __shfl_xor_sync(~0u, given, 4);
  }
};

/// Stores the outputs of a group, and zeros for its rows that do not take part.
MARLIN_DEVICE void FinishGroup(const GatedDeltaArguments& args, const Slice& slice,
                               const Group& group, const Inputs& inputs, int first, int end) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int warps = static_cast<int>(blockDim.x) >> 5;
  for (int t = warp; t < group.count; t += warps) {
    const int row = group.rows[t];
    if (!args.norms_apart) {
      StoreNormed(args, row, slice.head, inputs.Value(t),
                  [&](int i) { return inputs.Factor(t)[i]; });
      continue;
    }
    float* const to =
        args.sums + (int64_t{row} * args.value_heads + slice.head) * args.value_dim + slice.first;
    for (int i = lane; i < slice.columns; i += 32) to[i] = inputs.Value(t)[i];
  }
  if (args.norms_apart || group.count == end - first) return;
  for (int row = first + warp; row < end; row += warps) {
    if (args.sequences.positions[row] < 0) StoreNothing(args, row, slice.head);
  }
}

/// The CTAs of a sequence's key head that have read the convolution's old inputs, each of which
/// counts itself. The last one may replace them.
struct Readers {
  uint32_t* counter;
  uint32_t count;
  uint32_t before = 0;

  MARLIN_DEVICE Readers(const GatedDeltaArguments& args, const Slice& slice)
      : counter(args.counters + int64_t{blockIdx.y} * args.key_heads + slice.key_head),
        count(args.counters == nullptr ? 0 : static_cast<uint32_t>(args.readers())) {}

  /// Called by one thread, after a barrier: all loads of the CTA have returned, so that no fence is
  /// needed. The result is there later.
  MARLIN_DEVICE void Count() {
    if (count > 1) before = IncrementTileCounter(counter);
  }
  /// A counter begins at all ones, which is -1.
  MARLIN_DEVICE bool IsLast(const GatedDeltaArguments& args) const {
    if (args.readers() == 1) return true;
    if (count == 0 || before + 2 != count) return false;
    *counter = ~0u;
    return true;
  }
};

/// Replaces the convolution's inputs in the state: the slice's values, and with `keys` the queries
/// and keys of its key head.
MARLIN_DEVICE void StoreWindows(const GatedDeltaArguments& args, const SequenceState& state,
                                const Slice& slice, const int* sources, bool keys) {
  const int begin = keys ? 0 : 2 * args.key_dim;
  const int end = 2 * args.key_dim + slice.columns;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    StoreWindow(args, state, slice.ChannelOf(args, i), sources);
  }
}

/// The same from what PrepareRow has kept.
template <int kWidth>
MARLIN_DEVICE void StoreKept(const GatedDeltaArguments& args, const SequenceState& state,
                             const Slice& slice, const float* kept, bool keys) {
  const int begin = keys ? 0 : 2 * args.key_dim;
  const int end = 2 * args.key_dim + slice.columns;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    float* const to = state.to + slice.ChannelOf(args, i).index;
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) to[j * args.channels()] = kept[j * end + i];
  }
}

/// The same with what there is after the last group.
template <int kWidth>
MARLIN_DEVICE void StoreConvInputs(const GatedDeltaArguments& args, const SequenceState& state,
                                   const Slice& slice, const Group& group, const Inputs& inputs,
                                   bool keys) {
  if constexpr (kWidth != 0) {
    if (group.count == 1) {
      StoreKept<kWidth>(args, state, slice, inputs.Kept(), keys);
      return;
    }
  }
  StoreWindows(args, state, slice, group.sources + group.count, keys);
}

/// Rows of the state beyond the key's features are zeros, and so are their queries and keys.
MARLIN_DEVICE void ClearPadding(const RecurrentShared& layout, int key_dim, float* memory) {
  if (key_dim == layout.key_row) return;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kGroupRows * layout.key_row;
       i += static_cast<int>(blockDim.x)) {
    if (i % layout.key_row >= key_dim) memory[i] = 0.0f;
  }
}

/// Requests what a CTA reads first into L2, whatever earlier work still does: its state, the
/// convolution's weights and its inputs in the state. The page may be an old one: it is read again.
/// A table of slabs in memory may be no table yet.
template <int kWidth>
MARLIN_DEVICE void PrefetchState(const GatedDeltaArguments& args, const Slice& slice) {
  if (args.slices > 1 || args.key_dim % 4 != 0 || args.states.more_slabs != nullptr) return;
  if (threadIdx.x > 3 * kWidth) return;
  const auto thread = static_cast<int>(threadIdx.x);
  const float* const state = FindState(args, static_cast<int>(blockIdx.y), 0);
  const int elements = args.key_dim * args.value_dim;
  if (thread == 0) {
    if (state == nullptr) return;
    PrefetchBulk(state + args.conv_elements() + int64_t{slice.head} * elements, elements * 4);
    return;
  }
  const int part = (thread - 1) % 3;  // Queries, keys, values.
  const int slot = (thread - 1) / 3;
  const int count = part == 2 ? args.value_dim : args.key_dim;
  const int64_t channel = slice.ChannelOf(args, part * args.key_dim).index;
  if (slot == kWidth - 1) {
    PrefetchBulk(args.conv + channel * kWidth, count * kWidth * 4);
  } else if (state != nullptr) {
    PrefetchBulk(state + slot * args.channels() + channel, count * 4);
  }
}

/// blockIdx.x: slice; blockIdx.y: sequence.
template <int kRows, bool kVector, int kWidth>
__global__ void __launch_bounds__(kMostThreads, kRows > 16 || kWidth == 0 ? 1 : 2)
    RecurrentKernel(const __grid_constant__ GatedDeltaArguments args) {
  extern __shared__ __align__(16) float memory[];
  const Slice slice(args);
  if constexpr (kVector && kWidth != 0) PrefetchState<kWidth>(args, slice);
  const RecurrentShared layout = {kRows * kRowLanes, kSliceColumns};
  GroupRows& shared = *reinterpret_cast<GroupRows*>(memory + layout.Rows());
  const Inputs inputs = {layout,
                         memory + layout.Queries(),
                         memory + layout.Keys(),
                         memory + layout.Values(),
                         memory + layout.Factors(),
                         shared.decays,
                         shared.writes,
                         shared.products};
  ClearPadding(layout, args.key_dim, memory);
  EnterChain();
  const auto sequence = static_cast<int>(blockIdx.y);
  const bool checks = blockIdx.x == 0 && blockIdx.y == 0;
  DeltaState<kRows, kVector> columns(args, slice);
  columns.Load(FindState(args, sequence, 0));  // First, as all else waits less long.
  if (checks) CheckFirstRows(args.sequences, args.errors);
  const SequenceState state(args, sequence);
  if (state.InChunks(args)) return;
  Group group(shared.sources, args.conv_width);
  Readers readers(args, slice);
  const bool first_warp = threadIdx.x < 32;
  if (first_warp) group.Begin(args.conv_width);
  if (threadIdx.x == 0) shared.is_last = slice.is_first ? 1 : 0;
  for (int first = state.first_row; first < state.end_row; first += kGroupRows) {
    const int end = min(first + kGroupRows, state.end_row);
    if (first_warp) {
      const int count =
          group.Advance(args.sequences.positions, first, end, args.conv_width, group.count);
      if (threadIdx.x == 0) shared.count = state.to != nullptr ? count : 0;
    }
    __syncthreads();
    group.count = shared.count;
    PrepareRows<kWidth>(args, state, slice, group, inputs);
    __syncthreads();
    const bool counts = threadIdx.x == 0 && end == state.end_row && state.to != nullptr;
    if (counts) readers.Count();
    NormGroup(args, group, inputs);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < group.count; ++t) columns.Step(inputs, t);
    if (counts) shared.is_last = readers.IsLast(args) ? 1 : 0;
    __syncthreads();
    FinishGroup(args, slice, group, inputs, first, end);
    __syncthreads();
  }
  if (state.to == nullptr) return;
  columns.Store(state.to);
  __syncthreads();
  StoreConvInputs<kWidth>(args, state, slice, group, inputs, shared.is_last != 0);
}

/// Replaces the convolution's inputs where RecurrentKernel does not: queries and keys if it has no
/// counters, and everything of a sequence in chunks. blockIdx.x: key head; blockIdx.y: sequence.
__global__ void __launch_bounds__(kMostThreads)
    WindowKernel(const __grid_constant__ GatedDeltaArguments args) {
  __shared__ int sources[kMostConvWidth];
  EnterChain();
  const auto sequence = static_cast<int>(blockIdx.y);
  const SequenceState state(args, sequence);
  const bool chunks = state.InChunks(args);
  if (state.to == nullptr || (!chunks && args.counts_readers())) return;
  if (threadIdx.x < 32) FindSourcesBefore(args, state, state.end_row, sources);
  __syncthreads();
  const auto head = static_cast<int>(blockIdx.x);
  const int group = args.group();
  const int end = 2 * args.key_dim + (chunks ? group * args.value_dim : 0);
  for (int i = static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    const int value = i - 2 * args.key_dim;
    const Channel channel = i < args.key_dim ? QueryChannel(args, head, i)
                            : value < 0      ? KeyChannel(args, head, i - args.key_dim)
                                             : ValueChannel(args, head * group, value);
    StoreWindow(args, state, channel, sources);
  }
}

constexpr int kNormWarps = 4;

/// The gated norm of args.sums; a warp takes a value head of row blockIdx.x.
__global__ void __launch_bounds__(kNormWarps * 32)
    GatedNormKernel(const __grid_constant__ GatedDeltaArguments args) {
  EnterChain();
  const auto row = static_cast<int>(blockIdx.x);
  const bool moves = args.sequences.positions[row] >= 0;
  for (int head = static_cast<int>(threadIdx.x) >> 5; head < args.value_heads; head += kNormWarps) {
    if (moves) {
      const float* const gates = GatesOf(args, row, head);
      StoreNormed(args, row, head,
                  args.sums + (int64_t{row} * args.value_heads + head) * args.value_dim,
                  [&](int i) { return args.norm[i] * TimesSigmoid(gates[i], gates[i]); });
    } else {
      StoreNothing(args, row, head);
    }
  }
}

using Kernel = void (*)(GatedDeltaArguments);

template <int kRows>
Kernel KernelFor(bool vector, int conv_width) {
  constexpr int kUsualWidth = 4;
  if (!vector) return &RecurrentKernel<kRows, false, 0>;
  return conv_width == kUsualWidth ? &RecurrentKernel<kRows, true, kUsualWidth>
                                   : &RecurrentKernel<kRows, true, 0>;
}

Kernel KernelFor(int rows, bool vector, int conv_width) {
  switch (rows) {
    case 4:
      return KernelFor<4>(vector, conv_width);
    case 8:
      return KernelFor<8>(vector, conv_width);
    case 16:
      return KernelFor<16>(vector, conv_width);
    default:
      return KernelFor<32>(vector, conv_width);
  }
}

}  // namespace

cudaError_t LoadRecurrent() {
  for (const int rows : {4, 8, 16, 32}) {
    const cudaError_t error = PrepareSharedKernels(
        KernelFor(rows, false, 0), KernelFor(rows, true, 0), KernelFor(rows, true, 4));
    if (error != cudaSuccess) return error;
  }
  return PrepareKernels(&WindowKernel, &GatedNormKernel);
}

cudaError_t LaunchRecurrent(const GatedDeltaArguments& args, bool vector, cudaStream_t stream) {
  const int rows = LaneRows(args.key_dim);
  const int columns = std::min(args.value_dim, kSliceColumns);
  const int threads = (columns + kWarpColumns - 1) / kWarpColumns * 32;
  const auto sequences = static_cast<unsigned>(args.sequences.count);
  const dim3 grid(static_cast<unsigned>(args.value_heads * args.slices), sequences);
  const RecurrentShared layout = {rows * kRowLanes, kSliceColumns};
  const Kernel kernel = KernelFor(rows, vector, args.conv_width);
  const cudaError_t error = LaunchInChain(kernel, grid, threads, layout.Bytes(), stream, args);
  // With sequences in chunks it comes after them.
  if (error != cudaSuccess || args.counts_readers() || args.most_rows >= 0) return error;
  return LaunchWindows(args, stream);
}

cudaError_t LaunchWindows(const GatedDeltaArguments& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.key_heads),
                  static_cast<unsigned>(args.sequences.count));
  return LaunchInChain(&WindowKernel, grid, kMostThreads, 0, stream, args);
}

cudaError_t LaunchGatedNorm(const GatedDeltaArguments& args, cudaStream_t stream) {
  return LaunchInChain(&GatedNormKernel, dim3(static_cast<unsigned>(args.sequences.rows)),
                       kNormWarps * 32, 0, stream, args);
}

}  // namespace marlin::cuda
