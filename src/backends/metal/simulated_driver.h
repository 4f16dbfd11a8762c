// The driver that runs kernels in the simulator, checked, thousands of times slower than a GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/metal/driver.h"
#include "metal_sim/launch.h"

namespace marlin::metal {

/// Counters of a launch.
struct SimulatedLaunch {
  std::string function;
  metal_sim::Counters counters;
};

/// Environment: MARLIN_METAL_SIM_SEED seeds the thread schedule, MARLIN_METAL_SIM_PREEMPTION is the
/// probability that a thread is preempted at a memory access; MARLIN_METAL_SIM_FAST_MATH=1 compiles
/// with fast math, Metal's default. MARLIN_METAL_SIM_SOURCES names a folder (a copy of src/) whose
/// kernels replace the embedded ones. Findings of the simulator are errors of Run. `record`, which
/// must outlive the driver, gets every launch; the driver is then not thread-safe. Errors:
/// kUnsupported (no simulator in this build), kInvalidArgument (a variable), kIo.
Result<std::unique_ptr<Driver>> OpenSimulatedDriver(std::vector<SimulatedLaunch>* record = nullptr);

}  // namespace marlin::metal
