// Range checks of the sampling options.
#pragma once

#include "marlin/sampling.h"
#include "marlin/status.h"

namespace marlin {

/// The largest penalties, and the smallest repetition penalty: within them the logits of a model
/// stay finite.
inline constexpr double kMostPenalty = 1e6;
inline constexpr double kMostRepetitionPenalty = 1000;
inline constexpr double kLeastRepetitionPenalty = 0.001;

/// Errors: kInvalidArgument naming the option out of range.
Status CheckSampling(const SamplingOptions& options);

}  // namespace marlin
