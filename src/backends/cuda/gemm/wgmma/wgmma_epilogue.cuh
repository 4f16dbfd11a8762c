// The epilogue of the WGMMA kernels.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_block.cuh"
#include "backends/cuda/gemm/wgmma/wgmma_layout.h"

namespace marlin::cuda {

/// Offset of 8 outputs of a token in a buffer of 16 tokens x 16 outputs of 16 bits, swizzled so
/// that neither stmatrix rows nor whole tokens have bank conflicts.
MARLIN_DEVICE uint32_t VectorAt(int token, int half) {
  return static_cast<uint32_t>(token * 32 + (half ^ (token >> 2 & 1)) * 16);
}

/// The epilogue of an output tile. `acc[4 i + e]` is output g + 8 (e >> 1) of the warp's 16 and
/// token 8 i + 2 t + (e & 1), for lane 4 g + t. Each warp stores partial sums, fp32 outputs and
/// plain 16-bit outputs (a multiplier and a bias) by itself, the last transposed in its part of the
/// exchange buffer. For all others the 64 outputs of a warpgroup go through shared memory,
/// kExchangeTokens tokens at a time, where gates are combined with their ups; in rolled loops,
/// because unrolled this code would be larger than the instruction cache.
template <int kTokens>
struct WgmmaEpilogue {
  const WgmmaArguments& args;
  ConsumerPlace place;
  int warpgroup;
  float* exchange;  ///< The warpgroup's: [kExchangeTokens][kExchangeStride]
  int first_group;  ///< n8 tiles of tokens that are stored: first_group to last_group - 1.
  int last_group;

  MARLIN_DEVICE void Run(const WgmmaItem& item, const float (&acc)[kTokens / 2]) const {
    const EpilogueView& view = args.epilogue;
    const bool partial = args.partials != nullptr;
    const bool plain = view.activation == 0 && view.row_weight == nullptr && args.half_strips == 0;
    // One call of each, because the unrolled code is large.
    if (partial || (plain && view.type == Element::kF32)) {
      const int split = args.in_cluster ? 0 : TileScheduler::Split();
      float* const partials = args.partials + static_cast<int64_t>(split) * args.m * view.n;
      StoreFloats(item, acc, partial ? partials : static_cast<float*>(view.out),
                  partial ? view.n : view.stride, partial ? 1.0f : view.multiplier,
                  partial ? nullptr : view.bias);
    } else if (plain && args.vector_stores && view.type == Element::kBf16) {
      StoreVectors<Bf16x2>(item, acc);
    } else if (plain && args.vector_stores) {
      StoreVectors<F16x2>(item, acc);
    } else {
      RunThroughShared(item, acc);
    }
  }

 private:
  MARLIN_DEVICE int FirstColumn(const WgmmaItem& item) const {
    return StripOf(args, item.block, place.strip) * kStripOutputs + place.rows * 16;
  }

  /// The biases of rows g and g + 8.
  MARLIN_DEVICE float2 LoadBias(const void* bias, int n) const {
    float2 values = {0.0f, 0.0f};
    if (bias == nullptr) return values;
    if (n < args.epilogue.n) values.x = LoadFloat(bias, args.epilogue.bias_type, n);
    if (n + 8 < args.epilogue.n) values.y = LoadFloat(bias, args.epilogue.bias_type, n + 8);
    return values;
  }

  /// Eight lanes store eight adjacent floats: whole sectors.
  MARLIN_DEVICE void StoreFloats(const WgmmaItem& item, const float (&acc)[kTokens / 2], float* to,
                                 int64_t stride, float multiplier, const void* bias) const {
    const int n = FirstColumn(item) + (place.lane >> 2);
    const int m = item.token_tile * kTokens + (place.lane & 3) * 2;
    const float2 biases = LoadBias(bias, n);
    const bool inside[2] = {n < args.epilogue.n, n + 8 < args.epilogue.n};
    to += m * stride + n;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      if (i < first_group || i >= last_group) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = acc[4 * i + e] * multiplier + (e < 2 ? biases.x : biases.y);
        if (m + i * 8 + (e & 1) < args.m && inside[e >> 1]) {
          __stcg(to + (i * 8 + (e & 1)) * stride + 8 * (e >> 1), value);
        }
      }
    }
  }

  /// Vectorized stores of eight adjacent 16-bit outputs per lane, transposed through shared memory.
  /// Precondition: they are one aligned store.
  template <typename Out>
  MARLIN_DEVICE void StoreVectors(const WgmmaItem& item, const float (&acc)[kTokens / 2]) const {
    constexpr uint32_t kBufferBytes = 16 * 16 * 2;
    const EpilogueView& view = args.epilogue;
    const int lane = place.lane;
    const int first_n = FirstColumn(item);
    const float2 bias = LoadBias(view.bias, first_n + (lane >> 2));
    const uint32_t buffers =
        SharedAddress(exchange) + ((place.strip & 1) * 2 + place.rows) * 2 * kBufferBytes;
    const uint32_t put = buffers + VectorAt((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
    const uint32_t get = buffers + VectorAt(lane >> 1, lane & 1);
    const int n = first_n + (lane & 1) * 8;
    const int m = item.token_tile * kTokens + (lane >> 1);
    const int rows = n < view.n ? args.m - m : 0;  // Valid rows from m on.
    uint16_t* to = static_cast<uint16_t*>(view.out) + m * view.stride + n;
    const int64_t step = view.stride * 16;
#pragma unroll
    for (int c = 0; c < kTokens / 16; ++c, to += step) {
      if (2 * c < first_group || 2 * c >= last_group) continue;
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = acc + 8 * c + 2 * i;
        const float to_add = i % 2 == 0 ? bias.x : bias.y;
        packed[i] =
            Out::Pack(pair[0] * view.multiplier + to_add, pair[1] * view.multiplier + to_add);
      }
      const uint32_t buffer = c % 2 * kBufferBytes;
      StoreTurned(put + buffer, packed);
      __syncwarp();
      const uint4 outputs = LoadShared16(get + buffer);
      if (c * 16 < rows) *reinterpret_cast<uint4*>(to) = outputs;
    }
    __syncwarp();
  }

  MARLIN_DEVICE void RunThroughShared(const WgmmaItem& item,
                                      const float (&acc)[kTokens / 2]) const {
#pragma unroll 1
    for (int chunk = first_group / 2; chunk < last_group / 2; ++chunk) {
      const int first_m = item.token_tile * kTokens + chunk * kExchangeTokens;
      if (first_m >= args.m) break;
      Put(acc, chunk);
      SyncWarpgroup(warpgroup);
      if (args.half_strips != 0) {
        StoreGated(item, first_m);
      } else {
        StorePairs(item, first_m);
      }
      SyncWarpgroup(warpgroup);
    }
  }

  MARLIN_DEVICE int Thread() const { return static_cast<int>(threadIdx.x) & 127; }

  /// Stores the sums of a chunk; the loop makes register indices constants.
  MARLIN_DEVICE void Put(const float (&acc)[kTokens / 2], int chunk) const {
    float* to = exchange + (place.lane & 3) * 2 * kExchangeStride + (place.strip & 1) * 32 +
                place.rows * 16 + (place.lane >> 2);
#pragma unroll
    for (int c = 0; c < kTokens / kExchangeTokens; ++c) {
      if (c != chunk) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        to[((e >> 2) * 8 + (e & 1)) * kExchangeStride + ((e >> 1) & 1) * 8] = acc[8 * c + e];
      }
    }
  }

  /// Two outputs of a token at a time.
  MARLIN_DEVICE void StorePairs(const WgmmaItem& item, int first_m) const {
    const EpilogueView& view = args.epilogue;
    const int pair = Thread() % 32;
    const int n = item.block * kBlockOutputs + warpgroup * 64 + pair * 2;
    if (n >= view.n) return;
    const bool both = n + 1 < view.n;
    float bias[2] = {0.0f, 0.0f};
    if (view.bias != nullptr) {
      bias[0] = LoadFloat(view.bias, view.bias_type, n);
      if (both) bias[1] = LoadFloat(view.bias, view.bias_type, n + 1);
    }
#pragma unroll 1
    for (int token = Thread() / 32; token < kExchangeTokens; token += 4) {
      const int m = first_m + token;
      if (m >= args.m) break;
      float2 sum = *reinterpret_cast<const float2*>(exchange + token * kExchangeStride + pair * 2);
      sum.x = sum.x * view.multiplier;
      sum.y = sum.y * view.multiplier;
      if (view.bias != nullptr) {
        sum.x += bias[0];
        sum.y += bias[1];
      }
      if (view.activation != 0) {
        sum.x = Activate(view.activation, sum.x);
        sum.y = Activate(view.activation, sum.y);
      }
      if (view.row_weight != nullptr) {
        sum.x *= view.row_weight[m];
        sum.y *= view.row_weight[m];
      }
      StorePair(view, m * view.stride + n, sum, both);
    }
  }

  MARLIN_DEVICE void StoreGated(const WgmmaItem& item, int first_m) const {
    const int column = Thread() % 32;
    const int n = (item.block * 2 + warpgroup) * kStripOutputs + column;
    if (n >= args.epilogue.n / 2) return;
#pragma unroll 1
    for (int token = Thread() / 32; token < kExchangeTokens; token += 4) {
      const int m = first_m + token;
      if (m >= args.m) break;
      const float* row = exchange + token * kExchangeStride + column;
      FinishGated(args.epilogue, m, n, row[0], row[32]);
    }
  }
};

}  // namespace marlin::cuda
