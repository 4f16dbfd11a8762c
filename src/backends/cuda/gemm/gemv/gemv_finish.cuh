// Reduction and epilogue of the GEMV kernel.
//
//   warps of a unit     in shared memory, added in the order of the warps
//   split-K CTAs        in a cluster: each stores its sums of an n-tile to the DSMEM reduction
//                       buffer of the CTA that owns it, asynchronously, counted by an mbarrier
//                       in global memory: all but the last publish their sums, the last adds them
//                       in a reduction kernel, where neither is possible
//                       always in the order of the splits
//
// Loads and stores are vectorized: four adjacent outputs of a token, a quad.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/gemm/gemv/gemv_layout.h"

namespace marlin::cuda {

/// A barrier across the warps of a unit.
MARLIN_DEVICE void SyncSharers(const GemvArguments& args, int unit_lane) {
  __syncwarp();
  if (args.share > 1) {
    asm volatile("bar.sync %0, %1;" ::"r"(unit_lane + 1), "r"(args.share * 32) : "memory");
  }
}

/// Applies the epilogue to four adjacent outputs of row m and stores those that exist.
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

/// Address of a split's partial sums from row m and output n on; rows are not padded.
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

/// Split-K reduction in global memory, unit by unit. Each CTA increments the unit's tile counter
/// before its last tile, and the CTA with the last ticket finishes the unit: all others are already
/// computing it and publish their sums without waiting for any CTA, so it waits only for sums that
/// are being computed. Flag-in-data: a word of all ones, which is no sum, is not published yet.
constexpr uint32_t kUnpublished = ~0u;

/// Whether `before`, from IncrementTileCounter, is a unit's last ticket; then resets the counter.
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
  return bits == kUnpublished ? kUnpublished >> 1 : bits;  // A different NaN.
}

MARLIN_DEVICE bool IsPublished(const uint4& bits) {
  return bits.x != kUnpublished && bits.y != kUnpublished && bits.z != kUnpublished &&
         bits.w != kUnpublished;
}

/// The sum over all splits, in their order; `sum` is this CTA's.
MARLIN_DEVICE float4 SumOfSplits(const GemvArguments& args, int strip, int m, int row,
                                 const float4& sum) {
  constexpr int kAtOnce = 4;  // Loads in flight.
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

/// Reduces the sums of an n-tile's warps for one n8 tile of tokens, in the order of the warps, and
/// applies the epilogue, or stores the sums for the CTA that does. `sums` holds, for every warp,
/// [tokens][kSumStride] floats; `local_strip` counts the n-tiles of this CTA. `finishes`: with
/// tile counters, whether this CTA adds the splits.
MARLIN_DEVICE void FinishOctet(const GemvArguments& args, int first_strip, int local_strip,
                               int octet, const float* sums, uint32_t reduction_buffer,
                               bool finishes, int thread) {
  const int tokens = min(args.m - octet * kOctet, kOctet);
  for (int i = thread; i < tokens * kQuadsOfStrip; i += args.share * 32) {
    const int token = i / kQuadsOfStrip;
    const int row = i % kQuadsOfStrip * 4;
    const float* from = sums + token * kSumStride + row;
    float4 sum = *reinterpret_cast<const float4*>(from);
    // All loads are issued at once; the additions wait for them in order.
#pragma unroll
    for (int w = 1; w < kMaxSharers; ++w) {
      if (w < args.share) Add(*reinterpret_cast<const float4*>(from + w * kSumFloats), sum);
    }
    const int m = octet * kOctet + token;
    if (kHasTma && args.in_cluster) {
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

/// How many of a cluster's n-tiles this CTA owns.
MARLIN_DEVICE int StripsFinishedHere(const GemvArguments& args, int strips) {
  return (strips - static_cast<int>(blockIdx.x) + args.splits - 1) / args.splits;
}

/// Finishes the n-tiles that this CTA owns: adds the splits' sums in their order and applies the
/// epilogue.
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
