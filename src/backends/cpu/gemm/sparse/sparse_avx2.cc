// The GEMM of 2:4 weights on AVX2.
#include "backends/cpu/gemm/sparse/sparse_kernel.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/gemm/sparse/sparse_rows.inl.h"
#include "backends/cpu/simd/byte_planes_avx2.inl.h"

namespace {

constexpr int kQuadColumns = 4;                          ///< Columns of a vector.
constexpr int kQuads = kBlockRows / kQuadColumns;        ///< In a block.
constexpr int kHalfK = kChunkK / 2;                      ///< Its kept codes share bits of a byte.
constexpr int kHalfSteps = kHalfK / 8;                   ///< A step is a block of four per lane.
constexpr int64_t kRowLanes = int64_t{kQuads} * kLanes;  ///< Lane accumulators of a row.

/// A vector at any of some places of a cache line: loads at other places cross none.
struct alignas(64) Line {
  uint8_t bytes[64];
};

/// A chunk whose codes are decoded while they are multiplied, with activations gathered by
/// `vpermilps`: on the ports of FMAs, but with indices that cost nothing.
struct TurnedChunk {
  static constexpr int64_t kMostRows = 4;
  BytePlanes planes;
  I codes[kQuads][kHalfSteps / 2];
  /// Words with the places of the kept weights of half a chunk, 2 bits each, shifted right by 0, 2,
  /// 4 and 6 bits. From byte i on, their low bits are those of 4 i places later.
  Line places[kQuads][2][4];
};

/// A chunk that is decoded at once, with activations gathered by `vpshufb`: on other ports than
/// those of FMAs, but its indices have to be computed.
struct DecodedChunk {
  BytePlanes planes;
  I words[kQuads][2 * kHalfSteps];       ///< Both kept weights as bf16.
  I indices[kQuads][2 * kHalfSteps][2];  ///< Those of bytes, for both.
};

/// Bytes of lane l of codes[t]: both kept codes of block 8 l + 2 t of each column, then those of
/// block 8 l + 2 t + 1. Low nibbles are of the first half chunk.
MARLIN_SIMD_INLINE void TurnCodes(const uint8_t* kept, I (&codes)[4]) {
  I rows[kQuadColumns];
  for (int c = 0; c < kQuadColumns; ++c) rows[c] = LoadWords(kept + c * kKeptBytes);
  const I low[2] = {_mm256_unpacklo_epi16(rows[0], rows[1]),
                    _mm256_unpacklo_epi16(rows[2], rows[3])};
  const I high[2] = {_mm256_unpackhi_epi16(rows[0], rows[1]),
                     _mm256_unpackhi_epi16(rows[2], rows[3])};
  codes[0] = _mm256_unpacklo_epi32(low[0], low[1]);
  codes[1] = _mm256_unpackhi_epi32(low[0], low[1]);
  codes[2] = _mm256_unpacklo_epi32(high[0], high[1]);
  codes[3] = _mm256_unpackhi_epi32(high[0], high[1]);
}

/// Words of lane l of halves[h]: the metadata of blocks 8 l .. 8 l + 7 of half chunk h, by column.
MARLIN_SIMD_INLINE void TurnMetadata(const uint8_t* metadata, I (&halves)[2]) {
  I rows[kQuadColumns];
  for (int c = 0; c < kQuadColumns; ++c) {
    rows[c] = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(metadata + c * kMetadataBytes)));
  }
  // Takes the first word of every column to the low lane, the second word to the high one.
  const auto turn = [](I first, I second) __attribute__((always_inline)) {
    return _mm256_castpd_si256(
        _mm256_shuffle_pd(_mm256_castsi256_pd(first), _mm256_castsi256_pd(second), 0b1100));
  };
  halves[0] =
      turn(_mm256_unpacklo_epi32(rows[0], rows[1]), _mm256_unpacklo_epi32(rows[2], rows[3]));
  halves[1] =
      turn(_mm256_unpackhi_epi32(rows[0], rows[1]), _mm256_unpackhi_epi32(rows[2], rows[3]));
}

MARLIN_SIMD_INLINE void StoreVector(void* to, I v) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), v);
}

/// Words of the kept weights of two steps, of half chunk kHalf of turned codes.
template <int kHalf>
MARLIN_SIMD_INLINE void DecodeSteps(I turned, const BytePlanes& planes, I (&words)[2]) {
  const I codes = And(ShiftRight<4 * kHalf>(turned), SetWord(0x0f0f0f0f));
  const I high = _mm256_shuffle_epi8(planes.high, codes);
  const I low = _mm256_shuffle_epi8(planes.low, codes);
  words[0] = _mm256_unpacklo_epi8(low, high);
  words[1] = _mm256_unpackhi_epi8(low, high);
}

[[gnu::noinline]] void Read(const uint8_t* bytes, TurnedChunk& chunk) {
  for (int q = 0; q < kQuads; ++q) {
    I halves[2];
    TurnMetadata(bytes + kMetadataOffset + q * kQuadColumns * kMetadataBytes, halves);
    Unroll<8>([&](auto i) __attribute__((always_inline)) {
      StoreVector(chunk.places[q][i / 4][i % 4].bytes, ShiftRight<2 * (i % 4)>(halves[i / 4]));
    });
    TurnCodes(bytes + q * kQuadColumns * kKeptBytes, chunk.codes[q]);
  }
}

[[gnu::noinline]] void Read(const uint8_t* bytes, DecodedChunk& chunk) {
  const F byte_indices = AsFloat(_mm256_setr_epi32(0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c,
                                                   0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c));
  for (int q = 0; q < kQuads; ++q) {
    I turned[kHalfSteps / 2];
    TurnCodes(bytes + q * kQuadColumns * kKeptBytes, turned);
    I halves[2];
    TurnMetadata(bytes + kMetadataOffset + q * kQuadColumns * kMetadataBytes, halves);
    Unroll<kHalfSteps>([&](auto i) __attribute__((always_inline)) {
      I words[2];
      DecodeSteps<2 * i / kHalfSteps>(turned[i % (kHalfSteps / 2)], chunk.planes, words);
      chunk.words[q][2 * i] = words[0];
      chunk.words[q][2 * i + 1] = words[1];
    });
    Unroll<4 * kHalfSteps>([&](auto i) __attribute__((always_inline)) {
      constexpr int kShift = 2 * (i % (2 * kHalfSteps));
      const I places = ShiftRight<kShift>(halves[i / (2 * kHalfSteps)]);
      chunk.indices[q][i / 2][i % 2] = AsWords(_mm256_permutevar_ps(byte_indices, places));
    });
  }
}

/// Words of the kept weights of steps 2 kPair and 2 kPair + 1.
template <int kPair>
MARLIN_SIMD_INLINE void LoadSteps(const TurnedChunk& chunk, int quad, I (&words)[2]) {
  constexpr int kPairs = kHalfSteps / 2;
  DecodeSteps<kPair / kPairs>(chunk.codes[quad][kPair % kPairs], chunk.planes, words);
}
template <int kPair>
MARLIN_SIMD_INLINE void LoadSteps(const DecodedChunk& chunk, int quad, I (&words)[2]) {
  words[0] = chunk.words[quad][2 * kPair];
  words[1] = chunk.words[quad][2 * kPair + 1];
}

/// Where a step's first or second kept weights are in their blocks.
template <int kStep, int kKept>
MARLIN_SIMD_INLINE I PlacesOf(const TurnedChunk& chunk, int quad) {
  constexpr int kPlace = 2 * (kStep % kHalfSteps) + kKept;
  return LoadWords(chunk.places[quad][kStep / kHalfSteps][kPlace % 4].bytes + kPlace / 4);
}
template <int kStep, int kKept>
MARLIN_SIMD_INLINE I PlacesOf(const DecodedChunk& chunk, int quad) {
  return chunk.indices[quad][kStep][kKept];
}

MARLIN_SIMD_INLINE F GatherActivations(const TurnedChunk& /*chunk*/, F x, I places) {
  return _mm256_permutevar_ps(x, places);
}
MARLIN_SIMD_INLINE F GatherActivations(const DecodedChunk& /*chunk*/, F x, I places) {
  return AsFloat(_mm256_shuffle_epi8(AsWords(x), places));
}

/// Parameters of a chunk.
struct Scales {
  const float* scale;  ///< GroupParameters::scale.
  const ChunkGroups& groups;
};

/// The product of kWidth quads of a chunk and kM rows.
template <GroupMode kMode, class Chunk, int kM>
struct Product {
  /// Enough chains of FMAs to hide their latency.
  static constexpr int kWidth = kM == 1 ? 4 : kM == 2 ? 2 : 1;
  /// Sums of the first and of the second kept weight of each block of four.
  using Sums = F[2][kWidth][kM];

  MARLIN_SIMD_INLINE void Clear(Sums& sums) {
    for (auto& each : sums) {
      for (auto& quad : each) {
#pragma GCC unroll 16
        for (int i = 0; i < kM; ++i) quad[i] = Zero();
      }
    }
  }

  /// The scales of a quad, of the k of both lanes; kPart is that of each 32 k.
  template <int kHalf, int kPart>
  MARLIN_SIMD_INLINE F ScalesOf(const Scales& parameters, int quad) {
    const auto scales = [&](int half_slice) __attribute__((always_inline)) {
      return _mm_loadu_ps(parameters.scale + parameters.groups.offset[half_slice] +
                          quad * kQuadColumns);
    };
    if constexpr (kMode == GroupMode::kChunk) {
      return _mm256_set_m128(scales(0), scales(0));
    } else if constexpr (kMode == GroupMode::kSlice) {
      return _mm256_set_m128(scales(4 * kHalf + 2), scales(4 * kHalf));
    } else {
      return _mm256_set_m128(scales(4 * kHalf + 2 + kPart), scales(4 * kHalf + kPart));
    }
  }

  /// lanes += scale * sums, and clears the sums.
  template <int kHalf, int kPart>
  MARLIN_SIMD_INLINE void AddGroup(const Scales& parameters, int quad, Sums& sums, float* lanes) {
    for (int q = 0; q < kWidth; ++q) {
      const F scales = ScalesOf<kHalf, kPart>(parameters, quad + q);
#pragma GCC unroll 16
      for (int i = 0; i < kM; ++i) {
        float* const to = lanes + i * kRowLanes + (quad + q) * kLanes;
        const F sum = avx2::Add(sums[0][q][i], sums[1][q][i]);
        Store(to, Fma(sum, scales, Load(to)));
      }
    }
    Clear(sums);
  }

  /// Adds the products of one of both kept weights of a step.
  template <int kStep, int kKept>
  MARLIN_SIMD_INLINE void AddKept(const Chunk& chunk, int quad, F weights, const F (&x)[kM],
                                  F (&sums)[kM]) {
    const I places = PlacesOf<kStep, kKept>(chunk, quad);
#pragma GCC unroll 16
    for (int i = 0; i < kM; ++i) {
      sums[i] = Fma(weights, GatherActivations(chunk, x[i], places), sums[i]);
    }
  }

  /// Adds steps 2 kPair and 2 kPair + 1.
  template <int kPair>
  MARLIN_SIMD_INLINE void AddPair(const Chunk& chunk, int quad, const float* const (&x)[kM],
                                  Sums& sums) {
    F activations[2][kM];
#pragma GCC unroll 16
    for (int i = 0; i < kM; ++i) {
      activations[0][i] = Load(x[i] + 16 * kPair);
      activations[1][i] = Load(x[i] + 16 * kPair + 8);
    }
    for (int q = 0; q < kWidth; ++q) {
      I words[2];
      LoadSteps<kPair>(chunk, quad + q, words);
      Unroll<2>([&](auto i) __attribute__((always_inline)) {
        constexpr int kStep = 2 * kPair + decltype(i)::value;
        const F first = AsFloat(ShiftLeft<16>(words[i]));
        const F second = AsFloat(And(words[i], SetWord(0xffff0000)));
        AddKept<kStep, 0>(chunk, quad + q, first, activations[i], sums[0][q]);
        AddKept<kStep, 1>(chunk, quad + q, second, activations[i], sums[1][q]);
      });
    }
  }

  /// lanes[row of x][quad][8] += the product.
  MARLIN_SIMD_INLINE void AddProduct(const Chunk& chunk, const Scales& scales, int quad,
                                     const float* const (&x)[kM], float* lanes) {
    Sums sums;
    Clear(sums);
    Unroll<kHalfSteps>([&](auto pair) __attribute__((always_inline)) {
      constexpr int kPair = decltype(pair)::value;
      AddPair<kPair>(chunk, quad, x, sums);
      constexpr int kPairs = kHalfSteps / 2;  // In half a chunk.
      constexpr int kGroupPairs = kMode == GroupMode::kHalf    ? kPairs / 2
                                  : kMode == GroupMode::kSlice ? kPairs
                                                               : 2 * kPairs;
      if constexpr ((kPair + 1) % kGroupPairs == 0) {
        AddGroup<kPair / kPairs, kPair % kPairs / (kPairs / 2)>(scales, quad, sums, lanes);
      }
    });
  }
};

/// lanes += a chunk times kM rows.
template <GroupMode kMode, int kM, class Chunk>
[[gnu::noinline]] void AddRows(const Chunk& chunk, const Scales& scales, const float* x,
                               int64_t x_stride, float* lanes) {
  const float* rows[kM];
  for (int i = 0; i < kM; ++i) rows[i] = x + i * x_stride;
  for (int quad = 0; quad < kQuads; quad += Product<kMode, Chunk, kM>::kWidth) {
    Product<kMode, Chunk, kM>::AddProduct(chunk, scales, quad, rows, lanes);
  }
}

/// The AddRows of any number of rows.
template <GroupMode kMode, class Chunk>
void AddAllRows(const Chunk& chunk, const Scales& scales, const float* x, int64_t x_stride,
                int64_t m, float* lanes) {
  for (; m >= 4; m -= 4, x += 4 * x_stride, lanes += 4 * kRowLanes) {
    AddRows<kMode, 4>(chunk, scales, x, x_stride, lanes);
  }
  if (m == 3) return AddRows<kMode, 3>(chunk, scales, x, x_stride, lanes);
  if (m == 2) return AddRows<kMode, 2>(chunk, scales, x, x_stride, lanes);
  if (m == 1) return AddRows<kMode, 1>(chunk, scales, x, x_stride, lanes);
}

/// All passes of rows whose activations are finite.
template <GroupMode kMode, class Chunk>
void MultiplyFinite(const PanelView& w, int64_t block, const float* x, int64_t x_stride, int64_t m,
                    float* out, int64_t out_stride, float* lanes) {
  constexpr int64_t kBytes = ChunkBytes(kSparse4);
  constexpr int64_t kPrefetchBytes = 4096;  // Consecutive chunks are consecutive in memory.
  for (int64_t i = 0; i < m * kQuads; ++i) Store(lanes + i * kLanes, Zero());
  GroupParameters parameters;
  ChunkGroups groups[kPassChunks];
  Chunk chunk;
  chunk.planes = PlanesOf(w.table);
  for (int64_t first = 0; first < w.chunks; first += kPassChunks) {
    const int64_t chunks = w.chunks - first < kPassChunks ? w.chunks - first : kPassChunks;
    parameters.Fill(w, block, first, chunks);
    LocateGroups<kMode>(w, parameters, first, chunks, groups);
    const uint8_t* codes = w.codes + (block * w.chunks + first) * kBytes;
    for (int64_t c = 0; c < chunks; ++c, codes += kBytes) {
      for (int64_t i = 0; i < kBytes; i += 64) Prefetch(codes + kPrefetchBytes + i);
      Read(codes, chunk);
      AddAllRows<kMode>(chunk, {parameters.scale, groups[c]}, x + (first + c) * kChunkK, x_stride,
                        m, lanes);
    }
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int q = 0; q < kQuads; ++q) {
      const F sums = Load(lanes + i * kRowLanes + q * kLanes);
      _mm_storeu_ps(out + i * out_stride + q * kQuadColumns,
                    _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    }
  }
}

template <GroupMode kMode>
void MultiplyBlock(const PanelView& w, int64_t block, const void* x, int64_t x_stride, int64_t m,
                   float* out, int64_t out_stride, float* scratch) {
  const int64_t stride = x_stride / static_cast<int64_t>(sizeof(float));
  const auto* const rows = static_cast<const float*>(x);
  ForFiniteRuns(
      x, x_stride, w.chunks * kChunkK * static_cast<int64_t>(sizeof(float)), m,
      [&](int64_t first, int64_t count) {
        const auto multiply = count > TurnedChunk::kMostRows ? &MultiplyFinite<kMode, DecodedChunk>
                                                             : &MultiplyFinite<kMode, TurnedChunk>;
        multiply(w, block, rows + first * stride, stride, count, out + first * out_stride,
                 out_stride, scratch);
      },
      [&](int64_t row) {
        kExactKernels.select(w)(w, block, rows + row * stride, x_stride, 1, out + row * out_stride,
                                out_stride, scratch);
      });
}

/// Eight units of 4 k, of a slice of 32: lane l of even[h] is unit 4 h + 2 l, of odd[h] the next.
struct SliceUnits {
  F even[2];
  F odd[2];
};

/// The units of a slice as pack_row leaves it: 16 even k, then 16 odd ones.
MARLIN_SIMD_INLINE SliceUnits Interleave(const float* x) {
  SliceUnits units;
  for (int half = 0; half < 2; ++half) {
    const F even = Load(x + 8 * half);
    const F odd = Load(x + 16 + 8 * half);
    units.even[half] = _mm256_unpacklo_ps(even, odd);
    units.odd[half] = _mm256_unpackhi_ps(even, odd);
  }
  return units;
}

/// Reorders 64 k: a unit of the first 32 k, then one of the others, in turn.
void ReorderHalf(float* x) {
  const SliceUnits low = Interleave(x);
  const SliceUnits high = Interleave(x + kSliceK);
  for (int half = 0; half < 2; ++half) {
    float* const to = x + 32 * half;
    Store(to, _mm256_permute2f128_ps(low.even[half], high.even[half], 0x20));
    Store(to + 8, _mm256_permute2f128_ps(low.odd[half], high.odd[half], 0x20));
    Store(to + 16, _mm256_permute2f128_ps(low.even[half], high.even[half], 0x31));
    Store(to + 24, _mm256_permute2f128_ps(low.odd[half], high.odd[half], 0x31));
  }
}

}  // namespace

void ReorderSparseRow(int64_t k, float* x) {
  const I exponent = SetWord(0x7f800000);
  I special = _mm256_setzero_si256();
  for (int64_t i = 0; i < k; i += kLanes) {
    special = Or(special, _mm256_cmpeq_epi32(And(LoadWords(x + i), exponent), exponent));
  }
  const auto flag = static_cast<uint32_t>(_mm256_movemask_epi8(special));
  __builtin_memcpy(x + k, &flag, sizeof(flag));
  if (flag != 0) return;
  for (int64_t i = 0; i < k; i += kHalfK) ReorderHalf(x + i);
}

ExactKernels::MultiplyBlock SelectSparse(const PanelView& w) {
  return WithSparseMode(w, [](auto mode) -> ExactKernels::MultiplyBlock {
    return &MultiplyBlock<static_cast<GroupMode>(decltype(mode)::value)>;
  });
}

}  // namespace marlin::cpu::avx2
