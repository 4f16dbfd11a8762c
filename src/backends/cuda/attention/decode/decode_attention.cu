// Attention of one token per CTA on matrix units, over a paged bf16 or e4m3 cache: decode,
// split-KV.
//
//   A CTA takes up to 16 query heads of one KV head of one token, and a run of blocks of keys,
//   which is one of `segments` equal parts of the token's keys. A warp takes 16 keys of every
//   block, with its own softmax (matrix_softmax.cuh) and its own ring of two stages. The CTA merges
//   its warps, and the last CTA of a token's KV head merges the parts in their order: a counter
//   tells it that it is the last. Without counters a second kernel merges.
//
//   Registers hold the sums of 256 features. Of wider heads, two warps take the same 16 keys and a
//   half of the values each; both compute all scores. Where shared memory is small, rings of wide
//   heads are of two or four warps, so that there are fewer.
//
//   Codes of e4m3 go through the ring as they are; a warp widens its keys and values to bf16 beside
//   it, exactly, before it adds them.
//
//   Keys outside the window or after the token are zeros, so that they cannot spread NaN.
#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/decode/decode_layout.h"
#include "backends/cuda/attention/latent/matrix_softmax.cuh"
#include "backends/cuda/attention/visible_keys.cuh"
#include "backends/cuda/common/chain.cuh"

namespace marlin::cuda {
namespace {

constexpr int kWarps = kDecodeWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = kDecodeStages;
constexpr int kHeads = kDecodeHeads;
static_assert(kHeads == kWarpRows);

/// The token, the query heads and the keys of a CTA.
struct Task {
  int row;
  int kv_head;
  int first_head;  ///< Within the group of the KV head.
  int heads;
  int sequence;
  KeySpan visible;
  int first_block;
  int end_block;

  MARLIN_DEVICE Task(const AttentionArguments& args, int block_keys) {
    const int tiles = (args.group + kHeads - 1) / kHeads;
    row = static_cast<int>(blockIdx.x) / tiles;
    kv_head = static_cast<int>(blockIdx.y);
    first_head = static_cast<int>(blockIdx.x) % tiles * kHeads;
    heads = min(args.group - first_head, kHeads);
    sequence = SequenceOf(args.sequences, row);
    const int position = args.sequences.positions[row];
    // A position beyond the pages is recorded as an error, and has no keys.
    const int64_t capacity = static_cast<int64_t>(args.sequences.blocks) * args.pages.page_tokens;
    visible.end = position < capacity ? max(position, 0) + 1 : 0;
    visible.first = FirstVisibleKey(args, max(visible.end - 1, 0));
    const int first = visible.first / block_keys;
    const int blocks = (visible.end + block_keys - 1) / block_keys - first;
    const int part = (blocks + args.segments - 1) / args.segments;
    first_block = first + static_cast<int>(blockIdx.z) * part;
    end_block = min(first_block + part, first + blocks);
  }

  MARLIN_DEVICE int HeadOf(const AttentionArguments& args, int head) const {
    return kv_head * args.group + first_head + head;
  }
  /// The first element of a head of queries or out.
  MARLIN_DEVICE int64_t ElementOf(const AttentionArguments& args, const RowsView& view,
                                  int head) const {
    return view.At(row, HeadOf(args, head));
  }
  MARLIN_DEVICE int64_t Tile() const {
    return static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
  }
  /// The sums of a part: the maxima and the sums of weights of kHeads heads, weighted values.
  MARLIN_DEVICE float* Partial(const AttentionArguments& args, int segment) const {
    return args.partials +
           (Tile() * args.segments + segment) * PartialFloats(kHeads, args.value_dim);
  }
};

/// Records a position that is negative, does not follow the one before, or has no page.
MARLIN_DEVICE void CheckTask(const AttentionArguments& args, const Task& task) {
  if (threadIdx.x != 0 || blockIdx.y != 0 || blockIdx.z != 0) return;
  if (!CheckPosition(args.sequences, task.sequence, task.row, args.errors)) return;
  FindPage(args.sequences, args.pages, task.sequence, args.sequences.positions[task.row],
           args.errors);
}

/// The merge of parts in their order, for four adjacent features of a head.
class PartsMerge {
 public:
  MARLIN_DEVICE void Add(float largest, float sum, const float4& values) {
    const float together = fmaxf(largest_, largest);
    const float old_factor = RescaleFactor(largest_, together);
    const float new_factor = RescaleFactor(largest, together);
    largest_ = together;
    sum_ = __fmaf_rn(sum, new_factor, sum_ * old_factor);
    values_.x = __fmaf_rn(values.x, new_factor, values_.x * old_factor);
    values_.y = __fmaf_rn(values.y, new_factor, values_.y * old_factor);
    values_.z = __fmaf_rn(values.z, new_factor, values_.z * old_factor);
    values_.w = __fmaf_rn(values.w, new_factor, values_.w * old_factor);
  }

  MARLIN_DEVICE void Finish(const AttentionArguments& args, const Task& task, int head,
                            int feature) const {
    const SoftmaxFinish finish(args, task.HeadOf(args, head), largest_, sum_);
    const int64_t at = task.ElementOf(args, args.out, head) + feature;
    const float values[4] = {finish.Of(values_.x), finish.Of(values_.y), finish.Of(values_.z),
                             finish.Of(values_.w)};
    StoreAdjacent(args.out.data, args.out.type, at, values);
  }

  MARLIN_DEVICE void StorePartial(const AttentionArguments& args, int head, int feature,
                                  float* partial) const {
    if (feature == 0) {
      partial[head] = largest_;
      partial[kHeads + head] = sum_;
    }
    float* const to = partial + 2 * kHeads + head * args.value_dim + feature;
    *reinterpret_cast<float4*>(to) = values_;
  }

 private:
  float largest_ = NoScore();
  float sum_ = 0.0f;
  float4 values_ = {0.0f, 0.0f, 0.0f, 0.0f};
};

/// Calls run(head, feature) for every fourth feature of the CTA's heads.
template <typename Run>
MARLIN_DEVICE void ForQuads(const AttentionArguments& args, const Task& task, const Run& run) {
  for (int head = static_cast<int>(threadIdx.x) >> 5; head < task.heads; head += kWarps) {
    for (int quad = static_cast<int>(threadIdx.x) & 31; quad < args.value_dim / 4; quad += 32) {
      run(head, quad * 4);
    }
  }
}

/// A warp's keys of the CTA's blocks, which it has in common with its team.
template <int kTiles, bool kFp8, int kSlices>
class WarpKeys {
 public:
  /// Initializes the mbarriers of the ring.
  MARLIN_DEVICE WarpKeys(const AttentionArguments& args, uint32_t shared)
      : args_(args),
        layout_(args.key_dim, args.value_dim, kFp8),
        lane_(static_cast<int>(threadIdx.x) & 31),
        team_(static_cast<int>(threadIdx.x) / (32 * kSlices)),
        slice_(static_cast<int>(threadIdx.x) / 32 % kSlices),
        ring_(shared + team_ * layout_.TeamBytes()),
        barriers_(shared + layout_.BarriersAt(args.value_dim) + team_ * kStages * kBarrierBytes) {
    if (lane_ == 0 && slice_ == 0) {
      for (int stage = 0; stage < kStages; ++stage) InitBarrier(Barrier(stage), kCopyArrivals);
      FenceBarrierInit();
    }
    Sync();
  }

  MARLIN_DEVICE int team() const { return team_; }
  /// The first value feature of the warp.
  MARLIN_DEVICE int first_feature() const { return slice_ * kTiles * 16; }

  /// Adds all keys; calls prepare() once, after the first request.
  template <typename Softmax, typename Prepare>
  MARLIN_DEVICE void Run(const Task& task, Softmax& softmax, const Prepare& prepare) const {
    const int blocks = max(task.end_block - task.first_block, 0);
#pragma unroll 1
    for (int next = 0; next <= blocks; ++next) {
      if (next < blocks && slice_ == 0) Request(task, next);
      const int n = next - 1;
      if (n < 0) {
        prepare();
        continue;
      }
      Wait(Barrier(n), n / kStages & 1);
      Sync();
      uint32_t keys = Keys(n);
      uint32_t values = Values(n);
      if constexpr (kFp8) Widen(&keys, &values);
      softmax.Add(keys, values + first_feature() * 2, FirstKey(task, n),
                  [&](int) { return task.visible; });
      Sync();
    }
    softmax.SumLanes();
  }

 private:
  /// Waits for the team, whose shared memory it then sees.
  MARLIN_DEVICE void Sync() const {
    if constexpr (kSlices == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team_), "n"(kSlices * 32) : "memory");
    }
  }
  MARLIN_DEVICE uint32_t Barrier(int n) const { return barriers_ + n % kStages * kBarrierBytes; }
  MARLIN_DEVICE uint32_t Keys(int n) const { return ring_ + n % kStages * layout_.StageBytes(); }
  MARLIN_DEVICE uint32_t Values(int n) const {
    return Keys(n) + kWarpKeys * layout_.copied_key_row;
  }
  /// Widens a stage's codes to bf16, which the addresses then refer to.
  MARLIN_DEVICE void Widen(uint32_t* keys, uint32_t* values) const {
    const uint32_t wide_keys = ring_ + kStages * layout_.StageBytes();
    const uint32_t wide_values = wide_keys + kWarpKeys * layout_.key_row;
    const int thread = slice_ * 32 + lane_;
    constexpr int kTeam = kSlices * 32;
    WidenRows(*keys, kWarpKeys, args_.key_dim, wide_keys, layout_.key_row, thread, kTeam);
    WidenRows(*values, kWarpKeys, args_.value_dim, wide_values, layout_.value_row, thread, kTeam);
    Sync();
    *keys = wide_keys;
    *values = wide_values;
  }
  MARLIN_DEVICE int FirstKey(const Task& task, int n) const {
    return (task.first_block + n) * DecodeTeams<kSlices>::kBlockKeys + team_ * kWarpKeys;
  }

  /// Requests the team's keys and values of block n of the CTA, zeros for keys that are not seen.
  /// Called by the first warp.
  MARLIN_DEVICE void Request(const Task& task, int n) const {
    const uint8_t* const page =
        FindPage(args_.sequences, args_.pages, task.sequence, FirstKey(task, n), args_.errors);
    if constexpr (kHasTma) {
      RequestRows(task, n, page);
    } else {
      RequestPieces(task, n, page);
    }
  }

  /// A lane has a row of keys or values, which is one TMA bulk copy, or zeros.
  MARLIN_DEVICE void RequestRows(const Task& task, int n, const uint8_t* page) const {
    const int first = FirstKey(task, n);
    const bool is_value = lane_ >= kWarpKeys;
    const int row = lane_ % kWarpKeys;
    const int features = is_value ? args_.value_dim : args_.key_dim;
    const int key = first + row;
    const bool seen = page != nullptr && key >= task.visible.first && key < task.visible.end;
    const unsigned rows = __ballot_sync(~0u, seen);
    if (lane_ == 0) {
      constexpr unsigned kKeyLanes = (1u << kWarpKeys) - 1;
      ArriveExpecting(Barrier(n), __popc(rows & kKeyLanes) * args_.key_dim * kElement +
                                      __popc(rows & ~kKeyLanes) * args_.value_dim * kElement);
    }
    __syncwarp();
    const uint32_t to = is_value ? Values(n) + row * layout_.copied_value_row
                                 : Keys(n) + row * layout_.copied_key_row;
    if (seen) {
      const int64_t place = static_cast<int64_t>(task.kv_head) * args_.pages.page_tokens +
                            first % args_.pages.page_tokens + row;
      const int64_t element = (is_value ? KeyElements(args_.pages) : 0) + place * features;
      CopyBulk(to, page + element * kElement, features * kElement, Barrier(n));
      return;
    }
#pragma unroll 1
    for (int i = 0; i < features * kElement; i += 16) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + i), "r"(0) : "memory");
    }
  }

  /// The lanes share the rows' pieces of 16 bytes.
  MARLIN_DEVICE void RequestPieces(const Task& task, int n, const uint8_t* page) const {
    const int first = FirstKey(task, n);
    const int64_t place = static_cast<int64_t>(task.kv_head) * args_.pages.page_tokens +
                          first % args_.pages.page_tokens;
    const int64_t values = KeyElements(args_.pages) + place * args_.value_dim;
    const KeySpan seen = {task.visible.first - first,
                          page == nullptr ? 0 : task.visible.end - first};
    CopyPieces(page + place * args_.key_dim * kElement, args_.key_dim * kElement, seen, Keys(n),
               layout_.copied_key_row);
    CopyPieces(page + values * kElement, args_.value_dim * kElement, seen, Values(n),
               layout_.copied_value_row);
    ArriveWithCopies(Barrier(n));
  }

  /// `seen`: the rows that are copied.
  MARLIN_DEVICE void CopyPieces(const uint8_t* from, int from_row, const KeySpan& seen, uint32_t to,
                                int to_row) const {
    const uint8_t* const anywhere = AnyAlignedAddress(args_.sequences);
    const int pieces = from_row / 16;
    int row = lane_ / pieces;
    int piece = lane_ % pieces;
    const int row_step = 32 / pieces;
    const int piece_step = 32 % pieces;
#pragma unroll 4
    for (int i = lane_; i < kWarpKeys * pieces; i += 32) {
      const bool copied = row >= seen.first && row < seen.end;
      CopyAsync16(to + row * to_row + piece * 16, copied ? from + i * 16 : anywhere,
                  copied ? 16 : 0);
      row += row_step;
      piece += piece_step;
      if (piece >= pieces) {
        piece -= pieces;
        ++row;
      }
    }
  }

  static constexpr int kElement = kFp8 ? 1 : 2;  ///< Bytes of an element of the cache.

  const AttentionArguments& args_;
  DecodeLayout<kSlices> layout_;
  int lane_;
  int team_;
  int slice_;
  uint32_t ring_;
  uint32_t barriers_;
};

/// Called by all threads.
MARLIN_DEVICE void LoadQueries(const AttentionArguments& args, const Task& task, uint8_t* queries) {
  const int row_bytes = SharedRowBytes(args.key_dim);
#pragma unroll
  for (int i = 0; i < kHeads / kWarps; ++i) {
    const int head = i * kWarps + (static_cast<int>(threadIdx.x) >> 5);
    const bool exists = head < task.heads;
    LoadQueryRow(args.queries, exists ? task.ElementOf(args, args.queries, head) : 0, exists,
                 args.key_dim, queries + head * row_bytes, queries + (kHeads + head) * row_bytes);
  }
}

/// Merges the parts of a token's heads, which other CTAs wrote.
MARLIN_DEVICE void MergeParts(const AttentionArguments& args, const Task& task) {
  ForQuads(args, task, [&](int head, int feature) {
    PartsMerge merge;
    const float* part = task.Partial(args, 0);
#pragma unroll 4
    for (int segment = 0; segment < args.segments; ++segment) {
      const float* const values = part + 2 * kHeads + head * args.value_dim + feature;
      merge.Add(__ldcg(part + head), __ldcg(part + kHeads + head),
                __ldcg(reinterpret_cast<const float4*>(values)));
      part += PartialFloats(kHeads, args.value_dim);
    }
    merge.Finish(args, task, head, feature);
  });
}

/// Whether this CTA is the last of its token's KV head. Called by all threads, after their stores.
/// `last`: shared memory.
MARLIN_DEVICE bool IsLast(const AttentionArguments& args, const Task& task, int* last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* const counter = args.counters + task.Tile();
    // A counter begins at all ones, which is -1.
    *last = atomicAdd(counter, 1u) + 2 == static_cast<uint32_t>(args.segments) ? 1 : 0;
    if (*last != 0) *counter = ~0u;
    __threadfence();
  }
  __syncthreads();
  return *last != 0;
}

/// kTiles: tiles of 16 value features of a warp, at most.
template <int kTiles, bool kFp8, int kSlices>
__global__ void __launch_bounds__(kThreads, 1)
    DecodeAttentionKernel(const __grid_constant__ AttentionArguments args) {
  extern __shared__ __align__(16) uint8_t memory[];
  const WarpKeys<kTiles, kFp8, kSlices> keys(args, SharedAddress(memory));
  EnterChain();
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
    CheckFirstRows(args.sequences, args.errors);
  }
  const Task task(args, DecodeTeams<kSlices>::kBlockKeys);
  CheckTask(args, task);
  const DecodeLayout<kSlices> layout(args.key_dim, args.value_dim, kFp8);
  uint8_t* const queries = memory + layout.QueriesAt(args.value_dim);
  const WarpOperands operands = {SharedAddress(queries),
                                 SharedAddress(queries) + kHeads * layout.key_row, layout.key_row,
                                 layout.value_row};
  const int first_feature = keys.first_feature();
  WarpSoftmax<kTiles> softmax(operands, args.key_dim, args.value_dim - first_feature, args.scale,
                              args.softcap);
  keys.Run(task, softmax, [&] {
    LoadQueries(args, task, queries);
    __syncthreads();
  });
  __syncthreads();
  auto* const largest = reinterpret_cast<float*>(memory);
  constexpr int kTeams = DecodeTeams<kSlices>::kTeams;
  float* const sums = largest + kTeams * kHeads;
  float* const values = sums + kTeams * kHeads;
  const int stride = args.value_dim + kSumPadding;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = keys.team() * kHeads + (lane >> 2) + 8 * half;
    if ((lane & 3) == 0 && first_feature == 0) {
      largest[at] = softmax.largest(half);
      sums[at] = softmax.sum(half);
    }
    softmax.ForPairs(half, [&](int feature, float first, float second) {
      *reinterpret_cast<float2*>(values + at * stride + first_feature + feature) = {first, second};
    });
  }
  __syncthreads();
  ForQuads(args, task, [&](int head, int feature) {
    PartsMerge merge;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      const int at = team * kHeads + head;
      merge.Add(largest[at], sums[at],
                *reinterpret_cast<const float4*>(values + at * stride + feature));
    }
    if (args.segments == 1) {
      merge.Finish(args, task, head, feature);
    } else {
      merge.StorePartial(args, head, feature, task.Partial(args, static_cast<int>(blockIdx.z)));
    }
  });
  if (args.segments == 1 || args.counters == nullptr) return;
  if (IsLast(args, task, reinterpret_cast<int*>(queries))) MergeParts(args, task);
}

__global__ void __launch_bounds__(kThreads)
    MergePartsKernel(const __grid_constant__ AttentionArguments args) {
  EnterChain();
  // Blocks do not matter.
  MergeParts(args, Task(args, kCachePageTokens));
}

using Kernel = void (*)(AttentionArguments);

template <int kTiles, int kSlices>
Kernel KernelOf(bool fp8) {
  return fp8 ? &DecodeAttentionKernel<kTiles, true, kSlices>
             : &DecodeAttentionKernel<kTiles, false, kSlices>;
}

Kernel KernelFor(const DecodeShape& shape, bool fp8) {
  if (shape.slices == 4) return KernelOf<8, 4>(fp8);
  if (shape.slices == 2) return shape.tiles == 8 ? KernelOf<8, 2>(fp8) : KernelOf<16, 2>(fp8);
  if (shape.tiles == 4) return KernelOf<4, 1>(fp8);
  return shape.tiles == 8 ? KernelOf<8, 1>(fp8) : KernelOf<16, 1>(fp8);
}

}  // namespace

cudaError_t LoadDecodeAttention() {
  for (const DecodeShape& shape : kDecodeShapes) {
    const cudaError_t error = PrepareSharedKernels(KernelFor(shape, false), KernelFor(shape, true));
    if (error != cudaSuccess) return error;
  }
  return PrepareKernels(&MergePartsKernel);
}

cudaError_t LaunchDecodeAttention(const AttentionArguments& args, const DeviceShape& device,
                                  cudaStream_t stream) {
  const dim3 tiles(static_cast<unsigned>(args.tiles), static_cast<unsigned>(args.kv_heads));
  const dim3 grid(tiles.x, tiles.y, static_cast<unsigned>(args.segments));
  const bool fp8 = args.pages.type == Element::kE4M3;
  const DecodeShape shape = DecodeShapeFor(args.key_dim, args.value_dim, fp8, device.shared_bytes);
  const int bytes = shape.Bytes(args.key_dim, args.value_dim, fp8);
  const cudaError_t error =
      LaunchInChain(KernelFor(shape, fp8), grid, kThreads, bytes, stream, args);
  if (error != cudaSuccess || args.segments == 1 || args.counters != nullptr) return error;
  return LaunchInChain(&MergePartsKernel, tiles, kThreads, 0, stream, args);
}

}  // namespace marlin::cuda
