// The kernel of an embedding lookup in prepared weights: an output of the matrix [k = features,
// n = tokens] is a row.
#pragma once

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/weight_reader.cuh"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/rows/record_error.cuh"

namespace marlin::cuda {

inline constexpr int kLookUpThreads = 128;

/// out[r] = the weights of output ids[r].
struct LookUpWeightsArguments {
  IndexView ids;
  RowsView out;
  int64_t columns = 0;
  int64_t outputs = 0;
  ErrorView errors;
};

/// Reads single weights of tiles.
struct TileReader {
  TileView view;
  CodeKind kind;

  MARLIN_DEVICE float Weight(int k, int n) const {
    const int bits = CodeBits(kind);
    const uint8_t* const tile = view.tiles + TileOffset(view, n / kStripOutputs, k / kTileK);
    const int block = k % kTileK / 64 * 2 + n % kStripOutputs / 16;
    const auto* const words = reinterpret_cast<const uint32_t*>(tile + block * BlockBytes(bits));
    // The lane's place in the fragment, and the code's among the lane's 32 (tile_layout.h).
    const int lane = n % 8 * 4 + k % 8 / 2;
    const int pair = n % 16 / 8 + k % 16 / 8 * 2;
    const int code = k % 64 / 16 * 8 + pair * 2 + k % 2;
    uint32_t of_lane[16];
    for (int i = 0; i < bits; ++i) of_lane[i] = words[WordOffset(bits, lane, i)];
    if (kind == CodeKind::kDense16) {
      const uint32_t number = of_lane[code / 2] >> (16 * (code % 2)) & 0xffffu;
      return view.bf16_codes ? __uint_as_float(number << 16) : F16x2::Unpack(number).x;
    }
    const int group = k % kTileK / 16 * view.groups_per_tile / 8;
    const auto* const parameters = reinterpret_cast<const uint16_t*>(
        tile + TileCodeBytes(bits) + group * kGroupBytes + n % 8 * 8 + n % kStripOutputs / 8 * 2);
    const uint32_t second =
        view.zero_kind == ZeroKind::kNone ? 0 : parameters[view.groups_per_tile * kGroupBytes / 2];
    return WeightOf(view, view.values[CodeOf(kind, of_lane, code)],
                    ParametersOf(view, parameters[0], second));
  }
};

/// blockIdx.x: row; blockIdx.y and the threads: features.
template <typename Reader>
__global__ void __launch_bounds__(kLookUpThreads)
    LookUpWeightsKernel(const Reader reader, const __grid_constant__ LookUpWeightsArguments args) {
  EnterChain();
  const auto row = static_cast<int64_t>(blockIdx.x);
  const int64_t id = args.ids.At(row);
  if (id < 0 || id >= args.outputs) {
    if (threadIdx.x == 0) RecordError(args.errors, ValueError::kIds, id, row, args.outputs);
    return;
  }
  const int64_t at = args.out.At(row);
  for (int64_t k = static_cast<int64_t>(blockIdx.y) * kLookUpThreads + threadIdx.x;
       k < args.columns; k += static_cast<int64_t>(gridDim.y) * kLookUpThreads) {
    StoreFloat(args.out.data, args.out.type, at + k,
               reader.Weight(static_cast<int>(k), static_cast<int>(id)));
  }
}

}  // namespace marlin::cuda
