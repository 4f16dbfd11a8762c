// 2:4 sparsity: keeps two of every four codes along k, and their positions as metadata.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <optional>
#include <string>
#include <string_view>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/known.h"
#include "marlin/layout.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

constexpr int64_t kBlock = 4;         ///< Codes per block, two of which are kept.
constexpr int64_t kGranule = 32;      ///< k is padded to whole metadata words.
constexpr int64_t kCodesPerWord = 8;  ///< 4-bit codes per word, dense or compressed.

Status Invalid(std::string_view message) { return {Code::kInvalidArgument, message}; }

std::string Dims(int64_t k, int64_t n) { return fmt::format("[{}, {}]", k, n); }

Status CheckFormat(Format format) {
  MARLIN_RETURN_IF_ERROR(CheckKnown(format));
  const FormatInfo& info = GetFormatInfo(format);
  if (info.bits != 4) {
    return Invalid("format: 2:4 needs 4 bits, " + std::string(info.name) + " has " +
                   std::to_string(info.bits));
  }
  if (info.zero_point == ZeroPoint::kRequired) {
    return {Code::kUnsupported, "format: in " + std::string(info.name) +
                                    " the code of weight 0 depends on the group's zero point; "
                                    "use a format without zeros"};
  }
  return {};
}

Status CheckCount(const char* name, size_t got, int64_t expected, int64_t k, int64_t n) {
  if (got == static_cast<size_t>(expected)) return {};
  return Invalid(std::string(name) + ": expected " + std::to_string(expected) + ", got " +
                 std::to_string(got) + " for " + Dims(k, n));
}

Status CheckShape(int64_t k, int64_t n) {
  if (k < 0 || n < 0 || !((Checked(k) + Checked(kGranule)) * Checked(n)).valid()) {
    return Invalid("weights: negative or overflowing shape " + Dims(k, n));
  }
  return {};
}

/// The code whose value is 0, if there is one.
std::optional<uint32_t> CodeOfZero(Format format) {
  const auto values = FormatValues(format);
  const auto zero = std::find(values.begin(), values.end(), 0.0f);
  if (zero == values.end()) return std::nullopt;
  return static_cast<uint32_t>(zero - values.begin());
}

/// The two positions of a block that are kept, first < second.
struct Kept {
  int first;
  int second;
};

/// The two most important weights; ties go to the lower index.
Kept LargestTwo(const float (&importance)[kBlock]) {
  int best = 0;
  for (int i = 1; i < kBlock; ++i) best = importance[i] > importance[best] ? i : best;
  int next = best == 0 ? 1 : 0;
  for (int i = next + 1; i < kBlock; ++i) {
    if (i != best && importance[i] > importance[next]) next = i;
  }
  return {std::min(best, next), std::max(best, next)};
}

bool IsValidNibble(uint32_t nibble) { return (nibble & 3u) < (nibble >> 2); }

/// Positions of a 4-code block: 16 bits of a dense word, its values byte, its metadata nibble.
struct BlockPlace {
  int64_t dense_word;
  int64_t dense_shift;
  int64_t value_word;
  int64_t value_shift;
  int64_t metadata_word;
  int64_t metadata_shift;
};

BlockPlace PlaceOf(int64_t block, int64_t n, int64_t n_count) {
  return {block / 2 * n_count + n, block % 2 * 16,          block / 4 * n_count + n,
          block % 4 * 8,           block / 8 * n_count + n, block % 8 * 4};
}

Status CheckSaliency(int64_t k, int64_t n, std::span<const float> saliency) {
  if (saliency.empty()) return {};
  MARLIN_RETURN_IF_ERROR(CheckCount("saliency", saliency.size(), k * n, k, n));
  for (size_t i = 0; i < saliency.size(); ++i) {
    if (std::isnan(saliency[i])) {
      const auto index = static_cast<int64_t>(i);
      return {Code::kNonFiniteInput, "saliency: NaN at " + Dims(index / n, index % n)};
    }
  }
  return {};
}

}  // namespace

Result<Sparse24> PackSparse24(Format format, int64_t k, int64_t n,
                              std::span<const uint32_t> canonical,
                              std::span<const float> saliency) {
  MARLIN_RETURN_IF_ERROR(CheckFormat(format));
  MARLIN_RETURN_IF_ERROR(CheckShape(k, n));
  MARLIN_RETURN_IF_ERROR(
      CheckCount("canonical", canonical.size(), CeilDivide(k, kCodesPerWord) * n, k, n));
  MARLIN_RETURN_IF_ERROR(CheckSaliency(k, n, saliency));
  const int64_t padded = RoundUp(k, kGranule);
  Sparse24 sparse;
  try {
    sparse.values.resize(static_cast<size_t>(padded / 16 * n));
    sparse.metadata.resize(static_cast<size_t>(padded / 32 * n));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "2:4: out of memory for " + Dims(k, n));
  }
  sparse.k = k;
  sparse.n = n;
  if (n == 0) return sparse;  // Without columns k is unbounded: skip the loop.
  const auto values = FormatValues(format);
  for (int64_t block = 0; block < padded / kBlock; ++block) {
    for (int64_t column = 0; column < n; ++column) {
      const BlockPlace place = PlaceOf(block, column, n);
      uint32_t codes[kBlock] = {};
      // Positions past k lose to every real one.
      float importance[kBlock] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      for (int64_t i = 0; i < std::min(kBlock, k - block * kBlock); ++i) {
        const uint32_t word = canonical[static_cast<size_t>(place.dense_word)];
        codes[i] = (word >> (place.dense_shift + 4 * i)) & 15u;
        importance[i] = saliency.empty()
                            ? std::fabs(values[codes[i]])
                            : saliency[static_cast<size_t>((block * kBlock + i) * n + column)];
      }
      const Kept kept = LargestTwo(importance);
      sparse.values[static_cast<size_t>(place.value_word)] |=
          (codes[kept.first] | codes[kept.second] << 4) << place.value_shift;
      sparse.metadata[static_cast<size_t>(place.metadata_word)] |=
          static_cast<uint32_t>(kept.second << 2 | kept.first) << place.metadata_shift;
    }
  }
  return sparse;
}

Status UnpackSparse24(Format format, const Sparse24& sparse, std::span<uint32_t> canonical) {
  MARLIN_RETURN_IF_ERROR(CheckFormat(format));
  const int64_t k = sparse.k;
  const int64_t n = sparse.n;
  MARLIN_RETURN_IF_ERROR(CheckShape(k, n));
  const int64_t padded = RoundUp(k, kGranule);
  MARLIN_RETURN_IF_ERROR(CheckCount("values", sparse.values.size(), padded / 16 * n, k, n));
  MARLIN_RETURN_IF_ERROR(CheckCount("metadata", sparse.metadata.size(), padded / 32 * n, k, n));
  MARLIN_RETURN_IF_ERROR(
      CheckCount("canonical", canonical.size(), CeilDivide(k, kCodesPerWord) * n, k, n));
  const std::optional<uint32_t> zero = CodeOfZero(format);
  if (!zero) {
    return {Code::kUnsupported,
            "format: " + std::string(FormatName(format)) + " has no code of value 0"};
  }
  if (n == 0) return {};
  const auto nibble_at = [&](const BlockPlace& place) {
    return sparse.metadata[static_cast<size_t>(place.metadata_word)] >> place.metadata_shift & 15u;
  };
  for (int64_t block = 0; block < padded / kBlock; ++block) {
    for (int64_t column = 0; column < n; ++column) {
      const uint32_t nibble = nibble_at(PlaceOf(block, column, n));
      if (IsValidNibble(nibble)) continue;
      return {Code::kMalformedFile,
              "metadata: nibble " + std::to_string(nibble) + " of block " + std::to_string(block) +
                  ", column " + std::to_string(column) + " is not one of 4, 8, 9, 12, 13, 14"};
    }
  }
  std::fill(canonical.begin(), canonical.end(), 0u);
  for (int64_t block = 0; block < CeilDivide(k, kBlock); ++block) {
    for (int64_t column = 0; column < n; ++column) {
      const BlockPlace place = PlaceOf(block, column, n);
      const uint32_t nibble = nibble_at(place);
      const uint32_t pair =
          sparse.values[static_cast<size_t>(place.value_word)] >> place.value_shift;
      uint32_t codes[kBlock] = {*zero, *zero, *zero, *zero};
      codes[nibble & 3u] = pair & 15u;
      codes[nibble >> 2] = pair >> 4 & 15u;
      uint32_t& word = canonical[static_cast<size_t>(place.dense_word)];
      for (int64_t i = 0; i < std::min(kBlock, k - block * kBlock); ++i) {
        word |= codes[i] << (place.dense_shift + 4 * i);
      }
    }
  }
  return {};
}

}  // namespace marlin
