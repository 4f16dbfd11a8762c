// The parts of a chunk of the gated delta rule that do not depend on the state.
//
//   Within a chunk of 64 rows, D = T' (V - exp(G) K S) are the rows that the state S before it
//   gets, and exp(G) Q S + P D its outputs (Yang et al. 2024, https://arxiv.org/abs/2406.06484): G
//   sums the logarithms of the decays through each row, A[t, s] = write[t] exp(G[t] - G[s]) k[t] .
//   k[s] for s < t, T' = (I + A)^-1 diag(write) and P[t, s] = exp(G[t] - G[s]) q[t] . k[s] for s <=
//   t. Rows that take no part are left out; a chunk's last rows may be zeros.
//
//   A CTA takes a key head of a chunk. Products are tf32 on matrix units, the inverse is fp32.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/chunked/chunk_launch.h"
#include "backends/cuda/recurrent/chunked/chunk_shared.h"
#include "backends/cuda/recurrent/chunked/chunk_tiles.cuh"
#include "backends/cuda/recurrent/delta_channels.cuh"
#include "backends/cuda/recurrent/gated_norm.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = kLocalThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsAtOnce = 16;  ///< Inputs of a convolution's rows that are loaded together.
constexpr int kSquareRow = ChunkLayout::kSquareRow;
constexpr int kSquareFloats = ChunkLayout::kSquareFloats;

/// Queries and keys of the chunk to shared memory, values to the workspace; zeros in other rows.
template <int kWidth>
MARLIN_DEVICE void ConvolveChunk(const ChunkArguments& turn, const SequenceState& state,
                                 const ChunkSources& chunk, int key_head, float* keys,
                                 float* queries, int64_t slot) {
  const GatedDeltaArguments& args = turn.delta;
  const ChunkLayout layout = turn.Layout();
  const int key_row = layout.KeyRow();
  const int group = args.group();
  const auto convolve = [&](const Channel& channel, float* to, int stride) {
    Convolve<kWidth, kRowsAtOnce>(args, state, channel, chunk.sources, chunk.count,
                                  [&](int t, float y) { to[t * stride] = y; });
    for (int t = chunk.count; t < kChunkRows; ++t) to[t * stride] = 0.0f;
  };
  for (int i = static_cast<int>(threadIdx.x); i < 2 * args.key_dim; i += kThreads) {
    if (i < args.key_dim) {
      convolve(QueryChannel(args, key_head, i), queries + i, key_row);
    } else {
      convolve(KeyChannel(args, key_head, i - args.key_dim), keys + i - args.key_dim, key_row);
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < group * args.value_dim; i += kThreads) {
    const int head = key_head * group + i / args.value_dim;
    const int feature = i % args.value_dim;
    float* const values = turn.parts + layout.HeadAt(slot, head) + 2 * kSquareFloats +
                          ChunkLayout::kRowsFloats +
                          feature / kScanColumns * ChunkLayout::kValueFloats;
    convolve(ValueChannel(args, head, feature), values + feature % kScanColumns, kScanColumns);
  }
}

/// Norms of queries and keys, rounded to tf32; a warp takes a row.
MARLIN_DEVICE void NormChunk(const GatedDeltaArguments& args, int key_row, float* keys,
                             float* queries) {
  constexpr float kEpsilon = 1e-6f;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float depth = sqrtf(static_cast<float>(args.key_dim));
  for (int t = static_cast<int>(threadIdx.x) >> 5; t < kChunkRows; t += kWarps) {
    float* const query = queries + t * key_row;
    float* const key = keys + t * key_row;
    float query_squares = 0.0f;
    float key_squares = 0.0f;
    for (int i = lane; i < args.key_dim; i += 32) {
      query_squares = __fmaf_rn(query[i], query[i], query_squares);
      key_squares = __fmaf_rn(key[i], key[i], key_squares);
    }
    const float query_factor = 1.0f / sqrtf(SumOverLanes(query_squares) + kEpsilon) / depth;
    const float key_factor = 1.0f / sqrtf(SumOverLanes(key_squares) + kEpsilon);
    for (int i = lane; i < key_row; i += 32) {
      const bool exists = i < args.key_dim;
      query[i] = exists ? RoundTf32(query[i] * query_factor) : 0.0f;
      key[i] = exists ? RoundTf32(key[i] * key_factor) : 0.0f;
    }
  }
}

/// products[0] = K K^T, products[1] = Q K^T, below and on the diagonal, in place of keys and
/// queries. A warp has 16 rows of one.
MARLIN_DEVICE void MultiplyKeys(int key_dim, int key_row, const float* keys, const float* queries,
                                float* products) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int strip = warp % 4;
  const float* const rows = (warp < 4 ? keys : queries) + strip * 16 * key_row;
  const float* const columns = keys + (lane >> 2) * key_row + (lane & 3);
  float sums[kChunkRows / 8][4] = {};
  for (int k = 0; k < key_dim; k += 8) {
    uint32_t a[4];
    LoadRowsTf32(a, rows + k, key_row);
#pragma unroll
    for (int n = 0; n < kChunkRows / 8; ++n) {
      if (n > 2 * strip + 1) break;
      const float* const b = columns + n * 8 * key_row + k;
      MultiplyAddTf32(sums[n], a, __float_as_uint(b[0]), __float_as_uint(b[4]));
    }
  }
  __syncthreads();
  float* const to = products + (warp < 4 ? 0 : kSquareFloats) +
                    (strip * 16 + (lane >> 2)) * kSquareRow + 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < kChunkRows / 8; ++n) {
    *reinterpret_cast<float2*>(to + n * 8) = {sums[n][0], sums[n][1]};
    *reinterpret_cast<float2*>(to + 8 * kSquareRow + n * 8) = {sums[n][2], sums[n][3]};
  }
}

/// The decays of a value head through each row, and its writes; none for rows that do not exist.
/// Called by a warp.
MARLIN_DEVICE void SumDecays(const GatedDeltaArguments& args, const ChunkSources& chunk, int head,
                             float* decays, float* writes) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int group = args.group();
  const float rate = expf(args.log_decay[head]);
  float before = 0.0f;
  for (int t = lane; t < kChunkRows; t += 32) {
    float decay = 0.0f;
    float write = 0.0f;
    if (t < chunk.count) {
      const int row = chunk.sources[args.conv_width - 1 + t];
      const float a = args.decays.At(row, head / group)[head % group] + args.decay_bias[head];
      decay = -rate * SoftPlus(a);
      decay = decay < kLeastDecay ? kLeastDecay : decay;
      write = TimesSigmoid(1.0f, args.writes.At(row, head / group)[head % group]);
    }
    decays[t] = SumThroughLanes(decay, &before);
    writes[t] = write;
  }
}

/// A of a value head to shared memory, and P to the workspace. Called by the threads of a CTA.
MARLIN_DEVICE void ScaleProducts(const float* products, const float* decays, const float* writes,
                                 float* matrix, float* scores) {
  for (int i = static_cast<int>(threadIdx.x); i < kChunkRows * kChunkRows; i += kThreads) {
    const int t = i / kChunkRows;
    const int s = i % kChunkRows;
    const int at = t * kSquareRow + s;
    const float factor = s <= t ? expf(decays[t] - decays[s]) : 0.0f;
    matrix[at] = s < t ? writes[t] * factor * products[at] : 0.0f;
    scores[at] = s <= t ? RoundTf32(factor * products[kSquareFloats + at]) : 0.0f;
  }
}

/// Column `column` of (I + A)^-1 times its write, to the workspace: forward substitution.
MARLIN_DEVICE void InvertColumn(const float* matrix, int column, float write, float* transform) {
  float x[kChunkRows];
#pragma unroll
  for (int t = 0; t < kChunkRows; ++t) x[t] = 0.0f;
#pragma unroll
  for (int t = 0; t < kChunkRows; ++t) {
    float sums[4] = {t == column ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < t; s += 4) {
      const float4 a = *reinterpret_cast<const float4*>(matrix + t * kSquareRow + s);
      sums[0] = __fmaf_rn(-a.x, x[s], sums[0]);
      sums[1] = __fmaf_rn(-a.y, x[s + 1], sums[1]);
      sums[2] = __fmaf_rn(-a.z, x[s + 2], sums[2]);
      sums[3] = __fmaf_rn(-a.w, x[s + 3], sums[3]);
    }
    x[t] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    transform[t * kSquareRow + column] = RoundTf32(x[t] * write);
  }
}

/// blockIdx.x: chunk of the turn; blockIdx.y: key head.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 2)
    ChunkLocalKernel(const __grid_constant__ ChunkArguments turn) {
  extern __shared__ __align__(16) float memory[];
  EnterChain();
  const GatedDeltaArguments& args = turn.delta;
  const auto slot = static_cast<int>(blockIdx.x);
  const auto key_head = static_cast<int>(blockIdx.y);
  const ChunkPlace place = FindChunk(args, turn.first + slot);
  if (place.sequence < 0) return;
  const SequenceState state(args, place.sequence);
  if (state.to == nullptr) return;
  const ChunkLayout layout = turn.Layout();
  const DeltaLocalShared shared = {layout.KeyFloats()};
  float* const keys = memory;
  float* const queries = memory + shared.Queries();
  float* const products = memory + DeltaLocalShared::Products();
  float* const matrices = memory + DeltaLocalShared::Matrices();
  auto& [chunk, decays, writes] = *reinterpret_cast<DeltaLocalRows*>(memory + shared.Rows());
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread >> 5;
  const int first_row = state.first_row + place.chunk * kChunkRows;
  if (warp == 0) ListRows(args, state, first_row, kChunkRows, &chunk);
  __syncthreads();
  ConvolveChunk<kWidth>(turn, state, chunk, key_head, keys, queries, slot);
  __syncthreads();
  NormChunk(args, layout.KeyRow(), keys, queries);
  __syncthreads();
  auto* const pair = reinterpret_cast<float4*>(turn.parts + layout.KeysAt(slot, key_head));
  for (int i = thread; i < 2 * layout.KeyFloats() / 4; i += kThreads) {
    pair[i] = reinterpret_cast<const float4*>(memory)[i];
  }
  MultiplyKeys(args.key_dim, layout.KeyRow(), keys, queries, products);
  const int group = args.group();
  for (int first = 0; first < group; first += shared.Heads()) {
    const int heads = min(group - first, shared.Heads());
    const int first_head = key_head * group + first;
    if (warp < heads) SumDecays(args, chunk, first_head + warp, decays[warp], writes[warp]);
    __syncthreads();
    for (int h = 0; h < heads; ++h) {
      float* const part = turn.parts + layout.HeadAt(slot, first_head + h);
      ScaleProducts(products, decays[h], writes[h], matrices + h * kSquareFloats,
                    part + kSquareFloats);
    }
    const int own = thread / kChunkRows;
    const int column = thread % kChunkRows;
    float* const part = turn.parts + layout.HeadAt(slot, first_head + own);
    if (own < heads) {
      auto* const rows = reinterpret_cast<ChunkRows*>(part + 2 * kSquareFloats);
      rows->decays[column] = decays[own][column];
      rows->rows[column] = column < chunk.count ? chunk.sources[args.conv_width - 1 + column] : -1;
    }
    __syncthreads();
    if (own < heads) {
      InvertColumn(matrices + own * kSquareFloats, column, writes[own][column], part);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t LoadChunkLocal() {
  return PrepareSharedKernels(&ChunkLocalKernel<0>, &ChunkLocalKernel<4>);
}

cudaError_t LaunchChunkLocal(const ChunkArguments& turn, cudaStream_t stream) {
  constexpr int kUsualWidth = 4;
  const GatedDeltaArguments& args = turn.delta;
  const DeltaLocalShared shared = {turn.Layout().KeyFloats()};
  const dim3 grid(static_cast<unsigned>(turn.count), static_cast<unsigned>(args.key_heads));
  const auto kernel =
      args.conv_width == kUsualWidth ? &ChunkLocalKernel<kUsualWidth> : &ChunkLocalKernel<0>;
  return LaunchInChain(kernel, grid, kThreads, shared.Bytes(), stream, turn);
}

}  // namespace marlin::cuda
