#include "layout/move_runs.h"

#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "layout/input_transform.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

/// Copies the rows of an array [experts, rows, n] of which a run has `per_run`, or, where a run has
/// only a part of a row, the row that it is a part of: `parts` runs share one.
void CopyRuns(const TensorView& from, int64_t per_run, int64_t parts,
              std::span<const int64_t> order, void* to) {
  if (from.empty()) return;
  const int64_t row_bytes = from.dim(2) * DTypeBytes(from.dtype());
  const int64_t bytes = per_run * row_bytes;
  auto* target = static_cast<std::byte*>(to);
  for (int64_t expert = 0; expert < from.dim(0); ++expert) {
    const auto* const source = from.As<std::byte>() + expert * from.dim(1) * row_bytes;
    for (const int64_t run : order) {
      std::memcpy(target, source + run / parts * bytes, static_cast<size_t>(bytes));
      target += bytes;
    }
  }
}

/// Whether the rows of an array [experts, rows, n] are equal in pairs.
bool AreInPairs(const TensorView& view) {
  if (view.empty()) return true;
  const int64_t row_bytes = view.dim(2) * DTypeBytes(view.dtype());
  for (int64_t row = 0; row < view.dim(0) * view.dim(1); row += 2) {
    const auto* const first = view.As<std::byte>() + row * row_bytes;
    if (std::memcmp(first, first + row_bytes, static_cast<size_t>(row_bytes)) != 0) return false;
  }
  return true;
}

void CopyAll(const TensorView& from, void* to) {
  if (!from.empty()) std::memcpy(to, from.data(), static_cast<size_t>(from.ByteCount()));
}

}  // namespace

bool CanMoveRuns(const WeightsSpec& spec, int64_t run) {
  if (run < 1 || spec.k % run != 0 || spec.sparsity != Sparsity::kDense || TransformsInput(spec)) {
    return false;
  }
  if (!GetFormatInfo(spec.format).quantized) return true;
  // 32 codes of every width fill whole words.
  constexpr int64_t kWholeWords = 32;
  const bool one_group = GroupCount(spec) <= 1 && spec.super_group_size == 0;
  return run % kWholeWords == 0 && (one_group || run % spec.group_size == 0);
}

WeightsSpec MovedRunsSpec(const WeightsSpec& spec, int64_t run) {
  WeightsSpec moved = spec;
  if (spec.super_group_size > 0) moved.super_group_size = std::gcd(spec.super_group_size, run);
  return moved;
}

Result<QuantizedWeights> MoveRuns(const QuantizedWeights& weights, int64_t run,
                                  std::span<const int64_t> from) {
  const WeightsSpec& spec = weights.spec;
  const WeightsSpec moved = MovedRunsSpec(spec, run);
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, AllocateWeights(moved));
  to.weights.codebook = weights.codebook;
  if (!GetFormatInfo(spec.format).quantized) {
    CopyRuns(weights.codes, run, 1, from, to.codes);
    return std::move(to.weights);
  }
  CopyRuns(weights.codes, run * GetFormatInfo(spec.format).bits / 32, 1, from, to.codes);
  const bool one_group = GroupCount(spec) <= 1;
  const int64_t whole[] = {0};
  const std::span<const int64_t> groups = one_group ? std::span<const int64_t>(whole) : from;
  const int64_t per_run = one_group ? 1 : run / spec.group_size;
  CopyRuns(weights.scales, per_run, 1, groups, to.scales);
  CopyRuns(weights.zeros, per_run, 1, groups, to.zeros);
  CopyRuns(weights.biases, per_run, 1, groups, to.biases);
  if (moved.super_group_size > 0) {
    // The runs of the smaller super groups.
    const int64_t per = run / moved.super_group_size;
    std::vector<int64_t> order;
    for (const int64_t source : from) {
      for (int64_t i = 0; i < per; ++i) order.push_back(source * per + i);
    }
    const int64_t parts = spec.super_group_size / moved.super_group_size;
    CopyRuns(weights.super_scales, 1, parts, order, to.super_scales);
    CopyRuns(weights.super_biases, 1, parts, order, to.super_biases);
  }
  if (spec.has_global_scale) {
    std::memcpy(to.global_scale, weights.global_scale.data(),
                static_cast<size_t>(weights.global_scale.ByteCount()));
  }
  return std::move(to.weights);
}

Result<QuantizedWeights> WidenSuperGroups(QuantizedWeights weights, int64_t most) {
  while (weights.spec.super_group_size > 0 && weights.spec.super_group_size * 2 <= most &&
         weights.spec.k % (weights.spec.super_group_size * 2) == 0 &&
         AreInPairs(weights.super_scales) && AreInPairs(weights.super_biases)) {
    WeightsSpec spec = weights.spec;
    spec.super_group_size *= 2;
    MARLIN_ASSIGN_OR_RETURN(WeightsBuffer to, AllocateWeights(spec));
    to.weights.codebook = weights.codebook;
    CopyAll(weights.codes, to.codes);
    CopyAll(weights.scales, to.scales);
    CopyAll(weights.biases, to.biases);
    CopyAll(weights.global_scale, to.global_scale);
    std::vector<int64_t> order;
    for (int64_t group = 0; group < SuperGroupCount(spec); ++group) order.push_back(2 * group);
    CopyRuns(weights.super_scales, 1, 1, order, to.super_scales);
    CopyRuns(weights.super_biases, 1, 1, order, to.super_biases);
    weights = std::move(to.weights);
  }
  return weights;
}

}  // namespace marlin
