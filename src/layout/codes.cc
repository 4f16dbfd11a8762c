#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/checked.h"
#include "base/errors.h"
#include "layout/known.h"
#include "layout/packing.h"
#include "marlin/layout.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

template <int kBits>
void PackColumnsOf(const CodeColumns& from, uint32_t* words, int64_t word_stride) {
  // The last run may need fewer words than kBits when the width divides 32.
  constexpr int64_t kCodesPerWord = 32 % kBits == 0 ? 32 / kBits : 0;
  for (int64_t k = 0; k < from.k; k += kPackRun) {
    const int64_t left = from.k - k;
    const int64_t count = kCodesPerWord == 0 || left >= kPackRun
                              ? kBits
                              : CeilDivide(left, kCodesPerWord == 0 ? 1 : kCodesPerWord);
    uint32_t* row = words + k / kPackRun * kBits * word_stride;
    for (int64_t c = 0; c < from.columns; ++c) {
      uint32_t run[kBits];
      PackRun<kBits>(from.codes + c * from.stride + k, run);
      for (int64_t i = 0; i < count; ++i) row[i * word_stride + c] = run[i];
    }
  }
}

template <int kBits>
void UnpackColumnsOf(const uint32_t* words, int64_t word_stride, const CodeColumns& to) {
  constexpr int64_t kCodesPerWord = 32 % kBits == 0 ? 32 / kBits : 0;
  for (int64_t k = 0; k < to.k; k += kPackRun) {
    const int64_t left = to.k - k;
    const int64_t count = kCodesPerWord == 0 || left >= kPackRun
                              ? kBits
                              : CeilDivide(left, kCodesPerWord == 0 ? 1 : kCodesPerWord);
    const uint32_t* row = words + k / kPackRun * kBits * word_stride;
    for (int64_t c = 0; c < to.columns; ++c) {
      uint32_t run[kBits] = {};
      for (int64_t i = 0; i < count; ++i) run[i] = row[i * word_stride + c];
      UnpackRun<kBits>(run, to.codes + c * to.stride + k);
    }
  }
}

/// Sizes of one code matrix and of its packed words.
struct CodeSizes {
  int64_t codes;
  int64_t words;
};

Result<CodeSizes> CheckSizes(Format format, int64_t k, int64_t n, size_t codes, size_t words) {
  if (const Status known = CheckKnown(format); !known.ok()) return known;
  const FormatInfo& info = GetFormatInfo(format);
  const std::string name(info.name);
  if (info.bits > 8) {
    return Invalid("format: " + name + " has no packed codes");
  }
  if (k < 0 || n < 0) {
    return Invalid("codes: negative shape [" + std::to_string(k) + ", " + std::to_string(n) + "]");
  }
  const auto code_count = (Checked(k) * Checked(n)).Take();
  const auto word_count =
      code_count ? (Checked(WordsAlongK(format, k)) * Checked(n)).Take() : std::nullopt;
  const std::string shape =
      " (" + name + " [" + std::to_string(k) + ", " + std::to_string(n) + "])";
  if (!code_count || !word_count) {
    return Invalid("codes: the number of elements overflows" + shape);
  }
  if (static_cast<uint64_t>(*code_count) != codes) {
    return Invalid("codes: expected " + std::to_string(*code_count) + ", got " +
                   std::to_string(codes) + shape);
  }
  if (static_cast<uint64_t>(*word_count) != words) {
    return Invalid("words: expected " + std::to_string(*word_count) + ", got " +
                   std::to_string(words) + shape);
  }
  return CodeSizes{*code_count, *word_count};
}

constexpr int64_t kTileK = 512;
constexpr int64_t kTileN = 16;

}  // namespace

void PackColumns(int bits, const CodeColumns& from, uint32_t* words, int64_t word_stride) {
  switch (bits) {
    case 2:
      return PackColumnsOf<2>(from, words, word_stride);
    case 3:
      return PackColumnsOf<3>(from, words, word_stride);
    case 4:
      return PackColumnsOf<4>(from, words, word_stride);
    case 5:
      return PackColumnsOf<5>(from, words, word_stride);
    case 6:
      return PackColumnsOf<6>(from, words, word_stride);
    default:
      return PackColumnsOf<8>(from, words, word_stride);
  }
}

void UnpackColumns(int bits, const uint32_t* words, int64_t word_stride, const CodeColumns& to) {
  switch (bits) {
    case 2:
      return UnpackColumnsOf<2>(words, word_stride, to);
    case 3:
      return UnpackColumnsOf<3>(words, word_stride, to);
    case 4:
      return UnpackColumnsOf<4>(words, word_stride, to);
    case 5:
      return UnpackColumnsOf<5>(words, word_stride, to);
    case 6:
      return UnpackColumnsOf<6>(words, word_stride, to);
    default:
      return UnpackColumnsOf<8>(words, word_stride, to);
  }
}

Status PackCodes(Format format, int64_t k, int64_t n, std::span<const uint8_t> codes,
                 std::span<uint32_t> words) {
  const auto sizes = CheckSizes(format, k, n, codes.size(), words.size());
  if (!sizes.ok()) return sizes.status();
  if (sizes->codes == 0) return {};  // Without rows n is unbounded: skip the loop.
  const int bits = GetFormatInfo(format).bits;
  const unsigned limit = 1u << bits;
  const auto bad = std::find_if(codes.begin(), codes.end(), [=](uint8_t c) { return c >= limit; });
  if (bad != codes.end()) {
    const int64_t i = bad - codes.begin();
    return Invalid("codes: " + std::to_string(*bad) + " at [" + std::to_string(i / n) + ", " +
                   std::to_string(i % n) + "] does not fit in " + std::to_string(bits) + " bits");
  }
  std::array<uint8_t, kTileK * kTileN> tile;
  for (int64_t n0 = 0; n0 < n; n0 += kTileN) {
    const int64_t columns = std::min(kTileN, n - n0);
    for (int64_t k0 = 0; k0 < k; k0 += kTileK) {
      const int64_t rows = std::min(kTileK, k - k0);
      tile.fill(0);
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* row = codes.data() + (k0 + r) * n + n0;
        for (int64_t c = 0; c < columns; ++c) tile[static_cast<size_t>(c * kTileK + r)] = row[c];
      }
      PackColumns(bits, {tile.data(), kTileK, rows, columns},
                  words.data() + WordsAlongK(format, k0) * n + n0, n);
    }
  }
  return {};
}

Status UnpackCodes(Format format, int64_t k, int64_t n, std::span<const uint32_t> words,
                   std::span<uint8_t> codes) {
  const auto sizes = CheckSizes(format, k, n, codes.size(), words.size());
  if (!sizes.ok()) return sizes.status();
  if (sizes->codes == 0) return {};  // Without rows n is unbounded: skip the loop.
  std::array<uint8_t, kTileK * kTileN> tile;
  for (int64_t n0 = 0; n0 < n; n0 += kTileN) {
    const int64_t columns = std::min(kTileN, n - n0);
    for (int64_t k0 = 0; k0 < k; k0 += kTileK) {
      const int64_t rows = std::min(kTileK, k - k0);
      UnpackColumns(GetFormatInfo(format).bits, words.data() + WordsAlongK(format, k0) * n + n0, n,
                    {tile.data(), kTileK, rows, columns});
      for (int64_t r = 0; r < rows; ++r) {
        uint8_t* row = codes.data() + (k0 + r) * n + n0;
        for (int64_t c = 0; c < columns; ++c) row[c] = tile[static_cast<size_t>(c * kTileK + r)];
      }
    }
  }
  return {};
}

}  // namespace marlin
