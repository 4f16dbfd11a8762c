// Products of more than a few rows on Hopper's warpgroup matrix instructions.
//
//   C^T = W^T A^T: the 64-row operand is the weights, decoded in registers and never written back; the
//   tokens are the other operand, k-major in shared memory, put there by tensor copies.
//
//                      kTokens tokens (shared memory, both warpgroups read the same)
//                    +----------------------------+
//     outputs  0..63 | consumer warpgroup 0       |   each thread: kTokens / 2 sums
//                    +----------------------------+
//     outputs 64.127 | consumer warpgroup 1       |   + a producer warp that issues every copy
//                    +----------------------------+
//
//   Steps of 128 k; `stages` of {activations, four tiles of weights} in flight. Within a step the codes
//   of one half of 64 k are decoded while the matrix instructions of the other half run. Thread
//   blocks are persistent and take items (token tile, block of outputs, split of k) in an order that
//   keeps neighbouring token tiles on the same weights. Sums of splits go to the workspace and are
//   added in order by another kernel.
//   Gated products: a block holds 64 gates and the 64 ups that belong to them, warps 0 and 1 of a
//   warpgroup the gates, warps 2 and 3 the ups.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/decode_fragment.cuh"
#include "backends/cuda/epilogue.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/tile_loads.cuh"
#include "backends/cuda/wgmma_instructions.cuh"
#include "backends/cuda/wgmma_layout.h"

namespace marlin::cuda {

constexpr int kConsumerWarps = 8;
constexpr int kWgmmaThreads = 32 * kConsumerWarps + 128;

MARLIN_DEVICE void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MARLIN_DEVICE void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MARLIN_DEVICE void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Describes k-major rows of 64 16-bit numbers in the 128-byte swizzle; `low` is address / 16 with
/// the leading offset (unused by this swizzle) in the upper half.
MARLIN_DEVICE uint64_t Descriptor(uint32_t low) {
  // Atoms of 8 rows are 1024 bytes apart; bit 62 is the 128-byte swizzle.
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(64u | (1u << 30)));
  return descriptor;
}

/// Where an item is.
struct WgmmaItem {
  int token_tile;
  int block;
  int first_tile;
  int tiles;
  int split;
};

MARLIN_DEVICE WgmmaItem ItemAt(const WgmmaArguments& args, int i) {
  constexpr int kGroup = 8;  // Token tiles that are neighbours in time.
  WgmmaItem item;
  const int of_split = args.token_tiles * args.blocks;
  item.split = i / of_split;
  i -= item.split * of_split;
  const int per_group = kGroup * args.blocks;
  const int group = i / per_group;
  const int inside = i - group * per_group;
  const int size = min(kGroup, args.token_tiles - group * kGroup);
  item.block = inside / size;
  item.token_tile = group * kGroup + inside - item.block * size;
  item.first_tile = item.split * args.tiles_of_split;
  item.tiles = min(args.tiles_of_split, args.tiles - item.first_tile);
  return item;
}

/// The strip of the weights that is strip `i` of a block; one that exists where there is none.
MARLIN_DEVICE int StripOf(const WgmmaArguments& args, int block, int i) {
  if (args.half_strips == 0) return block * kStripsOfBlock + i;
  const int strip = min(block * 2 + i / 2, args.half_strips - 1);
  return i % 2 == 0 ? strip : strip + args.half_strips;
}

/// A place in the ring of stages.
struct StageCursor {
  int stage = 0;
  int parity = 0;
  MARLIN_DEVICE void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Addresses in shared memory.
struct WgmmaShared {
  uint32_t activations;
  uint32_t weights;
  uint32_t full;
  uint32_t empty;
};

template <int kTokens>
MARLIN_DEVICE void CopyStage(const WgmmaArguments& args, const CUtensorMap* map,
                             const WgmmaShared& shared, const WgmmaItem& item, int tile,
                             int stage) {
  constexpr int kHalfBytes = StageActivationBytes(kTokens) / 2;
  const uint32_t full = shared.full + 8 * stage;
  const int k = (item.first_tile + tile) * kTileK;
  const uint32_t to = shared.activations + stage * StageActivationBytes(kTokens);
  CopyBox(to, map, k, item.token_tile * kTokens, full);
  CopyBox(to + kHalfBytes, map, k + kTileK / 2, item.token_tile * kTokens, full);
}

MARLIN_DEVICE void CopyWeights(const WgmmaArguments& args, const WgmmaShared& shared,
                               const WgmmaItem& item, int tile, int stage) {
  const int bytes = args.weights.tile_bytes;
  const uint32_t to = shared.weights + stage * kStripsOfBlock * bytes;
  const int64_t along_k = static_cast<int64_t>(item.first_tile + tile) * bytes;
#pragma unroll
  for (int i = 0; i < kStripsOfBlock; ++i) {
    const uint8_t* from =
        args.weights.tiles + StripOf(args, item.block, i) * args.weights.strip_bytes + along_k;
    CopyBulk(to + i * bytes, from, bytes, shared.full + 8 * stage);
  }
}

/// One thread issues all copies. Weights of the first stages go ahead of earlier work on the stream.
template <int kTokens>
MARLIN_DEVICE void Produce(const WgmmaArguments& args, const CUtensorMap* map,
                           const WgmmaShared& shared) {
  const int stage_bytes =
      StageActivationBytes(kTokens) + kStripsOfBlock * args.weights.tile_bytes;
  // More would only delay the first activations.
  constexpr int kAhead = 2;
  int ahead = 0;
  const auto first = static_cast<int>(blockIdx.x);
  if (first < args.items) {
    const WgmmaItem item = ItemAt(args, first);
    for (; ahead < min(min(kAhead, args.stages), item.tiles); ++ahead) {
      ArriveExpecting(shared.full + 8 * ahead, stage_bytes);
      CopyWeights(args, shared, item, ahead, ahead);
    }
  }
  WaitForEarlierWork();
  StageCursor cursor;
  for (int i = first; i < args.items; i += static_cast<int>(gridDim.x)) {
    const WgmmaItem item = ItemAt(args, i);
    for (int tile = 0; tile < item.tiles; ++tile) {
      Wait(shared.empty + 8 * cursor.stage, cursor.parity ^ 1);
      if (ahead > 0) {
        --ahead;
      } else {
        ArriveExpecting(shared.full + 8 * cursor.stage, stage_bytes);
        CopyWeights(args, shared, item, tile, cursor.stage);
      }
      CopyStage<kTokens>(args, map, shared, item, tile, cursor.stage);
      cursor.Advance(args.stages);
    }
  }
}

/// A consumer thread's place in its block.
struct ConsumerPlace {
  int lane;
  int strip;  ///< Of the block's four.
  int rows;   ///< Which 16 outputs of the strip.
};

template <CodeKind kKind, typename T>
struct WeightHalf {
  static constexpr int kBits = CodeBits(kKind);
  uint32_t words[kBits];

  MARLIN_DEVICE void Load(uint32_t tile, const ConsumerPlace& place, int half) {
    LoadWords<kBits>(tile + (half * 2 + place.rows) * BlockBytes(kBits), place.lane, words);
  }

  /// The four fragments of the half.
  MARLIN_DEVICE void Decode(uint32_t tile, const ConsumerPlace& place, int half, int groups,
                            const ParameterKind& parameters, const DecodeTable<kKind, T>& table,
                            GroupOperands<T>& operands, uint32_t (&fragments)[4][4]) const {
    const uint32_t first =
        tile + TileCodeBytes(kBits) + (place.lane >> 2) * 8 + place.rows * 4;
    int loaded = half == 0 || groups > 1 ? -1 : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int group = (half * 4 + j) * groups >> 3;
      if (kKind != CodeKind::kDense16 && group != loaded) {
        const uint32_t at = first + group * kGroupBytes;
        const uint32_t zeros =
            parameters.zero_kind != 0 ? LoadShared4(at + groups * kGroupBytes) : 0;
        operands = MakeOperands<kKind, T>(LoadShared4(at), zeros, parameters);
        loaded = group;
      }
      DecodeScaled<kKind, T>(words, j, table, operands, fragments[j]);
    }
  }
};

/// The sums of one item.
template <CodeKind kKind, typename T, int kTokens>
struct WgmmaConsumer {
  const WgmmaArguments& args;
  const WgmmaShared& shared;
  ConsumerPlace place;
  DecodeTable<kKind, T> table;
  ParameterKind parameters;

  MARLIN_DEVICE void Multiply(const uint32_t (&fragments)[4][4], uint32_t activations,
                              bool accumulate, float (&acc)[kTokens / 2]) const {
    // In a uniform register, which the instruction wants.
    const uint32_t low = __reduce_or_sync(~0u, (activations & 0x3ffffu) >> 4 | 1u << 16);
    FenceProducts();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      WarpgroupProduct<T, kTokens>::Run(acc, fragments[j], Descriptor(low + 2 * j),
                                        accumulate || j > 0 ? 1 : 0);
    }
    CommitProducts();
  }

  MARLIN_DEVICE void Release(int stage) const {
    if (place.lane == 0) Arrive(shared.empty + 8 * stage);
  }

  MARLIN_DEVICE void Run(const WgmmaItem& item, StageCursor& cursor,
                         float (&acc)[kTokens / 2]) const {
    const int groups = args.weights.groups_per_tile;
    const int tile_bytes = args.weights.tile_bytes;
    constexpr int kHalfBytes = StageActivationBytes(kTokens) / 2;
    uint32_t fragments[2][4][4];
    GroupOperands<T> operands;
    int before = -1;
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      const int stage = cursor.stage;
      Wait(shared.full + 8 * stage, cursor.parity);
      const uint32_t weights =
          shared.weights + (stage * kStripsOfBlock + place.strip) * tile_bytes;
      const uint32_t activations = shared.activations + stage * StageActivationBytes(kTokens);
      WeightHalf<kKind, T> first;
      WeightHalf<kKind, T> second;
      first.Load(weights, place, 0);
      second.Load(weights, place, 1);
      first.Decode(weights, place, 0, groups, parameters, table, operands, fragments[0]);
      Multiply(fragments[0], activations, tile > 0, acc);
      WaitForProducts<1>();
      if (before >= 0) Release(before);
      second.Decode(weights, place, 1, groups, parameters, table, operands, fragments[1]);
      Multiply(fragments[1], activations + kHalfBytes, true, acc);
      WaitForProducts<1>();
      before = stage;
      cursor.Advance(args.stages);
    }
    WaitForProducts<0>();
    if (before >= 0) Release(before);
  }
};

/// Stores two neighbouring outputs of a token.
MARLIN_DEVICE void StorePair(const EpilogueView& view, int64_t at, float low, float high,
                             bool whole) {
  if (whole && view.type != Element::kF32) {
    const uint32_t pair =
        view.type == Element::kBf16 ? Bf16::Pack(low, high) : F16::Pack(low, high);
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(view.out) + at) = pair;
    return;
  }
  StoreFloat(view.out, view.type, at, low);
  StoreFloat(view.out, view.type, at + 1, high);
}

/// What comes after the sums of an item. `acc[4 i + e]` is output g + 8 (e >> 1) of the warp's 16 and
/// token 8 i + 2 t + (e & 1), for lane 4 g + t.
template <int kTokens>
struct WgmmaEpilogue {
  const WgmmaArguments& args;
  ConsumerPlace place;

  MARLIN_DEVICE void StorePartials(const WgmmaItem& item, const float (&acc)[kTokens / 2]) const {
    const int n = args.epilogue.n;
    const int first_n = StripOf(args, item.block, place.strip) * kStripOutputs + place.rows * 16 +
                        (place.lane >> 2);
    const int first_m = item.token_tile * kTokens + (place.lane & 3) * 2;
    float* to = args.partials + static_cast<int64_t>(item.split) * args.m * n;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = first_m + i * 8 + (e & 1);
        const int column = first_n + 8 * (e >> 1);
        if (m < args.m && column < n) {
          __stcg(to + static_cast<int64_t>(m) * n + column, acc[4 * i + e]);
        }
      }
    }
  }

  MARLIN_DEVICE void Store(const WgmmaItem& item, const float (&acc)[kTokens / 2]) const {
    const EpilogueView& view = args.epilogue;
    const int first_n = StripOf(args, item.block, place.strip) * kStripOutputs + place.rows * 16 +
                        (place.lane >> 2);
    float bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (view.bias != nullptr && first_n + 8 * h < view.n) {
        bias[h] = LoadFloat(view.bias, view.bias_type, first_n + 8 * h);
      }
    }
    const int first_m = item.token_tile * kTokens + (place.lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      float value[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        value[e] = acc[4 * i + e] * view.multiplier;
        if (view.bias != nullptr) value[e] += bias[e >> 1];
        value[e] = Activate(view.activation, value[e]);
        const int m = first_m + i * 8 + (e & 1);
        if (view.row_weight != nullptr && m < args.m) value[e] *= view.row_weight[m];
      }
      StoreTokens(item, i, value);
    }
  }

  /// Eight tokens of 16 outputs; transposed so that neighbouring lanes store neighbouring outputs.
  MARLIN_DEVICE void StoreTokens(const WgmmaItem& item, int i, const float (&value)[4]) const {
    const EpilogueView& view = args.epilogue;
    const int strip_n =
        StripOf(args, item.block, place.strip) * kStripOutputs + place.rows * 16;
    if (view.type == Element::kF32) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = item.token_tile * kTokens + i * 8 + (place.lane & 3) * 2 + (e & 1);
        const int n = strip_n + (place.lane >> 2) + 8 * (e >> 1);
        if (m < args.m && n < view.n) {
          static_cast<float*>(view.out)[m * view.stride + n] = value[e];
        }
      }
      return;
    }
    const int m = item.token_tile * kTokens + i * 8 + (place.lane >> 2);
    const bool paired = ((view.stride | view.n) & 1) == 0 &&
                        (reinterpret_cast<uintptr_t>(view.out) & 3) == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t pair = view.type == Element::kBf16 ? Bf16::Pack(value[2 * h], value[2 * h + 1])
                                                  : F16::Pack(value[2 * h], value[2 * h + 1]);
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
      const int n = strip_n + 8 * h + (place.lane & 3) * 2;
      if (m >= args.m || n >= view.n) continue;
      auto* to = static_cast<uint16_t*>(view.out) + m * view.stride + n;
      if (paired) {
        *reinterpret_cast<uint32_t*>(to) = pair;
      } else {
        to[0] = static_cast<uint16_t>(pair);
        if (n + 1 < view.n) to[1] = static_cast<uint16_t>(pair >> 16);
      }
    }
  }

  /// Gates and ups of a warpgroup meet in shared memory, a few tokens at a time.
  MARLIN_DEVICE void StoreGated(const WgmmaItem& item, const float (&acc)[kTokens / 2],
                                float* exchange, int warpgroup) const {
    const EpilogueView& view = args.epilogue;
    constexpr int kStride = kExchangeTokens + 1;
    const bool up = place.strip % 2 == 1;
    const int row = place.rows * 16 + (place.lane >> 2);
    const int n = (item.block * 2 + warpgroup) * kStripOutputs + row;
    float* mine = exchange + warpgroup * kStripOutputs * kStride;
#pragma unroll
    for (int i = 0; i < kTokens / 8; i += kExchangeTokens / 8) {
      if (up) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int token = (e >> 2) * 8 + (place.lane & 3) * 2 + (e & 1);
          mine[(row + 8 * ((e >> 1) & 1)) * kStride + token] = acc[4 * i + e];
        }
      }
      asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
      if (!up) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int token = (e >> 2) * 8 + (place.lane & 3) * 2 + (e & 1);
          const int m = item.token_tile * kTokens + i * 8 + token;
          const int column = n + 8 * ((e >> 1) & 1);
          if (m < args.m && column < view.n / 2) {
            FinishGated(view, m, column, acc[4 * i + e],
                        mine[(row + 8 * ((e >> 1) & 1)) * kStride + token]);
          }
        }
      }
      asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
    }
  }
};

template <CodeKind kKind, typename T, int kTokens>
MARLIN_DEVICE void Consume(const WgmmaArguments& args, const WgmmaShared& shared, float* exchange) {
  const int warp = static_cast<int>(threadIdx.x) / 32 - 4;
  const int warpgroup = warp / 4;
  ConsumerPlace place;
  place.lane = static_cast<int>(threadIdx.x) % 32;
  place.strip = warp / 2;
  place.rows = warp % 2;
  WaitForEarlierWork();
  const WgmmaConsumer<kKind, T, kTokens> consumer{args, shared, place,
                                                  DecodeTable<kKind, T>(args.weights),
                                                  ParameterKindOf<kKind, T>(args.weights)};
  const WgmmaEpilogue<kTokens> epilogue{args, place};
  StageCursor cursor;
  for (int i = static_cast<int>(blockIdx.x); i < args.items; i += static_cast<int>(gridDim.x)) {
    const WgmmaItem item = ItemAt(args, i);
    float acc[kTokens / 2];
    consumer.Run(item, cursor, acc);
    if (args.partials != nullptr) {
      epilogue.StorePartials(item, acc);
    } else if (args.half_strips != 0) {
      epilogue.StoreGated(item, acc, exchange, warpgroup);
    } else {
      epilogue.Store(item, acc);
    }
  }
}

template <CodeKind kKind, typename T, int kTokens>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    WgmmaKernel(const __grid_constant__ CUtensorMap map,
                const __grid_constant__ WgmmaArguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  WgmmaShared shared;
  shared.activations = SharedAddress(memory);
  shared.weights = shared.activations + args.weights_offset;
  shared.full = shared.activations + args.barriers_offset;
  shared.empty = shared.full + args.stages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < args.stages; ++s) {
      InitBarrier(shared.full + 8 * s, 1);
      InitBarrier(shared.empty + 8 * s, kConsumerWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  LetNextBegin();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) Produce<kTokens>(args, &map, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consume<kKind, T, kTokens>(args, shared,
                               reinterpret_cast<float*>(memory + args.exchange_offset));
  }
}

}  // namespace marlin::cuda
