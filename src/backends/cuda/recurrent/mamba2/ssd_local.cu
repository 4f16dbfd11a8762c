// The parts of a chunk of Mamba-2 that do not depend on the state.
//
//   Within a chunk of 64 rows, exp(G) Q S + P V are the results that the state S before it and the
//   chunk's own values V, times their steps, give (Dao and Gu 2024): G sums the logarithms of the
//   decays through each row, and P[t, s] = exp(G[t] - G[s]) q[t] . k[s] for s <= t. Rows that take
//   no part are left out; a chunk's last rows may be zeros.
//
//   A CTA takes the keys and queries of a group of a chunk and their products, tf32 on matrix
//   units, or the values of several heads. Values times `skip` begin the sums. Where shared memory
//   has no room for keys and queries, the CTA computes them in the workspace.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/chunked/chunk_tiles.cuh"
#include "backends/cuda/recurrent/mamba2/mamba2_launch.h"
#include "backends/cuda/recurrent/mamba2/mamba2_rows.cuh"
#include "backends/cuda/recurrent/mamba2/ssd_shared.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = kLocalHeads;
static_assert(kHeads == kWarps);
constexpr int kRowsAtOnce = 16;  ///< Inputs of a convolution's rows that are loaded together.
constexpr int kUsualWidth = 4;
constexpr int kSquareRow = ChunkLayout::kSquareRow;

/// Keys and queries of a group, rounded to tf32: [kChunkRows][KeyRow] each.
template <int kWidth>
MARLIN_DEVICE void ConvolveKeys(const Mamba2Arguments& args, const SequenceState& state,
                                const ChunkSources& chunk, int group, int key_row, float* keys) {
  const int key_dim = args.key_dim;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * key_dim; i += kThreads) {
    const bool is_query = i >= key_dim;
    const int feature = is_query ? i - key_dim : i;
    float* const to = keys + (is_query ? kChunkRows * key_row : 0) + feature;
    const Channel channel =
        is_query ? QueryChannel(args, group, feature) : KeyChannel(args, group, feature);
    Convolve<kWidth, kRowsAtOnce>(
        args, state, channel, chunk.sources, chunk.count,
        [&](int t, float y) { to[t * key_row] = RoundTf32(y); }, BiasOf(args, channel));
    for (int t = chunk.count; t < kChunkRows; ++t) to[t * key_row] = 0.0f;
  }
  // Padding is copied, too.
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kChunkRows * kFragmentPadding;
       i += kThreads) {
    keys[i / kFragmentPadding * key_row + key_dim + i % kFragmentPadding] = 0.0f;
  }
}

/// Q K^T on and below the diagonal, to the workspace. A warp has 16 rows of half of the columns.
MARLIN_DEVICE void MultiplyKeys(int key_dim, int key_row, const float* keys, float* products) {
  constexpr int kTiles = kChunkRows / 16;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int strip = warp % 4;
  const int first_tile = warp / 4 * kTiles;
  const float* const rows = keys + (kChunkRows + strip * 16) * key_row;
  const float* const columns = keys + (first_tile * 8 + (lane >> 2)) * key_row + (lane & 3);
  float sums[kTiles][4] = {};
  for (int k = 0; k < key_dim; k += 8) {
    uint32_t a[4];
    LoadRowsTf32(a, rows + k, key_row);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (first_tile + n > 2 * strip + 1) break;
      const float* const b = columns + n * 8 * key_row + k;
      MultiplyAddTf32(sums[n], a, __float_as_uint(b[0]), __float_as_uint(b[4]));
    }
  }
  float* const to =
      products + (strip * 16 + (lane >> 2)) * kSquareRow + first_tile * 8 + 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    *reinterpret_cast<float2*>(to + n * 8) = {sums[n][0], sums[n][1]};
    *reinterpret_cast<float2*>(to + 8 * kSquareRow + n * 8) = {sums[n][2], sums[n][3]};
  }
}

/// A group's part of a chunk. `memory`: shared, unless kInPlace.
template <int kWidth, bool kInPlace>
MARLIN_DEVICE void RunGroup(const SsdArguments& turn, const SequenceState& state,
                            const ChunkSources& chunk, int64_t slot, int group, float* memory) {
  const SsdLayout layout = turn.Layout();
  float* const part = turn.parts + layout.PairAt(slot, group);
  float* const keys = kInPlace ? part : memory;
  ConvolveKeys<kWidth>(turn.mamba, state, chunk, group, layout.KeyRow(), keys);
  __syncthreads();
  const int quads = kInPlace ? 0 : 2 * layout.KeyFloats() / 4;
  for (int i = static_cast<int>(threadIdx.x); i < quads; i += kThreads) {
    reinterpret_cast<float4*>(part)[i] = reinterpret_cast<const float4*>(keys)[i];
  }
  MultiplyKeys(turn.mamba.key_dim, layout.KeyRow(), keys, part + 2 * layout.KeyFloats());
}

/// The decays of a head through each row, and its steps; none for rows that do not exist. Called by
/// a warp.
MARLIN_DEVICE void SumDecays(const Mamba2Arguments& args, const ChunkSources& chunk, int head,
                             float* steps, ChunkRows* rows) {
  const float rate = expf(args.log_decay[head]);
  float before = 0.0f;
  for (int t = static_cast<int>(threadIdx.x) & 31; t < kChunkRows; t += 32) {
    float step = 0.0f;
    float decay = 0.0f;
    int row = -1;
    if (t < chunk.count) {
      row = chunk.sources[args.conv_width - 1 + t];
      step = StepOf(args, row, head);
      decay = -rate * step;
      decay = decay < kLeastDecay ? kLeastDecay : decay;
    }
    rows->decays[t] = SumThroughLanes(decay, &before);
    rows->rows[t] = row;
    steps[t] = step;
  }
}

/// The parts of heads [first, first + heads) of a chunk.
template <int kWidth>
MARLIN_DEVICE void RunHeads(const SsdArguments& turn, const SequenceState& state, int64_t slot,
                            int first, int heads, SsdLocalRows* local) {
  const Mamba2Arguments& args = turn.mamba;
  const SsdLayout layout = turn.Layout();
  const ChunkSources& chunk = local->chunk;
  const int* const rows = chunk.sources + args.conv_width - 1;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  if (warp < heads) {
    float* const part = turn.parts + layout.HeadAt(slot, first + warp);
    SumDecays(args, chunk, first + warp, local->steps[warp], reinterpret_cast<ChunkRows*>(part));
  }
  __syncthreads();
  const int64_t row_stride = int64_t{args.value_heads} * args.value_dim;
  for (int i = static_cast<int>(threadIdx.x); i < heads * args.value_dim; i += kThreads) {
    const int of_first = i / args.value_dim;
    const int head = first + of_first;
    const int feature = i - of_first * args.value_dim;
    const float* const steps = local->steps[of_first];
    const float skip = args.skip[head];
    float* const sums = args.sums + int64_t{head} * args.value_dim + feature;
    float* const values = turn.parts + layout.HeadAt(slot, head) + ChunkLayout::kRowsFloats +
                          feature / kScanColumns * ChunkLayout::kValueFloats +
                          feature % kScanColumns;
    const Channel channel = ValueChannel(args, head, feature);
    Convolve<kWidth, kRowsAtOnce>(
        args, state, channel, chunk.sources, chunk.count,
        [&](int t, float x) {
          values[t * kScanColumns] = steps[t] * x;
          sums[rows[t] * row_stride] = skip * x;
        },
        BiasOf(args, channel));
    for (int t = chunk.count; t < kChunkRows; ++t) values[t * kScanColumns] = 0.0f;
  }
}

/// blockIdx.x: chunk of the turn; blockIdx.y: groups, then kHeads heads each.
template <int kWidth, bool kInPlace>
__global__ void __launch_bounds__(kThreads, 2)
    SsdLocalKernel(const __grid_constant__ SsdArguments turn) {
  extern __shared__ __align__(16) float memory[];
  EnterChain();
  const Mamba2Arguments& args = turn.mamba;
  const int64_t slot = blockIdx.x;
  const ChunkPlace place = FindChunk(args, turn.first + static_cast<int>(slot));
  if (place.sequence < 0) return;
  const SequenceState state(args, place.sequence);
  if (state.to == nullptr) return;
  float* const keys = memory + sizeof(SsdLocalRows) / sizeof(float);
  SsdLocalRows& local = *reinterpret_cast<SsdLocalRows*>(memory);
  if (threadIdx.x < 32) {
    ListRows(args, state, state.first_row + place.chunk * kChunkRows, kChunkRows, &local.chunk);
  }
  __syncthreads();
  const auto part = static_cast<int>(blockIdx.y);
  if (part < args.key_heads) {
    RunGroup<kWidth, kInPlace>(turn, state, local.chunk, slot, part, keys);
    return;
  }
  const int first = (part - args.key_heads) * kHeads;
  RunHeads<kWidth>(turn, state, slot, first, min(args.value_heads - first, kHeads), &local);
}

template <bool kInPlace>
cudaError_t Start(const SsdArguments& turn, int bytes, cudaStream_t stream) {
  const Mamba2Arguments& args = turn.mamba;
  const dim3 grid(static_cast<unsigned>(turn.count),
                  static_cast<unsigned>(args.key_heads + (args.value_heads + kHeads - 1) / kHeads));
  const auto kernel = args.conv_width == kUsualWidth ? &SsdLocalKernel<kUsualWidth, kInPlace>
                                                     : &SsdLocalKernel<0, kInPlace>;
  return LaunchInChain(kernel, grid, kThreads, bytes, stream, turn);
}

}  // namespace

cudaError_t LoadSsdLocal() {
  return PrepareSharedKernels(&SsdLocalKernel<0, false>, &SsdLocalKernel<kUsualWidth, false>,
                              &SsdLocalKernel<0, true>, &SsdLocalKernel<kUsualWidth, true>);
}

cudaError_t LaunchSsdLocal(const SsdArguments& turn, int shared_bytes, cudaStream_t stream) {
  const int bytes = SsdLocalBytes(turn.Layout());
  return bytes <= shared_bytes ? Start<false>(turn, bytes, stream)
                               : Start<true>(turn, static_cast<int>(sizeof(SsdLocalRows)), stream);
}

}  // namespace marlin::cuda
