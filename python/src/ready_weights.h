// Prepared weights as Python holds them.
#pragma once

#include "core.h"
#include "marlin/weights.h"

namespace marlin::python {

/// Prepared weights and their device.
struct ReadyWeights {
  PreparedWeights weights;
  OpenDevice device;
};

}  // namespace marlin::python
