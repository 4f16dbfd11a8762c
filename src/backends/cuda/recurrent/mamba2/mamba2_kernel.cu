// The recurrence of Mamba-2 row by row.
//
//   A CTA takes up to 64 value features of a head of a sequence, and keeps their part of the state
//   in registers (lane_state.cuh). Rows of the sequence come in groups: the CTA computes their
//   convolutions, then every warp runs through them without a barrier.
//
//   The arithmetic of a row depends on nothing but the shape: a row has the same bits with any
//   other rows in the call, and however its sequence is divided into calls.
#include <algorithm>

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/lane_state.cuh"
#include "backends/cuda/recurrent/mamba2/mamba2_launch.h"
#include "backends/cuda/recurrent/mamba2/mamba2_rows.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = kMambaColumns / kWarpColumns * 32;
constexpr int kUsualWidth = 4;

/// Shared memory of a CTA.
template <int kRows>
struct Shared {
  static constexpr int kKeyRow = kRows * kRowLanes;

  float keys[kGroupRows][kKeyRow];  ///< Zeros after key_dim, as in queries.
  float queries[kGroupRows][kKeyRow];
  float values[kGroupRows][kMambaColumns];
  float decays[kGroupRows];
  float steps[kGroupRows];
  ChunkSources rows;
};

/// The value features of a CTA.
struct Slice {
  int head;
  int group;
  int first;
  int columns;

  MARLIN_DEVICE explicit Slice(const Mamba2Arguments& args) {
    const int slices = args.slices();
    head = static_cast<int>(blockIdx.x) / slices;
    group = head / args.group();
    first = (static_cast<int>(blockIdx.x) - head * slices) * args.slice_columns;
    columns = min(args.value_dim - first, args.slice_columns);
  }

  /// Channel i of those that the slice needs: its group's keys and queries, then its values.
  MARLIN_DEVICE Channel ChannelOf(const Mamba2Arguments& args, int i) const {
    const int key_dim = args.key_dim;
    if (i < key_dim) return KeyChannel(args, group, i);
    if (i < 2 * key_dim) return QueryChannel(args, group, i - key_dim);
    return ValueChannel(args, head, first + i - 2 * key_dim);
  }
};

/// Keys, queries, values, decays and steps of a group of rows.
template <int kRows, int kWidth>
MARLIN_DEVICE void PrepareRows(const Mamba2Arguments& args, const SequenceState& state,
                               const Slice& slice, Shared<kRows>& shared) {
  constexpr int kAtOnce = 3;  ///< Channels of a thread that are loaded together.
  const int count = shared.rows.count;
  const int key_dim = args.key_dim;
  const int channels = 2 * key_dim + slice.columns;
  const int* const sources = shared.rows.sources;
  // The last threads have the fewest channels.
  const int t = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  if (t < count) {
    const float step = StepOf(args, sources[args.conv_width - 1 + t], slice.head);
    shared.decays[t] = expf(-expf(args.log_decay[slice.head]) * step);
    shared.steps[t] = step;
  }
  const auto place_of = [&](int row, int i) {
    if (i < key_dim) return &shared.keys[row][i];
    return i < 2 * key_dim ? &shared.queries[row][i - key_dim]
                           : &shared.values[row][i - 2 * key_dim];
  };
  if constexpr (kWidth != 0) {
    if (count == 1) {
      ConvolveRow<kWidth, kAtOnce>(
          args, state, sources, channels, [&](int i) { return slice.ChannelOf(args, i); },
          [&](const Channel& channel) { return BiasOf(args, channel); },
          [&](int i, float y, const float(&)[kWidth]) { *place_of(0, i) = y; });
      return;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += static_cast<int>(blockDim.x)) {
    const Channel channel = slice.ChannelOf(args, i);
    Convolve<kWidth, kGroupRows / 2>(
        args, state, channel, sources, count, [&](int row, float y) { *place_of(row, i) = y; },
        BiasOf(args, channel));
  }
}

/// The recurrence of a lane's part of the state.
template <int kRows, bool kVector>
class MambaState : public LaneState<kRows, kVector> {
 public:
  MARLIN_DEVICE MambaState(const Mamba2Arguments& args, const Slice& slice)
      : LaneState<kRows, kVector>(args, slice.head, slice.first, slice.columns),
        skip_(args.skip[slice.head]),
        sums_(args.sums + int64_t{slice.head} * args.value_dim + slice.first + column_ + Owned()),
        sums_row_(int64_t{args.value_heads} * args.value_dim) {}

  /// Row t of a group, which is row `row` of the call: updates the state and stores the sum.
  MARLIN_DEVICE void Step(const Shared<kRows>& shared, int t, int row) {
    const float4 x = *reinterpret_cast<const float4*>(&shared.values[t][column_]);
    const float decay = shared.decays[t];
    const float step = shared.steps[t];
    const float news[4] = {step * x.x, step * x.y, step * x.z, step * x.w};
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&shared.keys[t][first_row_ + r]);
      const float4 q = *reinterpret_cast<const float4*>(&shared.queries[t][first_row_ + r]);
      const float keys[4] = {k.x, k.y, k.z, k.w};
      const float queries[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& s = state_[r + i][c];
          s = __fmaf_rn(keys[i], news[c], decay * s);
          sums[c] = __fmaf_rn(s, queries[i], sums[c]);
        }
      }
    }
    const float sum = SumOverRows(sums);
    const float own_x =
        (Owned() & 2) != 0 ? ((Owned() & 1) != 0 ? x.w : x.z) : ((Owned() & 1) != 0 ? x.y : x.x);
    if ((lane_ & 4) == 0 && column_ + Owned() < columns_) {
      sums_[row * sums_row_] = __fmaf_rn(skip_, own_x, sum);
    }
  }

 private:
  using Base = LaneState<kRows, kVector>;
  using Base::column_;
  using Base::columns_;
  using Base::first_row_;
  using Base::lane_;
  using Base::state_;

  /// The column of the lane's four whose sum it gets; two lanes get each.
  MARLIN_DEVICE int Owned() const { return (lane_ >> 4 & 1) * 2 + (lane_ >> 3 & 1); }

  /// Adds over the lanes of a column.
  MARLIN_DEVICE float SumOverRows(const float (&sums)[4]) const {
    const bool third = (lane_ & 16) != 0;
    const bool second = (lane_ & 8) != 0;
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float given = third ? sums[i] : sums[2 + i];
      two[i] = (third ? sums[2 + i] : sums[i]) + __shfl_xor_sync(~0u, given, 16);
    }
    const float given = second ? two[0] : two[1];
    const float one = (second ? two[1] : two[0]) + __shfl_xor_sync(~0u, given, 8);
    return one + __shfl_xor_sync(~0u, one, 4);
  }

  float skip_;
  float* sums_;
  int64_t sums_row_;
};

/// Requests the state of a CTA into L2, whatever earlier work still does. The page may be an old
/// one: it is read again. A table of slabs in memory may be no table yet.
MARLIN_DEVICE void PrefetchState(const Mamba2Arguments& args, const Slice& slice) {
  if (args.slices() > 1 || args.states.more_slabs != nullptr || threadIdx.x != 0) return;
  const float* const state = FindState(args, static_cast<int>(blockIdx.y), 0);
  const int elements = args.key_dim * args.value_dim;
  if (state == nullptr || elements % 4 != 0) return;
  PrefetchBulk(state + args.conv_elements() + int64_t{slice.head} * elements, elements * 4);
}

/// blockIdx.x: head and slice; blockIdx.y: sequence.
template <int kRows, bool kVector, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    Mamba2Kernel(const __grid_constant__ Mamba2Arguments args) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared<kRows>& shared = *reinterpret_cast<Shared<kRows>*>(memory);
  const Slice slice(args);
  if constexpr (kVector) PrefetchState(args, slice);
  // Rows of the state beyond the key's features are zeros, and so are their keys and queries.
  if (args.key_dim != Shared<kRows>::kKeyRow) {
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kGroupRows * Shared<kRows>::kKeyRow;
         i += static_cast<int>(blockDim.x)) {
      shared.keys[0][i] = 0.0f;
    }
  }
  EnterChain();
  const auto sequence = static_cast<int>(blockIdx.y);
  MambaState<kRows, kVector> columns(args, slice);
  columns.Load(FindState(args, sequence, 0));  // First, as all else waits less long.
  if (blockIdx.x == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  const SequenceState state(args, sequence);
  if (state.InChunks(args) || state.to == nullptr) return;
  for (int first = state.first_row; first < state.end_row; first += kGroupRows) {
    if (threadIdx.x < 32) ListRows(args, state, first, kGroupRows, &shared.rows);
    __syncthreads();
    PrepareRows<kRows, kWidth>(args, state, slice, shared);
    __syncthreads();
    const int count = shared.rows.count;
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      columns.Step(shared, t, shared.rows.sources[args.conv_width - 1 + t]);
    }
    __syncthreads();
  }
  columns.Store(state.to);
}

/// A kernel and its shared memory.
struct MambaKernel {
  void (*kernel)(Mamba2Arguments);
  int shared_bytes;
};

template <int kRows>
MambaKernel KernelFor(bool vector, int conv_width) {
  const int bytes = static_cast<int>(sizeof(Shared<kRows>));
  if (!vector) return {&Mamba2Kernel<kRows, false, 0>, bytes};
  return {conv_width == kUsualWidth ? &Mamba2Kernel<kRows, true, kUsualWidth>
                                    : &Mamba2Kernel<kRows, true, 0>,
          bytes};
}

MambaKernel KernelFor(int rows, bool vector, int conv_width) {
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

cudaError_t LoadMamba2() {
  for (const int rows : {4, 8, 16, 32}) {
    const cudaError_t error =
        PrepareSharedKernels(KernelFor(rows, false, 0).kernel, KernelFor(rows, true, 0).kernel,
                             KernelFor(rows, true, kUsualWidth).kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchMamba2(const Mamba2Arguments& args, bool vector, cudaStream_t stream) {
  const MambaKernel of = KernelFor(LaneRows(args.key_dim), vector, args.conv_width);
  const int columns = std::min(args.value_dim, args.slice_columns);
  const int threads = (columns + kWarpColumns - 1) / kWarpColumns * 32;
  const dim3 grid(static_cast<unsigned>(args.value_heads * args.slices()),
                  static_cast<unsigned>(args.sequences.count));
  return LaunchInChain(of.kernel, grid, threads, of.shared_bytes, stream, args);
}

}  // namespace marlin::cuda
