#include "layout/cutlass_metadata.h"

#include <fmt/core.h>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/sparse_24.h"

namespace marlin {
namespace {

constexpr int64_t kRows = 32;       ///< Rows whose words are permuted among each other.
constexpr int64_t kRowsApart = 8;   ///< Between the two rows of a word.
constexpr uint32_t kUnitBits = 16;  ///< Four nibbles.
constexpr uint32_t kUnit = 0xffff;

Status CheckSizes(int64_t k, int64_t n, size_t from, size_t to) {
  if (k < 0 || n < 0 || k % kSparseRun != 0 || n % kRows != 0) {
    return {Code::kInvalidArgument,
            fmt::format("metadata: k and n must be multiples of 32, got {} and {}", k, n)};
  }
  const auto words = (Checked(k / kSparseRun) * Checked(n)).Take();
  if (words && from == static_cast<size_t>(*words) && to == from) return {};
  return {Code::kInvalidArgument,
          fmt::format("metadata: expected k / 32 * n words for [{}, {}], got {} and {}", k, n, from,
                      to)};
}

/// The two words of canonical metadata that a reordered one takes halves of, and which halves.
struct Origin {
  int64_t low;   ///< The word of the row in the low half.
  int64_t high;  ///< That of the row in the high half.
  uint32_t shift;
};
Origin OriginOf(int64_t word) {
  const int64_t place = word % kRows;
  const int64_t low = word - place + place % 4 / 2 * 2 * kRowsApart + place / 4;
  return {low, low + kRowsApart, place % 2 == 0 ? 0 : kUnitBits};
}

}  // namespace

Status ToCutlassMetadata(int64_t k, int64_t n, std::span<const uint32_t> canonical,
                         std::span<uint32_t> reordered) {
  MARLIN_RETURN_IF_ERROR(CheckSizes(k, n, canonical.size(), reordered.size()));
  MARLIN_RETURN_IF_ERROR(CheckNibbles(k / kSparseBlock, n, canonical.data(), ""));
  for (size_t i = 0; i < reordered.size(); ++i) {
    const Origin from = OriginOf(static_cast<int64_t>(i));
    const uint32_t low = canonical[static_cast<size_t>(from.low)] >> from.shift & kUnit;
    const uint32_t high = canonical[static_cast<size_t>(from.high)] >> from.shift & kUnit;
    reordered[i] = low | high << kUnitBits;
  }
  return {};
}

Status FromCutlassMetadata(int64_t k, int64_t n, std::span<const uint32_t> reordered,
                           std::span<uint32_t> canonical) {
  MARLIN_RETURN_IF_ERROR(CheckSizes(k, n, reordered.size(), canonical.size()));
  for (uint32_t& word : canonical) word = 0;
  for (size_t i = 0; i < reordered.size(); ++i) {
    const Origin to = OriginOf(static_cast<int64_t>(i));
    canonical[static_cast<size_t>(to.low)] |= (reordered[i] & kUnit) << to.shift;
    canonical[static_cast<size_t>(to.high)] |= reordered[i] >> kUnitBits << to.shift;
  }
  return CheckNibbles(k / kSparseBlock, n, canonical.data(), "");
}

}  // namespace marlin
