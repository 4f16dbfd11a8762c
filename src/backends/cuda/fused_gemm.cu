// marlin_gemm_fused_fp4, marlin_gemm_fused_u4, marlin_gemm_w4: weights go from device memory to
// registers and are decoded there into the operands of mma.m16n8k16; shared memory holds none.
//
//   C[m, n] = epilogue(sum over k of A[m, k] * W[k, n])     blocks of 64 tokens x 64 outputs (see
//                                                           block_gemm.cuh), steps of 64 k
//                        step s     s + 1     s + 2     s + 3
//   registers           [codes]   [codes]   [codes]   [codes]     32 outputs x 64 k a warp, 8 words
//   shared memory       [A, scales] ...                           a lane; cp.async
//                       multiplied  on their way
//
//   A ring of four steps: a barrier a step says that a step has come and that the one before it has
//   been multiplied, whose place the step three further on takes. In flight per thread block: three
//   steps of 8 KiB of activations, 2 KiB of codes and their scales. Both warps of an output half
//   decode the same codes, which the second finds in the cache; up to 32 tokens it has nothing to
//   do and reads none. Shared memory: 4 x (9 KiB of A, 1 KiB of scales and zeros) = 40 KiB.
//
//   Codes lie in tiles (tile_layout.h) or in the marlin_w4 layout (marlin_w4.cuh).
//
// Error model: weights rounded up to three times (scale, zero or table value, product), fp32 sums
// of the matrix unit; the same as of every kernel on tiles. A row's sum takes k in order, 16 at a
// time, and depends neither on m nor on its place.
#include "backends/cuda/block_gemm.cuh"
#include "backends/cuda/marlin_w4.cuh"

namespace marlin::cuda {
namespace {

constexpr int kStages = 4;
constexpr int kTokenBytes = kBlockTile * RowBytesOfStep(kFusedStep);
constexpr int kSixteens = kFusedStep / 16;  ///< Of k in a step; each has its row of parameters.
constexpr int kParameterRowBytes = kBlockTile * 2;
constexpr int kParameterBytes = kSixteens * kParameterRowBytes;
constexpr int kStageBytes = kTokenBytes + 2 * kParameterBytes;  ///< Scales, then zeros or biases.
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kSharedBytes >= kBlockSumBytes);

/// Codes of a warp's 32 outputs x 64 k, one lane's.
using Codes = uint32_t[8];

MARLIN_DEVICE void LoadQuad(const void* from, int at, Codes& codes) {
  const uint4 v = __ldg(static_cast<const uint4*>(from));
  codes[at] = v.x;
  codes[at + 1] = v.y;
  codes[at + 2] = v.z;
  codes[at + 3] = v.w;
}

/// Weights in tiles: words 4 r + j are of outputs 16 r and step j of 16 k.
template <CodeKind kKind>
struct TileSource {
  const TileView& view;

  MARLIN_DEVICE explicit TileSource(const BlockArguments& args) : view(args.weights.codes) {}

  MARLIN_DEVICE void Load(int strip, int step, int lane, Codes& codes) const {
    const uint8_t* half = Half(strip, step) + step % 2 * 2 * BlockBytes(4) + lane * 16;
    LoadQuad(half, 0, codes);
    LoadQuad(half + BlockBytes(4), 4, codes);
  }
  /// The scales of a strip's sixteenth of k, or what lies beside them.
  MARLIN_DEVICE const uint8_t* Parameters(int strip, int step, int sixteen, bool second) const {
    const int groups = view.groups_per_tile;
    const int group = (step % 2 * kSixteens + sixteen) * groups / 8 + (second ? groups : 0);
    return Half(strip, step) + TileCodeBytes(4) + group * kGroupBytes;
  }
  template <typename T>
  MARLIN_DEVICE void Decode(const Codes& codes, int j, int r, const DecodeTable<kKind, T>& table,
                            const uint32_t (&offset)[2], uint32_t (&pairs)[4]) const {
    const uint32_t words[4] = {codes[4 * r + j], 0, 0, 0};
    FragmentDecoder<kKind, T>::Decode(words, 0, table, offset, pairs);
  }

 private:
  MARLIN_DEVICE const uint8_t* Half(int strip, int step) const {
    return view.tiles + TileOffset(view, strip, step / 2);
  }
};

/// Weights in the marlin_w4 layout: words 2 j + r.
template <CodeKind kKind>
struct MarlinW4Source {
  const MarlinW4View& view;
  int strips;
  int blocks;  ///< Along k.

  MARLIN_DEVICE explicit MarlinW4Source(const BlockArguments& args)
      : view(args.weights),
        strips((view.codes.n + kW4Block - 1) / kW4Block),
        blocks((view.codes.k + kW4Block - 1) / kW4Block) {}

  MARLIN_DEVICE void Load(int strip, int step, int lane, Codes& codes) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block = 2 * step + i;
      // Beyond the matrix any number does, for it is multiplied with zeros or not stored; code 0
      // decodes to one.
      codes[4 * i] = codes[4 * i + 1] = codes[4 * i + 2] = codes[4 * i + 3] = 0;
      if (strip < strips && block < blocks) {
        const int64_t at = (static_cast<int64_t>(block) * strips + strip) * 32 + lane;
        LoadQuad(view.codes.tiles + at * 16, 4 * i, codes);
      }
    }
  }
  MARLIN_DEVICE const uint8_t* Parameters(int strip, int step, int sixteen, bool second) const {
    const int k = step * kFusedStep + sixteen * 16;
    const int64_t group = min(k / view.group_size, view.groups - 1) + (second ? view.groups : 0);
    return view.parameters + (group * strips + min(strip, strips - 1)) * kW4GroupBytes;
  }
  template <typename T>
  MARLIN_DEVICE void Decode(const Codes& codes, int j, int r, const DecodeTable<kKind, T>& table,
                            const uint32_t (&offset)[2], uint32_t (&pairs)[4]) const {
    DecodeW4<kKind, T>(codes[2 * j + r], table, offset, pairs);
  }
};

/// Starts the copies of a step's parameters, 16 bytes a thread.
template <typename Source>
MARLIN_DEVICE void CopyParameters(const Source& source, const BlockPlace& place, int step,
                                  bool seconds, uint32_t to) {
  constexpr int kChunks = kGroupBytes / 16;  // Of a strip.
  const int i = static_cast<int>(threadIdx.x);
  const int strip = i / kChunks % 2;
  const int sixteen = i / kChunks / 2 % kSixteens;
  const bool second = i >= kParameterBytes / 16;
  if (i >= 2 * kParameterBytes / 16 || (second && !seconds)) return;
  const uint8_t* from =
      source.Parameters(place.first_output / kStripOutputs + strip, step, sixteen, second);
  CopyAsync16(to + i * 16, from + i % kChunks * 16, 16);
}

/// One step's products of a warp.
template <template <CodeKind> typename Source, CodeKind kKind, typename T, ParameterUse kUse>
struct FusedStep {
  const Source<kKind>& source;
  const ParameterMode& mode;
  const DecodeTable<kKind, T>& table;
  int groups;  ///< Of a tile.

  MARLIN_DEVICE void Multiply(const Codes& codes, uint32_t stage, const BlockPlace& place,
                              BlockSums& sums) const {
    const uint32_t parameters =
        stage + kTokenBytes + place.strip_of_block * kGroupBytes + place.lane / 4 * 8;
    GroupOperands operands[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto weights = [&](int step, int r, uint32_t(&pairs)[4]) {
        const int j = half * 2 + step;
        // A group begins with the first of its 16 k; steps of 64 begin one or repeat it.
        if (r == 0 && (j * groups) % 8 < groups) {
          LoadOperands(parameters + j * kParameterRowBytes, operands);
        }
        source.template Decode<T>(codes, j, r, table, operands[r].offset, pairs);
        ScaleFragment<kKind, T, kUse>(mode, operands[r], pairs);
      };
      MultiplyBlock<T, kFusedStep>(stage + half * 64, place, weights, sums);
    }
  }

 private:
  MARLIN_DEVICE void LoadOperands(uint32_t address, GroupOperands (&operands)[2]) const {
    const uint2 scales = LoadShared8(address);
    uint2 zeros = {0, 0};
    if (mode.integer_zeros || (kUse == ParameterUse::kAll && mode.extra != 0)) {
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
  const BlockPlace place(args, blockIdx.x);
  const Source<kKind> source(args);
  const TileView& view = args.weights.codes;
  const DecodeTable<kKind, T> table(view);
  const ParameterMode mode = ParameterModeOf<kKind, T>(view);
  const FusedStep<Source, kKind, T, kUse> product{source, mode, table, view.groups_per_tile};
  const int steps = args.plan.steps;
  Codes codes[kStages];
  // A group of copies for every step, also for those behind the last, so that they can be counted.
  const auto fetch = [&](int step, int slot) {
    if (step < steps) {
      CopyTokens<kFusedStep>(args, place, step, base + slot * kStageBytes);
      CopyParameters(source, place, step, view.zero_kind != 0,
                     base + slot * kStageBytes + kTokenBytes);
      if (place.eights > 0) source.Load(place.strip(), step, place.lane, codes[slot]);
    }
    CommitCopies();
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(s, s);
  BlockSums sums = {};
#pragma unroll 1
  for (int first = 0; first < steps; first += kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (first + s >= steps) break;
      WaitForCopies<kStages - 2>();
      __syncthreads();
      fetch(first + s + kStages - 1, (s + kStages - 1) % kStages);
      if (place.eights > 0) product.Multiply(codes[s], base + s * kStageBytes, place, sums);
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
