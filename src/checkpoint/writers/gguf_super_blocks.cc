#include "checkpoint/writers/gguf_super_blocks.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

#include "checkpoint/codes/foreign_codes.h"

namespace marlin {
namespace {

constexpr uint16_t kSignOfHalf = 0x8000;

void PutHalf(uint32_t bits, uint8_t* out) {
  const auto half = static_cast<uint16_t>(bits);
  std::memcpy(out, &half, sizeof(half));
}

/// The low nibbles of 2 * count codes, the first half in the low bits.
void PutHalves(const uint8_t* codes, int count, uint8_t* out) {
  for (int j = 0; j < count; ++j) {
    out[j] = static_cast<uint8_t>((codes[j] & 15u) | (codes[j + count] & 15u) << 4);
  }
}

/// Bit `shift` of 256 codes: code e has bit e / 32 of byte e % 32.
void PutHighBits(const uint8_t* codes, unsigned shift, uint8_t* out) {
  std::fill(out, out + 32, uint8_t{0});
  for (unsigned e = 0; e < kSuperBlock; ++e) {
    out[e % 32] |= static_cast<uint8_t>(((codes[e] >> shift) & 1u) << (e / 32));
  }
}

/// The low 2 bits of 256 codes: 32 bytes hold 128 codes, the first 32 in the lowest bits.
void PutTwoBits(const uint8_t* codes, uint8_t* out) {
  for (unsigned i = 0; i < 64; ++i) {
    const uint8_t* const first = codes + i / 32 * 128 + i % 32;
    out[i] = static_cast<uint8_t>((first[0] & 3u) | (first[32] & 3u) << 2 | (first[64] & 3u) << 4 |
                                  (first[96] & 3u) << 6);
  }
}

void EncodeQ2K(const GgufDecoded& block, uint8_t* out) {
  for (size_t g = 0; g < 16; ++g) {
    out[g] = static_cast<uint8_t>(block.scales[g] | block.biases[g] << 4);
  }
  PutTwoBits(block.codes.data(), out + 16);
  PutHalf(block.super_scale, out + 80);
  PutHalf(block.super_bias ^ kSignOfHalf, out + 82);  // A minimum, which is subtracted.
}

void EncodeQ3K(const GgufDecoded& block, uint8_t* out) {
  PutHighBits(block.codes.data(), 2, out);
  PutTwoBits(block.codes.data(), out + 32);
  uint8_t* const scales = out + 96;
  std::fill(scales, scales + 12, uint8_t{0});
  for (unsigned g = 0; g < 16; ++g) {
    const unsigned scale = (block.scales[g] + 32) & 63u;
    scales[g % 8] |= static_cast<uint8_t>((scale & 15u) << (g / 8 * 4));
    scales[8 + g % 4] |= static_cast<uint8_t>((scale >> 4) << (g / 4 * 2));
  }
  PutHalf(block.super_scale, out + 108);
}

/// The scales and minimums of Q4_K and Q5_K, 6 bits each: the first four whole, the upper bits of
/// the others above them.
void PutScalesOfK(const GgufDecoded& block, uint8_t* out) {
  PutHalf(block.super_scale, out);
  PutHalf(block.super_bias ^ kSignOfHalf, out + 2);  // A minimum, which is subtracted.
  uint8_t* const s = out + 4;
  for (size_t j = 0; j < 4; ++j) {
    const unsigned scale = block.scales[j + 4];
    const unsigned minimum = block.biases[j + 4];
    s[j] = static_cast<uint8_t>(block.scales[j] | (scale >> 4) << 6);
    s[j + 4] = static_cast<uint8_t>(block.biases[j] | (minimum >> 4) << 6);
    s[j + 8] = static_cast<uint8_t>((scale & 15u) | (minimum & 15u) << 4);
  }
}

void PutNibblesOfK(const uint8_t* codes, uint8_t* out) {
  for (int chunk = 0; chunk < 4; ++chunk) PutHalves(codes + chunk * 64, 32, out + chunk * 32);
}

void EncodeQ4K(const GgufDecoded& block, uint8_t* out) {
  PutScalesOfK(block, out);
  PutNibblesOfK(block.codes.data(), out + 16);
}

void EncodeQ5K(const GgufDecoded& block, uint8_t* out) {
  PutScalesOfK(block, out);
  PutHighBits(block.codes.data(), 4, out + 16);
  PutNibblesOfK(block.codes.data(), out + 48);
}

void EncodeQ6K(const GgufDecoded& block, uint8_t* out) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* const codes = block.codes.data() + half * 128;
    for (int l = 0; l < 32; ++l) {
      unsigned high = 0;
      for (int part = 0; part < 4; ++part) {
        high |= static_cast<unsigned>(codes[part * 32 + l] >> 4) << (2 * part);
      }
      out[128 + half * 32 + l] = static_cast<uint8_t>(high);
    }
    PutHalves(codes, 64, out + half * 64);
  }
  for (size_t g = 0; g < 16; ++g) out[192 + g] = static_cast<uint8_t>(block.scales[g]);
  PutHalf(block.super_scale, out + 208);
}

void EncodeIq4Xs(const GgufDecoded& block, uint8_t* out) {
  PutHalf(block.super_scale, out);
  unsigned high = 0;
  std::fill(out + 4, out + 8, uint8_t{0});
  for (unsigned j = 0; j < 8; ++j) {
    const unsigned scale = (block.scales[j] + 32) & 63u;
    out[4 + j / 2] |= static_cast<uint8_t>((scale & 15u) << (4 * (j % 2)));
    high |= (scale >> 4) << (2 * j);
    PutHalves(block.codes.data() + j * 32, 16, out + 8 + j * 16);
  }
  PutHalf(high, out + 2);
}

struct SuperType {
  std::string_view name;
  int min_scale;
  int max_scale;
  int max_bias;  ///< The smallest one is 0.
  void (*encode)(const GgufDecoded& block, uint8_t* out);
};
constexpr SuperType kSuperTypes[] = {
    {"Q2_K", 0, 15, 15, EncodeQ2K},    {"Q3_K", -32, 31, 0, EncodeQ3K},
    {"Q4_K", 0, 63, 63, EncodeQ4K},    {"Q5_K", 0, 63, 63, EncodeQ5K},
    {"Q6_K", -128, 127, 0, EncodeQ6K}, {"IQ4_XS", -32, 31, 0, EncodeIq4Xs},
};

const SuperType& Named(std::string_view name) {
  return *std::find_if(std::begin(kSuperTypes), std::end(kSuperTypes),
                       [&](const SuperType& type) { return type.name == name; });
}

bool AreWithin(const TensorView& view, int smallest, int largest) {
  const auto* const values = view.As<int8_t>();
  return std::all_of(values, values + view.ElementCount(),
                     [=](int8_t value) { return value >= smallest && value <= largest; });
}

/// Whether fp16 holds all super scales.
bool AreHalves(const TensorView& view) {
  for (int64_t e = 0; e < view.dim(0); ++e) {
    const Shape shape{1, view.dim(1), view.dim(2)};
    const std::byte* const data =
        view.As<std::byte>() + e * shape.ElementCount() * DTypeBytes(view.dtype());
    if (!ConvertedParameters("gguf", "super scale", TensorView(data, view.dtype(), shape),
                             DType::kF16)
             .ok()) {
      return false;
    }
  }
  return true;
}

}  // namespace

const GgufStored* FindSuperType(const WeightsSpec& spec) {
  if (spec.super_group_size == 0 || spec.has_zeros || spec.k % kSuperBlock != 0) return nullptr;
  for (const SuperType& type : kSuperTypes) {
    const GgufStored* const stored = FindGgufType(type.name);
    const GgufFormat& format = *stored->format;
    if (format.format != spec.format || format.biases != spec.has_biases) continue;
    const bool groups = spec.group_size >= spec.k || spec.group_size % format.group_size == 0;
    const bool super_groups =
        spec.super_group_size >= spec.k || spec.super_group_size % kSuperBlock == 0;
    return groups && super_groups ? stored : nullptr;
  }
  return nullptr;
}

bool HoldsSuperBlocks(const GgufStored& type, const QuantizedWeights& weights) {
  const SuperType& super = Named(type.name);
  if (!weights.codebook.empty()) {
    const std::span<const float> values = FormatValues(type.format->format);
    const float* const table =
        type.format->codebook != nullptr ? type.format->codebook : values.data();
    if (!std::equal(weights.codebook.begin(), weights.codebook.end(), table)) return false;
  } else if (type.format->codebook != nullptr) {
    return false;
  }
  if (!AreWithin(weights.scales, super.min_scale, super.max_scale)) return false;
  if (!AreHalves(weights.super_scales)) return false;
  return !weights.spec.has_biases ||
         (AreWithin(weights.biases, 0, super.max_bias) && AreHalves(weights.super_biases));
}

void EncodeSuperBlock(const GgufStored& type, const GgufDecoded& block, uint8_t* out) {
  Named(type.name).encode(block, out);
}

}  // namespace marlin
