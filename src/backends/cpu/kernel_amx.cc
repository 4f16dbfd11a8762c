#include <immintrin.h>

#include "backends/cpu/amx_kernel.h"
#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/roofline.h"
#include "backends/cpu/simd_avx512.h"

namespace marlin::cpu::amx {
using namespace avx512;  // NOLINT(google-build-using-namespace): its names are this file's words.
#include "backends/cpu/decode.inl.h"

namespace {

constexpr int64_t kPanelChunks = kPanelK / kChunkK;
constexpr int64_t kTileElements = 512;  ///< bf16 of an A or B tile.

/// All eight tiles are 16 rows of 64 bytes. In read-only memory as a whole: g++ 12 drops stores to
/// a configuration on the stack, because its intrinsic names only the first eight bytes as input.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfiguration kTiles;

/// Rounds 16 fp32 to bf16.
MARLIN_SIMD_INLINE __m256i ToBf16(F v) { return (__m256i)_mm512_cvtneps_pbh(v); }

/// Interleaves the bf16 of 16 even and 16 odd k to 32 consecutive k.
MARLIN_SIMD_INLINE I JoinBf16(F even, F odd) {
  const I low = _mm512_cvtepu16_epi32(ToBf16(even));
  const I high = _mm512_cvtepu16_epi32(ToBf16(odd));
  return Or(low, ShiftLeft<16>(high));
}

/// Writes the 128 weights of one row of a chunk as bf16, 32 to each of four consecutive A tiles.
template <int kBits, Kind kKind, GroupMode kMode>
void DecodeTileRow(const PanelView& w, const GroupParameters& parameters, const ChunkGroups& groups,
                   const uint8_t* chunk, int row, uint16_t* out) {
  if constexpr (kKind == Kind::kBf16) {
    Unroll<4>([&](auto j) {
      _mm512_store_si512(out + j * kTileElements, RowWords<16>::Load(chunk, row, j, 0));
    });
  } else if constexpr (kKind == Kind::kTable) {
    const auto scaled_table = [&](int64_t index) __attribute__((always_inline)) {
      Table table = LoadTable(w.table);
      if (w.zeros != nullptr) table = SubTable(table, Set(parameters.zero[index]));
      table = MulTable(table, Set(parameters.scale[index]));
      if (w.biases != nullptr) table = AddTable(table, Set(parameters.bias[index]));
      return ToBf16(table.values);
    };
    I table = _mm512_setzero_si512();
    Unroll<4>([&](auto j) __attribute__((always_inline)) {
      constexpr int kJ = decltype(j)::value;
      const I words =
          _mm512_srli_epi16(RowWords<kBits>::Load(chunk, row, kJ, 0), RowWords<kBits>::Shift(kJ));
      if constexpr (kMode == GroupMode::kHalf) {
        // Index bit 4 picks the group: clear in words 0..15, set in words 16..31.
        const __m256i low = scaled_table(groups.offset[2 * kJ] + row);
        const __m256i high = scaled_table(groups.offset[2 * kJ + 1] + row);
        table = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        const I second =
            _mm512_inserti64x4(_mm512_setzero_si512(),
                               MARLIN_MUTATE(28, _mm256_set1_epi16(16), _mm256_setzero_si256()), 1);
        const I index = Or(And(words, _mm512_set1_epi16(15)), second);
        _mm512_store_si512(out + kJ * kTileElements, _mm512_permutexvar_epi16(index, table));
      } else {
        if constexpr (kJ == 0 || kMode == GroupMode::kSlice) {
          constexpr int kFirst = kMode == GroupMode::kChunk ? 0 : 2 * kJ;
          table = _mm512_broadcast_i64x4(scaled_table(groups.offset[kFirst] + row));
        }
        _mm512_store_si512(out + kJ * kTileElements, _mm512_permutexvar_epi16(words, table));
      }
    });
  } else {
    F even = Zero();
    DecodeRow<kBits, kKind, kMode>(
        w, parameters, groups, chunk, row, [&](int offset, F value) __attribute__((always_inline)) {
          if (offset % 32 == 0) {
            even = value;
          } else {
            _mm512_store_si512(out + offset / 32 * kTileElements, JoinBf16(even, value));
          }
        });
  }
}

using DecodeTileRowFunction = void (*)(const PanelView&, const GroupParameters&, const ChunkGroups&,
                                       const uint8_t*, int, uint16_t*);
struct RowDecoder {
  DecodeTileRowFunction decode;
  ChunkGroups (*groups)(const PanelView&, const GroupParameters&, int64_t chunk);
};

RowDecoder SelectDecoder(const PanelView& w) {
  return Dispatch(w, [](auto bits, auto kind, auto mode) -> RowDecoder {
    constexpr auto kMode = static_cast<GroupMode>(decltype(mode)::value);
    return {&DecodeTileRow<decltype(bits)::value, static_cast<Kind>(decltype(kind)::value), kMode>,
            &ChunkGroups::Of<kMode>};
  });
}

/// Decodes the panels of a job one after the other, a few rows at a time between tile products.
class PanelDecoder {
 public:
  PanelDecoder(const PanelView& weights, uint16_t* buffers)
      : w_(weights), decoder_(SelectDecoder(weights)), buffers_(buffers) {}

  /// Starts the panel of two blocks at `chunk`, into the buffer that is not being read.
  void Start(const int64_t* blocks, int64_t chunk) {
    blocks_ = blocks;
    first_chunk_ = chunk;
    chunks_ = w_.chunks - chunk < kPanelChunks ? w_.chunks - chunk : kPanelChunks;
    side_ ^= 1;
    next_ = 0;
  }

  /// Rows of a chunk that are still to decode.
  int64_t Remaining() const { return 2 * chunks_ * kBlockRows - next_; }

  void DecodeRows(int64_t count) {
    const int64_t last = next_ + count;
    const int64_t end = 2 * chunks_ * kBlockRows;
    for (const int64_t stop = last < end ? last : end; next_ < stop; ++next_) DecodeNext();
  }

  /// A tiles [2 blocks][k / 32][16 n][32 k] of the panel decoded last.
  const uint16_t* panel() const { return buffers_ + side_ * (kPanelBytes / 2); }

 private:
  void DecodeNext() {
    const int64_t row = next_ % kBlockRows;
    const int64_t c = next_ / kBlockRows % chunks_;
    const int64_t b = next_ / kBlockRows / chunks_;
    const int64_t bytes = ChunkBytes(w_.bits);
    const uint8_t* chunk = w_.codes + (blocks_[b] * w_.chunks + first_chunk_ + c) * bytes;
    if (row == 0) {
      if (c == 0) parameters_.Fill(w_, blocks_[b], first_chunk_, chunks_);
      groups_ = decoder_.groups(w_, parameters_, first_chunk_ + c);
    }
    // The next panel of the same blocks is consecutive in memory.
    for (int64_t i = 0; i < bytes / kBlockRows; i += 64) {
      Prefetch(chunk + bytes / kBlockRows * row + i + chunks_ * bytes);
    }
    uint16_t* tiles =
        const_cast<uint16_t*>(panel()) + (b * kPanelChunks + c) * 4 * kTileElements + row * kSliceK;
    decoder_.decode(w_, parameters_, groups_, chunk, static_cast<int>(row), tiles);
  }

  const PanelView& w_;
  RowDecoder decoder_;
  uint16_t* buffers_;
  const int64_t* blocks_ = nullptr;
  int64_t first_chunk_ = 0;
  int64_t chunks_ = 0;
  int64_t next_ = 0;
  int64_t side_ = 0;
  GroupParameters parameters_;
  ChunkGroups groups_;
};

/// One panel times one or two m tiles.
struct PanelProduct {
  const uint16_t* panel;
  const uint16_t* high;  ///< B tiles of the first m tile at the panel's first k.
  const uint16_t* low;   ///< Or null.
  int64_t m_stride;      ///< bf16 from one m tile to the next.
  int64_t steps;         ///< k / 32 of the panel.
  float* sums;           ///< C tiles [m tile][2][16][16].
  bool first;            ///< Start from zero instead of loading the sums.
};

template <bool kTwo>
MARLIN_SIMD_INLINE void LoadSums(float* sums, bool first) {
  if (first) {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (kTwo) {
      _tile_zero(1);
      _tile_zero(3);
    }
    return;
  }
  _tile_loadd(0, sums, 64);
  _tile_loadd(2, sums + 256, 64);
  if constexpr (kTwo) {
    _tile_loadd(1, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  }
}

template <bool kTwo>
MARLIN_SIMD_INLINE void StoreSums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 256, 64);
  if constexpr (kTwo) {
    _tile_stored(1, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

template <bool kTwo>
MARLIN_SIMD_INLINE void MultiplyStep(const uint16_t* b, int64_t m_stride) {
  _tile_loadd(6, b, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(2, 5, 6);
  if constexpr (kTwo) {
    _tile_loadd(7, b + m_stride, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool kTwo>
void MultiplyPanel(const PanelProduct& p, PanelDecoder& next, int64_t rows_per_step) {
  constexpr int64_t kBlockStride = kPanelChunks * 4 * kTileElements;
  LoadSums<kTwo>(p.sums, MARLIN_MUTATE(26, p.first, true));
  for (int64_t step = 0; step < p.steps; ++step) {
    _tile_loadd(4, p.panel + step * kTileElements, 64);
    _tile_loadd(5, p.panel + kBlockStride + step * kTileElements, 64);
    MultiplyStep<kTwo>(p.high + step * kTileElements, p.m_stride);
    if (MARLIN_MUTATE(25, p.low, nullptr) != nullptr)
      MultiplyStep<kTwo>(p.low + step * kTileElements, p.m_stride);
    next.DecodeRows(rows_per_step);
  }
  StoreSums<kTwo>(p.sums);
}

/// The panels of a job in the order of their use. With few rows k runs fastest, which reads the
/// weights in memory order; with many, strips do, so that a k block of activations stays in L2.
class PanelOrder {
 public:
  PanelOrder(const StripJob& job) : job_(job), k_fastest_(job.activations.m_tiles <= 2) {}
  bool done() const { return strip_ >= job_.strips || chunk_ >= job_.weights->chunks; }
  int64_t strip() const { return strip_; }
  int64_t chunk() const { return chunk_; }
  void Advance() {
    if (k_fastest_) {
      chunk_ += kPanelChunks;
      if (chunk_ >= job_.weights->chunks) {
        chunk_ = 0;
        ++strip_;
      }
    } else if (++strip_ == job_.strips) {
      strip_ = 0;
      chunk_ += kPanelChunks;
    }
  }

 private:
  const StripJob& job_;
  bool k_fastest_;
  int64_t strip_ = 0;
  int64_t chunk_ = 0;
};

}  // namespace

void MultiplyStrips(const StripJob& job) {
  const PanelView& w = *job.weights;
  const ActivationTiles& x = job.activations;
  const int64_t m_stride = w.chunks * 4 * kTileElements;
  const int64_t pairs = (x.m_tiles + 1) / 2;
  PanelDecoder decoder(w, static_cast<uint16_t*>(job.scratch));
  PanelOrder order(job);
  _tile_loadconfig(&kTiles);
  decoder.Start(job.blocks, 0);
  decoder.DecodeRows(decoder.Remaining());
  while (!order.done()) {
    const uint16_t* panel = decoder.panel();
    const int64_t chunk = order.chunk();
    const int64_t left = w.chunks - chunk;
    const int64_t steps = (left < kPanelChunks ? left : kPanelChunks) * 4;
    float* sums = job.sums + order.strip() * x.m_tiles * 512;
    order.Advance();
    int64_t rows_per_step = 0;
    if (!order.done()) {
      decoder.Start(job.blocks + 2 * order.strip(), order.chunk());
      rows_per_step = (decoder.Remaining() + pairs * steps - 1) / (pairs * steps);
    }
    for (int64_t m = 0; m < x.m_tiles; m += 2) {
      const int64_t offset = m * m_stride + chunk * 4 * kTileElements;
      const PanelProduct product{
          panel,     x.high + offset, x.low == nullptr ? nullptr : x.low + offset,
          m_stride,  steps,           sums + m * 512,
          chunk == 0};
      if (m + 1 < x.m_tiles) {
        MultiplyPanel<true>(product, decoder, rows_per_step);
      } else {
        MultiplyPanel<false>(product, decoder, rows_per_step);
      }
    }
  }
  _tile_release();
}

namespace {

/// 32 activations of one row as bf16 and the bf16 of what that leaves; `count` of them are there.
MARLIN_SIMD_INLINE void SplitSlice(const uint8_t* a, DType type, int64_t count, I& high, I& low) {
  const auto mask = static_cast<__mmask32>((1ull << (count < 32 ? count : 32)) - 1);
  low = _mm512_setzero_si512();
  if (type == DType::kBf16) {
    high = _mm512_maskz_loadu_epi16(mask, a);
    return;
  }
  F first;
  F second;
  if (type == DType::kF16) {
    const I words = _mm512_maskz_loadu_epi16(mask, a);
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
  } else {
    first = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), a);
    second = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), a + 64);
  }
  const auto join = [](F x, F y) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(ToBf16(x)), ToBf16(y), 1);
  };
  const auto rest = [](F x) {
    const F rounded = AsFloat(ShiftLeft<16>(_mm512_cvtepu16_epi32(ToBf16(x))));
    // Inf - Inf would put a NaN beside an Inf that is right by itself.
    const __mmask16 finite = _mm512_cmp_ps_mask(Sub(rounded, rounded), Zero(), _CMP_EQ_OQ);
    return _mm512_maskz_sub_ps(MARLIN_MUTATE(27, finite, __mmask16{0xffff}), x, rounded);
  };
  high = join(first, second);
  low = join(rest(first), rest(second));
}

}  // namespace

void PackTiles(const void* a, DType type, int64_t a_stride, int64_t rows, int64_t k, uint16_t* high,
               uint16_t* low) {
  const int64_t size = type == DType::kF32 ? 4 : 2;
  const int64_t padded = (k + kChunkK - 1) / kChunkK * kChunkK;
  for (int64_t k0 = 0; k0 < padded; k0 += kSliceK) {
    I high_rows[16];
    I low_rows[16];
    for (int m = 0; m < kTileM; ++m) {
      high_rows[m] = _mm512_setzero_si512();
      low_rows[m] = _mm512_setzero_si512();
      if (m < MARLIN_MUTATE(30, rows, rows - 1) && k0 < k) {
        const auto* row = static_cast<const uint8_t*>(a) + (m * a_stride + k0) * size;
        SplitSlice(row, type, k - k0, high_rows[m], low_rows[m]);
      }
    }
    Transpose16(high_rows);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(high + k0 * 16 + 32 * i, high_rows[i]);
    if (low == nullptr) continue;
    Transpose16(low_rows);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(low + k0 * 16 + 32 * i, low_rows[i]);
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
