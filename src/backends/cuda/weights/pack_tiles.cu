// Packs k-packed words into tiles on the device, for Prepare.
#include "backends/cuda/common/weight_reader.cuh"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/sparse_packing.cuh"
#include "backends/cuda/weights/weights_launch.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;  // One warp per fragment block, one CTA per tile.

template <CodeKind kKind>
__device__ void PackBlock(const CanonicalReader& from, uint32_t* block, int lane, int first_k,
                          int first_n) {
  const int g = lane / 4;
  const int t = lane % 4;
  constexpr int kWords = CodeBits(kKind);
  uint32_t words[kWords] = {};
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    const int pair = i % 8 / 2;
    const int n = first_n + g + 8 * (pair & 1);
    const int k = first_k + 16 * (i / 8) + 2 * t + 8 * (pair >> 1) + i % 2;
    const bool inside = n < from.view.n && k < from.view.k;
    if constexpr (kKind == CodeKind::kDense16) {
      const auto* numbers = reinterpret_cast<const uint16_t*>(from.view.words);
      const uint32_t number =
          inside ? numbers[static_cast<int64_t>(k) * from.view.n + n] : uint16_t{0};
      words[i / 2] |= number << (16 * (i % 2));
    } else {
      codes[i] = inside ? static_cast<uint8_t>(from.Code(k, n)) : uint8_t{0};
    }
  }
  if constexpr (kKind != CodeKind::kDense16) EncodeWords<kKind>(codes, words);
  for (int i = 0; i < kWords; ++i) block[WordOffset(kWords, lane, i)] = words[i];
}

/// A normalized scale or bias, or a zero, in 16 bits. Exact: Prepare tiles no weights that would
/// round here.
__device__ uint16_t PackParameter(float value, bool bf16) {
  if (bf16) return static_cast<uint16_t>(__float_as_uint(value) >> 16);
  return __half_as_ushort(__float2half_rn(value));
}

__device__ void PackParameters(const PackJob& job, uint16_t* parameters, int tile_k, int first_n) {
  const int groups = job.to.groups_per_tile;
  const int count = groups * kStripOutputs;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int group = i / kStripOutputs;
    const int n = first_n + i % kStripOutputs / 4 + i % 4 * 8;
    const int k = tile_k * kTileK + group * (kTileK / groups);
    const bool inside = n < job.from.n && k < job.from.k;
    const int64_t at = inside ? k / job.from.group_size * job.from.n + n : 0;
    const float scale = inside ? LoadFloat(job.from.scales, job.from.scale_type, at) : 0.0f;
    parameters[i] = PackParameter(scale * job.scale_factor, job.to.bf16_parameters);
    if (job.to.zero_kind == ZeroKind::kZeros) {
      const float zero = inside ? LoadFloat(job.from.zeros, job.from.zero_type, at) : 0.0f;
      parameters[count + i] = PackParameter(zero, false);
    } else if (job.to.zero_kind == ZeroKind::kBiases) {
      const float bias = inside ? LoadFloat(job.from.biases, job.from.bias_type, at) : 0.0f;
      parameters[count + i] = PackParameter(bias * job.scale_factor, job.to.bf16_parameters);
    }
  }
}

template <CodeKind kKind>
__global__ void __launch_bounds__(kThreads) PackTilesKernel(PackJob job) {
  const int strip = static_cast<int>(blockIdx.x);
  const int tile = static_cast<int>(blockIdx.y);
  uint8_t* out = job.tiles + TileOffset(job.to, strip, tile);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kBits = CodeBits(kKind);
  const CanonicalReader from{job.from};
  PackBlock<kKind>(from, reinterpret_cast<uint32_t*>(out + warp * BlockBytes(kBits)), lane,
                   tile * kTileK + warp / 2 * 64, strip * kStripOutputs + warp % 2 * 16);
  if constexpr (kKind != CodeKind::kDense16) {
    PackParameters(job, reinterpret_cast<uint16_t*>(out + TileCodeBytes(kBits)), tile,
                   strip * kStripOutputs);
  }
}

/// Warps 0 and 1 pack the codes of 16 outputs each, warps 2 and 3 two steps of metadata each.
template <CodeKind kKind>
__global__ void __launch_bounds__(kThreads) PackSparseTilesKernel(PackJob job) {
  const int strip = static_cast<int>(blockIdx.x);
  const int tile = static_cast<int>(blockIdx.y);
  uint8_t* out = job.tiles + TileOffset(job.to, strip, tile);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_n = strip * kStripOutputs;
  const SparseSource from = {job.from.words, job.metadata,
                             (job.from.k + kSparseStepK - 1) / kSparseStepK * (kSparseStepK / 4),
                             job.from.n};
  if (warp < 2) {
    uint32_t words[kSparseBits];
    PackKept<kKind>(from, lane, tile * kBlocksOfTile, first_n + 16 * warp, words);
    auto* const block = reinterpret_cast<uint32_t*>(out + warp * BlockBytes(kSparseBits));
    for (int i = 0; i < kSparseBits; ++i) block[WordOffset(kSparseBits, lane, i)] = words[i];
  } else {
    auto* const metadata = reinterpret_cast<uint32_t*>(out + kMetadataOffset);
    for (int step = 2 * (warp - 2); step < 2 * (warp - 1); ++step) {
      metadata[lane * kStepsOfTile + step] =
          PackNibbles(from, lane, step, tile * kBlocksOfTile, first_n);
    }
  }
  PackParameters(job, reinterpret_cast<uint16_t*>(out + kSparseTileBytes), tile, first_n);
}

}  // namespace

cudaError_t LaunchPackTiles(const PackJob& job, cudaStream_t stream) {
  const int strips =
      (job.from.n + kBlockOutputs - 1) / kBlockOutputs * (kBlockOutputs / kStripOutputs);
  const int tiles = (job.from.k + kTileK - 1) / kTileK;
  const dim3 grid(static_cast<unsigned>(strips), static_cast<unsigned>(tiles));
  return VisitKind(job.kind, [&](auto kind) {
    constexpr CodeKind kKind = kind;
    if (job.metadata == nullptr) {
      PackTilesKernel<kKind><<<grid, kThreads, 0, stream>>>(job);
      return cudaGetLastError();
    }
    if constexpr (kinds::kSparse.Has(kKind)) {
      PackSparseTilesKernel<kKind><<<grid, kThreads, 0, stream>>>(job);
      return cudaGetLastError();
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace marlin::cuda
