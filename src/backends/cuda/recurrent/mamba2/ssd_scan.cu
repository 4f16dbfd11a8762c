// The pass over a sequence's chunks that carries the state of Mamba-2 (ssd_local.cu has the
// formulas).
//
//   A CTA takes 32 value features of a head of a sequence. The state is in fp32 in the fragments of
//   its warps, of 16 rows each, and rounded to tf32 in shared memory as an operand. The parts of
//   chunks are copied, keys and queries of up to 128 features two chunks ahead. Half of the warps
//   multiply queries with the state while the others prepare P and the values. Where shared memory
//   has no room for keys and queries, each warp loads its fragments of them from the workspace.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/chunked/state_strip.cuh"
#include "backends/cuda/recurrent/mamba2/mamba2_launch.h"
#include "backends/cuda/recurrent/mamba2/ssd_shared.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSquareRow = ChunkLayout::kSquareRow;

/// The copies of a CTA.
template <typename Shared>
class ScanCopies {
 public:
  using Copies = BlockCopies<kThreads>;

  MARLIN_DEVICE ScanCopies(const SsdArguments& turn, int group, int head, int slice,
                           uint32_t shared)
      : turn_(turn), group_(group), head_(head), slice_(slice), shared_(shared) {}

  /// Requests the first of `count` chunks, from `slot` of the turn on. Called by the threads that
  /// copy.
  MARLIN_DEVICE void Begin(int slot, int count) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 3; ++i) InitBarrier(Barrier(i), Copies::kArrivals);
      FenceBarrierInit();
    }
    if constexpr (Copies::kArrivals > 1) __syncthreads();
    RequestPair(slot, 0);
    RequestHead(slot);
    if (Shared::kPairs > 1 && count > 1) RequestPair(slot + 1, 1);
  }
  /// The same after chunk n.
  MARLIN_DEVICE void Continue(int slot, int n, int count) const {
    if (n + 1 < count) RequestHead(slot + n + 1);
    const int next = n + Shared::kPairs;
    if (next < count) RequestPair(slot + next, next);
  }
  MARLIN_DEVICE void WaitFor(int n) const {
    Wait(Barrier(n % Shared::kPairs), n / Shared::kPairs & 1);
    Wait(Barrier(2), n & 1);
  }

 private:
  /// Keys, queries and products, or products alone, of chunk `slot` of the turn, the CTA's n-th.
  MARLIN_DEVICE void RequestPair(int slot, int n) const {
    constexpr int kBytes = Shared::kPairFloats * 4;
    const int place = n % Shared::kPairs;
    constexpr int kSkipped = 2 * Shared::kKeyFloats - Shared::kProducts;
    const Copies copies(Barrier(place), kBytes);
    copies.Copy(shared_ + place * kBytes,
                turn_.parts + turn_.Layout().PairAt(slot, group_) + kSkipped, kBytes);
    copies.End();
  }
  MARLIN_DEVICE void RequestHead(int slot) const {
    constexpr int kRowsBytes = ChunkLayout::kRowsFloats * 4;
    constexpr int kValueBytes = ChunkLayout::kValueFloats * 4;
    const float* const part = turn_.parts + turn_.Layout().HeadAt(slot, head_);
    const Copies copies(Barrier(2), kRowsBytes + kValueBytes);
    copies.Copy(shared_ + Shared::kRows * 4, part, kRowsBytes);
    copies.Copy(shared_ + Shared::kValues * 4,
                part + ChunkLayout::kRowsFloats + slice_ * ChunkLayout::kValueFloats, kValueBytes);
    copies.End();
  }
  MARLIN_DEVICE uint32_t Barrier(int i) const { return shared_ + Shared::kBarriers * 4 + i * 8; }

  const SsdArguments& turn_;
  int group_;
  int head_;
  int slice_;
  uint32_t shared_;
};

/// A chunk in shared memory (keys and queries also elsewhere), and what a warp computes of it: a
/// strip of the results, or of P and the values.
template <typename Shared>
class ScanChunk {
 public:
  /// `pair`: of the chunk, in shared memory.
  MARLIN_DEVICE ScanChunk(float* memory, float* pair, const float* keys)
      : keys_(keys),
        scores_(pair + Shared::kProducts),
        values_(memory + Shared::kValues),
        rows_(reinterpret_cast<const ChunkRows*>(memory + Shared::kRows)),
        operand_(memory + Shared::kState),
        news_(memory + Shared::kNews),
        deltas_(memory + Shared::kDeltas),
        strip_((static_cast<int>(threadIdx.x) >> 5) % kStrips),
        has_queries_(threadIdx.x >= kThreads / 2) {}

  MARLIN_DEVICE const float* keys() const { return keys_; }
  MARLIN_DEVICE const float* news() const { return news_; }
  /// The logarithm of the chunk's decay.
  MARLIN_DEVICE float decay() const { return rows_->decays[kChunkRows - 1]; }

  /// exp(G) Q S, or P and the values as operands.
  MARLIN_DEVICE void Prepare() {
    if (has_queries_) {
      const float* const queries = keys_ + Shared::kKeyFloats + strip_ * 16 * Shared::kKeyRow;
      constexpr int kSteps = (Shared::kKeyRow - kFragmentPadding) / 8;
      MultiplyStrip(sums_, queries, Shared::kKeyRow, operand_, kSteps);
      ForPairs<kScanTiles>(strip_, 0, [&](int tile, int half, int row, int) {
        const float decay = expf(rows_->decays[row]);
        sums_[tile][2 * half] *= decay;
        sums_[tile][2 * half + 1] *= decay;
      });
      return;
    }
    ScaleScores();
    ForPairs<kScanTiles>(strip_, 0, [&](int, int, int row, int column) {
      const float2 v = *reinterpret_cast<const float2*>(values_ + row * kScanColumns + column);
      const float decay = expf(this->decay() - rows_->decays[row]);
      StorePairTf32(deltas_ + row * kScanRow + column, v.x, v.y);
      StorePairTf32(news_ + row * kScanRow + column, decay * v.x, decay * v.y);
    });
  }
  /// Adds P V to the results, and these to the sums. Called after a barrier.
  MARLIN_DEVICE void AddOutputs(const Mamba2Arguments& args, int head, int first_column) {
    if (!has_queries_) return;
    MultiplyStrip(sums_, scores_ + strip_ * 16 * kSquareRow, kSquareRow, deltas_, Steps());
    ForPairs<kScanTiles>(strip_, first_column, [&](int tile, int half, int row, int column) {
      const int of_call = rows_->rows[row];
      if (of_call < 0) return;
      const int64_t at = (int64_t{of_call} * args.value_heads + head) * args.value_dim + column;
      auto* const to = reinterpret_cast<float2*>(args.sums + at);
      const float2 before = *to;
      *to = {before.x + sums_[tile][2 * half], before.y + sums_[tile][2 * half + 1]};
    });
  }

 private:
  /// Steps of 8 up to the diagonal.
  MARLIN_DEVICE int Steps() const { return 2 * (strip_ + 1); }

  /// A strip of P in place of Q K^T; zeros above the diagonal.
  MARLIN_DEVICE void ScaleScores() {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int columns = Steps() * 8;
    for (int row = strip_ * 16; row < (strip_ + 1) * 16; ++row) {
      const float through = rows_->decays[row];
      for (int column = lane; column < columns; column += 32) {
        float& score = scores_[row * kSquareRow + column];
        const float factor = expf(through - rows_->decays[column]);
        score = column <= row ? RoundTf32(factor * score) : 0.0f;
      }
    }
  }

  const float* keys_;
  float* scores_;
  const float* values_;
  const ChunkRows* rows_;
  const float* operand_;
  float* news_;
  float* deltas_;
  int strip_;
  bool has_queries_;
  float sums_[kScanTiles][4] = {};
};

/// blockIdx.x: head and slice of its features; blockIdx.y: sequence.
template <int kKeyDim, bool kCopies>
__global__ void __launch_bounds__(kThreads, 1)
    SsdScanKernel(const __grid_constant__ SsdArguments turn) {
  using Shared = SsdScanShared<kKeyDim, kCopies>;
  using Copies = BlockCopies<kThreads>;
  extern __shared__ __align__(128) float memory[];
  EnterChain();
  const Mamba2Arguments& args = turn.mamba;
  const int slices = args.value_dim / kScanColumns;
  const int head = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) - head * slices;
  const auto sequence = static_cast<int>(blockIdx.y);
  const int before = ChunksBefore(args, sequence);
  const int first = max(turn.first - before, 0);
  const int count = min(turn.first + turn.count - before, ChunksOf(args, sequence)) - first;
  if (count <= 0) return;
  const SequenceState pages(args, sequence);
  if (pages.to == nullptr) return;
  const int slot = before + first - turn.first;
  const int group = head / args.group();
  const ScanCopies<Shared> copies(turn, group, head, slice, SharedAddress(memory));
  if (Copies::Calls()) copies.Begin(slot, count);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  constexpr int kWarps = kThreads / 32;
  StateStrip low(args, warp, head, slice);
  StateStrip high(args, warp + kWarps, head, slice);
  // Calls run(strip) for the strips of the state that the warp has.
  const auto for_strips = [&](const auto& run) {
    if (warp < kKeyDim / 16) run(low);
    if constexpr (kKeyDim / 16 > kWarps) run(high);
  };
  for_strips([&](StateStrip& strip) {
    strip.Load(first == 0 ? pages.from : pages.to);
    strip.Publish(memory + Shared::kState);
  });
  __syncthreads();
  for (int n = 0; n < count; ++n) {
    float* const pair = memory + n % Shared::kPairs * Shared::kPairFloats;
    ScanChunk<Shared> chunk(memory, pair,
                            kCopies ? pair : turn.parts + turn.Layout().PairAt(slot + n, group));
    copies.WaitFor(n);
    chunk.Prepare();
    __syncthreads();
    chunk.AddOutputs(args, head, slice * kScanColumns);
    for_strips([&](StateStrip& strip) {
      strip.Advance(expf(chunk.decay()), chunk.keys(), Shared::kKeyRow, chunk.news());
      strip.Publish(memory + Shared::kState);
    });
    // Scores have been replaced where the next copy goes.
    FenceAsyncProxy();
    __syncthreads();
    if (Copies::Calls()) copies.Continue(slot, n, count);
  }
  for_strips([&](const StateStrip& strip) { strip.Store(pages.to); });
}

template <int kKeyDim, bool kCopies>
cudaError_t Start(const SsdArguments& turn, cudaStream_t stream) {
  const Mamba2Arguments& args = turn.mamba;
  const dim3 grid(static_cast<unsigned>(args.value_heads * (args.value_dim / kScanColumns)),
                  static_cast<unsigned>(args.sequences.count));
  return LaunchInChain(&SsdScanKernel<kKeyDim, kCopies>, grid, kThreads,
                       SsdScanShared<kKeyDim, kCopies>::kBytes, stream, turn);
}

template <int kKeyDim>
cudaError_t Start(const SsdArguments& turn, int shared_bytes, cudaStream_t stream) {
  return SsdScanShared<kKeyDim, true>::kBytes <= shared_bytes ? Start<kKeyDim, true>(turn, stream)
                                                              : Start<kKeyDim, false>(turn, stream);
}

}  // namespace

cudaError_t LoadSsdScan() {
  return PrepareSharedKernels(&SsdScanKernel<64, true>, &SsdScanKernel<128, true>,
                              &SsdScanKernel<256, true>, &SsdScanKernel<64, false>,
                              &SsdScanKernel<128, false>, &SsdScanKernel<256, false>);
}

cudaError_t LaunchSsdScan(const SsdArguments& turn, int shared_bytes, cudaStream_t stream) {
  switch (turn.mamba.key_dim) {
    case 64:
      return Start<64>(turn, shared_bytes, stream);
    case 128:
      return Start<128>(turn, shared_bytes, stream);
    case 256:
      return Start<256>(turn, shared_bytes, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace marlin::cuda
