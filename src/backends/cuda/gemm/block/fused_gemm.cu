// marlin_gemm_fused_fp4, marlin_gemm_fused_u4, marlin_gemm_w4: weights are loaded from device
// memory into registers and decoded there into operands of mma.m16n8k16; shared memory holds none.
//
//   C[m, n] = epilogue(sum over k of A[m, k] * W[k, n])    CTA tiles of 64 tokens x 64 outputs (see
//                                                          block_gemm.cuh), steps of 64 k
//                        step s     s + 1     s + 2     s + 3
//   registers           [codes]   [codes]   [codes]   [codes]     per warp 32 outputs x 32 k, per
//   shared memory       [A, scales] ...                           lane 4 words; cp.async
//                       multiplied  in flight
//
//   Intra-CTA split-K: two warps have all tokens and the same 32 outputs, and each takes half of a
//   step's k, so that only one warp loads and decodes a weight. A pipeline of four stages with one
//   barrier per step: after it, the step's data have arrived and the previous step has been
//   multiplied, so the copies of the step three ahead may reuse its stage. In flight per CTA: three
//   steps of 8 KiB of activations, 2 KiB of codes and their scales. Shared memory: 4 x (9 KiB of A,
//   1 KiB of scales and zeros) = 40 KiB, reused for 34 KiB of sums.
//
//   Codes are in the tiled layout (tile_layout.h) or the marlin_w4 layout (marlin_w4.cuh).
//
// Error model: weights rounded up to three times (scale, zero or table value, product), fp32 MMA
// accumulation; the same as for every kernel with tiled weights. A row's sum accumulates k in
// order, 16 at a time, and depends neither on m nor on the row's position.
#include "backends/cuda/common/marlin_w4.cuh"
#include "backends/cuda/gemm/block/block_gemm.cuh"

namespace marlin::cuda {
namespace {

constexpr int kStages = 4;
constexpr int kTokenBytes = kBlockTile * RowBytesOfStep(kFusedStep);
constexpr int kK16Steps = kFusedStep / 16;  ///< k16 steps in a step; each has a parameter row.
constexpr int kParameterRowBytes = kBlockTile * 2;
constexpr int kParameterBytes = kK16Steps * kParameterRowBytes;
constexpr int kStageBytes = kTokenBytes + 2 * kParameterBytes;  ///< A, scales, zeros or biases.
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kSharedBytes >= 2 * kBlockSumBytes);

constexpr int kN8Tiles = 8;
using Place = BlockPlace<kN8Tiles>;
using Sums = BlockSums<kN8Tiles>;

/// One lane's codes of a warp's 32 outputs x 32 k: word 2 j + r holds k16 step j of outputs 16 r.
using Codes = uint32_t[4];

/// Weights in the tiled layout.
template <CodeKind kKind>
struct TileSource {
  const TileView& view;

  MARLIN_DEVICE explicit TileSource(const BlockArguments& args) : view(args.weights.codes) {}

  /// Loads half `half` of a step's k.
  MARLIN_DEVICE void Load(int strip, int step, int half, int lane, Codes& codes) const {
    const uint8_t* from = Tile(strip, step) + step % 2 * 2 * BlockBytes(4) + lane * 16 + half * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from + r * BlockBytes(4)));
      codes[r] = v.x;
      codes[2 + r] = v.y;
    }
  }
  /// The scales of an n-tile for k16 step `k16_step`, or (`second`) its zeros or biases.
  MARLIN_DEVICE const uint8_t* Parameters(int strip, int step, int k16_step, bool second) const {
    const int groups = view.groups_per_tile;
    const int group = (step % 2 * kK16Steps + k16_step) * groups / 8 + (second ? groups : 0);
    return Tile(strip, step) + TileCodeBytes(4) + group * kGroupBytes;
  }
  template <typename T>
  static MARLIN_DEVICE void Decode(uint32_t word, const DecodeTable<kKind, T>& table,
                                   const uint32_t (&offset)[2], uint32_t (&pairs)[4]) {
    const uint32_t words[4] = {word, 0, 0, 0};
    FragmentDecoder<kKind, T>::Decode(words, 0, table, offset, pairs);
  }

 private:
  MARLIN_DEVICE const uint8_t* Tile(int strip, int step) const {
    return view.tiles + TileOffset(view, strip, step / 2);
  }
};

/// Weights in the marlin_w4 layout.
template <CodeKind kKind>
struct MarlinW4Source {
  const MarlinW4View& view;
  int strips;
  int blocks;  ///< Along k.

  MARLIN_DEVICE explicit MarlinW4Source(const BlockArguments& args)
      : view(args.weights),
        strips((view.codes.n + kW4Block - 1) / kW4Block),
        blocks((view.codes.k + kW4Block - 1) / kW4Block) {}

  MARLIN_DEVICE void Load(int strip, int step, int half, int lane, Codes& codes) const {
    const int block = 2 * step + half;
    // Beyond the matrix any finite value will do, because it is multiplied by zero or not stored;
    // code 0 decodes to one.
    uint4 v = {0, 0, 0, 0};
    if (strip < strips && block < blocks) {
      const int64_t at = (static_cast<int64_t>(block) * strips + strip) * 32 + lane;
      v = __ldg(reinterpret_cast<const uint4*>(view.codes.tiles) + at);
    }
    codes[0] = v.x;
    codes[1] = v.y;
    codes[2] = v.z;
    codes[3] = v.w;
  }
  MARLIN_DEVICE const uint8_t* Parameters(int strip, int step, int k16_step, bool second) const {
    const int k = step * kFusedStep + k16_step * 16;
    const int64_t group = min(k / view.group_size, view.groups - 1) + (second ? view.groups : 0);
    return view.parameters + (group * strips + min(strip, strips - 1)) * kW4GroupBytes;
  }
  template <typename T>
  static MARLIN_DEVICE void Decode(uint32_t word, const DecodeTable<kKind, T>& table,
                                   const uint32_t (&offset)[2], uint32_t (&pairs)[4]) {
    DecodeW4<kKind, T>(word, table, offset, pairs);
  }
};

/// Starts the async copies of a step's parameters, 16 bytes per thread.
template <typename Source>
MARLIN_DEVICE void CopyParameters(const Source& source, const Place& place, int step, bool seconds,
                                  uint32_t to) {
  constexpr int kChunks = kGroupBytes / 16;  // Per n-tile.
  const int i = static_cast<int>(threadIdx.x);
  const int strip = i / kChunks % 2;
  const int k16_step = i / kChunks / 2 % kK16Steps;
  const bool second = i >= kParameterBytes / 16;
  if (i >= 2 * kParameterBytes / 16 || (second && !seconds)) return;
  const uint8_t* from =
      source.Parameters(place.first_output / kStripOutputs + strip, step, k16_step, second);
  CopyAsync16(to + i * 16, from + i % kChunks * 16, 16);
}

/// A warp's MMAs of its half of a step.
template <typename Source, CodeKind kKind, typename T, ParameterUse kUse>
struct FusedProduct {
  const ParameterMode& mode;
  const DecodeTable<kKind, T>& table;
  int groups;  ///< Per weight tile.

  MARLIN_DEVICE void Add(const Codes& codes, uint32_t stage, const Place& place, Sums& sums) const {
    const uint32_t parameters = stage + kTokenBytes + place.half * 2 * kParameterRowBytes +
                                place.strip_of_block * kGroupBytes + place.lane / 4 * 8;
    uint32_t weights[2][2][4];
    GroupOperands operands[2];
    LoadOperands(parameters, operands);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Only groups of 16 begin within a warp's 32 k.
      if (j == 1 && groups == 8) LoadOperands(parameters + kParameterRowBytes, operands);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Source::template Decode<T>(codes[2 * j + r], table, operands[r].offset, weights[j][r]);
        ScaleFragment<kKind, T, kUse>(mode, operands[r], weights[j][r]);
      }
    }
    // Lane l passes ldmatrix the row of token l % 8 in matrix l / 8, which has 8 k.
    const uint32_t row = stage + place.half * 64 + (place.lane & 7) * RowBytesOfStep(kFusedStep) +
                         (place.lane >> 3) * 16;
#pragma unroll
    for (int e = 0; e < kN8Tiles; ++e) {
      if (e >= place.n8_tiles) break;
      uint32_t tokens[4];
      LoadMatrices(tokens, row + e * 8 * RowBytesOfStep(kFusedStep));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          MultiplyAdd<T>(sums[r][e], weights[j][r], tokens[2 * j], tokens[2 * j + 1]);
        }
      }
    }
  }

 private:
  MARLIN_DEVICE void LoadOperands(uint32_t address, GroupOperands (&operands)[2]) const {
    const uint2 scales = LoadShared8(address);
    uint2 zeros = {0, 0};
    if (mode.integer_zeros || (kUse == ParameterUse::kAll && mode.extra != ZeroKind::kNone)) {
      zeros = LoadShared8(address + kParameterBytes);
    }
    MakeOperands<kKind, T, kUse>(scales.x, zeros.x, mode, operands[0]);
    MakeOperands<kKind, T, kUse>(scales.y, zeros.y, mode, operands[1]);
  }
};

template <template <CodeKind> typename Source, CodeKind kKind, typename T, ParameterUse kUse>
__global__ void __launch_bounds__(kBlockThreads)
    FusedGemmKernel(const __grid_constant__ BlockArguments args) {
  __shared__ __align__(16) uint8_t shared[kSharedBytes];
  const uint32_t base = SharedAddress(shared);
  const Place place(args, blockIdx.x);
  const Source<kKind> source(args);
  const TileView& view = args.weights.codes;
  const DecodeTable<kKind, T> table(view);
  const ParameterMode mode = ParameterModeOf<kKind, T>(view);
  const FusedProduct<Source<kKind>, kKind, T, kUse> product{mode, table, view.groups_per_tile};
  const int steps = args.plan.steps;
  Codes codes[kStages];
  // Commits one cp.async group per step, even beyond the last step, so that the count of groups in
  // flight identifies a step.
  const auto fetch = [&](int step, int slot) {
    if (step < steps) {
      const uint32_t stage = base + slot * kStageBytes;
      CopyTokens<kFusedStep>(args, place, step, stage);
      CopyParameters(source, place, step, view.zero_kind != ZeroKind::kNone, stage + kTokenBytes);
      source.Load(place.strip(), step, place.half, place.lane, codes[slot]);
    }
    CommitCopies();
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(s, s);
  Sums sums = {};
#pragma unroll 1
  for (int first = 0; first < steps; first += kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (first + s >= steps) break;
      WaitForCopies<kStages - 2>();
      __syncthreads();
      fetch(first + s + kStages - 1, (s + kStages - 1) % kStages);
      product.Add(codes[s], base + s * kStageBytes, place, sums);
    }
  }
  __syncthreads();
  FinishBlock(args, place, 0, sums, reinterpret_cast<float*>(shared));
}

template <template <CodeKind> typename Source, CodeKind kKind>
const void* FunctionFor(bool bf16, bool extras) {
  constexpr ParameterUse kAll = ParameterUse::kAll;
  constexpr ParameterUse kScales = ParameterUse::kScales;
  if (bf16) {
    return extras ? reinterpret_cast<const void*>(&FusedGemmKernel<Source, kKind, Bf16x2, kAll>)
                  : reinterpret_cast<const void*>(&FusedGemmKernel<Source, kKind, Bf16x2, kScales>);
  }
  return extras ? reinterpret_cast<const void*>(&FusedGemmKernel<Source, kKind, F16x2, kAll>)
                : reinterpret_cast<const void*>(&FusedGemmKernel<Source, kKind, F16x2, kScales>);
}

}  // namespace

const void* FusedFunction(BlockKernel kernel, CodeKind kind, bool bf16, bool extras) {
  if (kernel == BlockKernel::kFused) {
    return kind == CodeKind::kFp4 ? FunctionFor<TileSource, CodeKind::kFp4>(bf16, extras)
                                  : FunctionFor<TileSource, CodeKind::kInt4>(bf16, extras);
  }
  switch (kind) {
    case CodeKind::kFp4:
      return FunctionFor<MarlinW4Source, CodeKind::kFp4>(bf16, extras);
    case CodeKind::kInt4:
      return FunctionFor<MarlinW4Source, CodeKind::kInt4>(bf16, extras);
    default:
      return FunctionFor<MarlinW4Source, CodeKind::kTable4>(bf16, extras);
  }
}

}  // namespace marlin::cuda
