// marlin_gemm_fp4, marlin_gemm_fp4_single_stage, marlin_gemm_fp4_striped: FP4 weights are decoded
// into shared memory, from which mma.m16n8k16 loads both operands.
//
//   C[m, n] = epilogue(sum over k of A[m, k] * W[k, n])    CTA tiles of 64 tokens x 64 outputs (see
//                                                          block_gemm.cuh), steps of 32 k
//   two buffers (with one, no line overlaps another):
//     copy A of step s + 1 to shared memory    |=========|             (cp.async)
//     read codes and scales of step s + 1      |=======|               (registers)
//     multiply step s                          |==============|
//     decode step s + 1 into the other buffer                 |===|
//     barrier                                                      |
//
//   shared memory per buffer: tokens [64][32] and outputs [64][32] of 16 bits, rows of 80 bytes:
//   10 KiB; the sums before the epilogue (17 KiB) reuse the same memory. In flight per CTA: 4 KiB
//   of activations, 1 KiB of codes, and their scales.
//
//   striped: split-K; CTAs compute runs of work units (tile, slice), see BlockPlan. Units of a run
//   that belong to one tile are accumulated in registers and stored with the first;
//   marlin_zero_reduction zeroes the others beforehand, and the reduction kernel adds the slices in
//   order. Nothing is atomic.
//
// Error model: weights rounded up to three times (scale, bias, product), fp32 MMA accumulation; the
// same as for every kernel with tiled weights. A row's sum accumulates k in order, 16 at a
// time, and with one slice depends neither on m nor on the row's position.
#include "backends/cuda/gemm/block/block_gemm.cuh"

namespace marlin::cuda {
namespace {

constexpr int kRowBytes = RowBytesOfStep(kStagedStep);
constexpr int kOperandBytes = kBlockTile * kRowBytes;
constexpr int kBufferBytes = 2 * kOperandBytes;  // Activations, then weights.

constexpr int SharedBytes(int buffers) {
  const int bytes = buffers * kBufferBytes;
  return bytes > kBlockSumBytes ? bytes : kBlockSumBytes;
}

constexpr int kN8Tiles = 4;
using Place = BlockPlace<kN8Tiles>;
using Sums = BlockSums<kN8Tiles>;

/// Offset of the row that lane `lane` passes to ldmatrix and stmatrix for a fragment of 16 outputs
/// x 16 k: the 8 x 8 matrices are outputs 0 to 7 and 8 to 15 of 8 k, then of the next 8.
MARLIN_DEVICE uint32_t FragmentRow(int lane) {
  return ((lane & 7) + (lane >> 3 & 1) * 8) * kRowBytes + (lane >> 4) * 16;
}

/// Decodes a warp's part of the weights, 16 outputs x 32 k of a step; the codes are in registers
/// between Read and Decode.
template <typename T, ParameterUse kUse>
class Stager {
 public:
  MARLIN_DEVICE Stager(const BlockArguments& args, const Place& place)
      : view_(args.weights.codes),
        mode_(ParameterModeOf<CodeKind::kFp4, T>(view_)),
        table_(view_),
        lane_(place.lane),
        m16_tile_(place.half),
        to_((place.strip_of_block * kStripOutputs + m16_tile_ * 16) * kRowBytes +
            FragmentRow(place.lane)),
        strip_(view_.tiles + TileOffset(view_, place.strip(), 0)) {}

  MARLIN_DEVICE void Read(int step) {
    constexpr int kSteps = kTileK / kStagedStep;
    const int in_tile = step % kSteps;
    const uint8_t* tile =
        strip_ + static_cast<int64_t>(step / kSteps) * kStripsOfBlock * view_.tile_bytes;
    // Loading one step ahead does not cover the latency of device memory; it nearly covers L2's.
    if (in_tile == 0 && m16_tile_ == 0 && lane_ * 128 < view_.tile_bytes &&
        step / kSteps + 1 < view_.tiles_of_strip) {
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(tile + kStripsOfBlock * view_.tile_bytes + lane_ * 128));
    }
    const int block = in_tile / 2 * 2 + m16_tile_;
    codes_ = __ldg(reinterpret_cast<const uint2*>(tile + block * BlockBytes(4) + lane_ * 16 +
                                                  in_tile % 2 * 8));
    const uint8_t* parameters = tile + TileCodeBytes(4) + lane_ / 4 * 8 + m16_tile_ * 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int group = (in_tile * 2 + j) * view_.groups_per_tile / 8;
      const uint8_t* of_group = parameters + group * kGroupBytes;
      scales_[j] = __ldg(reinterpret_cast<const uint32_t*>(of_group));
      zeros_[j] = 0;
      if (kUse == ParameterUse::kAll) {
        zeros_[j] = __ldg(
            reinterpret_cast<const uint32_t*>(of_group + view_.groups_per_tile * kGroupBytes));
      }
    }
  }

  /// Decodes the codes of the last Read into the weights of a buffer.
  MARLIN_DEVICE void Decode(uint32_t outputs) const {
    const uint32_t words[4] = {codes_.x, codes_.y, 0, 0};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      GroupOperands operands;
      MakeOperands<CodeKind::kFp4, T, kUse>(scales_[j], zeros_[j], mode_, operands);
      uint32_t pairs[4];
      DecodeScaled<CodeKind::kFp4, T, kUse>(words, j, table_, mode_, operands, pairs);
      StoreMatrices(outputs + to_ + j * 32, pairs);
    }
  }

 private:
  const TileView& view_;
  ParameterMode mode_;
  DecodeTable<CodeKind::kFp4, T> table_;
  int lane_;
  int m16_tile_;  ///< Which 16 outputs of the n-tile.
  uint32_t to_;
  const uint8_t* strip_;
  uint2 codes_ = {0, 0};
  uint32_t scales_[2] = {0, 0};
  uint32_t zeros_[2] = {0, 0};
};

/// Issues the MMAs of a step. `tokens` is the address of the activations in shared memory;
/// `weights(j, r, fragment)` gets the fragment of k16 step j and outputs 16 r of the warp's n-tile.
template <typename T, typename Weights>
MARLIN_DEVICE void Multiply(uint32_t tokens, const Place& place, const Weights& weights,
                            Sums& sums) {
  // Lane l passes ldmatrix the row of token l % 8 in matrix l / 8, which has 8 k.
  const uint32_t row =
      tokens + (place.warp_token() + (place.lane & 7)) * kRowBytes + (place.lane >> 3) * 16;
  uint32_t fragments[kN8Tiles][4];
#pragma unroll
  for (int e = 0; e < kN8Tiles; ++e) {
    if (e < place.n8_tiles) LoadMatrices(fragments[e], row + e * 8 * kRowBytes);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pairs[4];
      weights(j, r, pairs);
#pragma unroll
      for (int e = 0; e < kN8Tiles; ++e) {
        if (e < place.n8_tiles) {
          MultiplyAdd<T>(sums[r][e], pairs, fragments[e][2 * j], fragments[e][2 * j + 1]);
        }
      }
    }
  }
}

/// Accumulates steps [first, last) of a tile.
template <typename T, ParameterUse kUse, int kBuffers>
MARLIN_DEVICE void AddSteps(const BlockArguments& args, const Place& place, int first, int last,
                            uint32_t shared, Sums& sums) {
  Stager<T, kUse> stager(args, place);
  const uint32_t my_outputs =
      kOperandBytes + place.strip_of_block * kStripOutputs * kRowBytes + FragmentRow(place.lane);
  const auto begin = [&](int step, uint32_t buffer) {
    CopyTokens<kStagedStep>(args, place, step, buffer);
    CommitCopies();
    stager.Read(step);
  };
  const auto multiply = [&](uint32_t buffer) {
    const auto weights = [&](int j, int r, uint32_t(&pairs)[4]) {
      LoadMatrices(pairs, buffer + my_outputs + r * 16 * kRowBytes + j * 32);
    };
    Multiply<T>(buffer, place, weights, sums);
  };
  const auto end = [&](uint32_t buffer) {
    stager.Decode(buffer + kOperandBytes);
    WaitForCopies<0>();
  };
  if (first >= last) return;
  begin(first, shared);
  end(shared);
  __syncthreads();
#pragma unroll 1
  for (int step = first; step < last; ++step) {
    const uint32_t buffer = shared + (kBuffers == 2 ? (step - first) % 2 * kBufferBytes : 0);
    const uint32_t other = kBuffers == 2 ? 2 * shared + kBufferBytes - buffer : buffer;
    const bool more = step + 1 < last;
    if (kBuffers == 2 && more) begin(step + 1, other);
    multiply(buffer);
    if (kBuffers == 1) {
      __syncthreads();
      if (more) begin(step + 1, other);
    }
    if (more) end(other);
    __syncthreads();
  }
}

template <typename T, ParameterUse kUse, int kBuffers>
__global__ void __launch_bounds__(kBlockThreads)
    StagedGemmKernel(const __grid_constant__ BlockArguments args) {
  __shared__ __align__(16) uint8_t shared[SharedBytes(kBuffers)];
  const Place place(args, blockIdx.x);
  Sums sums = {};
  AddSteps<T, kUse, kBuffers>(args, place, 0, args.plan.steps, SharedAddress(shared), sums);
  FinishBlock(args, place, 0, sums, reinterpret_cast<float*>(shared));
}

template <typename T, ParameterUse kUse>
__global__ void __launch_bounds__(kBlockThreads)
    StripedGemmKernel(const __grid_constant__ BlockArguments args) {
  __shared__ __align__(16) uint8_t shared[SharedBytes(2)];
  const BlockPlan& plan = args.plan;
  const int64_t first = blockIdx.x * plan.units_of_block;
  const int64_t last = min(first + plan.units_of_block, plan.units);
#pragma unroll 1
  for (int64_t unit = first; unit < last;) {
    // The units of this stripe that are slices of one tile are contiguous in k.
    const int64_t tile = unit / plan.parallel;
    const int64_t end = min(last, (tile + 1) * plan.parallel);
    const int slice = static_cast<int>(unit - tile * plan.parallel);
    const int slices = static_cast<int>(end - unit);
    const Place place(args, tile);
    Sums sums = {};
    AddSteps<T, kUse, 2>(args, place, slice * plan.steps_of_slice,
                         min((slice + slices) * plan.steps_of_slice, plan.steps),
                         SharedAddress(shared), sums);
    FinishBlock(args, place, slice, sums, reinterpret_cast<float*>(shared));
    unit = end;
  }
}

/// One CTA per unit: zeroes its partial sums unless a run begins with it.
__global__ void __launch_bounds__(kBlockThreads)
    marlin_zero_reduction(const __grid_constant__ BlockArguments args) {
  const BlockPlan& plan = args.plan;
  const int64_t unit = blockIdx.x;
  const int64_t slice = unit % plan.parallel;
  if (slice == 0 || unit % plan.units_of_block == 0) return;
  const Place place(args, unit / plan.parallel);
  for (int i = static_cast<int>(threadIdx.x); i < place.tokens * kBlockTile; i += kBlockThreads) {
    const int n = place.first_output + i % kBlockTile;
    const int64_t row = slice * args.m + place.first_token + i / kBlockTile;
    if (n < args.epilogue.n) __stcg(args.partials + row * args.epilogue.n + n, 0.0f);
  }
}

template <typename T, ParameterUse kUse>
const void* FunctionFor(BlockKernel kernel) {
  switch (kernel) {
    case BlockKernel::kSingleStage:
      return reinterpret_cast<const void*>(&StagedGemmKernel<T, kUse, 1>);
    case BlockKernel::kStriped:
      return reinterpret_cast<const void*>(&StripedGemmKernel<T, kUse>);
    default:
      return reinterpret_cast<const void*>(&StagedGemmKernel<T, kUse, 2>);
  }
}

template <typename T>
const void* FunctionFor(BlockKernel kernel, bool extras) {
  return extras ? FunctionFor<T, ParameterUse::kAll>(kernel)
                : FunctionFor<T, ParameterUse::kScales>(kernel);
}

}  // namespace

const void* StagedFunction(BlockKernel kernel, bool bf16, bool extras) {
  return bf16 ? FunctionFor<Bf16x2>(kernel, extras) : FunctionFor<F16x2>(kernel, extras);
}

cudaError_t LaunchZeroReduction(const BlockArguments& args, cudaStream_t stream) {
  marlin_zero_reduction<<<static_cast<unsigned>(args.plan.units), kBlockThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace marlin::cuda
