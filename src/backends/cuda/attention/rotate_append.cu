// Preparation of a step's projections for attention, in one pass: norms of queries and keys, RoPE,
// and the append of keys and values to the paged KV cache.
//
//   A warp has one head of a row at a time. Heads are numbered: queries, then keys, then values.
//   RotateVectorsKernel holds a head of 64 or 128 features in registers, 2 or 4 adjacent ones per
//   lane. In RotateAppendKernel, for all others, the features go through shared memory, because
//   RoPE pairs features of different lanes. rotate_rows.cu is for many rows.
#include <algorithm>

#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/attention/rotate_append_launch.h"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {
namespace {

constexpr int kWarps = 4;
/// Heads of a warp where there are many rows, at most.
constexpr int kMostHeads = 4;

/// A head of a row: where it comes from, what it becomes, and where it goes.
struct Head {
  const void* from;
  Element type;
  int64_t at;  ///< Its first element.
  int features;
  const void* norm = nullptr;
  Element norm_type = Element::kF32;
  bool rotates = true;
  void* to;
  Element to_type;
  int64_t to_at;
};

/// Head `number` of a row; there is nowhere to store it without a page.
MARLIN_DEVICE Head FindHead(const RotateAppendArguments& args, int row, int number) {
  const PagesView& pages = args.pages;
  Head head;
  if (number < args.heads) {
    head.at = head.to_at = args.queries.At(row, number);
    head.from = head.to = args.queries.data;
    head.type = head.to_type = args.queries.type;
    head.features = pages.key_dim;
    head.norm = args.query_norm;
    head.norm_type = args.query_norm_type;
    return head;
  }
  number -= args.heads;
  const bool key = number < pages.kv_heads;
  if (!key) number -= pages.kv_heads;
  const RowsView& rows = key ? args.keys : args.values;
  head.at = rows.At(row, number);
  head.from = rows.data;
  head.type = rows.type;
  head.features = key ? pages.key_dim : pages.value_dim;
  head.norm = key ? args.key_norm : nullptr;
  head.norm_type = args.key_norm_type;
  head.rotates = key;
  head.to = PageOfRow(args.sequences, args.pages, row, args.errors);
  head.to_type = pages.type;
  const int64_t place = static_cast<int64_t>(number) * pages.page_tokens +
                        args.sequences.positions[row] % pages.page_tokens;
  head.to_at = (key ? 0 : KeyElements(pages)) + place * head.features;
  return head;
}

/// Loads a head to shared memory. Returns the lane's sum of squares, which only norms need.
MARLIN_DEVICE double LoadHead(const Head& head, int lane, float* features) {
  double squares = 0;
  const bool sums = head.norm != nullptr;
  WithType(head.type, [&](auto type) {
    const auto* const from = static_cast<const decltype(type)*>(head.from) + head.at;
#pragma unroll 4
    for (int i = lane; i < head.features; i += 32) {
      const float value = ToFloat(from[i]);
      features[i] = value;
      if (sums) squares += static_cast<double>(value) * value;
    }
  });
  return squares;
}

/// RMS norm of a head in shared memory, with the rounding of a norm in place.
MARLIN_DEVICE void NormalizeHead(const Head& head, float epsilon, double squares, int lane,
                                 float* features) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float factor = RmsFactor(squares / head.features, epsilon);
#pragma unroll 1
  for (int i = lane; i < head.features; i += 32) {
    const float weight = LoadFloat(head.norm, head.norm_type, i);
    features[i] = Rounded(features[i] * factor * weight, head.type);
  }
}

/// The rotations of a lane's first pairs, which are the same in all heads of a row.
struct Rotations {
  static constexpr int kPairs = 2;
  float cosines[kPairs];
  float sines[kPairs];

  MARLIN_DEVICE Rotations(const RotateAppendArguments& args, int position, int lane) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= args.rotary.pairs) return;
      RotationOf(args.rotary.frequencies[pair], position, args.rotary.factor, &cosines[i],
                 &sines[i]);
    }
  }
};

MARLIN_DEVICE void RotatePair(const RotateAppendArguments& args, Element type, int pair,
                              float cosine, float sine, float* features) {
  const int first = args.rotary.interleaved ? 2 * pair : pair;
  const int second = args.rotary.interleaved ? 2 * pair + 1 : pair + args.rotary.pairs;
  const float a = features[first];
  const float b = features[second];
  features[first] = Rounded(a * cosine - b * sine, type);
  features[second] = Rounded(b * cosine + a * sine, type);
}

MARLIN_DEVICE void RotateHead(const RotateAppendArguments& args, Element type, int position,
                              const Rotations& rotations, int lane, float* features) {
#pragma unroll
  for (int i = 0; i < Rotations::kPairs; ++i) {
    const int pair = lane + 32 * i;
    if (pair >= args.rotary.pairs) return;
    RotatePair(args, type, pair, rotations.cosines[i], rotations.sines[i], features);
  }
#pragma unroll 1
  for (int pair = lane + 32 * Rotations::kPairs; pair < args.rotary.pairs; pair += 32) {
    float cosine;
    float sine;
    RotationOf(args.rotary.frequencies[pair], position, args.rotary.factor, &cosine, &sine);
    RotatePair(args, type, pair, cosine, sine, features);
  }
}

__global__ void __launch_bounds__(kWarps * 32)
    RotateAppendKernel(const __grid_constant__ RotateAppendArguments args) {
  extern __shared__ float memory[];
  EnterChain();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto row = static_cast<int>(blockIdx.x);
  if (row == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  const int heads = args.AllHeads();
  float* const features = memory + warp * max(args.pages.key_dim, args.pages.value_dim);
  const int position = args.sequences.positions[row];
  if (position < 0) {
    if (lane == 0) RecordError(args.errors, ValueError::kPosition, position, row);
    return;
  }
  const Rotations rotations(args, position, lane);
#pragma unroll 1
  for (int number = static_cast<int>(blockIdx.y) * kWarps + warp; number < heads;
       number += static_cast<int>(gridDim.y) * kWarps) {
    const Head head = FindHead(args, row, number);
    const double squares = LoadHead(head, lane, features);
    if (head.norm != nullptr) NormalizeHead(head, args.epsilon, squares, lane, features);
    __syncwarp();
    if (head.rotates) RotateHead(args, head.type, position, rotations, lane, features);
    __syncwarp();
    if (head.to != nullptr) {
#pragma unroll 1
      for (int i = lane; i < head.features; i += 32) {
        StoreCached(head.to, head.to_type, head.to_at + i, features[i]);
      }
    }
    __syncwarp();
  }
}

/// kCount adjacent numbers of a lane.
template <int kCount>
struct Adjacent {
  alignas(4 * kCount) float of[kCount];
};

template <int kCount>
MARLIN_DEVICE Adjacent<kCount> LoadAdjacent(const Head& head, int lane) {
  const float* const from = static_cast<const float*>(head.from) + head.at + lane * kCount;
  Adjacent<kCount> x;
  if constexpr (kCount == 4) {
    *reinterpret_cast<float4*>(x.of) = *reinterpret_cast<const float4*>(from);
  } else {
    *reinterpret_cast<float2*>(x.of) = *reinterpret_cast<const float2*>(from);
  }
  return x;
}

template <int kCount>
MARLIN_DEVICE void StoreAdjacent(const Head& head, int lane, const Adjacent<kCount>& x) {
  const int64_t at = head.to_at + lane * kCount;
  if (head.to_type == Element::kF32) {
    auto* const to = static_cast<float*>(head.to) + at;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) StorePair(to + i, x.of[i], x.of[i + 1]);
  } else if (head.to_type == Element::kBf16) {
    auto* const to = static_cast<__nv_bfloat16*>(head.to) + at;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) StorePair(to + i, x.of[i], x.of[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) StoreCached(head.to, head.to_type, at + i, x.of[i]);
  }
}

/// Sines and cosines of the pairs of a lane's features, which are the same in all heads of a row.
template <int kCount>
struct LaneRotations {
  float cosines[kCount];
  float sines[kCount];

  MARLIN_DEVICE LaneRotations(const RotateAppendArguments& args, int position, int lane) {
    // Lanes l and l + 16 have the two halves of the same pairs; each computes half of them.
    constexpr int kOwn = kCount / 2;
    float own_cosines[kOwn];
    float own_sines[kOwn];
    const int first = (lane & 15) * kCount + (lane >> 4) * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      RotationOf(args.rotary.frequencies[first + i], position, args.rotary.factor, &own_cosines[i],
                 &own_sines[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int owner = (lane & 15) + i / kOwn * 16;
      cosines[i] = __shfl_sync(~0u, own_cosines[i % kOwn], owner);
      sines[i] = __shfl_sync(~0u, own_sines[i % kOwn], owner);
    }
  }
};

/// RMS norm of a head, with the rounding of a norm in place.
template <int kCount>
MARLIN_DEVICE void NormalizeAdjacent(const Head& head, float epsilon, int lane,
                                     Adjacent<kCount>* x) {
  double squares = 0;
#pragma unroll
  for (const float value : x->of) squares += static_cast<double>(value) * value;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float factor = RmsFactor(squares / head.features, epsilon);
  WithType(head.norm_type, [&](auto type) {
    const auto* const weights = static_cast<const decltype(type)*>(head.norm) + lane * kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x->of[i] = x->of[i] * factor * ToFloat(weights[i]);
  });
}

/// Lane ^ 16 has the other halves of a lane's pairs.
template <int kCount>
MARLIN_DEVICE void RotateAdjacent(const LaneRotations<kCount>& rotations, int lane,
                                  Adjacent<kCount>* x) {
  const bool second = lane >= 16;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float mine = x->of[i];
    const float other = __shfl_xor_sync(~0u, mine, 16);
    const float turned = other * rotations.sines[i];
    const float kept = mine * rotations.cosines[i];
    x->of[i] = second ? kept + turned : kept - turned;
  }
}

/// kCount: features of a lane. For heads that TakesVectors.
template <int kCount>
__global__ void __launch_bounds__(kWarps * 32)
    RotateVectorsKernel(const __grid_constant__ RotateAppendArguments args) {
  EnterChain();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto row = static_cast<int>(blockIdx.x);
  if (row == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  const int position = args.sequences.positions[row];
  if (position < 0) {
    if (lane == 0) RecordError(args.errors, ValueError::kPosition, position, row);
    return;
  }
  const int number = static_cast<int>(blockIdx.y) * kWarps + warp;
  if (number >= args.AllHeads()) return;
  const Head head = FindHead(args, row, number);
  Adjacent<kCount> x = LoadAdjacent<kCount>(head, lane);
  const LaneRotations<kCount> rotations(args, position, lane);
  if (head.norm != nullptr) NormalizeAdjacent(head, args.epsilon, lane, &x);
  if (head.rotates) RotateAdjacent(rotations, lane, &x);
  if (head.to != nullptr) StoreAdjacent(head, lane, x);
}

/// Whether RotateVectorsKernel takes the heads: vectors of 64 or 128 features, rotated as halves.
bool TakesVectors(const RotateAppendArguments& args) {
  const int features = args.pages.key_dim;
  return (features == 64 || features == 128) && !args.rotary.interleaved &&
         2 * args.rotary.pairs == features && HasVectorHeads(args);
}

/// CTAs for the heads of a row, of whose warps each takes `of_warp` heads.
dim3 GridOf(const RotateAppendArguments& args, int of_warp) {
  const int of_block = kWarps * of_warp;
  return {static_cast<unsigned>(args.sequences.rows),
          static_cast<unsigned>((args.AllHeads() + of_block - 1) / of_block)};
}

}  // namespace

cudaError_t LoadRotateAppend() {
  return PrepareKernels(&RotateAppendKernel, &RotateVectorsKernel<2>, &RotateVectorsKernel<4>);
}

cudaError_t LaunchRotateAppend(const RotateAppendArguments& args, cudaStream_t stream) {
  if (TakesVectors(args)) {
    const auto kernel =
        args.pages.key_dim == 64 ? &RotateVectorsKernel<2> : &RotateVectorsKernel<4>;
    return LaunchInChain(kernel, GridOf(args, 1), kWarps * 32, 0, stream, args);
  }
  // In decode a warp takes one head; in prefill it takes several, which share sines and cosines.
  const int most = args.sequences.rows < kManyRotateRows ? 1 : kMostHeads;
  const int features = std::max(args.pages.key_dim, args.pages.value_dim);
  const int bytes = kWarps * features * int{sizeof(float)};
  return LaunchInChain(&RotateAppendKernel, GridOf(args, most), kWarps * 32, bytes, stream, args);
}

}  // namespace marlin::cuda
