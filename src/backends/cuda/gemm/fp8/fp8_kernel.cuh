// GEMMs of quantized activations with Hopper's e4m3 WGMMA (accuracy class w4a8).
//
//   C^T = W^T A^T as in wgmma_kernel.cuh, with its weight producer, tile scheduler and epilogue. A
//   holds e4m3 numbers with a power of two for every row, put into the workspace by fp8_quantize.cu
//   in the order of Fp8Source. Codes decode to e4m3 exactly; scales do not fit, so:
//
//     sums[outputs, tokens] += scale[group, outputs] * (codes x A over the k of one group)
//
//                      kTokens tokens, multiplied in chunks of 128
//                    +-------------+-------------+
//     outputs  0..63 |     c0             c1     |  consumer warpgroup 0: per thread kTokens / 2
//                    +-------------+-------------+  sums and 64 for the chunk in flight
//     outputs 64.127 |                           |  consumer warpgroup 1
//                    +---------------------------+
//
//   Codes of 128 k are decoded once for all chunks. While one warpgroup decodes, or scales and adds
//   a chunk, the other issues WGMMAs: it begins half a k-iteration later. With a small tile_m,
//   decoding takes longer than the WGMMAs, so tile_m is as large as registers allow.
//   The tensor core keeps about 14 bits of a sum; every 128 k, or every 32 where groups are
//   shorter, the sum is added to fp32 accumulators by FMA.
//   Shared memory: pipeline stages of {kTokens rows of 128 bytes in the 128-byte swizzle, four
//   weight tiles}, the epilogue's exchange buffer, mbarriers.
//   Errors: activations 2^-4 of themselves and 2^-10 / 224 of a row's largest (subnormal numbers);
//   within 128 k the tensor core's 2^-13 of the largest addend for every addend.
#pragma once

#include "backends/cuda/gemm/fp8/fp8_fragment.cuh"
#include "backends/cuda/gemm/fp8/fp8_layout.h"
#include "backends/cuda/gemm/wgmma/wgmma_kernel.cuh"

namespace marlin::cuda {

/// The activation producer: one thread, in a warp of its own, issues the TMA copies once the
/// activations are quantized.
template <int kTokens>
MARLIN_DEVICE void ProduceFp8Activations(const WgmmaArguments& args, const CUtensorMap* map,
                                         const WgmmaShared& shared) {
  const TileScheduler items(args);
  SlotCursor cursor;
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
  WaitForEarlierWork();
  for (int i = 0; items.Has(i); ++i) {
    const WgmmaItem item = items.At(i);
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      Wait(shared.empty + 8 * cursor.slot, cursor.parity ^ 1);
      CopyBox(shared.activations + cursor.slot * Fp8SlotBytes(kTokens), map, tile * kTileK,
              item.token_tile * kTokens, shared.full + 8 * cursor.slot);
      cursor.Advance(args.slots);
    }
  }
}

/// Computes the sums of one output tile, before the row scales are applied.
template <CodeKind kKind, int kTokens, bool kOneGroup>
struct Fp8Consumer {
  static constexpr int kBits = CodeBits(kKind);
  static constexpr int kChunkTokens = kTokens < 128 ? kTokens : 128;
  static constexpr int kChunks = kTokens / kChunkTokens;
  static constexpr int kChunkSums = kChunkTokens / 2;
  static constexpr int kSteps = kTileK / 32;
  /// Parts of a k-iteration that have their own scale: the whole, or every step of 32 k.
  static constexpr int kParts = kOneGroup ? 1 : kSteps;
  static constexpr int kStepsOfPart = kSteps / kParts;
  static constexpr int kUnits = kParts * kChunks;
  static constexpr float kUnit = PowerOfTwo(-kFp8Shift - Fp8DecodeExponent(kKind));

  const WgmmaArguments& args;
  const WgmmaShared& shared;
  ConsumerPlace place;
  Fp8Table<kKind> table;

  /// A weight tile as WGMMA fragments, and the stored scales of outputs g and g + 8.
  struct Operands {
    uint32_t fragments[kSteps][4];
    uint32_t scales[kParts];
  };

  MARLIN_DEVICE uint32_t TileAt(int slot) const {
    return shared.weights + (slot * kStripsOfBlock + place.tile) * args.weights.tile_bytes;
  }

  MARLIN_DEVICE void Load(uint32_t tile, uint32_t (&words)[2][kBits]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      LoadWords<kBits>(tile + (half * 2 + place.rows) * BlockBytes(kBits), place.lane, words[half]);
    }
  }

  MARLIN_DEVICE void Decode(uint32_t tile, const uint32_t (&words)[2][kBits],
                            Operands& operands) const {
    const TileView& view = args.weights;
    const uint32_t parameters =
        tile + TileCodeBytes(kBits) + (place.lane >> 2) * 8 + place.rows * 4;
    uint32_t offset[2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step % kStepsOfPart == 0) {
        const int group = kOneGroup ? 0 : step * view.groups_per_tile / kSteps;
        const uint32_t at = parameters + group * kGroupBytes;
        operands.scales[step / kStepsOfPart] = LoadShared4(at);
        if constexpr (kKind == CodeKind::kInt4) {
          float2 zero = {0.0f, 0.0f};
          if (view.zero_kind != ZeroKind::kNone) {
            zero = F16x2::Unpack(LoadShared4(at + view.groups_per_tile * kGroupBytes));
          }
          Spread<F16x2>(table.magic + zero.x, table.magic + zero.y, offset);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t rows[2];
        Fp8Decoder<kKind>::Decode(words[step / 2], step % 2 * 2 + i, table, offset, rows);
        operands.fragments[step][2 * i] = rows[0];
        operands.fragments[step][2 * i + 1] = rows[1];
      }
    }
  }

  /// Issues the WGMMAs of unit u: part u / kChunks of k, tokens of chunk u % kChunks.
  MARLIN_DEVICE void Multiply(const Operands& operands, uint32_t activations, int unit,
                              float (&sums)[kChunkSums]) const {
    constexpr int kChunkBytes = kChunkTokens * kTileK;
    const uint32_t low = activations + unit % kChunks * (kChunkBytes / 16);
    FenceProducts();
#pragma unroll
    for (int i = 0; i < kStepsOfPart; ++i) {
      const int step = unit / kChunks * kStepsOfPart + i;
      WarpgroupProduct<E4M3x4, kChunkTokens>::Run(sums, operands.fragments[step],
                                                  Descriptor(low + 2 * step), i > 0 ? 1 : 0);
    }
    CommitProducts();
  }

  MARLIN_DEVICE void Add(const Operands& operands, int unit, float (&sums)[kChunkSums],
                         float (&acc)[kTokens / 2]) const {
    uint32_t stored = operands.scales[unit / kChunks];
    // Scales are converted here: as floats, all of them would not fit in registers.
    if (!kOneGroup) asm volatile("" : "+r"(stored));
    float2 scale = LoadParameters(stored, args.weights.bf16_parameters);
    scale.x *= kUnit;
    scale.y *= kUnit;
    PinSums(sums);
#pragma unroll
    for (int i = 0; i < kChunkSums; ++i) {
      float& sum = acc[unit % kChunks * kChunkSums + i];
      sum = fmaf(sums[i], (i & 2) == 0 ? scale.x : scale.y, sum);
    }
  }

  /// Whether the second warpgroup waits, once, until the first has decoded. With fewer WGMMAs or
  /// more additions per k-iteration, staggering saves no time or costs some.
  static constexpr bool kStaggered = kTokens == 256 && kOneGroup;
  static constexpr int kStaggerBarrier = 3;

  static MARLIN_DEVICE void WaitToBegin() {
    if (kStaggered) asm volatile("bar.sync %0, 256;" ::"n"(kStaggerBarrier) : "memory");
  }

  /// `leads_at`: the k-iteration whose decoding the other warpgroup waits for; -1: none.
  MARLIN_DEVICE void Run(const WgmmaItem& item, int leads_at, SlotCursor& cursor,
                         float (&acc)[kTokens / 2]) const {
    uint32_t words[2][kBits];
    Operands operands;
    float sums[kChunkSums];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;
    Wait(shared.full + 8 * cursor.slot, cursor.parity);
    Load(TileAt(cursor.slot), words);
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      const int slot = cursor.slot;
      const uint32_t activations = shared.activations + slot * Fp8SlotBytes(kTokens);
      // The instruction requires a uniform register.
      const uint32_t low = __reduce_or_sync(~0u, (activations & 0x3ffffu) >> 4 | 1u << 16);
      Decode(TileAt(slot), words, operands);
      if (kStaggered && tile == leads_at) {
        asm volatile("bar.arrive %0, 256;" ::"n"(kStaggerBarrier) : "memory");
      }
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        if (unit > 0) {
          WaitForProducts<0>();
          Add(operands, unit - 1, sums, acc);
        }
        Multiply(operands, low, unit, sums);
      }
      cursor.Advance(args.slots);
      if (tile + 1 < item.tiles) {
        // Loads the codes of the next k-iteration while the last WGMMAs run.
        Wait(shared.full + 8 * cursor.slot, cursor.parity);
        Load(TileAt(cursor.slot), words);
      }
      WaitForProducts<0>();
      Add(operands, kUnits - 1, sums, acc);
      ReleaseStage(shared.empty + 8 * slot, place.lane);
    }
  }
};

/// Multiplies acc[4 i + e] by the scale of token 8 i + 2 t + (e & 1). Every lane loads a part of
/// the scales: all of them would not fit in registers.
template <int kTokens>
MARLIN_DEVICE void ScaleRows(const Fp8Arguments& args, const WgmmaItem& item, int lane,
                             float (&acc)[kTokens / 2]) {
#pragma unroll
  for (int some = 0; some < kTokens / 32; ++some) {
    const int m = item.token_tile * kTokens + some * 32 + lane;
    const float mine = m < args.product.m ? __ldcg(args.row_scales + m) : 0.0f;
#pragma unroll
    for (int i = 4 * some; i < 4 * some + 4; ++i) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float scale = __shfl_sync(~0u, mine, i % 4 * 8 + (lane & 3) * 2 + odd);
        acc[4 * i + odd] *= scale;
        acc[4 * i + 2 + odd] *= scale;
      }
    }
  }
}

template <CodeKind kKind, int kTokens, bool kOneGroup>
MARLIN_DEVICE void ConsumeFp8(const Fp8Arguments& args, const WgmmaShared& shared,
                              float* exchange) {
  const WgmmaArguments& product = args.product;
  const int warp = WarpOfBlock() - 4;
  const int warpgroup = warp / 4;
  const ConsumerPlace place = PlaceOf(product, warp);
  WaitForEarlierWork();
  const Fp8Consumer<kKind, kTokens, kOneGroup> consumer{product, shared, place,
                                                        Fp8Table<kKind>(product.weights)};
  const WgmmaEpilogue<kTokens> epilogue{
      product, place,      warpgroup, exchange + warpgroup * kExchangeTokens * kExchangeStride,
      0,       kTokens / 8};
  SlotCursor cursor;
  const TileScheduler items(product);
  // Every CTA has at least one output tile.
  if (warpgroup == 1) consumer.WaitToBegin();
  int leads_at = warpgroup == 0 ? 0 : -1;
  for (int i = 0; items.Has(i); ++i) {
    const WgmmaItem item = items.At(i);
    float acc[kTokens / 2];
    consumer.Run(item, leads_at, cursor, acc);
    leads_at = -1;
    ScaleRows<kTokens>(args, item, place.lane, acc);
    epilogue.Run(item, acc);
  }
}

template <CodeKind kKind, int kTokens, bool kOneGroup>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    Fp8Kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Fp8Arguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const WgmmaArguments& product = args.product;
  const WgmmaShared shared = BeginSlots(product, memory);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) ProduceWeights<1>(product, shared, Fp8SlotBytes(kTokens));
    if (threadIdx.x == 32) ProduceFp8Activations<kTokens>(product, &map, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    ConsumeFp8<kKind, kTokens, kOneGroup>(
        args, shared, reinterpret_cast<float*>(memory + product.exchange_offset));
  }
}

template <typename Tiles>
const void* Fp8Kernels::Function(const Variant& variant) {
  const auto function = [&]<int kTokens>() {
    return variant.one_group
               ? reinterpret_cast<const void*>(&Fp8Kernel<Tiles::kCodes, kTokens, true>)
               : reinterpret_cast<const void*>(&Fp8Kernel<Tiles::kCodes, kTokens, false>);
  };
  switch (variant.tokens) {
    case 64:
      return function.template operator()<64>();
    case 128:
      return function.template operator()<128>();
    default:
      return function.template operator()<256>();
  }
}

}  // namespace marlin::cuda
