// Attention over one segment of bf16 keys and values on AMX tiles, 16 queries at a time.
//
//   scores^T[16 keys][16 queries]   = keys in place (A) x queries^T in pairs of features (B)
//   weights^T = e^(scores^T - max)    lanes are queries: no horizontal reductions
//   out[16 queries][16 features]    = weights, transposed (A) x values in pairs of keys (B)
//
// Queries and weights are split into two bf16 terms each, so that their products are accurate to
// 2^-16; keys and values are bf16 already. Tiles accumulate in fp32. Scratch, for 128 features:
// queries 16 KiB, scores 32 KiB, weights 16 KiB, values 64 KiB.
#include <immintrin.h>

#include "backends/cpu/decoder/decoder_kernels.h"
#include "backends/cpu/gemm/amx/amx_kernel.h"
#include "backends/cpu/gemm/amx/tile_fence.h"
#include "backends/cpu/simd/e4m3_numbers.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::amx {
using namespace avx512;  // NOLINT(google-build-using-namespace): its names are this file's words.
#include "backends/cpu/attention/softmax_exp.inl.h"
#include "backends/cpu/simd/unroll.inl.h"

namespace {

constexpr int64_t kQueries = 16;        ///< Queries per tile.
constexpr int64_t kTileElements = 512;  ///< bf16 elements of an A or B tile.
constexpr int64_t kStepKeys = 32;       ///< Keys per A tile of weights.
constexpr int64_t kSteps = kSegment / kStepKeys;

constexpr int64_t PackedDepth(int64_t depth) {
  return (depth + kMaxPanelK - 1) / kMaxPanelK * kMaxPanelK;
}

struct Scratch {
  Scratch(float* memory, int64_t depth, int64_t width) {
    const auto take = [&memory](int64_t floats) {
      float* piece = memory;
      memory += floats;
      return piece;
    };
    const auto take_bf16 = [&](int64_t count) {
      return reinterpret_cast<uint16_t*>(take(count / 2));
    };
    last_keys = take_bf16(kQueries * depth);
    scores = take(kSegment * kQueries);
    scores_low = take(kSegment * kQueries);
    weight_high = take_bf16(kSteps * kTileElements);
    weight_low = take_bf16(kSteps * kTileElements);
    tiles = take(4 * 256);
    values = take_bf16(kSegment * width);
  }
  static int64_t Floats(int64_t depth, int64_t width) {
    return kQueries * depth / 2 + 2 * kSegment * kQueries + kSteps * kTileElements + 4 * 256 +
           kSegment * width / 2;
  }

  uint16_t* last_keys;    ///< [16][depth]: keys of an incomplete tile.
  float* scores;          ///< [keys][16 queries], overwritten with weights.
  float* scores_low;      ///< [keys][16 queries]: contribution of the queries' low terms.
  uint16_t* weight_high;  ///< A tiles [keys / 32]
  uint16_t* weight_low;
  float* tiles;      ///< Four C tiles.
  uint16_t* values;  ///< B tiles [keys / 32][width / 16]
};

/// One segment and its scratch.
struct Segment {
  const AttentionRows& rows;
  const KeyRows& keys;
  const KeyRows& values;
  float scale;
  Scratch scratch;
  int64_t steps;  ///< Steps of 32 keys; the last may be incomplete.
  bool finite;    ///< Whether all values are finite; non-finite ones are packed as 0.

  const uint16_t* Key(int64_t key) const {
    return static_cast<const uint16_t*>(keys.data) + key * keys.stride;
  }
  const uint16_t* Value(int64_t key) const {
    return static_cast<const uint16_t*>(values.data) + key * values.stride;
  }
};

void CopyLastKeys(const Segment& s) {
  const int64_t first = s.keys.count / 16 * 16;
  for (int64_t row = 0; row < 16; ++row) {
    uint16_t* to = s.scratch.last_keys + row * s.rows.depth;
    for (int64_t d = 0; d < s.rows.depth; d += 32) {
      _mm512_storeu_si512(to + d, first + row < s.keys.count ? LoadWords(s.Key(first + row) + d)
                                                             : _mm512_setzero_si512());
    }
  }
}

/// Sixteen keys as an A tile: in place, or the padded copy of the last ones.
struct KeyTile {
  const uint16_t* data;
  int64_t stride_bytes;
};

KeyTile TileOfKeys(const Segment& s, int64_t first) {
  if (first + 16 <= s.keys.count) return {s.Key(first), s.keys.stride * 2};
  return {s.scratch.last_keys, s.rows.depth * 2};
}

/// Scores of all keys with the packed queries, high and low terms in separate accumulators: four
/// independent accumulation chains hide the latency of the tile multiply.
void Score(const Segment& s, const uint16_t* queries) {
  const uint16_t* low_queries = queries + kQueries * PackedDepth(s.rows.depth);
  FenceTileLoads();  // After the stores of CopyLastKeys.
  for (int64_t first = 0; first < s.keys.count; first += kStepKeys) {
    const KeyTile a = TileOfKeys(s, first);
    const KeyTile b = first + 16 < s.keys.count ? TileOfKeys(s, first + 16) : a;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < s.rows.depth; d += 32) {
      _tile_loadd(4, a.data + d, a.stride_bytes);
      _tile_loadd(6, queries + d * kQueries, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, b.data + d, b.stride_bytes);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(7, low_queries + d * kQueries, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* high = s.scratch.scores + first * kQueries;
    float* low = s.scratch.scores_low + first * kQueries;
    _tile_stored(0, high, 64);
    _tile_stored(1, high + 256, 64);
    _tile_stored(2, low, 64);
    _tile_stored(3, low + 256, 64);
  }
  FenceTileLoads();
}

/// Attention mask of 16 queries, one lane each. `common` is the key range that all of them see.
/// Lanes beyond `count` see every key; their results are not stored.
struct Lanes {
  Lanes(const AttentionRows& rows, int64_t first, int64_t keys) {
    count = rows.count - first < kQueries ? rows.count - first : kQueries;
    alignas(64) int32_t begins[kQueries];
    alignas(64) int32_t ends[kQueries];
    common = {0, static_cast<int32_t>(keys)};
    for (int64_t i = 0; i < kQueries; ++i) {
      const KeyRange range = i < count ? rows.ranges[first + i] : common;
      begins[i] = range.begin;
      ends[i] = range.end;
      if (range.begin > common.begin) common.begin = range.begin;
      if (range.end < common.end) common.end = range.end;
    }
    begin = LoadWords(begins);
    end = LoadWords(ends);
    stored = static_cast<__mmask16>((1u << count) - 1u);
  }
  __mmask16 Seeing(int32_t key) const {
    const I k = _mm512_set1_epi32(key);
    return _mm512_mask_cmp_epi32_mask(_mm512_cmp_epi32_mask(begin, k, _MM_CMPINT_LE), k, end,
                                      _MM_CMPINT_LT);
  }
  int64_t count;
  KeyRange common;
  I begin;
  I end;
  __mmask16 stored;
};

/// Adds both score terms of keys [0, 32 * steps), scales them, and masks with -Inf the keys that a
/// query does not see. Returns the row maximum of each query.
F FinishScores(const Segment& s, const Lanes& lanes) {
  const F nothing = Set(-__builtin_inff());
  F largest[2] = {nothing, nothing};
  for (int32_t first = 0; first < s.steps * kStepKeys; first += 2) {
    const bool all = first >= lanes.common.begin && first + 1 < lanes.common.end;
    Unroll<2>([&](auto i) {
      const int32_t key = first + i;
      float* score = s.scratch.scores + key * kQueries;
      F x = Mul(Add(Load(score), Load(s.scratch.scores_low + key * kQueries)), Set(s.scale));
      if (!all) x = _mm512_mask_mov_ps(nothing, lanes.Seeing(key), x);
      Store(score, x);
      largest[i] = Max(x, largest[i]);
    });
  }
  return Max(largest[0], largest[1]);
}

/// The low bf16 term: the rest of x beyond its upper half `high`, rounded.
MARLIN_SIMD_INLINE I RestOf(F x, I high) {
  return AddWords(AsWords(Sub(x, AsFloat(high))), SetWord(0x8000));
}

/// Turns scores into weights and packs these as A tiles of two terms. Returns the row sums.
F Weigh(const Segment& s, F largest) {
  const I upper = SetWord(0xffff0000u);
  // Scores of -Inf have weight 0, even if there are no others.
  const __mmask16 none = _mm512_cmp_ps_mask(largest, Set(-__builtin_inff()), _CMP_EQ_OQ);
  const F origin = _mm512_mask_mov_ps(largest, none, Zero());
  F sums[2] = {Zero(), Zero()};
  for (int64_t step = 0; step < s.steps; ++step) {
    I high[16];
    I low[16];
    float* scores = s.scratch.scores + step * kStepKeys * kQueries;
    for (int pair = 0; pair < 16; ++pair) {
      float* even = scores + 2 * pair * kQueries;
      float* odd = even + kQueries;
      const F a = ExpNotPositive(Sub(Load(even), origin));
      const F b = ExpNotPositive(Sub(Load(odd), origin));
      Store(even, a);
      Store(odd, b);
      sums[0] = Add(sums[0], a);
      sums[1] = Add(sums[1], b);
      const I a_high = And(AsWords(a), upper);
      const I b_high = And(AsWords(b), upper);
      high[pair] = Or(ShiftRight<16>(a_high), b_high);
      low[pair] = Or(ShiftRight<16>(RestOf(a, a_high)), And(RestOf(b, b_high), upper));
    }
    Transpose16(high);
    Transpose16(low);
    for (int query = 0; query < 16; ++query) {
      const int64_t at = step * kTileElements + query * kStepKeys;
      _mm512_storeu_si512(s.scratch.weight_high + at, high[query]);
      _mm512_storeu_si512(s.scratch.weight_low + at, low[query]);
    }
  }
  return Add(sums[0], sums[1]);
}

/// 32 features of a value, or 16 and zeros. Zero beyond the last key and for non-finite elements.
I LoadValues(Segment* s, int64_t key, int64_t feature) {
  if (key >= s->values.count) return _mm512_setzero_si512();
  const __mmask32 there = s->rows.width - feature < 32 ? 0xffffu : 0xffffffffu;
  const I v = _mm512_maskz_loadu_epi16(there, s->Value(key) + feature);
  const I exponent = _mm512_set1_epi16(0x7f80);
  const __mmask32 bad = _mm512_cmpeq_epi16_mask(And(v, exponent), exponent);
  if (bad == 0) return v;
  s->finite = false;
  return _mm512_mask_mov_epi16(v, bad, _mm512_setzero_si512());
}

/// Prefetch distance of PackValues, in keys.
constexpr int64_t kAhead = 16;

/// Packs values as B tiles: a row is a pair of keys, interleaved over 16 features.
void PackValues(Segment* s) {
  alignas(64) uint16_t order[2][32];
  for (int i = 0; i < 32; ++i) {
    order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    order[1][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32 + 16);
  }
  const I first_half = LoadWords(order[0]);
  const I second_half = LoadWords(order[1]);
  const int64_t tiles = s->rows.width / 16;
  for (int64_t pair = 0; pair < s->steps * 16; ++pair) {
    for (int64_t i = 0; i < s->rows.width && 2 * pair + kAhead < s->values.count; i += 16) {
      Prefetch(s->Value(2 * pair + kAhead + i / 16 % 2) + i / 32 * 32);
    }
    uint16_t* to = s->scratch.values + pair / 16 * tiles * kTileElements + pair % 16 * 32;
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const I even = LoadValues(s, 2 * pair, tile * 16);
      const I odd = LoadValues(s, 2 * pair + 1, tile * 16);
      _mm512_storeu_si512(to + tile * kTileElements,
                          _mm512_permutex2var_epi16(even, first_half, odd));
      if (tile + 1 == tiles) break;
      _mm512_storeu_si512(to + (tile + 1) * kTileElements,
                          _mm512_permutex2var_epi16(even, second_half, odd));
    }
  }
}

/// Multiplies the packed weights with kCount tiles of features from tile `first` on. Unrolled by
/// hand because tile registers are immediate operands.
template <int kCount>
void MixTiles(const Segment& s, int64_t first, float* out, int64_t stride_bytes) {
  const int64_t tiles = s.rows.width / 16;
  FenceTileLoads();  // After the stores that packed weights and values.
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < s.steps; ++step) {
    const uint16_t* values = s.scratch.values + (step * tiles + first) * kTileElements;
    _tile_loadd(4, s.scratch.weight_high + step * kTileElements, 64);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, s.scratch.weight_low + step * kTileElements, 64);
    _tile_dpbf16ps(0, 5, 6);
    if constexpr (kCount > 1) {
      _tile_loadd(7, values + kTileElements, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(6, values + 2 * kTileElements, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kCount > 3) {
      _tile_loadd(7, values + 3 * kTileElements, 64);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, stride_bytes);
  if constexpr (kCount > 1) _tile_stored(1, out + 16, stride_bytes);
  if constexpr (kCount > 2) _tile_stored(2, out + 32, stride_bytes);
  if constexpr (kCount > 3) _tile_stored(3, out + 48, stride_bytes);
  FenceTileLoads();
}

/// MixTiles for 1 to 4 tiles of features. Incomplete tiles of queries go through the scratch.
void MixSome(const Segment& s, int64_t first, int64_t count, int64_t queries, float* out) {
  const int64_t width = s.rows.width;
  const bool whole = queries == kQueries;
  float* to = whole ? out + first * 16 : s.scratch.tiles;
  const int64_t stride = whole ? width : 64;
  switch (count) {
    case 1:
      MixTiles<1>(s, first, to, stride * 4);
      break;
    case 2:
      MixTiles<2>(s, first, to, stride * 4);
      break;
    case 3:
      MixTiles<3>(s, first, to, stride * 4);
      break;
    default:
      MixTiles<4>(s, first, to, stride * 4);
  }
  for (int64_t q = 0; !whole && q < queries; ++q) {
    for (int64_t i = 0; i < count * 16; i += kLanes) {
      Store(out + q * width + first * 16 + i, Load(to + q * stride + i));
    }
  }
}

/// Adds the non-finite values, which PackValues zeroed, to exactly the rows that see them.
void AddInfinite(const Segment& s, const Lanes& lanes, int64_t first_row) {
  for (int64_t key = 0; key < s.values.count; ++key) {
    for (int64_t f = 0; f < s.rows.width; ++f) {
      const uint32_t value = s.Value(key)[f];
      if ((value & 0x7f80u) != 0x7f80u) continue;
      const float wide =
          _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(value << 16))));
      for (int64_t q = 0; q < lanes.count; ++q) {
        const KeyRange& range = s.rows.ranges[first_row + q];
        if (key < range.begin || key >= range.end) continue;
        s.rows.out[(first_row + q) * s.rows.width + f] +=
            s.scratch.scores[key * kQueries + q] * wide;
      }
    }
  }
}

/// Prefetches part `part` of `parts` equal parts of `rows`.
void PrefetchPart(const Upcoming& rows, int64_t part, int64_t parts) {
  const int64_t last = rows.rows * (part + 1) / parts;
  for (int64_t row = rows.rows * part / parts; row < last; ++row) {
    for (int64_t i = 0; i < rows.row_bytes; i += 64) {
      Prefetch(rows.data + row * rows.stride_bytes + i);
    }
  }
}

/// Attention of rows [first, first + 16) over the segment.
void RunQueries(const Segment& s, int64_t first, const Upcoming& upcoming) {
  const AttentionRows& rows = s.rows;
  const Lanes lanes(rows, first, s.keys.count);
  Score(s, static_cast<const uint16_t*>(rows.packed) + first * 2 * PackedDepth(rows.depth));
  const F largest = FinishScores(s, lanes);
  _mm512_mask_storeu_ps(rows.largest + first, lanes.stored, largest);
  _mm512_mask_storeu_ps(rows.sums + first, lanes.stored, Weigh(s, largest));
  const int64_t tiles = rows.width / 16;
  const int64_t parts = (tiles + 3) / 4;
  for (int64_t part = 0; part < parts; ++part) {
    PrefetchPart(upcoming, part, parts);
    const int64_t left = tiles - part * 4;
    MixSome(s, part * 4, left < 4 ? left : 4, lanes.count, rows.out + first * rows.width);
  }
  if (!s.finite) AddInfinite(s, lanes, first);
}

int64_t ScratchFloats(int64_t depth, int64_t width) { return Scratch::Floats(depth, width); }

int64_t PackedFloats(int64_t count, int64_t depth) {
  return (count + kQueries - 1) / kQueries * kQueries * PackedDepth(depth);
}

/// Packs, per 16 queries, the B tiles [depth / 32] of their high terms, then of their low terms.
void Pack(const float* queries, int64_t count, int64_t depth, void* packed) {
  const int64_t elements = kQueries * PackedDepth(depth);
  auto* tiles = static_cast<uint16_t*>(packed);
  for (int64_t first = 0; first < count; first += kQueries, tiles += 2 * elements) {
    const int64_t rows = count - first < kQueries ? count - first : kQueries;
    PackTiles({queries + first * depth, DType::kF32, depth, rows, depth}, 0, 1, tiles,
              tiles + elements);
  }
}

void Widen(const uint8_t* from, int64_t count, uint16_t* to) {
  const uint16_t* const table = kE4M3Numbers.bf16;
  for (int64_t i = 0; i < count; i += 32) {
    const __mmask32 there = count - i < 32 ? 0xffffu : 0xffffffffu;
    const I code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, from + i));
    const I small = _mm512_permutex2var_epi16(LoadWords(table), code, LoadWords(table + 32));
    const I large = _mm512_permutex2var_epi16(LoadWords(table + 64), code, LoadWords(table + 96));
    const __mmask32 is_large = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
    const I sign = _mm512_slli_epi16(And(code, _mm512_set1_epi16(0x80)), 8);
    _mm512_mask_storeu_epi16(to + i, there,
                             Or(_mm512_mask_mov_epi16(small, is_large, large), sign));
  }
}

void Run(const AttentionRows& rows, const KeyRows& keys, const KeyRows& values, float scale,
         const Upcoming& upcoming, float* scratch) {
  Segment s{rows,
            keys,
            values,
            scale,
            Scratch(scratch, rows.depth, rows.width),
            (keys.count + kStepKeys - 1) / kStepKeys,
            true};
  if (keys.count % 16 != 0) CopyLastKeys(s);
  _tile_loadconfig(&kTiles);
  PackValues(&s);
  for (int64_t first = 0; first < rows.count; first += kQueries) {
    RunQueries(s, first, first + kQueries < rows.count ? Upcoming{} : upcoming);
  }
  _tile_release();
}

}  // namespace

const SegmentKernel kSegmentKernel = {&ScratchFloats, &PackedFloats, &Pack, &Widen, &Run};

}  // namespace marlin::cpu::amx
