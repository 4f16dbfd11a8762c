// The block types of GGUF: how each is stored, and which of our formats holds it exactly.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

inline constexpr int64_t kMaxBlockElements = 256;
inline constexpr int64_t kMaxBlockGroups = 16;
inline constexpr int64_t kSuperBlock = 256;  ///< Elements of the blocks with two levels of scales.

/// One decoded block: a code per element in the order of k, and a scale (and a bias) per group, as
/// the bits of the scale type in the low end of a word; with two levels the bits of an i8, and one
/// super scale (and super bias) of the scale type.
struct GgufDecoded {
  std::array<uint8_t, kMaxBlockElements> codes;
  std::array<uint32_t, kMaxBlockGroups> scales;
  std::array<uint32_t, kMaxBlockGroups> biases;
  uint32_t super_scale;
  uint32_t super_bias;
};

/// The format that holds every value of a block type, and the decoder of a block.
struct GgufFormat {
  Format format = Format::kS4;
  int64_t group_size = 32;
  ScaleType scale_type = ScaleType::kF16;
  bool biases = false;
  /// Codebook of the format, [2^bits]; null: the format's own values.
  const float* codebook = nullptr;
  void (*decode)(const uint8_t* block, GgufDecoded* out) = nullptr;
  int64_t super_group_size = 0;  ///< Elements of a block with two levels of scales; 0: one level.
};

/// How a tensor type of GGUF is stored.
struct GgufStored {
  uint32_t id = 0;
  std::string_view name;
  int64_t elements = 1;                ///< Elements of a block, along the contiguous dimension.
  int64_t bytes = 0;                   ///< Bytes of a block.
  DType dtype = DType::kU8;            ///< Element of an unquantized type.
  const GgufFormat* format = nullptr;  ///< Null: unquantized.

  bool quantized() const { return format != nullptr; }
};

/// The storage of a type number. Errors: kUnsupported naming a known type that cannot be read, or
/// the number of an unknown one.
Result<GgufStored> StoredAs(uint32_t type);

/// A known type by its name; by its element if it is unquantized. Null if there is none.
const GgufStored* FindGgufType(std::string_view name);
const GgufStored* FindGgufType(DType dtype);

/// The values of one block in fp32.
void DequantizeBlock(const GgufFormat& format, int64_t elements, const uint8_t* block, float* out);

}  // namespace marlin
