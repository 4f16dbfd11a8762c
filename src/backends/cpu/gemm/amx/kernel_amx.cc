#include <immintrin.h>

#include "backends/cpu/gemm/amx/amx_kernel.h"
#include "backends/cpu/gemm/amx/tile_fence.h"
#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/runtime/roofline.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::amx {
using namespace avx512;  // NOLINT(google-build-using-namespace): its names are this file's words.
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/gemm/bf16/bf16_operands.inl.h"

namespace {

constexpr int64_t kMaxPanelChunks = kMaxPanelK / kChunkK;
constexpr int64_t kTileElements = 512;                   ///< bf16 elements of an A or B tile.
constexpr int64_t kMTileElements = kTileM * kMaxPanelK;  ///< B tiles of an m tile in a KC block.

/// A chunk and the destination of its four A tiles.
struct TileChunk {
  const uint8_t* codes;
  const uint8_t* later;  ///< The chunk to prefetch.
  uint16_t* tiles;
};

template <int kBits, Kind kKind, GroupMode kMode>
void DecodeChunk(const PanelView& w, const GroupParameters& parameters, const ChunkGroups& groups,
                 const TileChunk& chunk) {
  constexpr int64_t kRowBytes = ChunkBytes(kBits) / kBlockRows;
  for (int row = 0; row < kBlockRows; ++row) {
    for (int64_t i = 0; i < kRowBytes; i += 64) {
      Prefetch(chunk.later + kRowBytes * row + i);
    }
    uint16_t* const tiles = chunk.tiles + row * kSliceK;
    DecodeBf16Row<kBits, kKind, kMode>(
        w, parameters, groups, chunk.codes,
        row, [&](auto j, I slice) __attribute__((always_inline)) {
          _mm512_store_si512(tiles + j * kTileElements, slice);
        });
  }
}

struct TileDecoder {
  void (*decode)(const PanelView&, const GroupParameters&, const ChunkGroups&, const TileChunk&);
  void (*locate)(const PanelView&, const GroupParameters&, int64_t first_chunk, int64_t chunk_count,
                 ChunkGroups* groups);
};

TileDecoder SelectDecoder(const PanelView& w) {
  return Dispatch(w, [](auto bits, auto kind, auto mode) -> TileDecoder {
    constexpr auto kMode = static_cast<GroupMode>(decltype(mode)::value);
    return {&DecodeChunk<decltype(bits)::value, static_cast<Kind>(decltype(kind)::value), kMode>,
            &LocateGroups<kMode>};
  });
}

/// Loop order over the panels of a job. At small M, k is the inner loop, which reads the weights in
/// memory order; at large M, strips are, so that a KC block of activations stays in L2.
class PanelOrder {
 public:
  explicit PanelOrder(const StripJob& job)
      : job_(job),
        k_fastest_(job.activations.m_tiles <= 2),
        panel_chunks_(job.activations.m_tiles <= 1 ? 1 : kMaxPanelChunks) {}
  /// Chunks of k per panel. With one m tile a panel is not reused, so a small one leaves more of L1
  /// (0.50 against 0.56 ms at m = 5).
  int64_t panel_chunks() const { return panel_chunks_; }
  bool k_fastest() const { return k_fastest_; }
  bool done() const { return strip_ >= job_.strips || chunk_ >= job_.weights->chunks; }
  int64_t strip() const { return strip_; }
  int64_t chunk() const { return chunk_; }
  void Advance() {
    if (k_fastest_) {
      chunk_ += panel_chunks_;
      if (chunk_ >= job_.weights->chunks) {
        chunk_ = 0;
        ++strip_;
      }
    } else if (++strip_ == job_.strips) {
      strip_ = 0;
      chunk_ += panel_chunks_;
    }
  }

 private:
  const StripJob& job_;
  bool k_fastest_;
  int64_t panel_chunks_;
  int64_t strip_ = 0;
  int64_t chunk_ = 0;
};

/// Decodes the panels of a job one after the other. Decoding is not interleaved with the tile
/// multiplies of the previous panel: that takes longer, because they fill the reorder buffer.
class PanelDecoder {
 public:
  PanelDecoder(const PanelView& weights, const PanelOrder& order, uint16_t* panel)
      : w_(weights),
        decoder_(SelectDecoder(weights)),
        order_(order),
        chunk_bytes_(ChunkBytes(weights.bits)),
        block_bytes_(weights.chunks * chunk_bytes_),
        panel_(panel) {}

  /// Decodes `chunks` chunks of two blocks, from chunk `first` on, to A tiles
  /// [2 blocks][kMaxPanelK / 32][16 n][32 k].
  void Decode(const int64_t* blocks, int64_t first, int64_t chunks) {
    for (int64_t i = 0; i < 2; ++i) {
      Parameters& parameters = parameters_[i];
      FillParameters(parameters, blocks[i], first, chunks);
      for (int64_t chunk = first; chunk < first + chunks; ++chunk) {
        const int64_t offset = chunk * chunk_bytes_;
        const uint8_t* codes = w_.codes + blocks[i] * block_bytes_ + offset;
        uint16_t* tiles = panel_ + (i * kMaxPanelChunks + chunk - first) * 4 * kTileElements;
        decoder_.decode(w_, parameters.values, parameters.groups[chunk - parameters.first_chunk],
                        {codes, codes + PrefetchDistance(offset), tiles});
      }
    }
  }

 private:
  struct Parameters {
    GroupParameters values;
    ChunkGroups groups[kPassChunks];
    int64_t block = -1;
    int64_t first_chunk = 0;
    int64_t last_chunk = 0;
  };

  /// Widens the group parameters of a panel unless they are cached; if k is the inner loop, also
  /// of the following panels, because a call costs as much as decoding two rows.
  void FillParameters(Parameters& parameters, int64_t block, int64_t first, int64_t chunks) {
    if (parameters.block == block && parameters.first_chunk <= first &&
        first + chunks <= parameters.last_chunk) {
      return;
    }
    const int64_t left = w_.chunks - first;
    const int64_t wanted = order_.k_fastest() ? kPassChunks : chunks;
    const int64_t count = left < wanted ? left : wanted;
    parameters.block = block;
    parameters.first_chunk = first;
    parameters.last_chunk = first + count;
    parameters.values.Fill(w_, block, first, count);
    decoder_.locate(w_, parameters.values, first, count, parameters.groups);
  }

  /// Byte distance to the codes to prefetch. If k is the inner loop: kPrefetchChunks ahead in the
  /// block, and at its end in the next strip, two blocks on. Else the same chunk of the next strip.
  int64_t PrefetchDistance(int64_t offset) const {
    if (!order_.k_fastest()) return 2 * block_bytes_;
    const int64_t ahead = kPrefetchChunks * chunk_bytes_;
    return offset + ahead < block_bytes_ ? ahead : ahead + block_bytes_;
  }

  static constexpr int64_t kPrefetchChunks = 4;

  const PanelView& w_;
  TileDecoder decoder_;
  const PanelOrder& order_;
  int64_t chunk_bytes_;
  int64_t block_bytes_;
  uint16_t* panel_;
  Parameters parameters_[2];  ///< One per block of a strip.
};

/// Operands of one panel times one or two m tiles.
struct PanelProduct {
  const uint16_t* panel;
  const uint16_t* high;  ///< B tiles of the first m tile at the panel's first k.
  const uint16_t* low;   ///< The same for the rounding errors, or null.
  int64_t steps;         ///< k / 32 of the panel.
  float* sums;           ///< C tiles [m tile][2][16][16].
};

/// Initialisation and write-back of the C tiles.
struct SumsPlan {
  bool zero;  ///< Start from zero.
  bool load;  ///< Start from memory. Neither: continue with the contents of the tile registers.
  bool store;
};

/// C tiles: 0 and 2 for the two blocks, 1 and 3 for the second m tile. With one m tile, 1 and 3
/// take every second k step: two accumulation chains would not hide the latency of 52 cycles.
template <bool kTwo>
MARLIN_SIMD_INLINE void StartSums(const SumsPlan& plan, const float* sums) {
  if (plan.zero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else if (plan.load) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(2, sums + 256, 64);
    if constexpr (kTwo) {
      _tile_loadd(1, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    } else {
      _tile_zero(1);
      _tile_zero(3);
    }
  }
}

MARLIN_SIMD_INLINE void AddTile(float* sum, const float* other) {
  for (int i = 0; i < 256; i += kLanes) Store(sum + i, Add(Load(sum + i), Load(other + i)));
}

template <bool kTwo>
MARLIN_SIMD_INLINE void FinishSums(const SumsPlan& plan, float* sums) {
  if (!plan.store) return;
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 256, 64);
  if constexpr (kTwo) {
    _tile_stored(1, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  } else {
    alignas(64) float odd[512];
    _tile_stored(1, odd, 64);
    _tile_stored(3, odd + 256, 64);
    AddTile(sums, odd);
    AddTile(sums + 256, odd + 256);
  }
}

/// Two blocks times two m tiles at one k step. A tile is loaded right before its first use: in this
/// order the tile loads and multiplies overlap best.
MARLIN_SIMD_INLINE void MultiplyTwoByTwo(const PanelProduct& p, int64_t step,
                                         int64_t block_stride) {
  const uint16_t* a = p.panel + step * kTileElements;
  const uint16_t* b = p.high + step * kTileElements;
  _tile_loadd(4, a, 64);
  _tile_loadd(6, b, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b + kMTileElements, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, a + block_stride, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
  if (p.low == nullptr) return;
  const uint16_t* rest = p.low + step * kTileElements;
  _tile_loadd(6, rest, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(2, 5, 6);
  _tile_loadd(7, rest + kMTileElements, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

/// Two blocks times one m tile at two k steps.
MARLIN_SIMD_INLINE void MultiplyTwoSteps(const PanelProduct& p, int64_t step,
                                         int64_t block_stride) {
  const uint16_t* a = p.panel + step * kTileElements;
  const uint16_t* b = p.high + step * kTileElements;
  _tile_loadd(4, a, 64);
  _tile_loadd(6, b, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, a + block_stride, 64);
  _tile_dpbf16ps(2, 5, 6);
  if (p.low != nullptr) {
    _tile_loadd(6, p.low + step * kTileElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_loadd(4, a + kTileElements, 64);
  _tile_loadd(7, b + kTileElements, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, a + block_stride + kTileElements, 64);
  _tile_dpbf16ps(3, 5, 7);
  if (p.low != nullptr) {
    _tile_loadd(7, p.low + (step + 1) * kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool kTwo>
void MultiplyPanel(const PanelProduct& p, const SumsPlan& plan) {
  constexpr int64_t kBlockStride = kMaxPanelChunks * 4 * kTileElements;
  // The panel was written by plain stores just before, and is overwritten after this returns.
  FenceTileLoads();
  StartSums<kTwo>(plan, p.sums);
  if constexpr (kTwo) {
    for (int64_t step = 0; step < p.steps; ++step) {
      // Prefetch the accumulators of the next two m tiles, 4 KiB in L2.
      for (int i = 0; i < 8; ++i) Prefetch(p.sums + 1024 + step * 128 + i * 16);
      MultiplyTwoByTwo(p, step, kBlockStride);
    }
  } else {
    // No remainder: a chunk is four steps.
    for (int64_t step = 0; step < p.steps; step += 2) MultiplyTwoSteps(p, step, kBlockStride);
  }
  FinishSums<kTwo>(plan, p.sums);
  FenceTileLoads();
}

}  // namespace

void MultiplyStrips(const StripJob& job) {
  const PanelView& w = *job.weights;
  const ActivationTiles& x = job.activations;
  auto* panel = static_cast<uint16_t*>(job.scratch);
  const PanelOrder order(job);
  PanelDecoder decoder(w, order, panel);
  _tile_loadconfig(&kTiles);
  for (PanelOrder at = order; !at.done(); at.Advance()) {
    const int64_t chunk = at.chunk();
    const int64_t left = w.chunks - chunk;
    const int64_t chunks = left < at.panel_chunks() ? left : at.panel_chunks();
    decoder.Decode(job.blocks + 2 * at.strip(), chunk, chunks);
    float* sums = job.sums + at.strip() * x.m_tiles * 512;
    // If k is the inner loop, accumulators stay in the tile registers for a whole strip.
    const SumsPlan plan{chunk == 0, chunk != 0 && !at.k_fastest(),
                        chunk + chunks == w.chunks || !at.k_fastest()};
    for (int64_t m = 0; m < x.m_tiles; m += 2) {
      const int64_t offset = chunk / kMaxPanelChunks * KBlockStride(x.m_tiles) +
                             m * kMTileElements + chunk % kMaxPanelChunks * 4 * kTileElements;
      const PanelProduct product{panel, x.high + offset,
                                 x.low == nullptr ? nullptr : x.low + offset, chunks * 4,
                                 sums + m * 512};
      if (m + 1 < x.m_tiles) {
        MultiplyPanel<true>(product, plan);
      } else {
        MultiplyPanel<false>(product, plan);
      }
    }
  }
  _tile_release();
}

void PackTiles(const TileSource& source, int64_t tile, int64_t m_tiles, uint16_t* high,
               uint16_t* low) {
  const auto& [a, type, a_stride, rows, k, gather] = source;
  const int64_t size = type == DType::kF32 ? 4 : 2;
  const int64_t padded = (k + kMaxPanelK - 1) / kMaxPanelK * kMaxPanelK;
  for (int64_t k0 = 0; k0 < padded; k0 += kSliceK) {
    const int64_t offset = k0 / kMaxPanelK * KBlockStride(m_tiles) + tile * kMTileElements +
                           k0 % kMaxPanelK / kSliceK * kTileElements;
    I high_rows[16];
    I low_rows[16];
    for (int m = 0; m < kTileM; ++m) {
      high_rows[m] = _mm512_setzero_si512();
      low_rows[m] = _mm512_setzero_si512();
      if (m < rows && k0 < k) {
        const int64_t number = gather == nullptr ? m : gather[m];
        const auto* row = static_cast<const uint8_t*>(a) + (number * a_stride + k0) * size;
        SplitSlice(row, type, k - k0, high_rows[m], low_rows[m]);
      }
    }
    Transpose16(high_rows);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(high + offset + 32 * i, high_rows[i]);
    if (low == nullptr) continue;
    Transpose16(low_rows);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(low + offset + 32 * i, low_rows[i]);
  }
}

void TransposeTile(const float* tile, float* rows, int64_t stride) {
  I r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(tile + 16 * i);
  Transpose16(r);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(rows + i * stride, r[i]);
}

int64_t MultiplyTiles(int64_t iterations) {
  _tile_loadconfig(&kTiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return iterations * 4 * 2 * 16 * 16 * 32;
}

}  // namespace marlin::cpu::amx
