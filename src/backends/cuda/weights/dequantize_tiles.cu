// Dequantizes tiles to W[k, n], in fp32 as numerics.md defines weights, rounding each once.
//
//             32 outputs
//          +-----------+    A warp takes a tile, 8 k at a time: lane 4 g + t holds rows 2 t and
//        8 |   warp    |    2 t + 1 of outputs g, g + 8, g + 16 and g + 24. After transposing each
//        k |           |    8 x 8 matrix it holds row g of outputs 2 t and 2 t + 1 of each n8 tile,
//          +-----------+    so that lanes t = 0..3 store whole sectors of the row.
//
// A CTA takes 8 tiles: 256 k of 128 outputs. The kernel is memory-bound: it reads the tiles and
// writes W once each.
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/common/weight_reader.cuh"
#include "backends/cuda/gemm/cublas/dense_fragments.cuh"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/weights_launch.h"

namespace marlin::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kN8Tiles = kStripOutputs / 8;  ///< 8 x 8 matrices across an n-tile.

/// The values of all codes of up to 8 bits, in shared memory.
template <CodeKind kKind>
struct Values {
  static constexpr int kCodes = kKind == CodeKind::kDense16 ? 1 : 1 << CodeBits(kKind);
  float of[kCodes];

  __device__ void Fill(const TileView& view) {
    if constexpr (kKind != CodeKind::kDense16) {
      for (int i = static_cast<int>(threadIdx.x); i < kCodes; i += static_cast<int>(blockDim.x)) {
        of[i] = view.values[i];
      }
    }
  }
};

/// The parameters of a tile's group for outputs g and g + 8 of 16 outputs.
MARLIN_DEVICE void ReadParameters(const TileView& view, const uint8_t* of_group, int r,
                                  WeightParameters (&parameters)[2]) {
  const uint32_t scales = __ldg(reinterpret_cast<const uint32_t*>(of_group + 4 * r));
  uint32_t seconds = 0;
  if (view.zero_kind != ZeroKind::kNone) {
    seconds = __ldg(
        reinterpret_cast<const uint32_t*>(of_group + view.groups_per_tile * kGroupBytes + 4 * r));
  }
  parameters[0] = ParametersOf(view, scales & 0xffffu, seconds & 0xffffu);
  parameters[1] = ParametersOf(view, scales >> 16, seconds >> 16);
}

/// Weight `i` of a lane's 32 in a fragment block.
template <CodeKind kKind>
MARLIN_DEVICE float Weight(const TileView& view, const uint32_t (&words)[CodeBits(kKind)], int i,
                           const WeightParameters& parameters, const Values<kKind>& values) {
  if constexpr (kKind == CodeKind::kDense16) {
    const uint32_t bits = i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16;
    return view.bf16_codes ? __uint_as_float(bits << 16) : F16x2::Unpack(bits).x;
  } else {
    return WeightOf(view, values.of[CodeOf(kKind, words, i)], parameters);
  }
}

/// A lane's weights in eight rows of k, [n8 tile][k 2 t and 2 t + 1]; `first` is the index of the
/// first among the lane's 32 in a fragment block.
template <CodeKind kKind>
MARLIN_DEVICE void WeightsOfRows(const TileView& view, const uint32_t (&words)[2][CodeBits(kKind)],
                                 int first, const WeightParameters (&parameters)[2][2],
                                 const Values<kKind>& values, float (&weights)[kN8Tiles][2]) {
#pragma unroll
  for (int i = 0; i < kN8Tiles; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      weights[i][e] = Weight<kKind>(view, words[i / 2], first + i % 2 * 2 + e,
                                    parameters[i / 2][i % 2], values);
    }
  }
}

/// Stores eight rows of k of an n-tile; `weights` is the result of WeightsOfRows. `aligned`: every
/// eighth output of a row is at a multiple of 16 bytes.
MARLIN_DEVICE void StoreRows(const TileView& view, const DenseView& out, int k, int n, int lane,
                             bool aligned, const float (&weights)[kN8Tiles][2]) {
  const int t = lane & 3;
  k += lane >> 2;
  const bool inside = k < view.k;
  if (out.type == Element::kF32) {
    float* const row = static_cast<float*>(out.data) + k * out.row_stride;
#pragma unroll
    for (int i = 0; i < kN8Tiles; ++i) {
      const uint32_t bits[2] = {__float_as_uint(weights[i][0]), __float_as_uint(weights[i][1])};
      const uint32_t low = TurnMatrix(__byte_perm(bits[0], bits[1], 0x5410));
      const uint32_t high = TurnMatrix(__byte_perm(bits[0], bits[1], 0x7632));
      const float2 pair = {__uint_as_float(__byte_perm(low, high, 0x5410)),
                           __uint_as_float(__byte_perm(low, high, 0x7632))};
      const int at = n + 8 * i + 2 * t;
      if (inside && aligned && at + 2 <= view.n) {
        *reinterpret_cast<float2*>(row + at) = pair;
      } else if (inside) {
        if (at < view.n) row[at * out.column_stride] = pair.x;
        if (at + 1 < view.n) row[(at + 1) * out.column_stride] = pair.y;
      }
    }
    return;
  }
  uint32_t pairs[kN8Tiles];
#pragma unroll
  for (int i = 0; i < kN8Tiles; ++i) {
    pairs[i] = TurnMatrix(out.type == Element::kBf16 ? Bf16x2::Pack(weights[i][0], weights[i][1])
                                                     : F16x2::Pack(weights[i][0], weights[i][1]));
  }
  TransposeLanes(pairs, t);
  uint16_t* const row = static_cast<uint16_t*>(out.data) + k * out.row_stride;
  const int at = n + 8 * t;
  if (!inside) return;
  if (aligned && at + 8 <= view.n) {
    *reinterpret_cast<uint4*>(row + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto weight = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
    if (at + i < view.n) row[(at + i) * out.column_stride] = weight;
  }
}

template <CodeKind kKind>
__global__ void __launch_bounds__(32 * kWarps)
    DequantizeTilesKernel(TileView view, DenseView out, bool aligned, int64_t tiles) {
  constexpr int kBits = CodeBits(kKind);
  __shared__ Values<kKind> values;
  values.Fill(view);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= tiles) return;
  // In memory order: the four n-tiles of a block of outputs, then the next tile of k.
  const int64_t column = index / kStripsOfBlock;
  const int tile = static_cast<int>(column % view.tiles_of_strip);
  const int strip =
      static_cast<int>(column / view.tiles_of_strip * kStripsOfBlock + index % kStripsOfBlock);
  const uint8_t* const from = view.tiles + index * view.tile_bytes;
  const uint8_t* const stored = from + TileCodeBytes(kBits) + (lane >> 2) * 8;
  WeightParameters parameters[2][2];
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    uint32_t words[2][kBits];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ReadWords<kBits>(from + (half * 2 + r) * BlockBytes(kBits), lane, words[r]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kKind != CodeKind::kDense16 && (j == 0 || view.groups_per_tile > 2)) {
        const int group = ((half * 4 + j) * view.groups_per_tile) >> 3;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          ReadParameters(view, stored + group * kGroupBytes, r, parameters[r]);
        }
      }
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        float weights[kN8Tiles][2];
        WeightsOfRows<kKind>(view, words, j * 8 + octet * 4, parameters, values, weights);
        StoreRows(view, out, tile * kTileK + half * 64 + j * 16 + octet * 8, strip * kStripOutputs,
                  lane, aligned, weights);
      }
    }
  }
}

template <CodeKind kKind>
cudaError_t Launch(const TileView& view, const DenseView& out, cudaStream_t stream) {
  const int64_t blocks_of_outputs = (int64_t{view.n} + kBlockOutputs - 1) / kBlockOutputs;
  const int64_t tiles = blocks_of_outputs * kStripsOfBlock * view.tiles_of_strip;
  const auto blocks = static_cast<unsigned>((tiles + kWarps - 1) / kWarps);
  const int64_t row_bytes = out.row_stride * (out.type == Element::kF32 ? 4 : 2);
  const bool aligned = out.column_stride == 1 && row_bytes % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(out.data) % 16 == 0;
  DequantizeTilesKernel<kKind><<<blocks, 32 * kWarps, 0, stream>>>(view, out, aligned, tiles);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDequantizeTiles(const TileView& weights, CodeKind kind, const DenseView& out,
                                  cudaStream_t stream) {
  return VisitKind(kind, [&](auto of) { return Launch<of>(weights, out, stream); });
}

}  // namespace marlin::cuda
