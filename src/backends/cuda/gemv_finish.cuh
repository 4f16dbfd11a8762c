// How the sums of the kernel for few rows come together and are finished.
//
//   warps of a unit     in shared memory, added in the order of the warps
//   blocks that divide  a cluster: each sends its sums of a strip to the block that finishes it, as
//   k                   asynchronous stores that a barrier there counts
//                       in memory: each stores its sums, the last to do so adds them
//                       another kernel adds them, where nothing else is possible
//                       always in the order of the splits
//
// What is sent or stored is four neighbouring outputs of a token, a quad.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/epilogue.cuh"
#include "backends/cuda/gemv_layout.h"

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

MARLIN_DEVICE float4 LoadPartials(const GemvArguments& args, int split, int m, int n) {
  const float* from = PartialAt(args, split, m, n);
  if (args.epilogue.n % 4 == 0) return __ldcg(reinterpret_cast<const float4*>(from));
  float values[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < args.epilogue.n) values[i] = __ldcg(from + i);
  }
  return {values[0], values[1], values[2], values[3]};
}

MARLIN_DEVICE void Add(const float4& term, float4& sum) {
  sum.x += term.x;
  sum.y += term.y;
  sum.z += term.z;
  sum.w += term.w;
}

constexpr int kQuadsOfStrip = kStripOutputs / 4;

/// Adds the sums of a strip's warps for one octet of tokens, in the order of the warps, and
/// finishes them, or sends them to who does. `sums` holds, for every warp, [tokens][kSumStride]
/// floats; `local_strip` counts the strips of this block.
MARLIN_DEVICE void FinishOctet(const GemvArguments& args, int first_strip, int local_strip,
                               int octet, const float* sums, uint32_t inbox, int thread) {
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
          owner + (args.mates == 1 ? 0 : static_cast<int>(blockIdx.y & 1) * args.splits);
      const uint32_t to =
          inbox + kInboxBarrierBytes + ((slot * args.m + m) * kStripOutputs + row) * 4;
      SendFloats(AddressInBlock(to, rank), sum, AddressInBlock(inbox, rank));
      continue;
    }
    const int n = (first_strip + local_strip) * kStripOutputs + row;
    if (args.partials != nullptr) {
      StorePartials(args, m, n, sum);
    } else {
      FinishQuad(args, m, n, sum);
    }
  }
}

/// Adds the partial sums that all blocks have stored of a unit, in the order of the splits.
template <int kStrips>
MARLIN_DEVICE void FinishPartials(const GemvArguments& args, int unit, int thread) {
  constexpr int kQuads = kStrips * kQuadsOfStrip;
  for (int i = thread; i < args.m * kQuads; i += args.share * 32) {
    const int m = i / kQuads;
    const int n = unit * (kStrips * kStripOutputs) + i % kQuads * 4;
    if (n >= args.epilogue.n) continue;
    float4 sum = LoadPartials(args, 0, m, n);
#pragma unroll
    for (int split = 1; split < kMaxSplits; ++split) {
      if (split < args.splits) Add(LoadPartials(args, split, m, n), sum);
    }
    FinishQuad(args, m, n, sum);
  }
}

/// Of a cluster's strips those that this block finishes.
MARLIN_DEVICE int StripsFinishedHere(const GemvArguments& args, int strips) {
  return (strips - static_cast<int>(blockIdx.x) + args.splits - 1) / args.splits;
}

/// Finishes this block's strips of the cluster's: adds what the blocks sent, in their order.
MARLIN_DEVICE void FinishInbox(const GemvArguments& args, int first_strip, int strips,
                               const float* inbox) {
  const int quads = args.m * kQuadsOfStrip;
  int slot = 0;
  for (int s = static_cast<int>(blockIdx.x); s < strips; s += args.splits, slot += args.splits) {
    for (int i = static_cast<int>(threadIdx.x); i < quads; i += static_cast<int>(blockDim.x)) {
      const float* from = inbox + (slot * quads + i) * 4;
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

/// Tells the last of the blocks that divide k to finish a unit whose sums all have stored. For the
/// warps that share it; `word` is shared memory that they have left.
template <int kStrips>
MARLIN_DEVICE void MeetInMemory(const GemvArguments& args, int unit, int unit_lane, int thread,
                                float* word) {
  auto* is_last = reinterpret_cast<uint32_t*>(word);
  if (thread == 0) {
    uint32_t* ticket = args.tickets + unit;
    *is_last = TakeTicket(ticket) + 1 == static_cast<uint32_t>(args.splits) ? 1 : 0;
    if (*is_last != 0) *ticket = 0;
  }
  SyncSharers(args, unit_lane);
  if (*is_last != 0) FinishPartials<kStrips>(args, unit, thread);
}

}  // namespace marlin::cuda
