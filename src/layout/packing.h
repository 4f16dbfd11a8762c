// The canonical k-packed bit order, as loops over runs of columns that packers and kernels share.
//
// 32 consecutive codes of a column fill kBits words; as one little-endian string of 32 * kBits
// bits, code j is at bits kBits * j. For widths that divide 32 this is "code j of a word at bit
// kBits * j"; for 3, 5 and 6 bits it is 32 codes in kBits words.
#pragma once

#include <cstdint>
#include <cstring>

namespace marlin {

inline constexpr int64_t kPackRun = 32;  ///< Codes after which every width is at a word boundary.

/// Packs the low kBits of 8 bytes (first byte lowest) into 8 * kBits adjacent bits: joins pairs of
/// codes, pairs of pairs, and the two halves.
template <int kBits>
uint64_t PackEightCodes(uint64_t bytes) {
  static_assert(kBits < 8);
  constexpr uint64_t kCode = ((uint64_t{1} << kBits) - 1) * 0x0001000100010001u;
  constexpr uint64_t kPair = ((uint64_t{1} << (2 * kBits)) - 1) * 0x0000000100000001u;
  constexpr uint64_t kQuad = (uint64_t{1} << (4 * kBits)) - 1;
  bytes = (bytes & kCode) | ((bytes >> (8 - kBits)) & (kCode << kBits));
  bytes = (bytes & kPair) | ((bytes >> (16 - 2 * kBits)) & (kPair << (2 * kBits)));
  return (bytes & kQuad) | ((bytes >> (32 - 4 * kBits)) & (kQuad << (4 * kBits)));
}

/// The inverse of PackEightCodes; bits above 8 * kBits are ignored.
template <int kBits>
uint64_t UnpackEightCodes(uint64_t packed) {
  static_assert(kBits < 8);
  constexpr uint64_t kCode = ((uint64_t{1} << kBits) - 1) * 0x0001000100010001u;
  constexpr uint64_t kPair = ((uint64_t{1} << (2 * kBits)) - 1) * 0x0000000100000001u;
  constexpr uint64_t kQuad = (uint64_t{1} << (4 * kBits)) - 1;
  packed = (packed & kQuad) | ((packed & (kQuad << (4 * kBits))) << (32 - 4 * kBits));
  packed = (packed & kPair) | ((packed & (kPair << (2 * kBits))) << (16 - 2 * kBits));
  return (packed & kCode) | ((packed & (kCode << kBits)) << (8 - kBits));
}

/// Packs 32 codes (one byte each) into kBits words.
template <int kBits>
void PackRun(const uint8_t* codes, uint32_t* words) {
  if constexpr (kBits == 8) {
    std::memcpy(words, codes, kPackRun);
  } else {
    auto* const bytes = reinterpret_cast<uint8_t*>(words);
    for (int i = 0; i < 4; ++i) {
      uint64_t eight = 0;
      std::memcpy(&eight, codes + 8 * i, sizeof(eight));
      eight = PackEightCodes<kBits>(eight);
      std::memcpy(bytes + kBits * i, &eight, kBits);  // Eight codes are kBits bytes.
    }
  }
}

/// The inverse of PackRun.
template <int kBits>
void UnpackRun(const uint32_t* words, uint8_t* codes) {
  if constexpr (kBits == 8) {
    std::memcpy(codes, words, kPackRun);
  } else {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(words);
    for (int i = 0; i < 4; ++i) {
      uint64_t eight = 0;
      std::memcpy(&eight, bytes + kBits * i, kBits);
      eight = UnpackEightCodes<kBits>(eight);
      std::memcpy(codes + 8 * i, &eight, sizeof(eight));
    }
  }
}

/// Codes of several columns, one byte each: column c at codes + c * stride, k contiguous. Columns
/// are padded to a multiple of kPackRun: PackColumns reads the padding (which must be code 0) and
/// UnpackColumns writes it.
struct CodeColumns {
  uint8_t* codes;
  int64_t stride;
  int64_t k;
  int64_t columns;
};

/// Packs columns into word rows: word i of column c goes to words[i * word_stride + c].
/// Precondition: bits is 2 to 6 or 8.
void PackColumns(int bits, const CodeColumns& from, uint32_t* words, int64_t word_stride);

/// The inverse of PackColumns.
void UnpackColumns(int bits, const uint32_t* words, int64_t word_stride, const CodeColumns& to);

}  // namespace marlin
