// The pass over a sequence's chunks that carries the state (chunk_local.cu has the formulas).
//
//   A CTA takes 32 value features of a value head of a sequence. The state is in fp32 in the
//   fragments of its warps, of 16 rows each, and rounded to tf32 in shared memory as an operand.
//   The parts of chunks are copied: keys and queries of the next chunk while this one runs, the
//   others, which are needed later in a chunk, when the last one ends. Where shared memory has no
//   room for keys and queries, each warp loads its fragments of them from the workspace.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/chunked/chunk_launch.h"
#include "backends/cuda/recurrent/chunked/chunk_shared.h"
#include "backends/cuda/recurrent/chunked/state_strip.cuh"
#include "backends/cuda/recurrent/sequence_state.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTiles = kScanTiles;
constexpr int kRow = kScanRow;
constexpr int kSquareRow = ChunkLayout::kSquareRow;
constexpr int kSquareFloats = ChunkLayout::kSquareFloats;

/// The copies of a CTA.
template <int kKeyDim, bool kCopies>
class ScanCopies {
 public:
  using Shared = DeltaScanShared<kKeyDim, kCopies>;
  using Copies = BlockCopies<kThreads>;

  MARLIN_DEVICE ScanCopies(const ChunkArguments& turn, int key_head, int head, int slice,
                           uint32_t shared)
      : turn_(turn), key_head_(key_head), head_(head), slice_(slice), shared_(shared) {}

  /// Requests the first of `count` chunks, from `slot` of the turn on. Called by the threads that
  /// copy.
  MARLIN_DEVICE void Begin(int slot, int count) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 3; ++i) InitBarrier(Barrier(i), Copies::kArrivals);
      FenceBarrierInit();
    }
    if constexpr (Copies::kArrivals > 1) __syncthreads();
    RequestPair(slot, 0);
    RequestHead(slot, count == 1);
    if (count > 1) RequestPair(slot + 1, 1);
  }
  /// The same after chunk n.
  MARLIN_DEVICE void Continue(int slot, int n, int count) const {
    if (n + 1 < count) RequestHead(slot + n + 1, n + 2 == count);
    if (n + 2 < count) RequestPair(slot + n + 2, n + 2);
  }
  MARLIN_DEVICE void WaitForPair(int n) const {
    if constexpr (kCopies) Wait(Barrier(n & 1), n >> 1 & 1);
  }
  MARLIN_DEVICE void WaitForHead(int n) const { Wait(Barrier(2), n & 1); }

 private:
  /// Keys and queries of chunk `slot` of the turn, the CTA's n-th.
  MARLIN_DEVICE void RequestPair(int slot, int n) const {
    if constexpr (kCopies) {
      constexpr int kBytes = Shared::kPairFloats * 4;
      const Copies copies(Barrier(n & 1), kBytes);
      copies.Copy(shared_ + (n & 1) * kBytes, turn_.parts + turn_.Layout().KeysAt(slot, key_head_),
                  kBytes);
      copies.End();
    }
  }
  /// `is_last`: no chunk follows, whose parts then come into L2 meanwhile.
  MARLIN_DEVICE void RequestHead(int slot, bool is_last) const {
    constexpr int kHeadFloats = Shared::kHeadFloats;
    constexpr int kValueBytes = ChunkLayout::kValueFloats * 4;
    const float* const part = turn_.parts + turn_.Layout().HeadAt(slot, head_);
    const Copies copies(Barrier(2), kHeadFloats * 4 + kValueBytes);
    copies.Copy(shared_ + Shared::kHead * 4, part, kHeadFloats * 4);
    copies.Copy(shared_ + Shared::kValues * 4,
                part + kHeadFloats + slice_ * ChunkLayout::kValueFloats, kValueBytes);
    copies.End();
    if (is_last) return;
    const float* const next = turn_.parts + turn_.Layout().HeadAt(slot + 1, head_);
    PrefetchBulk(next, kHeadFloats * 4);
    PrefetchBulk(next + kHeadFloats + slice_ * ChunkLayout::kValueFloats, kValueBytes);
  }
  MARLIN_DEVICE uint32_t Barrier(int i) const { return shared_ + Shared::kBarriers * 4 + i * 8; }

  const ChunkArguments& turn_;
  int key_head_;
  int head_;
  int slice_;
  uint32_t shared_;
};

/// A chunk in shared memory (keys and queries also elsewhere), and what a warp computes of it: with
/// keys, a strip of the rows that the state gets, with queries, of the outputs; and half of the
/// columns of a strip of D.
template <typename Shared>
class ScanChunk {
 public:
  MARLIN_DEVICE ScanChunk(float* memory, const float* keys)
      : keys_(keys),
        transform_(memory + Shared::kHead),
        scores_(transform_ + kSquareFloats),
        values_(memory + Shared::kValues),
        rows_(reinterpret_cast<const ChunkRows*>(scores_ + kSquareFloats)),
        operand_(memory + Shared::kState),
        news_(memory + Shared::kNews),
        deltas_(memory + Shared::kDeltas),
        strip_((static_cast<int>(threadIdx.x) >> 5) % kStrips),
        has_keys_(threadIdx.x < kThreads / 2) {}

  MARLIN_DEVICE const float* keys() const { return keys_; }
  MARLIN_DEVICE const float* news() const { return news_; }
  /// The logarithm of the chunk's decay.
  MARLIN_DEVICE float decay() const { return rows_->decays[kChunkRows - 1]; }

  /// Products of the keys or the queries with the state.
  MARLIN_DEVICE void MultiplyState() {
    const float* const rows = keys_ + (has_keys_ ? 0 : Shared::kKeyFloats);
    MultiplyStrip(sums_, rows + strip_ * 16 * Shared::kKeyRow, Shared::kKeyRow, operand_,
                  (Shared::kKeyRow - kFragmentPadding) / 8);
  }
  /// V - exp(G) K S, or exp(G) Q S.
  MARLIN_DEVICE void Decay() {
    ForPairs<kTiles>(strip_, 0, [&](int tile, int half, int row, int column) {
      const float decay = expf(rows_->decays[row]);
      float& low = sums_[tile][2 * half];
      float& high = sums_[tile][2 * half + 1];
      if (has_keys_) {
        const float2 v = *reinterpret_cast<const float2*>(values_ + row * kScanColumns + column);
        StorePairTf32(news_ + row * kRow + column, v.x - decay * low, v.y - decay * high);
      } else {
        low *= decay;
        high *= decay;
      }
    });
  }
  /// D. Called by all threads of the CTA.
  MARLIN_DEVICE void Transform() {
    constexpr int kHalf = kTiles / 2;
    const int first_column = has_keys_ ? 0 : kHalf * 8;
    float products[kHalf][4] = {};
    MultiplyStrip(products, transform_ + strip_ * 16 * kSquareRow, kSquareRow, news_ + first_column,
                  Steps());
    __syncthreads();
    ForPairs<kHalf>(strip_, first_column, [&](int tile, int half, int row, int column) {
      const float low = products[tile][2 * half];
      const float high = products[tile][2 * half + 1];
      const float decay = expf(this->decay() - rows_->decays[row]);
      StorePairTf32(deltas_ + row * kRow + column, low, high);
      StorePairTf32(news_ + row * kRow + column, decay * low, decay * high);
    });
  }
  /// Adds P D, and stores the outputs.
  MARLIN_DEVICE void StoreOutputs(const GatedDeltaArguments& args, int head, int first_column) {
    if (has_keys_) return;
    MultiplyStrip(sums_, scores_ + strip_ * 16 * kSquareRow, kSquareRow, deltas_, Steps());
    ForPairs<kTiles>(strip_, first_column, [&](int tile, int half, int row, int column) {
      const int of_call = rows_->rows[row];
      if (of_call < 0) return;
      const int64_t at = (int64_t{of_call} * args.value_heads + head) * args.value_dim + column;
      *reinterpret_cast<float2*>(args.sums + at) = {sums_[tile][2 * half],
                                                    sums_[tile][2 * half + 1]};
    });
  }

 private:
  /// Steps of 8 up to the diagonal.
  MARLIN_DEVICE int Steps() const { return 2 * (strip_ + 1); }

  const float* keys_;
  const float* transform_;
  const float* scores_;
  const float* values_;
  const ChunkRows* rows_;
  float* operand_;
  float* news_;
  float* deltas_;
  int strip_;
  bool has_keys_;
  float sums_[kTiles][4] = {};
};

/// blockIdx.x: value head and slice of its features; blockIdx.y: sequence.
template <int kKeyDim, bool kCopies>
__global__ void __launch_bounds__(kThreads, 1)
    ChunkScanKernel(const __grid_constant__ ChunkArguments turn) {
  using Shared = DeltaScanShared<kKeyDim, kCopies>;
  using Chunk = ScanChunk<Shared>;
  using Copies = BlockCopies<kThreads>;
  extern __shared__ __align__(128) float memory[];
  EnterChain();
  const GatedDeltaArguments& args = turn.delta;
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
  const int key_head = head / args.group();
  const ScanCopies<kKeyDim, kCopies> copies(turn, key_head, head, slice, SharedAddress(memory));
  if (Copies::Calls()) copies.Begin(slot, count);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const bool owns = warp < kKeyDim / 16;
  StateStrip state(args, warp, head, slice);
  if (owns) {
    state.Load(first == 0 ? pages.from : pages.to);
    state.Publish(memory + Shared::kState);
  }
  __syncthreads();
  for (int n = 0; n < count; ++n) {
    Chunk chunk(memory, kCopies ? memory + (n & 1) * Shared::kPairFloats
                                : turn.parts + turn.Layout().KeysAt(slot + n, key_head));
    copies.WaitForPair(n);
    chunk.MultiplyState();
    copies.WaitForHead(n);
    chunk.Decay();
    __syncthreads();
    chunk.Transform();
    __syncthreads();
    chunk.StoreOutputs(args, head, slice * kScanColumns);
    if (owns) {
      state.Advance(expf(chunk.decay()), chunk.keys(), Shared::kKeyRow, chunk.news());
      state.Publish(memory + Shared::kState);
    }
    __syncthreads();
    if (Copies::Calls()) copies.Continue(slot, n, count);
  }
  if (owns) state.Store(pages.to);
}

template <int kKeyDim, bool kCopies>
cudaError_t Start(const ChunkArguments& turn, cudaStream_t stream) {
  const GatedDeltaArguments& args = turn.delta;
  const dim3 grid(static_cast<unsigned>(args.value_heads * (args.value_dim / kScanColumns)),
                  static_cast<unsigned>(args.sequences.count));
  return LaunchInChain(&ChunkScanKernel<kKeyDim, kCopies>, grid, kThreads,
                       DeltaScanShared<kKeyDim, kCopies>::kBytes, stream, turn);
}

template <int kKeyDim>
cudaError_t Start(const ChunkArguments& turn, int shared_bytes, cudaStream_t stream) {
  return DeltaScanShared<kKeyDim, true>::kBytes <= shared_bytes
             ? Start<kKeyDim, true>(turn, stream)
             : Start<kKeyDim, false>(turn, stream);
}

}  // namespace

cudaError_t LoadChunkScan() {
  return PrepareSharedKernels(&ChunkScanKernel<64, true>, &ChunkScanKernel<128, true>,
                              &ChunkScanKernel<64, false>, &ChunkScanKernel<128, false>);
}

cudaError_t LaunchChunkScan(const ChunkArguments& turn, int shared_bytes, cudaStream_t stream) {
  return turn.delta.key_dim == 64 ? Start<64>(turn, shared_bytes, stream)
                                  : Start<128>(turn, shared_bytes, stream);
}

}  // namespace marlin::cuda
