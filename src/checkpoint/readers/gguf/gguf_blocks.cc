#include "checkpoint/readers/gguf/gguf_blocks.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>

#include "base/scalars.h"
#include "checkpoint/readers/gguf/gguf_iq_blocks.h"
#include "layout/parameters.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

uint16_t Half(const uint8_t* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

constexpr uint32_t kSignOfHalf = 0x8000;

/// The nibbles of `count` bytes: the low ones are the first half.
void HalfSplit(const uint8_t* bytes, uint8_t* codes, int count = 16) {
  for (int j = 0; j < count; ++j) {
    codes[j] = bytes[j] & 15u;
    codes[j + count] = bytes[j] >> 4;
  }
}

/// Sets bit `shift` of the 256 codes of a block: bit e / 32 of byte e % 32 belongs to code e.
void SetHighBits(const uint8_t* bytes, unsigned shift, uint8_t* codes) {
  for (unsigned e = 0; e < kSuperBlock; ++e) {
    codes[e] |= static_cast<uint8_t>(((bytes[e % 32] >> (e / 32)) & 1u) << shift);
  }
}

void DecodeQ40(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block);
  HalfSplit(block + 2, out->codes.data());
}

void DecodeQ41(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block);
  out->biases[0] = Half(block + 2);
  HalfSplit(block + 4, out->codes.data());
}

/// 5-bit codes: nibbles, and the fifth bits in one word.
void FiveBits(const uint8_t* high, const uint8_t* low, uint8_t* codes) {
  uint32_t word = 0;
  std::memcpy(&word, high, sizeof(word));
  HalfSplit(low, codes);
  for (unsigned j = 0; j < 32; ++j) {
    codes[j] |= static_cast<uint8_t>(((word >> j) & 1u) << 4);
  }
}

void DecodeQ50(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block);
  FiveBits(block + 2, block + 6, out->codes.data());
}

void DecodeQ51(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block);
  out->biases[0] = Half(block + 2);
  FiveBits(block + 4, block + 8, out->codes.data());
}

void DecodeQ80(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block);
  std::memcpy(out->codes.data(), block + 2, 32);
}

/// Four 2-bit codes per byte: 32 bytes hold 128 elements, the lowest bits the first 32.
void TwoBits(const uint8_t* bytes, uint8_t* codes) {
  for (int half = 0; half < 2; ++half) {
    for (int part = 0; part < 4; ++part) {
      uint8_t* to = codes + half * 128 + part * 32;
      for (int l = 0; l < 32; ++l) to[l] = (bytes[half * 32 + l] >> (2 * part)) & 3u;
    }
  }
}

void DecodeQ2K(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Half(block + 80);
  out->super_bias = Half(block + 82) ^ kSignOfHalf;  // A minimum, which is subtracted.
  for (size_t i = 0; i < 16; ++i) {
    out->scales[i] = block[i] & 15u;
    out->biases[i] = block[i] >> 4;
  }
  TwoBits(block + 16, out->codes.data());
}

void DecodeQ3K(const uint8_t* block, GgufDecoded* out) {
  const uint8_t* const high = block;
  const uint8_t* const scales = block + 96;
  out->super_scale = Half(block + 108);
  for (unsigned i = 0; i < 16; ++i) {
    const unsigned low = i < 8 ? scales[i] & 15u : scales[i - 8] >> 4;
    const unsigned upper = (scales[8 + i % 4] >> (2 * (i / 4))) & 3u;
    out->scales[i] = (low | (upper << 4)) - 32;
  }
  TwoBits(block + 32, out->codes.data());
  SetHighBits(high, 2, out->codes.data());
}

/// The 6-bit scale and minimum j of eight that Q4_K and Q5_K pack into 12 bytes.
void ScalesOfK(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Half(block);
  out->super_bias = Half(block + 2) ^ kSignOfHalf;  // A minimum, which is subtracted.
  const uint8_t* const s = block + 4;
  for (size_t j = 0; j < 8; ++j) {
    unsigned scale = 0;
    unsigned minimum = 0;
    if (j < 4) {
      scale = s[j] & 63u;
      minimum = s[j + 4] & 63u;
    } else {
      scale = (s[j + 4] & 15u) | (static_cast<unsigned>(s[j - 4] >> 6) << 4);
      minimum = static_cast<unsigned>(s[j + 4] >> 4) | (static_cast<unsigned>(s[j] >> 6) << 4);
    }
    out->scales[j] = scale;
    out->biases[j] = minimum;
  }
}

/// Nibbles of Q4_K and Q5_K: 32 bytes hold 64 elements, the low nibbles the first 32.
void NibblesOfK(const uint8_t* bytes, uint8_t* codes) {
  for (int chunk = 0; chunk < 4; ++chunk) HalfSplit(bytes + chunk * 32, codes + chunk * 64, 32);
}

void DecodeQ4K(const uint8_t* block, GgufDecoded* out) {
  ScalesOfK(block, out);
  NibblesOfK(block + 16, out->codes.data());
}

void DecodeQ5K(const uint8_t* block, GgufDecoded* out) {
  ScalesOfK(block, out);
  NibblesOfK(block + 48, out->codes.data());
  SetHighBits(block + 16, 4, out->codes.data());
}

void DecodeQ6K(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Half(block + 208);
  for (size_t i = 0; i < 16; ++i) out->scales[i] = block[192 + i];
  // Runs of 32 codes, so that the compiler vectorizes the inner loop.
  for (int run = 0; run < 8; ++run) {
    const int half = run / 4;
    const int part = run % 4;
    const uint8_t* const low = block + half * 64 + part % 2 * 32;
    const uint8_t* const high = block + 128 + half * 32;
    uint8_t* const codes = out->codes.data() + run * 32;
    for (int l = 0; l < 32; ++l) {
      const int code = (low[l] >> (part / 2 * 4) & 15) | (high[l] >> (2 * part) & 3) << 4;
      codes[l] = static_cast<uint8_t>(code);
    }
  }
}

void DecodeIq4Xs(const uint8_t* block, GgufDecoded* out) {
  out->super_scale = Half(block);
  const unsigned high = Half(block + 2);
  for (unsigned j = 0; j < 8; ++j) {
    const unsigned low = (block[4 + j / 2] >> (4 * (j % 2))) & 15u;
    out->scales[j] = (low | (((high >> (2 * j)) & 3u) << 4)) - 32;
    HalfSplit(block + 8 + j * 16, out->codes.data() + j * 32);
  }
}

/// `count` bytes of base-3 digits, the most significant first: a digit is the integer part of
/// three times the byte as a fraction of 256, and the byte's fraction moves on by a factor of 3.
uint8_t* Digits(const uint8_t* bytes, int count, int digits, uint8_t* codes) {
  uint8_t power = 1;
  for (int digit = 0; digit < digits; ++digit, power = static_cast<uint8_t>(power * 3)) {
    for (int i = 0; i < count; ++i) {
      const auto fraction = static_cast<uint8_t>(bytes[i] * power);
      *codes++ = static_cast<uint8_t>((unsigned{fraction} * 3) >> 8);
    }
  }
  return codes;
}

void DecodeTq10(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block + 52);
  uint8_t* codes = Digits(block, 32, 5, out->codes.data());
  codes = Digits(block + 32, 16, 5, codes);
  Digits(block + 48, 4, 4, codes);
}

void DecodeTq20(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block + 64);
  TwoBits(block, out->codes.data());
}

void DecodeMxfp4(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = block[0];
  HalfSplit(block + 1, out->codes.data());
}

void DecodeNvfp4(const uint8_t* block, GgufDecoded* out) {
  for (size_t s = 0; s < 4; ++s) {
    // The scales are unsigned and 0x7f means zero. 0xff would be 480, which E4M3 does not have: it
    // stays the code of NaN, which is refused.
    out->scales[s] = block[s] == 0x7fu ? 0 : block[s] & 0x7fu;
    HalfSplit(block + 4 + s * 8, out->codes.data() + s * 16, 8);
  }
}

void DecodeQ10(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block);
  for (size_t e = 0; e < 128; ++e) out->codes[e] = (block[2 + e / 8] >> (e % 8)) & 1u;
}

void DecodeQ20(const uint8_t* block, GgufDecoded* out) {
  out->scales[0] = Half(block);
  for (size_t e = 0; e < 64; ++e) out->codes[e] = (block[2 + e / 4] >> (2 * (e % 4))) & 3u;
}

constexpr float kUnsignedTable[] = {0, 1, 2, 3};
constexpr float kOffsetTable[] = {-1, 0, 1, 2};
constexpr float kSignTable[] = {-1, 1, 0, 0};

constexpr GgufFormat TwoLevels(Format format, int64_t group_size, bool biases,
                               const float* codebook,
                               void (*decode)(const uint8_t*, GgufDecoded*)) {
  return {format, group_size, ScaleType::kF16, biases, codebook, decode, kSuperBlock};
}

constexpr GgufFormat kQ40 = {Format::kS4, 32, ScaleType::kF16, false, nullptr, DecodeQ40};
constexpr GgufFormat kQ41 = {Format::kU4, 32, ScaleType::kF16, true, nullptr, DecodeQ41};
constexpr GgufFormat kQ50 = {Format::kInt5, 32, ScaleType::kF16, false, nullptr, DecodeQ50};
constexpr GgufFormat kQ51 = {Format::kU5, 32, ScaleType::kF16, true, nullptr, DecodeQ51};
constexpr GgufFormat kQ80 = {Format::kS8, 32, ScaleType::kF16, false, nullptr, DecodeQ80};
constexpr GgufFormat kQ2K = TwoLevels(Format::kNf2, 16, true, kUnsignedTable, DecodeQ2K);
constexpr GgufFormat kQ3K = TwoLevels(Format::kInt3, 16, false, nullptr, DecodeQ3K);
constexpr GgufFormat kQ4K = TwoLevels(Format::kU4, 32, true, nullptr, DecodeQ4K);
constexpr GgufFormat kQ5K = TwoLevels(Format::kU5, 32, true, nullptr, DecodeQ5K);
constexpr GgufFormat kQ6K = TwoLevels(Format::kInt6, 16, false, nullptr, DecodeQ6K);
constexpr GgufFormat kIq4Nl = {Format::kCodebook4, 32, ScaleType::kF16, false, nullptr, DecodeQ40};
constexpr GgufFormat kIq4Xs = TwoLevels(Format::kCodebook4, 32, false, nullptr, DecodeIq4Xs);
constexpr GgufFormat kTq10 = {Format::kNf2, 256, ScaleType::kF16, false, kOffsetTable, DecodeTq10};
constexpr GgufFormat kTq20 = {Format::kNf2, 256, ScaleType::kF16, false, kOffsetTable, DecodeTq20};
constexpr GgufFormat kMxfp4 = {Format::kFp4E2M1, 32, ScaleType::kE8M0, false, nullptr, DecodeMxfp4};
constexpr GgufFormat kNvfp4 = {Format::kFp4E2M1, 16, ScaleType::kE4M3, false, nullptr, DecodeNvfp4};
constexpr GgufFormat kQ10 = {Format::kNf2, 128, ScaleType::kF16, false, kSignTable, DecodeQ10};
constexpr GgufFormat kQ20 = {Format::kNf2, 64, ScaleType::kF16, false, kOffsetTable, DecodeQ20};

constexpr GgufStored kTypes[] = {
    {0, "F32", 1, 4, DType::kF32, nullptr},
    {1, "F16", 1, 2, DType::kF16, nullptr},
    {2, "Q4_0", 32, 18, DType::kU8, &kQ40},
    {3, "Q4_1", 32, 20, DType::kU8, &kQ41},
    {6, "Q5_0", 32, 22, DType::kU8, &kQ50},
    {7, "Q5_1", 32, 24, DType::kU8, &kQ51},
    {8, "Q8_0", 32, 34, DType::kU8, &kQ80},
    {10, "Q2_K", kSuperBlock, 84, DType::kU8, &kQ2K},
    {11, "Q3_K", kSuperBlock, 110, DType::kU8, &kQ3K},
    {12, "Q4_K", kSuperBlock, 144, DType::kU8, &kQ4K},
    {13, "Q5_K", kSuperBlock, 176, DType::kU8, &kQ5K},
    {14, "Q6_K", kSuperBlock, 210, DType::kU8, &kQ6K},
    {16, "IQ2_XXS", kSuperBlock, 66, DType::kU8, &kGgufIq2Xxs},
    {17, "IQ2_XS", kSuperBlock, 74, DType::kU8, &kGgufIq2Xs},
    {18, "IQ3_XXS", kSuperBlock, 98, DType::kU8, &kGgufIq3Xxs},
    {19, "IQ1_S", kSuperBlock, 50, DType::kU8, &kGgufIq1S},
    {20, "IQ4_NL", 32, 18, DType::kU8, &kIq4Nl},
    {21, "IQ3_S", kSuperBlock, 110, DType::kU8, &kGgufIq3S},
    {22, "IQ2_S", kSuperBlock, 82, DType::kU8, &kGgufIq2S},
    {23, "IQ4_XS", kSuperBlock, 136, DType::kU8, &kIq4Xs},
    {24, "I8", 1, 1, DType::kI8, nullptr},
    {25, "I16", 1, 2, DType::kI16, nullptr},
    {26, "I32", 1, 4, DType::kI32, nullptr},
    {27, "I64", 1, 8, DType::kI64, nullptr},
    {28, "F64", 1, 8, DType::kF64, nullptr},
    {29, "IQ1_M", kSuperBlock, 56, DType::kU8, &kGgufIq1M},
    {30, "BF16", 1, 2, DType::kBf16, nullptr},
    {34, "TQ1_0", kSuperBlock, 54, DType::kU8, &kTq10},
    {35, "TQ2_0", kSuperBlock, 66, DType::kU8, &kTq20},
    {39, "MXFP4", 32, 17, DType::kU8, &kMxfp4},
    {40, "NVFP4", 64, 36, DType::kU8, &kNvfp4},
    {41, "Q1_0", 128, 18, DType::kU8, &kQ10},
    {42, "Q2_0", 64, 18, DType::kU8, &kQ20},
};

struct Refused {
  uint32_t id;
  std::string_view name;
  std::string_view why;
};
constexpr std::string_view kInner = "a type of intermediate results, not of weights";
constexpr std::string_view kRemoved = "removed from the file format";
constexpr Refused kRefused[] = {
    {4, "Q4_2", kRemoved},        {5, "Q4_3", kRemoved},        {9, "Q8_1", kInner},
    {15, "Q8_K", kInner},         {31, "Q4_0_4_4", kRemoved},   {32, "Q4_0_4_8", kRemoved},
    {33, "Q4_0_8_8", kRemoved},   {36, "IQ4_NL_4_4", kRemoved}, {37, "IQ4_NL_4_8", kRemoved},
    {38, "IQ4_NL_8_8", kRemoved},
};

float ValueOf(DType dtype, uint32_t bits) {
  return ParameterAt(reinterpret_cast<const std::byte*>(&bits), dtype, 0);
}

/// The scale or bias of a group.
float ScaleValue(const GgufFormat& format, uint32_t bits, uint32_t super_bits) {
  const DType dtype = ScaleDType(format.scale_type);
  if (format.super_group_size == 0) return ValueOf(dtype, bits);
  return ValueOf(dtype, super_bits) * ValueOf(DType::kI8, bits);
}

}  // namespace

Result<GgufStored> StoredAs(uint32_t type) {
  for (const GgufStored& stored : kTypes) {
    if (stored.id == type) return stored;
  }
  for (const Refused& refused : kRefused) {
    if (refused.id != type) continue;
    return Status(Code::kUnsupported, fmt::format("type {} ({}) is not supported: {}", refused.name,
                                                  type, refused.why));
  }
  return Status(Code::kUnsupported, fmt::format("type {} is not known", type));
}

const GgufStored* FindGgufType(std::string_view name) {
  const auto* const found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                         [&](const GgufStored& type) { return type.name == name; });
  return found == std::end(kTypes) ? nullptr : found;
}

const GgufStored* FindGgufType(DType dtype) {
  const auto* const found = std::find_if(
      std::begin(kTypes), std::end(kTypes),
      [&](const GgufStored& type) { return !type.quantized() && type.dtype == dtype; });
  return found == std::end(kTypes) ? nullptr : found;
}

void DequantizeBlock(const GgufFormat& format, int64_t elements, const uint8_t* block, float* out) {
  GgufDecoded decoded;
  format.decode(block, &decoded);
  const float* values =
      format.codebook != nullptr ? format.codebook : FormatValues(format.format).data();
  for (int64_t first = 0; first < elements; first += format.group_size) {
    const auto group = static_cast<size_t>(first / format.group_size);
    const float scale = ScaleValue(format, decoded.scales[group], decoded.super_scale);
    const float bias =
        format.biases ? ScaleValue(format, decoded.biases[group], decoded.super_bias) : 0.0F;
    for (int64_t e = first; e < first + format.group_size; ++e) {
      const float product = scale * values[decoded.codes[static_cast<size_t>(e)]];
      out[e] = format.biases ? product + bias : product;
    }
  }
}

}  // namespace marlin
