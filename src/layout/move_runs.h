// Weights whose k are moved in runs.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Whether the k of such weights can be moved in runs of this size: words and groups stay whole.
bool CanMoveRuns(const WeightsSpec& spec, int64_t run);

/// The spec of moved weights: two levels of scales have smaller super groups where runs cut them.
/// Precondition: CanMoveRuns.
WeightsSpec MovedRunsSpec(const WeightsSpec& spec, int64_t run);

/// Weights of which run i is run from[i] of the given ones, in every expert, with the values that
/// they had. Precondition: dense weights without a transform of the input that Validate accepts;
/// CanMoveRuns(spec, run); `from` has every run once. Errors: kOutOfMemory.
Result<QuantizedWeights> MoveRuns(const QuantizedWeights& weights, int64_t run,
                                  std::span<const int64_t> from);

/// Weights with the largest super groups of up to `most` k that hold the same values, and that are
/// a power of two times theirs; those with one level of scales as they are. Errors: kOutOfMemory.
Result<QuantizedWeights> WidenSuperGroups(QuantizedWeights weights, int64_t most);

}  // namespace marlin
