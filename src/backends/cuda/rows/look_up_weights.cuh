// The kernel of an embedding lookup in prepared weights: an output of the matrix [k = features,
// n = tokens] is a row.
#pragma once

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/weight_reader.cuh"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/rows/record_error.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {

inline constexpr int kLookUpThreads = 128;

/// out[r] = the weights of output ids[r].
struct LookUpWeightsArguments {
  IndexView ids;
  RowsView out;
  int64_t columns = 0;
  int64_t outputs = 0;
  bool pairs = false;  ///< Pairs of `out` are aligned to their size.
  ErrorView errors;
};

/// The output of blockIdx.x, or -1 with a record of why. Called by all threads of a CTA.
MARLIN_DEVICE int64_t OutputOfRow(const LookUpWeightsArguments& args) {
  const auto row = static_cast<int64_t>(blockIdx.x);
  const int64_t id = args.ids.At(row);
  if (id >= 0 && id < args.outputs) return id;
  if (threadIdx.x == 0) RecordError(args.errors, ValueError::kIds, id, row, args.outputs);
  return -1;
}

/// The codes of a lane of tiles in one step of 16 k, as if it were the first step (CodeOf).
template <CodeKind kKind>
struct StepCodes {
  static constexpr int kBits = CodeBits(kKind);
  static constexpr int kWords = kBits <= 4 ? 1 : kBits / 4;
  uint32_t words[kBits == 3 ? 3 : kWords];

  /// `block`: a fragment block.
  MARLIN_DEVICE StepCodes(const uint32_t* block, int lane, int step) {
    if constexpr (kBits < 4) {
      words[0] = block[WordOffset(kBits, lane, step / 2)] >> (2 * (step % 2));
      if constexpr (kBits == 3) words[2] = block[WordOffset(kBits, lane, 2)] >> step;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = block[WordOffset(kBits, lane, step * kWords + i)];
    }
  }

  /// Code i of the eight, or i + 2: which of them are an output's depends on the output.
  template <int i>
  MARLIN_DEVICE uint32_t Code(bool later) const {
    if constexpr (kKind == CodeKind::kDense16) {
      return (later ? words[i / 2 + 1] : words[i / 2]) >> (16 * (i % 2)) & 0xffffu;
    } else {
      const uint32_t code = CodeOf(kKind, words, i);
      const uint32_t next = CodeOf(kKind, words, i + 2);
      return later ? next : code;
    }
  }
};

/// Weights of a lane's four features of an output: k = 2 t, 2 t + 1, and eight further.
template <CodeKind kKind>
MARLIN_DEVICE float4 StepWeights(const TileView& view, const uint8_t* tile, int n, int lane) {
  const int step = lane / 4 % 4;
  const int block = lane / 16 * 2 + n % kStripOutputs / 16;
  const StepCodes<kKind> codes(
      reinterpret_cast<const uint32_t*>(tile + block * BlockBytes(CodeBits(kKind))),
      n % 8 * 4 + lane % 4, step);
  const bool later = n % 16 >= 8;
  const uint32_t of[4] = {codes.template Code<0>(later), codes.template Code<1>(later),
                          codes.template Code<4>(later), codes.template Code<5>(later)};
  float weights[4];
  if constexpr (kKind == CodeKind::kDense16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = view.bf16_codes ? __uint_as_float(of[i] << 16) : F16x2::Unpack(of[i]).x;
    }
  } else {
    const int group = lane / 4 * view.groups_per_tile / 8;
    const auto* const parameters = reinterpret_cast<const uint16_t*>(
        tile + TileCodeBytes(CodeBits(kKind)) + group * kGroupBytes + n % 8 * 8 +
        n % kStripOutputs / 8 * 2);
    const uint32_t second =
        view.zero_kind == ZeroKind::kNone ? 0 : parameters[view.groups_per_tile * kGroupBytes / 2];
    const WeightParameters of_group = ParametersOf(view, parameters[0], second);
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = WeightOf(view, view.values[of[i]], of_group);
  }
  return {weights[0], weights[1], weights[2], weights[3]};
}

/// Weights k and k + 1 of a row that begins at element `at`.
MARLIN_DEVICE void StoreWeights(const LookUpWeightsArguments& args, int64_t at, int64_t k,
                                float first, float second) {
  if (args.pairs && k + 1 < args.columns) {
    WithType(args.out.type, [&](auto type) {
      StorePair(static_cast<decltype(type)*>(args.out.data) + at + k, first, second);
    });
    return;
  }
  if (k < args.columns) StoreFloat(args.out.data, args.out.type, at + k, first);
  if (k + 1 < args.columns) StoreFloat(args.out.data, args.out.type, at + k + 1, second);
}

/// blockIdx.x: row; blockIdx.y and the warps: tiles. A lane has four features, of one step of 16 k.
template <CodeKind kKind>
__global__ void __launch_bounds__(kLookUpThreads)
    LookUpTilesKernel(const TileView view, const __grid_constant__ LookUpWeightsArguments args) {
  EnterChain();
  const auto n = static_cast<int>(OutputOfRow(args));
  if (n < 0) return;
  constexpr int kWarps = kLookUpThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t at = args.out.At(blockIdx.x);
  for (auto tile = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
       tile < view.tiles_of_strip; tile += static_cast<int>(gridDim.y) * kWarps) {
    const float4 weights =
        StepWeights<kKind>(view, view.tiles + TileOffset(view, n / kStripOutputs, tile), n, lane);
    const int64_t k = int64_t{tile} * kTileK + lane / 4 * 16 + lane % 4 * 2;
    StoreWeights(args, at, k, weights.x, weights.y);
    StoreWeights(args, at, k + 8, weights.z, weights.w);
  }
}

/// blockIdx.x: row; blockIdx.y and the threads: features.
template <typename Reader>
__global__ void __launch_bounds__(kLookUpThreads)
    LookUpWeightsKernel(const Reader reader, const __grid_constant__ LookUpWeightsArguments args) {
  EnterChain();
  const int64_t id = OutputOfRow(args);
  if (id < 0) return;
  const int64_t at = args.out.At(blockIdx.x);
  for (int64_t k = static_cast<int64_t>(blockIdx.y) * kLookUpThreads + threadIdx.x;
       k < args.columns; k += static_cast<int64_t>(gridDim.y) * kLookUpThreads) {
    StoreFloat(args.out.data, args.out.type, at + k,
               reader.Weight(static_cast<int>(k), static_cast<int>(id)));
  }
}

}  // namespace marlin::cuda
