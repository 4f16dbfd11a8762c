// The driver that runs kernels in the simulator, checked, thousands of times slower than a GPU.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "metal_sim/launch.h"

namespace marlin::metal {

/// Counters of a launch.
struct SimulatedLaunch {
  std::string function;
  metal_sim::Counters counters;
  int64_t slots = 0;  ///< Instruction slots of all threads (metal_sim/slot_count.h), if counted.
};

/// Launches run when they are given, in order or, with a seed, those that no barrier parts in a
/// random order; a barrier that is missing is found from what launches did (simulated_order.h).
/// The variables METAL_MARLIN_METAL_SIM_* (docs/howto/environment.md) seed the thread schedule, set
/// the probability that a thread is preempted at a memory access, choose fast math, and name a
/// folder whose kernels replace the embedded ones. Findings of the simulator are errors of Run.
/// `record`, which must outlive the driver, gets every launch; the driver is then not thread-safe.
/// `drops`, for tests, is asked at each barrier whether it is left out.
/// With `count_slots` launches run twice.
/// Errors: kUnsupported (no simulator in this build), kInvalidArgument (a variable), kIo.
Result<std::unique_ptr<Driver>> OpenSimulatedDriver(std::vector<SimulatedLaunch>* record = nullptr,
                                                    std::function<bool()> drops = nullptr,
                                                    bool count_slots = false);

}  // namespace marlin::metal
