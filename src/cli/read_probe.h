// This machine's memory bandwidth, measured.
#pragma once

#include "marlin/status.h"

namespace marlin::cli {

/// Bytes per second that all threads together read from memory: the best of several passes over a
/// buffer far larger than the caches. Takes a fraction of a second. Errors: kOutOfMemory.
Result<double> MeasureReadBandwidth();

}  // namespace marlin::cli
