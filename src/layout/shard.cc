// Cuts weights into equal shards for tensor parallelism.
#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "layout/join_columns.h"
#include "layout/plain_weights.h"
#include "layout/slice_rows.h"
#include "layout/sparse_24.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

/// Consecutive rows, [experts, rows, n] of a larger array.
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};

/// Copies the rows of every expert of a contiguous array [experts, rows, n].
void CopyRows(const TensorView& from, const RowRange& rows, void* to) {
  if (from.empty()) return;
  const int64_t row_bytes = from.dim(2) * DTypeBytes(from.dtype());
  const int64_t bytes = rows.count * row_bytes;
  for (int64_t expert = 0; expert < from.dim(0); ++expert) {
    const auto* source = from.As<std::byte>() + (expert * from.dim(1) + rows.first) * row_bytes;
    std::memcpy(static_cast<std::byte*>(to) + expert * bytes, source, static_cast<size_t>(bytes));
  }
}

/// Copies codes first_k ... of every column to words of their own. The words of a column are one
/// string of bits, for every width, so a border within a word is a shift; bits past the last code
/// are cleared.
void CopyCodes(const QuantizedWeights& from, int64_t first_k, const WeightsBuffer& to) {
  const int bits = GetFormatInfo(from.spec.format).bits;
  const int64_t n = from.spec.n;
  const int64_t from_words = from.codes.dim(1);
  const int64_t to_words = to.weights.codes.dim(1);
  const int64_t first_word = first_k * bits / 32;
  const int shift = static_cast<int>(first_k * bits % 32);
  const int64_t used_bits = to.weights.spec.k * bits;
  for (int64_t expert = 0; expert < from.spec.experts; ++expert) {
    const auto* source = from.codes.As<uint32_t>() + expert * from_words * n;
    auto* target = static_cast<uint32_t*>(to.codes) + expert * to_words * n;
    for (int64_t word = 0; word < to_words; ++word) {
      const int64_t bits_left = std::clamp<int64_t>(used_bits - word * 32, 0, 32);
      const auto mask = static_cast<uint32_t>((uint64_t{1} << bits_left) - 1);
      const int64_t low = first_word + word;
      const uint32_t* row = low < from_words ? source + low * n : nullptr;
      const uint32_t* next = shift != 0 && low + 1 < from_words ? source + (low + 1) * n : nullptr;
      for (int64_t column = 0; column < n; ++column) {
        uint32_t value = row == nullptr ? 0U : row[column] >> shift;
        if (next != nullptr) value |= next[column] << (32 - shift);
        target[word * n + column] = value & mask;
      }
    }
  }
}

/// Rows first_k ... first_k + spec.k of weights, where spec differs from theirs in k and, with one
/// group, in group_size.
Result<QuantizedWeights> TakeRows(const QuantizedWeights& from, const WeightsSpec& spec,
                                  int64_t first_k) {
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, AllocateWeights(spec));
  to.weights.codebook = from.codebook;
  if (!GetFormatInfo(spec.format).quantized) {
    CopyRows(from.codes, {first_k, spec.k}, to.codes);
    return std::move(to.weights);
  }
  if (spec.sparsity == Sparsity::k24) {
    const int64_t run = first_k / kSparseRun;
    const int64_t words_per_run = GetFormatInfo(spec.format).bits / 2;
    CopyRows(from.codes, {run * words_per_run, WordsAlongK(spec)}, to.codes);
    CopyRows(from.metadata, {run, MetadataWordsAlongK(spec.k)}, to.metadata);
  } else {
    CopyCodes(from, first_k, to);
  }
  const bool one_group = GroupCount(from.spec) <= 1;
  const RowRange groups{one_group ? 0 : first_k / spec.group_size, GroupCount(spec)};
  CopyRows(from.scales, groups, to.scales);
  CopyRows(from.zeros, groups, to.zeros);
  CopyRows(from.biases, groups, to.biases);
  if (spec.super_group_size > 0) {
    const RowRange super_groups{first_k / spec.super_group_size, SuperGroupCount(spec)};
    CopyRows(from.super_scales, super_groups, to.super_scales);
    CopyRows(from.super_biases, super_groups, to.super_biases);
  }
  if (spec.has_input_scale) {
    for (int64_t expert = 0; expert < spec.experts; ++expert) {
      std::memcpy(to.input_scale + expert * spec.k,
                  from.input_scale.As<float>() + expert * from.spec.k + first_k,
                  static_cast<size_t>(spec.k) * sizeof(float));
    }
  }
  if (spec.has_global_scale) {
    std::memcpy(to.global_scale, from.global_scale.data(),
                static_cast<size_t>(from.global_scale.ByteCount()));
  }
  return std::move(to.weights);
}

Result<QuantizedWeights> ShardRows(const QuantizedWeights& weights, int64_t rank, int64_t world) {
  WeightsSpec spec = weights.spec;
  spec.k /= world;
  if (spec.has_permutation) {
    return Status(Code::kUnsupported,
                  "shard: the groups of weights with a permutation lie across k; cut them along n, "
                  "or FoldInput them first");
  }
  if (spec.input_hadamard > 0 && spec.k % spec.input_hadamard != 0) {
    return Status(
        Code::kUnsupported,
        fmt::format("shard: k={} in {} shards of {} cuts Hadamard blocks of {}; cut them along n, "
                    "or FoldInput them first",
                    weights.spec.k, world, spec.k, spec.input_hadamard));
  }
  if (GroupCount(weights.spec) > 1 && spec.k % spec.group_size != 0) {
    return Invalid(fmt::format("shard: k={} in {} shards of {} is no multiple of group_size={}",
                               weights.spec.k, world, spec.k, spec.group_size));
  }
  if (spec.sparsity == Sparsity::k24 && spec.k % kSparseRun != 0) {
    return Invalid(fmt::format("shard: k={} in {} shards of {} is no multiple of {} as 2:4 needs",
                               weights.spec.k, world, spec.k, kSparseRun));
  }
  if (spec.super_group_size > 0 && spec.k % spec.super_group_size != 0) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights flat, FlattenScales(weights));
    return ShardRows(flat, rank, world);
  }
  return SliceRows(weights, rank * spec.k, spec.k);
}

}  // namespace

int64_t SliceGranule(const WeightsSpec& spec) {
  // 32 codes of every width fill whole words, and so do the kept codes of 2:4.
  constexpr int64_t kWholeWords = 32;
  const int64_t group = GroupCount(spec) > 1 ? spec.group_size : 1;
  return std::lcm(std::lcm(group, kWholeWords), std::max<int64_t>(spec.super_group_size, 1));
}

Result<QuantizedWeights> SliceRows(const QuantizedWeights& weights, int64_t first_k,
                                   int64_t count) {
  WeightsSpec spec = weights.spec;
  spec.k = count;
  if (GroupCount(weights.spec) == 1) spec.group_size = std::max<int64_t>(count, 1);
  return TakeRows(weights, spec, first_k);
}

Result<QuantizedWeights> Shard(const QuantizedWeights& weights, ShardAxis axis, int64_t rank,
                               int64_t world) {
  if (axis != ShardAxis::kK && axis != ShardAxis::kN) {
    return Invalid(fmt::format("axis: {} is no ShardAxis", static_cast<int>(axis)));
  }
  if (world < 1) return Invalid(fmt::format("world: expected at least 1, got {}", world));
  if (rank < 0 || rank >= world) {
    return Invalid(fmt::format("rank: expected 0 to {}, got {}", world - 1, rank));
  }
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  if (world == 1) return weights;
  const bool along_k = axis == ShardAxis::kK;
  const int64_t size = along_k ? weights.spec.k : weights.spec.n;
  if (size % world != 0) {
    return Invalid(fmt::format("shard: {}={} cannot be cut into {} equal shards",
                               along_k ? 'k' : 'n', size, world));
  }
  if (along_k) return ShardRows(weights, rank, world);
  const int64_t count = size / world;
  const WeightColumns columns{&weights, rank * count, 1, count};
  return JoinColumns({&columns, 1});
}

}  // namespace marlin
