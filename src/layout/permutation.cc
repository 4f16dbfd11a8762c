#include "layout/permutation.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin {
namespace {

constexpr int64_t kRun = 32;  // Codes that fill whole words, whatever their bits.

/// Moves one row of codes, all columns, to a row that holds zeros.
void CopyRow(const PackedRows& shape, const uint32_t* from, int64_t source, uint32_t* to,
             int64_t target) {
  const int64_t n = shape.n;
  const uint32_t mask = (1U << shape.bits) - 1;
  const auto word_of = [&](int64_t k) {
    return (k / kRun * shape.bits + k % kRun * shape.bits / 32) * n;
  };
  const auto bit_of = [&](int64_t k) { return static_cast<int>(k % kRun * shape.bits % 32); };
  const uint32_t* const in = from + word_of(source);
  uint32_t* const out = to + word_of(target);
  const int in_bit = bit_of(source);
  const int out_bit = bit_of(target);
  // Codes of 3, 5 and 6 bits may cross a word.
  const bool in_crosses = in_bit + shape.bits > 32;
  const bool out_crosses = out_bit + shape.bits > 32;
  for (int64_t c = 0; c < n; ++c) {
    uint32_t code = in[c] >> in_bit;
    if (in_crosses) code |= in[n + c] << (32 - in_bit);
    code &= mask;
    out[c] |= code << out_bit;
    if (out_crosses) out[n + c] |= code >> (32 - out_bit);
  }
}

}  // namespace

Status CheckPermutation(const TensorView& permutation) {
  const int64_t experts = permutation.dim(0);
  const int64_t k = permutation.dim(1);
  std::vector<bool> seen(static_cast<size_t>(k));
  for (int64_t expert = 0; expert < experts; ++expert) {
    std::fill(seen.begin(), seen.end(), false);
    for (int64_t i = 0; i < k; ++i) {
      int32_t row = 0;
      std::memcpy(&row, permutation.As<std::byte>() + (expert * k + i) * int64_t{sizeof(row)},
                  sizeof(row));
      const bool inside = row >= 0 && row < k;
      if (inside && !seen[static_cast<size_t>(row)]) {
        seen[static_cast<size_t>(row)] = true;
        continue;
      }
      return {Code::kMalformedFile,
              "permutation: " + std::to_string(row) + " at [" + std::to_string(expert) + ", " +
                  std::to_string(i) + "] " +
                  (inside ? "is there twice" : "is no row of " + std::to_string(k))};
    }
  }
  return {};
}

std::vector<int32_t> SortByGroup(std::span<const int32_t> group_of, int64_t group_size) {
  const auto k = static_cast<int64_t>(group_of.size());
  if (group_size % kGroupGranule != 0) return {};
  std::vector<int64_t> next(static_cast<size_t>(CeilDivide(k, group_size)));
  for (size_t g = 0; g < next.size(); ++g) next[g] = static_cast<int64_t>(g) * group_size;
  std::vector<int32_t> order(group_of.size());
  for (int64_t i = 0; i < k; ++i) {
    const int64_t group = group_of[static_cast<size_t>(i)];
    const int64_t to = next[static_cast<size_t>(group)]++;
    if (to >= std::min(k, (group + 1) * group_size)) return {};
    order[static_cast<size_t>(to)] = static_cast<int32_t>(i);
  }
  return order;
}

std::vector<int32_t> InverseOf(std::span<const int32_t> order) {
  std::vector<int32_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    inverse[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  }
  return inverse;
}

void ReorderRows(const PackedRows& shape, const uint32_t* from, std::span<const int32_t> order,
                 uint32_t* to) {
  const int64_t words = 32 % shape.bits == 0 ? CeilDivide(shape.k, 32 / shape.bits)
                                             : shape.bits * CeilDivide(shape.k, kRun);
  std::fill_n(to, words * shape.n, 0U);
  for (int64_t i = 0; i < shape.k; ++i) {
    CopyRow(shape, from, order[static_cast<size_t>(i)], to, i);
  }
}

Status StoreSorted(std::span<const int32_t> permutation, WeightsBuffer* buffer) {
  const WeightsSpec& spec = buffer->weights.spec;
  const int64_t bytes = buffer->weights.codes.ByteCount();
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer copy, AlignedBuffer::Allocate(bytes));
  std::memcpy(copy.data(), buffer->codes, static_cast<size_t>(bytes));
  ReorderRows({GetFormatInfo(spec.format).bits, spec.k, spec.n}, copy.As<uint32_t>(0), permutation,
              static_cast<uint32_t*>(buffer->codes));
  std::copy(permutation.begin(), permutation.end(), buffer->permutation);
  return {};
}

}  // namespace marlin
