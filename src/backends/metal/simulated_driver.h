// The driver that runs kernels in the simulator, thousands of times slower than a GPU would,
// checked.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/metal/driver.h"
#include "metal_sim/launch.h"

namespace marlin::metal {

/// A launch and its counters.
struct SimulatedLaunch {
  std::string function;
  metal_sim::Counters counters;
};

/// Environment: MARLIN_METAL_SIM_SEED draws the order of threads, with MARLIN_METAL_SIM_PREEMPTION
/// interrupting them at accesses with that probability; MARLIN_METAL_SIM_FAST_MATH=1 compiles as
/// Metal does by default. MARLIN_METAL_SIM_SOURCES names a folder (a copy of src/) to take the
/// kernels from instead of those that were built in. A finding of the simulator is an error of
/// Run. `record`, which must outlive the driver, gets every launch; then only one thread may call.
/// Errors: kUnsupported (no simulator in this build), kInvalidArgument (a variable), kIo.
Result<std::unique_ptr<Driver>> OpenSimulatedDriver(std::vector<SimulatedLaunch>* record = nullptr);

}  // namespace marlin::metal
