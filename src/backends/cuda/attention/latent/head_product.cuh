// Products of rows with a matrix of their head, out[t, h] = weights[h] x[t, h].
//
//   In fp32: a warp takes eight rows and four outputs of a head, a lane every 32nd input, and
//   shuffles add the lanes. The order of additions is the same for every row.
//
//   On matrix units (m16n8k16): a warp takes 16 rows and some n8 tiles of outputs, 32 inputs at a
//   time. The order of the inputs inside of an MMA does not matter as long as both operands have
//   the same: lane t of a quad has inputs 8 t to 8 t + 7 of the 32, so that 16 bytes of a row of
//   weights are its operands of two MMAs, without a pass through shared memory. x is split into two
//   bf16 terms, so that only fp32 sums round. Up to 32 rows the warps of a CTA share the inputs
//   (intra-CTA split-K), beyond that the rows.
#pragma once

#include "backends/cuda/attention/latent/matrix_softmax.cuh"
#include "backends/cuda/attention/latent/prepare_latents.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {

inline constexpr int kHeadProductThreads = 128;
inline constexpr int kHeadProductWarps = kHeadProductThreads / 32;

/// Inputs that a step of the matrix kernels takes.
inline constexpr int kHeadProductInputs = 32;

/// out[t, h, j] = x[t, h] . weights[h, j].
struct HeadProductArguments {
  RowsView x;        ///< [tokens, heads] rows.
  RowsView weights;  ///< [heads, outputs] rows.
  RowsView out;      ///< [tokens, heads] rows.
  int64_t tokens = 0;
  int heads = 0;
  int inputs = 0;
  int outputs = 0;
};

/// The part of a CTA: numbered by rows, then heads, then outputs.
struct HeadProductPart {
  int64_t first_row;
  int head;
  int first_output;

  MARLIN_DEVICE HeadProductPart(const HeadProductArguments& args, int rows, int outputs) {
    const auto tiles = static_cast<unsigned>((args.outputs + outputs - 1) / outputs);
    const unsigned of_rows = blockIdx.x / tiles;
    first_output = static_cast<int>(blockIdx.x % tiles) * outputs;
    head = static_cast<int>(of_rows % static_cast<unsigned>(args.heads));
    first_row = static_cast<int64_t>(of_rows / static_cast<unsigned>(args.heads)) * rows;
  }
};

inline dim3 HeadProductGrid(const HeadProductArguments& args, int rows, int outputs) {
  const int64_t tiles = (args.outputs + outputs - 1) / outputs;
  const int64_t row_tiles = (args.tokens + rows - 1) / rows;
  return {static_cast<unsigned>(tiles * args.heads * row_tiles)};
}

inline constexpr int kRowsAtOnce = 8;
inline constexpr int kOutputsAtOnce = 4;

static __global__ void __launch_bounds__(kHeadProductThreads)
    HeadProductKernel(const __grid_constant__ HeadProductArguments args) {
  EnterChain();
  const HeadProductPart part(args, kRowsAtOnce, kOutputsAtOnce * kHeadProductWarps);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int output = part.first_output + (static_cast<int>(threadIdx.x) >> 5) * kOutputsAtOnce;
  if (output >= args.outputs) return;
  float sums[kRowsAtOnce][kOutputsAtOnce] = {};
  WithType(args.weights.type, [&](auto weights_type) {
    WithType(args.x.type, [&](auto x_type) {
      const decltype(x_type)* rows[kRowsAtOnce];
      const decltype(weights_type)* weights[kOutputsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int64_t row = min(part.first_row + r, args.tokens - 1);
        rows[r] = static_cast<const decltype(x_type)*>(args.x.data) + args.x.At(row, part.head);
      }
#pragma unroll
      for (int j = 0; j < kOutputsAtOnce; ++j) {
        weights[j] = static_cast<const decltype(weights_type)*>(args.weights.data) +
                     args.weights.At(part.head, min(output + j, args.outputs - 1));
      }
      for (int i = lane; i < args.inputs; i += 32) {
        float w[kOutputsAtOnce];
#pragma unroll
        for (int j = 0; j < kOutputsAtOnce; ++j) w[j] = ToFloat(weights[j][i]);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          const float x = ToFloat(rows[r][i]);
#pragma unroll
          for (int j = 0; j < kOutputsAtOnce; ++j) sums[r][j] = __fmaf_rn(x, w[j], sums[r][j]);
        }
      }
    });
  });
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
    for (int j = 0; j < kOutputsAtOnce; ++j) {
      float sum = sums[r][j];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane != 0 || part.first_row + r >= args.tokens || output + j >= args.outputs) continue;
      StoreFloat(args.out.data, args.out.type,
                 args.out.At(part.first_row + r, part.head) + output + j, sum);
    }
  }
}

/// The operands of two MMAs: 32 inputs of 16 rows.
struct RowOperands {
  uint32_t rounded[2][4];
  uint32_t rests[2][4];

  /// `rows`: the lane's inputs of rows lane / 4 and lane / 4 + 8.
  MARLIN_DEVICE explicit RowOperands(const float* const (&rows)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto low = *reinterpret_cast<const float4*>(rows[half]);
      const auto high = *reinterpret_cast<const float4*>(rows[half] + 4);
      SplitInTwo(low.x, low.y, &rounded[0][half], &rests[0][half]);
      SplitInTwo(low.z, low.w, &rounded[0][half + 2], &rests[0][half + 2]);
      SplitInTwo(high.x, high.y, &rounded[1][half], &rests[1][half]);
      SplitInTwo(high.z, high.w, &rounded[1][half + 2], &rests[1][half + 2]);
    }
  }
};

/// 16 rows and kTiles n8 tiles of outputs, of inputs [first, inputs) in steps.
template <int kTiles>
MARLIN_DEVICE void MultiplyRows(const HeadProductArguments& args, int64_t first_row, int head,
                                int first_output, int first, int step, float (&sums)[kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int own = (lane & 3) * 8;
  const float* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = min(first_row + (lane >> 2) + 8 * half, args.tokens - 1);
    rows[half] = static_cast<const float*>(args.x.data) + args.x.At(row, head) + own;
  }
  const __nv_bfloat16* weights[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int output = min(first_output + n * 8 + (lane >> 2), args.outputs - 1);
    weights[n] =
        static_cast<const __nv_bfloat16*>(args.weights.data) + args.weights.At(head, output) + own;
  }
#pragma unroll 2
  for (int i = first; i < args.inputs; i += step) {
    uint4 w[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) w[n] = *reinterpret_cast<const uint4*>(weights[n] + i);
    const float* const at[2] = {rows[0] + i, rows[1] + i};
    const RowOperands x(at);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      MultiplyAdd<Bf16x2>(sums[n], x.rounded[0], w[n].x, w[n].y);
      MultiplyAdd<Bf16x2>(sums[n], x.rounded[1], w[n].z, w[n].w);
      MultiplyAdd<Bf16x2>(sums[n], x.rests[0], w[n].x, w[n].y);
      MultiplyAdd<Bf16x2>(sums[n], x.rests[1], w[n].z, w[n].w);
    }
  }
}

/// Stores two adjacent outputs, those that exist.
MARLIN_DEVICE void StoreProductPair(const HeadProductArguments& args, int64_t row, int head,
                                    int output, float first, float second) {
  if (row >= args.tokens || output >= args.outputs) return;
  const int64_t at = args.out.At(row, head) + output;
  StoreFloat(args.out.data, args.out.type, at, first);
  if (output + 1 < args.outputs) StoreFloat(args.out.data, args.out.type, at + 1, second);
}

inline constexpr int kDecodeRows = 16;
inline constexpr int kDecodeTiles = 4;
inline constexpr int kManyRows = 16 * kHeadProductWarps;
inline constexpr int kManyTiles = 8;

/// Up to 32 rows: a warp takes every fourth step of inputs.
MARLIN_DEVICE void MultiplyFewRows(const HeadProductArguments& args) {
  constexpr int kOutputs = kDecodeTiles * 8;
  __shared__ float all[kHeadProductWarps][kDecodeRows][kOutputs + 8];
  const HeadProductPart part(args, kDecodeRows, kOutputs);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float sums[kDecodeTiles][4] = {};
  MultiplyRows(args, part.first_row, part.head, part.first_output, warp * kHeadProductInputs,
               kHeadProductWarps * kHeadProductInputs, sums);
#pragma unroll
  for (int n = 0; n < kDecodeTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const to = &all[warp][(lane >> 2) + 8 * half][n * 8 + (lane & 3) * 2];
      to[0] = sums[n][2 * half];
      to[1] = sums[n][2 * half + 1];
    }
  }
  __syncthreads();
  constexpr int kPairs = kOutputs / 2;
  for (int i = static_cast<int>(threadIdx.x); i < kDecodeRows * kPairs; i += kHeadProductThreads) {
    const int row = i / kPairs;
    const int column = i % kPairs * 2;
    float first = 0.0f;
    float second = 0.0f;
#pragma unroll
    for (int w = 0; w < kHeadProductWarps; ++w) {
      first += all[w][row][column];
      second += all[w][row][column + 1];
    }
    StoreProductPair(args, part.first_row + row, part.head, part.first_output + column, first,
                     second);
  }
}

static __global__ void __launch_bounds__(kHeadProductThreads)
    DecodeHeadProductKernel(const __grid_constant__ HeadProductArguments args) {
  EnterChain();
  MultiplyFewRows(args);
}

struct PreparedProductArguments {
  HeadProductArguments product;
  PrepareLatentsArguments prepare;
  int product_blocks = 0;  ///< The first CTAs.
};

/// DecodeHeadProductKernel and PrepareLatentsKernel side by side.
static __global__ void __launch_bounds__(kHeadProductThreads)
    PreparedProductKernel(const __grid_constant__ PreparedProductArguments args) {
  static_assert(kHeadProductThreads == kPrepareThreads);
  EnterChain();
  const int block = static_cast<int>(blockIdx.x) - args.product_blocks;
  if (block < 0) return MultiplyFewRows(args.product);
  PrepareLatents(args.prepare, block);
}

/// Many rows: a warp takes 16 of them.
static __global__ void __launch_bounds__(kHeadProductThreads)
    PrefillHeadProductKernel(const __grid_constant__ HeadProductArguments args) {
  EnterChain();
  const HeadProductPart part(args, kManyRows, kManyTiles * 8);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t first_row = part.first_row + (static_cast<int>(threadIdx.x) >> 5) * 16;
  if (first_row >= args.tokens) return;
  float sums[kManyTiles][4] = {};
  MultiplyRows(args, first_row, part.head, part.first_output, 0, kHeadProductInputs, sums);
#pragma unroll
  for (int n = 0; n < kManyTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StoreProductPair(args, first_row + (lane >> 2) + 8 * half, part.head,
                       part.first_output + n * 8 + (lane & 3) * 2, sums[n][2 * half],
                       sums[n][2 * half + 1]);
    }
  }
}

}  // namespace marlin::cuda
