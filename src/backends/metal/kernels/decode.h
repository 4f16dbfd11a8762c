// Dequantization: weight = scale * (value - zero), or scale * value + bias, in float.
//
// A lane decodes four pairs of each block of 32 k: outputs FragmentColumn + {0, 1} at
// k = 4 FragmentRow + {0, 1, 2, 3} of the block.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_DECODE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_DECODE_H_

#include "backends/metal/kernels/constants.h"
#include "backends/metal/kernels/elements.h"

namespace marlin {
namespace kernels {

/// The buffers of the prepared weights.
struct PackedWeights {
  device const uchar* codes;
  device const uchar* scales;
  device const uchar* extras;
  device const float* table;
};

/// One strip (n8 tile) of the weights and its dequantization parameters.
struct Strip {
  device const uchar* codes;   ///< At chunk 0.
  device const uchar* scales;  ///< [groups][8]
  device const uchar* extras;
  device const float* table;
  int groups;
  int group_size;
  float global_scale;
  int code_offset;
};

static inline int ChunkBytes() { return StoredBits(code_bits) * kChunkK; }

static inline long GroupElementBytes(int type) {
  return type == kElementF32 ? 4 : (type == kElementE8M0 || type == kElementE4M3 ? 1 : 2);
}

static inline Strip StripAt(long strip, PackedWeights weights, Parameters p) {
  Strip result;
  result.codes = weights.codes + strip * p.chunks * ChunkBytes();
  const long first = strip * p.groups * kStripOutputs;
  result.scales = weights.scales + first * GroupElementBytes(scale_type);
  result.extras = weights.extras + first * GroupElementBytes(extra_type);
  result.table = weights.table;
  result.groups = p.groups;
  result.group_size = p.group_size;
  result.global_scale = p.global_scale;
  result.code_offset = p.code_offset;
  return result;
}

/// The codes of a block of 2:4 weights, four of each output, code 0 where pruned: kept codes and
/// metadata of both outputs at the low bits.
static inline uint ExpandKept(uint kept, uint metadata) {
  // The positions of a nibble, times 4: shifts in its 16 bits.
  const uint first = (kept & 15u) << ((metadata << 2) & 12u) | ((kept >> 4) & 15u)
                                                                   << (metadata & 12u);
  const uint second = ((kept >> 8) & 15u) << ((metadata >> 2) & 12u) |
                      ((kept >> 12) & 15u) << ((metadata >> 4) & 12u);
  return first | second << 16;
}

/// A lane's codes of a chunk, for up to 8 bits. Wider codes are loaded per block.
struct ChunkCodes {
  device const uint* words;  ///< The chunk's.
  uint4 low;
  uint4 high;
};

/// The codes of the chunk at `chunk_codes`.
static inline ChunkCodes LoadCodesAt(device const uchar* chunk_codes, Strip strip, ushort lane) {
  ChunkCodes codes;
  codes.low = uint4(0);
  codes.high = uint4(0);
  device const uint* words = (device const uint*)chunk_codes;
  codes.words = words;
  if (code_bits == 4) {
    codes.low = ((device const uint4*)words)[lane];
  } else if (code_bits == kSparse4) {
    const uint2 kept = ((device const uint2*)words)[lane];
    const uint metadata = words[2 * kLanes + lane];
    MARLIN_UNROLL
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      codes.low[s] = ExpandKept(kept[s / 2] >> (16 * (s % 2)), metadata >> (8 * s));
    }
    // The code of value 0.
    if (code_kind == kCodesInteger) codes.low ^= uint4(uint(strip.code_offset) * 0x11111111u);
  } else if (code_bits == 8) {
    codes.low = ((device const uint4*)words)[lane];
    codes.high = ((device const uint4*)words)[kLanes + lane];
  } else if (code_bits < 4) {
    codes.low.xy = ((device const uint2*)words)[lane];
    if (code_bits == 3) codes.low.z = words[2 * kLanes + lane];
  }
  return codes;
}

static inline ChunkCodes LoadCodes(Strip strip, int chunk, ushort lane) {
  return LoadCodesAt(strip.codes + long(chunk) * ChunkBytes(), strip, lane);
}

/// The two codes of pair `j` of block `s`, at bits 0 and 16. For codes of up to 8 bits.
static inline uint PairOfCodes(ChunkCodes codes, int s, int j) {
  switch (code_bits) {
    case 2:
      return (codes.low[s / 2] >> (8 * (s % 2) + 2 * j)) & 0x00030003u;
    case 3:
      return ((codes.low[s / 2] >> (8 * (s % 2) + 2 * j)) & 0x00030003u) |
             (((codes.low.z >> (4 * s + j)) & 0x00010001u) << 2);
    case 4: {
      // Codes of a table.
      const uint both = codes.low[s] >> (8 * j);
      return (both & 15u) | ((both & 0xf0u) << 12);
    }
    case kSparse4:
      return (codes.low[s] >> (4 * j)) & 0x000f000fu;
    default: {
      const uint4 words = s < 2 ? codes.low : codes.high;
      return (words[2 * (s % 2) + j / 2] >> (8 * (j % 2))) & 0x00ff00ffu;
    }
  }
}

/// Whether the codes of integers are read where they are in a word, several per shift.
static inline bool ReadsInPlace() { return code_bits == 2 || code_bits == 4; }

/// A pair of integers whose codes are `place` bits above bits 0 and 16, at most 6. Halves of
/// exponent 10 - place are 2^(10 - place) + code: the lowest bit of the codes is 1.
static inline float2 IntegersInPlace(uint word, int place) {
  const uint mask = (code_bits == 2 ? 0x00030003u : 0x000f000fu) << place;
  return float2(as_type<half2>((word & mask) | (0x64006400u - uint(place) * 0x04000400u)));
}

/// Excess of raw integers over values, for pair `j` of a block.
static inline float IntegerBias(Strip strip, int j) {
  const int place = ReadsInPlace() ? code_bits * j % 8 : 0;
  return float((1024 >> place) + strip.code_offset);
}

/// Factor of raw values.
static inline float RawFactor() {
  return code_kind == kCodesFp4 ? 16384.0f : (code_kind == kCodesE4M3 ? 256.0f : 1.0f);
}

/// A pair of fp4 codes where sign, exponent and mantissa of the first pair are: the fields of a
/// half, which is then value * 2^-14.
static inline float2 Fp4InPlace(uint magnitudes, uint signs) {
  return float2(as_type<half2>((magnitudes & 0x0e000e00u) | (signs & 0x80008000u)));
}

/// Two codes as raw values: value = RawFactor() * raw - IntegerBias, exactly.
static inline float2 PairOfRaw(Strip strip, uint pair) {
  switch (code_kind) {
    case kCodesFp4:
      return Fp4InPlace(pair << 9, pair << 12);
    case kCodesInteger:
      // In [1024, 2048) the ulp of a half is 1, so these halves are 1024 + code.
      return float2(as_type<half2>(pair | 0x64006400u));
    case kCodesE4M3:
      return float2(as_type<half2>(((pair & 0x00800080u) << 8) | ((pair & 0x007f007fu) << 7)));
    case kCodesE5M2:
      return float2(as_type<half2>(pair << 8));
    case kCodesBf16:
      return float2(as_type<float>(pair << 16), as_type<float>(pair & 0xffff0000u));
    case kCodesF16:
      return float2(as_type<half2>(pair));
    default:
      return float2(strip.table[pair & 0xffffu], strip.table[pair >> 16]);
  }
}

/// Scale and zero point or bias of two outputs in one group.
struct GroupPair {
  float2 scale;
  float2 extra;
};

/// The group of a lane's four k in block `s` of a chunk.
static inline int GroupOf(Strip strip, int chunk, int s, ushort lane) {
  int index = 0;
  if (group_log2 == 0) {
    index = (chunk * kChunkK + s * kBlockK + 4 * FragmentRow(lane)) / strip.group_size;
  } else if (group_log2 >= 7) {
    index = chunk >> (group_log2 - 7);
  } else if (group_log2 >= 5) {
    index = (chunk << (7 - group_log2)) + (s >> (group_log2 - 5));
  } else {
    index = (chunk << 3) + 2 * s + FragmentRow(lane) / 4;
  }
  // Beyond k there may be no group. A is zero there, so any finite scale will do.
  return whole_k ? index : metal::min(index, strip.groups - 1);
}

/// The group of block `s`. `factor`: a power of two that scales are multiplied by.
static inline GroupPair LoadGroup(Strip strip, int chunk, int s, ushort lane, float factor) {
  GroupPair group;
  const uint at =
      uint(GroupOf(strip, chunk, s, lane)) * (kStripOutputs / 2) + uint(FragmentColumn(lane) / 2);
  group.scale = PairAt(strip.scales, scale_type, at);
  if (global_divides) {
    group.scale = group.scale / strip.global_scale * factor;
  } else {
    group.scale *= strip.global_scale * factor;
  }
  group.extra = float2(0.0f);
  if (group_extra != kExtraNone) group.extra = PairAt(strip.extras, extra_type, at);
  return group;
}

static inline float2 Scaled(float2 value, GroupPair group) {
  if (group_extra == kExtraZeros) value -= group.extra;
  value *= group.scale;
  if (group_extra == kExtraBiases) value += group.extra;
  return value;
}

/// Four pairs of weights, one per fragment of a block.
struct BlockWeights {
  float2 pair[4];
};

/// Raw values of block `s` for codes of up to 8 bits.
static inline BlockWeights BlockOfCodes(Strip strip, ChunkCodes codes, int s) {
  BlockWeights values;
  if (code_kind == kCodesFp4 && code_bits == 4) {
    const uint word = codes.low[s];
    // A sum, as shifts by 1 are: they cost four times as much.
    const uint doubled = word + word;
    const uint eightfold = word << 3;
    values.pair[0] = float2(as_type<half2>(word & 0x8e008e00u));
    values.pair[1] = Fp4InPlace(eightfold, doubled);
    values.pair[2] = Fp4InPlace(word << 6, word << 2);
    values.pair[3] = Fp4InPlace(word << 9, eightfold);
    return values;
  }
  if (code_kind == kCodesInteger && ReadsInPlace()) {
    const uint word = code_bits == 4 ? codes.low[s] : codes.low[s / 2] >> (8 * (s % 2));
    const uint high = word >> 8;
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int at = code_bits * j;
      values.pair[j] = IntegersInPlace(at < 8 ? word : high, at % 8);
    }
    return values;
  }
  MARLIN_UNROLL
  for (int j = 0; j < 4; ++j) values.pair[j] = PairOfRaw(strip, PairOfCodes(codes, s, j));
  return values;
}

/// Raw values of block `s`.
static inline BlockWeights RawBlock(Strip strip, ChunkCodes codes, int s, ushort lane) {
  BlockWeights values;
  if (CodeBits(code_bits) <= 8) return BlockOfCodes(strip, codes, s);
  device const uint4* words = (device const uint4*)codes.words;
  if (code_bits == 16) {
    const uint4 pairs = words[s * kLanes + lane];
    MARLIN_UNROLL
    for (int j = 0; j < 4; ++j) values.pair[j] = PairOfRaw(strip, pairs[j]);
    return values;
  }
  const float4 low = as_type<float4>(words[2 * s * kLanes + lane]);
  const float4 high = as_type<float4>(words[(2 * s + 1) * kLanes + lane]);
  values.pair[0] = low.xy;
  values.pair[1] = low.zw;
  values.pair[2] = high.xy;
  values.pair[3] = high.zw;
  return values;
}

/// Weights of block `s`. `of_chunk` is the chunk's group, used if all k of a chunk share one.
static inline BlockWeights DecodeBlock(Strip strip, ChunkCodes codes, GroupPair of_chunk, int chunk,
                                       int s, ushort lane) {
  BlockWeights weights = RawBlock(strip, codes, s, lane);
  MARLIN_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (code_kind == kCodesInteger) weights.pair[j] -= IntegerBias(strip, j);
    weights.pair[j] *= RawFactor();
  }
  if (group_span == kSpanNone) return weights;
  const GroupPair group =
      group_span == kSpanBlock ? LoadGroup(strip, chunk, s, lane, 1.0f) : of_chunk;
  MARLIN_UNROLL
  for (int j = 0; j < 4; ++j) weights.pair[j] = Scaled(weights.pair[j], group);
  return weights;
}

/// The `of_chunk` argument of DecodeBlock.
static inline GroupPair LoadChunkGroup(Strip strip, int chunk, ushort lane) {
  GroupPair group;
  group.scale = float2(1.0f);
  group.extra = float2(0.0f);
  if (group_span == kSpanChunk) group = LoadGroup(strip, chunk, 0, lane, 1.0f);
  return group;
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_DECODE_H_
