// Expands tiles to rows of 16-bit numbers, W^T[n, k], the operand of a dense GEMM.
//
//   out[n, k] = the weight as the MMA operand of the other kernels (tile_layout.h): decoded, times
//   its normalised scale, at the same powers of two. So the sums have the same epilogue.
//
//             64 k                 A warp takes a fragment block of 16 outputs x 64 k: lane 4 g + t
//          +--------+              holds, of rows g and g + 8, the k 16 j + 2 t + {0, 1, 8, 9} of
//       16 | warp 0 | warp 2       four k16 steps j. Lanes t = 0..3 exchange them, so that lane t
//          +--------+------        has all 16 k of step t of both rows: 32 bytes of each. A CTA
//       16 | warp 1 | warp 3       takes kTilesOfBlock tiles of 32 x 128, a warp a fragment block.
//          +--------+
//
// No shared memory. Outputs beyond n and k beyond K (up to whole tiles) are written as zeros.
// Error model: as for the kernels with tiled weights, at most three roundings to the operand's
// type.
#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/gemm/cublas/dense_fragments.cuh"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/weights_launch.h"

namespace marlin::cuda {
namespace {

constexpr int kWarpsOfTile = 4;
constexpr int kTilesOfBlock = 2;
constexpr int kThreads = 32 * kWarpsOfTile * kTilesOfBlock;

/// The operands of the group that holds k16 step `step` of a tile's eight, for outputs 16 r.
template <CodeKind kKind, typename T>
MARLIN_DEVICE void ReadOperands(const uint8_t* parameters, int groups, int step, int r,
                                const ParameterMode& mode, GroupOperands& operands) {
  const uint8_t* const at = parameters + ((step * groups) >> 3) * kGroupBytes + 4 * r;
  const uint32_t scales = __ldg(reinterpret_cast<const uint32_t*>(at));
  uint32_t zeros = 0;
  if (mode.integer_zeros || mode.extra != ZeroKind::kNone) {
    zeros = __ldg(reinterpret_cast<const uint32_t*>(at + groups * kGroupBytes));
  }
  MakeOperands<kKind, T, ParameterUse::kAll>(scales, zeros, mode, operands);
}

template <CodeKind kKind, typename T>
__global__ void __launch_bounds__(kThreads)
    DenseRowsKernel(TileView view, uint16_t* out, int64_t tiles) {
  constexpr int kBits = CodeBits(kKind);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTilesOfBlock + warp / kWarpsOfTile;
  if (index >= tiles) return;
  const int strip = static_cast<int>(index / view.tiles_of_strip);
  const int tile = static_cast<int>(index % view.tiles_of_strip);
  const int half = warp % kWarpsOfTile / 2;
  const int r = warp % 2;
  const int g = lane >> 2;
  const int t = lane & 3;

  const uint8_t* const from = view.tiles + TileOffset(view, strip, tile);
  uint32_t words[kBits];
  ReadWords<kBits>(from + (half * 2 + r) * BlockBytes(kBits), lane, words);
  const DecodeTable<kKind, T> table(view);
  const ParameterMode mode = ParameterModeOf<kKind, T>(view);
  const uint8_t* const parameters = from + TileCodeBytes(kBits) + g * 8;
  GroupOperands operands = {};
  uint32_t pieces[4][4];  // [pair][step]
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (kKind != CodeKind::kDense16 && (j == 0 || view.groups_per_tile > 2)) {
      ReadOperands<kKind, T>(parameters, view.groups_per_tile, half * 4 + j, r, mode, operands);
    }
    uint32_t pairs[4];
    DecodeScaled<kKind, T, ParameterUse::kAll>(words, j, table, mode, operands, pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) pieces[p][j] = pairs[p];
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    TransposeLanes(pieces[p], t);
    const int64_t row = static_cast<int64_t>(strip) * kStripOutputs + 16 * r + g + 8 * (p & 1);
    const int k = tile * kTileK + half * 64 + 16 * t + 8 * (p >> 1);
    uint16_t* const to = out + row * (static_cast<int64_t>(view.tiles_of_strip) * kTileK) + k;
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pieces[p][0], pieces[p][1], pieces[p][2], pieces[p][3]);
  }
}

template <CodeKind kKind, typename T>
cudaError_t Launch(const TileView& view, void* out, cudaStream_t stream) {
  const int64_t strips = (int64_t{view.n} + kBlockOutputs - 1) / kBlockOutputs * kStripsOfBlock;
  const int64_t tiles = strips * view.tiles_of_strip;
  const auto blocks = static_cast<unsigned>((tiles + kTilesOfBlock - 1) / kTilesOfBlock);
  DenseRowsKernel<kKind, T>
      <<<blocks, kThreads, 0, stream>>>(view, static_cast<uint16_t*>(out), tiles);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDenseRows(const TileView& weights, CodeKind kind, bool bf16, void* out,
                            cudaStream_t stream) {
  return VisitKind(kind, [&](auto of) {
    return bf16 ? Launch<of, Bf16x2>(weights, out, stream)
                : Launch<of, F16x2>(weights, out, stream);
  });
}

}  // namespace marlin::cuda
