// A point of a grid is 8 magnitudes (IQ2), 4 (IQ3) or 8 values (IQ1) of a few levels. With the
// sign, or for IQ1 the sign of the offset of an eighth, a weight has at most 16 values: the index
// of the level in the low bits of a code, the sign above it. Scales are an fp16 times an odd number
// of at most 31: two levels. A power of two that belongs to them is in the levels.
#include "checkpoint/readers/gguf/gguf_iq_blocks.h"

#include <bit>
#include <cstring>

#include "checkpoint/readers/gguf/gguf_grids.h"

namespace marlin {
namespace {

template <typename T>
T Load(const uint8_t* at) {
  T bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

/// The second level of scales: odd numbers.
uint32_t OddScale(unsigned index) { return 2 * index + 1; }

/// The signs of 8 values, of which 7 are stored: their product is positive.
unsigned EvenSigns(unsigned signs) {
  return signs | static_cast<unsigned>(std::popcount(signs) & 1) << 7;
}

/// The codes of a point of 8 indexes of 2 bits, each with its sign above: every code is a byte, to
/// which its bits move in three steps of halves.
void PutEight(uint64_t point, uint64_t signs, uint8_t* codes) {
  point = (point | point << 24) & 0x000000FF000000FFu;
  point = (point | point << 12) & 0x000F000F000F000Fu;
  point = (point | point << 6) & 0x0303030303030303u;
  signs = ((signs & 255u) | signs << 28) & 0x0000000F0000000Fu;
  signs = (signs | signs << 14) & 0x0003000300030003u;
  signs = (signs | signs << 7) & 0x0101010101010101u;
  const uint64_t bytes = point | signs << 2;
  std::memcpy(codes, &bytes, sizeof(bytes));
}

/// The same for a point of 4 indexes of 3 bits.
void PutFour(uint32_t point, uint32_t signs, uint8_t* codes) {
  point = (point | point << 10) & 0x003F003Fu;
  point = (point | point << 5) & 0x07070707u;
  signs = ((signs & 15u) | signs << 14) & 0x00030003u;
  signs = (signs | signs << 7) & 0x01010101u;
  const uint32_t bytes = point | signs << 3;
  std::memcpy(codes, &bytes, sizeof(bytes));
}

/// Per 32 weights 4 bytes of points, then 4 times 7 bits of signs and 4 bits of scale.
void DecodeIq2Xxs(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Load<uint16_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    const uint8_t* const points = block + 2 + g * 8;
    const auto rest = Load<uint32_t>(points + 4);
    out->scales[g] = OddScale(rest >> 28);
    for (size_t i = 0; i < 4; ++i) {
      PutEight(kIq2XxsGrid[points[i]], EvenSigns(rest >> (7 * i) & 127u),
               out->codes.data() + g * 32 + i * 8);
    }
  }
}

/// The scales of 16 groups, 4 bits each.
void ScalesOfIq2(const uint8_t* nibbles, GgufDecoded* out) {
  for (size_t g = 0; g < 16; ++g) {
    out->scales[g] = OddScale(nibbles[g / 2] >> (g % 2 * 4) & 15u);
  }
}

/// Words of 9 bits of point and 7 bits of signs, then the scales.
void DecodeIq2Xs(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Load<uint16_t>(block);
  ScalesOfIq2(block + 66, out);
  for (size_t i = 0; i < 32; ++i) {
    const unsigned word = Load<uint16_t>(block + 2 + i * 2);
    PutEight(kIq2XsGrid[word & 511u], EvenSigns(word >> 9), out->codes.data() + i * 8);
  }
}

/// The low bytes of the points, the signs, 2 high bits of each point, the scales.
void DecodeIq2S(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Load<uint16_t>(block);
  ScalesOfIq2(block + 74, out);
  for (size_t i = 0; i < 32; ++i) {
    const unsigned high = block[66 + i / 4] >> (i % 4 * 2) & 3u;
    PutEight(kIq2SGrid[block[2 + i] | high << 8], block[34 + i], out->codes.data() + i * 8);
  }
}

/// The points, then per 32 weights 4 times 7 bits of signs and 4 bits of scale.
void DecodeIq3Xxs(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Load<uint16_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    const auto rest = Load<uint32_t>(block + 66 + g * 4);
    out->scales[g] = OddScale(rest >> 28);
    for (size_t i = 0; i < 8; ++i) {
      const unsigned signs = EvenSigns(rest >> (i / 2 * 7) & 127u) >> (i % 2 * 4);
      PutFour(kIq3XxsGrid[block[2 + g * 8 + i]], signs, out->codes.data() + g * 32 + i * 4);
    }
  }
}

/// The low bytes of the points, one high bit of each, the signs, the scales.
void DecodeIq3S(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Load<uint16_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    out->scales[g] = OddScale(block[106 + g / 2] >> (g % 2 * 4) & 15u);
  }
  for (size_t i = 0; i < 64; ++i) {
    const unsigned high = block[66 + i / 8] >> (i % 8) & 1u;
    PutFour(kIq3SGrid[block[2 + i] | high << 8], block[74 + i / 2] >> (i % 2 * 4),
            out->codes.data() + i * 4);
  }
}

/// The low bytes of the points; per 32 weights a word of 3 high bits of 4 points, 3 bits of scale
/// and the sign of the offset.
void DecodeIq1S(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Load<uint16_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    const unsigned word = Load<uint16_t>(block + 34 + g * 2);
    out->scales[g] = OddScale(word >> 12 & 7u);
    const unsigned signs = word >> 15 != 0 ? 255u : 0u;
    for (size_t i = 0; i < 4; ++i) {
      const unsigned high = word >> (3 * i) & 7u;
      PutEight(kIq1Grid[block[2 + g * 4 + i] | high << 8], signs,
               out->codes.data() + g * 32 + i * 8);
    }
  }
}

/// The low bytes of the points; per point 3 high bits and the sign of the offset; 4 words of 4
/// scales of 3 bits, whose upper 4 bits are together the fp16.
void DecodeIq1M(const uint8_t* block, GgufDecoded* out) {
  unsigned half = 0;
  for (size_t i = 0; i < 4; ++i) {
    half |= static_cast<unsigned>(Load<uint16_t>(block + 48 + i * 2) >> 12) << (4 * i);
  }
  out->super_scale = static_cast<uint16_t>(half);
  for (size_t g = 0; g < 16; ++g) {
    const unsigned word = Load<uint16_t>(block + 48 + g / 4 * 2);
    out->scales[g] = OddScale(word >> (g % 4 * 3) & 7u);
  }
  for (size_t i = 0; i < 32; ++i) {
    const unsigned rest = block[32 + i / 2] >> (i % 2 * 4);
    PutEight(kIq1Grid[block[i] | (rest & 7u) << 8], (rest & 8u) != 0 ? 255u : 0u,
             out->codes.data() + i * 8);
  }
}

/// 8, 25 and 43 eighths.
constexpr float kIq2Levels[] = {1, 3.125F, 5.375F, 0, -1, -3.125F, -5.375F, 0};
/// 4, 12, ... 52 and 62 quarters.
constexpr float kIq3XxsLevels[] = {1,  3,  5,  7,  9,  11,  13,  15.5F,
                                   -1, -3, -5, -7, -9, -11, -13, -15.5F};
constexpr float kIq3SLevels[] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
/// -1, 0 and 1, plus and minus an eighth.
constexpr float kIq1Levels[] = {-0.875F, 0.125F, 1.125F, 0, -1.125F, -0.125F, 0.875F, 0};

constexpr GgufFormat Grid(Format format, int64_t group_size, const float* levels,
                          void (*decode)(const uint8_t*, GgufDecoded*)) {
  return {format, group_size, ScaleType::kF16, false, levels, decode, kSuperBlock};
}

}  // namespace

const GgufFormat kGgufIq2Xxs = Grid(Format::kNf3, 32, kIq2Levels, DecodeIq2Xxs);
const GgufFormat kGgufIq2Xs = Grid(Format::kNf3, 16, kIq2Levels, DecodeIq2Xs);
const GgufFormat kGgufIq2S = Grid(Format::kNf3, 16, kIq2Levels, DecodeIq2S);
const GgufFormat kGgufIq3Xxs = Grid(Format::kCodebook4, 32, kIq3XxsLevels, DecodeIq3Xxs);
const GgufFormat kGgufIq3S = Grid(Format::kCodebook4, 32, kIq3SLevels, DecodeIq3S);
const GgufFormat kGgufIq1S = Grid(Format::kNf3, 32, kIq1Levels, DecodeIq1S);
const GgufFormat kGgufIq1M = Grid(Format::kNf3, 16, kIq1Levels, DecodeIq1M);

}  // namespace marlin
