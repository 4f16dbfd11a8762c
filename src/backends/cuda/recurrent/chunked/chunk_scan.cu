// The pass over a sequence's chunks that carries the state (chunk_local.cu has the formulas).
//
//   A CTA takes 32 value features of a value head of a sequence. The state is in fp32 in the
//   fragments of its warps, of 16 rows each, and rounded to tf32 in shared memory as an operand.
//   The parts of chunks arrive by bulk copies: keys and queries of the next chunk while this one
//   runs, the others, which are needed later in a chunk, when the last one ends.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/chunked/chunk_launch.h"
#include "backends/cuda/recurrent/chunked/chunk_tiles.cuh"
#include "backends/cuda/recurrent/sequence_state.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStrips = kChunkRows / 16;  ///< Strips of 16 rows of a chunk.
constexpr int kTiles = kScanColumns / 8;  ///< Tiles of 8 columns.
constexpr int kRow = kScanColumns + 8;    ///< Floats between rows of B operands.
constexpr int kSquareRow = ChunkLayout::kSquareRow;
constexpr int kSquareFloats = ChunkLayout::kSquareFloats;
/// The transform, the scores and ChunkRows.
constexpr int kHeadFloats = 2 * kSquareFloats + ChunkLayout::kRowsFloats;

/// The shared memory of a CTA, in floats.
template <int kKeyDim>
struct ScanShared {
  static constexpr int kKeyRow = kKeyDim + kFragmentPadding;
  static constexpr int kKeyFloats = kChunkRows * kKeyRow;
  static constexpr int kPairFloats = 2 * kKeyFloats;  ///< Keys, queries; of two chunks.
  static constexpr int kHead = 2 * kPairFloats;
  static constexpr int kValues = kHead + kHeadFloats;
  static constexpr int kState = kValues + ChunkLayout::kValueFloats;
  static constexpr int kNews = kState + kKeyDim * kRow;      ///< V - exp(G) K S, then decayed D.
  static constexpr int kDeltas = kNews + kChunkRows * kRow;  ///< D
  static constexpr int kBarriers = kDeltas + kChunkRows * kRow;
  static constexpr int kBytes = kBarriers * 4 + 3 * 8;
};

/// The bulk copies of a CTA.
template <int kKeyDim>
class ScanCopies {
 public:
  using Shared = ScanShared<kKeyDim>;

  MARLIN_DEVICE ScanCopies(const ChunkArguments& turn, int key_head, int head, int slice,
                           uint32_t shared)
      : turn_(turn), key_head_(key_head), head_(head), slice_(slice), shared_(shared) {}

  /// Called by one thread.
  MARLIN_DEVICE void Begin() const {
    for (int i = 0; i < 3; ++i) InitBarrier(Barrier(i), 1);
    FenceBarrierInit();
  }
  /// Keys and queries of chunk `slot` of the turn, the CTA's n-th.
  MARLIN_DEVICE void RequestPair(int slot, int n) const {
    constexpr int kBytes = Shared::kPairFloats * 4;
    ArriveExpecting(Barrier(n & 1), kBytes);
    CopyBulk(shared_ + (n & 1) * kBytes, turn_.parts + turn_.Layout().KeysAt(slot, key_head_),
             kBytes, Barrier(n & 1));
  }
  MARLIN_DEVICE void RequestHead(int slot) const {
    constexpr int kValueBytes = ChunkLayout::kValueFloats * 4;
    const float* const part = turn_.parts + turn_.Layout().HeadAt(slot, head_);
    ArriveExpecting(Barrier(2), kHeadFloats * 4 + kValueBytes);
    CopyBulk(shared_ + Shared::kHead * 4, part, kHeadFloats * 4, Barrier(2));
    CopyBulk(shared_ + Shared::kValues * 4, part + kHeadFloats + slice_ * ChunkLayout::kValueFloats,
             kValueBytes, Barrier(2));
  }
  MARLIN_DEVICE void WaitForPair(int n) const { Wait(Barrier(n & 1), n >> 1 & 1); }
  MARLIN_DEVICE void WaitForHead(int n) const { Wait(Barrier(2), n & 1); }

 private:
  MARLIN_DEVICE uint32_t Barrier(int i) const { return shared_ + Shared::kBarriers * 4 + i * 8; }

  const ChunkArguments& turn_;
  int key_head_;
  int head_;
  int slice_;
  uint32_t shared_;
};

/// Calls run(n, half, row, column) for the pairs of a strip's fragment: sums[n][2 half] and the
/// next one are at (row, column) and (row, column + 1).
template <int kCount, typename Run>
MARLIN_DEVICE void ForPairs(int strip, int first_column, const Run& run) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      run(n, half, strip * 16 + (lane >> 2) + 8 * half, first_column + n * 8 + 2 * (lane & 3));
    }
  }
}

MARLIN_DEVICE void StorePairTf32(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = {RoundTf32(low), RoundTf32(high)};
}

/// A warp's 16 rows of the CTA's columns of the state.
class StateStrip {
 public:
  MARLIN_DEVICE StateStrip(const GatedDeltaArguments& args, int strip, int head, int slice)
      : strip_(strip),
        stride_(args.value_dim),
        at_(args.conv_elements() + int64_t{head} * args.key_dim * args.value_dim +
            slice * kScanColumns) {}

  MARLIN_DEVICE void Load(const float* state) {
    ForPairs<kTiles>(strip_, 0, [&](int n, int half, int row, int column) {
      float2 v = {0.0f, 0.0f};
      if (state != nullptr)
        v = *reinterpret_cast<const float2*>(state + at_ + row * stride_ + column);
      state_[n][2 * half] = v.x;
      state_[n][2 * half + 1] = v.y;
    });
  }
  MARLIN_DEVICE void Store(float* state) const {
    ForPairs<kTiles>(strip_, 0, [&](int n, int half, int row, int column) {
      *reinterpret_cast<float2*>(state + at_ + row * stride_ + column) = {state_[n][2 * half],
                                                                          state_[n][2 * half + 1]};
    });
  }
  /// As an operand in shared memory.
  MARLIN_DEVICE void Publish(float* operand) const {
    ForPairs<kTiles>(strip_, 0, [&](int n, int half, int row, int column) {
      StorePairTf32(operand + row * kRow + column, state_[n][2 * half], state_[n][2 * half + 1]);
    });
  }
  /// state = decay * state + keys^T news
  MARLIN_DEVICE void Advance(float decay, const float* keys, int key_row, const float* news) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (float& value : state_[n]) value *= decay;
    }
#pragma unroll
    for (int k = 0; k < kChunkRows; k += 8) {
      uint32_t a[4];
      LoadColumnsTf32(a, keys + k * key_row + strip_ * 16, key_row);
      MultiplyRows(state_, a, news + k * kRow, kRow);
    }
  }

 private:
  int strip_;
  int64_t stride_;
  int64_t at_;
  float state_[kTiles][4];
};

/// sums += rows [16, 8 steps] * operand
template <int kCount>
MARLIN_DEVICE void MultiplyStrip(float (&sums)[kCount][4], const float* rows, int row,
                                 const float* operand, int steps) {
#pragma unroll 4
  for (int k = 0; k < steps; ++k) {
    uint32_t a[4];
    LoadRowsTf32(a, rows + k * 8, row);
    MultiplyRows(sums, a, operand + k * 8 * kRow, kRow);
  }
}

/// blockIdx.x: value head and slice of its features; blockIdx.y: sequence.
template <int kKeyDim>
__global__ void __launch_bounds__(kThreads, 1)
    ChunkScanKernel(const __grid_constant__ ChunkArguments turn) {
  using Shared = ScanShared<kKeyDim>;
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
  const SequenceState sequence_state(args, sequence);
  if (sequence_state.to == nullptr) return;
  const int first_slot = before + first - turn.first;
  const ScanCopies<kKeyDim> copies(turn, head / args.group(), head, slice, SharedAddress(memory));
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  if (threadIdx.x == 0) {
    copies.Begin();
    copies.RequestPair(first_slot, 0);
    copies.RequestHead(first_slot);
    if (count > 1) copies.RequestPair(first_slot + 1, 1);
  }
  float* const operand = memory + Shared::kState;
  float* const news = memory + Shared::kNews;
  float* const deltas = memory + Shared::kDeltas;
  const float* const transform = memory + Shared::kHead;
  const float* const scores = transform + kSquareFloats;
  const auto* const rows = reinterpret_cast<const ChunkRows*>(scores + kSquareFloats);
  const float* const values = memory + Shared::kValues;
  const int strip = warp % kStrips;
  const bool has_keys = warp < kStrips;  // The others have queries.
  const bool owns = warp < kKeyDim / 16;
  StateStrip state(args, warp, head, slice);
  if (owns) {
    state.Load(first == 0 ? sequence_state.from : sequence_state.to);
    state.Publish(operand);
  }
  __syncthreads();
  for (int n = 0; n < count; ++n) {
    const float* const keys = memory + (n & 1) * Shared::kPairFloats;
    const float* const queries = keys + Shared::kKeyFloats;
    copies.WaitForPair(n);
    float sums[kTiles][4] = {};
    MultiplyStrip(sums, (has_keys ? keys : queries) + strip * 16 * Shared::kKeyRow, Shared::kKeyRow,
                  operand, kKeyDim / 8);
    copies.WaitForHead(n);
    ForPairs<kTiles>(strip, 0, [&](int tile, int half, int row, int column) {
      const float decay = expf(rows->decays[row]);
      float& low = sums[tile][2 * half];
      float& high = sums[tile][2 * half + 1];
      if (has_keys) {
        const float2 v = *reinterpret_cast<const float2*>(values + row * kScanColumns + column);
        StorePairTf32(news + row * kRow + column, v.x - decay * low, v.y - decay * high);
      } else {
        low *= decay;
        high *= decay;
      }
    });
    __syncthreads();
    // Below the diagonal; a warp has half of the columns.
    constexpr int kHalf = kTiles / 2;
    const int half_column = has_keys ? 0 : kHalf * 8;
    const int steps = 2 * (strip + 1);
    float products[kHalf][4] = {};
    MultiplyStrip(products, transform + strip * 16 * kSquareRow, kSquareRow, news + half_column,
                  steps);
    const float last = rows->decays[kChunkRows - 1];
    __syncthreads();
    ForPairs<kHalf>(strip, half_column, [&](int tile, int half, int row, int column) {
      const float low = products[tile][2 * half];
      const float high = products[tile][2 * half + 1];
      const float decay = expf(last - rows->decays[row]);
      StorePairTf32(deltas + row * kRow + column, low, high);
      StorePairTf32(news + row * kRow + column, decay * low, decay * high);
    });
    __syncthreads();
    if (!has_keys) {
      MultiplyStrip(sums, scores + strip * 16 * kSquareRow, kSquareRow, deltas, steps);
      ForPairs<kTiles>(strip, slice * kScanColumns, [&](int tile, int half, int row, int column) {
        const int of_call = rows->rows[row];
        if (of_call < 0) return;
        float* const to =
            args.sums + (int64_t{of_call} * args.value_heads + head) * args.value_dim + column;
        *reinterpret_cast<float2*>(to) = {sums[tile][2 * half], sums[tile][2 * half + 1]};
      });
    }
    if (owns) {
      state.Advance(expf(last), keys, Shared::kKeyRow, news);
      state.Publish(operand);
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    if (n + 1 < count) copies.RequestHead(first_slot + n + 1);
    if (n + 2 < count) copies.RequestPair(first_slot + n + 2, n + 2);
  }
  if (owns) state.Store(sequence_state.to);
}

}  // namespace

cudaError_t LoadChunkScan() {
  return PrepareSharedKernels(&ChunkScanKernel<64>, &ChunkScanKernel<128>);
}

cudaError_t LaunchChunkScan(const ChunkArguments& turn, cudaStream_t stream) {
  const GatedDeltaArguments& args = turn.delta;
  const dim3 grid(static_cast<unsigned>(args.value_heads * (args.value_dim / kScanColumns)),
                  static_cast<unsigned>(args.sequences.count));
  if (args.key_dim == 64) {
    return LaunchInChain(&ChunkScanKernel<64>, grid, kThreads, ScanShared<64>::kBytes, stream,
                         turn);
  }
  return LaunchInChain(&ChunkScanKernel<128>, grid, kThreads, ScanShared<128>::kBytes, stream,
                       turn);
}

}  // namespace marlin::cuda
