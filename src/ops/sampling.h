// Range checks of the sampling options.
#pragma once

#include "marlin/sampling.h"
#include "marlin/status.h"

namespace marlin {

/// Errors: kInvalidArgument naming the option out of range.
Status CheckSampling(const SamplingOptions& options);

}  // namespace marlin
