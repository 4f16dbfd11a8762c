// Measured memory bandwidth of this machine.
#pragma once

#include "marlin/status.h"

namespace marlin::bench {

/// Bytes per second that all threads together read from memory: the best of several passes of the
/// probe that `bench` uses. Errors: from Device::Open, kOutOfMemory.
Result<double> MeasureReadBandwidth();

}  // namespace marlin::bench
