// Preparation of many rows for attention: what rotate_append.cu does, with the same bits.
//
//   A CTA has a row. Its rotations, its page and the weights of the norms are found once, for all
//   of its heads. A warp has four heads at a time, with eight lanes each: lane l has the quads
//   l, l + 8, ... of a head's features. RoPE pairs features that are a multiple of 32 apart, which
//   are in the same lane.
#include <algorithm>

#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/attention/rotate_append_launch.h"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/warp_sums.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {
namespace {

constexpr int kLanes = 8;  ///< The lanes of a head.
constexpr int kWarpHeads = 32 / kLanes;
constexpr int kMostWarps = 8;
/// CTAs of kMostWarps for which a multiprocessor has registers.
constexpr int ResidentFor(int quads) {
  return quads <= 2 ? 4 : quads <= 4 ? 3 : quads <= 6 ? 2 : 1;
}
/// Features of a quad of every lane of a head.
constexpr int kQuadFeatures = 4 * kLanes;

/// The order in which rotate_append.cu adds a head's squares.
enum class SumOrder {
  kAdjacent,  ///< RotateVectorsKernel: a lane has adjacent features.
  kStrided,   ///< RotateAppendKernel: a lane has every 32nd feature.
};

/// Rotations, norms and page for all heads of a row, in shared memory.
template <int kQuads>
struct RowMemory {
  static constexpr int kFeatures = kQuads * kQuadFeatures;
  alignas(16) float cosines[kFeatures / 2];
  alignas(16) float sines[kFeatures / 2];
  alignas(16) float norms[2][kFeatures];  ///< Those for queries, then for keys.
  uint8_t* page;
  int slot;  ///< The row's place in the page.

  /// Called by all threads of the CTA.
  MARLIN_DEVICE void Fill(const RotateAppendArguments& args, int row, int position) {
    const auto threads = static_cast<int>(blockDim.x);
    const auto thread = static_cast<int>(threadIdx.x);
    // The last thread has the fewest pairs.
    if (thread == threads - 1) {
      page = PageOfRow(args.sequences, args.pages, row, args.errors);
      slot = position % args.pages.page_tokens;
    }
    // Unrolled, a loop of these would divide first to know how often it runs.
#pragma unroll 1
    for (int pair = thread; pair < args.rotary.pairs; pair += threads) {
      RotationOf(args.rotary.frequencies[pair], position, args.rotary.factor, &cosines[pair],
                 &sines[pair]);
    }
    FillNorm(args.query_norm, args.query_norm_type, norms[0]);
    FillNorm(args.key_norm, args.key_norm_type, norms[1]);
  }

 private:
  static MARLIN_DEVICE void FillNorm(const void* norm, Element type, float* to) {
    if (norm == nullptr) return;
    WithType(type, [&](auto element) {
      const auto* const weights = static_cast<const decltype(element)*>(norm);
#pragma unroll 1
      for (auto i = static_cast<int>(threadIdx.x); i < kFeatures;
           i += static_cast<int>(blockDim.x)) {
        to[i] = ToFloat(weights[i]);
      }
    });
  }
};

/// Where the features of head `number` of a row are; null: there is no such head. Heads are
/// numbered: queries, keys, values.
MARLIN_DEVICE float* SourceOf(const RotateAppendArguments& args, int row, int number) {
  if (number < args.heads) {
    return static_cast<float*>(args.queries.data) + args.queries.At(row, number);
  }
  number -= args.heads;
  const int kv_heads = args.pages.kv_heads;
  if (number < kv_heads) return static_cast<float*>(args.keys.data) + args.keys.At(row, number);
  number -= kv_heads;
  if (number >= kv_heads) return nullptr;
  return static_cast<float*>(args.values.data) + args.values.At(row, number);
}

/// The operations on a lane's head, and its destination.
struct LaneHead {
  int norm = -1;  ///< Index in RowMemory::norms; -1: none.
  bool rotates = false;
  void* to = nullptr;  ///< Null: nowhere.
  Element to_type = Element::kF32;
  int64_t to_at = 0;
};

template <int kQuads>
MARLIN_DEVICE LaneHead FindHead(const RotateAppendArguments& args, const RowMemory<kQuads>& memory,
                                int row, int number) {
  LaneHead head;
  if (number < args.heads) {
    head.norm = args.query_norm != nullptr ? 0 : -1;
    head.rotates = true;
    head.to = SourceOf(args, row, number);
    return head;
  }
  if (number >= args.AllHeads()) return head;
  const PagesView& pages = args.pages;
  const bool key = number < args.heads + pages.kv_heads;
  const int of_kind = number - args.heads - (key ? 0 : pages.kv_heads);
  if (key && args.key_norm != nullptr) head.norm = 1;
  head.rotates = key;
  head.to = memory.page;
  head.to_type = pages.type;
  const int64_t place = static_cast<int64_t>(of_kind) * pages.page_tokens + memory.slot;
  head.to_at = (key ? 0 : KeyElements(pages)) + place * RowMemory<kQuads>::kFeatures;
  return head;
}

MARLIN_DEVICE float4 QuadAt(const float* from, int quad) {
  return reinterpret_cast<const float4*>(from)[quad];
}

MARLIN_DEVICE double Square(float x) { return static_cast<double>(x) * x; }

/// The squares of a head, added in the order of rotate_append.cu: a tree over its 32 lanes, the
/// high bit of a lane's number first. Here a bit of that number is one of j in quad l + 8 j, or of
/// l, or of the place in a quad.
template <int kQuads, SumOrder kOrder>
MARLIN_DEVICE double SumOfSquares(const float4 (&x)[kQuads]) {
  if constexpr (kOrder == SumOrder::kStrided) {
    double a = 0;
    double b = 0;
    double c = 0;
    double d = 0;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      a += Square(x[j].x);
      b += Square(x[j].y);
      c += Square(x[j].z);
      d += Square(x[j].w);
    }
    const double first = SumOfOne(a, c, 4);
    const double second = SumOfOne(b, d, 4);
    return SumWith(SumWith(SumWith(SumOfOne(first, second, 2), 1), 4), 2);
  } else if constexpr (kQuads == 4) {
    double of[kQuads];
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      of[j] = Square(x[j].x) + Square(x[j].y) + Square(x[j].z) + Square(x[j].w);
    }
    return SumWith(SumWith(SumWith(of[0] + of[2] + (of[1] + of[3]), 4), 2), 1);
  } else {
    static_assert(kQuads == 2);
    const double low = Square(x[0].x) + Square(x[0].y) + (Square(x[1].x) + Square(x[1].y));
    const double high = Square(x[0].z) + Square(x[0].w) + (Square(x[1].z) + Square(x[1].w));
    return SumWith(SumWith(SumWith(SumOfOne(low, high, 4), 2), 1), 4);
  }
}

/// RMS norm of the heads of a warp, each by norm `norm` or, -1, by none. Called by all of its
/// lanes.
template <int kQuads, SumOrder kOrder>
MARLIN_DEVICE void Normalize(const RowMemory<kQuads>& memory, int norm, float epsilon, int lane,
                             float4 (&x)[kQuads]) {
  if (!__any_sync(~0u, norm >= 0)) return;
  const double squares = SumOfSquares<kQuads, kOrder>(x);
  if (norm < 0) return;
  const float factor = RmsFactor(squares / (kQuads * kQuadFeatures), epsilon);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const float4 weight = QuadAt(memory.norms[norm], lane + kLanes * j);
    x[j] = {x[j].x * factor * weight.x, x[j].y * factor * weight.y, x[j].z * factor * weight.z,
            x[j].w * factor * weight.w};
  }
}

MARLIN_DEVICE void RotatePair(float cosine, float sine, float* first, float* second) {
  const float a = *first;
  const float b = *second;
  *first = a * cosine - b * sine;
  *second = b * cosine + a * sine;
}

/// RoPE of a head whose pairs are `kTurns` of a lane's quads apart.
template <int kQuads, int kTurns>
MARLIN_DEVICE void Rotate(const RowMemory<kQuads>& memory, int lane, float4 (&x)[kQuads]) {
#pragma unroll
  for (int j = 0; j < kTurns; ++j) {
    const float4 cosine = QuadAt(memory.cosines, lane + kLanes * j);
    const float4 sine = QuadAt(memory.sines, lane + kLanes * j);
    float4& first = x[j];
    float4& second = x[j + kTurns];
    RotatePair(cosine.x, sine.x, &first.x, &second.x);
    RotatePair(cosine.y, sine.y, &first.y, &second.y);
    RotatePair(cosine.z, sine.z, &first.z, &second.z);
    RotatePair(cosine.w, sine.w, &first.w, &second.w);
  }
}

/// RoPE of `turns` of a lane's quads, which is at least kLeast.
template <int kQuads, int kLeast = 1>
MARLIN_DEVICE void RotateTurns(const RowMemory<kQuads>& memory, int turns, int lane,
                               float4 (&x)[kQuads]) {
  if constexpr (2 * kLeast <= kQuads) {
    if (turns == kLeast) {
      Rotate<kQuads, kLeast>(memory, lane, x);
    } else {
      RotateTurns<kQuads, kLeast + 1>(memory, turns, lane, x);
    }
  }
}

template <int kQuads>
MARLIN_DEVICE void LoadQuads(const RotateAppendArguments& args, int row, int number, int lane,
                             float4 (&x)[kQuads]) {
  const auto* const from = reinterpret_cast<const float4*>(SourceOf(args, row, number));
  if (from == nullptr) return;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) x[j] = __ldcg(from + lane + kLanes * j);
}

/// One branch for all quads.
template <int kQuads>
MARLIN_DEVICE void StoreQuads(const LaneHead& head, int lane, const float4 (&x)[kQuads]) {
  const auto store = [&](Element type) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      StoreFourCached(head.to, type, head.to_at + 4 * (lane + kLanes * j), x[j]);
    }
  };
  if (head.to_type == Element::kF32) return store(Element::kF32);
  if (head.to_type == Element::kBf16) return store(Element::kBf16);
  if (head.to_type == Element::kF16) return store(Element::kF16);
  store(Element::kE4M3);
}

/// Norms, rotates and stores the heads of a warp.
template <int kQuads, SumOrder kOrder>
MARLIN_DEVICE void FinishHeads(const RotateAppendArguments& args, const RowMemory<kQuads>& memory,
                               int row, int number, int lane, float4 (&x)[kQuads]) {
  const LaneHead head = FindHead(args, memory, row, number);
  Normalize<kQuads, kOrder>(memory, head.norm, args.epsilon, lane, x);
  if (head.rotates) {
    if constexpr (kOrder == SumOrder::kAdjacent) {
      Rotate<kQuads, kQuads / 2>(memory, lane, x);
    } else {
      RotateTurns(memory, args.rotary.pairs / kQuadFeatures, lane, x);
    }
  }
  if (head.to != nullptr) StoreQuads(head, lane, x);
}

/// Whether a warp, in which a lane has head `number`, has any head.
MARLIN_DEVICE bool HasHeads(const RotateAppendArguments& args, int number) {
  return number / kWarpHeads * kWarpHeads < args.AllHeads();
}

/// Heads of kQuads x 32 features.
template <int kQuads, SumOrder kOrder>
__global__ void __launch_bounds__(kMostWarps * 32, ResidentFor(kQuads))
    RotateRowsKernel(const __grid_constant__ RotateAppendArguments args) {
  __shared__ RowMemory<kQuads> memory;
  EnterChain();
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto row = static_cast<int>(blockIdx.x);
  if (row == 0) CheckFirstRows(args.sequences, args.errors);
  const int step = static_cast<int>(blockDim.x) / kLanes;
  int number = static_cast<int>(threadIdx.x) / kLanes;
  float4 x[kQuads] = {};
  float4 next[kQuads] = {};
  LoadQuads(args, row, number, lane, x);
  LoadQuads(args, row, number + step, lane, next);
  const int position = args.sequences.positions[row];
  if (position < 0) {
    if (threadIdx.x == 0) RecordError(args.errors, ValueError::kPosition, position, row);
    return;
  }
  memory.Fill(args, row, position);
  __syncthreads();
  // Two sets of registers in turn: to move one to the other would wait for its loads.
#pragma unroll 1
  while (HasHeads(args, number)) {
    FinishHeads<kQuads, kOrder>(args, memory, row, number, lane, x);
    LoadQuads(args, row, number + 2 * step, lane, x);
    if (!HasHeads(args, number + step)) return;
    FinishHeads<kQuads, kOrder>(args, memory, row, number + step, lane, next);
    number += 2 * step;
    LoadQuads(args, row, number + step, lane, next);
  }
}

using RotateRows = void (*)(RotateAppendArguments);

/// Null: no kernel has heads of these features.
RotateRows KernelOf(const RotateAppendArguments& args) {
  const bool halves = 2 * args.rotary.pairs == args.pages.key_dim;
  switch (args.pages.key_dim) {
    case 64:
      return halves ? &RotateRowsKernel<2, SumOrder::kAdjacent>
                    : &RotateRowsKernel<2, SumOrder::kStrided>;
    case 96:
      return &RotateRowsKernel<3, SumOrder::kStrided>;
    case 128:
      return halves ? &RotateRowsKernel<4, SumOrder::kAdjacent>
                    : &RotateRowsKernel<4, SumOrder::kStrided>;
    case 192:
      return &RotateRowsKernel<6, SumOrder::kStrided>;
    case 256:
      return &RotateRowsKernel<8, SumOrder::kStrided>;
    default:
      return nullptr;
  }
}

/// Warps of a CTA: each takes as many heads as another, and four times in a row or less often.
int WarpsFor(int heads) {
  const int groups = (heads + kWarpHeads - 1) / kWarpHeads;
  const int least = std::max(groups / 4, (groups + kMostWarps - 1) / kMostWarps);
  return (groups + least - 1) / least;
}

}  // namespace

bool HasVectorHeads(const RotateAppendArguments& args) {
  const auto aligned = [](const RowsView& rows) {
    return rows.type == Element::kF32 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 &&
           rows.stride % 4 == 0 && rows.inner_stride % 4 == 0;
  };
  const PagesView& pages = args.pages;
  return pages.value_dim == pages.key_dim && pages.page_stride % 4 == 0 &&
         pages.first_element % 4 == 0 && args.slabs_are_aligned && aligned(args.queries) &&
         aligned(args.keys) && aligned(args.values);
}

cudaError_t LoadRotateRows() {
  return PrepareKernels(
      &RotateRowsKernel<2, SumOrder::kAdjacent>, &RotateRowsKernel<2, SumOrder::kStrided>,
      &RotateRowsKernel<3, SumOrder::kStrided>, &RotateRowsKernel<4, SumOrder::kAdjacent>,
      &RotateRowsKernel<4, SumOrder::kStrided>, &RotateRowsKernel<6, SumOrder::kStrided>,
      &RotateRowsKernel<8, SumOrder::kStrided>);
}

bool TakesRotateRows(const RotateAppendArguments& args) {
  const bool turns = args.rotary.pairs == 0 || !args.rotary.interleaved;
  return turns && args.rotary.pairs % kQuadFeatures == 0 && KernelOf(args) != nullptr &&
         HasVectorHeads(args);
}

cudaError_t LaunchRotateRows(const RotateAppendArguments& args, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(args.sequences.rows));
  return LaunchInChain(KernelOf(args), rows, WarpsFor(args.AllHeads()) * 32, 0, stream, args);
}

}  // namespace marlin::cuda
