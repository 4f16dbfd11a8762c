// The gated delta rule for decode steps: a few rows of each sequence, heads of 128 features.
//
//   A CTA takes a value head of a sequence, and copies its state to shared memory while it computes
//   the first row's convolution. A warp has 16 columns, a lane 4 of them in an eighth of the rows.
//   Few registers let three CTAs share a multiprocessor: the copies of some go on while others
//   compute. The last row's state is stored from registers.
//
//   Sums are added in another order than in recurrent_kernel.cu, which runs batch-invariant calls.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/convolution.cuh"
#include "backends/cuda/recurrent/delta_channels.cuh"
#include "backends/cuda/recurrent/gated_norm.cuh"
#include "backends/cuda/recurrent/recurrent_launch.h"

namespace marlin::cuda {
namespace {

constexpr int kFeatures = kDecodedFeatures;
constexpr int kWidth = kDecodedConvWidth;
constexpr int kThreads = 256;
constexpr int kQuads = kFeatures / 4;  ///< A row of the state has.
constexpr int kChannelQuads = 3 * kQuads;
constexpr int kRuns = 4;     ///< Runs of four adjacent rows that a lane has.
constexpr int kRunRows = 4;  ///< Rows of a run.

struct DecodeShared {
  float state[kFeatures * kFeatures];
  float queries[kFeatures];  ///< After the convolution, without a norm; as keys.
  float keys[kFeatures];
  float values[kFeatures];
  float factors[kFeatures];  ///< norm * SiLU(gate)
  float results[kFeatures];  ///< S^T q
  float decay;
  float write;
  int is_last;
};

/// The place of a quad of the state: the lanes of a quarter of a warp, which have two rows, read
/// different banks.
MARLIN_DEVICE int PlaceOf(int row, int quad) {
  return row * kFeatures + (quad ^ (row >> 2 & 1) << 2) * 4;
}

/// A head of a sequence.
class HeadDecode {
 public:
  MARLIN_DEVICE HeadDecode(const GatedDeltaArguments& args, DecodeShared& shared)
      : args_(args),
        shared_(shared),
        head_(static_cast<int>(blockIdx.x)),
        key_head_(head_ / args.group()),
        thread_(static_cast<int>(threadIdx.x)) {}

  /// Requests the state and the convolution's earlier inputs into L2, whatever earlier work still
  /// does. The page may be an old one: it is read again.
  MARLIN_DEVICE void Prefetch() const {
    if (thread_ > 3 * kWidth || args_.states.more_slabs != nullptr) return;
    const float* const state = FindState(args_, static_cast<int>(blockIdx.y), 0);
    if (thread_ == 0) {
      if (state != nullptr) PrefetchBulk(state + StateAt(), kFeatures * kFeatures * 4);
      return;
    }
    const int slot = (thread_ - 1) / 3;
    const int64_t channel = ChannelOf((thread_ - 1) % 3 * kQuads).index;
    if (slot == kWidth - 1) {
      PrefetchBulk(args_.conv + channel * kWidth, kFeatures * kWidth * 4);
    } else if (state != nullptr) {
      PrefetchBulk(state + slot * args_.channels() + channel, kFeatures * 4);
    }
  }

  /// Begins to copy the state; null: zeros.
  MARLIN_DEVICE void Request(const float* state) const {
    const uint32_t to = SharedAddress(shared_.state);
    const float* const from = state + StateAt();
#pragma unroll 8
    for (int i = thread_; i < kFeatures * kQuads; i += kThreads) {
      CopyAsync16(to + PlaceOf(i / kQuads, i % kQuads) * 4, from + i * 4,
                  state == nullptr ? 0 : 16);
    }
  }

  MARLIN_DEVICE void LoadWindow(const float* state) {
    if (thread_ >= kChannelQuads) return;
#pragma unroll
    for (int slot = 0; slot < kWidth - 1; ++slot) {
      window_[slot] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (state == nullptr) continue;
      window_[slot] = *reinterpret_cast<const float4*>(state + slot * args_.channels() +
                                                       ChannelOf(thread_).index);
    }
  }

  /// The convolution of a row, the factors of its results, its decay and write.
  MARLIN_DEVICE void Prepare(int row) {
    if (thread_ == kThreads - 1) PrepareScalars(row);
    if (thread_ >= kChannelQuads + kQuads) return;
    if (thread_ >= kChannelQuads) {
      const int i = 4 * (thread_ - kChannelQuads);
      const float4 gate = *reinterpret_cast<const float4*>(GatesOf(args_, row, head_) + i);
      const float4 norm = *reinterpret_cast<const float4*>(args_.norm + i);
      *reinterpret_cast<float4*>(shared_.factors + i) = {
          norm.x * TimesSigmoid(gate.x, gate.x), norm.y * TimesSigmoid(gate.y, gate.y),
          norm.z * TimesSigmoid(gate.z, gate.z), norm.w * TimesSigmoid(gate.w, gate.w)};
      return;
    }
    const Channel channel = ChannelOf(thread_);
    const float4 x =
        *reinterpret_cast<const float4*>(channel.view.At(row, channel.head) + channel.feature);
    const auto* const weights =
        reinterpret_cast<const float4*>(args_.conv + channel.index * kWidth);
    const auto convolve = [&](const float4& w, float a, float b, float c, float d) {
      const float sum = __fmaf_rn(w.w, d, __fmaf_rn(w.z, c, __fmaf_rn(w.y, b, w.x * a)));
      return TimesSigmoid(sum, sum);
    };
    // Queries, keys and values are adjacent.
    *reinterpret_cast<float4*>(shared_.queries + 4 * thread_) = {
        convolve(weights[0], window_[0].x, window_[1].x, window_[2].x, x.x),
        convolve(weights[1], window_[0].y, window_[1].y, window_[2].y, x.y),
        convolve(weights[2], window_[0].z, window_[1].z, window_[2].z, x.z),
        convolve(weights[3], window_[0].w, window_[1].w, window_[2].w, x.w)};
    window_[0] = window_[1];
    window_[1] = window_[2];
    window_[2] = x;
  }

  /// Updates the state, in shared memory or, where `to` is the state after the last row, there.
  MARLIN_DEVICE void Step(float* to) const {
    constexpr float kEpsilon = 1e-6f;
    const int lane = thread_ & 31;
    const int quad = (thread_ >> 5) * 4 + (lane & 3);
    const int first = (lane >> 2) * kRunRows;
    float sums[11] = {};  // q . q, k . k, q . k, then S^T k and S^T q of the columns.
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int row = first + run * (kFeatures / kRuns);
      const float4 q = *reinterpret_cast<const float4*>(shared_.queries + row);
      const float4 k = *reinterpret_cast<const float4*>(shared_.keys + row);
      AddRow(row, quad, q.x, k.x, sums);
      AddRow(row + 1, quad, q.y, k.y, sums);
      AddRow(row + 2, quad, q.z, k.z, sums);
      AddRow(row + 3, quad, q.w, k.w, sums);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, step);
    }
    const float query_factor =
        1.0f / sqrtf(sums[0] + kEpsilon) / sqrtf(static_cast<float>(kFeatures));
    const float key_factor = 1.0f / sqrtf(sums[1] + kEpsilon);
    const float decay = shared_.decay;
    const float write = shared_.write;
    const float of_keys = decay * key_factor;
    const float of_queries = decay * query_factor;
    const float4 v = reinterpret_cast<const float4*>(shared_.values)[quad];
    const float4 delta = {write * (v.x - of_keys * sums[3]), write * (v.y - of_keys * sums[4]),
                          write * (v.z - of_keys * sums[5]), write * (v.w - of_keys * sums[6])};
    if (lane < 4) {
      const float product = sums[2] * query_factor * key_factor;
      reinterpret_cast<float4*>(shared_.results)[quad] = {
          __fmaf_rn(product, delta.x, of_queries * sums[7]),
          __fmaf_rn(product, delta.y, of_queries * sums[8]),
          __fmaf_rn(product, delta.z, of_queries * sums[9]),
          __fmaf_rn(product, delta.w, of_queries * sums[10])};
    }
    float* const after = to == nullptr ? nullptr : to + StateAt();
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int row = first + run * (kFeatures / kRuns);
      const float4 k = *reinterpret_cast<const float4*>(shared_.keys + row);
      UpdateRow(row, quad, k.x * key_factor, decay, delta, after);
      UpdateRow(row + 1, quad, k.y * key_factor, decay, delta, after);
      UpdateRow(row + 2, quad, k.z * key_factor, decay, delta, after);
      UpdateRow(row + 3, quad, k.w * key_factor, decay, delta, after);
    }
  }

  /// The results of a row. Called by one warp.
  MARLIN_DEVICE void Finish(int row) const {
    StoreNormed(args_, row, head_, shared_.results, [&](int i) { return shared_.factors[i]; });
  }

  MARLIN_DEVICE void StoreState(float* to) const {
    for (int i = thread_; i < kFeatures * kQuads; i += kThreads) {
      *reinterpret_cast<float4*>(to + StateAt() + i * 4) =
          *reinterpret_cast<const float4*>(shared_.state + PlaceOf(i / kQuads, i % kQuads));
    }
  }

  /// `all`: the inputs of queries and keys too, which a key head's CTAs share.
  MARLIN_DEVICE void StoreWindow(float* to, bool all) const {
    if (thread_ >= kChannelQuads || (!all && thread_ < 2 * kQuads)) return;
#pragma unroll
    for (int slot = 0; slot < kWidth - 1; ++slot) {
      *reinterpret_cast<float4*>(to + slot * args_.channels() + ChannelOf(thread_).index) =
          window_[slot];
    }
  }

  MARLIN_DEVICE int head() const { return head_; }
  MARLIN_DEVICE int key_head() const { return key_head_; }

 private:
  MARLIN_DEVICE int64_t StateAt() const {
    return args_.conv_elements() + int64_t{head_} * kFeatures * kFeatures;
  }
  /// The channel that quad `i` of the CTA's queries, keys and values begins with.
  MARLIN_DEVICE Channel ChannelOf(int i) const {
    const int feature = i % kQuads * 4;
    if (i < kQuads) return QueryChannel(args_, key_head_, feature);
    if (i < 2 * kQuads) return KeyChannel(args_, key_head_, feature);
    return ValueChannel(args_, head_, feature);
  }

  MARLIN_DEVICE void PrepareScalars(int row) const {
    const int of_group = head_ - key_head_ * args_.group();
    const float a = args_.decays.At(row, key_head_)[of_group] + args_.decay_bias[head_];
    const float write = args_.writes.At(row, key_head_)[of_group];
    // The logarithm of 1 + e^a, which above 20 is a in fp32.
    const float soft = a > 20.0f ? a : log1pf(expf(a));
    shared_.decay = expf(-expf(args_.log_decay[head_]) * soft);
    shared_.write = TimesSigmoid(1.0f, write);
  }

  MARLIN_DEVICE void AddRow(int row, int quad, float q, float k, float (&sums)[11]) const {
    const float4 s = *reinterpret_cast<const float4*>(shared_.state + PlaceOf(row, quad));
    sums[0] = __fmaf_rn(q, q, sums[0]);
    sums[1] = __fmaf_rn(k, k, sums[1]);
    sums[2] = __fmaf_rn(q, k, sums[2]);
    sums[3] = __fmaf_rn(s.x, k, sums[3]);
    sums[4] = __fmaf_rn(s.y, k, sums[4]);
    sums[5] = __fmaf_rn(s.z, k, sums[5]);
    sums[6] = __fmaf_rn(s.w, k, sums[6]);
    sums[7] = __fmaf_rn(s.x, q, sums[7]);
    sums[8] = __fmaf_rn(s.y, q, sums[8]);
    sums[9] = __fmaf_rn(s.z, q, sums[9]);
    sums[10] = __fmaf_rn(s.w, q, sums[10]);
  }

  MARLIN_DEVICE void UpdateRow(int row, int quad, float key, float decay, const float4& delta,
                               float* after) const {
    auto* const at = reinterpret_cast<float4*>(shared_.state + PlaceOf(row, quad));
    const float4 s = *at;
    const float4 updated = {
        __fmaf_rn(key, delta.x, decay * s.x), __fmaf_rn(key, delta.y, decay * s.y),
        __fmaf_rn(key, delta.z, decay * s.z), __fmaf_rn(key, delta.w, decay * s.w)};
    if (after == nullptr) {
      *at = updated;
    } else {
      *reinterpret_cast<float4*>(after + row * kFeatures + quad * 4) = updated;
    }
  }

  const GatedDeltaArguments& args_;
  DecodeShared& shared_;
  int head_;
  int key_head_;
  int thread_;
  float4 window_[kWidth - 1];  ///< Earlier inputs of four channels, oldest first.
};

/// blockIdx.x: value head; blockIdx.y: sequence.
__global__ void __launch_bounds__(kThreads, 3)
    DecodeKernel(const __grid_constant__ GatedDeltaArguments args) {
  extern __shared__ __align__(128) uint8_t memory[];
  DecodeShared& shared = *reinterpret_cast<DecodeShared*>(memory);
  HeadDecode head(args, shared);
  head.Prefetch();
  EnterChain();
  const auto sequence = static_cast<int>(blockIdx.y);
  const float* const before = FindState(args, sequence, 0);
  head.Request(before);  // First, as all else waits less long.
  head.LoadWindow(before);
  if (blockIdx.x == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  const SequenceState state(args, sequence);
  const bool first_warp = threadIdx.x < 32;
  uint32_t* const counter = args.counters + int64_t{sequence} * args.key_heads + head.key_head();
  uint32_t earlier = 0;
  bool has_moved = false;
  bool is_stored = false;
  for (int row = state.first_row; row < state.end_row; ++row) {
    if (state.to == nullptr || args.sequences.positions[row] < 0) {
      if (first_warp) StoreNothing(args, row, head.head());
      continue;
    }
    head.Prepare(row);
    if (!has_moved) WaitForAllCopies();
    __syncthreads();
    // All loads of earlier inputs have returned: no fence is needed.
    if (!has_moved && threadIdx.x == 0 && args.readers() > 1) {
      earlier = IncrementTileCounter(counter);
    }
    has_moved = true;
    is_stored = row + 1 == state.end_row;
    head.Step(is_stored ? state.to : nullptr);
    __syncthreads();
    if (first_warp) head.Finish(row);
    if (!is_stored) __syncthreads();
  }
  if (!has_moved) WaitForAllCopies();
  if (state.to == nullptr) return;
  if (threadIdx.x == 0) {
    // A counter begins at all ones, which is -1.
    const bool is_last =
        args.readers() == 1 || earlier + 2 == static_cast<uint32_t>(args.readers());
    if (has_moved && is_last && args.readers() > 1) *counter = ~0u;
    shared.is_last = is_last || !has_moved ? 1 : 0;
  }
  __syncthreads();
  if (!is_stored) head.StoreState(state.to);
  head.StoreWindow(state.to, shared.is_last != 0);
}

}  // namespace

cudaError_t LoadDecode() { return PrepareSharedKernels(&DecodeKernel); }

cudaError_t LaunchDecode(const GatedDeltaArguments& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.value_heads),
                  static_cast<unsigned>(args.sequences.count));
  return LaunchInChain(&DecodeKernel, grid, kThreads, int{sizeof(DecodeShared)}, stream, args);
}

}  // namespace marlin::cuda
