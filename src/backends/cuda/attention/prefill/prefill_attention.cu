// Attention of tiles of query rows on asynchronous products (wgmma), over a paged bf16 or e4m3
// cache: prefill on Hopper. On other GPUs mma_attention.cu runs.
//
//   A CTA takes 64 or 128 query rows of one KV head of a sequence (row r is query head r % group of
//   token r / group) and all of their keys. A producer warpgroup copies blocks of keys and values
//   through two rings of two stages, in the swizzle of the products, and widens codes of e4m3 to
//   bf16 on the way, exactly. Each consumer warpgroup has 64 rows and their softmax; while one
//   weighs scores, the other one's products run. Tiles with most keys begin first, so that the
//   last wave of CTAs is short.
//
//   A value that is NaN or Inf would spread through the zero weights of rows that do not see its
//   key: where some rows of a warpgroup do not, it looks for such values, and then adds key by key
//   (rare).
#include <algorithm>

#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/prefill/tile_rows.cuh"
#include "backends/cuda/attention/prefill/warpgroup_attention.cuh"
#include "backends/cuda/common/chain.cuh"

namespace marlin::cuda {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kStages = 2;
constexpr int kPageKeys = kCachePageTokens;

/// kWarpgroups: consumer warpgroups, of kWarpgroupRows rows each. kKeys: keys of a block.
/// kFeatures: value features, at most. kCaps: scores are capped. kTerms: bf16 terms of queries and
/// softmax weights.
template <int kWarpgroups_, int kKeys_, int kFeatures_, bool kCaps, int kTerms_>
struct TileShape {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kFeatures = kFeatures_;
  static constexpr int kTerms = kTerms_;
  static constexpr int kRows = kWarpgroups * kWarpgroupRows;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static_assert(kKeys % kPageKeys == 0);

  /// No variable: code without wgmma would not use it.
  static MARLIN_DEVICE constexpr bool Caps() { return kCaps; }
};

/// Offsets in shared memory.
template <typename Shape>
struct Layout {
  int key_panels;

  MARLIN_HOST_DEVICE explicit Layout(int key_dim) : key_panels(PanelsOf(key_dim)) {}

  static constexpr int kValueBytes = Shape::kKeys * kPanelRowBytes * PanelsOf(Shape::kFeatures);
  MARLIN_HOST_DEVICE int KeyBytes() const { return Shape::kKeys * kPanelRowBytes * key_panels; }
  MARLIN_HOST_DEVICE int QueryBytes() const { return Shape::kRows * kPanelRowBytes * key_panels; }
  MARLIN_HOST_DEVICE int KeysAt(int stage) const {
    return Shape::kTerms * QueryBytes() + stage * KeyBytes();
  }
  MARLIN_HOST_DEVICE int ValuesAt(int stage) const { return KeysAt(kStages) + stage * kValueBytes; }
  /// An mbarrier for each stage: keys are full, values are full, keys are free, values are free.
  MARLIN_HOST_DEVICE int BarriersAt() const { return ValuesAt(kStages); }
  MARLIN_HOST_DEVICE int Bytes() const { return BarriersAt() + 4 * kStages * 8; }
};

[[maybe_unused]] MARLIN_DEVICE int CeilDivide(int value, int divisor) {
  return (value + divisor - 1) / divisor;
}

/// A CTA's blocks of keys, and the stages through which they go.
template <typename Shape>
struct Ring {
  int first_block;
  int end_block;
  uint32_t shared;  ///< Address of the CTA's shared memory.
  Layout<Shape> layout;

  MARLIN_DEVICE Ring(const KeySpan& visible, int key_dim, uint32_t address)
      : first_block(visible.first / Shape::kKeys),
        end_block(CeilDivide(visible.end, Shape::kKeys)),
        shared(address),
        layout(key_dim) {}

  MARLIN_DEVICE int StageOf(int block) const { return (block - first_block) % kStages; }
  MARLIN_DEVICE int ParityOf(int block) const { return (block - first_block) / kStages & 1; }
  MARLIN_DEVICE uint32_t Keys(int block) const { return shared + layout.KeysAt(StageOf(block)); }
  MARLIN_DEVICE uint32_t Values(int block) const {
    return shared + layout.ValuesAt(StageOf(block));
  }
  MARLIN_DEVICE uint32_t KeysFull(int block) const { return Barrier(0, block); }
  MARLIN_DEVICE uint32_t ValuesFull(int block) const { return Barrier(1, block); }
  MARLIN_DEVICE uint32_t KeysFree(int block) const { return Barrier(2, block); }
  MARLIN_DEVICE uint32_t ValuesFree(int block) const { return Barrier(3, block); }

  /// Called by one thread.
  MARLIN_DEVICE void InitBarriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      const int block = first_block + stage;
      for (const uint32_t full : {KeysFull(block), ValuesFull(block)}) {
        InitBarrier(full, kWarpgroup);
      }
      for (const uint32_t free : {KeysFree(block), ValuesFree(block)}) {
        InitBarrier(free, 4 * Shape::kWarpgroups);
      }
    }
    FenceBarrierInit();
  }

 private:
  MARLIN_DEVICE uint32_t Barrier(int kind, int block) const {
    return shared + layout.BarriersAt() + (kind * kStages + StageOf(block)) * 8;
  }
};

/// One arrival of a warp, after what its lanes did before.
[[maybe_unused]] MARLIN_DEVICE void ArriveAsWarp(uint32_t barrier) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) Arrive(barrier);
}

/// The producer warpgroup: threads 0 to 127.
template <typename Shape, bool kFp8>
class Producer {
 public:
  MARLIN_DEVICE Producer(const AttentionArguments& args, const Tile& tile, const KeySpan& visible,
                         const Ring<Shape>& ring)
      : args_(args), tile_(tile), visible_(visible), ring_(ring) {}

  MARLIN_DEVICE void Run() const {
    const int64_t values = KeyElements(args_.pages);
    for (int block = ring_.first_block; block < ring_.end_block; ++block) {
      const uint8_t* pages[kPages];
#pragma unroll
      for (int i = 0; i < kPages; ++i) pages[i] = PageOf(block * Shape::kKeys + i * kPageKeys);
      const int parity = ring_.ParityOf(block) ^ 1;
      Wait(ring_.KeysFree(block), parity);
      CopyBlock(block, pages, 0, args_.key_dim, ring_.Keys(block));
      Publish(ring_.KeysFull(block));
      Wait(ring_.ValuesFree(block), parity);
      CopyBlock(block, pages, values, args_.value_dim, ring_.Values(block));
      Publish(ring_.ValuesFull(block));
    }
  }

 private:
  static constexpr int kElement = kFp8 ? 1 : 2;  ///< Bytes of an element of the cache.
  static constexpr int kPages = Shape::kKeys / kPageKeys;

  /// Arrives when this thread's part of a block is there; the consumers fence for their products.
  static MARLIN_DEVICE void Publish(uint32_t barrier) {
    if constexpr (kFp8) {
      Arrive(barrier);
    } else {
      ArriveWithCopies(barrier);
    }
  }

  /// The page of keys [first, first + 64); null without one, or if no row of the tile sees them.
  MARLIN_DEVICE const uint8_t* PageOf(int first) const {
    if (first >= visible_.end || first + kPageKeys <= visible_.first) return nullptr;
    return FindPage(args_.sequences, args_.pages, tile_.sequence, first, args_.errors);
  }

  /// Requests the keys or values of a block, which begin `first_element` elements into its pages.
  MARLIN_DEVICE void CopyBlock(int block, const uint8_t* const (&pages)[kPages],
                               int64_t first_element, int features, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int first = block * Shape::kKeys + i * kPageKeys;
      const int64_t place = static_cast<int64_t>(tile_.kv_head) * args_.pages.page_tokens +
                            first % args_.pages.page_tokens;
      const int64_t element = first_element + place * features;
      CopyPage(pages[i] == nullptr ? nullptr : pages[i] + element * kElement, first, features,
               to + i * kPageKeys * kPanelRowBytes);
    }
  }

  /// Keys [first, first + 64), of which `from` is the first row; zeros for keys that no row of the
  /// tile sees.
  MARLIN_DEVICE void CopyPage(const uint8_t* from, int first, int features, uint32_t to) const {
    const int units = features / kUnit;
    const int width = units <= 8 ? 8 : 16;
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread / width;
    // Rows of a thread are a multiple of 8 apart: all have its place in the swizzle.
    const int step = kWarpgroup / width;
    const int begin = visible_.first - first - row;
    const int end = (from == nullptr ? 0 : visible_.end - first) - row;
#pragma unroll 1
    for (int unit = thread & (width - 1); unit < units; unit += width) {
      const uint8_t* source = from + (row * features + unit * kUnit) * kElement;
      uint32_t target = to + PlaceInPanels(Shape::kKeys, row, unit * (kUnit / 8));
#pragma unroll 1
      for (int i = 0; i < kPageKeys; i += kBatch * step) {
        CopyRows(source, target, step, features * kElement, begin - i, end - i);
        source += kBatch * step * features * kElement;
        target += kBatch * step * kPanelRowBytes;
      }
    }
  }

  static constexpr int kUnit = 16 / kElement;  ///< Elements that a thread copies of a row.
  static constexpr int kBatch = 4;             ///< Rows whose codes are in flight together.
  static_assert(kPageKeys % (kBatch * 16) == 0);

  /// Copies a unit of kBatch rows that are `step` rows apart. Those at [begin, end) are seen.
  MARLIN_DEVICE void CopyRows(const uint8_t* from, uint32_t to, int step, int row_bytes, int begin,
                              int end) const {
    if constexpr (kFp8) {
      uint4 codes[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool seen = i * step >= begin && i * step < end;
        codes[i] = seen ? *reinterpret_cast<const uint4*>(from + i * step * row_bytes) : uint4();
      }
      // Two units of a row, whose places differ in one bit of the swizzle.
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t row = to + i * step * kPanelRowBytes;
        StoreShared16(row, WidenCodes({codes[i].x, codes[i].y}));
        StoreShared16(row ^ 16, WidenCodes({codes[i].z, codes[i].w}));
      }
    } else {
      const uint8_t* const anywhere = AnyAlignedAddress(args_.sequences);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool seen = i * step >= begin && i * step < end;
        CopyAsync16(to + i * step * kPanelRowBytes, seen ? from + i * step * row_bytes : anywhere,
                    seen ? 16 : 0);
      }
    }
  }

  const AttentionArguments& args_;
  const Tile& tile_;
  KeySpan visible_;
  Ring<Shape> ring_;
};

/// A consumer warpgroup, number `warpgroup` of the CTA's.
template <typename Shape>
class Consumer {
 public:
  MARLIN_DEVICE Consumer(const AttentionArguments& args, const Tile& tile, const Ring<Shape>& ring,
                         int warpgroup)
      : args_(args),
        tile_(tile),
        ring_(ring),
        warpgroup_(warpgroup),
        first_row_(warpgroup * kWarpgroupRows),
        blocks_(args, tile, first_row_, kWarpgroupRows, Shape::kKeys),
        attention_(QueriesOf(ring, warpgroup), args.key_dim, args.value_dim) {}

  MARLIN_DEVICE void Run() {
    WithType(args_.queries.type, [&](auto zero) { LoadQueries(zero); });
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int row = first_row_ + (static_cast<int>(threadIdx.x) >> 5 & 3) * kWarpRows + (lane >> 2);
    Scores scores = {};
    if (warpgroup_ == 1) PassTurn();
    WaitFor(ring_.KeysFull(ring_.first_block), ring_.first_block);
    TakeTurn();
    BeginScores(ring_.first_block, scores);
    PassTurn();
    attention_.EndProducts(scores);
    ArriveAsWarp(ring_.KeysFree(ring_.first_block));
#pragma unroll 1
    for (int block = ring_.first_block; block < ring_.end_block; ++block) {
      const uint32_t values = ring_.Values(block);
      const bool seen = blocks_.Sees(block);
      bool by_key = false;
      if (Shape::Caps() && seen) CapScores(args_.softcap, scores);
      if (seen && blocks_.IsMasked(block)) {
        WaitFor(ring_.ValuesFull(block), block);
        attention_.rows().Mask(
            block * Shape::kKeys, [&](int half) { return VisibleTo(args_, tile_, row + 8 * half); },
            scores);
        by_key = !attention_.AreFinite(warpgroup_, values);
      }
      Weights weights;
      if (by_key) {
        attention_.AddByKey(values, scores);
      } else if (seen) {
        attention_.rows().Weigh(scores, weights);
      }
      const int next = block + 1;
      const bool last = next == ring_.end_block;
      WaitFor(ring_.ValuesFull(block), block);
      if (!last) WaitFor(ring_.KeysFull(next), next);
      TakeTurn();
      if (seen && !by_key) attention_.BeginValues(values, weights);
      if (!last) BeginScores(next, scores);
      PassTurn();
      attention_.EndProducts(scores);
      ArriveAsWarp(ring_.ValuesFree(block));
      if (!last) ArriveAsWarp(ring_.KeysFree(next));
    }
    // The other warpgroup's last pass.
    if (warpgroup_ == 0) TakeTurn();
    WithType(args_.out.type,
             [&](auto zero) { StoreRows<decltype(zero)>(args_, tile_, row, attention_.rows()); });
  }

 private:
  using Attention = WarpgroupAttention<Shape::kKeys, Shape::kFeatures, Shape::kTerms>;
  using Scores = typename Attention::Scores;
  using Weights = typename Attention::Weights;

  static MARLIN_DEVICE WarpgroupQueries QueriesOf(const Ring<Shape>& ring, int warpgroup) {
    const uint32_t rounded = ring.shared + warpgroup * kWarpgroupRows * kPanelRowBytes;
    return {rounded, rounded + ring.layout.QueryBytes(), Shape::kRows * kPanelRowBytes};
  }

  /// Waits until the keys or values of a block have arrived for the products.
  MARLIN_DEVICE void WaitFor(uint32_t full, int block) const {
    Wait(full, ring_.ParityOf(block));
    FenceAsyncProxy();
  }

  /// Two warpgroups take turns to begin products: while one's run, the other one weighs scores.
  MARLIN_DEVICE void TakeTurn() const {
    if constexpr (Shape::kWarpgroups == 2) {
      asm volatile("bar.sync %0, 256;" ::"r"(3 + warpgroup_) : "memory");
    }
  }
  MARLIN_DEVICE void PassTurn() const {
    if constexpr (Shape::kWarpgroups == 2) {
      asm volatile("bar.arrive %0, 256;" ::"r"(4 - warpgroup_) : "memory");
    }
  }

  /// Begins the scores of a block, whose keys have arrived.
  MARLIN_DEVICE void BeginScores(int block, Scores& scores) const {
    if (blocks_.Sees(block)) attention_.BeginScores(ring_.Keys(block), scores);
  }

  /// Loads the warpgroup's rows of queries, scaled, as bf16 terms; zeros for rows that do not
  /// exist.
  template <typename T>
  MARLIN_DEVICE void LoadQueries(T /*zero*/) const {
    const int first = first_row_ + (static_cast<int>(threadIdx.x) >> 5 & 3) * kWarpRows;
    LoadQueryRows<T>(
        args_, tile_, first, args_.scale * kLog2E, [&](int row, int pair, float low, float high) {
          uint32_t rounded;
          uint32_t rest;
          SplitInTwo(low, high, &rounded, &rest);
          const uint32_t to =
              ring_.shared + PlaceInPanels(Shape::kRows, first + row, pair >> 2) + (pair & 3) * 4;
          StoreShared4(to, rounded);
          if constexpr (Shape::kTerms == 2) StoreShared4(to + ring_.layout.QueryBytes(), rest);
        });
    FenceAsyncProxy();
    SyncWarpgroup(warpgroup_);
  }

  const AttentionArguments& args_;
  const Tile& tile_;
  Ring<Shape> ring_;
  int warpgroup_;
  int first_row_;
  SeenBlocks blocks_;
  Attention attention_;
};

/// blockIdx.x: as FindTileFromLast.
template <typename Shape, bool kFp8>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    PrefillAttentionKernel(const __grid_constant__ AttentionArguments args) {
  if constexpr (kHasWgmma) {
    extern __shared__ __align__(1024) uint8_t memory[];
    EnterChain();
    const Tile tile = FindTileFromLast(args, Shape::kRows);
    if (tile.sequence < 0) return;
    const KeySpan visible = {VisibleTo(args, tile, 0).first,
                             VisibleTo(args, tile, Shape::kRows).end};
    const Ring<Shape> ring(visible, args.key_dim, SharedAddress(memory));
    if (threadIdx.x == 0) ring.InitBarriers();
    __syncthreads();
    const int warp = WarpOfBlock();
    if (warp < 4) {
      if constexpr (Shape::kWarpgroups == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
      Producer<Shape, kFp8>(args, tile, visible, ring).Run();
    } else {
      if constexpr (Shape::kWarpgroups == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
      Consumer<Shape>(args, tile, ring, warp / 4 - 1).Run();
    }
  } else {
    __trap();
  }
}

/// A kernel and its launch.
struct PrefillKernel {
  void (*kernel)(AttentionArguments);
  int threads;
  int shared_bytes;
};

/// The properties of a call that choose its kernel.
struct PrefillCase {
  int key_dim;
  int value_dim;
  bool caps;
  bool one_term = false;
  bool fp8 = false;
};

template <int kTerms, int kWarpgroups, int kKeys, int kFeatures, bool kCaps = false>
PrefillKernel KernelOf(const PrefillCase& of) {
  using Shape = TileShape<kWarpgroups, kKeys, kFeatures, kCaps, kTerms>;
  static_assert(Shape::kRows == PrefillRows(kFeatures, kTerms == 1));
  return {of.fp8 ? &PrefillAttentionKernel<Shape, true> : &PrefillAttentionKernel<Shape, false>,
          Shape::kThreads, Layout<Shape>(of.key_dim).Bytes()};
}

/// The kernel whose blocks have the most keys that fit. Caps of 128 keys would spill registers.
template <int kTerms>
PrefillKernel KernelFor(const PrefillCase& of) {
  constexpr int kWidestKeys = kTerms == 1 ? 192 : 128;
  constexpr int kWideWarpgroups = kTerms == 1 ? 2 : 1;
  if (of.caps) {
    return of.value_dim > 128 ? KernelOf<kTerms, kWideWarpgroups, 64, 256, true>(of)
                              : KernelOf<kTerms, 2, 64, 128, true>(of);
  }
  if (of.value_dim > 128) return KernelOf<kTerms, kWideWarpgroups, 64, 256>(of);
  if (of.key_dim > kWidestKeys) return KernelOf<kTerms, 2, 64, 128>(of);
  if (of.value_dim > 64) return KernelOf<kTerms, 2, 128, 128>(of);
  return KernelOf<kTerms, 2, 128, 64>(of);
}
PrefillKernel KernelFor(const PrefillCase& of) {
  return of.one_term ? KernelFor<1>(of) : KernelFor<2>(of);
}

}  // namespace

cudaError_t LoadPrefillAttention() {
  constexpr PrefillCase kCases[] = {{64, 256, false}, {256, 128, false}, {128, 128, false},
                                    {128, 64, false}, {64, 256, true},   {64, 128, true}};
  for (PrefillCase of : kCases) {
    for (const bool one_term : {false, true}) {
      of.one_term = one_term;
      PrefillCase fp8 = of;
      fp8.fp8 = true;
      const cudaError_t error = PrepareSharedKernels(KernelFor(of).kernel, KernelFor(fp8).kernel);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchPrefillAttention(const AttentionArguments& args, cudaStream_t stream) {
  const bool fp8 = args.pages.type == Element::kE4M3;
  const PrefillKernel of =
      KernelFor({args.key_dim, args.value_dim, args.softcap != 0.0f, args.one_term, fp8});
  const auto ctas = static_cast<unsigned>(args.tiles) * static_cast<unsigned>(args.kv_heads);
  return LaunchInChain(of.kernel, dim3(ctas), of.threads, of.shared_bytes, stream, args);
}

}  // namespace marlin::cuda
