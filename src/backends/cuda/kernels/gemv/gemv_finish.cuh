// How the sums of the kernel for few rows come together and are finished.
//
//   warps of a unit     in shared memory, added in the order of the warps
//   blocks that divide  a cluster: each sends its sums of a strip to the block that finishes it, as
//   k                   asynchronous stores that a barrier there counts
//                       in memory: all but one store their sums, that one adds them
//                       another kernel adds them, where nothing else is possible
//                       always in the order of the splits
//
// What is sent or stored is four neighbouring outputs of a token, a quad.
#pragma once

#include "backends/cuda/kernels/common/async_copy.cuh"
#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/gemv/gemv_layout.h"

namespace marlin::cuda {

/// A barrier among the warps that share a strip.
MARLIN_DEVICE void SyncSharers(const GemvArguments& args, int unit_lane) {
  __syncwarp();
  if (args.share > 1) {
    asm volatile("bar.sync %0, %1;" ::"r"(unit_lane + 1), "r"(args.share * 32) : "memory");
  }
}

/// Stores four neighbouring outputs of row m, those of them that exist.
MARLIN_DEVICE void FinishQuad(const GemvArguments& args, int m, int n, const float4& sum) {
  const EpilogueView& view = args.epilogue;
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
  if (args.plain_quads) {
    if (n >= view.n) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= view.multiplier;
    if (view.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] += LoadFloat(view.bias, view.bias_type, n + i);
    }
    const bool bf16 = view.type == Element::kBf16;
    const uint2 quad = {
        bf16 ? Bf16x2::Pack(values[0], values[1]) : F16x2::Pack(values[0], values[1]),
        bf16 ? Bf16x2::Pack(values[2], values[3]) : F16x2::Pack(values[2], values[3])};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(view.out) + m * view.stride + n) = quad;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < view.n) Finish(view, m, n + i, values[i]);
  }
}

/// Where the partial sums of a split begin for row m and output n; rows are not padded.
MARLIN_DEVICE float* PartialAt(const GemvArguments& args, int split, int m, int n) {
  return args.partials + (static_cast<int64_t>(split) * args.m + m) * args.epilogue.n + n;
}

MARLIN_DEVICE void StorePartials(const GemvArguments& args, int m, int n, const float4& sum) {
  float* to = PartialAt(args, static_cast<int>(blockIdx.x), m, n);
  if (args.epilogue.n % 4 == 0) {
    if (n < args.epilogue.n) __stcg(reinterpret_cast<float4*>(to), sum);
    return;
  }
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < args.epilogue.n) __stcg(to + i, values[i]);
  }
}

MARLIN_DEVICE void Add(const float4& term, float4& sum) {
  sum.x += term.x;
  sum.y += term.y;
  sum.z += term.z;
  sum.w += term.w;
}

constexpr int kQuadsOfStrip = kStripOutputs / 4;

/// Blocks that divide k meet in memory unit by unit. Each takes a ticket before its last tile, and
/// the one that takes the last finishes the unit: all others are at work on it, and hand their sums
/// over without waiting for anybody, so that it waits for what is on its way only. A word of all
/// ones, which is no sum, has not been handed over yet.
constexpr uint32_t kUnpublished = ~0u;

/// Whether this ticket, as IncrementTileCounter gives it, is a unit's last; then it is given back.
MARLIN_DEVICE bool IsLastSplit(const GemvArguments& args, int unit, uint32_t before) {
  const bool last = before + 2 == static_cast<uint32_t>(args.splits);
  if (last) args.tile_counters[unit] = kUnpublished;
  return last;
}

MARLIN_DEVICE float* ExchangeAt(const GemvArguments& args, int split, int strip, int m, int row) {
  const int64_t place = (static_cast<int64_t>(strip) * args.splits + split) * args.m + m;
  return args.exchange + place * kStripOutputs + row;
}

MARLIN_DEVICE uint32_t SumBits(float sum) {
  const uint32_t bits = __float_as_uint(sum);
  return bits == kUnpublished ? kUnpublished >> 1 : bits;  // Another NaN.
}

MARLIN_DEVICE bool IsPublished(const uint4& bits) {
  return bits.x != kUnpublished && bits.y != kUnpublished && bits.z != kUnpublished &&
         bits.w != kUnpublished;
}

/// The sum over all splits, in their order, of which `sum` is this block's.
MARLIN_DEVICE float4 SumOfSplits(const GemvArguments& args, int strip, int m, int row,
                                 const float4& sum) {
  constexpr int kAtOnce = 4;  // Loads under way.
  const int mine = static_cast<int>(blockIdx.x);
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int first = 0; first < args.splits; first += kAtOnce) {
    uint4 parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= args.splits || first + i == mine) continue;
      parts[i] = PollSums(ExchangeAt(args, first + i, strip, m, row));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= args.splits) continue;
      float4 part = sum;
      if (first + i != mine) {
        float* const at = ExchangeAt(args, first + i, strip, m, row);
        while (!IsPublished(parts[i])) parts[i] = PollSums(at);
        PublishSums(at, {kUnpublished, kUnpublished, kUnpublished, kUnpublished});
        part = {__uint_as_float(parts[i].x), __uint_as_float(parts[i].y),
                __uint_as_float(parts[i].z), __uint_as_float(parts[i].w)};
      }
      if (first + i == 0) {
        total = part;
      } else {
        Add(part, total);
      }
    }
  }
  return total;
}

/// Adds the sums of a strip's warps for one octet of tokens, in the order of the warps, and
/// finishes them, or sends them to who does. `sums` holds, for every warp, [tokens][kSumStride]
/// floats; `local_strip` counts the strips of this block. `finishes`: of the blocks that meet in
/// memory this one adds.
MARLIN_DEVICE void FinishOctet(const GemvArguments& args, int first_strip, int local_strip,
                               int octet, const float* sums, uint32_t reduction_buffer,
                               bool finishes, int thread) {
  const int tokens = min(args.m - octet * kOctet, kOctet);
  for (int i = thread; i < tokens * kQuadsOfStrip; i += args.share * 32) {
    const int token = i / kQuadsOfStrip;
    const int row = i % kQuadsOfStrip * 4;
    const float* from = sums + token * kSumStride + row;
    float4 sum = *reinterpret_cast<const float4*>(from);
    // All loads at once; the additions wait for them in order.
#pragma unroll
    for (int w = 1; w < kMaxSharers; ++w) {
      if (w < args.share) Add(*reinterpret_cast<const float4*>(from + w * kSumFloats), sum);
    }
    const int m = octet * kOctet + token;
    if (args.in_cluster) {
      const int turn = local_strip / args.splits;
      const int owner = local_strip - turn * args.splits;
      const int slot = turn * args.splits + static_cast<int>(blockIdx.x);
      const int rank =
          owner + (args.multicast == 1 ? 0 : static_cast<int>(blockIdx.y & 1) * args.splits);
      const uint32_t to = reduction_buffer + kReductionBarrierBytes +
                          ((slot * args.m + m) * kStripOutputs + row) * 4;
      StoreToCluster(AddressInBlock(to, rank), sum, AddressInBlock(reduction_buffer, rank));
      continue;
    }
    const int strip = first_strip + local_strip;
    if (args.tile_counters != nullptr) {
      if (!finishes) {
        PublishSums(ExchangeAt(args, static_cast<int>(blockIdx.x), strip, m, row),
                    {SumBits(sum.x), SumBits(sum.y), SumBits(sum.z), SumBits(sum.w)});
        continue;
      }
      sum = SumOfSplits(args, strip, m, row, sum);
    }
    const int n = strip * kStripOutputs + row;
    if (args.partials != nullptr && args.tile_counters == nullptr) {
      StorePartials(args, m, n, sum);
    } else {
      FinishQuad(args, m, n, sum);
    }
  }
}

/// Of a cluster's strips those that this block finishes.
MARLIN_DEVICE int StripsFinishedHere(const GemvArguments& args, int strips) {
  return (strips - static_cast<int>(blockIdx.x) + args.splits - 1) / args.splits;
}

/// Finishes this block's strips of the cluster's: adds what the blocks sent, in their order.
MARLIN_DEVICE void FinishReductionBuffer(const GemvArguments& args, int first_strip, int strips,
                                         const float* reduction_buffer) {
  const int quads = args.m * kQuadsOfStrip;
  int slot = 0;
  for (int s = static_cast<int>(blockIdx.x); s < strips; s += args.splits, slot += args.splits) {
    for (int i = static_cast<int>(threadIdx.x); i < quads; i += static_cast<int>(blockDim.x)) {
      const float* from = reduction_buffer + (slot * quads + i) * 4;
      float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
      for (int part = 1; part < kMaxSplits; ++part) {
        if (part < args.splits) {
          Add(*reinterpret_cast<const float4*>(from + part * quads * 4), sum);
        }
      }
      FinishQuad(args, i / kQuadsOfStrip, (first_strip + s) * kStripOutputs + i % kQuadsOfStrip * 4,
                 sum);
    }
  }
}

}  // namespace marlin::cuda
