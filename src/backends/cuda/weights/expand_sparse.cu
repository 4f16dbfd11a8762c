// Expands sparse tiles to dense ones, for the kernels that read only those. Warps stream through
// the tiles in the order of memory; codes stay in pairs, because single codes would cost several
// times the time of the loads and stores.
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/expand_sparse.cuh"
#include "backends/cuda/weights/weights_launch.h"

namespace marlin::cuda {
namespace {

constexpr int kWarps = 8;          // In a CTA.
constexpr int kWarpsOfTile = 2;    // One for 16 outputs.
constexpr int kQuadBytes = 4 * 4;  // One vectorized load or store of a lane.

struct ExpandArguments {
  const uint8_t* from;
  uint8_t* to;
  int64_t tiles;
  int from_bytes;  ///< Size of a sparse tile.
  int to_bytes;
  uint32_t zeros;
};

MARLIN_DEVICE void LoadQuad(const uint8_t* from, int lane, uint32_t (&words)[kStepsOfTile]) {
  const uint4 quad = __ldg(reinterpret_cast<const uint4*>(from + lane * kQuadBytes));
  words[0] = quad.x;
  words[1] = quad.y;
  words[2] = quad.z;
  words[3] = quad.w;
}

template <CodeKind kKind>
__global__ void __launch_bounds__(32 * kWarps) ExpandSparseKernel(ExpandArguments args) {
  __shared__ uint16_t selectors[kSelectorCount];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kSelectorCount) selectors[thread] = static_cast<uint16_t>(SelectorOf(thread));
  __syncthreads();

  const int lane = thread % 32;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + thread / 32;
  const int64_t tile = warp / kWarpsOfTile;
  const int r = static_cast<int>(warp % kWarpsOfTile);
  if (tile >= args.tiles) return;
  const uint8_t* const in = args.from + tile * args.from_bytes;
  uint8_t* const out = args.to + tile * args.to_bytes;

  const int t = lane % 4;
  const int first = lane - t;
  SparseLane mine;
  const uint8_t* const kept = in + r * BlockBytes(kSparseBits);
  LoadQuad(kept, first + t / 2, mine.kept[0]);
  LoadQuad(kept, first + t / 2 + 2, mine.kept[1]);
  LoadQuad(in + kMetadataOffset, first + 2 * r, mine.metadata[0]);
  LoadQuad(in + kMetadataOffset, first + 2 * r + 1, mine.metadata[1]);

  uint32_t words[2 * kSparseBits];
  const auto selector = [&](uint32_t offset) -> uint32_t {
    return *reinterpret_cast<const uint16_t*>(reinterpret_cast<const uint8_t*>(selectors) + offset);
  };
  ExpandLane<kKind>(mine, t, args.zeros, selector, words);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint8_t* const block = out + (2 * half + r) * BlockBytes(kSparseBits);
    *reinterpret_cast<uint4*>(block + lane * kQuadBytes) =
        make_uint4(words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]);
  }

  // The parameters are the same: a warp copies every other quad.
  const auto* const stored = reinterpret_cast<const uint4*>(in + kSparseTileBytes);
  auto* const parameters = reinterpret_cast<uint4*>(out + TileCodeBytes(kSparseBits));
  const int quads = (args.from_bytes - kSparseTileBytes) / kQuadBytes;
  for (int i = kWarpsOfTile * lane + r; i < quads; i += kWarpsOfTile * 32) {
    parameters[i] = __ldg(stored + i);
  }
}

template <CodeKind kKind>
cudaError_t Launch(ExpandArguments args, uint32_t zero, cudaStream_t stream) {
  args.zeros = PairOf<kKind>(zero);
  const int64_t ctas = (args.tiles * kWarpsOfTile + kWarps - 1) / kWarps;
  ExpandSparseKernel<kKind><<<static_cast<unsigned>(ctas), 32 * kWarps, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchExpandSparse(const TileView& from, const TileView& to, CodeKind kind,
                               uint32_t zero, uint8_t* tiles, cudaStream_t stream) {
  const int64_t strips = int64_t{(from.n + kBlockOutputs - 1) / kBlockOutputs} * kStripsOfBlock;
  const ExpandArguments args = {from.tiles,      tiles,         strips * from.tiles_of_strip,
                                from.tile_bytes, to.tile_bytes, 0};
  return VisitKind(kind, [&](auto of) {
    constexpr CodeKind kKind = of;
    if constexpr (kinds::kSparse.Has(kKind)) return Launch<kKind>(args, zero, stream);
    return cudaErrorInvalidValue;
  });
}

}  // namespace marlin::cuda
