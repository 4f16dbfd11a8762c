// 2:4 sparsity: keeps two of every four codes along k, and their positions as metadata.
#include "layout/sparse_24.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "layout/known.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

constexpr int64_t kCodesPerWord = 8;  ///< 4-bit codes per word, dense or compressed.

std::string Dims(int64_t k, int64_t n) { return fmt::format("[{}, {}]", k, n); }

Status CheckFormat(Format format) {
  MARLIN_RETURN_IF_ERROR(CheckKnown(format));
  const FormatInfo& info = GetFormatInfo(format);
  if (info.bits != 4) {
    return Invalid(fmt::format("format: 2:4 needs 4 bits, {} has {}", info.name, info.bits));
  }
  return CheckSparse24(format, false);
}

Status CheckCount(const char* name, size_t got, int64_t expected, int64_t k, int64_t n) {
  if (got == static_cast<size_t>(expected)) return {};
  return Invalid(fmt::format("{}: expected {}, got {} for {}", name, expected, got, Dims(k, n)));
}

Status CheckShape(int64_t k, int64_t n) {
  if (k < 0 || n < 0 || !((Checked(k) + Checked(kSparseRun)) * Checked(n)).valid()) {
    return Invalid("weights: negative or overflowing shape " + Dims(k, n));
  }
  return {};
}

Status NoCodeOfZero(Format format) {
  return {Code::kUnsupported, fmt::format("format: {} has no code of value 0", FormatName(format))};
}

/// The two positions of a block that are kept, first < second.
struct Kept {
  int first;
  int second;
};

/// The two most important weights; ties go to the lower index.
Kept LargestTwo(const float (&importance)[kSparseBlock]) {
  int best = 0;
  for (int i = 1; i < kSparseBlock; ++i) best = importance[i] > importance[best] ? i : best;
  int next = best == 0 ? 1 : 0;
  for (int i = next + 1; i < kSparseBlock; ++i) {
    if (i != best && importance[i] > importance[next]) next = i;
  }
  return {std::min(best, next), std::max(best, next)};
}

bool IsValidNibble(uint32_t nibble) { return (nibble & 3u) < (nibble >> 2); }

/// One matrix [k, n]: where the codes, the kept codes and the nibble of a block of a column are.
struct Geometry {
  int bits;
  int64_t k;
  int64_t n;

  int64_t codes_per_word() const { return 32 / bits; }
  uint32_t code_mask() const { return (1u << bits) - 1; }
  int64_t blocks() const { return RoundUp(k, kSparseRun) / kSparseBlock; }
  int64_t dense_word(int64_t block) const { return block * kSparseBlock / codes_per_word() * n; }
  int64_t dense_shift(int64_t block) const {
    return block * kSparseBlock % codes_per_word() * bits;
  }
  int64_t value_word(int64_t block) const { return block * 2 / codes_per_word() * n; }
  int64_t value_shift(int64_t block) const { return block * 2 % codes_per_word() * bits; }
  /// Codes of a block that are not padding.
  int64_t codes_in(int64_t block) const {
    return std::clamp<int64_t>(k - block * kSparseBlock, 0, kSparseBlock);
  }
};

/// Keeps the two most important codes of every block. `importance` ranks a code, at its k
/// and column. `values` and `metadata` must be zero.
template <typename Importance>
void KeepTwo(const Geometry& matrix, const uint32_t* words, Importance importance, uint32_t* values,
             uint32_t* metadata) {
  for (int64_t block = 0; block < matrix.blocks(); ++block) {
    const int64_t count = matrix.codes_in(block);
    for (int64_t column = 0; column < matrix.n; ++column) {
      uint32_t codes[kSparseBlock] = {};
      // Positions past k lose to every real one.
      float rank[kSparseBlock] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t word = words[matrix.dense_word(block) + column];
        codes[i] = word >> (matrix.dense_shift(block) + matrix.bits * i) & matrix.code_mask();
        rank[i] = importance(codes[i], block * kSparseBlock + i, column);
      }
      const Kept kept = LargestTwo(rank);
      values[matrix.value_word(block) + column] |=
          (codes[kept.first] | codes[kept.second] << matrix.bits) << matrix.value_shift(block);
      metadata[block / 8 * matrix.n + column] |=
          static_cast<uint32_t>(kept.second << 2 | kept.first) << (block % 8 * 4);
    }
  }
}

/// Writes k-packed words, with code `zero` at pruned positions and 0 past k. `words` must be zero.
/// Precondition: valid nibbles.
void Expand(const Geometry& matrix, uint32_t zero, const uint32_t* values, const uint32_t* metadata,
            uint32_t* words) {
  for (int64_t block = 0; block < matrix.blocks(); ++block) {
    const int64_t count = matrix.codes_in(block);
    if (count == 0) return;
    const auto real = static_cast<uint32_t>((uint64_t{1} << (matrix.bits * count)) - 1);
    uint32_t fill = 0;
    for (int64_t i = 0; i < kSparseBlock; ++i) fill |= zero << (matrix.bits * i);
    const uint32_t* const pairs = values + matrix.value_word(block);
    const uint32_t* const nibbles = metadata + block / 8 * matrix.n;
    uint32_t* const row = words + matrix.dense_word(block);
    for (int64_t column = 0; column < matrix.n; ++column) {
      const uint32_t nibble = nibbles[column] >> (block % 8 * 4);
      const uint32_t pair = pairs[column] >> matrix.value_shift(block);
      const auto first = static_cast<int>(nibble & 3u) * matrix.bits;
      const auto second = static_cast<int>(nibble >> 2 & 3u) * matrix.bits;
      const uint32_t mask = matrix.code_mask();
      uint32_t codes = fill & ~(mask << first | mask << second);
      codes |= (pair & mask) << first | (pair >> matrix.bits & mask) << second;
      row[column] |= (codes & real) << matrix.dense_shift(block);
    }
  }
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

/// Weights of another sparsity with the scales of `from`, and codes and metadata all zero.
Result<WeightsBuffer> WithScalesOf(const QuantizedWeights& from, Sparsity sparsity) {
  WeightsSpec spec = from.spec;
  spec.sparsity = sparsity;
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, AllocateWeights(spec));
  to.weights.codebook = from.codebook;
  const auto clear = [](const TensorView& view, void* data) {
    if (view.ElementCount() > 0) std::memset(data, 0, static_cast<size_t>(view.ByteCount()));
  };
  const auto copy = [](const TensorView& view, void* data) {
    if (view.ElementCount() > 0) {
      std::memcpy(data, view.data(), static_cast<size_t>(view.ByteCount()));
    }
  };
  clear(to.weights.codes, to.codes);
  if (sparsity == Sparsity::k24) clear(to.weights.metadata, to.metadata);
  copy(from.scales, to.scales);
  if (spec.has_global_scale) copy(from.global_scale, to.global_scale);
  if (spec.has_input_scale) copy(from.input_scale, to.input_scale);
  return to;
}

Status CheckImportance(const WeightsSpec& spec, std::span<const float> importance) {
  if (importance.empty()) return {};
  if (importance.size() != static_cast<size_t>(spec.k)) {
    return Invalid(fmt::format("importance: expected {} values, one per k, got {}", spec.k,
                               importance.size()));
  }
  for (size_t i = 0; i < importance.size(); ++i) {
    if (std::isfinite(importance[i]) && importance[i] >= 0.0f) continue;
    return Invalid(fmt::format("importance: value {} is {}; expected finite numbers of at least 0",
                               i, importance[i]));
  }
  return {};
}

}  // namespace

Status CheckNibbles(int64_t blocks, int64_t n, const uint32_t* metadata, const std::string& where) {
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t column = 0; column < n; ++column) {
      const uint32_t nibble = metadata[block / 8 * n + column] >> (block % 8 * 4) & 15u;
      if (IsValidNibble(nibble)) continue;
      return {Code::kMalformedFile,
              fmt::format("metadata: nibble {} of {}block {}, column {} is not one of 4, 8, 9, 12, "
                          "13, 14",
                          nibble, where, block, column)};
    }
  }
  return {};
}

Status CheckSparse24(Format format, bool has_offsets) {
  const FormatInfo& info = GetFormatInfo(format);
  if (!info.quantized || (info.bits != 4 && info.bits != 8)) {
    return Invalid(fmt::format("sparsity: 2:4 needs 4 or 8 bits, {} has {}", info.name, info.bits));
  }
  if (has_offsets || info.zero_point == ZeroPoint::kRequired) {
    return {Code::kUnsupported,
            fmt::format("format: in {} the code of weight 0 depends on the group's zero point; use "
                        "a format without zeros",
                        info.name)};
  }
  // A codebook of the weights may hold the zero that the format's own lacks.
  if (!info.has_codebook && !CodeOfZero(FormatValues(format))) return NoCodeOfZero(format);
  return {};
}

std::span<const float> CodeValues(const QuantizedWeights& weights) {
  return weights.codebook.empty() ? FormatValues(weights.spec.format)
                                  : std::span<const float>(weights.codebook);
}

std::optional<uint32_t> CodeOfZero(std::span<const float> values) {
  const auto zero = std::find(values.begin(), values.end(), 0.0f);
  if (zero == values.end()) return std::nullopt;
  return static_cast<uint32_t>(zero - values.begin());
}

Status CheckMetadata(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  if (spec.sparsity == Sparsity::kDense) return {};
  if (!CodeOfZero(CodeValues(weights))) return NoCodeOfZero(spec.format);
  if (spec.n == 0) return {};  // Without columns k is unbounded: skip the loop.
  const Geometry matrix{GetFormatInfo(spec.format).bits, spec.k, spec.n};
  const int64_t words = MetadataWordsAlongK(spec.k) * spec.n;
  for (int64_t expert = 0; expert < spec.experts; ++expert) {
    MARLIN_RETURN_IF_ERROR(
        CheckNibbles(matrix.blocks(), spec.n, weights.metadata.As<uint32_t>() + expert * words,
                     spec.experts > 1 ? fmt::format("expert {}, ", expert) : ""));
  }
  return {};
}

Result<QuantizedWeights> Prune24(const QuantizedWeights& weights,
                                 std::span<const float> importance) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  const WeightsSpec& spec = weights.spec;
  if (spec.sparsity == Sparsity::k24) return weights;
  MARLIN_RETURN_IF_ERROR(CheckSparse24(spec.format, spec.has_zeros || spec.has_biases));
  MARLIN_RETURN_IF_ERROR(CheckImportance(spec, importance));
  const std::span<const float> values = CodeValues(weights);
  if (!CodeOfZero(values)) return NoCodeOfZero(spec.format);
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, WithScalesOf(weights, Sparsity::k24));
  const Geometry matrix{GetFormatInfo(spec.format).bits, spec.k, spec.n};
  const int64_t dense_words = WordsAlongK(spec) * spec.n;
  const int64_t value_words = WordsAlongK(to.weights.spec) * spec.n;
  const int64_t metadata_words = MetadataWordsAlongK(spec.k) * spec.n;
  // A block lies in one group, so its scale does not change the order.
  const auto rank = [&](uint32_t code, int64_t k, int64_t) {
    const float value = values[code];
    return importance.empty() ? std::fabs(value)
                              : importance[static_cast<size_t>(k)] * value * value;
  };
  for (int64_t expert = 0; expert < spec.experts && spec.n > 0; ++expert) {
    KeepTwo(matrix, weights.codes.As<uint32_t>() + expert * dense_words, rank,
            static_cast<uint32_t*>(to.codes) + expert * value_words,
            static_cast<uint32_t*>(to.metadata) + expert * metadata_words);
  }
  return std::move(to.weights);
}

Result<QuantizedWeights> Expand24(const QuantizedWeights& weights) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  const WeightsSpec& spec = weights.spec;
  if (spec.sparsity == Sparsity::kDense) return weights;
  const std::optional<uint32_t> zero = CodeOfZero(CodeValues(weights));
  if (!zero) return NoCodeOfZero(spec.format);
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, WithScalesOf(weights, Sparsity::kDense));
  const Geometry matrix{GetFormatInfo(spec.format).bits, spec.k, spec.n};
  const int64_t dense_words = WordsAlongK(to.weights.spec) * spec.n;
  const int64_t value_words = WordsAlongK(spec) * spec.n;
  const int64_t metadata_words = MetadataWordsAlongK(spec.k) * spec.n;
  for (int64_t expert = 0; expert < spec.experts && spec.n > 0; ++expert) {
    Expand(matrix, *zero, weights.codes.As<uint32_t>() + expert * value_words,
           weights.metadata.As<uint32_t>() + expert * metadata_words,
           static_cast<uint32_t*>(to.codes) + expert * dense_words);
  }
  return std::move(to.weights);
}

Result<Sparse24> PackSparse24(Format format, int64_t k, int64_t n,
                              std::span<const uint32_t> canonical,
                              std::span<const float> saliency) {
  MARLIN_RETURN_IF_ERROR(CheckFormat(format));
  MARLIN_RETURN_IF_ERROR(CheckShape(k, n));
  MARLIN_RETURN_IF_ERROR(
      CheckCount("canonical", canonical.size(), CeilDivide(k, kCodesPerWord) * n, k, n));
  MARLIN_RETURN_IF_ERROR(CheckSaliency(k, n, saliency));
  const int64_t padded = RoundUp(k, kSparseRun);
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
  const auto rank = [&](uint32_t code, int64_t row, int64_t column) {
    return saliency.empty() ? std::fabs(values[code])
                            : saliency[static_cast<size_t>(row * n + column)];
  };
  KeepTwo({4, k, n}, canonical.data(), rank, sparse.values.data(), sparse.metadata.data());
  return sparse;
}

Status UnpackSparse24(Format format, const Sparse24& sparse, std::span<uint32_t> canonical) {
  MARLIN_RETURN_IF_ERROR(CheckFormat(format));
  const int64_t k = sparse.k;
  const int64_t n = sparse.n;
  MARLIN_RETURN_IF_ERROR(CheckShape(k, n));
  const int64_t padded = RoundUp(k, kSparseRun);
  MARLIN_RETURN_IF_ERROR(CheckCount("values", sparse.values.size(), padded / 16 * n, k, n));
  MARLIN_RETURN_IF_ERROR(CheckCount("metadata", sparse.metadata.size(), padded / 32 * n, k, n));
  MARLIN_RETURN_IF_ERROR(
      CheckCount("canonical", canonical.size(), CeilDivide(k, kCodesPerWord) * n, k, n));
  const std::optional<uint32_t> zero = CodeOfZero(FormatValues(format));
  if (!zero) return NoCodeOfZero(format);
  if (n == 0) return {};
  const Geometry matrix{4, k, n};
  MARLIN_RETURN_IF_ERROR(CheckNibbles(matrix.blocks(), n, sparse.metadata.data(), ""));
  std::fill(canonical.begin(), canonical.end(), 0u);
  Expand(matrix, *zero, sparse.values.data(), sparse.metadata.data(), canonical.data());
  return {};
}

}  // namespace marlin
